"""Invalid data that lines refuse, and the blocks of large messages: how many there are, and when they are retired."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echelon.errors import Refused, TransportError
from echelon.transport import blocks, ring
from echelon.transport.blocks import IDLE_S, LEAST_BYTES, MOST_BLOCKS, POOL_BYTES, BlockPool, SharedBlock, size_class
from echelon.transport.lines import LineReader
from echelon.transport.ring import BEGIN, END, MESSAGE, MIDDLE, PIECE_BYTES, RING_BYTES, SKIP
from line_pair import Pair, frames_of
from running import wait_until

LARGE = PIECE_BYTES + 1  # more than one record carries


@pytest.fixture
def pair(shm_dir: Path) -> Iterator[Pair]:
    pair = Pair(shm_dir)
    yield pair
    pair.close()
    assert list(shm_dir.iterdir()) == []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of the blocks, in seconds."""
    clock = [1000.0]
    monkeypatch.setattr(blocks, "monotonic", lambda: clock[0])
    return clock


class TestThePool:
    def test_blocks_are_little_larger_than_what_they_carry(self) -> None:
        for nbytes in (1, LEAST_BYTES, LARGE, 4 << 20, (4 << 20) + 300, 100_000_000):
            size = size_class(nbytes)
            assert nbytes + 64 <= size <= max(LEAST_BYTES, 1.25 * (nbytes + 64))

    def test_a_receiver_that_keeps_everything_gets_the_rest_in_pieces(self, shm_dir: Path) -> None:
        pair = Pair(shm_dir)
        pair.writer._pool = BlockPool(shm_dir, "line", most_bytes=5 * size_class(LARGE))
        kept = []
        for number in range(12):
            sending = threading.Thread(target=pair.writer.send, args=(frames_of([30, LARGE * 4], number), 30.0))
            sending.start()  # more than the ring holds
            kept.append(pair.reader.receive(30.0))
            sending.join()
        for number, frames in enumerate(kept):
            assert frames is not None and [bytes(frame) for frame in frames] == frames_of([30, LARGE * 4], number)
        assert pair.writer.block_bytes <= 5 * size_class(LARGE)
        pair.close()

    def test_blocks_of_other_sizes_make_way(self, shm_dir: Path) -> None:
        pool = BlockPool(shm_dir, "p", most_bytes=4 * LEAST_BYTES)
        small = [pool.find(1000) for _ in range(1)]
        assert small[0] is not None and pool.nbytes == LEAST_BYTES
        assert pool.find(4 * LEAST_BYTES - 64) is not None and pool.nbytes == 4 * LEAST_BYTES
        assert len(list(shm_dir.iterdir())) == 1 and small[0].state == blocks.RETIRED
        pool._blocks[0].state = blocks.TAKEN
        assert pool.find(1000) is None

    def test_the_reader_drops_what_the_writer_retired(self, shm_dir: Path) -> None:
        pair = Pair(shm_dir)
        pair.writer._pool = BlockPool(shm_dir, "line", most_bytes=16 * LEAST_BYTES)
        for size in (8, 15, 8, 15):
            assert pair.carry(b"x" * size * (LEAST_BYTES - 64)) is not None
            assert pair.reader._shelf.nbytes == pair.writer.block_bytes <= 16 * LEAST_BYTES
        pair.close()
        assert list(shm_dir.iterdir()) == []

    def test_full_shared_memory_is_made_do_with(
        self, pair: Pair, clock: list[float], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(path: Path, nbytes: int) -> Any:
            raise TransportError(f"cannot reserve {nbytes} bytes at {path}: no space left on device")

        make = blocks.create_segment
        monkeypatch.setattr(blocks, "create_segment", full)
        assert pair.carry(b"x" * LARGE) == [b"x" * LARGE]
        assert pair.writer.block_bytes == 0
        monkeypatch.setattr(blocks, "create_segment", make)
        assert pair.carry(b"x" * LARGE) == [b"x" * LARGE] and pair.writer.block_bytes == 0
        clock[0] += 2 * IDLE_S  # then it is tried again
        assert pair.carry(b"x" * LARGE) == [b"x" * LARGE] and pair.writer.block_bytes > 0

    def test_the_bound_is_stated(self, shm_dir: Path) -> None:
        assert BlockPool(shm_dir, "p").find(POOL_BYTES) is None and list(shm_dir.iterdir()) == []

    def test_only_what_was_needed_lately_is_kept(self, shm_dir: Path, clock: list[float]) -> None:
        """Any sizes, any number of messages held at the same time, for any duration."""
        pool, rng = BlockPool(shm_dir, "p"), random.Random(0)
        used: dict[int, float] = {}
        taken: list[SharedBlock] = []
        for _ in range(500):
            clock[0] += rng.random()
            block = pool.find(rng.randrange(1, 32 * LEAST_BYTES))
            assert block is not None
            block.state = blocks.TAKEN
            used[block.number] = clock[0]
            taken.append(block)
            while len(taken) > rng.randrange(8):
                taken.pop(rng.randrange(len(taken))).state = blocks.FREE
            pool.trim()
            lately = {number for number, used_s in used.items() if used_s >= clock[0] - IDLE_S}
            assert {block.number for block in pool._blocks} == lately | {block.number for block in taken}
            assert pool.nbytes == sum(block.nbytes for block in pool._blocks)
        assert len(used) > 2 * len(lately)
        pool.close(discard=True)
        assert list(shm_dir.iterdir()) == []

    def test_no_block_is_given_up_while_its_message_waits_for_room(self, pair: Pair, clock: list[float]) -> None:
        """The ring is full except for 16 bytes at its end, so that the message wraps around."""
        writer, sent = pair.writer, list[bool]()
        while (left := RING_BYTES - writer._head) > 16:
            assert writer.send([b"x" * 1000 if left > 3000 else b"" if left % 32 else b"x"], 0.0)
        assert left == 16
        sender = threading.Thread(target=lambda: sent.append(writer.send([b"x" * LARGE], 60.0)), daemon=True)
        sender.start()
        wait_until(lambda: writer.block_bytes and writer._line.writer[ring.SLEEPS], "it waits for room")
        clock[0] += 2 * IDLE_S
        received: list[bytes] = []
        while not received or len(received[0]) < LARGE:
            frames = pair.reader.receive(60.0)
            assert frames is not None
            received = [bytes(frame) for frame in frames]
        sender.join(60.0)
        assert received == [b"x" * LARGE] and sent == [True]

    def test_a_line_with_large_messages_only_gives_idle_blocks_up(self, pair: Pair, clock: list[float]) -> None:
        held = [pair.writer.send([b"x" * (4 * LARGE)], 1.0) and pair.reader.receive(1.0) for _ in range(3)]
        most = pair.reader._shelf.nbytes
        assert pair.writer.block_bytes == most > 0
        del held
        clock[0] += 2 * IDLE_S
        for _ in range(2 * RING_BYTES // 32 + 1):  # until the ring has wrapped around twice: a record has 32 bytes
            pair.carry(b"x" * LARGE)
        assert pair.writer.block_bytes == pair.reader._shelf.nbytes < most

    def test_a_line_with_small_messages_only_gives_its_blocks_up(self, pair: Pair, clock: list[float]) -> None:
        pair.carry(b"x" * LARGE)
        assert pair.writer.block_bytes == pair.reader._shelf.nbytes > 0
        clock[0] += 2 * IDLE_S
        for _ in range(RING_BYTES // 1000):  # until the ring has wrapped around
            pair.carry(b"x" * 1000)
        assert pair.writer.block_bytes == pair.reader._shelf.nbytes == 0

    def test_many_blocks_take_no_descriptors_and_are_counted(self, pair: Pair) -> None:
        before, kept = len(os.listdir("/proc/self/fd")), []
        for number in range(MOST_BLOCKS + 3):
            assert pair.writer.send(frames_of([LARGE], number), 1.0)
            kept.append(pair.reader.receive(1.0))
        assert pair.writer.block_bytes == MOST_BLOCKS * size_class(LARGE)
        assert len(os.listdir("/proc/self/fd")) <= before  # other threads may close some meanwhile
        for number, frames in enumerate(kept):
            assert frames is not None and [bytes(frame) for frame in frames] == frames_of([LARGE], number)


def poke(pair: Pair, kind: int, nbytes: int, payload: bytes = b"", head: int = 0) -> None:
    """Writes an invalid record."""
    line = pair.writer._line
    ring.RECORD.pack_into(line.records, 0, kind, nbytes)
    line.records[16 : 16 + len(payload)] = payload
    line.writer[0] = head or 16 + -(-nbytes // 16) * 16


def words(*values: int) -> bytes:
    return b"".join(value.to_bytes(8, "little", signed=True) for value in values)


class TestTornContent:
    @pytest.mark.parametrize(
        ("kind", "nbytes", "payload", "head", "reason"),
        [
            (0, 16, b"", 0, "kind 0"),
            (99, 16, b"", 0, "kind 99"),
            (SKIP, 0, b"", 16, "16 bytes unread"),
            (MESSAGE, -1, b"", 16, "-1 bytes"),
            (MESSAGE, 1 << 40, b"", 16, "bytes unread"),
            (MESSAGE, 64, b"", 32, "32 bytes unread"),
            (MESSAGE, 16, b"", RING_BYTES + 16, "bytes unread"),
            (MESSAGE, 16, words(-1, 0), 0, "-1 frames"),
            (MESSAGE, 16, words(2, 0), 0, "2 frames"),
            (MESSAGE, 32, words(1, 17, 0, 0), 0, "end at"),
            (MESSAGE, 48, words(3, 32, -16, 0, 0, 0), 0, "end at"),
            (MESSAGE, 0, b"", 0, "frames in a body of 0"),
            (MIDDLE, 16, words(1, 2), 0, f"kind {MIDDLE}"),
            (END, 16, words(1, 2), 0, f"kind {END}"),
            (ring.BLOCK, 8, words(1), 0, f"kind {ring.BLOCK}"),
        ],
    )
    def test_it_is_refused_with_the_reason(
        self, pair: Pair, kind: int, nbytes: int, payload: bytes, head: int, reason: str
    ) -> None:
        poke(pair, kind, nbytes, payload, head)
        with pytest.raises(Refused, match=reason):
            pair.reader.receive(0.0)

    @pytest.mark.parametrize("nbytes", [-1, 1 << 30])
    def test_a_place_outside_its_block_is_refused(self, pair: Pair, nbytes: int) -> None:
        pair.writer.send([b"x" * LARGE], 1.0)
        ring.RECORD.pack_into(pair.writer._line.records, 16, 1, nbytes)
        with pytest.raises(Refused, match="block 1 of line line was refused"):
            pair.reader.receive(0.0)

    def test_a_block_that_was_given_back_is_refused(self, pair: Pair) -> None:
        pair.carry(b"x" * LARGE)
        pair.writer._head += 32
        ring.RECORD.pack_into(pair.writer._line.records, 48, 1, LARGE)
        pair.writer._publish(32, ring.BLOCK, 16)
        with pytest.raises(Refused, match="state 0"):
            pair.reader.receive(0.0)

    def test_a_block_that_is_not_there_is_an_error(self, pair: Pair) -> None:
        poke(pair, ring.BLOCK, 16, words(7, 100))
        with pytest.raises(TransportError, match="cannot be opened"):
            pair.reader.receive(0.0)

    def test_a_beginning_without_an_end_is_dropped(self, pair: Pair) -> None:
        poke(pair, BEGIN, 16, words(1, 2))
        assert pair.reader.receive(0.0) is None

    def test_a_segment_that_is_no_line_is_refused(self, shm_dir: Path) -> None:
        (shm_dir / "line").write_bytes(b"\0" * 4096)
        with pytest.raises(Refused, match="4096 bytes"):
            LineReader(shm_dir, "line")
