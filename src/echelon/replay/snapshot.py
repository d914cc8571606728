"""Snapshots: the content of a replay on disk, written while training continues; `restore` loads it back exactly.

A snapshot is a folder with `replay.json` (layout, item numbers, limiter counts, the caller's counters, and the size and
CRC-32 of every file) and, per shard, separate files for its priorities, its rows and the rows of each side ring: raw,
in the order of their numbers. A snapshot is *cut* at one moment: it holds the items that can be sampled at that moment,
with their priorities at that moment. The cut copies only the priorities. Rows do not change after they are written, so
they are read in place later, the oldest first and all rings in turn. Rows that their actor overwrites before they are
read are left out; the replay has evicted them by then too.

The folder gets its name by a rename once everything in it is on disk. A crash leaves at most a folder whose name ends
in `.part`, which the next snapshot of that name removes. The snapshot that was to be replaced stays complete, possibly
under a name that ends in `.old`. Imports only numpy.
"""

from __future__ import annotations

import collections
import json
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from echelon.disk import put_folder, sync
from echelon.errors import ConfigError
from echelon.replay.layout import ReplayError, ShardLayout, spans
from echelon.replay.limiter import Limiter
from echelon.replay.reader import Seen, ShardReader
from echelon.replay.shard import RESERVE, RINGS, Rows, Shard
from echelon.replay.sharded import Replay

Array = np.ndarray[Any, Any]
FORMAT = 3
HEADER = "replay.json"
CHUNK_BYTES = 16 * 2**20  # copied and written at a time


@dataclass(slots=True)
class _Stretch:
    """The rows of a ring in a snapshot: `start` to `stop` (exclusive); those from `whole` on are not torn."""

    shard: Shard
    word: int  # index of the shard's word with the reserve of this ring
    rows: Rows
    start: int
    stop: int
    whole: int = 0
    copied: int = 0

    def __post_init__(self) -> None:
        self.whole = self.copied = self.start

    def copy(self, room: Array) -> Array:
        """Copies the next rows, as many as fit into `room`; returns their bytes."""
        size = self.rows.records.itemsize
        first, last = self.copied, min(self.stop, self.copied + max(1, len(room) // size))
        room = room if len(room) >= size else np.empty(size, np.uint8)
        for slots, places in spans(first, last, self.rows.capacity):
            room[size * places.start : size * places.stop] = as_bytes(self.rows.records[slots])
        self.copied = last
        self.whole = max(self.whole, min(last, self.shard.words[self.word] - self.rows.capacity))
        return room[: size * (last - first)]


@dataclass(slots=True)
class _Cut:
    """The part of a snapshot that belongs to one shard."""

    priorities: Array
    items: _Stretch
    sides: list[_Stretch] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        items = self.items
        rings = [[side.start, side.whole, side.stop] for side in self.sides]
        return {"head": items.stop, "start": items.start, "tail": items.whole, "rings": rings}


def _cut(reader: ShardReader, window: tuple[int, int], is_prioritized: bool) -> _Cut:
    shard, (start, head) = reader.shard, window
    column = reader.column.priorities if is_prioritized else shard.initial
    chunks = [column[slots] for slots, _ in spans(start, head, shard.layout.capacity)]
    cut = _Cut(np.concatenate([*chunks, np.empty(0)]), _Stretch(shard, RESERVE, shard.items, start, head))
    for word, side in enumerate(shard.sides, RINGS):
        cut.sides.append(_Stretch(shard, word, side, max(0, shard.words[word] - side.capacity), shard.words[word]))
    return cut


class Snapshot:
    """A snapshot that is cut but not yet written: call `write`, or iterate over `chunks` between other work."""

    def __init__(
        self,
        path: Path,
        replay: Replay | Seen,
        limiter: Limiter | None = None,
        counters: Mapping[str, Any] | None = None,
    ) -> None:
        """Makes the cut. `restore` returns `counters`, any JSON. An existing snapshot at `path` will be replaced."""
        readers = local_readers(replay)
        if path.exists() and not (path / HEADER).exists():
            raise ConfigError(f"{path} exists and is not a snapshot; remove it or choose another name.")
        self.path, self._part = path, path.with_name(f"{path.name}.part")
        self._cuts = [_cut(reader, replay.window(i), replay.alpha > 0.0) for i, reader in enumerate(readers)]
        self._header = {
            "format": FORMAT,
            "layout": replay.layout.to_json(),
            "limiter": self._counts(limiter),
            "counters": dict(counters or {}),
        }
        self._files: dict[str, list[int]] = {}  # bytes and CRC-32 so far

    def _counts(self, limiter: Limiter | None) -> dict[str, list[int]] | None:
        """Returns the limiter's counts as of the cut: actors may have appended since."""
        if limiter is None:
            return None
        counts = limiter.state()
        if len(counts["inserted"]) == len(self._cuts):
            counts["inserted"] = [cut.items.stop for cut in self._cuts]
        return counts

    @property
    def nbytes(self) -> int:
        """The size of the snapshot on disk."""
        stretches = [stretch for cut in self._cuts for stretch in (cut.items, *cut.sides)]
        rows = sum((stretch.stop - stretch.start) * stretch.rows.records.itemsize for stretch in stretches)
        return rows + sum(cut.priorities.nbytes for cut in self._cuts)

    def write(self) -> None:
        for _ in self.chunks():
            pass

    def chunks(self) -> Iterator[None]:
        """Writes the snapshot chunk by chunk. After the last chunk it is complete and on disk.

        If the iteration is stopped early, nothing is left on disk.
        """
        shutil.rmtree(self._part, ignore_errors=True)
        self._part.mkdir(parents=True)
        try:
            room = np.empty(CHUNK_BYTES, np.uint8)
            waiting = collections.deque[tuple[str, _Stretch]]()
            for index, cut in enumerate(self._cuts):
                waiting.append((f"shard-{index}.rows", cut.items))
                waiting.extend((f"shard-{index}.ring-{ring}", side) for ring, side in enumerate(cut.sides))
            while waiting:
                name, stretch = waiting.popleft()
                self._append(name, stretch.copy(room))
                if stretch.copied < stretch.stop:
                    waiting.append((name, stretch))
                yield
            for index, cut in enumerate(self._cuts):
                self._append(f"shard-{index}.priorities", as_bytes(cut.priorities))
                yield
            self._seal()
        except BaseException:
            shutil.rmtree(self._part, ignore_errors=True)
            raise

    def _append(self, name: str, data: Array) -> None:
        entry = self._files.setdefault(name, [0, 0])
        entry[0], entry[1] = entry[0] + len(data), zlib.crc32(data.data, entry[1])
        with (self._part / name).open("ab", buffering=0) as file:
            done = 0
            while done < len(data):
                done += file.write(data[done:].data) or 0

    def _seal(self) -> None:
        """Writes the header, syncs everything to disk and renames the folder."""
        text = json.dumps(self._header | {"files": self._files, "shards": [cut.to_json() for cut in self._cuts]})
        (self._part / HEADER).write_text(f'{{"crc32": {zlib.crc32(text.encode())}, "snapshot": {text}}}\n')
        for path in [*self._part.iterdir(), self._part]:
            sync(path)
        put_folder(self._part, self.path, self.path.with_name(f"{self.path.name}.old"))


def most_bytes(layout: ShardLayout, num_shards: int) -> int:
    """Returns the size on disk of a snapshot of full shards."""
    sizes = layout.sizes
    return num_shards * sum(sizes[name] for name in sizes if name in ("rows", "initial") or name.startswith("ring."))


def as_bytes(array: Array) -> Array:
    return array.view(np.uint8).reshape(-1)


def local_readers(replay: Replay | Seen) -> list[ShardReader]:
    """Returns the readers of a replay whose shards are all on this host; otherwise raises ReplayError."""
    readers = [reader for reader in replay.readers if isinstance(reader, ShardReader)]
    if len(readers) != len(replay.readers):
        raise ReplayError("a snapshot must be made on the host of its shards; some of these are on another host.")
    return readers
