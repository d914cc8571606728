"""The line to a learner: one message under way at a time, repeated until it is answered, whoever is lost meanwhile.

The worker waits here for its answers. A learner that is gone, or was stopped, is waited for with growing patience, and
the user is told once when it is lost and once when it is back. One that does not let this worker in (another secret) is
an error.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

from echelon.errors import ConfigError, Refused, TransportTimeout
from echelon.transport.codec import Buffer
from echelon.transport.episode_wire import (
    LIMITS,
    FromDoor,
    FromWorker,
    Over,
    Refusal,
    Stopped,
    Wait,
    from_door,
    pack,
    socket_name,
)
from echelon.transport.secret import check_secret
from echelon.transport.sockets import LINGER_MS, connect, why_silent

FIRST_REPEAT_S, MAX_REPEAT_S = 2.0, 15.0  # when an unanswered message is sent again
WAIT_S = 0.2  # between two looks at a learner that is still starting
TOLD_AFTER_S = 4.0  # of silence ...
STARTING_S = 60.0  # ... or of one that said it was still starting: it opens its door soon
MAX_HANDSHAKES, FAILING_S = (
    3,
    3.0,
)  # so many that fail one after the other, for so long: another secret, not an accident
QUEUED_MESSAGES = 2
WINDOW = 4_096  # round trips that are remembered
FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH

T = TypeVar("T")


class RunOver(Exception):
    """The learner has ended its run."""


class Line:
    """Messages to the door of one learner, and its answers."""

    def __init__(
        self, address: str, name: str, secret: str | None, patience_s: float, tell: Callable[[str], None]
    ) -> None:
        """`name` is the worker's. Gives up on a learner that is silent for `patience_s`; `tell` gets what the user
        should know."""
        check_secret(address, secret)
        self.address, self._patience_s, self._tell = address, patience_s, tell
        self._is_lost, self._num_failed, self._failing_since = False, 0, 0.0
        self._told_after_s, self._is_stopped = TOLD_AFTER_S, False
        self.last_sent = 0.0  # when, by the monotonic clock
        self.round_trips: collections.deque[float] = collections.deque(maxlen=WINDOW)  # seconds to the newest answers
        self._socket = connect(address, secret, LIMITS.total_bytes, QUEUED_MESSAGES, socket_name(name))
        self._events: Any = self._socket.get_monitor_socket(FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def ask(self, message: FromWorker, *kinds: type[T]) -> T:
        """The answer to `message`, one of `kinds`; of a numbered message, the one with its number.

        Raises RunOver when the run has ended, Refused when the learner does not want this worker.
        """
        frames, number = pack(message), getattr(message, "number", None)
        start = heard = time.monotonic()
        pause_s = FIRST_REPEAT_S
        while True:
            self._send(frames)
            answer = self._await(number, kinds, pause_s)
            now = time.monotonic()
            if isinstance(answer, Wait):
                heard, self._told_after_s = now, STARTING_S
                time.sleep(WAIT_S)
            elif answer is not None:
                self._tell_back()
                self._told_after_s = TOLD_AFTER_S
                self.round_trips.append(now - start)
                return answer
            else:
                self._check_silence(now - heard)
                pause_s = min(2.0 * pause_s, MAX_REPEAT_S)

    def say(self, message: FromWorker) -> None:
        """Sends what has no answer; it is lost with a learner that is not there."""
        self._send(pack(message))

    def _send(self, frames: list[Buffer]) -> None:
        """Queues a message, unless others that nobody took up still wait there."""
        self.last_sent = time.monotonic()
        with suppress(zmq.Again):
            self._socket.send_multipart(frames, zmq.NOBLOCK)

    def _await(self, number: int | None, kinds: tuple[type[T], ...], timeout_s: float) -> T | Wait | None:
        """What is answered within `timeout_s`; answers to what was asked before are passed over."""
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            if not self._socket.poll(int(1e3 * min(left_s, WAIT_S)) + 1):
                if not left_s:
                    return None
                self._look_at_handshakes()
                continue
            answer: FromDoor = from_door([frame.buffer for frame in self._socket.recv_multipart(copy=False)])
            if isinstance(answer, Over):
                raise RunOver
            if isinstance(answer, Refusal):
                raise Refused(f"the learner at {self.address} refused this worker: {answer.reason}")
            if isinstance(answer, Stopped):
                self._tell_stopped()
            if isinstance(answer, kinds) and getattr(answer, "number", number) == number:
                return answer
            if isinstance(answer, Wait):
                return answer

    def _look_at_handshakes(self) -> None:
        """Raises Refused when the learner lets nobody in who has this worker's secret, or none."""
        now = time.monotonic()
        with suppress(zmq.Again):
            while True:
                event = parse_monitor_message(self._events.recv_multipart(zmq.NOBLOCK))["event"]
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._num_failed = 0
                    continue
                self._failing_since = self._failing_since if self._num_failed else now
                # One that breaks off may be an accident; one that breaks the rules is none, and is not tried again.
                self._num_failed += 1 if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL else MAX_HANDSHAKES
        if self._num_failed >= MAX_HANDSHAKES and now - self._failing_since > FAILING_S:
            raise Refused(f"the learner at {self.address} does not answer: {why_silent(self.address)}")

    def _check_silence(self, silent_s: float) -> None:
        if silent_s > self._patience_s:
            raise TransportTimeout(
                f"the learner at {self.address} was silent for {silent_s:.0f} s: {why_silent(self.address)}"
            )
        if silent_s > self._told_after_s and not self._is_lost:
            self._is_lost = True
            self._tell(f"no answer from the learner at {self.address}: {why_silent(self.address)} Trying again.")

    def _tell_stopped(self) -> None:
        """Once, though every message until it is gone is answered so."""
        if not self._is_stopped:
            self._is_lost = self._is_stopped = True
            self._tell(f"the learner at {self.address} was stopped; trying again until it is resumed")

    def _tell_back(self) -> None:
        if self._is_lost:
            self._is_lost = self._is_stopped = False
            self._tell(f"the learner at {self.address} is there again")

    def close(self) -> None:
        self._socket.disable_monitor()
        self._events.close(linger=0)
        self._socket.close(linger=LINGER_MS)  # for the last words


def address_of(learner: str | tuple[str, int]) -> str:
    """A learner's address as sockets take it, from host:port, tcp://host:port or (host, port)."""
    if isinstance(learner, tuple):
        learner = f"{learner[0]}:{learner[1]}"
    host, _, port = learner.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ConfigError(f"{learner!r} is no address of a learner. Write HOST:PORT, as the learner tells it.")
    return f"tcp://{host}:{port}"
