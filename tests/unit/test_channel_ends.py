"""What the ends of calls promise: those of lines and of TCP alike, then what TCP alone has."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from call_peers import PATIENCE_S, Ends, received
from echelon.errors import Refused
from echelon.transport.channel import HEADER, MAGIC, Kind
from echelon.transport.channel_ends import CALLS, OPENING, SocketEnd
from echelon.transport.ring import PIECE_BYTES
from echelon.world.endpoint import Endpoint
from running import wait_until

SECRET = "a secret of the tests"


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


class TestTcp:
    """What only this form has: strangers, secrets, and connections that break."""

    @pytest.fixture
    def pair(self) -> Iterator[tuple[SocketEnd, SocketEnd]]:
        callee = SocketEnd.listen(zmq.Context.instance(), "tcp://127.0.0.1:0", SECRET, 1 << 20, "caller")
        caller = SocketEnd.connect(zmq.Context.instance(), callee.address, SECRET, 1 << 20, "caller")
        yield callee, caller
        caller.close()
        callee.close()

    def test_a_stranger_is_not_heard_and_gets_nothing(self, pair: tuple[SocketEnd, SocketEnd]) -> None:
        callee, caller = pair
        stranger = SocketEnd.connect(zmq.Context.instance(), callee.address, SECRET, 1 << 20, "stranger")
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
        with pytest.raises(Refused, match="not a call, or from another release"):
            callee.receive(PATIENCE_S)

    def test_a_frame_that_is_too_long_never_arrives(self, pair: tuple[SocketEnd, SocketEnd]) -> None:
        callee, caller = pair
        assert caller.send([bytes((1 << 20) + 1000)], PATIENCE_S) and callee.receive(0.3) is None
        wait_until(lambda: caller.send([b"x"], 1.0) and callee.receive(0.1), "it goes on on another connection")

    def test_a_callee_that_comes_again_at_its_address_is_found(self) -> None:
        """As after a broken connection: the caller's socket makes another one."""
        ends = [SocketEnd.listen(zmq.Context.instance(), "tcp://127.0.0.1:0", SECRET, 1 << 20, "caller")]
        address = ends[0].address
        caller = SocketEnd.connect(zmq.Context.instance(), address, SECRET, 1 << 20, "caller")
        assert caller.send([b"first"], PATIENCE_S) and ends[0].receive(PATIENCE_S) is not None
        ends[0].close()

        def listen() -> bool:
            with contextlib.suppress(zmq.ZMQError):  # its port is free a little later
                ends.append(SocketEnd.listen(zmq.Context.instance(), address, SECRET, 1 << 20, "caller"))
            return len(ends) == 2

        wait_until(listen, "it listens again")
        assert ends[1].receive(0.1) is None, "nothing is sent twice"
        assert caller.send([b"second"], PATIENCE_S)
        frames = ends[1].receive(PATIENCE_S)
        assert frames is not None and bytes(frames[0]) == b"second"
        caller.close()
        ends[1].close()

    @pytest.mark.parametrize(("secret", "admitted"), [(SECRET, True), (SECRET + "!", False), (None, False)])
    def test_only_the_same_secret_lets_a_caller_in(
        self, secret: str | None, admitted: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ECHELON_SECRET", SECRET)
        endpoint = Endpoint("tcp://127.0.0.1:0", 1 << 20)
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
