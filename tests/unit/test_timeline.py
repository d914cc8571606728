"""Timelines: every trajectory and every batch of a run has its start and end, and nothing is recorded unasked."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import pytest

from echelon.config import TrainConfig, replace
from echelon.presets import preset
from echelon.runs.timeline import Timeline, read_timelines, read_work
from echelon.training import train


def config_of(run_dir: Path, *, timeline: bool) -> TrainConfig:
    changes = {"engine": "inline", "actor.num_actors": 2, "actor.envs": 2, "actor.trajectory": 8, "stop.steps": 200}
    changes |= {"evaluation.episodes": 0, "run.dir": str(run_dir), "run.timeline": timeline}
    return replace(preset("ppo", "CartPole-v1"), **changes)


def test_a_run_records_each_trajectory_and_each_batch(tmp_path: Path) -> None:
    result = train(config_of(tmp_path / "run", timeline=True), output=io.StringIO())
    found = read_timelines(result.run_dir)
    assert list(found) == ["actor-0", "actor-1", "learner"]
    batches = found["learner"]
    assert len(batches) == result.summary["updates"]
    for name in ("actor-0", "actor-1"):
        assert len(found[name]) in (len(batches), len(batches) + 1), "synchronous: one trajectory for each batch"
        for (start, end), (learned_from, _) in zip(found[name], batches, strict=False):
            assert 0.0 < start < end <= learned_from
    for spans in found.values():
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans)), "they follow each other"
    assert batches[-1][1] <= result.summary["wall_s"]
    work = read_work(result.run_dir)
    assert {name: len(times) for name, times in work.items()} == {name: len(spans) for name, spans in found.items()}
    for times, spans in zip(work.values(), found.values(), strict=True):
        assert times == sorted(times) and 0.0 < times[-1] - times[0] < spans[-1][1] + 1.0


def test_nothing_is_recorded_unasked(tmp_path: Path) -> None:
    result = train(config_of(tmp_path / "run", timeline=False), output=io.StringIO())
    assert not (result.run_dir / "timeline").exists() and read_timelines(result.run_dir) == {}


def test_a_restarted_role_continues_its_file(tmp_path: Path) -> None:
    for start in (101.0, 105.0):
        timeline = Timeline(tmp_path, "actor-0", started_at=100.0)
        timeline.add(start, start + 2.5)
        timeline.close()
    assert read_timelines(tmp_path) == {"actor-0": [pytest.approx((1.0, 3.5)), pytest.approx((5.0, 7.5))]}
