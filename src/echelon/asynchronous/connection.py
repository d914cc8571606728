"""The connection to a learner: one request is in flight at a time, and it is repeated until the reply arrives.

The worker waits here for replies. If the learner dies or is stopped, the connection retries with growing intervals; it
reports once that the learner is lost and once that it is back. A learner that refuses this worker because of a
different secret raises an error.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from typing import TypeVar

from echelon.errors import ConfigError, Refused, TransportTimeout
from echelon.status_file import StatusFile
from echelon.transport.channel import HEADER, Part
from echelon.transport.channel_client import Client
from echelon.transport.episode_wire import (
    EPISODES,
    LIMITS,
    TASK,
    FromGateway,
    FromWorker,
    RunEnded,
    Stopped,
    Wait,
    from_gateway,
    pack,
    socket_name,
)

FIRST_REPEAT_S, MAX_REPEAT_S = 2.0, 15.0  # intervals after which a request without a reply is sent again
WAIT_S = 0.2  # between two requests to a learner that is still starting
REPORT_AFTER_S = 2.0  # of silence before the learner is reported as lost ...
STARTING_S = 60.0  # ... or if it replied that it is still starting: it opens its gateway soon
QUEUED_MESSAGES = 2
WINDOW = 4_096  # round trips that are recorded

T = TypeVar("T")


class RunOver(Exception):
    """The learner has ended its run."""


class LearnerConnection:
    """Sends requests to the gateway of one learner, and receives its replies."""

    def __init__(
        self,
        address: str,
        name: str,
        patience_s: float,
        report: Callable[[str], None],
        status: StatusFile | None = None,
    ) -> None:
        """`name` is the worker's. Gives up on a learner that is silent for `patience_s`; `report` shows messages to
        the user, `status` shows probes that the learner is lost."""
        self._status = status or StatusFile()
        self.address, self._patience_s, self._report = address, patience_s, report
        self._is_lost, self._report_after_s, self._is_stopped = False, REPORT_AFTER_S, False
        self.last_sent = 0.0  # time of the last message, by the monotonic clock
        self.round_trips: collections.deque[float] = collections.deque(maxlen=WINDOW)  # seconds, of the newest replies
        self._client = Client(
            "the learner",
            address,
            LIMITS.total_bytes,
            queued=QUEUED_MESSAGES,
            name=socket_name(name),
            repeat_s=(FIRST_REPEAT_S, MAX_REPEAT_S),
        )

    def ask(self, message: FromWorker, *kinds: type[T]) -> T:
        """Sends `message` and returns the reply, one of `kinds`.

        Raises RunOver if the run has ended, Refused if the learner refuses this worker.
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

    def post(self, message: FromWorker) -> None:
        """Sends a message without a reply; it is lost if the learner is down."""
        self.last_sent = time.monotonic()
        self._client.post(EPISODES, [bytearray(HEADER.size), *pack(message)])

    def _await(self, frames: list[Part], number: int) -> FromGateway:
        self.last_sent = time.monotonic()
        request = self._client.ask(EPISODES if number else TASK, lambda: frames, number=number)
        while not self._client.wait(request, WAIT_S):
            self._status.touch()
            self._take_posts()
            self._check_silence(self._client.silent_s)
        self._take_posts()
        assert request.answer is not None
        return from_gateway(request.answer[1:])

    def _take_posts(self) -> None:
        """Handles messages of the learner about its end."""
        while self._client.posts:
            message = from_gateway(self._client.posts.popleft()[1:])
            if isinstance(message, RunEnded):
                raise RunOver
            if isinstance(message, Stopped):
                self._report_stopped()

    def _check_silence(self, silent_s: float) -> None:
        if silent_s > self._patience_s:
            raise TransportTimeout(
                f"the learner at {self.address} was silent for {silent_s:.0f} s: {self._client.why_silent()}"
            )
        if silent_s > self._report_after_s and not self._is_lost:
            self._is_lost = True
            self._status.report(joined=False)
            self._report(f"no reply from the learner at {self.address}: {self._client.why_silent()} Retrying.")

    def _report_stopped(self) -> None:
        """Reports once that the learner was stopped; until it exits, it replies so to every message."""
        if not self._is_stopped:
            self._is_lost = self._is_stopped = True
            self._status.report(joined=False)
            self._report(f"the learner at {self.address} was stopped; retrying until it is resumed")

    def _report_back(self) -> None:
        if self._is_lost:
            self._is_lost = self._is_stopped = False
            self._report(f"the learner at {self.address} is back")

    def close(self) -> None:
        self._client.close()


def address_of(learner: str | tuple[str, int]) -> str:
    """Returns a learner's address as tcp://host:port, from host:port, tcp://host:port or (host, port)."""
    if isinstance(learner, tuple):
        learner = f"{learner[0]}:{learner[1]}"
    host, _, port = learner.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ConfigError(f"{learner!r} is not the address of a learner. Write HOST:PORT, as the learner prints it.")
    return f"tcp://{host}:{port}"
