"""What calls promise, over both forms of the channel, lines in shared memory and TCP, here inside one process.

Whatever a peer sends, a handler raises or a value is, the next call works.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from call_peers import PATIENCE_S, Ends, Peers, fail_with, no_room, received
from echelon.errors import ConfigError, PeerLost, Refused, RpcException, TransportTimeout
from echelon.transport.channel_callee import Callee, Missing, wait_for
from echelon.transport.channel_calls import Calls
from echelon.transport.channel_ends import CallReader, SocketEnd
from echelon.transport.codec import DEFAULT_LIMITS, Limits, encode
from echelon.transport.ring import PIECE_BYTES
from echelon.world.functions import Runner, Scope
from running import wait_until


def has_come(reader: CallReader) -> bool:
    """Whether a message that was sent can be received: over TCP it is under way for a while."""
    return not isinstance(reader, SocketEnd) or bool(int(reader._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


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
        assert "a call of 'caller' was refused" in capsys.readouterr().err

    def test_what_is_no_request_of_the_handler_is_refused_to_its_caller(self, peers: Peers) -> None:
        with pytest.raises(Refused, match="is not a request"):
            peers.calls.begin("f()", ("too", "short"), PATIENCE_S).wait()
        assert peers.begin(lambda: 1).wait() == 1

    @pytest.mark.parametrize("answer", ["nonsense", (1,), (1, "of", "no", "form"), (1, "failed", 3)])
    def test_what_is_no_answer_ends_the_calls_and_nothing_else(self, ends: Ends, answer: Any) -> None:
        calls = Calls("m1", ends.requests.writer, ends.answers.reader, DEFAULT_LIMITS)
        future = calls.begin("f()", (), PATIENCE_S)
        received(ends.requests, 1)
        assert ends.answers.writer.send(encode(answer), PATIENCE_S)
        with pytest.raises(Refused, match=r"'m1' can no longer answer f\(\): .*refused"):
            future.wait()
        with pytest.raises(Refused, match=r"'m1' can no longer answer g\(\)"):
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


@pytest.mark.parametrize(
    ("service", "words"),
    [
        (fail_with(Mute()), "Mute: (its message could not be formatted: ZeroDivisionError)"),
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
