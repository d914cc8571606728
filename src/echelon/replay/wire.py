"""The messages between a learner and the shard server of another host: requests are words, replies carry raw items.

A request has 64-bit words after the header: the limiter's counts as known to the learner; for every shard of the host,
the item number from which on it wants the actor's priorities (-1: none); for every shard, the number of requested
items; then the numbers of these items. A reply has, after the header, a frame of words: the window of every shard, the
range of items that the news covers, their priorities, and a flag per requested item that is True if it is whole. The
items follow in their memory layout: one message frame with rows, and one with image frames for every side ring of
stacks. The latter holds each image frame of a shard once, in ascending order of the frame numbers. Both sides derive
this order from the rows, so no index is sent.

Imports only numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from echelon.errors import Refused
from echelon.replay.layout import ItemBlock, ShardLayout
from echelon.replay.limiter import LimiterRule
from echelon.replay.sum_tree import check_priorities
from echelon.transport.channel import NUM_WORDS, Delivery, Service, digest_of

Array = np.ndarray[Any, Any]
Buffer = bytes | memoryview

MAX_NEWS = 65_536  # priorities of one shard in one reply; the rest follows in the next
MAX_COUNT = 2**53  # bound on a limiter's count: int64 sums of up to 1,024 counts do not overflow


class ReplayRequest(NamedTuple):
    """A learner's request to the shard server of a host."""

    counts: Array  # of the limiter
    since: Array  # per shard of the host: the first item number whose news is wanted, or -1
    numbers: list[Array]  # per shard of the host: the requested items


class Stacks(NamedTuple):
    """The image frames in one side ring that the rows of one shard refer to."""

    numbers: Array  # ascending, unique
    places: list[tuple[str, Array]]  # per field: indices into `numbers` for each item (n, stack)

    @classmethod
    def of(cls, layout: ShardLayout, ring: str, rows: Array) -> Stacks:
        fields = [f.name for f in layout.fields if f.ring == ring and f.stack]
        wanted = [rows[name] for name in fields]
        numbers, places = np.unique(np.concatenate([w.reshape(-1) for w in wanted]), return_inverse=True)
        return cls(numbers, list(zip(fields, places.reshape(len(fields), *wanted[0].shape), strict=True)))


class ReplayWire:
    """The message format for the shards of one host: services, size bounds, and the packing of requests."""

    def __init__(self, layout: ShardLayout, shards: Sequence[int], rule: LimiterRule) -> None:
        """Takes the `layout` of the shards; `shards` are the indices of the host's shards in the run."""
        self.layout, self.shards, self.max_items = layout, list(shards), rule.batch
        self.num_counts = rule.num_counts
        self.stacked = [r for r in layout.rings if any(f.ring == r.name and f.stack for f in layout.fields)]
        digest = digest_of((str(layout.to_json()), tuple(self.shards), self.num_counts, self.max_items))
        self.items = Service("replay items", Delivery.READ, digest)
        self.news = Service("replay news", Delivery.STATE, digest)  # a post carries only the counts
        self._fixed = NUM_WORDS + self.num_counts + 2 * len(self.shards)  # words of a request before the numbers
        self.question_bytes = 8 * (self._fixed + self.max_items)
        news = 8 * (4 * len(self.shards) + MAX_NEWS * len(self.shards)) + self.max_items
        stacks = [
            ring.row.itemsize * sum(f.stack for f in layout.fields if f.ring == ring.name) for ring in self.stacked
        ]
        items = self.max_items * max(layout.row.itemsize, *stacks, 0)
        self.answer_bytes = max(news, items)

    def pack_request(self, request: ReplayRequest) -> memoryview:
        """Returns the frame of a request, with space for the header."""
        lengths = np.array([len(numbers) for numbers in request.numbers], np.int64)
        header = np.zeros(NUM_WORDS, np.int64)
        words = np.concatenate([header, request.counts, request.since, lengths, *request.numbers])
        return words.view(np.uint8).data

    def unpack_request(self, frames: Sequence[Buffer]) -> ReplayRequest:
        """Returns the request of a learner; raises Refused if it is malformed."""
        if len(frames) != 1 or len(frames[0]) % 8 or len(frames[0]) < 8 * self._fixed:
            raise Refused(f"{len(frames[0])} bytes in {len(frames)} frames are not a request")
        words = np.frombuffer(frames[0], np.int64)
        counts, since, lengths, numbers = np.split(
            words[NUM_WORDS:], np.cumsum([self.num_counts, len(self.shards), len(self.shards)])
        )
        if counts.min() < 0 or counts.max() >= MAX_COUNT:
            raise Refused(f"its counts are not between 0 and {MAX_COUNT}")
        is_counted = lengths.min() >= 0 and lengths.max() <= self.max_items and lengths.sum() == len(numbers)
        if not is_counted or len(numbers) > self.max_items:
            raise Refused(
                f"it announces {lengths.tolist()} items and lists {len(numbers)}; at most {self.max_items} are allowed"
            )
        return ReplayRequest(counts, since, np.split(numbers, np.cumsum(lengths)[:-1]))


class ReplayReply:
    """A checked reply of a shard server; `into` copies items out of the message."""

    def __init__(self, wire: ReplayWire, birth: int, frames: Sequence[Buffer], lengths: Sequence[int]) -> None:
        """Parses the `frames` after the header; raises Refused if they are malformed.

        `birth` identifies the shards: it changes when they are created again. `lengths` are the numbers of items
        requested from every shard.
        """
        self._wire, self.birth, self._lengths = wire, birth, list(lengths)
        num, count = len(wire.shards), sum(lengths)
        fixed = 4 * num
        if not frames or len(frames[0]) < 8 * fixed:
            raise Refused(f"{sum(map(len, frames))} bytes are not a reply of a shard server.")
        words = np.frombuffer(frames[0], np.int64, fixed)
        self.windows = words[: 2 * num].reshape(num, 2)
        self.news = words[2 * num :].reshape(num, 2)  # per shard: the first item, and one past the last
        sizes = self.news[:, 1] - self.news[:, 0]
        if sizes.min() < 0 or sizes.max() > MAX_NEWS or len(frames[0]) != 8 * (fixed + sizes.sum()) + count:
            raise Refused(f"{len(frames[0])} bytes do not hold the news {sizes.tolist()} and {count} items.")
        priorities = np.frombuffer(frames[0], np.float64, int(sizes.sum()), 8 * fixed)
        check_priorities(priorities, "a shard server's news")
        self.priorities = np.split(priorities, np.cumsum(sizes)[:-1])
        self._whole = np.frombuffer(frames[0], np.uint8)[len(frames[0]) - count :] != 0
        if len(frames) != (1 + 1 + len(wire.stacked) if count else 1):
            raise Refused(f"a reply of {len(frames)} frames does not hold {count} items.")
        self._rows, self._stacks, self._frames = np.empty(0, wire.layout.row), list[list[Stacks]](), list[Array]()
        if count:
            self._take_items(frames[1:], count)

    def _take_items(self, frames: Sequence[Buffer], count: int) -> None:
        layout = self._wire.layout
        if len(frames[0]) != count * layout.row.itemsize:
            raise Refused(f"{len(frames[0])} bytes of rows are not {count} items of {layout.row.itemsize}.")
        self._rows = np.frombuffer(frames[0], layout.row)
        for ring, frame in zip(self._wire.stacked, frames[1:], strict=True):
            parts = [Stacks.of(layout, ring.name, self._part(place)) for place in range(len(self._lengths))]
            size = sum(len(part.numbers) for part in parts)
            if len(frame) != size * ring.row.itemsize:
                raise Refused(f"{len(frame)} bytes of ring {ring.name} are not {size} frames.")
            self._stacks.append(parts)
            self._frames.append(np.frombuffer(frame, ring.row))

    def _part(self, place: int) -> Array:
        start = sum(self._lengths[:place])
        return self._rows[start : start + self._lengths[place]]

    def into(self, place: int, block: ItemBlock) -> Array:
        """Copies the items of the shard at `place` into `block`; returns True for each that is whole."""
        block.rows[...] = self._part(place)
        for parts, frames in zip(self._stacks, self._frames, strict=True):
            start = sum(len(part.numbers) for part in parts[:place])
            own = frames[start : start + len(parts[place].numbers)]
            for name, places in parts[place].places:
                target = block.stacks[name].reshape(math.prod(places.shape), -1).view(own.dtype)
                own.take(places.reshape(-1), out=target.reshape(-1), mode="clip")
        start = sum(self._lengths[:place])
        whole: Array = self._whole[start : start + self._lengths[place]]
        return whole
