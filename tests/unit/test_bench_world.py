"""`echelon bench world`: its arguments, how the libraries take turns, and what is told."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from echelon.bench.replay.setting import Measure
from echelon.bench.world import pair
from echelon.bench.world.report import Report, shown
from echelon.bench.world.run import run
from echelon.bench.world.setting import Setting
from echelon.bench.world.turn import UNITS, measure
from echelon.cli.bench_world import HELP, make_parser
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


class TestArguments:
    def test_every_argument_has_a_help_with_its_default(self) -> None:
        actions = {action.dest: action for action in make_parser()._actions}
        for field in dataclasses.fields(Setting):
            assert HELP[field.name] in str(actions[field.name].help)
            assert str(field.default) in str(actions[field.name].help)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--small", "3"], "small=3 must be at least 4"),
            (["--rounds", "0"], "rounds=0 must be at least 1"),
            (["--large", "x"], "large='x' is not a number. Write --large 4194304"),
            (["--seconds", "nan"], "seconds=nan must be a number above 0"),
            (["--transport", "ipc"], "transport='ipc' is not known; there are local, tcp"),
            (["--peer", "x"], "peer='x' is not known; there are torch-rpc, none"),
            (["--output", "/nowhere/r.json"], "--output /nowhere/r.json cannot be written"),
            (["--what", "1"], "unrecognized arguments"),
        ],
    )
    def test_what_cannot_work_is_said(self, command: Command, arguments: list[str], message: str) -> None:
        told = command("bench", "world", *arguments)
        assert told.code == 2 and message in told.err


class TestATurn:
    def test_it_has_every_figure(self) -> None:
        caller = Near()
        figures = measure(Setting(seconds=0.01, in_flight=7), caller)
        assert list(figures) == list(UNITS) and all(value > 0 for value in figures.values())
        assert figures["small round trip p50"] <= figures["small round trip p99"]
        assert caller.most == 7 and caller.under_way == 0

    def test_an_echo_that_is_none_ends_it(self) -> None:
        with pytest.raises(AssertionError, match="an echo is not what was sent"):
            measure(Setting(seconds=0.01), Near(broken=True))

    def test_what_a_library_fails_with_is_told(self) -> None:
        with pytest.raises(RunError, match=r"echelon left with code 1(.|\n)*allocate"):
            pair.take_turn("echelon", Setting(large=1 << 50))

    def test_over_tcp_it_has_every_figure_too(self) -> None:
        figures = pair.take_turn("echelon", Setting(large=100_000, seconds=0.02, in_flight=4, transport="tcp"))
        assert list(figures) == list(UNITS) and all(value > 0 for value in figures.values())


class TestARun:
    def test_the_libraries_take_turns_in_both_orders(self, monkeypatch: pytest.MonkeyPatch) -> None:
        turns: list[str] = []

        def take_turn(library: str, setting: Setting) -> dict[str, float]:
            turns.append(library)
            return {figure: (1.0 if library == "echelon" else 4.0) * len(turns) for figure in UNITS}

        monkeypatch.setattr(pair, "take_turn", take_turn)
        measures = run(Setting(rounds=2), ignore)
        assert turns == ["echelon", "torch-rpc", "torch-rpc", "echelon"]
        assert [measure.name for measure in measures] == list(UNITS)
        assert measures[0].by["echelon"].median == 2.5 and measures[0].ratio == pytest.approx((1 / 8 + 4 / 12) / 2)
        turns.clear()
        assert run(Setting(rounds=3, peer="none"), ignore)[0].ratio is None and turns == ["echelon"] * 3

    def test_the_table_says_how_many_times_as_good_ours_is(self) -> None:
        rounds = {"echelon": [10.0, 20.0, 90.0], "torch-rpc": [90.0, 80.0, 40.0]}
        faster = Measure.of("small round trip p50", "us", rounds)
        slower = Measure.of("large echo", "GB/s", rounds)
        table = Report(Setting(), (faster, slower)).table().splitlines()
        assert " 20 " in table[-1] and " 80 " in table[-1], "the medians"
        assert table[-2].endswith("4.0×") and table[-1].endswith("0.2×"), "of which it is the ratio"
        assert "quartiles" in table[2]

    def test_it_is_not_drawn(self, command: Command, tmp_path: Path) -> None:
        measure = Measure.of("large echo", "GB/s", {"echelon": [1.0]})
        Report(Setting(), (measure,)).write(tmp_path / "r.json")
        told = command("bench", "plot", str(tmp_path / "r.json"))
        assert told.code == 2
        assert "is a report of `echelon bench world`" in told.err and "draws reports of `rpc` and `replay`" in told.err
        assert (shown(12345.6), shown(99.6), shown(1.234)) == ("12,346", "99.6", "1.23")

    def test_both_are_measured_and_written_down(self, command: Command, tmp_path: Path) -> None:
        told = command("bench", "world", *TINY, "--output", str(tmp_path / "r.json"))
        assert told.code == 0 and "torch-rpc" in told.out and "large echo" in told.out
        report = json.loads((tmp_path / "r.json").read_text())
        assert report["bench"] == "world" and report["setting"]["large"] == 100_000
        assert {measure["name"]: set(measure["by"]) for measure in report["measures"]} == {
            name: {"echelon", "torch-rpc"} for name in UNITS
        }
