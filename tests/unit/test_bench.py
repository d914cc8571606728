"""`echelon bench train`: the report is whole, the limit is arithmetic, the command line says what is wrong."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

import toy_envs as toy
from echelon.bench import load, stages
from echelon.bench.replayed import ReplayLearning
from echelon.bench.stages import Cost
from echelon.bench.train import bench_train, limit, table
from echelon.bench.watch import Sample, busy_seconds, cpu_seconds, usage
from echelon.cli import bench
from echelon.cli.main import main
from echelon.config import EnvConfig, StopConfig, TrainConfig, replace
from echelon.errors import ConfigError
from echelon.presets import preset
from echelon.runs.folder import RunFolder

KEYS = {"stages", "limit", "env_steps_per_s", "efficiency", "processor", "rest", "hardware", "versions", "config"}


def tiny(engine: Literal["inline", "local"], name: str, steps: int) -> TrainConfig:
    """A run that ends by steps, not by time, so that a slow machine only takes longer."""
    config = preset(name, "CartPole-v1")
    actor = replace(config.actor, num_actors=2, envs=8, trajectory=16)
    return replace(config, engine=engine, actor=actor, stop=StopConfig(steps=steps))


def check(report: dict[str, Any]) -> None:
    assert report.keys() >= KEYS
    for stage in ("env", "act", "learn"):
        for how in ("alone", "loaded"):
            assert report["stages"][stage][how]["cpu_us"] > 0 and report["stages"][stage][how]["wall_us"] > 0
    for how in ("alone", "loaded"):
        assert report["efficiency"][how] == pytest.approx(report["env_steps_per_s"] / report["limit"][how])
        assert report["efficiency"][how] > 0
    assert report["hardware"]["cores"] == len(os.sched_getaffinity(0)) and report["hardware"]["processor"]


@pytest.mark.parametrize("name", ["impala", "ppo", "async-ppo", "a3c"])
def test_inline_reports_everything(name: str) -> None:
    output = io.StringIO()
    report = bench_train(tiny("inline", name, 4_000), seconds=60.0, num_chunks=1, chunk_s=0.02, output=output)
    check(report)
    assert report["num_cores"] == 1 and report["env_steps"] > 0
    assert "training" in output.getvalue() and "measuring" in output.getvalue()
    assert "efficiency" in table(report) and report["rest"] in table(report)
    assert json.dumps(report)


@pytest.mark.parametrize("name", ["impala", "dqn"])
def test_environments_that_mask_actions_get_allowed_ones(name: str, tmp_path: Path) -> None:
    config = tiny("inline", name, 100)
    sizes = replace(config.replay, batch=16, min_size=200, capacity=4_000)
    config = replace(config, env=EnvConfig(id=toy.MaskedEnv), replay=sizes)
    found = stages.Stages(config, tmp_path, "cpu", samples_per_step=8.0)
    costs = stages.measure(found.callables(), num_chunks=2, chunk_s=0.01)
    assert all(cost.cpu_us > 0 for cost in costs.values()) and costs.keys() == {"env", "act", "learn"}
    found.close()


@pytest.mark.parametrize("name", ["apex-dqn", "sac"])
def test_replay_is_measured_by_the_samples_of_a_step(name: str) -> None:
    config = tiny("inline", name, 700)
    sizes = replace(config.replay, batch=16, min_size=200, capacity=4_000, samples_per_insert=8.0)
    config = replace(config, actor=replace(config.actor, trajectory=1), replay=sizes)
    report = bench_train(config, seconds=60.0, num_chunks=1, chunk_s=0.02, output=io.StringIO())
    check(report)
    assert report["samples_per_s"] / report["env_steps_per_s"] == pytest.approx(8.0, rel=0.2)
    assert "samples/s" in table(report) and json.dumps(report)


def test_a_batch_of_replay_stands_for_the_steps_that_it_is_drawn_for(tmp_path: Path) -> None:
    config = preset("apex-dqn", "ALE/Pong-v5")
    actor = replace(config.actor, num_actors=2, envs=2)
    config = replace(config, actor=actor, replay=replace(config.replay, batch=4, min_size=30, capacity=400))
    found = stages.Stages(config, tmp_path, "cpu", samples_per_step=8.0)
    assert isinstance(found.learning, ReplayLearning)
    assert found.learning.learn() == found.learning.learn() == 0.5
    figures = found.learning.source.figures()
    assert figures["sampled"] == 8 and 30 <= figures["size"] <= 60, "frames lie in both shards"
    found.close()


def test_local_counts_the_time_of_every_role(tmp_path: Path) -> None:
    config = tiny("local", "impala", 200_000)
    config = replace(config, run=replace(config.run, dir=str(tmp_path / "run")))
    report = bench_train(config, seconds=120.0, num_chunks=1, chunk_s=0.02, output=io.StringIO())
    check(report)
    assert report["processor"] is not None, "200,000 steps gave no two rows of metrics"
    roles = report["processor"]["roles_us"]
    assert roles.keys() >= {"actor", "learner", "coordinator"} and roles["actor"] > 0
    assert "the stages" in report["rest"] and "learner" in report["rest"]
    ran = RunFolder.open(tmp_path / "run").read_config()  # a folder that was named is kept
    assert ran["stop"]["minutes"] == pytest.approx(2.0) and ran["evaluation"]["interval_s"] == 0
    assert not list(Path(config.shm_dir).glob(f"echelon-{os.getpid()}-*"))


def test_command_line_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench_train.__kwdefaults__ is not None
    monkeypatch.setitem(bench_train.__kwdefaults__, "chunk_s", 0.01)
    path = tmp_path / "report.json"
    options = ["--engine", "inline", "--actors", "1", "--envs-per-actor", "4", "--actor.trajectory", "8"]
    options += ["--steps", "2000", "--seconds", "60", "--json", str(path)]
    assert main(["bench", "train", "impala", "CartPole-v1", *options]) == 0
    report = json.loads(path.read_text())
    check(report)
    assert report["config"]["actor"]["trajectory"] == 8 and report["seconds"] == 60
    assert "limit, steps/s" in capsys.readouterr().out


def test_mistakes_are_told_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no benchmark 'speed'; there are train"):
        bench.run(["speed"])
    with pytest.raises(ConfigError, match=r"--json .* cannot be written"):
        bench.run(["train", "impala", "CartPole-v1", "--json", str(tmp_path / "nowhere" / "x.json")])
    with pytest.raises(ConfigError, match=r"seconds=0 must be above 0"):
        bench.run(["train", "impala", "CartPole-v1", "--seconds", "0"])
    with pytest.raises(ConfigError, match=r"--seconds S, not with --minutes"):
        bench.run(["train", "impala", "CartPole-v1", "--minutes", "1"])
    with pytest.raises(ConfigError, match=r"no preset 'impalla'"):
        bench.run(["train", "impalla", "CartPole-v1"])


def test_limit_is_cores_over_the_sum_of_stages() -> None:
    costs = {"env": Cost(6.0, 7.0), "act": Cost(2.0, 2.0), "learn": Cost(2.0, 20.0)}
    assert limit(costs, 4, on_gpu=False) == pytest.approx(400_000)
    assert limit(costs, 4, on_gpu=True) == pytest.approx(50_000)  # the GPU's clock decides
    assert limit({**costs, "learn": Cost(2.0, 1.0)}, 4, on_gpu=True) == pytest.approx(500_000)  # the cores decide


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
    monkeypatch.setattr(stages, "time", clock)
    durations = {"env": iter([9.0, 1.0, 5.0, 2.0]), "act": iter([9.0, 3.0, 3.0, 3.0])}  # the first is not counted

    def stage(name: str, steps: int) -> int:
        clock.now_s += next(durations[name])
        return steps

    costs = stages.measure({"env": lambda: stage("env", 4), "act": lambda: stage("act", 1)}, num_chunks=3, chunk_s=0.5)
    assert costs == {"env": Cost(cpu_us=0.25e6, wall_us=0.5e6), "act": Cost(cpu_us=1.5e6, wall_us=3e6)}


def test_usage_makes_up_all_of_the_cores() -> None:
    samples = [
        Sample(0, 1.0, {"coordinator": 0.5}, 10.0),
        Sample(1_000, 2.0, {"coordinator": 1.0, "actor": 1.0, "learner": 0.5}, 12.0),
        Sample(5_000, 4.0, {"coordinator": 1.1, "actor": 2.0, "learner": 1.5}, 15.0),
        Sample(11_000, 8.0, {"coordinator": 1.3, "actor": 4.0, "learner": 3.5}, 22.0),
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
    with load.loaded_cores(2):
        first = [cpu_seconds(worker.pid) for worker in started]
        while [cpu_seconds(worker.pid) for worker in started] == first:
            assert all(worker.poll() is None for worker in started)
    assert len(started) == 2 and all(worker.returncode is not None for worker in started)
