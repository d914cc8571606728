"""What the channel promises, whatever travels on it: each way of delivery, refusals, and servers that come and go."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import zmq

from echelon.errors import ConfigError, Refused
from echelon.transport import channel_client, channel_server
from echelon.transport.channel import HEADER, MAGIC, Delivery, Kind, Message, Service, digest_of
from echelon.transport.channel_client import Client, PendingRequest
from echelon.transport.channel_server import Server
from echelon.transport.connections import Connections
from echelon.transport.curve import admit, secure_client
from echelon.transport.secret import user_secret
from echelon.transport.sockets import make_socket
from running import wait_until

DEADLINE_S = 30.0
MAX_BYTES = 1 << 16
SECRET = "a secret of the tests"
READ = Service("readings", Delivery.READ, 7)
STATE = Service("states", Delivery.STATE)
RECORD = Service("records", Delivery.RECORD)


class Peer:
    """A server in a thread of its own, with one handler of each class; its successor listens at the same address."""

    def __init__(self) -> None:
        self.address = "tcp://127.0.0.1:0"
        self.num_read, self.version = 0, 0
        self.journal: list[int] = []  # numbers of records, as they were taken
        self.drops = 0  # messages to be dealt with and not answered
        self.posts: list[bytes] = []
        self.start()

    def start(self) -> None:
        self.server = Server("questions of the tests", self.address, MAX_BYTES)
        self.address, self.ended = self.server.address, threading.Event()
        self.server.serve(READ, self.read)
        self.server.serve(STATE, self.state)
        self.server.serve(RECORD, self.record)
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        while not self.ended.is_set():
            if not self.server.take(100):
                self.server.sleep(0.01)
        self.server.close()

    def stop(self) -> None:
        self.ended.set()
        self.thread.join()

    def answer(self, message: Message, *parts: bytes, **options: Any) -> None:
        if self.drops:
            self.drops -= 1
        else:
            self.server.answer(message, *parts, **options)

    def read(self, message: Message) -> None:
        self.num_read += 1
        if message.is_post:
            self.posts.append(b"|".join(bytes(frame) for frame in message.frames[1:]))
            self.server.post(message.connection, READ, b"thanks")
            return
        body = [bytes(frame) for frame in message.frames[1:]]
        if body == [b"bad"]:
            raise Refused("nobody reads that")
        self.answer(message, *reversed(body), own=(message.own[2], message.own[1], message.own[0]))

    def state(self, message: Message) -> None:
        since = message.own[0]
        self.server.hold(
            message, lambda: self.version > since, lambda: self.server.answer(message, own=(self.version, 0, 0))
        )

    def record(self, message: Message) -> None:
        if message.number not in self.journal:
            self.journal.append(message.number)
        self.answer(message, str(len(self.journal)).encode())


@pytest.fixture
def make_peer() -> Iterator[Callable[..., Peer]]:
    made: list[Peer] = []

    def make(**options: Any) -> Peer:
        made.append(Peer(**options))
        return made[-1]

    yield make
    for peer in made:
        peer.stop()


@pytest.fixture
def make_client() -> Iterator[Callable[..., Client]]:
    made: list[Client] = []

    def make(peer: Peer, **options: Any) -> Client:
        options = {"address": peer.address, "repeat_s": (0.05, 0.2), **options}
        made.append(Client("the peer", max_bytes=MAX_BYTES, **options))
        return made[-1]

    yield make
    for client in made:
        client.close()


def ask(client: Client, service: Service, *body: bytes, **options: Any) -> PendingRequest:
    return client.ask(service, lambda: [bytearray(HEADER.size), *body], **options)


def answer_of(client: Client, request: PendingRequest) -> list[bytes]:
    assert client.wait(request, DEADLINE_S) and request.answer is not None
    return [bytes(frame) for frame in request.answer[1:]]


def test_a_reading_is_answered_with_frames_and_words(make_peer: Any, make_client: Any) -> None:
    client = make_client(make_peer())
    request = ask(client, READ, b"one", b"", b"three" * 1000, own=(1, -2, 1 << 62))
    assert answer_of(client, request) == [b"three" * 1000, b"", b"one"] and request.own == (1 << 62, -2, 1)


def test_several_are_under_way_at_once_and_each_gets_its_own_answer(make_peer: Any, make_client: Any) -> None:
    client = make_client(make_peer())
    requests = [ask(client, service, b"%d" % n) for n in range(4) for service in (READ, RECORD)]
    found = [answer_of(client, request) for request in requests]
    assert found[::2] == [[b"%d" % n] for n in range(4)] and found[1::2] == [[b"%d" % n] for n in range(1, 5)]


@pytest.mark.parametrize("service", [READ, RECORD])
def test_what_was_lost_is_asked_again_by_itself(make_peer: Any, make_client: Any, service: Service) -> None:
    peer = make_peer()
    client = make_client(peer)
    peer.drops = 3
    assert answer_of(client, ask(client, service, b"x", number=5 if service is RECORD else 0))
    assert peer.num_read == 4 or peer.journal == [5]


def test_a_question_is_asked_again_though_others_are_answered(
    make_peer: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went down with a connection, and the next ones went out on the one that followed."""
    monkeypatch.setattr(channel_client, "OVERDUE_S", 0.1)
    peer = make_peer()
    client = make_client(peer, repeat_s=(1000.0, 1000.0))
    peer.drops = 1
    lost = ask(client, READ, b"lost")

    def look() -> bool:
        answer_of(client, ask(client, RECORD))
        client.poll()
        return lost.answer is not None

    wait_until(look, "it was answered, too")


@pytest.mark.parametrize("service", [READ, STATE, RECORD])
def test_a_successor_at_the_same_address_answers(make_peer: Any, make_client: Any, service: Service) -> None:
    peer = make_peer()
    client = make_client(peer)
    assert answer_of(client, ask(client, RECORD, number=1)) == [b"1"]
    peer.stop()
    number = 2 if service is RECORD else 0
    request = ask(client, service, number=number)
    assert not client.wait(request, 0.3) and client.silent_s > 0.0 and client.num_tries > 0
    assert "nothing listens there" in client.why_silent()
    peer.version = 1
    peer.start()
    answer_of(client, request)
    assert client.silent_s == 0.0 and client.num_tries == 0 and peer.journal == ([1, 2] if number else [1])


def test_a_record_is_taken_once_however_often_it_comes(make_peer: Any, make_client: Any) -> None:
    peer = make_peer()
    client = make_client(peer)
    for number in (1, 2, 2, 1, 3):
        answer_of(client, ask(client, RECORD, number=number))
    assert peer.journal == [1, 2, 3]


def test_held_requests_are_looked_at_only_if_the_state_has_changed(make_client: Any) -> None:
    server, looks, version = Server("questions of the tests", "tcp://127.0.0.1:0", MAX_BYTES), list[int](), 0
    seen = 0

    def has_changed() -> bool:
        nonlocal seen
        before, seen = seen, version
        return before != seen

    def hold(message: Message) -> None:
        since = message.own[0]

        def is_due() -> bool:
            looks.append(since)
            return version > since

        server.hold(message, is_due, lambda: server.answer(message, own=(version, 0, 0)))

    server.serve(STATE, hold, has_changed)
    server.serve(READ, server.answer)
    asking = [make_client(server, repeat_s=(1.0, 1.0)) for _ in range(4)]
    asked = [client.ask(STATE, lambda: [bytearray(HEADER.size)]) for client in asking[:3]]

    def until(*requests: PendingRequest) -> None:
        def are_answered() -> bool:
            server.take(100)
            for client in asking:
                client.poll()
            return all(request.answer is not None for request in requests)

        wait_until(are_answered, "it is answered", 20.0)

    until(*asked)  # after a while, with what they know
    assert not looks and all(request.own[0] == 0 for request in asked)
    asked = [client.ask(STATE, lambda: [bytearray(HEADER.size)]) for client in asking[:3]]
    version = 1
    until(*asked)
    assert all(request.own[0] == 1 for request in asked) and len(looks) <= 3
    asked = [client.ask(STATE, lambda: [bytearray(HEADER.size)], own=(1, 0, 0)) for client in asking[:3]]
    looks.clear()
    for _ in range(20):
        until(asking[3].ask(READ, lambda: [bytearray(HEADER.size)]))
    assert not looks, "others are served without a look at those that wait"
    server.close()


def test_a_state_is_answered_as_soon_as_there_is_a_newer_one(make_peer: Any, make_client: Any) -> None:
    peer = make_peer()
    client = make_client(peer)
    request, since = ask(client, STATE, own=(0, 0, 0)), time.monotonic()
    assert client.wait(request, DEADLINE_S) and request.own[0] == 0, "after a while it is told that there is none"
    assert time.monotonic() - since >= 0.9 * channel_server.HOLD_S
    request = ask(client, STATE, own=(0, 0, 0))
    peer.version = 3
    assert client.wait(request, DEADLINE_S)
    wait_until(lambda: answer_of(client, request := ask(client, STATE)) == [] and request.own[0] == 3, "the newest")


def test_posts_go_both_ways(make_peer: Any, make_client: Any) -> None:
    peer = make_peer()
    client = make_client(peer)
    assert client.post(READ, [bytearray(HEADER.size), b"a", b"b"])
    wait_until(lambda: client.poll(0.01) or client.posts, "it was thanked")
    assert peer.posts == [b"a|b"] and bytes(client.posts[0][1]) == b"thanks"


def test_one_that_is_no_longer_wanted_is_forgotten(make_peer: Any, make_client: Any) -> None:
    peer = make_peer()
    client = make_client(peer)
    peer.drops = 1
    request = ask(client, READ, b"x")
    wait_until(lambda: not peer.drops, "it came")
    client.forget(request)
    assert answer_of(client, ask(client, READ, b"y")) == [b"y"] and request.answer is None


@pytest.mark.parametrize(
    ("service", "body", "words"),
    [
        (READ, b"bad", "the peer at .* refused this client: nobody reads that"),
        (Service("readings", Delivery.READ, 8), b"", "it was made for another layout of readings"),
        (Service("nothing", Delivery.READ), b"", "this server does not offer that service"),
    ],
)
def test_what_does_not_fit_costs_the_connection_and_others_nothing(
    make_peer: Any, make_client: Any, service: Service, body: bytes, words: str
) -> None:
    peer = make_peer()
    good, bad = make_client(peer), make_client(peer)
    with pytest.raises(Refused, match=words):
        bad.wait(ask(bad, service, body), DEADLINE_S)
    assert not bad.wait(ask(bad, READ, b"x"), 0.2) and peer.server.num_refused == 1
    assert answer_of(good, ask(good, READ, b"x")) == [b"x"]


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"GET / HTTP/1.1"],
        [b"\xff" * HEADER.size],
        [HEADER.pack(MAGIC, Kind.ANSWER, READ.digest, READ.layout, 1, 0, 0, 0)],
        [HEADER.pack(MAGIC, 99, READ.digest, READ.layout, 1, 0, 0, 0), b"x"],
        [HEADER.pack(MAGIC, Kind.ASK, READ.digest, READ.layout, 1, 0, 0, 0)[:-1], b"x"],
    ],
)
def test_what_is_no_message_at_all_is_not_answered(make_peer: Any, make_client: Any, frames: list[bytes]) -> None:
    peer = make_peer()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        secure_client(socket, user_secret())
        socket.connect(peer.address)
        socket.send_multipart(frames)
        wait_until(lambda: peer.server.num_refused == 1, "it was refused")
        assert not socket.poll(100)
    client = make_client(peer)
    assert answer_of(client, ask(client, READ, b"x")) == [b"x"]


@pytest.mark.parametrize("error", [RuntimeError, AssertionError, RecursionError, OSError, zmq.ZMQError, ConfigError])
def test_whatever_a_message_raises_costs_only_its_sender(make_peer: Any, make_client: Any, error: Any) -> None:
    peer, told = make_peer(), list[str]()
    honest, hostile, late = (make_client(peer) for _ in range(3))
    peer.server._report = told.append

    def fail(*args: Any) -> bool:
        raise error("it says \x1b[2J\n\u202e")

    peer.state = fail
    peer.server.serve(STATE, fail)
    with pytest.raises(Refused, match=r"could not be handled: \w+: .*it says \\x1b\[2J\\n\\u202e"):
        hostile.wait(ask(hostile, STATE), DEADLINE_S)
    assert answer_of(honest, ask(honest, READ, b"x")) == [b"x"]
    peer.server.serve(STATE, lambda message: peer.server.hold(message, fail, fail))  # raises after the handler
    with pytest.raises(Refused, match="could not be handled"):
        late.wait(ask(late, STATE), DEADLINE_S)
    assert answer_of(honest, ask(honest, READ, b"x")) == [b"x"]
    assert len(told) == 2 and all(text.isprintable() and "one of the questions" in text for text in told)


def test_what_was_lost_with_a_server_is_asked_as_soon_as_its_successor_listens(
    make_peer: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_client, "OVERDUE_S", 60.0)
    peer = make_peer()
    client = make_client(peer, repeat_s=(60.0, 60.0))
    assert client.wait(ask(client, RECORD), DEADLINE_S)
    peer.drops = 1
    request = ask(client, RECORD)
    wait_until(lambda: len(peer.journal) == 2, "the server has the request")
    peer.stop()
    peer.start()
    deadline = time.monotonic() + DEADLINE_S / 2
    while not client.wait(request, 0.1):
        assert time.monotonic() < deadline, "it is repeated before the 60 s are over"


class Relay:
    """Accepts connections and forwards them, like ssh -L; hangs up if nothing listens behind it."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.target, self.num_hangups = "", 0
        self.threads = [threading.Thread(target=self.accept)]
        self.threads[0].start()

    def accept(self) -> None:
        with suppress(OSError):  # the listener is closed at the end of the test
            while True:
                near, _ = self.listener.accept()
                try:
                    host, _, port = self.target.removeprefix("tcp://").rpartition(":")
                    far = socket.create_connection((host, int(port)))
                except (OSError, ValueError):
                    self.num_hangups += 1
                    near.close()
                    continue
                self.threads.append(threading.Thread(target=self.connect, args=(near, far)))
                self.threads[-1].start()

    def connect(self, near: socket.socket, far: socket.socket) -> None:
        with near, far:
            back = threading.Thread(target=self.forward, args=(far, near))
            back.start()
            self.forward(near, far)
            back.join()

    def forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # also ends the other direction


@pytest.fixture
def relay() -> Iterator[Relay]:
    relay = Relay()
    yield relay
    with relay.listener:
        relay.listener.shutdown(socket.SHUT_RDWR)
        for thread in relay.threads:
            thread.join()


def test_a_relay_without_a_server_is_waited_for(relay: Relay, make_peer: Any, make_client: Any) -> None:
    """It accepts and hangs up, as a server does that refuses the handshake; but it sends no greeting."""
    peer = make_peer()
    client = make_client(peer, address=relay.address, repeat_s=(0.02, 0.05))
    request = ask(client, READ, b"x")
    wait_until(lambda: client.wait(request, 0.01) or client.num_tries > 12, "it was tried often")
    assert request.answer is None and relay.num_hangups > 3
    assert "process behind it is not running" in client.why_silent()
    relay.target = peer.address
    assert answer_of(client, request) == [b"x"]


def test_a_server_behind_a_relay_refuses_another_secret(
    relay: Relay, make_peer: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = make_peer()
    relay.target = peer.address
    monkeypatch.setenv("ECHELON_SECRET", SECRET)
    client = make_client(peer, address=relay.address)
    with pytest.raises(Refused, match="refuses the handshake"):
        client.wait(ask(client, READ, b"x"), DEADLINE_S)


def raw_client(address: str) -> socket.socket:
    """Returns a TCP connection that has completed the handshake of ZMTP 3 without a secret."""
    host, port = address.removeprefix("tcp://").split(":")
    tcp = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    tcp.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48) + b"\x04" + bytes([len(ready)]) + ready)
    heard = b""
    while b"READY" not in heard or len(heard) <= 64 + 1 + heard[65]:  # a greeting of 64 bytes, then its own command
        heard += tcp.recv(1024)
    return tcp


def test_a_message_without_an_end_is_bounded() -> None:
    """libzmq keeps the parts of an unfinished message, however many: its queue limits count finished ones.

    Only a peer with the secret gets as far as that on a channel; here the listener has none.
    """
    with zmq.Context() as context, make_socket(context, zmq.ROUTER, MAX_BYTES) as listener:
        listener.setsockopt(zmq.HEARTBEAT_IVL, 0)  # which the raw client would not answer
        connections = Connections(listener, MAX_BYTES)
        port = listener.bind_to_random_port("tcp://127.0.0.1")
        part = b"\x03" + struct.pack(">Q", MAX_BYTES) + bytes(MAX_BYTES)  # more parts follow
        closed: list[str] = []
        with raw_client(f"tcp://127.0.0.1:{port}") as hostile, suppress(ConnectionError):
            for _ in range(1_000):  # 65 MB in all
                hostile.sendall(part)
                closed += connections.serve()
            wait_until(lambda: closed.extend(connections.serve()) or closed, "the connection is closed")
            while hostile.recv(1 << 16):
                pass
        assert ["without the end of a message" in reason for reason in closed] == [True]
        connections.close()


def test_many_large_messages_are_within_the_bound(make_peer: Any, make_client: Any) -> None:
    """The bound counts what is unread, not what a client has sent over time."""
    peer = make_peer()
    client, data = make_client(peer), bytes(MAX_BYTES)
    for _ in range(400):  # 26 MB
        assert client.wait(client.ask(RECORD, lambda: [bytearray(HEADER.size), data]), DEADLINE_S)
    assert peer.server.num_refused == 0


@pytest.mark.parametrize("frame", [b"hello", b"\xff" * HEADER.size], ids=["short", "long"])
def test_a_server_of_something_else_is_told_apart(make_client: Any, frame: bytes) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        admit(socket, user_secret())
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        client = Client("the peer", f"tcp://127.0.0.1:{port}", MAX_BYTES)
        request = ask(client, READ)
        connection, *_ = socket.recv_multipart()
        socket.send_multipart([connection, frame])
        with pytest.raises(Refused, match="bytes that are not a reply: it is not the peer"):
            client.wait(request, DEADLINE_S)
        client.close()


@pytest.mark.parametrize(("ours", "theirs"), [(SECRET, None), (SECRET, SECRET + "!"), (None, SECRET)])
def test_another_secret_is_told_at_once(
    make_peer: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch, ours: str | None, theirs: str | None
) -> None:
    """None: the secret of the user."""
    monkeypatch.setenv("ECHELON_SECRET", theirs or "")
    peer = make_peer()
    monkeypatch.setenv("ECHELON_SECRET", ours or "")
    client = make_client(peer)
    with pytest.raises(Refused, match=r"refuses the handshake. Set ECHELON_SECRET to the same value on both sides"):
        client.wait(ask(client, READ), DEADLINE_S)
    assert peer.num_read == 0


def test_with_the_same_secret_they_talk_and_off_the_loopback_there_must_be_one(
    make_peer: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHELON_SECRET", SECRET)
    client = make_client(make_peer())
    assert answer_of(client, ask(client, READ, b"x")) == [b"x"]
    monkeypatch.setenv("ECHELON_SECRET", "")
    for make in (lambda: Server("x", "tcp://0.0.0.0:0", 1), lambda: Client("x", "tcp://10.0.0.1:5", 1)):
        with pytest.raises(ConfigError, match="is not on the loopback"):
            make()


def test_an_address_that_is_taken_is_said_so(make_peer: Any) -> None:
    address = make_peer().address
    with pytest.raises(ConfigError, match=rf"cannot listen for questions at {address}.*Choose another"):
        Server("questions", address, MAX_BYTES)


def test_whoever_was_stopped_itself_takes_nobody_for_silent(
    make_peer: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make_client(make_peer())
    answer_of(client, ask(client, READ))
    request = ask(client, STATE)
    clock = time.monotonic
    monkeypatch.setattr(channel_client.time, "monotonic", lambda: clock() + 1000.0)
    client.poll()
    assert client.silent_s < 1.0
    assert client.wait(request, DEADLINE_S)


def test_digests_tell_layouts_apart() -> None:
    layouts: list[Any] = ["a", "b", ("a",), (("a", (1, 2)),), (("a", (12,)),), ()]
    assert len({digest_of(layout) for layout in layouts}) == len(layouts)
