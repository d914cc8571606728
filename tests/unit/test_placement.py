"""The device and threads of a network: the choice of `auto`, and devices that are refused."""

from __future__ import annotations

import ctypes
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import echelon
from echelon import control_groups
from echelon.config import TrainConfig, replace
from echelon.control_groups import num_cores
from echelon.engines.process import IDLE
from echelon.errors import ConfigError
from echelon.presets import preset
from echelon.roles.placement import MIN_GPU_PARAMETERS, pick_device
from echelon.roles.plan.layouts import minibatch_samples
from echelon.roles.plan.placement import (
    MIN_REPLAY_PARAMETERS,
    have_own_gpus,
    learner_device,
    learner_threads,
    server_device,
)
from echelon.roles.plan.start import roles_of
from echelon.training import resume


def test_auto_takes_a_gpu_for_networks_that_gain_and_replay_gains_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed, queued = preset("sac", "Pendulum-v1"), preset("ppo", "Pendulum-v1")
    for is_there in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_there=is_there: is_there)
        found = "cuda" if is_there else "cpu"
        assert learner_device(replayed, MIN_REPLAY_PARAMETERS) == found
        assert learner_device(replayed, MIN_REPLAY_PARAMETERS - 1) == "cpu"
        assert learner_device(queued, MIN_REPLAY_PARAMETERS) == "cpu"
        assert learner_device(queued, MIN_GPU_PARAMETERS) == found
    assert learner_device(replace(replayed, **{"learner.device": "cpu"}), 10**9) == "cpu"


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cpu:0"])
def test_what_is_no_device_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=f"device={name} is not a device: use auto, cpu, cuda or cuda:N"):
        pick_device(name, 1)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device=cuda, but torch .* finds no GPU .*\. Use --acting\.device cpu"):
        pick_device("cuda", 1, "--acting.device")


@pytest.mark.parametrize(("driver", "found"), [(None, "cpu"), (12080, "cpu"), (13000, "cuda"), (14010, "cuda")])
def test_auto_takes_no_gpu_whose_driver_is_missing_or_too_old_for_torch(
    monkeypatch: pytest.MonkeyPatch, driver: int | None, found: str
) -> None:
    class Driver:
        def __init__(self, name: str) -> None:
            if driver is None:
                raise OSError(f"{name}: cannot open shared object file")

        def cuDriverGetVersion(self, version: Any) -> None:
            version._obj.value = driver

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # NVML sees a GPU
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ctypes, "CDLL", Driver)
    assert pick_device("auto", MIN_GPU_PARAMETERS) == found
    if found == "cpu":
        with pytest.raises(ConfigError, match="finds no GPU"):
            pick_device("cuda", 1)


@pytest.mark.parametrize("num_gpus", [1, 2, 3])
def test_learners_take_the_gpus_in_turns_and_nccl_where_each_has_its_own(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    for name in ("cuda", "auto"):
        config = replace(
            preset("sac", "Pendulum-v1"), **{"learner.num_learners": 2, "actor.num_actors": 2, "learner.device": name}
        )
        found = [learner_device(config, MIN_REPLAY_PARAMETERS, index) for index in range(2)]
        assert found == (["cuda:0", "cuda:0"] if num_gpus == 1 else ["cuda:0", "cuda:1"])
        assert have_own_gpus(config.learner, torch.device(found[0])) == (num_gpus > 1)
        assert not have_own_gpus(config.learner, torch.device("cpu"))
    one = replace(config, **{"learner.device": "cuda:0"})
    assert [learner_device(one, 1, index) for index in range(2)] == ["cuda:0", "cuda:0"]
    assert not have_own_gpus(one.learner, torch.device("cuda:0")), "all share the configured GPU"
    assert learner_device(replace(config, **{"learner.device": "auto"}), 1, 1) == "cpu"


def test_a_gpu_has_at_most_three_learners_and_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    central = {"acting.mode": "central", "acting.servers": 3, "actor.num_actors": 6}
    config = replace(preset("impala", "CartPole-v1"), **central)

    def devices(config: TrainConfig) -> list[str]:
        return [server_device(config, MIN_GPU_PARAMETERS, index) for index in range(config.acting.servers)]

    assert devices(config) == ["cuda:0", "cuda:0", "cpu"], "the learner is the third on the GPU"
    assert devices(replace(config, **{"learner.device": "cpu"})) == ["cuda:0"] * 3
    fixed = {"acting.device": "cuda"}
    with pytest.raises(ConfigError, match=r"1 GPUs and acting\.workers_per_gpu=3, so 3 of them fit"):
        devices(replace(config, **fixed))
    assert devices(replace(config, **fixed, **{"acting.workers_per_gpu": 4})) == ["cuda:0"] * 3
    assert devices(replace(config, **{"acting.device": "cuda:0"})) == ["cuda:0"] * 3, "as configured"
    many = replace(config, **{"learner.num_learners": 6, "acting.servers": 1})
    assert [learner_device(many, MIN_GPU_PARAMETERS, index) for index in range(6)] == ["cpu"] * 6
    with pytest.raises(ConfigError, match="at least 4 learners and inference servers"):
        learner_device(replace(many, **{"learner.device": "cuda"}), MIN_GPU_PARAMETERS)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices(config) == ["cuda:1", "cuda:0", "cuda:1"]
    hosts = replace(config, **{"engine": "hosts", "hosts.count": 3, "acting.servers": 1})
    assert [server_device(hosts, MIN_GPU_PARAMETERS, number) for number in range(3)] == ["cuda:1", "cuda:0", "cuda:0"]


def test_a_learner_does_not_ask_the_kernel_for_every_batch() -> None:
    program = (
        "import resource, torch; from echelon.roles.placement import keep_freed_memory; torch.set_num_threads(1)\n"
        "def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "def batch(): torch.empty(10_000_000).fill_(1.0)\n"
        "keep_freed_memory()\n"
        "for _ in range(20): batch()\n"  # the heap grows to its final size, which takes up to 6
        "before = faults()\n"
        "for _ in range(5): batch()\n"
        "print(faults() - before)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1_000, "40 MB are 9,766 pages a batch"


WIDE = {"actor.num_actors": 12, "actor.envs": 512}  # impala: 12 x 512 x 20 samples a batch


@pytest.mark.parametrize(
    ("name", "changes", "num_parameters", "cores", "threads"),
    [
        ("impala", WIDE, 9_184, 16, 4),  # all cores that the actors leave
        ("impala", WIDE, 9_184, 64, 5),  # as many as pay off
        ("impala", WIDE, 9_184, 8, 1),  # the actors leave none
        ("impala", {}, 9_184, 16, 1),  # a small batch
        ("impala", WIDE | {"algorithm.minibatches": 4}, 9_184, 64, 1),
        ("impala", WIDE | {"learner.num_learners": 2}, 9_184, 16, 2),
        ("impala", WIDE | {"learner.threads": 3}, 9_184, 16, 3),
        ("impala", WIDE | {"learner.max_lag": 0}, 9_184, 16, 1),  # reproducible
        ("impala", WIDE | {"engine": "inline"}, 9_184, 16, 1),
        ("impala", {}, MIN_GPU_PARAMETERS, 16, 16),  # a large network
        ("impala", {"engine": "inline"}, MIN_GPU_PARAMETERS, 16, 1),
        ("impala", {"learner.max_lag": 0}, MIN_GPU_PARAMETERS, 16, 16),
        ("sac", {"replay.batch": 8_192, "replay.min_size": 8_192}, 67_344, 16, 2),
        ("sac", {}, 67_344, 16, 1),
        ("a3c", WIDE, 9_184, 64, 1),  # gradients that the actors computed
    ],
)
def test_a_learner_has_the_threads_that_pay(
    name: str, changes: dict[str, Any], num_parameters: int, cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(control_groups, "groups", lambda controller: ())
    config = replace(preset(name, "Pendulum-v1" if name == "sac" else "CartPole-v1"), **changes)
    config = replace(config, **{"learner.device": "cpu"})
    assert learner_threads(config, num_parameters, minibatch_samples(config)) == threads


def test_the_threads_of_a_learner_are_recorded_and_kept(tmp_path: Path, shm_dir: Path) -> None:
    def recorded() -> int:
        threads: int = json.loads((tmp_path / "run" / "config.json").read_text())["config"]["learner"]["threads"]
        return threads

    fields = {"actor.num_actors": 1, "actor.envs": 2, "network.hidden": (512, 512), "stop.steps": 1}
    fields |= {"run.dir": str(tmp_path / "run"), "evaluation.episodes": 0, "shm_dir": str(shm_dir)}
    echelon.train(replace(preset("impala", "CartPole-v1"), **fields, **{"learner.device": "cpu"}), output=io.StringIO())
    assert recorded() == num_cores()
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["config"]["learner"]["threads"] = 3
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    resume(tmp_path / "run", steps=200, output=io.StringIO())
    assert recorded() == 3, "as on the machine where the run began"


def test_actors_yield_to_a_learner_that_computes_with_all_cores() -> None:
    def nices(**changes: Any) -> set[int]:
        config = replace(preset("mario", "CartPole-v1"), **{"learner.threads": num_cores(), **changes})
        return {role.nice for role in roles_of(config) if role.kind == "actor"}

    several = num_cores() > 1
    assert nices() == ({IDLE} if several else {0})
    assert nices(**{"learner.threads": 0}) == {0}, "on a GPU"
    assert nices(**{"replay.exact": False}) == {0}
