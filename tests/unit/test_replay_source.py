"""The replay source: sampling, updated priorities, counts, and what survives the learner's death."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from echelon.errors import DivergedError
from echelon.replay.shard import TAIL
from echelon.roles.episode_source import EpisodeSource
from echelon.roles.plan.replay import ReplayPlan
from echelon.roles.replay_source import ReplaySource
from replay_scene import BATCH, MIN_SIZE, Scene


class Waiting:
    """A station that counts nothing."""

    def waited(self, start: float) -> None:
        del start


def test_a_batch_is_whole_rows_of_both_shards(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.write(0, 100)
    scene.write(1, 100)
    batch = scene.take()
    numbers = batch.reward.to(torch.int64)
    assert (numbers < 1000).any() and (numbers >= 1000).any()
    assert torch.equal(batch.observation["eye"], torch.stack([batch.reward, -batch.reward], 1))
    assert torch.equal(batch.next_observation["eye"], batch.observation["eye"] + 0.5)
    assert torch.equal(batch.observation["count"], numbers) and torch.equal(
        batch.next_observation["count"], numbers + 1
    )
    assert torch.equal(batch.action, numbers % 5) and torch.equal(batch.discount, batch.reward)
    assert batch.action.dtype == torch.int64 and batch.weight.dtype == torch.float32
    assert torch.equal(batch.weight, torch.ones(BATCH)), "equal priorities, equal weights"
    assert (batch.keys.number + 1000 * batch.keys.shard).tolist() == numbers.tolist()


def test_drawing_waits_for_min_size_and_then_keeps_to_the_ratio(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.write(0, MIN_SIZE - 1)
    assert scene.source.take(1) is None
    scene.write(0, 1)
    drawn = 0
    for _ in range(100):
        scene.write(1, 4)
        while scene.source.take(1) is not None:
            drawn += BATCH
    inserted = scene.limiter.inserted - MIN_SIZE
    assert inserted == 400 and abs(drawn - 4.0 * inserted) <= scene.limiter.rule.room
    scene.source.refresh()
    figures = scene.source.figures()
    assert figures["sampled"] == drawn and figures["inserted"] == 420 and figures["size"] == 420
    assert figures["samples_per_insert"] == drawn / inserted == pytest.approx(4.0, rel=0.05)


def test_shards_that_lost_too_much_for_a_batch_are_filled_again_and_nobody_spins(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.write(0, 40)
    while scene.limiter.may_insert(4):
        scene.write(0, 4)
    shard = scene.writers[0].shard
    shard.words[TAIL] = shard.head - 3  # all but three items are evicted
    assert not scene.limiter.may_insert(4) and scene.limiter.may_sample(BATCH), "actors wait for the learner"
    assert scene.source.take(1) is None and scene.limiter.may_insert(4), "and the learner for actors"
    figures = scene.source.figures()
    assert figures["sampled"] == 0 and figures["samples_per_insert"] == 0.0 < figures["written_off"]
    spent_s = time.thread_time()
    scene.source.wait(Waiting(), 0.5)  # type: ignore[arg-type]
    assert time.thread_time() - spent_s < 0.1, "it sleeps until they have appended"
    for _ in range(3):
        scene.write(1, 4)
        batch = scene.source.take(1)
    assert batch is not None


def test_the_learner_does_not_wait_for_the_first_batch_beyond_the_last_step(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **{"stop.steps": 10})
    scene.tally.note(0, 9, np.empty((0, 3)))
    began = time.monotonic()
    scene.source.wait(Waiting(), 0.05)  # type: ignore[arg-type]
    assert time.monotonic() - began >= 0.05
    scene.tally.note(1, 1, np.empty((0, 3)))
    began = time.monotonic()
    scene.source.wait(Waiting(), 5.0)  # type: ignore[arg-type]
    assert time.monotonic() - began < 2.0


def test_what_is_appended_after_the_look_at_the_limiter_is_not_written_off(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.write(0, MIN_SIZE - 1)
    limiter = scene.source.limiter
    look = limiter.may_sample

    def look_and_append(count: int) -> bool:
        may = look(count)
        if scene.writers[0].head < MIN_SIZE:
            scene.write(0, 9)
        return may

    limiter.may_sample = look_and_append  # type: ignore[method-assign]
    assert scene.source.take(1) is None and limiter.balance > 0.0 == limiter.written_off
    assert scene.source.take(1) is not None


def test_an_episode_source_sleeps_where_the_shards_cannot_fill_a_batch(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    source = EpisodeSource(scene.plan, torch.device("cpu"))
    source.admit()
    scene.tally.note(0, 40, np.array([[1.0, 40, 0]]))
    scene.write(0, 40)
    shard = scene.writers[0].shard
    shard.words[TAIL] = shard.head - 3
    assert source.take(1) is None and scene.limiter.may_sample(BATCH)
    looks, look = list[bool](), source._may_draw
    source._may_draw = lambda: looks.append(look()) or looks[-1]  # type: ignore[func-returns-value, method-assign]
    source.wait(Waiting(), 0.05)  # type: ignore[arg-type]
    assert looks and not any(looks), "it asks for both: an episode that is due, and a batch"


@pytest.mark.parametrize("lost", [float("nan"), float("inf")])
def test_td_errors_that_are_lost_are_a_divergence(tmp_path: Path, lost: float) -> None:
    scene = Scene(tmp_path, **{"optimizer.learning_rate": 0.125})
    scene.write(0, 50)
    batch = scene.take()
    with pytest.raises(DivergedError, match=rf"became {lost}.*learning-rate \(now 0\.125\)"):
        scene.source.acknowledge(batch.keys, torch.where(torch.arange(BATCH) == 3, lost, 1.0))


def test_priorities_that_are_given_back_decide_what_is_drawn_next(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **{"replay.samples_per_insert": 0.0, "replay.alpha": 1.0})
    scene.write(0, 50, priority=1e-9)
    scene.write(1, 50, priority=1e-9)
    batch = scene.take()
    chosen = int(batch.reward[3])
    scene.source.acknowledge(batch.keys, torch.where(torch.arange(BATCH) == 3, 5.0, 1e-9))
    assert scene.take().reward.tolist() == [chosen] * BATCH
    assert scene.tally.top_priority == 5.0
    scene.source = scene.make()  # the learner was restarted: priorities come from the column
    assert scene.take().reward.tolist() == [chosen] * BATCH


def test_uniform_replay_looks_at_no_priority(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **{"replay.samples_per_insert": 0.0, "replay.prioritized": False})
    scene.write(0, 50, priority=1e-9)
    scene.write(1, 50, priority=1e9)
    scene.take()
    assert scene.source.acknowledge is None
    again = scene.take()
    assert (again.reward < 1000).sum() == BATCH / 2 and torch.equal(again.weight, torch.ones(BATCH))


def test_weights_follow_beta_and_beta_the_run(tmp_path: Path) -> None:
    fields = {"replay.samples_per_insert": 0.0, "replay.beta_start": 0.4, "replay.beta_end": 0.8, "replay.alpha": 1.0}
    scene = Scene(tmp_path, **fields)
    scene.write(0, 50, priority=1.0)
    scene.write(1, 50, priority=4.0)
    for progress, beta in ((0.0, 0.4), (0.5, 0.6), (1.0, 0.8)):
        scene.source.progress = progress
        batch = scene.take()
        rare = batch.reward < 1000
        assert rare.any() and not rare.all()
        expected = torch.where(rare, 1.0, 4.0**-beta).to(torch.float32)
        torch.testing.assert_close(batch.weight, expected)


def test_lag_is_that_of_what_is_drawn(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.write(0, 50, version=3)
    scene.take(version=10)
    counters = scene.source.counters
    assert (counters.lag_mean, counters.lag_max) == (7.0, 7) and scene.source.fresh_lag == [(7.0, 7)]


def test_steps_and_episodes_come_from_the_tally_and_outlive_the_learner(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.tally.note(0, 30, np.array([[5.0, 10, 0], [9.0, 20, 1]]))
    scene.tally.note(1, 12, np.array([[7.0, 12, 0]]))
    assert scene.source.take(1) is None, "it counts all the same"
    counters = scene.source.counters
    assert (counters.env_steps, counters.episodes, list(counters.returns)) == (42, 3, [5.0, 9.0, 7.0])
    assert list(counters.lengths) == [10, 20, 12] and counters.return_max == 9.0
    past = counters.state_dict()
    scene.tally.note(0, 8, np.array([[1.0, 8, 0]]))
    successor = ReplaySource(scene.plan, torch.device("cpu"))
    successor.counters.load_state_dict(past)
    successor.admit()
    scene.tally.note(1, 5, np.array([[2.0, 5, 0]]))
    successor.take(1)
    assert (successor.counters.env_steps, successor.counters.episodes) == (55, 5), "nothing is counted twice"
    assert list(successor.counters.returns) == [5.0, 9.0, 7.0, 2.0]


@pytest.mark.parametrize("prioritized", [False, True])
def test_a_snapshot_gives_the_same_next_batches(tmp_path: Path, prioritized: bool) -> None:
    fields = {"replay.checkpoint": True, "replay.prioritized": prioritized}
    scene = Scene(tmp_path, **fields)
    scene.write(0, 300)
    scene.write(1, 90)
    rng = np.random.default_rng(1)
    for _ in range(20):
        batch = scene.take()
        if scene.source.acknowledge is not None:
            scene.source.acknowledge(batch.keys, torch.from_numpy(rng.random(BATCH) * 9.0))
    (tmp_path / "run" / "checkpoints" / "step_000000000390").mkdir(parents=True)
    scene.source.save("step_000000000390")
    state = scene.source.state_dict()
    scene.source.finish(lambda: None)
    (tmp_path / "again").mkdir()
    other = Scene(tmp_path / "again", **fields)
    context = dataclasses.replace(other.plan.context, session=tmp_path / "new", run_dir=tmp_path / "run", generation=1)
    context.session.mkdir()
    other.plan = ReplayPlan(context)
    other.plan.make()
    assert other.plan.limiter().state() == scene.limiter.state()
    other.source = other.make()
    other.source.load_state_dict(state)
    for _ in range(10):
        one, same = scene.take(), other.take()
        assert torch.equal(one.reward, same.reward) and torch.equal(one.weight, same.weight)
        priorities = torch.from_numpy(rng.random(BATCH))
        for source, batch in ((scene.source, one), (other.source, same)):
            if source.acknowledge is not None:
                source.acknowledge(batch.keys, priorities)


def test_a_snapshot_is_written_while_batches_are_drawn_and_only_the_newest_is_kept(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **{"replay.checkpoint": True, "replay.samples_per_insert": 0.0})
    scene.write(0, 100)
    for name in ("step_000000000001", "step_000000000002"):
        scene.source.save(name)
        assert scene.source.archive is not None
        while scene.source.archive.is_writing:
            scene.take()
    assert [path.name for path in (tmp_path / "run" / "replay").iterdir()] == ["step_000000000002"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="stages batches for a GPU, and torch sees none here")
def test_a_gpu_gets_the_same_batches_ahead_of_time(tmp_path: Path) -> None:
    """A prefetched batch is the one that would have been sampled then, and priorities follow one batch later."""
    scene = Scene(tmp_path, **{"replay.samples_per_insert": 0.0, "replay.alpha": 1.0})
    scene.write(0, 50, priority=1e-9)
    scene.source = scene.make("cuda")
    batch = scene.take()
    assert batch.reward.is_cuda and batch.observation["eye"].is_cuda
    assert torch.equal(batch.observation["eye"][:, 0], batch.reward)
    assert batch.reward.tolist() == [float(number) for number in batch.keys.number]
    chosen = float(batch.reward[3])
    where = torch.arange(BATCH, device="cuda") == 3
    scene.source.acknowledge(batch.keys, torch.where(where, 5.0, 1e-9))
    scene.source.prefetch(2)
    ahead = scene.take()
    assert torch.equal(ahead.observation["eye"][:, 0], ahead.reward)
    assert scene.take().reward.tolist() == [chosen] * BATCH
