"""Shards of another host, read through its shard server: the same draws, weights and priorities as in place."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from echelon.errors import ConfigError, Refused
from echelon.replay import remote as remote_module
from echelon.replay import wire as wire_module
from echelon.replay.frames import FrameWriter
from echelon.replay.layout import ShardLayout, item_layout
from echelon.replay.limiter import Limiter, LimiterRule
from echelon.replay.reader import PriorityColumn, Reader, ShardReader
from echelon.replay.remote import Link
from echelon.replay.remote_wait import RemoteWait
from echelon.replay.sampled import Mass, Sampled
from echelon.replay.shard import Shard, ShardWriter
from echelon.replay.sharded import Replay
from echelon.replay.wire import ReplayRequest, ReplayWire
from echelon.servers import shards as server_module
from echelon.servers.shards import ShardServer
from echelon.transport import channel_client
from echelon.transport.channel import HEADER, MAGIC, Delivery, Kind, Message
from echelon.transport.curve import secure_client
from echelon.transport.secret import user_secret
from running import wait_until

Array = np.ndarray[Any, Any]
CAPACITY, BATCH, ALPHA = 64, 32, 0.6
LONG_S = 60.0  # no host is lost for being slow
FIELDS: dict[str, Any] = {"shard": ((), np.int64), "number": ((), np.int64)}
RULE = LimiterRule(4.0, 20, 3 * CAPACITY, BATCH, chunk=16, num_shards=3)


class Host:
    """Some shards in a separate folder, with a server in a thread."""

    def __init__(self, folder: Path, shards: Sequence[int], layout: ShardLayout) -> None:
        folder.mkdir()
        self.folder, self.wire = folder, ReplayWire(layout, shards, RULE)
        self.shards = {index: Shard.at(folder, index, layout) for index in shards}
        self.writers = {index: ShardWriter(shard) for index, shard in self.shards.items()}
        self.limiter = Limiter.at(folder, RULE)
        self.address, self.server = "tcp://127.0.0.1:0", None

    def open(self) -> None:
        self.server: ShardServer | None = ShardServer(self.folder, self.wire, RULE, self.address)
        self.address, self._stopped = self.server.address, threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(self.server, self._stopped))
        self._thread.start()

    @staticmethod
    def _serve(server: ShardServer, stopped: threading.Event) -> None:
        while not stopped.is_set():
            server.step(0.05)
        server.close()

    def close(self) -> None:
        if self.server is not None:
            self._stopped.set()
            self._thread.join()
            self.server = None

    def append(self, shard: int, priorities: Any) -> None:
        """Appends items that contain their shard and number."""
        priorities, writer = np.asarray(priorities, np.float64), self.writers[shard]
        numbers = writer.head + np.arange(len(priorities))
        writer.append({"shard": np.full(len(numbers), shard), "number": numbers}, priorities)
        self.limiter.note_inserted(shard, writer.head)


class Scene:
    """A learner's host, with shard 0 on it, and another host with shards 1 and 2."""

    def __init__(self, folder: Path, layout: ShardLayout | None = None) -> None:
        self.folder, layout = folder, layout or item_layout(FIELDS, CAPACITY)
        self.near, self.far = Host(folder / "near", [0], layout), Host(folder / "far", [1, 2], layout)
        self.far.open()
        self.columns = [PriorityColumn(layout.capacity) for _ in range(3)]
        self.links: list[Link] = []

    def link(self, columns: Sequence[PriorityColumn | None] | None = None, **options: Any) -> Link:
        options = {"lost_after_s": LONG_S} | options
        columns = columns or self.columns[1:]
        self.links.append(Link(self.far.address, self.far.wire, columns, self.near.limiter, **options))
        return self.links[-1]

    def readers(self) -> list[Reader]:
        """Returns a replay over all shards, through the link where they are remote."""
        link = self.link()
        link.arrive(30.0)
        return [ShardReader(self.near.shards[0], self.columns[0]), *link.readers]

    def in_place(self, alpha: float = ALPHA) -> Replay:
        """Returns a replay over all shards, read in place."""
        shards = self.near.shards | self.far.shards
        return Replay([ShardReader(shards[index]) for index in range(3)], alpha)

    def heads(self) -> list[int]:
        return [(self.near.shards | self.far.shards)[index].head for index in range(3)]

    def fill(self, rng: np.random.Generator, count: int = 50) -> None:
        for host, shard in ((self.near, 0), (self.far, 1), (self.far, 2)):
            host.append(shard, rng.random(count) + 0.01)

    def close(self) -> None:
        for link in self.links:
            link.close()
        for host in (self.near, self.far):
            host.close()


def caught_up(scene: Scene, replay: Replay) -> None:
    """Waits until the replay has added all appended items."""

    def look() -> bool:
        replay.advance()
        return [replay.window(shard)[1] for shard in range(3)] == scene.heads()

    wait_until(look, "all is taken in")


def assert_same(one: Sampled, other: Sampled) -> None:
    np.testing.assert_array_equal(one.keys.shard, other.keys.shard)
    np.testing.assert_array_equal(one.keys.number, other.keys.number)
    np.testing.assert_array_equal(one.weights, other.weights)
    for name, value in one.fields.items():
        np.testing.assert_array_equal(value, other.fields[name], err_msg=name)


@pytest.fixture
def make_scene(shm_dir: Path) -> Iterator[Callable[..., Scene]]:
    scenes: list[Scene] = []

    def make(layout: ShardLayout | None = None) -> Scene:
        scenes.append(Scene(shm_dir / str(len(scenes)), layout))
        return scenes[-1]

    (shm_dir / "0").mkdir()
    yield make
    for scene in scenes:
        scene.close()


@pytest.fixture
def scene(make_scene: Callable[..., Scene]) -> Scene:
    return make_scene()


class TestDrawing:
    @pytest.mark.parametrize("alpha", [0.0, ALPHA])
    def test_draws_weights_and_priorities_are_those_of_shards_read_in_place(self, scene: Scene, alpha: float) -> None:
        rng = np.random.default_rng(0)
        scene.fill(rng)
        replay, reference = Replay(scene.readers(), alpha), scene.in_place(alpha)
        for step in range(30):
            caught_up(scene, replay)
            reference.advance()
            assert replay.mass == reference.mass and replay.sizes == reference.sizes
            one, other = (r.sample(BATCH, 0.4, np.random.default_rng(step)) for r in (replay, reference))
            assert_same(one, other)
            np.testing.assert_array_equal(one.fields["shard"], one.keys.shard)
            np.testing.assert_array_equal(one.fields["number"], one.keys.number)
            priorities = rng.random(BATCH).astype(np.float32) + 0.01
            assert replay.update(one.keys, priorities) == reference.update(other.keys, priorities) == BATCH
            scene.fill(rng, count=int(rng.integers(0, 12)))

    @pytest.mark.parametrize("beta", [0.4, 1.0])
    def test_weights_are_those_of_one_buffer(self, scene: Scene, beta: float) -> None:
        rng = np.random.default_rng(1)
        for shard in range(3):
            host = scene.near if shard == 0 else scene.far
            host.append(shard, rng.random(40) * 10.0 ** rng.integers(-3, 3) + 1e-6)
        replay = Replay(scene.readers(), ALPHA)
        caught_up(scene, replay)
        drawn = replay.sample(BATCH, beta, rng, others=Mass(3.5, 17))
        shards = scene.near.shards | scene.far.shards
        whole = np.concatenate([shards[index].initial[:40] for index in range(3)]) ** ALPHA
        own = np.array([shards[s].initial[n] for s, n in zip(drawn.keys.shard, drawn.keys.number, strict=True)])
        expected = ((120 + 17) * own**ALPHA / (whole.sum() + 3.5)) ** -beta
        assert set(drawn.keys.shard.tolist()) == {0, 1, 2}
        np.testing.assert_allclose(drawn.weights, expected / expected.max(), rtol=1e-9)
        assert drawn.max_weight == pytest.approx(expected.max(), rel=1e-9)

    def test_batches_that_are_drawn_ahead_are_those_that_would_have_been_drawn(self, scene: Scene) -> None:
        scene.fill(np.random.default_rng(0))
        replay, reference = Replay(scene.readers(), ALPHA), scene.in_place()
        caught_up(scene, replay)
        rng, same = np.random.default_rng(2), np.random.default_rng(2)
        drafts = [replay.draw(BATCH, 0.4, rng) for _ in range(4)]
        for draft in reversed(drafts):  # in any order
            wait_until(draft.is_ready, "it came")
        for draft in drafts:
            assert_same(replay.collect(draft), reference.sample(BATCH, 0.4, same))

    def test_stacks_come_back_whole_though_each_frame_travels_once(self, make_scene: Callable[..., Scene]) -> None:
        fields: dict[str, Any] = {"eye": ((4, 3, 5), np.uint8), "next_eye": ((4, 3, 5), np.uint8), "n": ((), np.int32)}
        scene = make_scene(item_layout(fields, CAPACITY, {"eye": "frames", "next_eye": "frames"}))
        rng = np.random.default_rng(0)
        for host, shard in ((scene.near, 0), (scene.far, 1), (scene.far, 2)):
            frames = FrameWriter(host.writers[shard], "frames", 1)
            stack = rng.integers(0, 255, (1, 4, 3, 5), np.uint8)
            number = frames.store(stack)
            for step in range(100):  # more than there is room for
                stack = np.concatenate([stack[:, 1:], rng.integers(0, 255, (1, 1, 3, 5), np.uint8)], 1)
                following = frames.store(stack)
                items = {"eye": number, "next_eye": following, "n": np.array([step], np.int32)}
                host.writers[shard].append(items, np.ones(1))
                number = following
        replay, reference = Replay(scene.readers(), ALPHA), scene.in_place()
        caught_up(scene, replay)
        for seed in range(3):
            one, other = (r.sample(BATCH, 0.4, np.random.default_rng(seed)) for r in (replay, reference))
            assert_same(one, other)
            np.testing.assert_array_equal(one.fields["eye"][:, 1:], one.fields["next_eye"][:, :-1])

    def test_what_is_overwritten_on_its_way_is_drawn_again(self, scene: Scene) -> None:
        rng = np.random.default_rng(0)
        scene.fill(rng)
        replay = Replay(scene.readers(), ALPHA)
        caught_up(scene, replay)
        scene.far.close()  # no server answers yet
        draft = replay.draw(BATCH, 0.4, rng)
        for shard in (1, 2):
            scene.far.append(shard, rng.random(40) + 0.01)
        assert not draft.is_ready()
        before = draft.drawn.number[draft.drawn.shard > 0].copy()
        scene.far.open()
        drawn = replay.collect(draft)
        np.testing.assert_array_equal(drawn.fields["number"], drawn.keys.number)
        np.testing.assert_array_equal(drawn.fields["shard"], drawn.keys.shard)
        there = drawn.keys.number[drawn.keys.shard > 0]
        assert len(there) and there.min() >= 90 - CAPACITY > before.min()

    def test_items_that_a_shard_never_had_are_not_whole(self, scene: Scene) -> None:
        scene.fill(np.random.default_rng(0))
        scene.link().arrive(30.0)
        (link,) = scene.links
        read = link.readers[1].ask(np.array([-5, 0, 49, 50, 10**15]))
        link.send()
        assert read.into(link.wire.layout.block(5)).tolist() == [False, True, True, False, False]


class TestNews:
    def test_a_long_past_comes_in_pieces(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (wire_module, server_module):
            monkeypatch.setattr(module, "MAX_NEWS", 7)
        scene.fill(np.random.default_rng(0))
        replay = Replay(scene.readers(), ALPHA)
        caught_up(scene, replay)
        assert replay.mass == scene.in_place().mass

    def test_a_learner_that_was_away_takes_in_the_last_items(self, scene: Scene) -> None:
        rng = np.random.default_rng(0)
        scene.fill(rng)
        replay = Replay(scene.readers(), ALPHA)
        caught_up(scene, replay)
        for _ in range(5):
            scene.fill(rng, count=40)
        caught_up(scene, replay)
        assert replay.mass == scene.in_place().mass and replay.sizes == [CAPACITY] * 3

    def test_a_learner_made_anew_knows_the_priorities(self, scene: Scene) -> None:
        rng = np.random.default_rng(0)
        scene.fill(rng)
        old = Replay(scene.readers(), ALPHA)
        caught_up(scene, old)
        drawn = old.sample(BATCH, 0.4, rng)
        old.update(drawn.keys, rng.random(BATCH))
        mass = old.mass
        scene.links[0].close()
        new = Replay(scene.readers(), ALPHA)
        assert new.mass == mass and new.sizes == [50] * 3

    def test_two_learners_share_the_shards_of_a_host(self, scene: Scene) -> None:
        scene.fill(np.random.default_rng(0))
        links = [scene.link([self_column, None]) for self_column in scene.columns[1:2]]
        links.append(scene.link([None, scene.columns[2]]))
        for link, index in zip(links, (1, 2), strict=True):
            link.arrive(30.0)
            replay = Replay(link.readers, ALPHA)
            wait_until(lambda replay=replay: (replay.advance(), replay.size)[1] == 50, "it is taken in")  # type: ignore[misc]
            drawn = replay.sample(BATCH, 0.4, np.random.default_rng(0))
            assert (drawn.fields["shard"] == index).all()


class TestLimiter:
    def test_counts_travel_both_ways(self, scene: Scene) -> None:
        near, far = scene.near.limiter, scene.far.limiter
        scene.fill(np.random.default_rng(0))
        link = scene.link()
        link.arrive(30.0)
        wait_until(lambda: (link.poll(), near.inserted)[1] == 150, "the learner knows what is there")
        near.note_sampled(0, BATCH)
        scene.near.append(0, [1.0])
        link.send_counts()
        wait_until(lambda: far.counts().tolist() == [51, 50, 50, BATCH, 0], "the actors know what was drawn")

    def test_an_actor_that_waits_is_woken(self, scene: Scene) -> None:
        scene.fill(np.random.default_rng(0))
        far = scene.far.limiter
        assert not far.may_insert(16)
        woken = threading.Thread(target=lambda: far.wait_to_insert(60.0))
        woken.start()
        link = scene.link()
        scene.near.limiter.note_sampled(0, 600)
        link.send_counts()
        woken.join(30.0)
        assert not woken.is_alive() and far.may_insert(16)

    @pytest.mark.parametrize("shard", [0, 1])
    def test_a_learner_that_waits_is_woken_by_appends_here_and_there(self, scene: Scene, shard: int) -> None:
        link = scene.link()
        link.arrive(30.0)
        limiter = scene.near.limiter
        remote_wait = RemoteWait([link], limiter.listen(0))
        assert not limiter.may_sample(BATCH)
        host = scene.near if shard == 0 else scene.far
        actor = threading.Timer(0.05, lambda: host.append(shard, np.ones(40)))
        actor.start()

        def may() -> bool:
            remote_wait.listen()
            return limiter.may_sample(BATCH) or bool(remote_wait.wait(30.0))

        wait_until(may, "it may draw")
        actor.join()


class TestDeaths:
    def test_what_was_asked_is_answered_by_the_successor(self, scene: Scene) -> None:
        scene.fill(np.random.default_rng(0))
        replay, reference = Replay(scene.readers(), ALPHA), scene.in_place()
        caught_up(scene, replay)
        scene.far.close()
        draft = replay.draw(BATCH, 0.4, np.random.default_rng(3))
        address = scene.far.address
        scene.far.open()
        assert scene.far.address == address
        assert_same(replay.collect(draft), reference.sample(BATCH, 0.4, np.random.default_rng(3)))
        assert replay.lost == []

    @pytest.mark.parametrize("delivery", [Delivery.READ, Delivery.STATE])
    def test_a_question_that_is_lost_is_asked_again_though_others_are_answered(
        self, scene: Scene, monkeypatch: pytest.MonkeyPatch, delivery: Delivery
    ) -> None:
        """Its connection broke, and the next request was sent on the new connection."""
        monkeypatch.setattr(channel_client, "OVERDUE_S", 0.5)
        rng = np.random.default_rng(0)
        scene.fill(rng)
        replay, hear, lost = Replay(scene.readers(), ALPHA), ShardServer._answer, list[Delivery]()
        caught_up(scene, replay)

        def lose_one(server: ShardServer, message: Message, question: ReplayRequest) -> None:
            if message.service.delivery is delivery and not lost:
                lost.append(delivery)
            else:
                hear(server, message, question)

        monkeypatch.setattr(ShardServer, "_answer", lose_one)
        scene.far.append(1, rng.random(10) + 0.01)

        def look() -> bool:
            replay.advance()
            replay.collect(replay.draw(BATCH, 1.0, rng))
            return bool(lost) and replay.window(1)[1] == 60

        wait_until(look, "both were answered")

    def test_a_host_that_is_lost_is_dropped_and_taken_in_again(self, scene: Scene) -> None:
        rng = np.random.default_rng(0)
        scene.fill(rng)
        replay = Replay(scene.readers(), ALPHA)
        caught_up(scene, replay)
        drawn = replay.sample(BATCH, 0.4, rng)
        replay.update(drawn.keys, rng.random(BATCH))
        mass, draft = replay.mass, replay.draw(BATCH, 0.4, rng)
        scene.far.close()
        scene.links[0].lost_after_s = 0.3
        drafts = [draft, replay.draw(BATCH, 0.4, rng)]
        for one in drafts:  # items in flight are drawn again from the remaining shards
            drawn = replay.collect(one)
            np.testing.assert_array_equal(drawn.fields["number"], drawn.keys.number)
        assert (drawn.keys.shard == 0).all() and replay.sizes == [50, 0, 0]
        assert [message.partition(" (")[0] for message in replay.lost] == [
            f"replay shard {shard} at {scene.far.address} is lost with 50 items" for shard in (1, 2)
        ]
        assert re.search(r"no reply for [\d.]+ s, \d+ tries", replay.lost[0])
        assert replay.lost[1].endswith("Training goes on with 1 shards.")
        replay.lost.clear()
        scene.links[0].lost_after_s = LONG_S
        scene.far.open()
        wait_until(lambda: (replay.advance(), replay.size)[1] == 150, "it is back")
        assert replay.mass == mass and replay.lost == [
            f"replay shard {shard} at {scene.far.address} is back with 50 items." for shard in (1, 2)
        ]
        assert (replay.sample(BATCH, 0.4, rng).keys.shard > 0).any()

    def test_a_host_that_was_made_anew_has_other_items(self, scene: Scene) -> None:
        scene.fill(np.random.default_rng(0))
        replay = Replay(scene.readers(), ALPHA)
        caught_up(scene, replay)
        old = replay.sample(BATCH, 0.4, np.random.default_rng(0))
        scene.far.close()
        address, scene.far = scene.far.address, Host(scene.folder / "anew", [1, 2], scene.far.wire.layout)
        scene.far.address = address
        scene.far.append(1, np.full(60, 2.0))  # more than were known of the old shard
        scene.far.open()
        wait_until(lambda: (replay.advance(), replay.sizes)[1] == [50, 60, 0], "it is taken in")
        mass = scene.in_place().mass.total
        assert replay.mass.total == pytest.approx(mass, rel=1e-12)
        assert scene.near.limiter.counts().tolist() == [50, 50 + 60, 50, 0, 0], "what was there before counts on"
        there = int((old.keys.shard == 0).sum())
        assert replay.update(old.keys, np.ones(BATCH)) == there, "late priorities for what is no more change nothing"
        for again in (replay, None):
            if again is None:  # a restarted learner
                scene.links[0].close()
                again = Replay(scene.readers(), ALPHA)
            assert again.sizes == [50, 60, 0]
            drawn = again.sample(BATCH, 0.4, np.random.default_rng(0))
            np.testing.assert_array_equal(drawn.fields["shard"], drawn.keys.shard)
            is_anew = drawn.keys.shard == 1
            np.testing.assert_array_equal(drawn.fields["number"][is_anew] + CAPACITY, drawn.keys.number[is_anew])

    def test_items_that_were_asked_for_before_it_was_made_anew_are_drawn_again(self, scene: Scene) -> None:
        scene.fill(np.random.default_rng(0))
        link = scene.link()
        link.arrive(30.0)
        replay = Replay([ShardReader(scene.near.shards[0], scene.columns[0]), *link.readers], ALPHA)
        caught_up(scene, replay)
        scene.far.close()
        draft = replay.draw(BATCH, 0.4, np.random.default_rng(0))
        assert (draft.drawn.shard == 1).any()
        address, scene.far = scene.far.address, Host(scene.folder / "anew", [1, 2], scene.far.wire.layout)
        scene.far.address = address
        scene.far.append(1, np.full(60, 2.0))
        scene.far.open()
        drawn = replay.collect(draft)
        is_anew = drawn.keys.shard == 1
        np.testing.assert_array_equal(drawn.fields["number"][is_anew] + CAPACITY, drawn.keys.number[is_anew])
        assert not replay.lost and (drawn.keys.shard < 2).all(), "nothing is left in the other shard"

    def test_a_learner_that_slept_long_does_not_take_that_for_silence(
        self, scene: Scene, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scene.fill(np.random.default_rng(0))
        link = scene.link()
        link.arrive(30.0)
        monkeypatch.setattr(remote_module.time, "monotonic", lambda now=remote_module.time.monotonic: now() + 1000.0)
        link.poll()
        assert not link.lost


class TestStrangers:
    def test_hostile_messages_cost_the_sender_its_connection_and_others_nothing(self, scene: Scene) -> None:
        scene.fill(np.random.default_rng(0))
        replay = Replay(scene.readers(), ALPHA)
        caught_up(scene, replay)
        wire, server = scene.far.wire, scene.far.server
        assert server is not None
        counts, since = np.zeros(wire.num_counts, np.int64), np.array([-1, -1])
        body = bytes(wire.pack_request(ReplayRequest(counts, since, [np.arange(2)] * 2)))[HEADER.size :]
        head = HEADER.pack(MAGIC, Kind.ASK, wire.items.digest, wire.items.layout, 5, 0, 0, 0)
        good = head + body
        bad = [b"", b"junk", good[:-8], good + bytes(8), good[:8] + bytes(8) + good[16:], [good, b"more"]]
        with zmq.Context() as context:
            for refused, message in enumerate(bad, 1):
                with context.socket(zmq.DEALER) as socket:
                    socket.setsockopt(zmq.LINGER, 0)
                    secure_client(socket, user_secret())
                    socket.connect(scene.far.address)
                    socket.send(good)
                    assert socket.poll(30_000) and len(socket.recv_multipart()) == 3
                    socket.send_multipart(message if isinstance(message, list) else [message])
                    wait_until(lambda refused=refused: server.num_refused == refused, "it is refused")  # type: ignore[misc]
                    socket.send(good)
                    while socket.poll(100):  # at most the reason
                        assert b"it announces" in (reason := socket.recv()) or b"not a request" in reason
        assert_same(*(r.sample(BATCH, 0.4, np.random.default_rng(9)) for r in (replay, scene.in_place())))

    def test_a_learner_of_another_run_is_told(self, scene: Scene) -> None:
        other = ReplayWire(item_layout(FIELDS, CAPACITY + 1), [1, 2], RULE)
        link = Link(scene.far.address, other, scene.columns[1:], scene.near.limiter)
        with pytest.raises(Refused, match="it was made for another layout of replay news"):
            link.arrive(30.0)
        link.close()

    def test_another_secret_is_not_let_in(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ECHELON_SECRET", "a secret of the tests")
        link = scene.link()
        with pytest.raises(Refused, match=r"refuses the handshake. Set ECHELON_SECRET"):
            link.arrive(30.0)
        server = scene.far.server
        assert server is not None
        wait_until(lambda: server.num_refused > 0, "it is refused")

    def test_off_the_loopback_there_must_be_one(self, scene: Scene, shm_dir: Path) -> None:
        with pytest.raises(ConfigError, match="is not on the loopback"):
            ShardServer(scene.far.folder, scene.far.wire, RULE, "tcp://0.0.0.0:0")
        with pytest.raises(ConfigError, match="is not on the loopback"):
            Link("tcp://10.0.0.1:5", scene.far.wire, scene.columns[1:], scene.near.limiter)
