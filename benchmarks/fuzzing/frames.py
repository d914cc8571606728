"""Fuzzes messages in memory: mutated frames go to the decoder of every wire, which must refuse or accept them.

Whatever a decoder accepts must be valid: encoded again, it must decode to the same.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from echelon.errors import Refused
from echelon.transport.codec import Limits, decode, encode
from fuzzing.harness import Finding, Trial
from fuzzing.mutations import Frames, mutate

DEFAULT_COUNT, BLOCK = 1_000_000, 1_000


@dataclass(frozen=True, slots=True)
class Wire:
    """A wire: `seeds` are valid messages; `take` decodes and checks one, and raises Refused if it is not valid."""

    name: str
    seeds: list[Frames]
    take: Callable[[Frames], None]


def codec() -> Wire:
    limits = Limits(header_bytes=1 << 14, total_bytes=1 << 18, frames=64, depth=16)
    rng = np.random.default_rng(0)
    arrays = [rng.random((3, 2), np.float32), np.arange(5), np.zeros((0, 4), np.uint8), np.array([True, False])]
    values: list[object] = [None, True, -1, 2**64 - 1, 1e308, "text", b"bytes", b"x" * 2000, np.float32(1.5)]
    values += [*arrays, torch.ones(2, 3), torch.arange(4, dtype=torch.bfloat16), (1, (2.0, [3])), {"a": {1: [None]}}]
    messages = [*values, values, {"all": tuple(values)}, [[[[]]]], {str(i): i for i in range(40)}]

    def take(frames: Frames) -> None:
        again = encode(decode(frames, limits))
        if [bytes(part) for part in encode(decode(again))] != [bytes(part) for part in again]:
            raise Finding("the decoder accepted a message that changes when it is encoded again", frames)

    return Wire("codec", [[bytes(part) for part in encode(message)] for message in messages], take)


def wires() -> list[Wire]:
    return [codec()]


def add_options(parser: argparse.ArgumentParser) -> None:
    pass


def make(options: argparse.Namespace) -> Trial:
    torch.set_num_threads(1)
    targets = wires()
    for wire in targets:
        for seed in wire.seeds:
            wire.take(seed)  # raises if it is refused: mutations start from what is accepted

    def trial(chance: random.Random) -> str:
        wire = targets[int(chance.random() * len(targets))]
        frames = mutate(wire.seeds[int(chance.random() * len(wire.seeds))], wire.seeds, chance)
        try:
            wire.take(frames)
        except Refused:
            return f"{wire.name} refused"
        except Finding:
            raise
        except Exception as error:
            raise Finding(f"{wire.name} raised {type(error).__name__}", frames) from error
        return f"{wire.name} accepted"

    return trial
