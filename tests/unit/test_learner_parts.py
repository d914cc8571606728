"""Several learners in one run: their shares, the data they exchange, and invalid configurations."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from echelon.config import TrainConfig, replace
from echelon.errors import ConfigError, PeerLost
from echelon.presets import PRESETS, preset
from echelon.roles.coordinator import Coordinator
from echelon.roles.learners import Learners
from echelon.roles.meeting import Meeting
from echelon.roles.plan.replay import ReplayPlan, limiter_rule
from echelon.roles.replay_part import ReplayPart
from echelon.roles.source import Counters, Offer
from echelon.schema import TransitionBatch
from echelon.world.process_group import end_process_group, make_process_group
from learner_threads import in_threads, make_learners
from replay_scene import BATCH, Scene


def config_of(name: str = "impala", **fields: Any) -> TrainConfig:
    return replace(preset(name, "CartPole-v1"), **{"learner.num_learners": 2, "actor.num_actors": 2, **fields})


# Shares.


def test_every_actor_has_one_learner_and_their_order_is_that_of_the_actors() -> None:
    for actors, learners in ((2, 2), (6, 3), (7, 3), (8, 1)):
        config = config_of("apex-dqn", **{"actor.num_actors": actors, "learner.num_learners": learners})
        shares = [list(config.actors_of(learner)) for learner in range(learners)]
        assert [actor for share in shares for actor in share] == list(range(actors)) and all(shares)
        assert [config.learner_of(actor) for actor in range(actors)] == [
            learner for learner, share in enumerate(shares) for _ in share
        ]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"engine": "inline"}, "--learners 2 needs --engine local"),
        ({"actor.num_actors": 1}, "Use --learners 1 or fewer; or, in a new run, --actors 2 or more"),
        ({"actor.num_actors": 3}, "Use --learners 1 or 3; or, in a new run, --actors 2 or 4."),
        ({"learner.batch": 5}, "Use --learners 1; or, in a new run, --learner.batch 4 or 6."),
        ({"learner.batch": 1}, "Use --learners 1; or, in a new run, --learner.batch 2."),
        ({"learner.num_learners": 0}, "learner.num_learners=0 must be at least 1"),
    ],
)
def test_shares_that_cannot_be_are_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        config_of(**fields)


def test_rules_with_one_place_for_everything_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"workers' episodes. Use --learners 1"):
        config_of("dqn", **{"workers.address": "tcp://127.0.0.1:0"})
    with pytest.raises(ConfigError, match=r"a3c's gradients. Use --learners 1"):
        config_of("a3c")
    with pytest.raises(ConfigError, match=r"does not work with replay.transport=tcp"):
        config_of("apex-dqn", **{"replay.transport": "tcp"})
    assert all(config_of(name).learner_names == ["learner-0", "learner-1"] for name in PRESETS if name != "a3c")


@pytest.mark.parametrize(
    ("name", "restored", "told"),
    [
        (
            "ppo",
            ("step_9", 9, 4),
            "the learners resume from step_9 (9 steps); 2,000 steps and 6 updates since then are ",
        ),
        ("dqn", ("step_9", 9, 4), "the learners resume from step_9 (9 steps); 6 updates since then are lost"),
        ("ppo", ("step_2009", 2_009, 10), "the learners resume from step_2009 (2,009 steps)"),
        ("a3c", ("", 0, 0), "the learner resumes from the beginning (no checkpoint yet); 2,009 steps and 10 "),
    ],
)
def test_what_a_restart_lost_is_told(name: str, restored: tuple[str, int, int], told: str) -> None:
    messages: list[str] = []
    config = config_of(name) if name != "a3c" else preset(name, "CartPole-v1")
    console = SimpleNamespace(message=messages.append)
    dropped: list[int] = []  # the steps after which episodes are not counted
    metrics = SimpleNamespace(episodes=SimpleNamespace(drop_after=dropped.append))
    row = {"env_steps": 2_009, "updates": 10}
    coordinator = SimpleNamespace(config=config, console=console, row=row, metrics=metrics, _send_changes=lambda: None)
    Coordinator._on_restored(coordinator, *restored)  # type: ignore[arg-type]
    assert messages[0].startswith(told) and messages[0].endswith("lost") == (restored[2] < 10)
    assert dropped == ([] if config.experience == "replay" else [restored[1]])


# The meeting.


def source_of(counters: Counters, lags: list[tuple[float, int]], counts_offers: bool = False) -> Any:
    return SimpleNamespace(counters=counters, fresh_lag=lags, counts_offers=counts_offers)


def test_learners_add_up_what_they_consumed_and_hear_the_same() -> None:
    """Every count is added exactly once, in the order of the learners; counts from before a resume are not repeated."""
    before = {"env_steps": 1_000, "episodes": 7}
    own = [Counters(env_steps=1_000, episodes=7), Counters()]
    lags: list[list[tuple[float, int]]] = [[], []]
    everybody = [Counters(**before) for _ in own]  # type: ignore[arg-type]
    seats = [Meeting(peers, source_of(own[i], lags[i]), everybody[i]) for i, peers in enumerate(make_learners(2))]
    offers, rates = [Offer(True, 2.5, 10, 0.25), Offer(False, 0.5, 3, 0.75)], [1e-4, None]
    for turn in range(3):
        for index, counters in enumerate(own):
            counters.env_steps += 100 + index
            counters.episodes += 1
            counters.lag_sum += 50.0
            counters.lag_steps += 100
            lags[index].append((0.5, turn + index))
            counters.note_episode(10.0 * turn + index, turn + 1)
        heard = in_threads(
            [lambda i=i, turn=turn: seats[i].hold(offers[i], i == 1 and turn == 2, 7.0 + i, rates[i]) for i in range(2)]  # type: ignore[misc]
        )
        assert [seat.learning_rate for seat in seats] == [1e-4, 1e-4], "a callback sets that of the first learner"
        assert heard == [offers, offers]
        assert [seat.is_over for seat in seats] == [turn == 2] * 2, "one learner that is over is enough"
        assert [seat.elapsed_s for seat in seats] == [7.0, 7.0], "the clock of the first learner"
    assert everybody[0] == everybody[1]
    assert everybody[0].env_steps == 1_000 + 3 * 201 and everybody[0].episodes == 7 + 6
    assert list(everybody[0].returns) == [0.0, 1.0, 10.0, 11.0, 20.0, 21.0]
    assert list(everybody[0].lengths) == [1, 1, 2, 2, 3, 3]
    assert everybody[0].return_max == 21.0 and everybody[0].lag_max == 3 and everybody[0].lag_mean == 0.5
    assert seats[0].fresh_lag == [(0.5, 1), (0.5, 2), (0.5, 3)] and not seats[1].fresh_lag


def test_what_is_offered_counts_when_the_batch_is_taken() -> None:
    """Parts are ready at different times; a run that stops in between has counted only complete batches."""
    own = [Counters(), Counters()]
    seats = [
        Meeting(peers, source_of(own[i], [], counts_offers=True), Counters())
        for i, peers in enumerate(make_learners(2))
    ]

    def hold(*ready: bool, is_over: bool = False) -> list[int]:
        for index, is_new in enumerate(ready):
            if is_new and not offered[index]:
                own[index].env_steps += 10 * (index + 1)
                own[index].note_episode(float(own[index].env_steps), 1)
        offered[:] = ready
        in_threads([lambda i=i: seats[i].hold(Offer(offered[i]), is_over, 0.0) for i in range(2)])  # type: ignore[misc]
        if all(offered):
            offered[:] = False, False
        return [seat.counters.env_steps for seat in seats]

    offered = [False, False]
    assert hold(False, True) == [0, 0] and not seats[0].counters.returns
    assert hold(True, True) == [30, 30]
    assert list(seats[0].counters.returns) == [10.0, 20.0], "in the order of the learners, not of their arrival"
    assert hold(True, True) == [60, 60]
    assert hold(True, False) == [60, 60]
    assert hold(True, True, is_over=True) == [60, 60], "no learner learns from it"
    assert seats[0].counters == seats[1].counters


def test_more_episodes_than_are_kept_are_counted_and_the_best_is_known() -> None:
    own = [Counters(), Counters()]
    seats = [Meeting(peers, source_of(own[i], []), Counters()) for i, peers in enumerate(make_learners(2))]
    own[1].note_episode(500.0, 500)
    for _ in range(150):
        own[1].note_episode(1.0, 3)
    own[1].episodes = 151
    in_threads([lambda seat=seat: seat.hold(Offer(True), False, 0.0) for seat in seats])  # type: ignore[misc]
    assert seats[0].counters.episodes == 151 and seats[0].counters.return_max == 500.0
    assert list(seats[0].counters.returns) == [1.0] * 100 and list(seats[0].counters.lengths) == [3] * 100


@pytest.mark.parametrize("best", [0, 1])
def test_a_best_return_of_zero_is_kept(best: int) -> None:
    own = [Counters(), Counters()]
    seats = [Meeting(peers, source_of(own[i], []), Counters()) for i, peers in enumerate(make_learners(2))]
    own[best].note_episode(0.0, 1)
    own[1 - best].note_episode(-5.0, 1)
    in_threads([lambda seat=seat: seat.hold(Offer(True), False, 0.0) for seat in seats])  # type: ignore[misc]
    assert [seat.counters.return_max for seat in seats] == [0.0, 0.0]


def test_a_lost_peer_is_named() -> None:
    first, second = make_learners(2)
    end_process_group(second._group)
    del second._group, second._on_gpu  # drop all references, so that its sockets close
    with pytest.raises(PeerLost, match=r"learner-0 waited for learner-1"):
        first.gather(torch.zeros(1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="nccl needs a GPU, and torch sees none")
def test_what_lies_on_a_gpu_goes_by_nccl_and_the_rest_by_gloo() -> None:
    """A group of one learner is all that one GPU allows: it is made over a store, and its operations run."""
    groups = {
        backend: make_process_group(dist.HashStore(), f"learners-{backend}", 0, ["learner-0"], backend=backend)
        for backend in ("gloo", "nccl")
    }
    alone = Learners(["learner-0"], 0, groups["gloo"], groups["nccl"])
    for device in ("cpu", "cuda"):
        x = torch.arange(3.0, device=device)
        alone.add_up(x)
        alone.take_first(x)
        assert alone.gather(x).tolist() == [[0.0, 1.0, 2.0]] and x.tolist() == [0.0, 1.0, 2.0]
    groups["nccl"].shutdown()


# Parts of a replay.


class Parts:
    """The two shards of a scene, each with its own learner."""

    def __init__(self, folder: Path, **fields: Any) -> None:
        self.scene = Scene(folder, **{"learner.num_learners": 2, **fields})
        contexts = [dataclasses.replace(self.scene.plan.context, index=index) for index in range(2)]
        self.sources = [
            ReplayPart(ReplayPlan(context), torch.device("cpu"), peers)
            for context, peers in zip(contexts, make_learners(2), strict=True)
        ]
        for source in self.sources:
            source.admit()
            source.progress = 0.5  # halfway from 0.4 to 1: beta is 0.7

    def take(self) -> list[TransitionBatch | None]:
        offers = [source.offer(1) for source in self.sources]
        return in_threads([lambda s=source: s.take_part(1, offers) for source in self.sources])  # type: ignore[misc]


def test_parts_are_as_large_as_their_shards_weigh_and_weights_are_those_of_one_buffer(tmp_path: Path) -> None:
    parts = Parts(tmp_path, **{"replay.samples_per_insert": 0.0})
    parts.scene.write(0, 60, priority=3.0)
    parts.scene.write(0, 60, priority=0.5)
    parts.scene.write(1, 40, priority=1.0)
    alpha = parts.sources[0].replay.alpha
    masses = [60 * 3.0**alpha + 60 * 0.5**alpha, 40.0]
    size, total, drawn = 160, sum(masses), np.zeros(2)
    for _ in range(200):
        batches = [batch for batch in parts.take() if batch is not None]
        counts = [len(batch.reward) for batch in batches]
        assert sum(counts) == BATCH and batches[0].others == (0, counts[1]) and batches[1].others == (counts[0], 0)
        drawn += counts
        priority = torch.cat([torch.where(batches[0].reward < 60, 3.0, 0.5), torch.ones(counts[1])])
        expected = (size * priority.double() ** alpha / total) ** -0.7
        weight = torch.cat([batch.weight for batch in batches]).double()
        torch.testing.assert_close(weight, expected / expected.max(), rtol=1e-5, atol=1e-6)
    assert drawn[1] / drawn.sum() == pytest.approx(masses[1] / total, abs=0.02)
    assert parts.scene.limiter.sampled == 200 * BATCH


def test_a_learner_without_transitions_takes_an_empty_part_and_nobody_waits_for_it(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.scene.write(0, 60)
    one, other = parts.take()
    while one is not None and other is not None:
        assert len(one.reward) == BATCH and len(other.reward) == 0 and other.others == (BATCH, 0)
        parts.sources[1].acknowledge(other.keys, torch.zeros(0))
        one, other = parts.take()
    assert one is None and other is None, "all see the same"
    limiter = parts.scene.limiter
    assert limiter.sampled > 0 and not limiter.may_sample(BATCH), "until the band is used up"
    for _ in range(limiter.rule.chunk):
        parts.scene.write(1, 1)
    assert all(batch is not None for batch in parts.take())


def test_the_band_is_that_of_one_learner(tmp_path: Path) -> None:
    config = config_of("apex-dqn")
    one = limiter_rule(replace(config, **{"learner.num_learners": 1}))
    assert limiter_rule(config).room == pytest.approx(one.room, abs=0.01)


def test_priorities_go_to_their_own_shard_and_outlive_their_learner(tmp_path: Path) -> None:
    parts = Parts(tmp_path, **{"replay.samples_per_insert": 0.0})
    parts.scene.write(0, 40)
    parts.scene.write(1, 40)
    batches = [batch for batch in parts.take() if batch is not None]
    for source, batch, priority in zip(parts.sources, batches, (4.0, 9.0), strict=True):
        source.acknowledge(batch.keys, torch.full((len(batch.reward),), priority))
    columns = parts.scene.plan.columns()
    for index, (batch, priority) in enumerate(zip(batches, (4.0, 9.0), strict=True)):
        assert set(batch.keys.shard.tolist()) == {0}, "as its owner counts them"
        numbers = set(batch.keys.number.tolist())
        found = columns[index].priorities[:40]
        assert all((found[n] == priority) == (n in numbers) for n in range(40))
    assert parts.scene.tally.top_priority == 9.0
    masses = [source.offer(1)[1:3] for source in parts.sources]
    contexts = [dataclasses.replace(parts.scene.plan.context, index=index, incarnation=1) for index in range(2)]
    successors = [
        ReplayPart(ReplayPlan(context), torch.device("cpu"), peers)
        for context, peers in zip(contexts, make_learners(2), strict=True)
    ]
    assert [source.offer(1)[1:3] for source in successors] == masses, "rebuilt trees have the same mass"
    assert not math.isclose(successors[0].rng.random(), successors[1].rng.random())
