"""`echelon bench rpc` without its processes: arguments, the policy, the percentiles, the report and the lines."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from echelon.bench.rpc.policy import AgentPolicy
from echelon.bench.rpc.report import METRICS, Report, metrics_of
from echelon.bench.rpc.setting import TRANSPORTS, Raw, Setting, backend_of
from echelon.cli.bench import BENCHES
from echelon.cli.bench_rpc import make_parser, parse_settings
from echelon.cli.main import main
from echelon.cli.output import progress_bar
from echelon.errors import ConfigError

SEED_ARGUMENTS = {
    "world_size": 10,
    "master_addr": "127.0.0.1",
    "master_port": "29501",
    "batch": True,
    "state_size": "10-20-10",
    "nlayers": 5,
    "out_features": 10,
    "output_file_path": "benchmark_report.json",
}


def only(*arguments: str) -> Setting:
    settings, x_axis_name = parse_settings(arguments)
    assert x_axis_name == "" and len(settings) == 1
    return settings[0]


class TestArguments:
    def test_the_defaults_are_those_of_the_benchmark_it_follows(self) -> None:
        values = dataclasses.asdict(only())
        assert values == values | SEED_ARGUMENTS | {"episodes": 10, "steps": 100, "transport": "shm", "device": "cpu"}
        assert list(values)[: len(SEED_ARGUMENTS)] == list(SEED_ARGUMENTS)

    @pytest.mark.parametrize("spelling", ["--world_size", "--world-size", "-world_size"])
    def test_names_are_taken_with_dashes_and_underscores(self, spelling: str) -> None:
        assert only(f"{spelling}=4").world_size == only(spelling, "4").world_size == 4

    def test_every_argument_has_all_three_spellings_and_a_help(self) -> None:
        actions = {action.dest: action for action in make_parser()._actions}
        for field in dataclasses.fields(Setting):
            spellings = {f"--{field.name}", f"--{field.name.replace('_', '-')}", f"-{field.name}"}
            assert set(actions[field.name].option_strings) == spellings
            assert str(field.default) in str(actions[field.name].help)

    def test_derived_sizes(self) -> None:
        setting = only("--world_size", "7", "--state_size", "2-3-4", "--episodes", "2", "--steps", "10")
        assert (setting.num_observers, setting.dims, setting.num_inputs) == (5, (2, 3, 4), 24)
        assert (setting.num_warm_up, setting.num_measured, setting.num_requests) == (10, 20, 150)

    @pytest.mark.parametrize(
        ("argument", "texts", "values"),
        [
            ("world_size", "10,20", [10, 20]),
            ("state_size", "10-20-10,4", ["10-20-10", "4"]),
            ("nlayers", "0,1,2", [0, 1, 2]),
            ("out_features", "5, 10", [5, 10]),
            ("batch", "True,False", [True, False]),
            ("transport", "shm,torch-rpc", ["shm", "torch-rpc"]),
            ("device", "cpu,cuda:0", ["cpu", "cuda:0"]),
            ("steps", "1,2", [1, 2]),
            ("episodes", "3,4", [3, 4]),
            ("max_wait_us", "100,1e4", [100.0, 1e4]),
        ],
    )
    def test_one_list_becomes_the_x_axis(self, argument: str, texts: str, values: list[Any]) -> None:
        settings, x_axis_name = parse_settings([f"--{argument}={texts}"])
        assert x_axis_name == argument
        assert [getattr(setting, argument) for setting in settings] == values
        assert settings == [dataclasses.replace(Setting(), **{argument: value}) for value in values]

    @pytest.mark.parametrize("word", ["yes", "True", "t", "Y", "1"])
    def test_words_for_true(self, word: str) -> None:
        assert only("--batch", word).batch is True

    @pytest.mark.parametrize("word", ["no", "False", "f", "N", "0"])
    def test_words_for_false(self, word: str) -> None:
        assert only("--batch", word).batch is False

    def test_a_comma_in_a_path_is_no_list(self) -> None:
        assert only("--output_file_path", "a,b.json").output_file_path == "a,b.json"

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (
                "--world_size 10,20 --batch True,False",
                "Only 1 x axis graph variable allowed.*world_size=10,20 and batch",
            ),
            ("--batch maybe", "batch='maybe': Boolean value expected"),
            ("--world_size 2", "world_size=2 leaves no observer.*3"),
            ("--world_size 10,2", "world_size=2 leaves no observer"),
            ("--world_size ten", "world_size='ten' is not a number"),
            ("--world_size 10,", "world_size='' is not a number"),
            ("--nlayers -1", "nlayers"),
            ("--nlayers=-1", "nlayers=-1 must be at least 0"),
            ("--out_features 0", "out_features=0 must be at least 1"),
            ("--state_size 10x20", "state_size='10x20'.*10-20-10"),
            ("--state_size 10-0", "state_size='10-0'"),
            ("--steps 0", "steps=0"),
            ("--episodes 0", "episodes=0"),
            ("--transport pigeon", "transport='pigeon' is not known; there are shm, tcp, torch-rpc, ray"),
            ("--device tpu", "device='tpu' is not known"),
            ("--max_wait_us 0", "max_wait_us=0"),
            ("--max_wait_us nan", "max_wait_us=nan"),
            ("--master_port http", "master_port='http' is not a port"),
            ("--master_port 65536", "master_port='65536' is not a port"),
            ("--world 10", "unrecognized arguments"),
            ("--output_file_path nowhere/report.json", "--output_file_path nowhere/report.json cannot be written"),
            ("--output_file_path .", "cannot be written"),
        ],
    )
    def test_mistakes_are_told_before_anything_runs(
        self, arguments: str, complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("echelon.cli.bench_rpc.backend_of", lambda transport: pytest.fail("it ran"))
        assert main(["bench", "rpc", *arguments.split()]) == 2
        out, err = capsys.readouterr()
        assert re.search(complaint, err) and out == ""


def test_every_benchmark_and_every_transport_names_a_function_that_exists() -> None:
    for _, entry in BENCHES.values():
        module, _, function = entry.partition(":")
        assert callable(getattr(import_module(module), function)), entry
    for transport in ("shm", "tcp", "torch-rpc"):
        assert callable(backend_of(transport))
    assert set(TRANSPORTS) == {"shm", "tcp", "torch-rpc", "ray"}


def test_observers_and_the_coordinator_need_no_torch() -> None:
    modules = "echelon.bench.rpc.observer, echelon.bench.rpc.coordinator, echelon.cli.bench_rpc, sys"
    program = f"import {modules}\nassert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


class TestPolicy:
    def states(self, count: int, setting: Setting) -> np.ndarray[Any, Any]:
        return np.random.default_rng(0).random((count, setting.num_inputs), np.float32)

    @pytest.mark.parametrize("nlayers", [0, 2])
    def test_actions_come_as_often_as_the_softmax_over_actions_says(self, nlayers: int) -> None:
        setting = Setting(state_size="2-3", nlayers=nlayers, out_features=4)
        policy = AgentPolicy(setting)
        assert len(policy.weights) == nlayers + 1
        policy.weights[-1].mul_(8.0)  # far from uniform
        states = self.states(3, setting)
        hidden = torch.from_numpy(states)
        for weight, bias in zip(policy.weights, policy.biases, strict=True):
            hidden = torch.nn.functional.linear(hidden, weight, bias)
        expected = torch.softmax(hidden, -1).numpy()
        counts, draws = np.zeros((3, 4)), 4000
        for _ in range(draws):
            counts[np.arange(3), policy.choose(states)] += 1
        deviation = np.sqrt(expected * (1 - expected) / draws)
        assert (np.abs(counts / draws - expected) < 5 * deviation).all()
        assert expected.max() > 0.5  # so that uniform actions would fail

    def test_results_are_written_over_and_only_batch_sizes_are_remembered(self) -> None:
        setting = Setting(state_size="4", out_features=3)
        policy = AgentPolicy(setting)
        first = policy.choose(self.states(2, setting))
        for count in (1, 2, 3) * 10:
            actions = policy.choose(self.states(count, setting))
            assert actions.shape == (count,) and ((actions >= 0) & (actions < 3)).all()
        assert policy.choose(self.states(2, setting)) is first and len(policy._choosers) == 3

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, so nothing is refused")
    def test_a_gpu_that_is_not_there_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="device=cuda is not there"):
            AgentPolicy(Setting(device="cuda"))


def sample(num_observers: int = 2, **extra: Any) -> Raw:
    observers = np.arange(1, 10 * num_observers + 1, dtype=np.float64).reshape(num_observers, 10) * 1e-3
    return Raw(
        agent_latency_s=np.array([0.001, 0.002, 0.004, 0.0123456789]),
        agent_batch=np.array([2, 2, 2, 1]),
        observer_latency_s=observers,
        elapsed_s=0.5,
        extra=extra,
    )


class TestReport:
    def test_percentiles(self) -> None:
        metrics = metrics_of(sample())
        assert list(metrics) == list(METRICS)
        assert all(list(values) == [50, 75, 90, 95] for values in metrics.values())
        assert metrics["agent latency"][50] == 0.003
        assert metrics["agent latency"][95] == round(0.004 + 0.85 * (0.0123456789 - 0.004), 6)  # between the last two
        # 2/0.001, 2/0.002, 2/0.004, 1/0.0123...: percentiles of the single reciprocals, whole numbers
        assert metrics["agent throughput"][50] == 750 and isinstance(metrics["agent throughput"][50], int)
        assert metrics["observer latency"][50] == 0.0105
        assert metrics["observer throughput"][50] == math.floor((1 / 0.010 + 1 / 0.011) / 2)
        assert metrics["observer throughput"][95] > metrics["observer throughput"][50]  # the fast tail

    def test_a_sweep_has_its_values_in_the_results_and_not_above_them(self, tmp_path: Path) -> None:
        settings, x_axis_name = parse_settings(["--world_size", "4,5"])
        report = Report(settings, x_axis_name)
        for setting in settings:
            report.add(setting, sample(setting.num_observers))
        report.write(tmp_path / "report.json")
        written = json.loads((tmp_path / "report.json").read_text())
        assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
        assert written["x_axis_name"] == "world_size" and "world_size" not in written
        assert {key: written[key] for key in SEED_ARGUMENTS if key in written} == {
            key: value for key, value in SEED_ARGUMENTS.items() if key != "world_size"
        }
        assert [set(result) for result in written["benchmark_results"]] == [{*METRICS, "world_size"}] * 2
        assert [result["world_size"] for result in written["benchmark_results"]] == [4, 5]
        for result in written["benchmark_results"]:
            assert all(list(result[metric]) == ["50", "75", "90", "95"] for metric in METRICS)
        own = written["echelon"]
        assert set(own) == {"hardware", "versions", "warm_up", "runs"}
        assert own["warm_up"]["measured"] is False and own["versions"]["torch"] and own["hardware"]["cores"] >= 1
        assert own["runs"][1] == {
            "world_size": 5,
            "transport": "shm",
            "num_observers": 3,
            "requests_per_s": 60.0,
            "mean_batch": 1.75,
            "num_requests": 30,
            "num_rounds": 4,
            "elapsed_s": 0.5,
        }

    def test_without_a_sweep_every_argument_stands_above_the_results(self) -> None:
        report = Report([Setting()])
        report.add(Setting(), sample(note="of the backend"))
        written = report.to_json()
        assert written == written | SEED_ARGUMENTS and "x_axis_name" not in written
        assert set(written["benchmark_results"][0]) == set(METRICS)
        assert written["echelon"]["runs"][0]["note"] == "of the backend"

    def test_the_lines_on_the_screen(self) -> None:
        settings, x_axis_name = parse_settings(["--world_size", "10,20"])
        report = Report(settings, x_axis_name)
        head = report.head().splitlines()
        assert head[0] == head[2] == "-" * 62 == "-" * len(head[1])
        assert head[3:10] == [f"{key} : {value}" for key, value in SEED_ARGUMENTS.items() if key != "world_size"]
        assert head[-1] == "x_axis_name : world_size"
        report.add(settings[0], sample())
        lines = report.last().splitlines()
        assert lines[:3] == ["---------", "Benchmark", "world_size : 10"]
        assert lines[3].startswith("agent latency -- {50: 0.003, 75: ") and lines[3].endswith("}")
        for metric, line, blank in zip(METRICS, lines[3::2], lines[4::2], strict=False):
            assert line.startswith(f"{metric} -- {{50: ") and blank == ""
        assert lines[11] == "in all -- 40 requests/s, 1.75 to a batch"


def test_the_progress_bar_stays_off_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("world_size 10 (1/2)", "requests") as progress:
        progress(1, 2)
        progress(2, 2)
    assert capsys.readouterr() == ("", "")
