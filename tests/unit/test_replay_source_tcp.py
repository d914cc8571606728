"""The replay source over TCP: batches in flight, counts on both hosts, and a shard server that stops and returns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from echelon.config import TrainConfig, replace
from echelon.errors import ConfigError
from echelon.presets import preset
from echelon.replay.sampled import Draft
from echelon.replay.shard import ShardWriter
from echelon.roles.context import Context, Station
from echelon.roles.plan.replay import ReplayPlan
from echelon.roles.replay_source import ReplaySource
from echelon.schema import Spaces, TransitionBatch
from echelon.servers.shards import ShardServer
from echelon.transport.sockets import announce
from running import wait_until

BATCH, MIN_SIZE = 8, 20
LONG_S = 28.0  # no server is lost for being slow
SPACES = Spaces(gym.spaces.Box(-9.0, 9.0, (2,)), gym.spaces.Discrete(5))
FIELDS = {"actor.num_actors": 2, "actor.envs": 1, "actor.trajectory": 4, "replay.n_step": 1, "replay.batch": BATCH}
FIELDS |= {"replay.min_size": MIN_SIZE, "replay.capacity": 800, "replay.samples_per_insert": 4.0}
FIELDS |= {"replay.transport": "tcp", "replay.lost_after_s": LONG_S, "engine": "local"}


class StillStation(Station):
    """A station that reports nothing."""

    def __init__(self) -> None:
        pass

    def waited(self, start: float) -> None:
        del start


class Scene:
    """A source whose shards the test writes and a thread serves; item n has reward n."""

    def __init__(self, folder: Path, **fields: Any) -> None:
        session = folder / "session"
        session.mkdir(parents=True)
        config: TrainConfig = replace(preset("apex-dqn", "CartPole-v1"), **{**FIELDS, **fields})
        context = Context(
            name="learner", index=0, incarnation=0, generation=0, train=config, spaces=SPACES, state_shapes=(),
            session=session, address="", run_dir=folder / "run", started_at=time.monotonic(),
        )  # fmt: skip
        self.plan, self.stopped = ReplayPlan(context), threading.Event()
        self.plan.make()
        self.actors, self.writers = self.plan.limiter(), [ShardWriter(self.plan.shard(index)) for index in range(2)]
        self.open()
        self.source = ReplaySource(self.plan, torch.device("cpu"))
        self.source.admit()

    def open(self) -> None:
        """Serves at the address of the previous server."""
        file, plan = self.plan.server_file, self.plan
        address = file.read_text() if file.exists() else "tcp://127.0.0.1:0"
        server = ShardServer(plan.folder, plan.wire, plan.rule, address)
        announce(file, server.address)
        self.stopped.clear()
        self.thread = threading.Thread(target=self._serve, args=(server,))
        self.thread.start()

    def _serve(self, server: ShardServer) -> None:
        while not self.stopped.is_set():
            server.step(0.05)
        server.close()

    def shut(self) -> None:
        self.stopped.set()
        self.thread.join()

    def write(self, shard: int, count: int) -> None:
        writer = self.writers[shard]
        numbers = np.arange(writer.head, writer.head + count)
        small = numbers.astype(np.float32)
        fields = {"observation": np.stack([small, small], 1), "next_observation": np.stack([small, small], 1)}
        fields |= {"reward": small, "discount": small, "action": numbers % 5, "version": np.ones(count, np.int64)}
        writer.append(fields, np.ones(count))
        self.actors.note_inserted(shard, writer.head)

    def take(self) -> TransitionBatch:
        """Returns the next batch, as a learner receives it."""

        def look() -> TransitionBatch | None:
            self.source.listen()
            batch = self.source.take(1)
            if batch is None:
                self.source.wait(StillStation(), 1.0)
            return batch

        batch = wait_until(look, "there is a batch")
        assert batch is not None and batch.reward.tolist() == batch.keys.number.tolist()
        return batch

    def drain(self) -> int:
        """Takes all batches that the limiter allows; returns the number of transitions."""
        drawn = 0
        while self.source.drafts or self.source.limiter.may_sample(BATCH):
            self.take()
            drawn += BATCH
        return drawn


def size_of(source: ReplaySource) -> int:
    """Returns how many transitions the source has, after it has read what arrived."""
    source.refresh()
    return int(source.figures()["size"])


@pytest.fixture
def make_scene(tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    scenes: list[Scene] = []

    def make(**fields: Any) -> Scene:
        scenes.append(Scene(tmp_path / str(len(scenes)), **fields))
        return scenes[-1]

    yield make
    for scene in scenes:
        scene.source.close()
        scene.shut()


@pytest.mark.parametrize("prefetch", [0, 3])
def test_batches_are_whole_and_so_many_are_under_way(make_scene: Callable[..., Scene], prefetch: int) -> None:
    scene = make_scene(**{"replay.prefetch": prefetch, "replay.samples_per_insert": 0.0})
    scene.write(0, 100)
    scene.write(1, 50)
    for _ in range(10):
        batch = scene.take()
        assert len(scene.source.drafts) == prefetch
        scene.source.acknowledge(batch.keys, torch.rand(BATCH) + 0.1)
    wait_until(lambda: size_of(scene.source) == 150, "all is taken in")


def test_actors_and_learner_keep_to_the_ratio_through_the_wire(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    drawn, limiter, link = 0, scene.source.limiter, scene.source.links[0]
    for _ in range(60):
        if not scene.actors.wait_to_insert(0.0):
            drawn += scene.drain()
            sampled = limiter.sampled
            link.send_counts()
            wait_until(lambda sampled=sampled: scene.actors.sampled == sampled, "the actors know")  # type: ignore[misc]
        assert scene.actors.wait_to_insert(0.0), "drawing made room"
        scene.write(0, 4)
        wait_until(lambda: (link.poll(), limiter.inserted)[1] == scene.writers[0].head, "the learner knows")
    drawn += scene.drain()
    inserted = scene.actors.inserted - MIN_SIZE
    assert inserted == 220 and abs(drawn - 4.0 * inserted) <= scene.actors.rule.room
    assert drawn == limiter.sampled


def test_a_server_that_dies_is_waited_for_and_then_gone_on_with(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(**{"replay.samples_per_insert": 0.0})
    scene.write(0, 100)
    scene.take()
    scene.shut()
    while scene.source.take(1) is not None:  # batches that were in flight
        pass
    threading.Timer(0.2, scene.open).start()
    for _ in range(5):
        scene.take()
    assert scene.source.news() == []


@pytest.mark.parametrize("late_s", [0.0, 0.5])
def test_without_any_host_it_waits_until_one_is_back(
    make_scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch, late_s: float
) -> None:
    """Also if the host is lost between two checks, of which the second is late."""
    is_ready = Draft.is_ready
    monkeypatch.setattr(Draft, "is_ready", lambda draft: (time.sleep(late_s), is_ready(draft))[1])
    scene = make_scene(**{"replay.samples_per_insert": 0.0})
    scene.write(0, 100)
    scene.write(1, 20)
    wait_until(lambda: scene.source.take(1) and scene.source.replay.size == 120, "all is taken in")
    scene.shut()
    (link,) = scene.source.links
    link.lost_after_s = 1.0
    told: list[str] = []

    def is_lost() -> bool:
        assert scene.source.take(1) is None or not link.lost
        scene.source.wait(StillStation(), 0.05)
        told.extend(scene.source.news())
        assert len(told) <= 2, told
        return len(told) == 2

    wait_until(is_lost, "the shards are lost")
    assert "replay shard 0 at tcp://127.0.0.1:" in told[0] and "is lost with 100 items" in told[0]
    assert scene.source.take(1) is None and size_of(scene.source) == 0
    link.lost_after_s = LONG_S
    scene.open()
    scene.take()
    wait_until(lambda: size_of(scene.source) == 120, "all is back")
    assert [text.partition(" is ")[2] for text in scene.source.news()] == [
        "back with 100 items.",
        "back with 20 items.",
    ]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"engine": "inline"}, r"replay\.transport=tcp needs actors in separate processes"),
        ({"replay.checkpoint": True}, r"replay\.checkpoint=true needs the shards in the learner's shared memory"),
        ({"replay.address": "10.0.0.1"}, r"replay\.address=10\.0\.0\.1 is not an address"),
        ({"replay.prefetch": -1}, r"replay\.prefetch=-1"),
        ({"replay.lost_after_s": 0.0}, r"replay\.lost_after_s=0"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        replace(preset("dqn", "CartPole-v1"), **{"engine": "local", "replay.transport": "tcp", **fields})
