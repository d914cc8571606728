"""`echelon bench train`: the report is complete, the limit is arithmetic, and invalid options are refused."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import toy_envs as toy
from echelon.bench import load
from echelon.bench.processes import one_thread
from echelon.bench.stages import Stage, StepCost, TrainingStages, measure
from echelon.bench.train import bench_train, limit, table
from echelon.bench.watch import UsageSample, UsageWatch, busy_seconds, cpu_seconds, usage
from echelon.cli.main import main
from echelon.config import EnvConfig, TrainConfig, replace
from echelon.control_groups import num_cores
from echelon.errors import ConfigError
from echelon.hosts.cpus import count_cpus, own_cpus
from echelon.presets import preset
from echelon.runs.folder import RunFolder
from running import wait_until

KEYS = [
    *("bench", "config", "seconds", "device", "num_cores", "hardware", "versions", "stages", "limit"),
    *("env_steps_per_s", "samples_per_s", "env_steps", "efficiency", "processor", "time", "bottleneck", "restarts"),
    *("return_mean", "rest"),
]


def tiny(name: str, env: str = "CartPole-v1", **changes: Any) -> TrainConfig:
    base: dict[str, Any] = {"engine": "inline", "actor.num_actors": 2, "actor.envs": 4, "actor.trajectory": 8}
    return replace(preset(name, env), **{**base, **changes})


def check(report: dict[str, Any]) -> None:
    assert list(report) == KEYS
    for stage in ("env", "act", "learn"):
        for how in ("alone", "loaded"):
            assert report["stages"][stage][how]["cpu_us"] > 0 and report["stages"][stage][how]["wall_us"] > 0
    for how in ("alone", "loaded"):
        assert report["efficiency"][how] == pytest.approx(report["env_steps_per_s"] / report["limit"][how])
        assert report["efficiency"][how] > 0
    assert report["hardware"]["cores"] == num_cores() and report["hardware"]["processor"]


REPLAY = {"actor.trajectory": 1, "replay.batch": 16, "replay.min_size": 200, "replay.capacity": 4_000}


@pytest.mark.parametrize("name", ["impala", "ppo", "async-ppo", "a3c", "apex-dqn", "mario", "sac"])
def test_every_stage_of_every_kind_of_training_is_measured(name: str, shm_dir: Path) -> None:
    config = tiny(
        name,
        "Pendulum-v1" if name == "sac" else "CartPole-v1",
        **(REPLAY if name in ("apex-dqn", "mario", "sac") else {}),
    )
    found = TrainingStages(config, shm_dir, "cpu", samples_per_step=8.0)
    version = found.learning.board.version
    weights = found.learning.model.parameters.clone()
    with one_thread():
        costs = measure(found.by_name(), num_chunks=1, chunk_s=0.01)
    assert list(costs) == ["env", "act", "learn"] and all(cost.cpu_us > 0 for cost in costs.values())
    assert found.learning.num_learned >= 1
    assert found.learning.board.version - version == found.learning.num_learned // found.learning.source.publish_every
    assert (found.learning.model.parameters - weights).abs().max() < 1e-8, "the weights stay where they are"
    found.close()


@pytest.mark.parametrize("name", ["impala", "dqn"])
def test_environments_that_mask_actions_get_allowed_ones(name: str, shm_dir: Path) -> None:
    config = replace(tiny(name, **(REPLAY if name == "dqn" else {})), env=EnvConfig(id=toy.MaskedEnv))
    found = TrainingStages(config, shm_dir, "cpu", samples_per_step=8.0)
    with one_thread():
        costs = measure(found.by_name(), num_chunks=2, chunk_s=0.01)
    assert all(cost.cpu_us > 0 for cost in costs.values()) and costs.keys() == {"env", "act", "learn"}
    found.close()


def test_a_batch_of_replay_stands_for_the_steps_that_it_is_drawn_for(shm_dir: Path) -> None:
    changes = {"actor.envs": 2, "replay.batch": 4, "replay.min_size": 30, "replay.capacity": 400}
    found = TrainingStages(replace(preset("apex-dqn", "ALE/Pong-v5"), **changes), shm_dir, "cpu", samples_per_step=8.0)
    assert found.by_name()["learn"].num_steps == 0.5
    with one_thread():
        found.learning.learn()
        found.learning.learn()
    figures = found.learning.source.figures()
    assert figures["sampled"] == 8 and 30 <= figures["size"] <= 60, "frames lie in both shards"
    found.close()


def test_replay_is_measured_by_the_samples_of_a_step() -> None:
    config = tiny("apex-dqn", **REPLAY, **{"replay.samples_per_insert": 8.0, "stop.steps": 700})
    output = io.StringIO()
    report = bench_train(config, seconds=60.0, num_chunks=1, chunk_s=0.02, output=output)
    check(report)
    assert report["num_cores"] == 1 and report["env_steps"] > 0
    assert report["samples_per_s"] / report["env_steps_per_s"] == pytest.approx(8.0, rel=0.2)
    assert "samples/s" in table(report) and report["rest"] in table(report) and json.dumps(report)
    assert "training" in output.getvalue() and "measuring" in output.getvalue()


def test_the_command_counts_the_time_of_every_role_and_writes_json(
    tmp_path: Path, shm_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench_train.__kwdefaults__ is not None
    monkeypatch.setitem(bench_train.__kwdefaults__, "chunk_s", 0.01)
    path = tmp_path / "report.json"
    options = ["--actors", "2", "--envs-per-actor", "8", "--actor.trajectory", "16", "--shm-dir", str(shm_dir)]
    options += ["--steps", "100000", "--seconds", "120", "--json", str(path), "--run-dir", str(tmp_path / "run")]
    assert main(["bench", "train", "impala", "CartPole-v1", *options]) == 0
    report = json.loads(path.read_text())
    check(report)
    assert report["config"]["actor"]["trajectory"] == 16 and report["seconds"] == 120
    assert report["processor"] is not None, "100,000 steps gave no two rows of metrics"
    roles = report["processor"]["roles_us"]
    assert roles.keys() >= {"actor", "learner", "coordinator"} and roles["actor"] > 0
    assert "the stages" in report["rest"] and "learner" in report["rest"]
    assert "limit, steps/s" in capsys.readouterr().out
    ran = RunFolder.open(tmp_path / "run").read_config()  # a folder that was named is kept
    assert ran["stop"]["minutes"] == pytest.approx(2.0) and ran["evaluation"]["episodes"] == 0
    assert not list(shm_dir.iterdir())


def test_a_replay_that_is_not_filled_in_time_is_named(shm_dir: Path) -> None:
    config = tiny(
        "dqn", **{**REPLAY, "replay.min_size": 3_999}, **{"env.id": "unruly:SlowEnv", "shm_dir": str(shm_dir)}
    )
    config = replace(config, **{"env.kwargs": {"step_s": 0.01}})
    with pytest.raises(
        ConfigError, match=r"the replay has \d+ .*replay.min_size=3999.*--replay.min-size \d+\), or raise"
    ):
        bench_train(config, seconds=1.0, num_chunks=1, output=io.StringIO())


def test_limit_is_cores_over_the_sum_of_stages() -> None:
    costs = {"env": StepCost(6.0, 7.0), "act": StepCost(2.0, 2.0), "learn": StepCost(2.0, 20.0)}
    assert limit(costs, 4, on_gpu=False) == pytest.approx(400_000)
    assert limit(costs, 4, on_gpu=True) == pytest.approx(50_000)  # the GPU's clock decides
    assert limit({**costs, "learn": StepCost(2.0, 1.0)}, 4, on_gpu=True) == pytest.approx(500_000)  # the cores decide


def test_cores_that_hosts_share_are_counted_once() -> None:
    assert count_cpus([("a/f", 4), ("a/f", 4), ("b/3", 2)]) == 6
    assert count_cpus([("a/f", 4), ("a/3c", 4)]) == 6, "containers of one machine may share some"
    assert count_cpus([("a/ff", 2), ("a/ff", 3), ("b/3", 2)]) == 7, "containers with quotas use them up"
    cores = num_cores()
    assert count_cpus([(own_cpus(), cores), (own_cpus(), cores)]) == cores


def test_roles_of_other_hosts_are_not_taken_for_processes_of_this_one(tmp_path: Path) -> None:
    pid = os.getpid()
    (tmp_path / "processes.json").write_text(
        json.dumps({"learner": {"pid": pid}, "actor-1": {"pid": pid, "host": "b"}})
    )
    row = {"kind": "train", "env_steps": 1, "wall_s": 1.0, "env_steps_per_s": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    watch = UsageWatch(tmp_path, lambda text: None)
    watch.start()
    wait_until(lambda: bool(watch.samples), "it has looked")
    watch.stop()
    assert watch.samples[0].cpu_s.keys() == {"coordinator", "learner"}


class Clock:
    """Stands in for `time`: only the stages move it, and half of what passes is processor time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def process_time(self) -> float:
        return self.now_s / 2


def test_measure_is_the_median_per_step_of_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("echelon.bench.harness.time", clock)
    durations = {"env": iter([9.0, 1.0, 5.0, 2.0]), "act": iter([9.0, 3.0, 3.0, 3.0])}  # the first is not counted

    def work(name: str) -> None:
        clock.now_s += next(durations[name])

    stages = {"env": Stage(lambda: work("env"), 4), "act": Stage(lambda: work("act"), 1)}
    costs = measure(stages, num_chunks=3, chunk_s=0.5)
    assert costs == {"env": StepCost(cpu_us=0.25e6, wall_us=0.5e6), "act": StepCost(cpu_us=1.5e6, wall_us=3e6)}


def test_usage_makes_up_all_of_the_cores() -> None:
    samples = [
        UsageSample(0, 1.0, {"coordinator": 0.5}, 10.0),
        UsageSample(1_000, 2.0, {"coordinator": 1.0, "actor": 1.0, "learner": 0.5}, 12.0),
        UsageSample(5_000, 4.0, {"coordinator": 1.1, "actor": 2.0, "learner": 1.5}, 15.0),
        UsageSample(11_000, 8.0, {"coordinator": 1.3, "actor": 4.0, "learner": 3.5}, 22.0),
    ]
    used = usage(samples, 2, whole_machine=True)
    assert used is not None
    assert used.total_us == pytest.approx(2 * 4.0 / 6_000 * 1e6)  # from the end of the warm-up on
    assert used.roles_us["actor"] == pytest.approx(2.0 / 6_000 * 1e6)
    assert used.others_us == pytest.approx((7.0 - 4.2) / 6_000 * 1e6)
    assert used.total_us == pytest.approx(sum(used.roles_us.values()) + used.others_us + used.idle_us)
    short = usage(samples[:3], 2, whole_machine=True)  # too short for a warm-up: from the first batch on
    assert short is not None and short.total_us == pytest.approx(2 * 2.0 / 4_000 * 1e6)
    assert usage(samples[:2], 2, whole_machine=True) is None
    assert usage([], 2, whole_machine=True) is None


def test_processor_time_is_read_from_the_kernel() -> None:
    before, busy = cpu_seconds(os.getpid()), busy_seconds()
    while (now := cpu_seconds(os.getpid())) == before:
        sum(range(100_000))
    assert before is not None and now is not None and now > before and busy_seconds() >= busy > 0
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert cpu_seconds(child.pid) is None


def test_load_keeps_cores_busy_and_leaves_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def remember(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", remember)
    with load.loaded_cores(1):
        first = [cpu_seconds(worker.pid) for worker in started]
        while [cpu_seconds(worker.pid) for worker in started] == first:
            assert all(worker.poll() is None for worker in started)
    assert len(started) == 1 and all(worker.returncode is not None for worker in started)
