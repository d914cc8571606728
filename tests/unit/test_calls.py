"""Both sides of a line in one process: whatever a peer sends, a handler raises or a value is, the next call works."""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from echelon.errors import GroupKeyError, PeerLost, Refused, RpcException, TransportTimeout
from echelon.transport.blocks import BlockPool
from echelon.transport.codec import DEFAULT_LIMITS, encode
from echelon.transport.lines import LineReader, LineWriter
from echelon.transport.ring import RING_BYTES
from echelon.world import relay, serving
from echelon.world.calls import SEND_S, Calls, Future
from echelon.world.functions import SERVICE, Scope
from echelon.world.relay import Loop, Reader, RelayWriter, Writer
from echelon.world.rpc_group import RpcGroup
from echelon.world.serving import ROOM_S, Serving, Turn, wait_for

PATIENCE_S = 60.0


def line(folder: Path, name: str, blocks: bool = True) -> SimpleNamespace:
    """Both ends of a line; without blocks, large messages go in pieces."""
    writer = LineWriter(folder, name)
    if not blocks:
        writer._pool = BlockPool(Path("/nowhere"), name, most_bytes=0)
    return SimpleNamespace(writer=writer, reader=LineReader(folder, name))


class Peers:
    """Somebody who calls services of somebody else."""

    def __init__(self, requests: Any, answers: Any) -> None:
        scope = Scope(__name__)
        self.services: dict[tuple[str, str], Any] = {}
        scope.groups["g"] = self.services
        self.ends: tuple[Reader | Writer, ...] = (requests.writer, requests.reader, answers.writer, answers.reader)
        self.calls = Calls("callee", requests.writer, answers.reader, DEFAULT_LIMITS)
        self.serving = Serving("caller", requests.reader, answers.writer, scope, DEFAULT_LIMITS, lambda: None)
        self.serving.start()

    def begin(self, service: Callable[..., Any], *args: Any, keep: bool = False) -> Future:
        name = f"{len(self.services)}"
        self.services[SERVICE, name] = service
        return self.calls.begin(name, ("g", SERVICE, name, args, {}, keep), PATIENCE_S)

    def close(self) -> None:
        self.serving.close()
        self.calls.close()


@pytest.fixture
def peers() -> Iterator[Peers]:
    peers = Peers(Loop(), Loop())
    yield peers
    peers.close()


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


class TestAPeerThatIsGone:
    """Its shared memory is gone, too, and with it an answer that nobody had read."""

    @pytest.fixture
    def future(self, shm_dir: Path) -> Iterator[Future]:
        answers = line(shm_dir, "answers")
        self.calls = Calls("m1", Loop().writer, answers.reader, DEFAULT_LIMITS)
        future = self.calls.begin("f()", ("g", SERVICE, "f", (), {}, False), PATIENCE_S)
        assert answers.writer.send(encode((future.number, "answer", torch.zeros(1 << 20))), 1.0)
        (shm_dir / "answers.1").unlink()
        yield future
        self.calls.close()
        answers.writer.close(discard=True)

    def test_whoever_tells_of_its_end_is_not_harmed(self, future: Future) -> None:
        self.calls.fail(lambda what: PeerLost(f"'m1' left before {what}"))
        with pytest.raises(PeerLost, match=r"'m1' left before f\(\)"):
            future.wait()

    def test_whoever_reads_before_its_end_is_told_learns_of_it(self, future: Future) -> None:
        with pytest.raises(PeerLost, match=r"'m1' answers f\(\) no more: segment .* cannot be joined"):
            future.wait()
        with pytest.raises(PeerLost, match=r"'m1' answers g\(\) no more"):
            self.calls.begin("g()", ("g", SERVICE, "g", (), {}, False), PATIENCE_S)
        self.calls.fail(lambda what: PeerLost("later"))

    def test_what_timed_out_before_its_end_raises_when_it_is_asked_for_again(self) -> None:
        calls = Calls("m1", Loop().writer, Loop().reader, DEFAULT_LIMITS)
        future = calls.begin("f()", ("g", SERVICE, "f", (), {}, False), PATIENCE_S)
        with pytest.raises(TransportTimeout):
            future.wait(0.01)
        calls.fail(lambda what: PeerLost(f"'m1' left before {what}"))
        with pytest.raises(PeerLost, match=r"'m1' left before f\(\)"):
            future.wait()

    def test_an_answer_that_is_none_ends_the_line_and_nothing_else(self) -> None:
        answers = Loop()
        calls = Calls("m1", Loop().writer, answers.reader, DEFAULT_LIMITS)
        future = calls.begin("f()", ("g", SERVICE, "f", (), {}, False), PATIENCE_S)
        assert answers.writer.send(encode("nonsense"), 1.0)
        calls.drain()
        with pytest.raises(Refused, match=r"'m1' answers f\(\) no more: .*it is a str"):
            future.wait()

    def test_its_own_calls_that_nobody_can_read_end_quietly(
        self, shm_dir: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        requests = line(shm_dir, "requests")
        assert requests.writer.send(encode((1, "g", SERVICE, "f", (torch.zeros(1 << 20),), {}, False)), 1.0)
        (shm_dir / "requests.1").unlink()
        gone = Serving("m1", requests.reader, Loop().writer, Scope(__name__), DEFAULT_LIMITS, lambda: None)
        gone._serve()  # warnings are errors: in a thread it would end with one
        assert gone._closed and requests.writer.abandoned and capsys.readouterr().err == ""
        requests.writer.close(discard=True)


class TestLargeMessages:
    """More than the ring holds, to somebody who has other things to do than to take them in."""

    BODY = torch.arange(RING_BYTES // 2)  # of eight bytes each

    def test_a_call_arrives(self, shm_dir: Path) -> None:
        requests = line(shm_dir, "requests", blocks=False)
        calls = Calls("m1", requests.writer, Loop().reader, DEFAULT_LIMITS)
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
        peers = Peers(Loop(), line(shm_dir, "answers", blocks=False))
        future = peers.begin(lambda: self.BODY)
        deadline = time.monotonic() + PATIENCE_S
        while not future.settled and time.monotonic() < deadline:
            time.sleep(2 * ROOM_S)  # it is a caller that is busy
            peers.calls.drain()
        peers.close()
        assert future.settled and torch.equal(future.wait(), self.BODY)

    def test_one_that_is_not_taken_in_is_given_up_in_time(self, shm_dir: Path) -> None:
        requests = line(shm_dir, "requests", blocks=False)
        calls = Calls("m1", requests.writer, Loop().reader, DEFAULT_LIMITS)
        with pytest.raises(TransportTimeout, match=r"'m1' did not take f\(\) in within 0.1 s"):
            calls.begin("f()", ("g", SERVICE, "f", (self.BODY,), {}, False), 0.1)
        assert calls._futures == {}
        calls.close()
        requests.reader.close()

    def test_a_relay_copies_what_it_has_room_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Frame(bytes):
            def __bytes__(self) -> bytes:
                copied.append(len(self))
                return self

        copied: list[int] = []
        monkeypatch.setattr(relay, "WINDOW_BYTES", 10)
        forwarded: list[list[bytes]] = []
        writer = RelayWriter(forwarded.append)
        assert writer.send([Frame(b"x" * 10)], 0.0) and copied == [10]
        assert not writer.send([Frame(b"y")], 0.0) and copied == [10]
        writer.acknowledge(1, 10)
        assert writer.send([Frame(b"y")], 0.0) and copied == [10, 1] and forwarded == [[b"x" * 10], [b"y"]]


class TestKeptResults:
    def test_one_that_nobody_needs_any_more_before_it_is_there_is_not_kept(self, peers: Peers) -> None:
        over = threading.Event()
        future = peers.begin(lambda: wait_for(over, PATIENCE_S), keep=True)
        peers.calls.freed.append(future.number)
        assert peers.begin(lambda: 1).wait() == 1  # the word that it is not needed went before this call
        over.set()
        assert future.wait() is None and peers.serving._kept == {}

    def test_failures_are_not_kept(self, peers: Peers) -> None:
        with pytest.raises(RpcException):
            peers.begin(fail_with(ValueError()), keep=True).wait()
        assert peers.begin(lambda: 5, keep=True).wait() is None
        assert list(peers.serving._kept.values()) == [5]

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
        monkeypatch.setattr(serving, "_away", away := threading.BoundedSemaphore(2))
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
        monkeypatch.setattr(serving, "_away", threading.BoundedSemaphore(1))
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
