"""The replay of actors on other hosts: the head stores what they would have stored themselves, and counts it once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import toy_envs as toy
from echelon.config import replace
from echelon.errors import DivergedError
from echelon.hosts.run_steps import RunSteps
from echelon.replay.reader import ShardReader
from echelon.roles.actor import Actor
from echelon.roles.context import Station
from echelon.roles.plan.parts import Plan
from echelon.roles.ring_sink import SlotSink
from stage import Stage

Array = np.ndarray[Any, Any]
MakeStage = Callable[..., Stage]
FAR = 1  # the actor on the other host
FREE = {"replay.samples_per_insert": 0.0, "replay.capacity": 4096, "replay.min_size": 8, "replay.batch": 8}
FIELDS = {"actor.num_actors": 2, "actor.envs": 3, "actor.trajectory": 4, "replay.n_step": 3, **FREE}


class TwoHosts:
    """A head, and a host with actor 1, whose slots the test carries."""

    def __init__(self, near: Stage, folder: Path) -> None:
        self.near, session = near, folder / "far"
        session.mkdir()
        self.context = dataclasses.replace(near.context, session=session, is_at_head=False, index=FAR)
        self.plan, self.steps = Plan(self.context), RunSteps(session)
        self.ring, self.tally = self.plan.raw_ring(), near.plan.replay.tally()
        self.plan.board().publish(near.plan.model.parts(), 1)
        self.tally.open(0, 0)
        self.station = Station(dataclasses.replace(near.context, name="carrier"))
        self.sink = self.new_sink()
        self.actors: list[Actor] = []
        self.others: list[Stage] = []

    def new_sink(self) -> SlotSink:
        sink = self.near.plan.slot_sink(self.station)
        sink.serve([FAR])
        return sink

    def actor(self, incarnation: int = 0) -> Actor:
        name = f"actor-{FAR}-{incarnation}"
        self.actors.append(Actor(dataclasses.replace(self.context, name=name, incarnation=incarnation)))
        return self.actors[-1]

    def slot(self, actor: Actor) -> list[memoryview]:
        """The next slot of the actor, as it is sent."""
        self.ring.grant(FAR, 1)
        while not self.ring.num_ready(FAR):
            assert actor.step(0.0)
        parts = self.plan.slot_bytes.pack(self.ring.readable(FAR)["slot"].copy())
        self.ring.release(FAR)
        return [memoryview(part) for part in parts]

    def carry(self, actor: Actor, count: int) -> None:
        for _ in range(count):
            self.sink.write(FAR, self.slot(actor))
            self.sink.ring.commit(FAR)
            self.steps.set(self.sink.env_steps)

    def alone(self, folder: Path) -> Stage:
        """The same run on one host."""
        folder.mkdir()
        self.others.append(Stage(folder, replace(self.context.train, engine="inline", **{"hosts.count": 1})))
        return self.others[-1]

    def close(self) -> None:
        for other in self.others:
            other.close()
        for actor in self.actors:
            actor.close()
        self.ring.close()
        self.station.close()


@pytest.fixture
def make_hosts(make_stage: MakeStage, tmp_path: Path) -> Iterator[Callable[..., TwoHosts]]:
    made = []

    def make(env: Any = toy.CounterEnv, name: str = "dqn", **fields: Any) -> TwoHosts:
        near = make_stage(env, name, **{**FIELDS, "engine": "hosts", "hosts.count": 2, **fields})
        made.append(TwoHosts(near, tmp_path))
        return made[-1]

    yield make
    for hosts in made:
        hosts.close()


def items(stage: Stage) -> dict[str, Array]:
    """Every item in the shard of the actor, with its initial priority."""
    reader: ShardReader = stage.plan.replay.readers()[FAR]
    start, head = reader.window()
    block = reader.layout.block(head - start)
    assert reader.read(np.arange(start, head), block).all()
    return {**block.fields, "priority": reader.initial(start, head)}


COUNTER = {"env.kwargs": {"length": 5}}
FILM = {"env.id": toy.Film, "replay.frames": "stacked", "network.hidden": ()}


@pytest.mark.parametrize(("name", "env"), [("dqn", COUNTER), ("apex-dqn", COUNTER), ("dqn", FILM)])
def test_the_head_stores_what_the_actor_would_have_stored(
    make_hosts: Callable[..., TwoHosts], tmp_path: Path, name: str, env: dict[str, Any]
) -> None:
    fields = {**env, "algorithm.epsilon_steps": 100}
    hosts = make_hosts(name=name, **fields)
    hosts.carry(hosts.actor(), 10)
    alone = hosts.alone(tmp_path / "alone")
    alone.plan.replay.tally().open(0, 0)
    actor = alone.actor(FAR)
    for _ in range(10 * 4):
        assert actor.step(0.0)
    theirs, ours = items(alone), items(hosts.near)
    assert len(ours["priority"]) > 60 and len(np.unique(ours["action"])) == 2
    assert ours.keys() == theirs.keys()
    for field, values in ours.items():
        np.testing.assert_array_equal(values, theirs[field], err_msg=field)
    assert (len(np.unique(ours["priority"])) > 10) == (name == "apex-dqn"), "an actor values its own transitions"
    before = alone.plan.replay.tally()
    assert hosts.tally.counts_of(FAR) == before.counts_of(FAR)
    np.testing.assert_array_equal(hosts.tally.ended(FAR, 0), before.ended(FAR, 0))


def test_a_slot_that_a_dead_carrier_had_not_counted_is_counted_once(make_hosts: Callable[..., TwoHosts]) -> None:
    hosts = make_hosts(**{"env.kwargs": {"length": 2}})
    actor = hosts.actor()
    hosts.carry(actor, 3)
    slot = hosts.slot(actor)
    hosts.sink.write(FAR, slot)
    steps, episodes = hosts.tally.counts_of(FAR)
    assert steps > 0 and episodes > 3
    hosts.sink = hosts.new_sink()  # its predecessor stored the slot and died
    hosts.sink.write(FAR, slot)
    hosts.sink.ring.commit(FAR)
    assert hosts.tally.counts_of(FAR) == (steps, episodes)
    hosts.carry(actor, 3)
    later, _ = hosts.tally.counts_of(FAR)
    assert steps < later <= steps + 3 * 4 * 3


def test_an_actor_that_was_at_the_head_meanwhile_keeps_its_count(make_hosts: Callable[..., TwoHosts]) -> None:
    hosts = make_hosts(**{"env.kwargs": {"length": 1_000}})
    actor = hosts.actor()
    hosts.carry(actor, 3)
    slot = hosts.slot(actor)
    hosts.sink.write(FAR, slot)  # it was not counted as received: the carrier died
    hosts.sink = hosts.new_sink()
    hosts.sink.serve([])  # its host was lost
    hosts.tally.note(FAR, 500, np.zeros((0, 3)))  # steps that it made at the head
    before, _ = hosts.tally.counts_of(FAR)
    hosts.sink.serve([FAR])
    hosts.sink.write(FAR, slot)
    assert hosts.tally.counts_of(FAR)[0] == before + 4 * 3


def test_transitions_do_not_span_actors(make_hosts: Callable[..., TwoHosts]) -> None:
    hosts = make_hosts(**{"env.kwargs": {"length": 1_000}})
    for incarnation in range(3):
        hosts.carry(hosts.actor(incarnation), 3)
    found = items(hosts.near)
    draws = 2  # a number that the environment draws for each episode
    np.testing.assert_array_equal(found["next_observation"][:, draws], found["observation"][:, draws])
    np.testing.assert_array_equal(found["next_observation"][:, 1], found["observation"][:, 1] + 3)
    assert len(np.unique(found["observation"][:, draws])) == 9
    assert len(found["reward"]) == 3 * 3 * (3 * 4 - 3), "each actor leaves its last transitions incomplete"


class DivergingEnv(toy.CounterEnv):
    """Its fifth reward is NaN."""

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        return observation, np.nan if self.t == 5 else reward, *rest


def test_a_reward_that_is_not_finite_ends_the_run(make_hosts: Callable[..., TwoHosts]) -> None:
    hosts = make_hosts(DivergingEnv, **{"env.kwargs": {"length": 1_000}})
    with pytest.raises(DivergedError, match="reward is nan after a step of actor 1, environment 0"):
        hosts.carry(hosts.actor(), 3)


def test_slots_are_granted_as_far_as_the_band_of_the_limiter_allows(make_hosts: Callable[..., TwoHosts]) -> None:
    hosts = make_hosts(**{"replay.samples_per_insert": 4.0, "replay.min_size": 100})
    limiter, ring, actor = hosts.near.plan.replay.limiter(), hosts.sink.ring, hosts.actor()

    def granted() -> int:
        hosts.sink.grant()
        return int(ring.granted[FAR] - ring.head[FAR])

    assert granted() == ring.num_slots > 1, "several are on their way"
    while granted():
        hosts.carry(actor, 1)
    rule = limiter.rule
    assert limiter.balance > rule.room - 4.0 * rule.chunk and limiter.balance <= rule.room + 4.0 * rule.chunk
    while not granted():
        limiter.note_sampled(0, 8)
    assert granted() == 1 and limiter.balance <= rule.room
    hosts.sink.serve([])
    limiter.note_sampled(0, 4_000)
    assert granted() == 1, "a stream that another role writes is granted nothing"
