"""Snapshots: the content of a replay on disk, written bit by bit while training goes on, and taken back exactly.

A snapshot is a folder: `replay.json` (layout, numbers, limiter, the caller's counters) and `shard-N.bin` per shard (its
priorities, its rows, the rows of its side rings: raw, by number). It is *cut* at one moment: the items that can be
drawn then, with the priorities that they have then. Making the cut copies the priorities and nothing else. Rows do not
change once they are written, so they are read in place, the oldest first, a piece at each `step`; those that their
actor overwrites before their turn comes are left out, and are gone from the replay by then too.

The folder appears by a rename once everything in it is on the disk. A crash leaves at most a folder whose name ends in
`.part`, which the next snapshot of that name removes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from echelon.errors import ConfigError
from echelon.replay.layout import ReplayError, spans
from echelon.replay.limiter import Limiter
from echelon.replay.reader import ShardReader
from echelon.replay.shard import HEAD, RESERVE, RINGS, TAIL, Rows, Shard
from echelon.replay.sharded import Replay

Array = np.ndarray[Any, Any]
FORMAT = 1
HEADER = "replay.json"
PIECE = 4 * 2**20  # bytes that one step writes


@dataclass(slots=True)
class _Cut:
    """What a snapshot holds of one shard: the items from `tail` to before `head`, and rows of its side rings."""

    shard: Shard
    head: int
    start: int  # the first item of the file; `tail` is later where rows were overwritten before their turn
    tail: int
    priorities: Array
    rings: list[list[int]] = field(default_factory=list)  # per ring: first row of the file, first that is whole, last

    def to_json(self) -> dict[str, Any]:
        return {"head": self.head, "start": self.start, "tail": self.tail, "rings": self.rings}


def _cut(reader: ShardReader, window: tuple[int, int], is_prioritized: bool) -> _Cut:
    shard, (start, head) = reader.shard, window
    column = reader.column.priorities if is_prioritized else shard.initial
    pieces = [column[slots] for slots, _ in spans(start, head, shard.layout.capacity)]
    cut = _Cut(shard, head, start, start, np.concatenate([*pieces, np.empty(0)]))
    for index, ring in enumerate(shard.layout.rings):
        reserve = shard.words[RINGS + index]
        first = max(0, reserve - ring.capacity)
        cut.rings.append([first, first, reserve])
    return cut


class Snapshot:
    """A snapshot under way: call `step` between other work until it says that it is done, or `finish` at once."""

    def __init__(
        self, path: Path, replay: Replay, limiter: Limiter | None = None, counters: Mapping[str, Any] | None = None
    ) -> None:
        """Makes the cut. `counters` is whatever JSON the caller wants back."""
        readers = local_readers(replay)
        if path.exists():
            raise ConfigError(f"snapshot {path} is there already; remove it or choose another name.")
        self.path, self._part = path, path.with_name(f"{path.name}.part")
        shutil.rmtree(self._part, ignore_errors=True)
        self._part.mkdir(parents=True)
        self._cuts = [_cut(reader, replay.window(i), replay.alpha > 0.0) for i, reader in enumerate(readers)]
        self._header = {
            "format": FORMAT,
            "layout": replay.layout.to_json(),
            "limiter": self._counts(limiter),
            "counters": dict(counters or {}),
        }
        self._sealed: Future[None] | None = None
        self._work = self._pieces()

    def _counts(self, limiter: Limiter | None) -> dict[str, list[int]] | None:
        """What the limiter counts, as of the cut: actors may have appended since."""
        if limiter is None:
            return None
        counts = limiter.state()
        if len(counts["inserted"]) == len(self._cuts):
            counts["inserted"] = [cut.head for cut in self._cuts]
        return counts

    def step(self) -> bool:
        """Writes a piece, at most `PIECE` bytes; True once the snapshot is whole and on the disk."""
        if self._sealed is None:
            if next(self._work, None) is not None:
                return False
            # A thread, as the kernel may sleep long over the disk; it takes nothing from the caller's time.
            pool = ThreadPoolExecutor(1, "snapshot")
            self._sealed = pool.submit(self._seal)
            pool.shutdown(wait=False)
        if not self._sealed.done():
            return False
        self._sealed.result()
        return True

    def finish(self) -> None:
        while not self.step():
            if self._sealed is not None:
                self._sealed.result()

    def _pieces(self) -> Iterator[int]:
        """Writes the files; yields after every piece how many bytes it had."""
        for index, cut in enumerate(self._cuts):
            with (self._part / f"shard-{index}.bin").open("xb", buffering=0) as file:
                yield from _write(file, cut.priorities)
                for end, size in _write_rows(file, cut.shard.items, cut.start, cut.head):
                    gone = cut.shard.words[RESERVE] - cut.shard.layout.capacity
                    cut.tail = max(cut.tail, min(end, gone))
                    yield size
                for ring, (side, numbers) in enumerate(zip(cut.shard.sides, cut.rings, strict=True)):
                    for end, size in _write_rows(file, side, numbers[0], numbers[2]):
                        gone = cut.shard.words[RINGS + ring] - side.capacity
                        numbers[1] = max(numbers[1], min(end, gone))
                        yield size

    def _seal(self) -> None:
        """Puts everything on the disk and gives the folder its name."""
        (self._part / HEADER).write_text(json.dumps(self._header | {"shards": [cut.to_json() for cut in self._cuts]}))
        for path in [*self._part.iterdir(), self._part]:
            _sync(path)
        os.rename(self._part, self.path)
        _sync(self.path.parent)


def _write_rows(file: BinaryIO, rows: Rows, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Writes rows by number; yields up to which number they are written, and the bytes of the piece."""
    step = max(1, PIECE // rows.records.itemsize)
    for first in range(start, stop, step):
        last = min(stop, first + step)
        size = sum(sum(_write(file, rows.records[slots])) for slots, _ in spans(first, last, rows.capacity))
        yield last, size


def _write(file: BinaryIO, array: Array) -> Iterator[int]:
    """Writes the bytes of `array` in pieces."""
    raw = array.view(np.uint8).reshape(-1).data
    for start in range(0, len(raw), PIECE):
        piece = raw[start : start + PIECE]
        done = 0
        while done < len(piece):
            done += file.write(piece[done:]) or 0
        yield len(piece)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def local_readers(replay: Replay) -> list[ShardReader]:
    """The readers of shards that lie on this host."""
    readers = [reader for reader in replay.readers if isinstance(reader, ShardReader)]
    if len(readers) != len(replay.readers):
        raise ReplayError("a snapshot is made on the host of its shards; some of these lie on another.")
    return readers


def restore(path: Path, readers: Sequence[ShardReader], limiter: Limiter | None = None) -> dict[str, Any]:
    """Fills empty shards from a snapshot and returns the caller's counters; before any writer and any `Replay`.

    Everything is checked before anything is touched. A `Replay` made of the readers draws what the old one would have.
    """
    try:
        header = json.loads((path / HEADER).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"snapshot {path} cannot be read: {error}. Is the path that of a finished snapshot?"
        ) from error
    shards = header.get("shards", [])
    if header.get("format") != FORMAT or len(shards) != len(readers):
        raise ConfigError(
            f"snapshot {path} has format {header.get('format')} and {len(shards)} shards; expected are {FORMAT} and "
            f"{len(readers)}. Resume with the same number of actors, or without the replay's content."
        )
    for index, (reader, saved) in enumerate(zip(readers, shards, strict=True)):
        layout = reader.layout
        if layout.to_json() != header["layout"]:
            raise ConfigError(f"snapshot {path} was made for {header['layout']}; this replay is {layout.to_json()}.")
        if reader.shard.head or reader.column.fed:
            raise ConfigError(f"snapshot {path} cannot be taken into {reader.name}: it holds items already.")
        rings = zip(saved["rings"], layout.rings, strict=True)
        size = (saved["head"] - saved["start"]) * (8 + layout.row.itemsize)
        size += sum((numbers[2] - numbers[0]) * ring.row.itemsize for numbers, ring in rings)
        found = (path / f"shard-{index}.bin").stat().st_size
        if found != size:
            raise ConfigError(f"snapshot {path} is damaged: shard-{index}.bin has {found} bytes, not {size}.")
    if limiter is not None and header["limiter"] is not None:
        limiter.load(header["limiter"])
    for index, (reader, saved) in enumerate(zip(readers, shards, strict=True)):
        with (path / f"shard-{index}.bin").open("rb", buffering=0) as file:
            _fill(file, reader, saved)
    counters: dict[str, Any] = header["counters"]
    return counters


def _fill(file: BinaryIO, reader: ShardReader, saved: Mapping[str, Any]) -> None:
    shard, start, head = reader.shard, saved["start"], saved["head"]
    for slots, _ in spans(start, head, shard.layout.capacity):
        _read(file, shard.initial[slots])
        reader.column.priorities[slots] = shard.initial[slots]
    for slots, _ in spans(start, head, shard.layout.capacity):
        _read(file, shard.items.records[slots])
    tail = saved["tail"]
    numbers = np.arange(start, head)
    for index, (side, (first, whole, last)) in enumerate(zip(shard.sides, saved["rings"], strict=True)):
        for slots, _ in spans(first, last, side.capacity):
            _read(file, side.records[slots])
        ring = shard.layout.rings[index].name
        references = [shard.items.columns[f.name] for f in shard.layout.fields if f.ring == ring]
        oldest = np.min([rows.reshape(len(rows), -1).min(1) for rows in references], 0)
        shard.oldest[index][:] = oldest
        gone = np.flatnonzero(oldest[numbers % shard.layout.capacity] < whole)
        tail = max(tail, start + int(gone[-1]) + 1 if len(gone) else start)
        shard.words[RINGS + index] = last
    shard.words[RESERVE], shard.words[TAIL], shard.words[HEAD] = head, tail, head
    reader.column.fed = head


def _read(file: BinaryIO, into: Array) -> None:
    raw = into.view(np.uint8).reshape(-1).data
    done = 0
    while done < len(raw):
        count = file.readinto(raw[done:])  # type: ignore[attr-defined]
        assert count, "the size was checked"
        done += count
