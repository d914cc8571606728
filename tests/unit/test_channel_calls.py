"""What calls promise, over both forms of the channel, lines in shared memory and TCP, here inside one process.

Whatever a peer sends, a handler raises or a value is, the next call works.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import zmq

from echelon.errors import ConfigError, GroupKeyError, PeerLost, Refused, RpcException, TransportTimeout
from echelon.transport import channel_callee
from echelon.transport.blocks import BlockPool
from echelon.transport.channel import HEADER, MAGIC, Kind
from echelon.transport.channel_callee import ROOM_S, Callee, Missing, Turn, wait_for
from echelon.transport.channel_calls import SEND_S, Calls, Future
from echelon.transport.channel_ends import CALLS, OPENING, CallReader, CallWriter, SocketEnd
from echelon.transport.codec import DEFAULT_LIMITS, Limits, encode
from echelon.transport.lines import LineReader, LineWriter
from echelon.transport.ring import PIECE_BYTES, RING_BYTES
from echelon.world.endpoint import Endpoint
from echelon.world.functions import SERVICE, Runner, Scope
from echelon.world.rpc_group import RpcGroup
from echelon.world.switchboard import MemberCalls
from running import wait_until

PATIENCE_S = 60.0
FORMS = ("line", "tcp")
SECRET = "a secret of the tests"
MAX_BYTES = 1 << 30


class Way(NamedTuple):
    """The ends of one direction."""

    writer: CallWriter
    reader: CallReader


class Ends(NamedTuple):
    """Those of a connection: requests there, answers back."""

    requests: Way
    answers: Way

    def close(self) -> None:
        for end in (*self.requests, *self.answers):
            end.close()


def line(folder: Path, name: str, blocks: bool = True) -> Way:
    """A line; without blocks, large messages go in pieces."""
    writer = LineWriter(folder, name)
    if not blocks:
        writer._pool = BlockPool(Path("/nowhere"), name, most_bytes=0)
    return Way(writer, LineReader(folder, name))


def sockets() -> Ends:
    context: zmq.Context[Any] = zmq.Context.instance()
    callee = SocketEnd.listen(context, "tcp://127.0.0.1:0", None, MAX_BYTES, "caller")
    caller = SocketEnd.connect(context, callee.address, None, MAX_BYTES, "caller")
    return Ends(Way(caller.writer, callee), Way(callee.writer, caller))


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_ends(form: str, shm_dir: Path) -> Iterator[Callable[[], Ends]]:
    """Makes connections of one form."""
    made: list[Ends] = []

    def make() -> Ends:
        if form == "line":
            names = (f"{len(made)}.requests", f"{len(made)}.answers")
            made.append(Ends(line(shm_dir, names[0]), line(shm_dir, names[1])))
        else:
            made.append(sockets())
        return made[-1]

    yield make
    for ends in made:
        ends.close()


@pytest.fixture
def ends(make_ends: Callable[[], Ends]) -> Ends:
    return make_ends()


class Peers:
    """Somebody who calls services of somebody else."""

    def __init__(self, ends: Ends) -> None:
        scope = Scope(__name__)
        self.services: dict[tuple[str, str], Any] = {}
        scope.groups["g"] = self.services
        self.runner = Runner(scope)
        self.calls = MemberCalls("callee", ends.requests.writer, ends.answers.reader, DEFAULT_LIMITS)
        callee = ends.requests.reader, ends.answers.writer
        self.callee = Callee("caller", *callee, self.runner, DEFAULT_LIMITS, self.ask_room)
        self.num_asked = 0
        self.callee.start()

    def ask_room(self) -> None:
        self.num_asked += 1

    def begin(self, service: Callable[..., Any], *args: Any, keep: bool = False, timeout_s: float = 60.0) -> Future:
        name = f"{len(self.services)}"
        self.services[SERVICE, name] = service
        return self.calls.begin(name, ("g", SERVICE, name, args, {}, keep), timeout_s)

    def close(self) -> None:
        self.callee.close()
        self.calls.close()


@pytest.fixture
def make_peers(make_ends: Callable[[], Ends]) -> Iterator[Callable[[], Peers]]:
    made: list[Peers] = []

    def make() -> Peers:
        made.append(Peers(make_ends()))
        return made[-1]

    yield make
    for peers in made:
        peers.close()


@pytest.fixture
def peers(make_peers: Callable[[], Peers]) -> Peers:
    return make_peers()


class TestEnds:
    """What each form's writer and reader have in common."""

    @pytest.mark.parametrize("sizes", [[0], [5], [1, 0, 7], [1000] * 20, [3 * PIECE_BYTES, 5]])
    def test_messages_arrive_whole_and_in_order_and_are_the_receivers_own(self, ends: Ends, sizes: list[int]) -> None:
        for way in ends:
            if way is ends.answers:
                assert ends.requests.writer.send([b"first"], PATIENCE_S)  # over TCP a callee knows its caller by that
                assert received(ends.requests, 1) == [[b"first"]]
            sent = [[bytes([number]) * size for size in sizes] for number in range(5)]
            for message in sent:
                frames = [memoryview(bytearray(frame)) for frame in message]
                assert way.writer.send(frames, PATIENCE_S)
                for frame in frames:
                    frame[:] = bytes(len(frame))
            assert received(way, 5) == sent

    def test_a_wake_ends_a_wait_and_is_kept_if_nobody_waits(self, ends: Ends) -> None:
        reader = ends.answers.reader
        results: list[Any] = []
        waiting = threading.Thread(target=lambda: results.append(reader.receive(PATIENCE_S)))
        waiting.start()
        reader.wake()
        waiting.join(PATIENCE_S)
        assert results == [None]
        reader.wake()
        assert reader.receive(PATIENCE_S) is None
        assert reader.receive(0.0) is None

    def test_a_writer_that_finds_no_room_says_so_and_goes_on_when_there_is_some(self, ends: Ends) -> None:
        way, num_sent = ends.requests, 0
        message = [bytes(PIECE_BYTES // 2)]
        while way.writer.send(message, 0.1):
            num_sent += 1
            assert num_sent < 100_000, "it has no bound"
        assert len(received(way, num_sent)) == num_sent
        assert way.writer.send(message, PATIENCE_S) and received(way, 1) == [message]

    def test_threads_send_whole_messages_in_their_order(self, ends: Ends) -> None:
        def send(who: int) -> None:
            for number in range(100):
                assert ends.requests.writer.send([bytes([who, number])], PATIENCE_S)

        threads = [threading.Thread(target=send, args=(who,)) for who in range(4)]
        for thread in threads:
            thread.start()
        messages = received(ends.requests, 400)
        for thread in threads:
            thread.join()
        for who in range(4):
            assert [frame[1] for (frame,) in messages if frame[0] == who] == list(range(100))

    def test_closing_ends_the_waits_of_both(self, ends: Ends) -> None:
        results: list[Any] = []
        waits = [threading.Thread(target=lambda: results.append(ends.requests.reader.receive(PATIENCE_S)))]
        waits[0].start()
        ends.requests.reader.close()
        ends.requests.writer.close()
        waits[0].join(PATIENCE_S)
        assert results == [None] and not ends.requests.writer.send([b"x"], PATIENCE_S)


def has_come(reader: CallReader) -> bool:
    """Whether a message that was sent can be received: over TCP it is under way for a while."""
    return not isinstance(reader, SocketEnd) or bool(int(reader._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


class Nobody:
    """A peer that takes everything in and says nothing."""

    def send(self, frames: Sequence[Any], timeout_s: float, go_on: Callable[[], bool] = lambda: False) -> bool:
        return True

    def receive(self, timeout_s: float) -> None:
        return None

    def wake(self) -> None: ...

    def close(self) -> None: ...


def received(way: Way, count: int) -> list[list[bytes]]:
    messages: list[list[bytes]] = []
    for _ in range(count):
        frames = way.reader.receive(PATIENCE_S)
        assert frames is not None
        messages.append([bytes(frame) for frame in frames])
    return messages


class TestDelivery:
    def test_calls_begin_in_their_order_and_each_gets_its_own_answer(self, peers: Peers) -> None:
        begun: list[int] = []

        def note(number: int, body: torch.Tensor) -> torch.Tensor:
            begun.append(number)
            return body + number

        body = torch.arange(100)
        futures = [peers.begin(note, number, body) for number in range(50)]
        for number in reversed(range(50)):
            assert torch.equal(futures[number].wait(), body + number)
        assert begun == list(range(50))

    def test_threads_that_wait_read_each_others_answers(self, peers: Peers) -> None:
        found: list[int] = []

        def call() -> None:
            for _ in range(50):
                found.append(peers.begin(lambda: 1).wait())

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert found == [1] * 200

    def test_calls_nest_to_any_depth(self, make_peers: Callable[[], Peers]) -> None:
        there, back = make_peers(), make_peers()

        def descend(depth: int) -> int:
            side = there if depth % 2 else back
            return 1 + side.begin(descend, depth - 1).wait() if depth else 0

        assert there.begin(descend, 40).wait() == 40

    def test_one_that_waits_for_a_call_holds_up_no_other(self, make_peers: Callable[[], Peers]) -> None:
        there, back = make_peers(), make_peers()
        over = threading.Event()
        stuck = there.begin(lambda: back.begin(lambda: wait_for(over, PATIENCE_S)).wait())
        assert there.begin(lambda: 1).wait() == 1 and not stuck.done()
        over.set()
        assert stuck.wait() is True

    def test_what_a_dead_peer_answered_is_still_read_and_the_rest_is_lost_and_not_sent_again(
        self, peers: Peers, make_peers: Callable[[], Peers]
    ) -> None:
        runs: list[str] = []
        never = threading.Event()
        answered = peers.begin(lambda: runs.append("answered"))
        stuck = peers.begin(lambda: (runs.append("stuck"), never.wait(PATIENCE_S)))
        behind = peers.begin(lambda: runs.append("behind"))
        wait_until(lambda: "stuck" in runs and has_come(peers.calls._reader), "the answer has come, and the next runs")
        peers.calls.fail(lambda what: PeerLost(f"the peer left before it answered {what}"))
        assert answered.wait() is None
        for future in (stuck, behind):
            with pytest.raises(PeerLost, match="left before it answered"):
                future.wait()
        with pytest.raises(PeerLost):
            peers.begin(lambda: 1)
        successor = make_peers()
        assert successor.begin(lambda: 1).wait() == 1 and "behind" not in runs
        peers.callee.close()
        never.set()

    def test_a_wait_in_another_thread_ends_with_the_peer(self, peers: Peers) -> None:
        never, errors = threading.Event(), []
        future = peers.begin(lambda: never.wait(PATIENCE_S))

        def wait() -> None:
            with pytest.raises(PeerLost) as caught:
                future.wait()
            errors.append(caught.value)

        waiting = threading.Thread(target=wait)
        waiting.start()
        wait_until(lambda: peers.calls._reading, "it waits")
        peers.calls.fail(lambda what: PeerLost("gone"))
        waiting.join(PATIENCE_S)
        never.set()
        assert len(errors) == 1

    def test_an_answer_that_comes_too_late_is_forgotten(self, peers: Peers) -> None:
        over = threading.Event()
        late = peers.begin(lambda: over.wait(PATIENCE_S), timeout_s=0.05)
        with pytest.raises(TransportTimeout, match=r"did not answer 0 within 0\.05 s"):
            late.wait()
        over.set()
        assert peers.begin(lambda: 2).wait() == 2 and peers.calls._futures == {}

    def test_answers_that_nobody_reads_hold_up_their_caller_alone(self, peers: Peers) -> None:
        """The callee asks for room by another way until some is made."""
        body = np.zeros(PIECE_BYTES // 16)
        futures = [peers.begin(lambda: body) for _ in range(30)]
        big = peers.begin(lambda: np.zeros(64 << 20, np.uint8))
        again = [peers.begin(lambda: np.zeros(8 << 20, np.uint8)) for _ in range(30)]
        while not all(future.settled for future in (*futures, big, *again)):
            peers.calls.drain()
            time.sleep(0.001)
        assert big.wait().nbytes == 64 << 20 and all(len(future.wait()) == len(body) for future in futures)

    def test_what_the_callee_does_not_have_is_asked_for_elsewhere(self, peers: Peers) -> None:
        def miss() -> None:
            raise Missing

        future = peers.begin(miss)
        future.if_missing = lambda: "from elsewhere"
        assert future.wait() == "from elsewhere"

    @pytest.mark.parametrize("request_", ["nonsense", (), ("1", "x"), ("g", 1)])
    def test_what_is_no_request_costs_the_connection(
        self, peers: Peers, request_: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert peers.calls._writer.send(encode(request_), PATIENCE_S)
        wait_until(lambda: peers.callee._closed, "it was refused")
        assert "a call of 'caller' was refused, and nothing more is taken from it" in capsys.readouterr().err

    def test_what_is_no_request_of_the_handler_is_refused_to_its_caller(self, peers: Peers) -> None:
        with pytest.raises(Refused, match="is no request"):
            peers.calls.begin("f()", ("too", "short"), PATIENCE_S).wait()
        assert peers.begin(lambda: 1).wait() == 1

    @pytest.mark.parametrize("answer", ["nonsense", (1,), (1, "of", "no", "form"), (1, "failed", 3)])
    def test_what_is_no_answer_ends_the_calls_and_nothing_else(self, ends: Ends, answer: Any) -> None:
        calls = Calls("m1", ends.requests.writer, ends.answers.reader, DEFAULT_LIMITS)
        future = calls.begin("f()", (), PATIENCE_S)
        received(ends.requests, 1)
        assert ends.answers.writer.send(encode(answer), PATIENCE_S)
        with pytest.raises(Refused, match=r"'m1' answers f\(\) no more: .*refused"):
            future.wait()
        with pytest.raises(Refused, match=r"'m1' answers g\(\) no more"):
            calls.begin("g()", (), PATIENCE_S)

    def test_both_sides_keep_to_the_limits(self, ends: Ends, capsys: pytest.CaptureFixture[str]) -> None:
        calls = Calls("m1", ends.requests.writer, ends.answers.reader, Limits(total_bytes=1000))
        callee = Callee(
            "m0", ends.requests.reader, ends.answers.writer, Runner(Scope(__name__)), Limits(total_bytes=100), no_room
        )
        callee.start()
        with pytest.raises(ConfigError, match=r"f\(\) cannot be sent to 'm1': a message of .* exceeds"):
            calls.begin("f()", (bytes(1000),), PATIENCE_S)
        calls.begin("f()", (bytes(500),), PATIENCE_S)
        wait_until(lambda: callee._closed, "it was refused")
        assert "100 are allowed" in capsys.readouterr().err


def no_room() -> None:
    raise AssertionError("nobody asks for room here")


class TestTcp:
    """What only this form has: strangers, secrets, and connections that break."""

    @pytest.fixture
    def pair(self) -> Iterator[tuple[SocketEnd, SocketEnd]]:
        callee = SocketEnd.listen(zmq.Context.instance(), "tcp://127.0.0.1:0", None, 1 << 20, "caller")
        caller = SocketEnd.connect(zmq.Context.instance(), callee.address, None, 1 << 20, "caller")
        yield callee, caller
        caller.close()
        callee.close()

    def test_a_stranger_is_not_heard_and_gets_nothing(self, pair: tuple[SocketEnd, SocketEnd]) -> None:
        callee, caller = pair
        stranger = SocketEnd.connect(zmq.Context.instance(), callee.address, None, 1 << 20, "stranger")
        assert stranger.send([b"hello"], PATIENCE_S) and callee.receive(0.2) is None
        assert caller.send([b"call"], PATIENCE_S)
        frames = callee.receive(PATIENCE_S)
        assert frames is not None and [bytes(frame) for frame in frames] == [b"call"]
        assert callee.send([b"answer"], PATIENCE_S) and caller.receive(PATIENCE_S) is not None
        assert stranger.receive(0.1) is None
        stranger.close()

    @pytest.mark.parametrize(
        "message",
        [
            [b""],
            [b"GET / HTTP/1.1"],
            [HEADER.pack(MAGIC, Kind.ASK, CALLS.digest, CALLS.layout + 1, 0, 0, 0, 0), b"x"],
            [OPENING[:-1], b"x"],
        ],
    )
    def test_what_is_no_call_is_refused(self, pair: tuple[SocketEnd, SocketEnd], message: list[bytes]) -> None:
        callee, caller = pair
        caller._socket.send_multipart(message)
        with pytest.raises(Refused, match="it is no call, or of another release"):
            callee.receive(PATIENCE_S)

    def test_a_frame_that_is_too_long_never_arrives(self, pair: tuple[SocketEnd, SocketEnd]) -> None:
        callee, caller = pair
        assert caller.send([bytes((1 << 20) + 1000)], PATIENCE_S) and callee.receive(0.3) is None
        wait_until(lambda: caller.send([b"x"], 1.0) and callee.receive(0.1), "it goes on on another connection")

    def test_a_callee_that_comes_again_at_its_address_is_found(self) -> None:
        """As after a broken connection: the caller's socket makes another one."""
        ends = [SocketEnd.listen(zmq.Context.instance(), "tcp://127.0.0.1:0", None, 1 << 20, "caller")]
        address = ends[0].address
        caller = SocketEnd.connect(zmq.Context.instance(), address, None, 1 << 20, "caller")
        assert caller.send([b"first"], PATIENCE_S) and ends[0].receive(PATIENCE_S) is not None
        ends[0].close()

        def listen() -> bool:
            with contextlib.suppress(zmq.ZMQError):  # its port is free a little later
                ends.append(SocketEnd.listen(zmq.Context.instance(), address, None, 1 << 20, "caller"))
            return len(ends) == 2

        wait_until(listen, "it listens again")
        assert ends[1].receive(0.1) is None, "nothing is sent twice"
        assert caller.send([b"second"], PATIENCE_S)
        frames = ends[1].receive(PATIENCE_S)
        assert frames is not None and bytes(frames[0]) == b"second"
        caller.close()
        ends[1].close()

    @pytest.mark.parametrize(("secret", "admitted"), [(SECRET, True), (SECRET + "!", False), (None, False)])
    def test_only_the_same_secret_lets_a_caller_in(self, secret: str | None, admitted: bool) -> None:
        endpoint = Endpoint("tcp://127.0.0.1:0", 1 << 20, SECRET)
        callee = endpoint.open_end(SocketEnd.listen, "tcp://127.0.0.1:0", "caller")
        caller = SocketEnd.connect(zmq.Context.instance(), callee.address, secret, 1 << 20, "caller")
        sent = caller.send([b"x"], 0.0)  # not if it was turned away before
        deadline = time.monotonic() + (PATIENCE_S if admitted else 1.0)
        found = None
        while found is None and time.monotonic() < deadline:
            assert not list(endpoint.arrivals(0.01))  # its gate admits, or not
            found = callee.receive(0.0)
        assert (found is not None) == admitted and sent >= admitted
        caller.close()
        endpoint.close()
        assert callee.receive(PATIENCE_S) is None and not callee.send([b"x"], PATIENCE_S), "it closed with its endpoint"


class Mute(Exception):
    """Cannot say what it is."""

    def __str__(self) -> str:
        raise ZeroDivisionError


class Harsh(BaseException):
    """Is no Exception."""


class Restless(np.ndarray[Any, Any]):
    """Changes the dict it lies in whenever somebody looks at it, as another thread may."""

    home: dict[str, Any]

    @property
    def itemsize(self) -> int:  # type: ignore[override]
        self.home[f"{len(self.home)}"] = 0
        return 8


def restless() -> dict[str, Any]:
    array = np.zeros(2).view(Restless)
    array.home = {"array": array}
    return array.home


def fail_with(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("service", "words"),
    [
        (fail_with(Mute()), "Mute: (its text could not be made: ZeroDivisionError)"),
        (fail_with(Harsh("no")), "Harsh: no"),
        (fail_with(SystemExit(3)), "SystemExit: 3"),
        (restless, "RuntimeError: dictionary changed size during iteration"),
        (lambda: {1}, "ConfigError: message[2] is a builtins.set"),
    ],
)
def test_a_handler_that_fails_however_harms_no_other_call(peers: Peers, service: Callable[[], Any], words: str) -> None:
    with pytest.raises(RpcException) as caught:
        peers.begin(service).wait()
    assert f"failed with {words}" in str(caught.value) and "Traceback" in caught.value.remote_traceback
    assert peers.begin(lambda: 1).wait() == 1


def test_the_error_of_a_call_can_be_pickled() -> None:
    error = RpcException("f() in 'm1' failed", "ValueError", "Traceback: there")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) == "f() in 'm1' failed\nTraceback: there"
    assert (copy.kind, copy.remote_traceback) == ("ValueError", "Traceback: there")


class TestAPeerWhoseMemoryIsGone:
    """Its shared memory is gone, and with it an answer that nobody had read."""

    @pytest.fixture
    def future(self, shm_dir: Path) -> Iterator[Future]:
        answers = LineWriter(shm_dir, "answers")
        self.calls = Calls("m1", Nobody(), LineReader(shm_dir, "answers"), DEFAULT_LIMITS)
        future = self.calls.begin("f()", (), PATIENCE_S)
        assert answers.send(encode((future.number, "answer", torch.zeros(1 << 20))), 1.0)
        (shm_dir / "answers.1").unlink()
        yield future
        self.calls.close()
        answers.close(discard=True)

    def test_whoever_tells_of_its_end_is_not_harmed(self, future: Future) -> None:
        self.calls.fail(lambda what: PeerLost(f"'m1' left before {what}"))
        with pytest.raises(PeerLost, match=r"'m1' left before f\(\)"):
            future.wait()

    def test_whoever_reads_before_its_end_is_told_learns_of_it(self, future: Future) -> None:
        with pytest.raises(PeerLost, match=r"'m1' answers f\(\) no more: segment .* cannot be joined"):
            future.wait()
        with pytest.raises(PeerLost, match=r"'m1' answers g\(\) no more"):
            self.calls.begin("g()", (), PATIENCE_S)
        self.calls.fail(lambda what: PeerLost("later"))

    def test_its_own_calls_that_nobody_can_read_end_quietly(
        self, shm_dir: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        requests = LineWriter(shm_dir, "requests")
        reader = LineReader(shm_dir, "requests")
        assert requests.send(encode((1, torch.zeros(1 << 20))), 1.0)
        (shm_dir / "requests.1").unlink()
        gone = Callee("m1", reader, Nobody(), Runner(Scope(__name__)), DEFAULT_LIMITS, no_room)
        gone._serve()  # warnings are errors: in a thread it would end with one
        assert gone._closed and requests.abandoned and capsys.readouterr().err == ""
        requests.close(discard=True)


class TestLargeMessagesInPieces:
    """More than the ring of a line holds, to somebody who has other things to do than to take them in."""

    BODY = torch.arange(RING_BYTES // 2)  # of eight bytes each

    def test_a_call_arrives(self, shm_dir: Path) -> None:
        requests = line(shm_dir, "requests", blocks=False)
        calls = Calls("m1", requests.writer, Nobody(), DEFAULT_LIMITS)
        arrived: list[Any] = []

        def take() -> None:
            while not arrived and not calls_over.wait(2 * SEND_S):
                if (frames := requests.reader.receive(0.0)) is not None:
                    arrived.append(frames)

        calls_over = threading.Event()
        taking = threading.Thread(target=take)
        taking.start()
        try:
            future = calls.begin("f()", ("g", SERVICE, "f", (self.BODY,), {}, False), PATIENCE_S)
            taking.join(PATIENCE_S)
        finally:
            calls_over.set()
            taking.join()
            calls.close()
            requests.reader.close()
        assert len(arrived) == 1 and bytes(arrived[0][1]) == self.BODY.numpy().tobytes()
        assert 0.0 < future.left_s < PATIENCE_S - SEND_S, "what sending took is not waited for again"

    def test_an_answer_arrives(self, shm_dir: Path) -> None:
        peers = Peers(Ends(line(shm_dir, "requests"), line(shm_dir, "answers", blocks=False)))
        future = peers.begin(lambda: self.BODY)
        deadline = time.monotonic() + PATIENCE_S
        while not future.settled and time.monotonic() < deadline:
            time.sleep(2 * ROOM_S)  # it is a caller that is busy
            peers.calls.drain()
        peers.close()
        assert future.settled and torch.equal(future.wait(), self.BODY)

    def test_one_that_is_not_taken_in_is_given_up_in_time(self, shm_dir: Path) -> None:
        requests = line(shm_dir, "requests", blocks=False)
        calls = Calls("m1", requests.writer, Nobody(), DEFAULT_LIMITS)
        with pytest.raises(TransportTimeout, match=r"'m1' did not take f\(\) in within 0.1 s"):
            calls.begin("f()", ("g", SERVICE, "f", (self.BODY,), {}, False), 0.1)
        assert calls._futures == {}
        calls.close()
        requests.reader.close()


class TestKeptResults:
    def test_one_that_nobody_needs_any_more_before_it_is_there_is_not_kept(self, peers: Peers) -> None:
        over = threading.Event()
        future = peers.begin(lambda: wait_for(over, PATIENCE_S), keep=True)
        peers.calls.freed.append(future.number)
        assert peers.begin(lambda: 1).wait() == 1  # the word that it is not needed went before this call
        over.set()
        assert future.wait() is None and peers.runner.kept == {}

    def test_failures_are_not_kept(self, peers: Peers) -> None:
        with pytest.raises(RpcException):
            peers.begin(fail_with(ValueError()), keep=True).wait()
        assert peers.begin(lambda: 5, keep=True).wait() is None
        assert list(peers.runner.kept.values()) == [5]

    def test_numbers_that_another_thread_takes_meanwhile_are_no_error(self, peers: Peers) -> None:
        class Shared(deque[int]):
            def __len__(self) -> int:
                return super().__len__() + 1

        peers.calls.freed = Shared([7])
        peers.calls.free()
        assert peers.begin(lambda: 1).wait() == 1

    def test_however_many_are_freed_at_once_they_fit_a_message(self, peers: Peers) -> None:
        peers.calls.freed.extend(range(1 << 40, (1 << 40) + 200_000))
        assert peers.begin(lambda: 1).wait() == 1
        while peers.calls.freed:
            peers.calls.free()


class TestThreads:
    def test_no_more_than_a_bound_are_away_from_their_line(self, peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(channel_callee, "_away", away := threading.BoundedSemaphore(2))
        over, at_work, counted = threading.Event(), threading.Semaphore(0), [0, 0]

        def wait() -> bool:
            counted[0] += 1
            counted[1] = max(counted)
            at_work.release()
            waited = wait_for(over, PATIENCE_S)
            counted[0] -= 1
            return waited

        futures = [peers.begin(wait) for _ in range(10)]
        for _ in range(3):  # two that handed the line over, and the third, which keeps it
            assert at_work.acquire(timeout=PATIENCE_S)
        over.set()
        assert all(future.wait() for future in futures)
        assert counted[1] == 3
        for _ in range(2):  # they are back
            assert away.acquire(timeout=PATIENCE_S)

    def test_a_line_whose_next_thread_cannot_start_is_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(channel_callee, "_away", threading.BoundedSemaphore(1))
        turn = Turn(fail_with(RuntimeError("can't start new thread")))  # type: ignore[arg-type]
        turn.end()
        turn.end()
        assert not turn.over
        turn = Turn(lambda: None)
        turn.end()
        assert turn.over

    def test_of_two_that_bind_a_key_one_is_too_late(self) -> None:
        class Slow(dict[tuple[str, str], Any]):
            def __contains__(self, key: object) -> bool:
                found = super().__contains__(key)
                with contextlib.suppress(threading.BrokenBarrierError):
                    looks.wait(0.2)  # until the other one looked, too, if it is let
                return found

        def bind(value: int) -> None:
            try:
                group.pair("key", value)
                bound.append(value)
            except GroupKeyError as error:
                assert "'key' is already paired in the group 'g', by 'm0'" in str(error)

        looks, bound, verdicts = threading.Barrier(2), [], iter([("ok", ""), ("taken", "m0")])
        world = SimpleNamespace(name="m0", control=lambda *request: next(verdicts))
        group = RpcGroup(world, "g", ["m0"])  # type: ignore[arg-type]
        group.own = Slow()
        threads = [threading.Thread(target=bind, args=(value,)) for value in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(bound) == 1 and list(group.own.values()) == bound
