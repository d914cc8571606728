"""Shards of another host: a learner reads them through one connection to that host's shard server.

`Link` is the connection, with a `Reader` for each of its shards. What is drawn goes out as one question and comes back
as one answer while the learner does something else. A question for news is always under way, so `window` looks at what
has come and waits for nobody. Every question carries the limiter's counts from here, every answer the heads from there.

Who waits: the learner, by its `Ear`, or for items that it wants at once. What bounds it: what it has asked for and not
read. Questions that are not answered are asked again, as often as it takes, also where others are answered: one may be
lost with a connection, and the next go out on its successor. They change nothing. If the server dies, its successor at
the same address answers them; after `lost_after_s` of silence the host is lost, its readers raise PeerLost, and it is
asked on, once a second, whether it is back. The newest priorities lie in columns here, so a learner that is started
again rebuilds its tree as it does for shards of its own host. A host that comes back without its memory has new shards,
whose items are numbered on; its actors then count from 0, and may insert more for a while.

Needs nothing heavier than numpy and pyzmq.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq

from echelon.errors import PeerLost, Refused, TransportTimeout
from echelon.replay.layout import Block, ShardLayout, spans
from echelon.replay.limiter import Limiter
from echelon.replay.reader import PriorityColumn, Read
from echelon.replay.wire import MAGIC, MAX_REASON_BYTES, NUM_WORDS, Answer, Kind, Question, Wire
from echelon.transport.secret import check_secret
from echelon.transport.sockets import FIRST_REPEAT_S, LINGER_MS, MAX_REPEAT_S, connect, why_silent

Array = np.ndarray[Any, Any]
QUEUED_MESSAGES = 64  # more than a learner has under way
OVERDUE_S = (
    2.0  # a question that waits so long while others are answered was lost with a connection; then twice as long
)


@dataclass(slots=True, eq=False)
class Request:
    """A question under way, and its answer."""

    kind: Kind
    numbers: list[Array]  # per shard of the host
    answer: Answer | None = None
    lost: str = ""  # why there will be none
    patience_s: float = 0.0
    overdue_at: float = math.inf


class RemoteRead:
    """Items of one shard, under way from another host."""

    __slots__ = ("_birth", "_link", "_place", "_request")

    def __init__(self, link: Link, request: Request, place: int, birth: int) -> None:
        self._link, self._request, self._place, self._birth = link, request, place, birth

    def is_ready(self) -> bool:
        if self._request.answer is None and not self._request.lost:
            self._link.poll()
        return self._request.answer is not None or bool(self._request.lost)

    def into(self, block: Block) -> Array:
        while not self.is_ready():
            self._link.poll(MAX_REPEAT_S)
        if self._request.answer is None:
            raise PeerLost(self._request.lost)
        whole = self._request.answer.into(self._place, block)
        # The shard was made anew since they were asked for: what has these numbers there are other items.
        return whole if self._request.answer.birth == self._birth else np.zeros_like(whole)


class RemoteReader:
    """The learner's side of a shard of another host."""

    def __init__(self, link: Link, place: int, column: PriorityColumn) -> None:
        self.link, self.place, self.column = link, place, column
        self.layout: ShardLayout = link.wire.layout
        self.index = link.wire.shards[place]
        self.name = f"replay shard {self.index} at {link.address}"
        # The first item that is there, and the one after the last whose priority came.
        self.tail = self.known = max(column.fed, column.offset)
        self._initial = np.zeros(self.layout.capacity)

    def window(self) -> tuple[int, int]:
        if self is self.link.readers[0]:
            self.link.poll()
        if self.link.lost:
            raise PeerLost(self.link.lost)
        return min(self.tail, self.known), self.known

    def initial(self, start: int, stop: int) -> Array:
        return np.concatenate([self._initial[slots] for slots, _ in spans(start, stop, self.layout.capacity)])

    def ask(self, numbers: Array) -> Read:
        return self.link.ask(self.place, numbers - self.column.offset, self.column.birth)

    def send(self) -> None:
        self.link.send()

    def hear(self, answer: Answer, inserted: int) -> int:
        """Takes in what an answer says of this shard; returns how many items count as inserted, `inserted` so far.

        Those are the ones whose priorities came: the limiter lets a learner draw no sooner than it can.
        """
        column, tail = self.column, int(answer.windows[self.place, 0])
        if answer.birth != column.birth:
            self.known = -(-self.known // self.layout.capacity) * self.layout.capacity
            column.renew(answer.birth, self.known, inserted if column.birth else 0)
        self.tail = tail + column.offset
        first, stop = (answer.news[self.place] + column.offset).tolist()
        if first <= max(self.known, self.tail) and stop > self.known:
            for slots, rows in spans(first, stop, self.layout.capacity):
                self._initial[slots] = answer.priorities[self.place][rows]
            self.known = stop
        return self.known - column.offset + column.past


class Link:
    """The connection to the shard server of one host, with its readers."""

    def __init__(
        self,
        address: str,
        wire: Wire,
        columns: Sequence[PriorityColumn | None],
        limiter: Limiter,
        secret: str | None = None,
        lost_after_s: float = 10.0,
    ) -> None:
        """Connects in the background; `arrive` waits until the server has answered.

        `columns` are for the shards of the host that are this learner's; None: another learner reads it.
        """
        check_secret(address, secret)
        self.address, self.wire, self.limiter, self.lost_after_s = address, wire, limiter, lost_after_s
        self.readers = [RemoteReader(self, place, column) for place, column in enumerate(columns) if column is not None]
        self.lost = ""  # why the host is lost, while it is
        self.has_heard = False
        self._requests: dict[int, Request] = {}  # under way, the oldest first
        self._next_id = 1
        self._gathering: Request | None = None
        self._counts = limiter.counts()
        self._repeat_at, self._repeat_s = math.inf, FIRST_REPEAT_S
        self._silent_since, self._num_tries = math.inf, 0
        self._socket = connect(
            address, secret, max(wire.answer_bytes, 8 * NUM_WORDS + MAX_REASON_BYTES), QUEUED_MESSAGES
        )
        self.descriptor = int(self._socket.getsockopt(zmq.FD))
        self._ask_for_news()

    def arrive(self, timeout_s: float) -> None:
        """Waits for the first answer; TransportTimeout after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self.has_heard:
            if time.monotonic() >= deadline:
                raise TransportTimeout(
                    f"the shard server at {self.address} did not answer within {timeout_s:.1f} s: "
                    f"{why_silent(self.address)}"
                )
            self.poll(0.05)

    # What is asked.

    def ask(self, place: int, numbers: Array, birth: int) -> Read:
        """Adds items of the shard of that `birth` at `place` to what `send` will ask for."""
        if self._gathering is None:
            self._gathering = Request(Kind.ASK, self._none())
        self._gathering.numbers[place] = numbers
        return RemoteRead(self, self._gathering, place, birth)

    def send(self) -> None:
        """Sends what was asked for since the last time, as one question."""
        request, self._gathering = self._gathering, None
        if request is None:
            return
        if self.lost:
            request.lost = self.lost
            return
        self._start(request)

    def tell(self) -> None:
        """Sends the limiter's counts, if they changed since they last went out."""
        if not np.array_equal(self.limiter.counts(), self._counts):
            self._post(0, Request(Kind.TELL, self._none()))

    def _none(self) -> list[Array]:
        return [np.empty(0, np.int64)] * len(self.wire.shards)

    def _ask_for_news(self) -> None:
        self._start(Request(Kind.WAIT, self._none()))

    def _start(self, request: Request) -> None:
        if not self._requests:
            self._repeat_s = FIRST_REPEAT_S
            self._repeat_at = time.monotonic() + FIRST_REPEAT_S
        self._requests[self._next_id] = request
        self._post(self._next_id, request)
        self._next_id += 1

    def _post(self, id: int, request: Request) -> None:
        self._counts = self.limiter.counts()
        request.patience_s = 2.0 * request.patience_s or OVERDUE_S
        request.overdue_at = time.monotonic() + request.patience_s
        since = np.full(len(self.wire.shards), -1)
        if request.kind == Kind.WAIT and self.has_heard:
            for reader in self.readers:
                since[reader.place] = reader.known - reader.column.offset
        try:
            question = Question(request.kind, id, self._counts, since, request.numbers)
            self._socket.send(self.wire.question(question), zmq.NOBLOCK)
        except zmq.Again:  # nobody takes anything in: it is asked again
            pass

    # What comes.

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Takes in what comes within `timeout_s`, and asks again what was not answered; whether anything came."""
        if timeout_s > 0.0 and not self.has_mail():
            left_s = min(timeout_s, max(0.0, self._repeat_at - time.monotonic()))
            self._socket.poll(math.ceil(left_s * 1000))
        heard = False
        while self.has_mail():
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            self._take([frame.buffer for frame in frames])
            heard = True
        now = time.monotonic()
        if heard:
            self._silent_since, self._num_tries = math.inf, 0
            self._repeat_s = FIRST_REPEAT_S
            self._repeat_at = now + FIRST_REPEAT_S
        elif now >= self._repeat_at:
            self._repeat(now)
        for id, request in self._requests.items():
            if now >= request.overdue_at:
                self._post(id, request)
        return heard

    def has_mail(self) -> bool:
        """Whether something is there to take in; to be looked at before sleeping on the descriptor."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _take(self, frames: list[memoryview]) -> None:
        """One message of the server; answers to what is no longer asked are passed over."""
        words = np.frombuffer(frames[0], np.int64, NUM_WORDS) if len(frames[0]) >= 8 * NUM_WORDS else [0] * NUM_WORDS
        magic, kind, digest, id = (int(word) for word in words[:4])
        if magic == MAGIC and kind == Kind.REFUSED:
            reason = bytes(frames[0][8 * NUM_WORDS :]).decode(errors="replace")
            raise Refused(f"the shard server at {self.address} refused this learner: {reason}.")
        if magic != MAGIC or kind != Kind.ANSWER or digest != self.wire.digest:
            raise Refused(f"{self.address} sent {len(frames[0])} bytes that are no answer: it is no shard server.")
        request = self._requests.pop(id, None)
        if request is None:
            return
        try:
            request.answer = Answer(self.wire, frames, [len(numbers) for numbers in request.numbers])
        except ValueError as error:  # ReplayError: a priority that no item can have
            raise Refused(f"{self.address} sent an answer that is none: {error}") from error
        self._hear(request.answer)
        if request.kind == Kind.WAIT:
            self._ask_for_news()

    def _hear(self, answer: Answer) -> None:
        counts = self.limiter.counts().tolist()
        for reader in self.readers:
            inserted = reader.hear(answer, counts[reader.index])
            if inserted > counts[reader.index]:
                self.limiter.note_inserted(reader.index, inserted)
        self.has_heard, self.lost = True, ""

    def _repeat(self, now: float) -> None:
        """Asks again: the connection, or the server, may be a new one. After long enough the host is lost."""
        self._silent_since = min(self._silent_since, now)
        silent_s = now - self._silent_since
        if silent_s >= self.lost_after_s and not self.lost and self.has_heard:
            self._lose(
                f"it did not answer for {silent_s:.1f} s, {self._num_tries} tries: {why_silent(self.address)[:-1]}"
            )
        self._num_tries += 1
        self._repeat_s = min(2 * self._repeat_s, MAX_REPEAT_S)
        self._repeat_at = now + self._repeat_s
        for id, request in self._requests.items():
            self._post(id, request)

    def _lose(self, reason: str) -> None:
        self.lost = reason
        for id, request in list(self._requests.items()):
            if request.kind == Kind.ASK:
                request.lost = reason
                del self._requests[id]

    def close(self) -> None:
        self._socket.close(linger=LINGER_MS)
