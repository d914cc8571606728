"""Calls over lines, where these differ from TCP: memory that is gone, and messages that go in pieces."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from call_peers import PATIENCE_S, Ends, Nobody, Peers, line, no_room
from echelon.errors import PeerLost, TransportTimeout
from echelon.transport.channel_callee import ROOM_S, Callee
from echelon.transport.channel_calls import SEND_S, Calls, Future
from echelon.transport.codec import DEFAULT_LIMITS, encode
from echelon.transport.lines import LineReader, LineWriter
from echelon.transport.ring import RING_BYTES
from echelon.world.functions import SERVICE, Runner, Scope


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
        with pytest.raises(PeerLost, match=r"'m1' can no longer answer f\(\): segment .* cannot be opened"):
            future.wait()
        with pytest.raises(PeerLost, match=r"'m1' can no longer answer g\(\)"):
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
        with pytest.raises(TransportTimeout, match=r"'m1' did not receive f\(\) within 0.1 s"):
            calls.begin("f()", ("g", SERVICE, "f", (self.BODY,), {}, False), 0.1)
        assert calls._futures == {}
        calls.close()
        requests.reader.close()
