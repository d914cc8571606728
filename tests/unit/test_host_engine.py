"""The head's side of several hosts: who may join, what is believed, and when a host is given up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from echelon.config import replace
from echelon.control_groups import num_cores
from echelon.engines.process import ProcessSpec
from echelon.errors import Refused
from echelon.hosts.engine import HostsEngine
from echelon.hosts.messages import (
    COMMANDS,
    EVENTS,
    JOIN,
    MAX_BYTES,
    NEWER,
    STORE,
    Assignment,
    JoinRequest,
    Left,
    Report,
    Started,
    request_frames,
    unpack,
)
from echelon.hosts.ownership import Ownership
from echelon.hosts.quorum import Quorum
from echelon.presets import preset
from echelon.roles.carrier import Carrier
from echelon.roles.plan.preparation import prepare, world_address
from echelon.roles.plan.stages import Stages
from echelon.roles.ring_sink import RingSink
from echelon.transport.channel import HEADER
from echelon.transport.channel_client import Client, PendingRequest
from echelon.transport.channel_server import Server
from echelon.transport.shared_memory import SlotRing, WeightsBoard
from echelon.transport.slot_wire import SLOTS, SlotBytes
from echelon.version import __version__
from echelon.world.node import Node
from echelon.world.store_table import StoreTable
from running import wait_until

LEASE_S = 1.0


class Peer:
    """An agent's connection to the head, spoken by hand."""

    def __init__(self, engine: HostsEngine, name: str = "second") -> None:
        self.engine, self.number = engine, 0
        self.client = Client("the run", engine.address, MAX_BYTES, name=name.encode())
        self.request = JoinRequest(__version__, name, num_cores(), "b/3")

    def until(self, request: PendingRequest) -> Any:
        """The answer, while the head looks at its messages."""

        def answered() -> bool:
            self.engine._serve(0.001)
            self.client.poll()
            return request.answer is not None

        wait_until(answered, "the head answers", 20.0)
        return request.answer

    def join(self) -> Assignment:
        answer = unpack(self.until(self.client.ask(JOIN, lambda: request_frames(self.request))), Assignment)
        assert isinstance(answer, Assignment)
        return answer

    def report(self, *events: Any) -> None:
        self.number += 1
        self.until(self.client.ask(EVENTS, lambda: request_frames(list(events)), number=self.number))

    def commands(self, taken: int = 0) -> list[Any]:
        answer = self.until(self.client.ask(COMMANDS, lambda: [bytearray(HEADER.size)], own=(taken, 0, 0)))
        told: list[Any] = unpack(answer, list[Any])
        return told


@pytest.fixture
def engine(shm_dir: Path) -> Iterator[HostsEngine]:
    engine = HostsEngine(str(shm_dir), ("json",), "tcp://127.0.0.1:0", LEASE_S)
    yield engine
    engine.close(0.0)


@pytest.fixture
def peer(engine: HostsEngine, shm_dir: Path) -> Iterator[Peer]:
    """The one other host of a run with four actors, whose carrier is there."""
    peer = Peer(engine)
    assert peer.join().wait, "the run is not ready"
    (shm_dir / "carrier.address").write_text("tcp://127.0.0.1:9")
    gather(engine, shm_dir, peer, 4, 2)
    yield peer
    peer.client.close()


def gather(engine: HostsEngine, shm_dir: Path, peer: Peer, num_actors: int, num_hosts: int) -> list[str]:
    """Has `peer` join while the head waits for everybody; what the head says."""
    told: list[str] = []
    asked = peer.client.ask(JOIN, lambda: request_frames(peer.request))
    ended = threading.Event()

    def knock() -> None:
        while not ended.is_set() and asked.answer is None:
            peer.client.poll(0.01)

    thread = threading.Thread(target=knock)
    thread.start()
    gathered(engine, shm_dir, num_actors, num_hosts, told.append)
    ended.set()
    thread.join()
    peer.join()
    return told


def gathered(
    engine: HostsEngine, shm_dir: Path, num_actors: int, num_hosts: int, told: Callable[[str], None]
) -> SlotRing:
    """Has the head wait for hosts; returns the counts of the actors' slots."""
    counts = SlotRing(shm_dir, SlotBytes(64), num_actors, 2)
    assignment = Assignment(streams=num_actors, slots=2, weights=8, act_bytes=64)
    engine.gather(assignment, Quorum(num_hosts), counts, shm_dir / "carrier.address", told, lambda: None)
    return counts


def test_a_host_gets_its_share_and_its_commands(engine: HostsEngine, peer: Peer) -> None:
    assignment = peer.join()
    assert (assignment.num_actors, assignment.streams) == (2, 4)
    assert not assignment.wait
    engine.start(ProcessSpec("actor-2", "a:b", {"x": 1}))
    assert engine.pid("actor-2") is None and engine.place("actor-2") == "second" and engine.place("actor-1") == ""
    (command,) = peer.commands()
    assert command["type"] == "start" and command["spec"]["name"] == "actor-2"
    peer.report(Started("actor-2", 77))
    assert engine.pid("actor-2") == 77
    engine.signal("actor-2", 10)
    assert [one["type"] for one in peer.commands(taken=1)] == ["signal"]
    engine.start(ProcessSpec("actor-2", "a:b", {"x": 1}))
    head, other = engine.hosts()
    assert head["actors"] == 2 and other.pop("cores") == num_cores()
    assert other == {"name": "second", "cpus": "b/3", "actors": 2, "restarts": 1, "lost": ""}


def test_another_version_is_refused(engine: HostsEngine, peer: Peer) -> None:
    old = Peer(engine, "old")
    old.request = JoinRequest("0.0.1", "old", 1)
    for _ in range(2):
        with pytest.raises(Refused, match=r"it has Echelon 0\.0\.1 and this run has"):
            old.join()
        old.client.close()
        old.client = Client("the run", engine.address, MAX_BYTES, name=b"old again")
    old.client.close()
    version, _ = (text for _, text in engine.reports())
    assert "host old: it has Echelon 0.0.1 and this run has" in version


def test_another_secret_is_reported_once(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = HostsEngine(str(shm_dir), ("json",), "tcp://127.0.0.1:0", 60.0)
    with monkeypatch.context() as others:
        others.setenv("ECHELON_SECRET", "the secret of another run")
        client = Client("the run", engine.address, MAX_BYTES)

    def knock() -> None:
        with pytest.raises(Refused, match="ECHELON_SECRET"):
            client.wait(client.ask(JOIN, lambda: request_frames(JoinRequest(__version__, "stranger", 1))), 20.0)
        good = Client("the run", engine.address, MAX_BYTES)
        assert good.wait(good.ask(JOIN, lambda: request_frames(JoinRequest(__version__, "second", 1))), 20.0)
        good.close()

    thread = threading.Thread(target=knock)
    thread.start()
    told: list[str] = []
    gathered(engine, shm_dir, 2, 2, told.append)
    thread.join()
    assert [text for text in told if text.startswith("refused a connection: its secret")] == told[1:2]
    client.close()
    engine.close(0.0)


def test_hosts_of_one_name_are_told_apart(engine: HostsEngine, shm_dir: Path) -> None:
    peers = [Peer(engine), Peer(engine)]
    peers[1].client.close()
    peers[1].client = Client("the run", engine.address, MAX_BYTES, name=b"another connection")
    thread = threading.Thread(target=lambda: [wait_for_place(peer) for peer in peers])
    thread.start()
    gathered(engine, shm_dir, 3, 3, lambda _: None)
    thread.join()
    assert (engine.place("actor-1"), engine.place("actor-2")) == ("second", "second-2")
    for peer in peers:
        peer.client.close()


def wait_for_place(peer: Peer) -> None:
    asked = peer.client.ask(JOIN, lambda: request_frames(peer.request))
    assert peer.client.wait(asked, 20.0)


def test_a_repeated_operation_on_the_store_counts_once(engine: HostsEngine, peer: Peer) -> None:
    def store(number: int, *operation: Any) -> Any:
        return unpack(peer.until(peer.client.ask(STORE, lambda: request_frames(operation), number=number)), Any)

    engine.share_store(StoreTable())
    assert [store(number, "add", "key", 1) for number in (1, 2, 2, 3)] == [1, 2, 2, 3]
    assert store(4, "get", "key") == b"3"
    with pytest.raises(Refused, match="the store has no operation 'drop'"):
        store(5, "drop", "key")


def test_what_a_host_says_of_roles_that_it_does_not_have_is_passed_over(engine: HostsEngine, peer: Peer) -> None:
    ended = {"type": "ended", "pid": 1, "code": 0, "signal": 9, "ended_with": "", "log": "", "failure": None}
    peer.report(Started("learner", 5), {**ended, "name": "learner"}, Report("message", "hello"))
    assert engine.exits() == [] and engine.pid("learner") is None
    assert engine.reports() == [("message", "hello")]
    peer.report({**ended, "name": "actor-3"})
    assert [(gone.name, gone.signal) for gone in engine.exits()] == [("actor-3", 9)]


@pytest.mark.parametrize(
    "event",
    [
        {"type": "ended"},
        {"type": "ended", "name": "actor-2", "pid": 1, "code": 0, "signal": 999, "ended_with": "", "log": "",
         "failure": None},
        {"type": "report", "function": "nonsense", "text": "x"},
        {"type": "report", "function": "message", "text": 3},
        {"type": "nothing"},
        3,
    ],
)  # fmt: skip
def test_a_message_that_makes_no_sense_costs_its_sender_the_connection(
    engine: HostsEngine, peer: Peer, event: object
) -> None:
    with pytest.raises(Refused, match="a message between hosts was refused"):
        peer.report(event)
    assert engine.exits() == [] and len(engine.reports()) == 1


def test_a_silent_host_is_given_up_and_its_actors_start_at_the_head_once_the_carrier_knows(
    engine: HostsEngine, peer: Peer, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echelon.engines.local.LocalEngine.pid", lambda self, name: 1 if name == "carrier" else None)
    started: list[str] = []
    monkeypatch.setattr("echelon.engines.local.LocalEngine.start", lambda self, spec: started.append(spec.name))
    engine.start(ProcessSpec("actor-2", "a:b", {}))
    peer.report(Started("actor-2", 77))
    assert engine.has_current_gauge("actor-2")
    wait_until(lambda: engine.exits() or not engine.has_current_gauge("actor-2"), "the host is silent", 20.0)
    wait_until(lambda: engine.exits() == [] and engine.place("actor-2") == "", "the host is given up", 20.0)
    assert not Ownership(shm_dir, 4).is_seen, "the carrier has not looked"
    engine.start(ProcessSpec("actor-3", "a:b", {}))
    assert engine.exits() == [] and started == []
    Ownership(shm_dir, 4).look()
    (gone,) = engine.exits()
    assert gone.name == "actor-2" and "host second is lost (silent for" in gone.ended_with and gone.is_reported
    assert engine.reports() == [("message", f"{gone.ended_with}; this host takes actors 2 and 3")]
    assert started == ["actor-3"], "what was to be started meanwhile"
    with pytest.raises(Refused, match="host second is lost"):
        peer.report(Started("actor-2", 78))


def test_every_host_has_an_inference_server_which_ends_with_it(
    engine: HostsEngine, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    monkeypatch.setattr("echelon.engines.local.LocalEngine.start", lambda self, spec: started.append(spec.name))
    assert engine.joined() == [1] and engine.joined() == [], "each host is reported once"
    for name in ("inference-0", "inference-1", "actor-2"):
        engine.start(ProcessSpec(name, "a:b", {}))
    assert started == ["inference-0"] and len(peer.commands()) == 2
    peer.report(Started("inference-1", 77), Started("actor-2", 78), Left("it was stopped"))
    assert {gone.name: gone.is_final for gone in engine.exits()} == {"inference-1": True, "actor-2": False}
    for name in ("inference-1", "actor-2"):
        engine.start(ProcessSpec(name, "a:b", {}))
    assert started == ["inference-0", "actor-2"], "the actor starts at the head, the server nowhere"


def test_a_silent_host_is_reported_once_and_so_is_its_return(
    engine: HostsEngine, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echelon.hosts.members.SILENT_S", 0.5)
    texts: list[str] = []

    def look() -> list[str]:
        engine.exits()
        texts.extend(text for _, text in engine.reports())
        return texts

    wait_until(look, "the silence is reported", 20.0)
    peer.commands()
    wait_until(lambda: len(look()) == 2, "the return is reported", 20.0)
    assert "host second has been silent for" in texts[0] and "starts its actors 2 and 3 elsewhere in" in texts[0]
    assert texts[1] == "host second is back"


def test_a_host_that_leaves_before_the_run_begins_leaves_its_place(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where all of it comes in one look at the messages."""
    engine = HostsEngine(str(shm_dir), ("json",), "tcp://127.0.0.1:0", 60.0)  # no host is silent for too long here
    (shm_dir / "carrier.address").write_text("tcp://127.0.0.1:9")
    first, second, third = (Peer(engine, name) for name in ("first", "second", "third"))

    def come_and_go() -> None:
        for one in (first, second, third):
            asked = one.client.ask(JOIN, lambda one=one: request_frames(one.request))
            while asked.answer is None:
                one.client.poll(0.01)
            if one is first:
                left = one.client.ask(EVENTS, lambda: request_frames([Left("a typo")]), number=1)
                one.client.wait(left, 5.0)

    take = engine._control.take

    def take_all(most: int) -> int:
        num = take(most)
        while thread.is_alive():
            num += take(most)
        return num

    monkeypatch.setattr(engine._control, "take", take_all)
    thread = threading.Thread(target=come_and_go)
    thread.start()
    told: list[str] = []
    gathered(engine, shm_dir, 3, 3, told.append)
    thread.join()
    assert "host first left: a typo" in told
    assert {engine.place("actor-1"), engine.place("actor-2")} == {"second", "third"}
    for one in (first, second, third):
        one.client.close()
    engine.close(0.0)


def test_the_time_spent_waiting_for_hosts_does_not_count(
    engine: HostsEngine, shm_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "gather", lambda *_: time.sleep(0.5))
    changes = {"engine": "hosts", "hosts.count": 2, "run.dir": str(tmp_path / "run")}
    config = replace(preset("impala", "CartPole-v1"), **changes)
    world = Node.host(world_address(config, shm_dir))
    context, _ = prepare(config, shm_dir, engine, world, 0, 100.0, Stages(lambda _: None))
    world.close()
    assert 100.5 <= context.started_at < 110.0


# The carrier.


@pytest.fixture
def carrier(shm_dir: Path) -> Iterator[Any]:
    """A carrier of two streams, the second of which is another host's, without a world around it."""
    layout = SlotBytes(64)
    ring, board = SlotRing(shm_dir, layout, 2, 2), WeightsBoard(shm_dir, 8)
    made = Carrier.__new__(Carrier)
    made.sink, made.ring, made.board, made.ownership = RingSink(ring, layout), ring, board, Ownership(shm_dir, 2)
    made.weights, made.packed = np.empty(8, np.uint8), (0, b"")
    made.server = Server("hosts", "tcp://127.0.0.1:0", 4096)
    made.server.serve(SLOTS, made._take_slot)
    made.server.serve(NEWER, made._answer_newer)
    token = made.ownership.give(1, here=False)
    client = Client("the carrier", made.server.address, 4096)
    yield SimpleNamespace(carrier=made, client=client, ring=ring, board=board, token=token)
    client.close()
    made.server.close()
    ring.close()


def send(scene: Any, count: int, value: int, token: int | None = None, stream: int = 1) -> PendingRequest:
    parts = [bytearray(HEADER.size), np.full(64, value, np.uint8).data]
    request: PendingRequest = scene.client.ask(
        SLOTS,
        lambda: parts,
        number=2 * count + stream + 1,
        own=(stream, count, scene.token if token is None else token),
    )
    end = time.monotonic() + 0.3
    while request.answer is None and time.monotonic() < end:
        scene.carrier.server.take(10)
        scene.client.poll(0.001)
    scene.client.forget(request)  # it is not repeated: the test sends it again itself
    return request


def test_a_slot_is_taken_once_and_in_order(carrier: Any) -> None:
    carrier.ring.grant(1, 2)
    assert send(carrier, 1, 11).answer is None and carrier.ring.num_ready(1) == 0, "one before it is missing"
    assert send(carrier, 0, 10).answer is not None and carrier.ring.num_ready(1) == 1
    assert send(carrier, 0, 99).answer is not None and carrier.ring.num_ready(1) == 1, "it came again"
    assert send(carrier, 1, 11).answer is not None and carrier.ring.num_ready(1) == 2
    assert [int(carrier.ring.readable(1, ahead)["slot"][0]) for ahead in (0, 1)] == [10, 11]


@pytest.mark.parametrize(("stream", "granted"), [(7, 1), (-1, 1), (1, 0)])
def test_a_slot_that_nobody_may_send_is_refused(carrier: Any, stream: int, granted: int) -> None:
    carrier.ring.grant(1, granted)
    with pytest.raises(Refused, match=r"there is no stream|slot 0, which was not granted"):
        send(carrier, 0, 10, None, stream)
    assert carrier.ring.num_ready(1) == 0 and carrier.ring.num_ready(0) == 0


@pytest.mark.parametrize(("stream", "token"), [(1, 6), (0, None), (1, 0)])
def test_a_slot_of_a_stream_that_another_host_has_is_discarded(carrier: Any, stream: int, token: int | None) -> None:
    carrier.ring.grant(1, 1)
    assert send(carrier, 0, 10, token, stream).answer is not None, "its sender may go on"
    assert carrier.ring.num_ready(1) == 0 and carrier.ring.num_ready(0) == 0


def test_a_late_slot_of_a_host_that_has_the_stream_again_is_discarded(carrier: Any) -> None:
    carrier.ring.grant(1, 1)
    carrier.carrier.ownership.give(1, here=True)
    again = carrier.carrier.ownership.give(1, here=False)
    assert send(carrier, 0, 10).answer is not None and carrier.ring.num_ready(1) == 0, "it was sent before"
    assert send(carrier, 0, 11, again).answer is not None and carrier.ring.num_ready(1) == 1


@pytest.mark.parametrize("words", [b"123", b"12345678", b"12345678" * 2])
def test_a_question_for_what_is_newer_that_makes_no_sense_is_refused(carrier: Any, words: bytes) -> None:
    carrier.client.ask(NEWER, lambda: [bytearray(HEADER.size) + words], own=(0, 0, 0))
    with pytest.raises(Refused):
        wait_until(lambda: (carrier.carrier.server.take(10), carrier.client.poll(0.01))[1], "it answers", 20.0)
