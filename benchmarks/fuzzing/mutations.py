"""Mutations of messages, which are lists of frames, of JSON trees and of command lines."""

from __future__ import annotations

import copy
import random
import struct
from collections.abc import Iterator
from typing import Any

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


WORDS = ["", "-", "--", "---", "=", "-1", "0", "1", "1e6", "1_000", "1e400", "nan", "inf", "-inf", "none", "true", "٣"]
WORDS += [
    str(2**31),
    str(2**63),
    str(10**30),
    "9" * 5000,
    "0x10",
    "1,2,3",
    "(1,2)",
    "[",
    "{}",
    '{"a": NaN}',
    "[" * 3000,
]
WORDS += ["CartPole-v1", "No-v0", "json:loads", "none.py:make", ":", "a:b:c", "envpool:", "ALE/", "tcp://127.0.0.1:0"]
WORDS += [
    "tcp://[::1]:0",
    "127.0.0.1:99999",
    "localhost:٣",
    "x" * 5000,
    "\x00",
    "\x1b[2J",
    "\n",
    "é",
    "\udcff",
    "\u202e",
]
WORDS += [
    "/dev/null",
    "/",
    "..",
    "~",
    "$HOME",
    "%s",
    "{0}",
    "impala",
    "dqn",
    "sac",
    "local",
    "inline",
    "hosts",
    "--help",
]

REFERENCES: list[object] = [{"$tensor": "state.rng"}, {"$tensor": "none"}, {"$tensor": []}, {"$float": "nan"}]
REFERENCES += [
    {"$float": "x"},
    {"$float": 10**400},
    {"$tuple": 5},
    {"$items": [[[], 1]]},
    {"$items": 7},
    {"$items": ["ab"]},
]
REFERENCES += [{"$array": "state.rng", "dtype": kind, "shape": [1]} for kind in ("O", "<f4", "V8", "U1", "M8", 5, None)]
REFERENCES += [
    {"$array": "state.rng", "dtype": "|u1", "shape": shape} for shape in (None, [2**63], [-1, -1], "x", 5056)
]
NUMERIC: list[object] = [None, True, False, -1, 0, 1, 2**31, 2**53, 2**62, 2**63, 2**64, 10**30, 10**400, -(2**63), 0.5]
VALUES: list[object] = [*NUMERIC, 1e308, -1e308, 5e-324, float("nan"), float("inf"), [], {}, [[]], [None], {"": 0}]
VALUES += [[0] * 10_000, *REFERENCES]


def nested(depth: int) -> object:
    value: object = 0
    for _ in range(depth):
        value = [value]
    return value


def mutate_json(tree: object, chance: random.Random) -> str:
    """Changes one to three values of a JSON tree in place; returns what it changed."""
    changes = []
    for _ in range(1 + int(3 * chance.random() ** 3)):
        places = list(_places(tree, ""))
        if not places:
            break
        holder, key, path = chance.choice(places)
        kind = int(chance.random() * 10)
        if kind == 0:
            del holder[key]
            what: object = "deleted"
        elif kind == 1 and isinstance(holder, dict):
            holder[what := chance.choice(WORDS)] = holder.pop(key)
        elif kind == 2:
            what = chance.choice(WORDS)
            holder[key] = what
        elif kind == 3:
            other, name, what = chance.choice(places)
            if name in other if isinstance(other, dict) else name < len(other):
                holder[key] = copy.deepcopy(other[name])
        elif kind == 4 and chance.random() < 0.3:
            holder[key], what = nested(chance.choice([50, 400, 900])), "nested"
        else:
            holder[key] = what = copy.deepcopy(chance.choice(VALUES))
        changes.append(f"{path}: {what!r:.60}")
    return "; ".join(changes)


def _places(tree: Any, path: str) -> Iterator[tuple[Any, Any, str]]:
    """Yields the holder, the key and the path of every value in a JSON tree."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield tree, key, f"{path}/{key}"[:200]
        if len(path) < 200:
            yield from _places(tree[key], f"{path}/{key}")


def mutate_text(text: str, chance: random.Random) -> str:
    """Returns `text` with one change of its characters."""
    at = int(chance.random() * (len(text) + 1))
    end = at + int(chance.random() * 4)
    return (
        text[:at] + chance.choice(["", "-", "=", ".", "_", "9", "\x00", "\udcff", "é", text[at:end] * 2]) + text[end:]
    )
