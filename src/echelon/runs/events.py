"""Writes TensorBoard event files without a dependency on TensorBoard.

A file is a sequence of records: length (u64), checksum of the length, payload, checksum of the payload, little-endian;
the checksum is a CRC-32C, rotated and offset. A payload is one protobuf `Event`, of which three fields are used:
wall_time (1), step (2) and one of file_version (3), summary (5) or session_log (7).
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from echelon.disk import AppendFile

_CASTAGNOLI = 0x82F63B78  # the CRC-32C polynomial, bits reversed
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5  # protobuf wire types
_SESSION_START = 1
_FLOAT_MAX = 3.4028234663852886e38
_serial = itertools.count()


class EventWriter:
    """One event file in `folder`; TensorBoard reads several files there in order, as one run.

    A session start precedes the first scalars: it hides what the run wrote beyond that step before it was resumed.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{now:017.6f}.{socket.gethostname()}.{os.getpid()}.{next(_serial)}"
        self.path = folder / name
        self._file = AppendFile(self.path, is_new=True)
        self._started = False
        self._record(now, 0, _field(3, b"brain.Event:2"))

    def scalars(self, step: int, values: Mapping[str, float], wall_time: float) -> None:
        """Writes `values` (tag to number) at `step`."""
        if not self._started:
            self._record(wall_time, step, _field(7, _key(1, _VARINT) + _varint(_SESSION_START)))
            self._started = True
        if values:
            self._record(wall_time, step, _field(5, b"".join(_scalar(tag, value) for tag, value in values.items())))

    @property
    def error(self) -> OSError | None:
        """Why the newest records are not in the file yet; None if they are."""
        return self._file.error

    def close(self) -> None:
        self._file.close()

    def _record(self, wall_time: float, step: int, content: bytes) -> None:
        event = _key(1, _DOUBLE) + struct.pack("<d", wall_time) + _key(2, _VARINT) + _varint(step) + content
        length = struct.pack("<Q", len(event))
        self._file.append(length + _checksum(length) + event + _checksum(event))


def crc32c(data: bytes) -> int:
    """Returns the CRC-32C (Castagnoli) of `data`."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _table_entry(byte: int) -> int:
    for _ in range(8):
        byte = (byte >> 1) ^ (_CASTAGNOLI if byte & 1 else 0)
    return byte


_TABLE = tuple(_table_entry(byte) for byte in range(256))


def _checksum(data: bytes) -> bytes:
    crc = crc32c(data)
    rotated = (crc >> 15 | crc << 17) & 0xFFFFFFFF
    return struct.pack("<I", (rotated + 0xA282EAD8) & 0xFFFFFFFF)


def _scalar(tag: str, value: float) -> bytes:
    single = min(max(value, -_FLOAT_MAX), _FLOAT_MAX)  # clamp to float32; nan stays nan
    return _field(1, _field(1, tag.encode()) + _key(2, _FLOAT) + struct.pack("<f", single))


def _field(number: int, content: bytes) -> bytes:
    return _key(number, _BYTES) + _varint(len(content)) + content


def _key(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(value: int) -> bytes:
    """Encodes a protobuf varint: seven bits per byte, lowest first."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
