"""Shards of another host: a learner reads them through one connection to that host's shard server.

`Link` is the connection, with a `Reader` for each shard. The items of a draw are requested in one message and arrive in
one reply while the learner does other work. A request for news (new items and their priorities) is always in flight, so
`window` uses the replies received so far and never waits. Every request carries this host's limiter counts, every reply
the heads of the other host's shards.

Who waits: the learner, in `RemoteWait` or in `RemoteRead.into` for items that have not arrived. What bounds it: the
items that the learner has requested and not read. Unanswered requests are repeated. If the server dies, its successor
at the same address answers them. After `lost_after_s` of silence the host is lost and its readers raise PeerLost; the
request for news is repeated once a second until the host is back. The newest priorities are stored in columns on this
host, so a restarted learner rebuilds its tree as it does for local shards. A host that comes back without its memory
has new shards; their items continue the numbering here. Its actors count from 0 and may insert more for a while.

Imports nothing heavier than numpy and pyzmq.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from echelon.errors import PeerLost, Refused, TransportTimeout
from echelon.replay.layout import ItemBlock, ShardLayout, spans
from echelon.replay.limiter import Limiter
from echelon.replay.reader import PriorityColumn, Read
from echelon.replay.wire import ReplayReply, ReplayRequest, ReplayWire
from echelon.transport.channel_client import MAX_REPEAT_S, Client, PendingRequest

Array = np.ndarray[Any, Any]
QUEUED_MESSAGES = 64  # more than a learner has in flight


@dataclass(slots=True, eq=False)
class PendingItems:
    """Requested items of one host, and their reply."""

    numbers: list[Array]  # per shard of the host
    request: PendingRequest | None = None  # None until it is sent
    answer: ReplayReply | None = None
    lost: str = ""  # why there will be no reply


class RemoteRead:
    """Requested items of one shard of another host."""

    __slots__ = ("_birth", "_link", "_place", "_wanted")

    def __init__(self, link: Link, wanted: PendingItems, place: int, birth: int) -> None:
        self._link, self._wanted, self._place, self._birth = link, wanted, place, birth

    def is_ready(self) -> bool:
        if self._wanted.answer is None and not self._wanted.lost:
            self._link.poll()
        return self._wanted.answer is not None or bool(self._wanted.lost)

    def into(self, block: ItemBlock) -> Array:
        while not self.is_ready():
            self._link.poll(MAX_REPEAT_S)
        if self._wanted.answer is None:
            raise PeerLost(self._wanted.lost)
        whole = self._wanted.answer.into(self._place, block)
        # If the shard was created again since the request, these numbers now belong to other items.
        return whole if self._wanted.answer.birth == self._birth else np.zeros_like(whole)


class RemoteReader:
    """The learner's side of a shard of another host."""

    def __init__(self, link: Link, place: int, column: PriorityColumn) -> None:
        self.link, self.place, self.column = link, place, column
        self.layout: ShardLayout = link.wire.layout
        self.index = link.wire.shards[place]
        self.name = f"replay shard {self.index} at {link.address}"
        # The first stored item, and one past the last item whose priority has arrived.
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

    def apply(self, answer: ReplayReply, inserted: int) -> int:
        """Applies a reply to this shard; returns the number of inserted items, which was `inserted` before.

        Only items whose priorities have arrived count: the limiter must not admit a sample before it can be drawn.
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
        wire: ReplayWire,
        columns: Sequence[PriorityColumn | None],
        limiter: Limiter,
        lost_after_s: float = 10.0,
    ) -> None:
        """Connects in the background; `arrive` waits until the server has replied.

        `columns` has one entry per shard of the host; None where another learner reads the shard.
        """
        self.address, self.wire, self.limiter, self.lost_after_s = address, wire, limiter, lost_after_s
        self.readers = [RemoteReader(self, place, column) for place, column in enumerate(columns) if column is not None]
        self.lost = ""  # why the host is lost; empty while it is not
        self._wanted: list[PendingItems] = []  # in flight
        self._gathering: PendingItems | None = None
        self._counts = limiter.counts()
        self._client = Client("the shard server", address, wire.answer_bytes, queued=QUEUED_MESSAGES)
        self.descriptor = self._client.descriptor
        self._news = self._ask_for_news()

    @property
    def has_heard(self) -> bool:
        return self._client.has_heard

    def arrive(self, timeout_s: float) -> None:
        """Waits for the first reply; raises TransportTimeout after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self.has_heard:
            if time.monotonic() >= deadline:
                raise TransportTimeout(
                    f"the shard server at {self.address} did not answer within {timeout_s:.1f} s: "
                    f"{self._client.why_silent()}"
                )
            self.poll(0.05)

    # Requests.

    def ask(self, place: int, numbers: Array, birth: int) -> Read:
        """Adds items of the shard at `place`, which has that `birth`, to the next request."""
        if self._gathering is None:
            self._gathering = PendingItems(self._none())
        self._gathering.numbers[place] = numbers
        return RemoteRead(self, self._gathering, place, birth)

    def send(self) -> None:
        """Sends everything added since the last call, as one request."""
        wanted, self._gathering = self._gathering, None
        if wanted is None:
            return
        if self.lost:
            wanted.lost = self.lost
            return
        self._wanted.append(wanted)
        wanted.request = self._client.ask(self.wire.items, lambda: [self._request_frame(wanted.numbers)])

    def send_counts(self) -> None:
        """Sends the limiter's counts, if they have changed since they were last sent."""
        if not np.array_equal(self.limiter.counts(), self._counts):
            self._client.post(self.wire.news, [self._request_frame(self._none())])

    def _none(self) -> list[Array]:
        return [np.empty(0, np.int64)] * len(self.wire.shards)

    def _ask_for_news(self) -> PendingRequest:
        def request() -> list[memoryview]:
            since = np.full(len(self.wire.shards), -1)
            if self.has_heard:
                for reader in self.readers:
                    since[reader.place] = reader.known - reader.column.offset
            return [self._request_frame(self._none(), since)]

        return self._client.ask(self.wire.news, request)

    def _request_frame(self, numbers: list[Array], since: Array | None = None) -> memoryview:
        """Returns a request frame with the current counts; it is built again for every repetition."""
        self._counts = self.limiter.counts()
        since = np.full(len(self.wire.shards), -1) if since is None else since
        return self.wire.pack_request(ReplayRequest(self._counts, since, numbers))

    # Replies.

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Receives replies for up to `timeout_s` and repeats unanswered requests; returns whether any reply arrived."""
        received = self._client.poll(timeout_s)
        if received:
            self._take()
        elif not self.lost and self.has_heard and self._client.silent_s >= self.lost_after_s:
            self._lose()
        return received

    def has_message(self) -> bool:
        """Returns whether a reply is waiting; check it before sleeping on the descriptor."""
        return self._client.has_message()

    def _take(self) -> None:
        """Applies the replies received since the last call."""
        for wanted in [one for one in self._wanted if one.request is not None and one.request.answer is not None]:
            assert wanted.request is not None
            wanted.answer = self._apply(wanted.request, wanted.numbers)
            self._wanted.remove(wanted)
        if self._news.answer is not None:
            self._apply(self._news, self._none())
            self._news = self._ask_for_news()

    def _apply(self, request: PendingRequest, numbers: list[Array]) -> ReplayReply:
        assert request.answer is not None
        try:
            answer = ReplayReply(self.wire, request.own[0], request.answer[1:], [len(wanted) for wanted in numbers])
        except ValueError as error:  # ReplayError: a priority that no item can have
            raise Refused(f"{self.address} sent an invalid reply: {error}") from error
        counts = self.limiter.counts().tolist()
        for reader in self.readers:
            inserted = reader.apply(answer, counts[reader.index])
            if inserted > counts[reader.index]:
                self.limiter.note_inserted(reader.index, inserted)
        self.lost = ""
        return answer

    def _lose(self) -> None:
        """Marks the host as lost. The request for news is still repeated, because the host may come back."""
        silent_s, tries = self._client.silent_s, self._client.num_tries
        why = self._client.why_silent()[:-1]
        self.lost = f"no reply for {silent_s:.1f} s, {tries} tries: {why}"
        for wanted in self._wanted:
            wanted.lost = self.lost
            assert wanted.request is not None
            self._client.forget(wanted.request)
        self._wanted.clear()

    def close(self) -> None:
        self._client.close()
