"""`echelon bench rpc` without its processes: settings, policy, agent, observer, percentiles, report and output."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from echelon.bench.harness import Runs, Sweep
from echelon.bench.rpc import METRICS, TRANSPORTS, Raw, RpcBenchmark, RpcSetting, metrics_of, transport_of
from echelon.bench.rpc_agent import AgentPolicy, CallAgent
from echelon.bench.rpc_processes import MEASURE, WARM_UP, Observer, Results
from echelon.cli.bench import make_parser
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


def sweep_of(*arguments: str) -> Sweep[RpcSetting]:
    texts = vars(make_parser(RpcBenchmark()).parse_args(list(arguments)))
    return Sweep.parse(RpcSetting, texts, RpcBenchmark.swept, RpcBenchmark.max_varied)


class TestArguments:
    def test_the_defaults_are_those_of_the_benchmark_it_follows(self) -> None:
        values = sweep_of().common
        assert values == values | SEED_ARGUMENTS | {"episodes": 10, "steps": 100, "transport": "shm", "device": "cpu"}
        assert list(values)[: len(SEED_ARGUMENTS)] == list(SEED_ARGUMENTS)

    @pytest.mark.parametrize("spelling", ["--world_size", "--world-size", "-world_size"])
    def test_names_are_taken_with_dashes_and_underscores(self, spelling: str) -> None:
        for words in ([f"{spelling}=4"], [spelling, "4"]):
            assert sweep_of(*words).settings == (RpcSetting(world_size=4),)

    def test_derived_sizes(self) -> None:
        setting = RpcSetting(world_size=7, state_size="2-3-4", episodes=2, steps=10)
        assert (setting.num_observers, setting.num_inputs) == (5, 24)
        assert (setting.num_warm_up, setting.num_measured, setting.num_requests) == (10, 20, 150)

    @pytest.mark.parametrize(
        ("argument", "texts", "values"),
        [
            ("state_size", "10-20-10,4", ["10-20-10", "4"]),
            ("nlayers", "0,1,2", [0, 1, 2]),
            ("batch", "True,False", [True, False]),
            ("device", "cpu,cuda:0", ["cpu", "cuda:0"]),
            ("max_wait_us", "100,1e4", [100.0, 1e4]),
        ],
    )
    def test_one_list_becomes_the_x_axis(self, argument: str, texts: str, values: list[Any]) -> None:
        sweep = sweep_of(f"--{argument}={texts}")
        assert sweep.varied == (argument,)
        assert list(sweep.settings) == [dataclasses.replace(RpcSetting(), **{argument: value}) for value in values]

    def test_a_comma_in_a_path_is_no_list(self) -> None:
        (setting,) = sweep_of("--output_file_path", "a,b.json").settings
        assert setting.output_file_path == "a,b.json"

    def test_every_transport_names_a_function_that_exists(self) -> None:
        assert set(TRANSPORTS) == {"shm", "tcp", "torch-rpc", "ray"}
        assert all(callable(transport_of(name)) for name in TRANSPORTS)


class TestPolicy:
    def states(self, count: int, setting: RpcSetting) -> np.ndarray[Any, Any]:
        return np.random.default_rng(0).random((count, setting.num_inputs), np.float32)

    @pytest.mark.parametrize("nlayers", [0, 2])
    def test_actions_come_as_often_as_the_softmax_over_actions_says(self, nlayers: int) -> None:
        setting = RpcSetting(state_size="2-3", nlayers=nlayers, out_features=4)
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
        setting = RpcSetting(state_size="4", out_features=3)
        policy = AgentPolicy(setting)
        first = policy.choose(self.states(2, setting))
        for count in (1, 2, 3) * 10:
            actions = policy.choose(self.states(count, setting))
            assert actions.shape == (count,) and ((actions >= 0) & (actions < 3)).all()
        assert policy.choose(self.states(2, setting)) is first and len(policy._choosers) == 3

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, so nothing is refused")
    def test_a_gpu_that_is_not_there_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="device=cuda does not exist"):
            AgentPolicy(RpcSetting(device="cuda"))


SMALL = RpcSetting(world_size=4, state_size="3", out_features=5, episodes=2, steps=4)


class Answer:
    """A pending call."""

    def __init__(self) -> None:
        self.action: int | None = None

    def set_result(self, action: int) -> None:
        self.action = action


class TestAgentAndObserver:
    """What the transports that call share."""

    def test_a_round_is_answered_when_all_have_asked(self, tmp_path: Path) -> None:
        results = Results(tmp_path, SMALL, create=True)
        agent, answers = CallAgent(SMALL, results), [Answer(), Answer()]
        for phase, num_rounds in ((WARM_UP, 0), (MEASURE, 1)):
            results.begin(phase)
            answers = [Answer(), Answer()]
            agent.join_round(1, np.ones(3, np.float32), answers[1])
            assert answers[1].action is None
            agent.join_round(0, np.zeros(3, np.float32), answers[0])
            assert all(answer.action in range(5) for answer in answers)
            assert results.agent[2] == num_rounds, "the warm-up is not recorded"
        assert (agent.states == [[0, 0, 0], [1, 1, 1]]).all()
        assert agent.answer(np.ones(3, np.float32)) in range(5)
        assert results.agent[2] == 2 and results.round_size[:2].tolist() == [2, 1]
        assert (results.round_latency_ns[:2] > 0).all()

    def test_an_observer_asks_with_new_states_and_times_what_is_measured(self, tmp_path: Path) -> None:
        results, state, seen = Results(tmp_path, SMALL, create=True), np.zeros(3, np.float32), list[tuple[float, ...]]()
        observers = [Observer(SMALL, results, index) for index in range(2)]
        for phase, num_asked in ((WARM_UP, 4), (MEASURE, 12)):
            for observer in observers:
                assert not observer.finished
                observer.observe(phase, state, lambda: seen.append(tuple(state)))
            assert results.num_answered.tolist() == [num_asked] * 2
            assert results.all_warm and results.all_ended == (phase == MEASURE)
        assert len(set(seen)) == 24 and all(observer.finished for observer in observers)
        raw = results.raw(note="x")
        assert raw.observer_latency_s.shape == (2, 8) and (raw.observer_latency_s > 0).all()
        assert raw.elapsed_s >= raw.observer_latency_s.sum(1).max() and raw.extra == {"note": "x"}


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

    def test_a_sweep_has_its_values_in_the_results_and_not_above_them(self) -> None:
        sweep = sweep_of("--world_size", "4,5")
        runs = Runs(sweep, [sample(setting.num_observers) for setting in sweep.settings])
        report = RpcBenchmark().report(runs)
        assert report["x_axis_name"] == "world_size" and "world_size" not in report
        assert report == report | {key: value for key, value in SEED_ARGUMENTS.items() if key != "world_size"}
        seconds = {"agent latency (seconds)", "observer latency (seconds)"}
        assert [set(result) for result in report["benchmark_results"]] == [{*METRICS, *seconds, "world_size"}] * 2
        assert [result["world_size"] for result in report["benchmark_results"]] == [4, 5]
        assert list(report["echelon"]) == ["hardware", "versions", "warm_up", "runs"]
        assert report["echelon"]["warm_up"] == {"episodes": 1, "measured": False}
        assert report["echelon"]["runs"][1] == {
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
        report = RpcBenchmark().report(Runs(sweep_of(), [sample(note="of the transport")]))
        assert report == report | SEED_ARGUMENTS and "x_axis_name" not in report
        assert set(METRICS) < set(report["benchmark_results"][0])
        assert report["echelon"]["runs"][0]["note"] == "of the transport"

    def test_scripts_read_the_names_from_before_and_after_the_merge(self) -> None:
        report = RpcBenchmark().report(Runs(sweep_of("--world_size", "4,5"), [sample(2), sample(3)]))
        for result in json.loads(json.dumps(report))["benchmark_results"]:
            for metric in METRICS:
                merged = f"{metric} (seconds)" if "latency" in metric else metric
                for percentile in (50, 75, 90, 95):
                    assert result[metric][str(percentile)] == result[merged][f"p{percentile}"] > 0

    def test_the_lines_on_the_screen(self) -> None:
        benchmark, sweep = RpcBenchmark(), sweep_of("--world_size", "10,20")
        head = benchmark.head(sweep).splitlines()
        assert head[0] == head[2] == "-" * 62 == "-" * len(head[1])
        assert head[3:10] == [f"{key} : {value}" for key, value in SEED_ARGUMENTS.items() if key != "world_size"]
        assert head[-1] == "x_axis_name : world_size"
        lines = benchmark.newest(Runs(sweep, [sample()])).splitlines()
        assert lines[:3] == ["---------", "Benchmark", "world_size : 10"]
        assert lines[3].startswith("agent latency -- p50 3.000, p75 ")
        for metric, line, blank in zip(METRICS, lines[3::2], lines[4::2], strict=False):
            assert line.startswith(f"{metric} -- p50 ") and blank == ""
            assert line.endswith(" ms" if "latency" in metric else " requests/s")
        assert lines[11] == "total -- 40 requests/s, 1.75 per batch"
