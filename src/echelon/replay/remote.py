"""Shards of another host: a learner reads them through one connection to that host's shard server.

`Link` is the connection, with a `Reader` for each of its shards. What is drawn goes out as one question and comes back
as one answer while the learner does something else. A question for news is always under way, so `window` looks at what
has come and waits for nobody. Every question carries the limiter's counts from here, every answer the heads from there.

Who waits: the learner, in `RemoteWait`, or for items that it wants at once. What bounds it: what it has asked for and
not read. Questions that are not answered are asked again. If the server dies, its successor at the same address answers
them; after `lost_after_s` of silence the host is lost, its readers raise PeerLost, and it is
asked on, once a second, whether it is back. The newest priorities lie in columns here, so a learner that is started
again rebuilds its tree as it does for shards of its own host. A host that comes back without its memory has new shards,
whose items are numbered on; its actors then count from 0, and may insert more for a while.

Needs nothing heavier than numpy and pyzmq.
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
QUEUED_MESSAGES = 64  # more than a learner has under way


@dataclass(slots=True, eq=False)
class PendingItems:
    """Items under way, and what came of them."""

    numbers: list[Array]  # per shard of the host
    request: PendingRequest | None = None  # once it is sent
    answer: ReplayReply | None = None
    lost: str = ""  # why there will be no answer


class RemoteRead:
    """Items of one shard, under way from another host."""

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
        # The shard was made anew since they were asked for: what has these numbers there are other items.
        return whole if self._wanted.answer.birth == self._birth else np.zeros_like(whole)


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

    def hear(self, answer: ReplayReply, inserted: int) -> int:
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
        wire: ReplayWire,
        columns: Sequence[PriorityColumn | None],
        limiter: Limiter,
        secret: str | None = None,
        lost_after_s: float = 10.0,
    ) -> None:
        """Connects in the background; `arrive` waits until the server has answered.

        `columns` are for the shards of the host that are this learner's; None: another learner reads it.
        """
        self.address, self.wire, self.limiter, self.lost_after_s = address, wire, limiter, lost_after_s
        self.readers = [RemoteReader(self, place, column) for place, column in enumerate(columns) if column is not None]
        self.lost = ""  # why the host is lost, while it is
        self._wanted: list[PendingItems] = []  # under way
        self._gathering: PendingItems | None = None
        self._counts = limiter.counts()
        self._client = Client("the shard server", address, secret, wire.answer_bytes, queued=QUEUED_MESSAGES)
        self.descriptor = self._client.descriptor
        self._news = self._ask_for_news()

    @property
    def has_heard(self) -> bool:
        return self._client.has_heard

    def arrive(self, timeout_s: float) -> None:
        """Waits for the first answer; TransportTimeout after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self.has_heard:
            if time.monotonic() >= deadline:
                raise TransportTimeout(
                    f"the shard server at {self.address} did not answer within {timeout_s:.1f} s: "
                    f"{self._client.why_silent()}"
                )
            self.poll(0.05)

    # What is asked.

    def ask(self, place: int, numbers: Array, birth: int) -> Read:
        """Adds items of the shard of that `birth` at `place` to what `send` will ask for."""
        if self._gathering is None:
            self._gathering = PendingItems(self._none())
        self._gathering.numbers[place] = numbers
        return RemoteRead(self, self._gathering, place, birth)

    def send(self) -> None:
        """Sends what was asked for since the last time, as one question."""
        wanted, self._gathering = self._gathering, None
        if wanted is None:
            return
        if self.lost:
            wanted.lost = self.lost
            return
        self._wanted.append(wanted)
        wanted.request = self._client.ask(self.wire.items, lambda: [self._question(wanted.numbers)])

    def send_counts(self) -> None:
        """Sends the limiter's counts, if they changed since they last went out."""
        if not np.array_equal(self.limiter.counts(), self._counts):
            self._client.post(self.wire.news, [self._question(self._none())])

    def _none(self) -> list[Array]:
        return [np.empty(0, np.int64)] * len(self.wire.shards)

    def _ask_for_news(self) -> PendingRequest:
        def question() -> list[memoryview]:
            since = np.full(len(self.wire.shards), -1)
            if self.has_heard:
                for reader in self.readers:
                    since[reader.place] = reader.known - reader.column.offset
            return [self._question(self._none(), since)]

        return self._client.ask(self.wire.news, question)

    def _question(self, numbers: list[Array], since: Array | None = None) -> memoryview:
        """With the counts as they are now, however often it is sent."""
        self._counts = self.limiter.counts()
        since = np.full(len(self.wire.shards), -1) if since is None else since
        return self.wire.question(ReplayRequest(self._counts, since, numbers))

    # What comes.

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Takes in what comes within `timeout_s`, and asks again what was not answered; whether anything came."""
        heard = self._client.poll(timeout_s)
        if heard:
            self._take()
        elif not self.lost and self.has_heard and self._client.silent_s >= self.lost_after_s:
            self._lose()
        return heard

    def has_mail(self) -> bool:
        """Whether something is there to take in; to be looked at before sleeping on the descriptor."""
        return self._client.has_mail()

    def _take(self) -> None:
        """What was answered since the last time."""
        for wanted in [one for one in self._wanted if one.request is not None and one.request.answer is not None]:
            assert wanted.request is not None
            wanted.answer = self._hear(wanted.request, wanted.numbers)
            self._wanted.remove(wanted)
        if self._news.answer is not None:
            self._hear(self._news, self._none())
            self._news = self._ask_for_news()

    def _hear(self, request: PendingRequest, numbers: list[Array]) -> ReplayReply:
        assert request.answer is not None
        try:
            answer = ReplayReply(self.wire, request.own[0], request.answer[1:], [len(wanted) for wanted in numbers])
        except ValueError as error:  # ReplayError: a priority that no item can have
            raise Refused(f"{self.address} sent an answer that is none: {error}") from error
        counts = self.limiter.counts().tolist()
        for reader in self.readers:
            inserted = reader.hear(answer, counts[reader.index])
            if inserted > counts[reader.index]:
                self.limiter.note_inserted(reader.index, inserted)
        self.lost = ""
        return answer

    def _lose(self) -> None:
        """The host has said nothing for too long. It is asked on for news: it may come back."""
        silent_s, tries = self._client.silent_s, self._client.num_tries
        why = self._client.why_silent()[:-1]
        self.lost = f"it did not answer for {silent_s:.1f} s, {tries} tries: {why}"
        for wanted in self._wanted:
            wanted.lost = self.lost
            assert wanted.request is not None
            self._client.forget(wanted.request)
        self._wanted.clear()

    def close(self) -> None:
        self._client.close()
