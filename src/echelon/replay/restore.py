"""Restoring a snapshot: everything is checked, and nothing becomes visible before all of it is loaded.

Rows are read into their slots and their checksums are computed on the way. Only then do the words of the shards move,
without which no reader reads a row. So a snapshot is read once, and a damaged one leaves the shards empty. Imports only
numpy.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from echelon.errors import ConfigError
from echelon.replay.layout import spans
from echelon.replay.limiter import Limiter
from echelon.replay.reader import ShardReader
from echelon.replay.shard import HEAD, RESERVE, RINGS, TAIL
from echelon.replay.snapshot import CHUNK_BYTES, FORMAT, HEADER, as_bytes

Array = np.ndarray[Any, Any]


class DamagedSnapshot(ConfigError):
    """A snapshot is damaged; nothing of it was restored."""


def _difference(header: dict[str, Any], reader: ShardReader) -> str:
    """Returns the differences between the layouts of a snapshot and of a replay."""
    theirs, mine = header["layout"], reader.layout.to_json()
    parts = []
    for name in mine.keys() | theirs.keys():
        old, new = theirs.get(name), mine.get(name)
        if old != new and isinstance(old, list) and isinstance(new, list):
            old, new = [one for one in old if one not in new], [one for one in new if one not in old]
        if old != new:
            parts.append(f"{name} of a shard: {old} in the snapshot, {new} here")
    return "; ".join(sorted(parts))


def restore(path: Path, readers: Sequence[ShardReader], limiter: Limiter | None = None) -> dict[str, Any]:
    """Fills empty shards from a snapshot and returns the caller's counters.

    Call it before a writer or a `Replay` uses the shards. Raises ConfigError if the snapshot is of another replay, and
    DamagedSnapshot if it is damaged; the shards then stay empty. A `Replay` of these readers samples exactly what the
    old one would have sampled.
    """
    header = read_header(path)
    shards = header["shards"]
    if len(shards) != len(readers):
        raise ConfigError(f"snapshot {path} has {len(shards)} shards, but this replay has {len(readers)}.")
    for reader in readers:
        if reader.layout.to_json() != header["layout"]:
            raise ConfigError(f"snapshot {path} does not fit this replay: {_difference(header, reader)}.")
        if reader.shard.head or reader.column.fed:
            raise ConfigError(f"snapshot {path} cannot be restored into {reader.name}: it already holds items.")
    tails = []
    for index, (reader, saved) in enumerate(zip(readers, shards, strict=True)):
        tails.append(_fill(_Files(path, header["files"], index), reader, saved))
    if limiter is not None and header["limiter"] is not None:
        limiter.load(header["limiter"])
    for reader, saved, tail in zip(readers, shards, tails, strict=True):  # make everything visible now
        for word, (_, _, stop) in enumerate(saved["rings"], RINGS):
            reader.shard.words[word] = stop
        reader.shard.words[RESERVE], reader.shard.words[TAIL] = saved["head"], tail
        reader.shard.words[HEAD] = reader.column.fed = saved["head"]
    counters: dict[str, Any] = header["counters"]
    return counters


def read_header(path: Path) -> dict[str, Any]:
    """Returns the header of a snapshot; raises DamagedSnapshot if its checksum is wrong."""
    try:
        record = json.loads((path / HEADER).read_text())
        header: dict[str, Any] = record["snapshot"]
        is_whole = zlib.crc32(json.dumps(header).encode()) == record["crc32"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DamagedSnapshot(f"snapshot {path} cannot be read: {HEADER} is missing or torn ({error!r}).") from error
    if not is_whole:
        raise DamagedSnapshot(f"snapshot {path} is damaged: {HEADER} does not match its checksum.")
    if header["format"] != FORMAT:
        raise ConfigError(f"snapshot {path} has format {header['format']}; this Echelon reads format {FORMAT}.")
    return header


def _fill(files: _Files, reader: ShardReader, saved: Mapping[str, Any]) -> int:
    """Reads the saved rows of a shard into their slots; returns the number of its first whole item."""
    shard, start, head = reader.shard, saved["start"], saved["head"]
    capacity, tail = shard.layout.capacity, saved["tail"]
    files.read("priorities", shard.initial, start, head)
    for slots, _ in spans(start, head, capacity):
        reader.column.priorities[slots] = shard.initial[slots]
    files.read("rows", shard.items.records, start, head)
    slots_of = np.arange(start, head) % capacity
    for index, (side, (first, whole, last)) in enumerate(zip(shard.sides, saved["rings"], strict=True)):
        files.read(f"ring-{index}", side.records, first, last)
        ring = shard.layout.rings[index].name
        references = [shard.items.columns[f.name] for f in shard.layout.fields if f.ring == ring]
        oldest = np.min([rows.reshape(capacity, -1).min(1) for rows in references], 0)
        shard.oldest[index][:] = oldest
        gone = np.flatnonzero(oldest[slots_of] < whole)
        tail = max(tail, start + int(gone[-1]) + 1 if len(gone) else start)
    return int(tail)


@dataclass(frozen=True, slots=True)
class _Files:
    """The files of one shard."""

    folder: Path
    entries: Mapping[str, list[int]]
    shard: int

    def read(self, what: str, ring: Array, start: int, stop: int) -> None:
        """Reads rows `start` to `stop` (exclusive) into their slots of `ring`; raises DamagedSnapshot on a mismatch."""
        name = f"shard-{self.shard}.{what}"
        path, expected, crc = self.folder / name, (stop - start) * ring.itemsize, 0
        try:
            found = path.stat().st_size
            if found != expected:
                raise self._damaged(name, f"has {found} bytes, not {expected}")
            with path.open("rb", buffering=0) as file:
                for slots, _ in spans(start, stop, len(ring)):
                    raw = as_bytes(ring[slots])
                    for begin in range(0, len(raw), CHUNK_BYTES):
                        chunk = raw[begin : begin + CHUNK_BYTES]
                        done = 0
                        while done < len(chunk):
                            done += file.readinto(chunk[done:].data) or self._ends(name)
                        crc = zlib.crc32(chunk.data, crc)
        except OSError as error:
            raise self._damaged(name, f"cannot be read ({error})") from error
        if [found, crc] != self.entries.get(name):
            raise self._damaged(name, "does not match its checksum")

    def _ends(self, name: str) -> int:
        raise self._damaged(name, "ends before its size")

    def _damaged(self, name: str, what: str) -> DamagedSnapshot:
        return DamagedSnapshot(f"snapshot {self.folder} is damaged: {name} {what}.")
