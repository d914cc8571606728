"""The shard server: serves the items in the replay shards of this host to the learners of other hosts.

It opens the shards as a learner of this host does, so actors are not involved, and the shard of a dead actor is read
like any other. It waits for requests, and while a learner waits for new items also for appends. It wakes the actors of
this host, because requests contain the learners' counts. It has no state: a learner whose server died sends its request
to the successor again. Bounds: one queue per connection, and one pending request for new items per learner. An invalid
message closes the connection of its sender. If the server dies, learners wait for its successor, and finally drop its
shards.

Imports nothing heavier than numpy and pyzmq.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from echelon.replay.limiter import Limiter, LimiterRule
from echelon.replay.reader import ShardReader
from echelon.replay.remote import QUEUED_MESSAGES
from echelon.replay.shard import Shard
from echelon.replay.wire import MAX_NEWS, ReplayRequest, ReplayWire, Stacks
from echelon.transport.channel import Message, Part, print_error
from echelon.transport.channel_server import Server

Array = np.ndarray[Any, Any]
BURST = 100  # messages handled before the held requests for new items are checked


class ShardServer:
    """Serves those shards of a run that are on this host."""

    def __init__(
        self,
        folder: Path,
        wire: ReplayWire,
        rule: LimiterRule,
        address: str,
        report: Callable[[str], None] = print_error,
    ) -> None:
        """Opens the shards of `wire` in `folder`, and listens."""
        self.wire, self.limiter = wire, Limiter.at(folder, rule)
        self.readers = [ShardReader(Shard.at(folder, index, wire.layout)) for index in wire.shards]
        own = np.zeros(wire.num_counts, np.bool_)
        own[wire.shards] = True
        self._elsewhere = ~own  # counts that requests update
        self._birth = int.from_bytes(hashlib.blake2b(str(folder).encode(), digest_size=7).digest(), "little")
        self._appended = self.limiter.listen(None)
        self._server = Server("learners", address, wire.question_bytes, QUEUED_MESSAGES, report)
        self._server.serve(wire.items, self._take)
        self._server.serve(wire.news, self._take_news)
        self.address = self._server.address
        self.num_items = self.num_answers = 0
        self.wait_s = self.work_s = 0.0

    @property
    def num_refused(self) -> int:
        """Number of messages and handshakes that were refused."""
        return self._server.num_refused

    def step(self, timeout_s: float) -> bool:
        """Serves the received requests; waits at most `timeout_s` for one."""
        start = time.perf_counter()
        worked = self._server.take(BURST) > 0
        served = time.perf_counter()
        self.work_s += served - start
        if worked:
            return True
        if self._server.sleep(timeout_s, [self._appended.descriptor] if self._server.is_holding else []):
            self._appended.clear()
        self.wait_s += time.perf_counter() - served
        return False

    def _take(self, message: Message) -> None:
        question = self.wire.unpack_request(message.frames)
        self._update_counts(question.counts)
        self._answer(message, question)

    def _take_news(self, message: Message) -> None:
        question = self.wire.unpack_request(message.frames)
        self._update_counts(question.counts)
        if message.is_post:
            return
        if (question.since < 0).all():  # the first request: the learner does not know the heads yet
            self._answer(message, question)
        else:
            self._server.hold(message, lambda: self._has_news(question), lambda: self._answer(message, question))

    def _update_counts(self, counts: Array) -> None:
        """Updates the counts of other hosts; a count never decreases."""
        newer = np.flatnonzero((counts > self.limiter.counts()) & self._elsewhere)
        num_shards = self.limiter.rule.num_shards
        for index in newer.tolist():
            if index < num_shards:
                self.limiter.note_inserted(index, int(counts[index]))
            else:
                self.limiter.note_spent(index - num_shards, int(counts[index]))

    def _has_news(self, question: ReplayRequest) -> bool:
        heads = [reader.shard.head for reader in self.readers]
        return any(0 <= since < head for since, head in zip(question.since.tolist(), heads, strict=True))

    def _answer(self, message: Message, question: ReplayRequest) -> None:
        items, whole = self._items(question.numbers)
        windows, news, priorities = list[int](), list[int](), list[Array]()
        for reader, since in zip(self.readers, question.since.tolist(), strict=True):
            first, values = _news(reader, since)
            windows += reader.window()
            news += [first, first + len(values)]
            priorities.append(values.view(np.int64))
        words = np.concatenate([np.array(windows + news, np.int64), *priorities])
        self._server.answer(message, words.tobytes() + whole.tobytes(), *items, own=(self._birth, 0, 0), copy=False)
        self.num_answers += 1
        self.num_items += len(whole)

    def _items(self, numbers: list[Array]) -> tuple[list[Part], Array]:
        """Returns the items as message parts, and which of them are whole."""
        layout, ends = self.wire.layout, np.cumsum([len(wanted) for wanted in numbers]).tolist()
        whole = np.zeros(ends[-1], np.bool_)
        if not ends[-1]:
            return [], whole
        rows = np.empty(ends[-1], layout.row)
        parts = [rows[end - len(wanted) : end] for wanted, end in zip(numbers, ends, strict=True)]
        for reader, wanted, part in zip(self.readers, numbers, parts, strict=True):
            reader.shard.items.gather(wanted, part)
        frames = []
        for ring in self.wire.stacked:
            needed = [Stacks.of(layout, ring.name, part).numbers for part in parts]
            frames.append(np.empty(sum(len(wanted) for wanted in needed), ring.row))
            done, index = 0, layout.rings.index(ring)
            for reader, wanted in zip(self.readers, needed, strict=True):
                reader.shard.sides[index].gather(wanted, frames[-1][done : done + len(wanted)])
                done += len(wanted)
        for reader, wanted, part, end in zip(self.readers, numbers, parts, ends, strict=True):
            if not len(wanted):
                continue
            is_there = (wanted >= 0) & (wanted < reader.shard.head)  # the learner may refer to an earlier shard
            whole[end - len(wanted) : end] = is_there & reader.whole(wanted, part)
        return [array.view(np.uint8).reshape(-1).data for array in (rows, *frames)], whole

    def close(self) -> None:
        self._server.close()


def _news(reader: ShardReader, since: int) -> tuple[int, Array]:
    """Returns the actor's priorities from number `since` on, and the number of the first."""
    tail, head = reader.window()
    if since < 0:
        return tail, np.empty(0)
    first = min(max(since, tail), head)
    values = reader.initial(first, min(head, first + MAX_NEWS)) if first < head else np.empty(0)
    gone = min(max(0, reader.window()[0] - first), len(values))  # overwritten while they were copied
    return first + gone, values[gone:]
