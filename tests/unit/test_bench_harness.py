"""The shared parts of all benchmarks: settings and options, sweeps, turns, tables, and the report file."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from echelon.bench import harness, processes
from echelon.bench.harness import (
    Measure,
    Runs,
    Setting,
    Spread,
    Sweep,
    amount,
    in_turns,
    machine,
    measure_table,
    option,
    repeat,
    write_report,
)
from echelon.cli import output
from echelon.cli.bench import BENCHES, SWEPT, make_benchmark, make_parser, run, run_benchmark
from echelon.engines.process import Failure
from echelon.errors import ConfigError, RunError
from telling import Command


@dataclass(frozen=True, slots=True)
class Toy(Setting):
    """A setting of every type."""

    size: int = option(8, "how large", least=1)
    rate: float = option(2.5, "how fast", above=0)
    together: bool = option(True, "whether all at once")
    kind: str = option("red", "which", choices=("red", "blue"))
    folder: str = option("", "where")

    def check(self) -> None:
        if self.size > 100 and self.kind == "blue":
            raise ConfigError("blue ones are small.")


def parse(**texts: str) -> Sweep[Toy]:
    return Sweep.parse(Toy, {name: each.default for name, each in Toy.options().items()} | texts, ("size", "kind"))


class TestSettings:
    def test_text_is_read_in_the_type_of_the_default(self) -> None:
        (setting,) = parse(size=" 9 ", rate="1e3", together="no", folder="a,b").settings
        assert setting == Toy(size=9, rate=1000.0, together=False, folder="a,b")
        assert parse().settings == (Toy(),) and parse().varied == ()

    @pytest.mark.parametrize(
        ("word", "value"), [("yes", True), ("T", True), ("1", True), ("N", False), ("False", False)]
    )
    def test_words_for_true_and_false(self, word: str, value: bool) -> None:
        assert parse(together=word).settings[0].together is value

    @pytest.mark.parametrize(
        ("texts", "message"),
        [
            ({"size": "0"}, "size=0 must be at least 1"),
            ({"size": "x"}, "size='x' is not a number. Write --size 8"),
            ({"size": "1,"}, "size='' is not a number"),
            ({"rate": "0"}, "rate=0.0 must be a number above 0"),
            ({"rate": "nan"}, "rate=nan must be a number above 0"),
            ({"rate": "inf"}, "rate=inf must be a number above 0"),
            ({"rate": "1,2"}, "rate='1,2' is not a number"),
            ({"together": "maybe"}, "together='maybe': Boolean value expected"),
            ({"kind": "green"}, "kind='green' is unknown; use one of red, blue"),
            ({"size": "101", "kind": "red,blue"}, "blue ones are small"),
        ],
    )
    def test_what_cannot_be_is_refused(self, texts: dict[str, str], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            parse(**texts)

    def test_lists_are_combined(self) -> None:
        sweep = parse(size="1, 2", kind="red,blue")
        assert sweep.varied == ("size", "kind")
        assert [(each.size, each.kind) for each in sweep.settings] == [(1, "red"), (1, "blue"), (2, "red"), (2, "blue")]
        assert sweep.values(sweep.settings[1]) == {"size": 1, "kind": "blue"}
        assert sweep.common == {"rate": 2.5, "together": True, "folder": ""}

    def test_only_so_many_lists_are_allowed(self) -> None:
        with pytest.raises(ConfigError, match="Only 1 x axis graph variable allowed, but size=1,2 and kind=red,blue"):
            Sweep.parse(Toy, {"size": "1,2", "kind": "red,blue"}, ("size", "kind"), max_varied=1)


class Clock:
    """Stands in for `time`: only the work moves it, and half of what passes is processor time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def process_time(self) -> float:
        return self.now_s / 2

    def work(self) -> None:
        self.now_s += 0.5


class TestMeasuring:
    def test_work_is_repeated_for_its_time_and_at_least_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = Clock()
        monkeypatch.setattr(harness, "time", clock)
        assert repeat(clock.work, 1.75) == harness.Repeated(count=4, wall_s=2.0, cpu_s=1.0)
        assert repeat(clock.work, 1e-9).count == 1

    def test_turns_come_in_both_orders(self) -> None:
        assert list(in_turns("ab", 3)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]

    def test_the_ratio_compares_neighbours_in_time(self) -> None:
        measure = Measure.of("insert", "items/s", {"echelon": [2.0, 30.0, 8.0], "cpprb": [1.0, 10.0, 4.0]})
        assert measure.ratio == 2.0 and measure.by["echelon"] == Spread(8.0, 5.0, 19.0)
        assert Measure.of("insert", "items/s", {"echelon": [2.0]}).ratio is None
        assert Measure.of("insert", "items/s", {"echelon": [2.0], "cpprb": [0.0]}).ratio is None


class TestReporting:
    def test_numbers_are_told_as_people_read_them(self) -> None:
        shown = {
            12345.6: "12,346",
            99.56: "99.56",
            1.23456: "1.235",
            7: "7",
            1048576: "1,048,576",
            "x": "x",
            0.6: "0.6",
        }
        assert [amount(value) for value in shown] == list(shown.values())
        assert amount(None) == "" and amount(True) == "True"

    def test_a_table_has_medians_quartiles_and_the_comparison(self) -> None:
        measure = Measure.of("insert", "items/s", {"echelon": [1e6, 2e6, 3e6], "cpprb 1": [1e6, 1e6, 1e6]})
        head, row = measure_table([measure], "ratio", lambda each: each.ratio)
        assert head.split() == ["echelon", "quartiles", "cpprb", "1", "quartiles", "ratio"]
        assert row.split()[2:6] == ["2,000,000", "1,500,000", "–", "2,500,000"] and row.endswith("2.00×")
        (alone, _) = measure_table([Measure.of("insert", "items/s", {"echelon": [1.0]})], "ratio", lambda each: None)
        assert "ratio" not in alone

    def test_a_report_replaces_the_file_and_is_strict_json(self, tmp_path: Path) -> None:
        path = tmp_path / "r.json"
        path.write_text("old")
        write_report(path, {"a": np.float32(0.5), "b": float("nan"), "c": (1, Path("x"))})
        assert json.loads(path.read_text()) == {"a": 0.5, "b": None, "c": [1, "x"]}
        assert list(tmp_path.iterdir()) == [path]

    def test_the_machine_is_named(self) -> None:
        found = machine()
        assert set(found) == {"hardware", "versions"} and set(found["versions"]) >= {"python", "torch", "git"}
        assert set(found["hardware"]) == {"cores", "memory_gib", "processor", "gpu"} and found["hardware"]["cores"] >= 1

    def test_runs_pair_settings_with_their_results(self) -> None:
        runs: Runs[Toy, str] = Runs(parse(size="1,2,3"), ["one", "two"])
        assert [(setting.size, result) for setting, result in runs] == [(1, "one"), (2, "two")]
        assert runs.newest == (Toy(size=2), "two")


class TestProcesses:
    def test_errors_of_ours_stay_what_they_are_and_others_bring_their_traceback(self) -> None:
        ours = processes.error_of("agent", Failure("ConfigError", "no GPU.", "Traceback ...", expected=True))
        other = processes.error_of("agent", Failure("KeyError", "'x'", "Traceback ...", expected=False))
        assert isinstance(ours, ConfigError) and str(ours) == "no GPU."
        assert isinstance(other, RunError) and "agent failed: KeyError: 'x'" in str(other) and "Traceback" in str(other)

    @pytest.mark.parametrize(("code", "how"), [(-9, "was ended by SIGKILL"), (3, "left with code 3")])
    def test_how_a_process_ended_is_told(self, code: int, how: str) -> None:
        assert how in processes.ended("agent", code)


# The command line of every benchmark.


@pytest.mark.parametrize("name", SWEPT)
def test_every_option_has_its_spellings_its_help_and_its_default(name: str) -> None:
    benchmark = make_benchmark(name)
    actions = {action.dest: action for action in make_parser(benchmark)._actions}
    options = benchmark.setting.options()
    assert set(benchmark.swept) <= set(options) and benchmark.name == name
    for field, each in options.items():
        action = actions[field]
        assert f"--{field.replace('_', '-')}" in action.option_strings and action.default == each.default
        assert each.help in str(action.help) and each.shown in str(action.help)
        assert benchmark.setting.parse(field, each.default.split(",")[0]) is not None
    assert benchmark.output in actions


def test_benchmarks_are_listed_and_a_wrong_name_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name:<8} {text}" in listed for name, text in BENCHES.items())
    with pytest.raises(ConfigError, match=r"no benchmark 'speed'\. Benchmarks: train, async, rpc"):
        run(["speed"])


WRONG = [
    (
        "rpc --world_size 10,20 --batch True,False",
        "Only 1 x axis graph variable allowed, but world_size=10,20 and batch",
    ),
    ("rpc --world_size 10,2", "world_size=2 leaves no observer"),
    ("rpc --nlayers=-1", "nlayers=-1 must be at least 0"),
    ("rpc --state_size 10x20", "state_size='10x20' is not a list of sizes above 0"),
    ("rpc --state_size 10-0", "state_size='10-0'"),
    ("rpc --transport pigeon", "transport='pigeon' is unknown; use one of shm, tcp, torch-rpc, ray"),
    ("rpc --device tpu", "device='tpu' is unknown"),
    ("rpc --max_wait_us nan", "max_wait_us=nan must be a number above 0"),
    ("rpc --master_port 65536", "master_port='65536' is not a port"),
    ("rpc --world 10", "unrecognized arguments"),
    ("rpc --output_file_path nowhere/report.json", "--output_file_path nowhere/report.json cannot be written"),
    ("rpc --output_file_path .", "cannot be written"),
    ("replay --batch x", "batch='x' is not a number. Write --batch 512"),
    ("replay --alpha 0", "alpha=0.0 must be above 0"),
    ("replay --peer x", "peer='x' is unknown; use one of cpprb, none"),
    ("replay --frames 84x84", "is not height x width x stack. Write, for example, --frames 84x84x4"),
    ("replay --frames 2x3x4", "fewer than 8 pixels"),
    ("replay --writers 4 --shards 2", "every writer has its own shard"),
    ("replay --frames 84x84x4 --writers 2", "in one process with one shard, not with writers=2"),
    ("replay --capacity 100", "must hold a batch of 512 and a chunk of 64. Raise --capacity"),
    ("replay --capacity 2000 --writers 4", "gives each of 4 shards 500 items"),
    ("replay --shm-dir /nowhere --writers 1", "shm_dir=/nowhere is not a folder"),
    ("replay --output /nowhere/r.json", "--output /nowhere/r.json cannot be written"),
    ("replay --capacity 1000000000000 --batch 1", "GB are free. Lower --capacity"),
    ("replay --capacity 1000000000000 --frames 84x84x4", "GB in /dev/shm, but only"),
    ("replay --capacity 1024,1000000000000 --writers 1", "needs 1"),
    ("world --small 3", "small=3 must be at least 4"),
    ("world --small 1024,2048", "small='1024,2048' is not a number"),
    ("world --transport ipc", "transport='ipc' is unknown; use one of local, tcp"),
    ("world --output /nowhere/r.json", "--output /nowhere/r.json cannot be written"),
    ("act --batch 64,many", "batch='many' is not a number"),
    ("act --batch 10 --feeders 4", "batch=10 is not a multiple of 4 feeders"),
    ("act --network lstm", "network='lstm' is unknown; use one of mlp, cnn"),
    ("act --seconds 0", "seconds=0.0 must be a number above 0"),
    ("act --json /nowhere/report.json", "--json /nowhere/report.json cannot be written"),
    ("act --device cpu --precision bfloat16 --batch 8", "precision=bfloat16 needs a GPU"),
    ("train impala CartPole-v1 --json /nowhere/x.json", "--json /nowhere/x.json cannot be written"),
    ("train impala CartPole-v1 --seconds 0", "seconds=0 must be above 0"),
    ("train impala CartPole-v1 --minutes 1", "--seconds S, not with --minutes"),
    ("train impalla CartPole-v1", "no preset 'impalla'"),
    ("plot none.json", "none.json cannot be read: No such file"),
    ("plot", "required: REPORT"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[arguments for arguments, _ in WRONG])
def test_a_mistake_is_told_before_anything_runs(command: Command, arguments: str, message: str) -> None:
    told = command("bench", *arguments.split())
    assert told.code == 2 and message in told.err and told.out == ""


def test_what_runs_beside_the_measured_processes_needs_no_torch() -> None:
    names = ("cli.bench", "bench.rpc_processes", "bench.act_feeder", "bench.replay_frames", "bench.replay_writers")
    modules = ", ".join(f"echelon.{name}" for name in (*names, "bench.act", "bench.world", "transport.act_listener"))
    code = f"import {modules}, sys\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# The progress.


def test_progress_without_a_terminal_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(output, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with output.progress_bar("frames (1/1)", "transitions") as show:
        for second in range(26):
            now[0] = float(second)
            show(second * 100_000, 2_600_000)
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines() == [
        "frames (1/1): 200,000 of 2,600,000 transitions",
        "frames (1/1): 1,200,000 of 2,600,000 transitions",
        "frames (1/1): 2,200,000 of 2,600,000 transitions",
    ]


def make_toy(results: dict[int, Any]) -> harness.Benchmark[Toy, Any]:
    """A benchmark whose runs do nothing, to see what the command does around them."""

    class ToyBenchmark(harness.Benchmark[Toy, Any]):
        name, text, setting, swept = "toy", "Nothing is measured.", Toy, ("size",)

        def measure(self, setting: Toy, progress: harness.Progress) -> Any:
            progress(1, 1)
            if isinstance(results[setting.size], Exception):
                raise results[setting.size]
            return results[setting.size]

        def unit(self, setting: Toy) -> str:
            return "things"

        def head(self, sweep: Sweep[Toy]) -> str:
            return f"{len(sweep.settings)} to come"

        def newest(self, runs: Runs[Toy, Any]) -> str:
            return f"found {runs.newest[1]}"

        def summary(self, runs: Runs[Toy, Any]) -> str:
            return f"all {sum(runs.results)}"

        def fault(self, runs: Runs[Toy, Any]) -> str:
            return "too much" if sum(runs.results) > 9 else ""

        def report(self, runs: Runs[Toy, Any]) -> dict[str, Any]:
            return {"results": runs.results, **runs.sweep.common}

    return ToyBenchmark()


class TestARun:
    def test_every_setting_is_measured_printed_and_written(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "r.json"
        assert run_benchmark(make_toy({1: 2, 3: 4}), ["--size", "1,3", "--output", str(path)]) == 0
        out, err = capsys.readouterr()
        assert out.splitlines() == ["2 to come", "found 2", "found 4", "all 6"] and f"the report is in {path}" in err
        report = json.loads(path.read_text())
        assert report["results"] == [2, 4] and "size" not in report and report["rate"] == 2.5

    def test_what_was_measured_before_a_failure_is_kept(self, tmp_path: Path) -> None:
        path = tmp_path / "r.json"
        with pytest.raises(RunError, match="broken"):
            run_benchmark(make_toy({1: 2, 3: RunError("broken")}), ["--size", "1,3", "--output", str(path)])
        assert json.loads(path.read_text())["results"] == [2]

    def test_a_fault_is_told_and_fails_the_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run_benchmark(make_toy({8: 10}), []) == 1
        assert capsys.readouterr().err.endswith("echelon: too much\n")
