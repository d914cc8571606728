"""`echelon bench world`: alternating turns, the measurement of a turn, and the output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from echelon.bench import world
from echelon.bench.harness import Measure, Runs, Sweep
from echelon.bench.world import UNITS, WorldBenchmark, WorldSetting, take_turn
from echelon.bench.world_pair import measure
from echelon.errors import RunError
from telling import Command

TINY = ["--seconds", "0.02", "--rounds", "1", "--large", "100000", "--in-flight", "4"]


def ignore(num_done: int, total: int) -> None:
    assert 0 <= num_done <= total


class Near:
    """A callee in the same process; `broken` ones answer with something else."""

    def __init__(self, broken: bool = False) -> None:
        self.broken, self.under_way, self.most = broken, 0, 0

    def call(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + self.broken

    def begin(self, tensor: torch.Tensor) -> Near:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        return self

    def wait(self) -> None:
        self.under_way -= 1


class TestATurn:
    def test_it_has_every_figure(self) -> None:
        caller = Near()
        figures = measure(WorldSetting(seconds=0.01, in_flight=7), caller)
        assert list(figures) == list(UNITS) and all(value > 0 for value in figures.values())
        assert figures["small round trip p50"] <= figures["small round trip p99"]
        assert caller.most == 7 and caller.under_way == 0

    def test_an_echo_that_is_none_ends_it(self) -> None:
        with pytest.raises(AssertionError, match="an echo differs from its tensor"):
            measure(WorldSetting(seconds=0.01), Near(broken=True))

    def test_what_a_process_fails_with_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(world, "PAIR", "echelon.bench.nowhere")
        with pytest.raises(RunError, match=r"echelon exited with code 1(.|\n)*caller: (.|\n)*No module named"):
            take_turn("echelon", WorldSetting())


class TestARun:
    def test_the_libraries_take_turns_in_both_orders(self, monkeypatch: pytest.MonkeyPatch) -> None:
        turns: list[str] = []

        def take_turn(library: str, setting: WorldSetting) -> dict[str, float]:
            turns.append(library)
            return {figure: (1.0 if library == "echelon" else 4.0) * len(turns) for figure in UNITS}

        monkeypatch.setattr(world, "take_turn", take_turn)
        measures = WorldBenchmark().measure(WorldSetting(rounds=2), ignore)
        assert turns == ["echelon", "torch-rpc", "torch-rpc", "echelon"]
        assert [measure.name for measure in measures] == list(UNITS)
        assert measures[0].by["echelon"].median == 2.5 and measures[0].ratio == pytest.approx((1 / 8 + 4 / 12) / 2)
        turns.clear()
        alone = WorldBenchmark().measure(WorldSetting(rounds=3, peer="none"), ignore)
        assert alone[0].ratio is None and turns == ["echelon"] * 3

    def test_the_table_says_how_many_times_as_good_ours_is(self) -> None:
        rounds = {"echelon": [10.0, 20.0, 90.0], "torch-rpc": [90.0, 80.0, 40.0]}
        faster = Measure.of("small round trip p50", "us", rounds)
        slower = Measure.of("large echo", "GB/s", rounds)
        table = WorldBenchmark().newest(Runs(Sweep((WorldSetting(),)), [[faster, slower]])).splitlines()
        assert " 20 " in table[-1] and " 80 " in table[-1], "the medians"
        assert table[-2].endswith("4.00×") and table[-1].endswith("0.25×"), "of which it is the ratio"
        assert "quartiles" in table[2]

    @pytest.mark.parametrize("transport", ["local", "tcp"])
    def test_ours_is_measured_and_written_down(self, command: Command, tmp_path: Path, transport: str) -> None:
        path = tmp_path / "r.json"
        told = command("bench", "world", *TINY, "--transport", transport, "--peer", "none", "--output", str(path))
        assert told.code == 0 and "large echo" in told.out and str(path) in told.err
        report = json.loads(path.read_text())
        assert list(report) == ["bench", "setting", "measures", "hardware", "versions"]
        assert report["bench"] == "world" and report["setting"]["large"] == 100_000
        assert {measure["name"]: list(measure["by"]) for measure in report["measures"]} == {
            name: ["echelon"] for name in UNITS
        }

    @pytest.mark.full
    def test_torch_rpc_is_measured_beside_ours(self, command: Command, tmp_path: Path) -> None:
        told = command("bench", "world", *TINY, "--output", str(tmp_path / "r.json"))
        assert told.code == 0 and "torch-rpc" in told.out and "better" in told.out
        for each in json.loads((tmp_path / "r.json").read_text())["measures"]:
            assert set(each["by"]) == {"echelon", "torch-rpc"}
