"""Both ends of a line in one process, for tests of lines and of what they are made of."""

from __future__ import annotations

import random
from pathlib import Path

from echelon.transport.lines import LineReader, LineWriter


class Pair:
    """Both ends of a line in one process."""

    def __init__(self, folder: Path, name: str = "line") -> None:
        self.writer = LineWriter(folder, name)
        self.reader = LineReader(folder, name)

    def carry(self, *frames: bytes) -> list[bytes] | None:
        assert self.writer.send(frames, 1.0)
        received = self.reader.receive(1.0)
        return None if received is None else [bytes(frame) for frame in received]

    def close(self) -> None:
        self.writer.close()
        self.reader.close()


def frames_of(sizes: list[int], seed: int = 0) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(size) for size in sizes]
