"""Restoring a snapshot: everything is checked, and nothing becomes visible before all of it is loaded.

Rows are read into their slots and their checksums are computed on the way. Only then do the words of the shards move,
without which no reader reads a row. So a snapshot is read once, and a damaged one leaves the shards empty. Imports only
numpy and msgspec.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
import numpy as np

from echelon.disk import open_regular, read_json
from echelon.errors import ConfigError
from echelon.replay.layout import spans
from echelon.replay.limiter import Limiter
from echelon.replay.reader import ShardReader
from echelon.replay.shard import HEAD, RESERVE, RINGS, TAIL
from echelon.replay.snapshot import CHUNK_BYTES, FORMAT, HEADER, as_bytes

Array = np.ndarray[Any, Any]
NO_BOUNDS: Mapping[str, tuple[Any, Any]] = MappingProxyType({})


class DamagedSnapshot(ConfigError):
    """A snapshot is damaged; nothing of it was restored."""


Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]  # of a row; the first one has 0


class SavedShard(msgspec.Struct, frozen=True):
    """The numbers of a shard's rows: `start` to `head` (exclusive), those from `tail` on whole; per ring, the same."""

    head: Number
    start: Number
    tail: Number
    rings: list[tuple[Number, Number, Number]]

    def check(self, reader: ShardReader) -> None:
        """Raises ValueError unless these rows fit into the shard."""
        rings = [(ring, side.capacity) for ring, side in zip(self.rings, reader.shard.sides, strict=True)]
        for (start, whole, stop), capacity in [((self.start, self.tail, self.head), reader.layout.capacity), *rings]:
            if not start <= whole <= stop <= start + capacity:
                raise ValueError(f"rows {start} to {stop}, whole from {whole} on, in a ring of {capacity}")


class SavedLimiter(msgspec.Struct, frozen=True):
    inserted: list[Number]
    sampled: list[Number]
    written_off: list[Number]


class Header(msgspec.Struct, frozen=True):
    """`replay.json`, without its checksum."""

    format: int
    layout: dict[str, Any]
    shards: list[SavedShard]
    files: dict[str, list[int]]
    counters: Any
    limiter: SavedLimiter | None = None


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


def restore(
    path: Path,
    readers: Sequence[ShardReader],
    limiter: Limiter | None = None,
    bounds: Mapping[str, tuple[Any, Any]] = NO_BOUNDS,
) -> dict[str, Any]:
    """Fills empty shards from a snapshot and returns the caller's counters.

    Call it before a writer or a `Replay` uses the shards. Raises ConfigError if the snapshot is of another replay, and
    DamagedSnapshot if it is damaged or a field is outside its `bounds` (low to high, both inclusive); the shards then
    stay empty. A `Replay` of these readers samples exactly what the old one would have sampled.
    """
    header = read_header(path)
    shards = [msgspec.convert(saved, SavedShard) for saved in header["shards"]]
    if len(shards) != len(readers):
        raise ConfigError(f"snapshot {path} has {len(shards)} shards, but this replay has {len(readers)}.")
    for reader in readers:
        if reader.layout.to_json() != header["layout"]:
            raise ConfigError(f"snapshot {path} does not fit this replay: {_difference(header, reader)}.")
        if reader.shard.head or reader.column.fed:
            raise ConfigError(f"snapshot {path} cannot be restored into {reader.name}: it already holds items.")
    tails = []
    for index, (reader, saved) in enumerate(zip(readers, shards, strict=True)):
        tails.append(_fill(_Files(path, header["files"], index), reader, saved, bounds))
    if limiter is not None and header.get("limiter") is not None:
        limiter.load(header["limiter"])
    for reader, saved, tail in zip(readers, shards, tails, strict=True):  # make everything visible now
        for word, (_, _, stop) in enumerate(saved.rings, RINGS):
            reader.shard.words[word] = stop
        reader.shard.words[RESERVE], reader.shard.words[TAIL] = saved.head, tail
        reader.shard.words[HEAD] = reader.column.fed = saved.head
    counters: dict[str, Any] = header["counters"]
    return counters


def read_header(path: Path) -> dict[str, Any]:
    """Returns the header of a snapshot; raises DamagedSnapshot if its checksum is wrong."""
    try:
        record = read_json(path / HEADER)
        header: dict[str, Any] = record["snapshot"]
        is_whole = zlib.crc32(json.dumps(header).encode()) == record["crc32"]
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise DamagedSnapshot(f"snapshot {path} cannot be read: {HEADER} is missing or torn ({error!r}).") from error
    if not is_whole:
        raise DamagedSnapshot(f"snapshot {path} is damaged: {HEADER} does not match its checksum.")
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        found = header.get("format") if isinstance(header, dict) else None
        raise ConfigError(f"snapshot {path} has format {found}; this Echelon reads format {FORMAT}.")
    try:
        msgspec.convert(header, Header)
    except msgspec.ValidationError as error:
        raise DamagedSnapshot(f"snapshot {path} is damaged: {HEADER} is not valid ({error}).") from error
    return header


def _fill(files: _Files, reader: ShardReader, saved: SavedShard, bounds: Mapping[str, tuple[Any, Any]]) -> int:
    """Reads the saved rows of a shard into their slots; returns the number of its first whole item."""
    try:
        saved.check(reader)
    except ValueError as error:
        raise files.damaged(HEADER, f"does not fit the replay: {error}") from error
    shard, start, head, tail = reader.shard, saved.start, saved.head, saved.tail
    capacity = shard.layout.capacity
    files.read("priorities", shard.initial, start, head)
    files.read("rows", shard.items.records, start, head)
    for slots, _ in spans(start, head, capacity):
        reader.column.priorities[slots] = shard.initial[slots]
        _check_rows(files, shard.initial[slots], {name: shard.items.columns[name][slots] for name in bounds}, bounds)
    slots_of = np.arange(start, head) % capacity
    for index, (side, (first, whole, last)) in enumerate(zip(shard.sides, saved.rings, strict=True)):
        files.read(f"ring-{index}", side.records, first, last)
        ring = shard.layout.rings[index].name
        references = [shard.items.columns[f.name] for f in shard.layout.fields if f.ring == ring]
        oldest = np.min([rows.reshape(capacity, -1).min(1) for rows in references], 0)
        shard.oldest[index][:] = oldest
        gone = np.flatnonzero(oldest[slots_of] < whole)
        tail = max(tail, start + int(gone[-1]) + 1 if len(gone) else start)
    return int(tail)


def _check_rows(
    files: _Files, priorities: Array, columns: Mapping[str, Array], bounds: Mapping[str, tuple[Any, Any]]
) -> None:
    """Raises DamagedSnapshot if a row has a number with which it cannot be sampled or learned from."""
    if not ((priorities >= 0) & (priorities < np.inf)).all():
        raise files.damaged(files.name("priorities"), "has a priority that is negative, infinite or NaN")
    for name, (low, high) in bounds.items():
        if not ((columns[name] >= low) & (columns[name] <= high)).all():
            raise files.damaged(files.name("rows"), f"has a number of {name} outside its space")


@dataclass(frozen=True, slots=True)
class _Files:
    """The files of one shard."""

    folder: Path
    entries: Mapping[str, list[int]]
    shard: int

    def name(self, what: str) -> str:
        return f"shard-{self.shard}.{what}"

    def read(self, what: str, ring: Array, start: int, stop: int) -> None:
        """Reads rows `start` to `stop` (exclusive) into their slots of `ring`; raises DamagedSnapshot on a mismatch."""
        name = self.name(what)
        path, expected, crc = self.folder / name, (stop - start) * ring.itemsize, 0
        try:
            found = path.stat().st_size
            if found != expected:
                raise self.damaged(name, f"has {found} bytes, not {expected}")
            with open(open_regular(path, os.O_RDONLY), "rb", buffering=0) as file:
                for slots, _ in spans(start, stop, len(ring)):
                    raw = as_bytes(ring[slots])
                    for begin in range(0, len(raw), CHUNK_BYTES):
                        chunk = raw[begin : begin + CHUNK_BYTES]
                        done = 0
                        while done < len(chunk):
                            done += file.readinto(chunk[done:].data) or self._ends(name)
                        crc = zlib.crc32(chunk.data, crc)
        except OSError as error:
            raise self.damaged(name, f"cannot be read ({error})") from error
        if [found, crc] != self.entries.get(name):
            raise self.damaged(name, "does not match its checksum")

    def _ends(self, name: str) -> int:
        raise self.damaged(name, "ends before its size")

    def damaged(self, name: str, what: str) -> DamagedSnapshot:
        return DamagedSnapshot(f"snapshot {self.folder} is damaged: {name} {what}.")
