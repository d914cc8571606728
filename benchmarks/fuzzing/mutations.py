"""Mutations of messages, which are lists of frames."""

from __future__ import annotations

import random
import struct

Frames = list[bytes]
NUMBERS = [0, 1, -1, 2**7, 2**8, 2**15, 2**16, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, -(2**63)]
MARKERS = bytes([0xC0, 0xC1, 0xC4, 0xC7, 0xCA, 0xCB, 0xCF, 0xD3, 0xD4, 0xD9, 0xDC, 0xDD, 0xDF, 0x80, 0x90, 0xFF])
MOST_BYTES = 1 << 16  # repetitions stop here


def mutate(frames: Frames, others: list[Frames], chance: random.Random) -> Frames:
    """Returns `frames` with one to four changes; parts of `others` may replace parts of it."""
    changed = list(frames)
    for _ in range(1 + int(3 * chance.random() ** 3)):
        place = int(chance.random() * len(changed)) if changed else 0
        kind = int(chance.random() * 12)
        if kind == 0 or not changed:
            changed.insert(place, chance.randbytes(int(chance.random() * 40)))
        elif kind == 1:
            del changed[place]
        elif kind == 2:
            other = chance.choice(others)
            changed[place] = other[int(chance.random() * len(other))]
        elif kind == 3:
            changed[place], changed[-1] = changed[-1], changed[place]
        else:
            changed[place] = mutate_bytes(changed[place], chance, kind)
    return changed


def mutate_bytes(data: bytes, chance: random.Random, kind: int) -> bytes:
    """Returns `data` with one change of the `kind`, 4 to 11."""
    at = int(chance.random() * (len(data) + 1))
    if kind <= 6:  # one byte, a marker of msgpack or any
        byte = MARKERS[int(chance.random() * len(MARKERS))] if kind == 4 else int(chance.random() * 256)
        return data[:at] + bytes([byte]) + data[at + 1 :]
    if kind == 7:  # a number that is at a limit
        form = "<q" if chance.random() < 0.5 else ">q"
        return data[:at] + struct.pack(form, chance.choice(NUMBERS)) + data[at + 8 :]
    if kind == 8:
        return data[:at]
    if kind == 9:
        return data[:at] + chance.randbytes(1 + int(chance.random() * 8)) + data[at:]
    end = at + 1 + int(chance.random() * 16)
    if kind == 10:
        return data[:at] + data[end:]
    times = 1 + int(200 * chance.random() ** 4)  # often deep nesting
    return (data[:at] + data[at:end] * times + data[end:])[:MOST_BYTES]
