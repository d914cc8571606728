"""The connection to a learner: one message is in flight at a time and is repeated until it is answered.

The worker waits here for its answers. A learner that is gone, or was stopped, is waited for with growing patience, and
the user is told once when it is lost and once when it is back. One that does not let this worker in (another secret) is
an error.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from typing import TypeVar

from echelon.errors import ConfigError, Refused, TransportTimeout
from echelon.transport.channel import HEADER, Part
from echelon.transport.channel_client import Client
from echelon.transport.episode_wire import (
    EPISODES,
    LIMITS,
    TASK,
    FromGateway,
    FromWorker,
    Over,
    Stopped,
    Wait,
    from_door,
    pack,
    socket_name,
)

FIRST_REPEAT_S, MAX_REPEAT_S = 2.0, 15.0  # when an unanswered message is sent again
WAIT_S = 0.2  # between two looks at a learner that is still starting
REPORT_AFTER_S = 2.0  # of silence after the first repeat ...
STARTING_S = 60.0  # ... or of one that said it was still starting: it opens its gateway soon
QUEUED_MESSAGES = 2
WINDOW = 4_096  # round trips that are remembered

T = TypeVar("T")


class RunOver(Exception):
    """The learner has ended its run."""


class LearnerConnection:
    """Messages to the gateway of one learner, and its answers."""

    def __init__(
        self, address: str, name: str, secret: str | None, patience_s: float, report: Callable[[str], None]
    ) -> None:
        """`name` is the worker's. Gives up on a learner that is silent for `patience_s`; `report` gets what the user
        should know."""
        self.address, self._patience_s, self._report = address, patience_s, report
        self._is_lost, self._report_after_s, self._is_stopped = False, REPORT_AFTER_S, False
        self.last_sent = 0.0  # when, by the monotonic clock
        self.round_trips: collections.deque[float] = collections.deque(maxlen=WINDOW)  # seconds to the newest answers
        self._client = Client(
            "the learner",
            address,
            secret,
            LIMITS.total_bytes,
            queued=QUEUED_MESSAGES,
            name=socket_name(name),
            repeat_s=(FIRST_REPEAT_S, MAX_REPEAT_S),
        )

    def ask(self, message: FromWorker, *kinds: type[T]) -> T:
        """The answer to `message`, one of `kinds`.

        Raises RunOver when the run has ended, Refused when the learner does not want this worker.
        """
        frames, number = [bytearray(HEADER.size), *pack(message)], getattr(message, "number", 0)
        start = time.monotonic()
        while True:
            answer = self._await(frames, number)
            if isinstance(answer, Wait):
                self._report_after_s = STARTING_S
                time.sleep(WAIT_S)
            elif isinstance(answer, kinds):
                self._report_back()
                self._report_after_s = REPORT_AFTER_S
                self.round_trips.append(time.monotonic() - start)
                return answer
            else:
                raise Refused(f"the learner at {self.address} answered with a {type(answer).__name__}.")

    def say(self, message: FromWorker) -> None:
        """Sends what has no answer; it is lost with a learner that is not there."""
        self.last_sent = time.monotonic()
        self._client.post(EPISODES, [bytearray(HEADER.size), *pack(message)])

    def _await(self, frames: list[Part], number: int) -> FromGateway:
        self.last_sent = time.monotonic()
        request = self._client.ask(EPISODES if number else TASK, lambda: frames, number=number)
        while not self._client.wait(request, WAIT_S):
            self._take_posts()
            self._check_silence(self._client.silent_s)
        self._take_posts()
        assert request.answer is not None
        return from_door(request.answer[1:])

    def _take_posts(self) -> None:
        """What the learner says of its end."""
        while self._client.posts:
            said = from_door(self._client.posts.popleft()[1:])
            if isinstance(said, Over):
                raise RunOver
            if isinstance(said, Stopped):
                self._report_stopped()

    def _check_silence(self, silent_s: float) -> None:
        if silent_s > self._patience_s:
            raise TransportTimeout(
                f"the learner at {self.address} was silent for {silent_s:.0f} s: {self._client.why_silent()}"
            )
        if silent_s > self._report_after_s and not self._is_lost:
            self._is_lost = True
            self._report(f"no answer from the learner at {self.address}: {self._client.why_silent()} Trying again.")

    def _report_stopped(self) -> None:
        """Once, though every message until it is gone is answered so."""
        if not self._is_stopped:
            self._is_lost = self._is_stopped = True
            self._report(f"the learner at {self.address} was stopped; trying again until it is resumed")

    def _report_back(self) -> None:
        if self._is_lost:
            self._is_lost = self._is_stopped = False
            self._report(f"the learner at {self.address} is there again")

    def close(self) -> None:
        self._client.close()


def address_of(learner: str | tuple[str, int]) -> str:
    """A learner's address as sockets take it, from host:port, tcp://host:port or (host, port)."""
    if isinstance(learner, tuple):
        learner = f"{learner[0]}:{learner[1]}"
    host, _, port = learner.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ConfigError(f"{learner!r} is no address of a learner. Write HOST:PORT, as the learner tells it.")
    return f"tcp://{host}:{port}"
