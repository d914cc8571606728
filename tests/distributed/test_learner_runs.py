"""Whole runs with several learners: the same training as with one, resume, evaluation, reports and cleanup."""

from __future__ import annotations

import io
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import echelon
from echelon.config import replace
from echelon.errors import DivergedError
from echelon.presets import preset
from echelon.replay.limiter import LimiterRule
from echelon.roles.gauge import PHASES
from echelon.roles.plan.replay import limiter_rule
from echelon.runs.metrics import read_rows
from running import Runs, train_shortly

LOOPBACK = "0100007F"  # 127.0.0.1 as /proc/net/tcp writes it
SMALL = {"actor.envs": 4, "network.hidden": (16,), "acting.mode": "local"}


def weights_of(summary: dict[str, Any]) -> dict[str, torch.Tensor]:
    return load_file(Path(summary["run_dir"]) / "weights.safetensors")


def loss_of(summary: dict[str, Any]) -> float:
    """Returns the mean loss over all updates; a row holds the mean since the previous row."""
    total, seen = 0.0, 0
    for row in read_rows(Path(summary["run_dir"])):
        if row["kind"] == "train" and "loss.total" in row:
            total += row["loss.total"] * (row["updates"] - seen)
            seen = row["updates"]
    assert seen == summary["updates"]
    return total / seen


@pytest.mark.parametrize(("name", "learners"), [("ppo", 2), ("impala", 2), ("impala", 4)])
def test_several_learners_train_as_one_does(tmp_path: Path, shm_dir: Path, name: str, learners: int) -> None:
    """In lock step the batches are the same, so weights differ only by rounding and counts are equal."""
    changes = {"actor.num_actors": 4, "learner.max_lag": 0, "actor.trajectory": 8, "stop.steps": 1_700, **SMALL}
    changes |= {"algorithm.normalize_advantage": True, "algorithm.normalize_reward": True}
    changes |= {"network.normalize_observation": True, "optimizer.schedule": "linear"}
    changes |= {"algorithm.epochs": 3} if name == "ppo" else {}
    one, several = (
        train_shortly(tmp_path, shm_dir, name, "local", **{**changes, "learner.num_learners": count})
        for count in (1, learners)
    )
    for key in ("env_steps", "episodes", "updates", "return_max", "lag_max", "dropped", "reason"):
        assert several[key] == one[key], key
    assert several["return_mean"] == pytest.approx(one["return_mean"])
    ended, expected = (echelon.read_episodes(summary["run_dir"]) for summary in (several, one))
    for column in ("return", "actor", "env"):
        assert sorted(ended[column]) == pytest.approx(sorted(expected[column])), "every learner reports its own"
    for key, tensor in weights_of(one).items():
        torch.testing.assert_close(weights_of(several)[key], tensor, rtol=1e-3, atol=1e-4)
    assert one["updates"] >= 9 and one["episodes"] <= 100, "so that the mean is that of all"
    assert not list(shm_dir.iterdir())
    assert loss_of(several) == pytest.approx(loss_of(one), rel=1e-2), "of whole batches, not of a part"


def is_kept(figures: dict[str, Any], rule: LimiterRule) -> bool:
    """Returns whether the balance is within the limiter's band, which all actors may overrun simultaneously."""
    due = rule.samples_per_insert * (figures["inserted"] - rule.min_size)
    room = rule.room + rule.samples_per_insert * rule.chunk * (rule.num_shards - 1)
    return abs(due - figures["sampled"] - figures["written_off"]) <= room


@pytest.mark.parametrize(
    ("name", "env"), [("apex-dqn", "CartPole-v1"), pytest.param("sac", "Pendulum-v1", marks=pytest.mark.full)]
)
def test_learners_of_a_replay_keep_the_ratio_and_go_on(tmp_path: Path, shm_dir: Path, name: str, env: str) -> None:
    changes = {"learner.num_learners": 2, "actor.num_actors": 3, "run.dir": str(tmp_path / "run"), **SMALL}
    changes |= {"replay.min_size": 200, "replay.batch": 32, "replay.capacity": 9_000, "replay.samples_per_insert": 8.0}
    changes |= {"shm_dir": str(shm_dir), "evaluation.episodes": 0, "stop.steps": 1_200, "replay.checkpoint": True}
    config = replace(preset(name, env), **changes)
    summary = echelon.train(config, output=io.StringIO()).summary
    figures, rule = summary["replay"], limiter_rule(config)
    band = 2 * rule.room / 8.0
    assert is_kept(figures, rule) and figures["sampled"] % 32 == 0
    assert figures["sampled"] == 32 * summary["updates"], "parts add up to batches"
    assert abs(figures["size"] - figures["inserted"]) <= band < 1_000, "of all learners; actors go on within the band"
    assert {"learner-0", "learner-1"} <= summary["time"].keys() and summary["learners"] == 2
    assert all(summary["time"][name]["exchange"] > 0.0 for name in ("learner-0", "learner-1"))
    for steps, learners in ((1_500, 3), (1_800, 1)):
        told = io.StringIO()
        again = echelon.resume(tmp_path / "run", steps=steps, learners=learners, output=told).summary
        assert "replay: restored the" in told.getvalue()
        assert again["env_steps"] >= steps and again["updates"] > summary["updates"]
        assert is_kept(again["replay"], rule)
        assert again["replay"]["sampled"] == 32 * again["updates"], "counted on, however many learners there were"
        summary = again
    assert "learner" in summary["time"]
    assert echelon.evaluate(tmp_path / "run", episodes=2)["episodes"] == 2
    assert not list(shm_dir.iterdir())


def test_without_a_bound_learners_go_on_and_stop_together(tmp_path: Path, shm_dir: Path) -> None:
    changes = {"learner.num_learners": 2, "actor.num_actors": 4, "learner.batch": 8, "stop.steps": 40_000, **SMALL}
    summary = train_shortly(tmp_path, shm_dir, "impala", "local", **changes)
    rows = [row for row in read_rows(Path(summary["run_dir"])) if row["kind"] == "train"]
    assert summary["reason"] == "steps" and 40_000 <= summary["env_steps"] < 42_000
    assert [row["env_steps"] for row in rows] == sorted(row["env_steps"] for row in rows)
    shares = [[rows[-1][f"time.{name}.{phase}"] for phase in PHASES] for name in ("learner-0", "learner-1")]
    assert all(0.99 < sum(one) < 1.01 for one in shares)


def test_what_diverges_is_told_once(tmp_path: Path, shm_dir: Path) -> None:
    changes = {"learner.num_learners": 2, "optimizer.learning_rate": 1e30, "stop.steps": 100_000, **SMALL}
    changes |= {"optimizer.schedule": "constant"}
    with pytest.raises(DivergedError, match=r"Lower --optimizer\.learning-rate \(now 1e\+30\)"):
        train_shortly(tmp_path, shm_dir, "impala", "local", **changes)
    assert not list(shm_dir.iterdir())


def listening(pid: int) -> list[str]:
    """Returns the addresses at which a process listens, in the format of /proc/net."""
    inodes = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed in the meantime
            inodes.add(os.readlink(path))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                found.append(words[1].partition(":")[0])
    return found


def test_no_learner_listens_beyond_the_loopback(runs: Runs) -> None:
    run = runs.train("ppo", learners=2)
    run.until_learning()
    everybody = {name: listening(pid) for name, pid in run.processes().items()}
    assert all(everybody[name] for name in ("learner-0", "learner-1")), "by which gloo connects them"
    assert {address for found in everybody.values() for address in found} == {LOOPBACK}
    run.stop()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="learns on a GPU, and torch sees none")
@pytest.mark.parametrize("name", ["ppo", "apex-dqn"])
def test_learners_share_a_gpu(tmp_path: Path, shm_dir: Path, name: str) -> None:
    """With more learners than GPUs two share a device, which NCCL does not allow."""
    count = torch.cuda.device_count() + 1
    changes = {"learner.num_learners": count, "actor.num_actors": count, "learner.device": "cuda", **SMALL}
    changes |= {"stop.steps": 4_000, "replay.min_size": 500, "replay.batch": 64, "replay.samples_per_insert": 8.0}
    summary = train_shortly(tmp_path, shm_dir, name, "local", **changes)
    assert summary["device"] == "cuda:0" and summary["reason"] == "steps" and summary["restarts"] == 0
    assert not list(shm_dir.iterdir())
