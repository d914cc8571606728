"""Lines carry every message whole, in order and once, lose no wake-up, and outlive the death of either end."""

from __future__ import annotations

import gc
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import Refused, TransportError
from echelon.transport import blocks, ring
from echelon.transport.blocks import IDLE_S, LEAST_BYTES, MOST_BLOCKS, POOL_BYTES, Block, BlockPool, size_class
from echelon.transport.lines import LineReader, LineWriter
from echelon.transport.ring import BEGIN, END, MESSAGE, MIDDLE, PIECE_BYTES, RING_BYTES, SKIP

LARGE = PIECE_BYTES + 1  # more than one record carries

ECHO = """
import sys
from pathlib import Path
from echelon.transport.lines import LineReader, LineWriter
folder = Path(sys.argv[1])
back = LineWriter(folder, "back")
there = LineReader(folder, "there")
print("ready", flush=True)
while not there.ended:
    if (frames := there.receive(60.0)) is not None:
        assert back.send(frames, 60.0)
        del frames
back.close()
"""
FLOOD = """
import itertools, sys
from pathlib import Path
from echelon.transport.lines import LineWriter
writer = LineWriter(Path(sys.argv[1]), "flood")
print("ready", flush=True)
for number in itertools.count():
    body = number.to_bytes(8, "little") * (1 + number % 17 * 800)
    assert writer.send([number.to_bytes(8, "little"), body], 60.0)
"""
KEEP = """
import sys, time
from pathlib import Path
from echelon.transport.lines import LineReader
reader = LineReader(Path(sys.argv[1]), "there")
print("ready", flush=True)
kept = []
while (frames := reader.receive(60.0)) is not None:
    kept.append(frames)
    if len(kept) == int(sys.argv[2]):
        print("full", flush=True)
        time.sleep(60.0)
"""


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


@pytest.fixture
def pair(shm_dir: Path) -> Iterator[Pair]:
    pair = Pair(shm_dir)
    yield pair
    pair.close()
    assert list(shm_dir.iterdir()) == []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time as the blocks see it, in seconds."""
    clock = [1000.0]
    monkeypatch.setattr(blocks, "monotonic", lambda: clock[0])
    return clock


class Child:
    """A process at the other end."""

    def __init__(self, program: str, *arguments: str) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True)
        self.expect("ready")

    def expect(self, word: str) -> None:
        assert self.process.stdout is not None and self.process.stdout.readline().strip() == word

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30.0)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def frames_of(sizes: list[int], seed: int = 0) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(size) for size in sizes]


sizes = st.lists(
    st.integers(0, 64) | st.integers(0, PIECE_BYTES) | st.integers(PIECE_BYTES - 100, 3 * PIECE_BYTES), max_size=6
)


class TestInOneProcess:
    @given(messages=st.lists(sizes, min_size=1, max_size=12), chance=st.randoms(use_true_random=False))
    @settings(deadline=None, max_examples=80)
    def test_every_message_arrives_once_in_order(self, messages: list[list[int]], chance: random.Random) -> None:
        """Whatever the sizes, and however sends and receives alternate."""
        with tempfile.TemporaryDirectory(prefix="t-", dir="/dev/shm") as folder:
            pair, sent, received = Pair(Path(folder)), [], []

            def receive() -> bool:
                if (frames := pair.reader.receive(0.0)) is not None:
                    received.append([bytes(frame) for frame in frames])
                return frames is not None

            for number, message in enumerate(messages):
                sent.append(frames_of(message, number))
                while not pair.writer.send(sent[-1], 0.0):
                    assert receive()
                while chance.random() < 0.5 and receive():
                    pass
            while receive():
                pass
            assert received == sent
            pair.close()

    def test_the_ring_goes_round_with_every_size(self, pair: Pair) -> None:
        for number in range(3 * RING_BYTES // 3000):
            frames = frames_of([number % 3001, number % 7], number)
            assert pair.carry(*frames) == frames

    def test_frames_are_the_receivers_own_and_lie_well(self, pair: Pair) -> None:
        for size in (5, LARGE):
            pair.writer.send([b"x" * 3, b"y" * size], 1.0)
            frames = pair.reader.receive(1.0)
            assert frames is not None and not any(frame.readonly for frame in frames)
            assert all(np.frombuffer(frame, np.uint8).ctypes.data % ring.PAD == 0 for frame in frames)
            frames[1][0] = 1
            pair.carry(b"z" * size)
            assert bytes(frames[1]) == b"\x01" + b"y" * (size - 1)

    def test_a_large_message_is_not_copied_and_its_block_comes_back(self, pair: Pair) -> None:
        pair.writer.send([b"a" * LARGE], 1.0)
        frames = pair.reader.receive(1.0)
        assert frames is not None
        array = np.frombuffer(frames[0], np.uint8)[10:20]
        del frames
        (block,) = pair.writer._pool._blocks
        assert block.state == blocks.TAKEN and np.shares_memory(array, array.base)
        del array
        assert block.state == blocks.FREE
        assert pair.carry(b"b" * LARGE) == [b"b" * LARGE]
        assert pair.writer.block_bytes == size_class(LARGE)

    def test_views_stay_valid_after_the_line_is_closed(self, shm_dir: Path) -> None:
        pair = Pair(shm_dir)
        pair.writer.send([b"a" * LARGE], 1.0)
        frames = pair.reader.receive(1.0)
        pair.close()
        gc.collect()
        assert frames is not None and bytes(frames[0]) == b"a" * LARGE

    def test_a_fork_of_the_reader_gives_nothing_back(self, pair: Pair) -> None:
        pair.writer.send([b"a" * LARGE], 1.0)
        frames = pair.reader.receive(1.0)
        assert frames is not None
        if (pid := os.fork()) == 0:
            del frames
            os._exit(0)
        os.waitpid(pid, 0)
        assert pair.writer._pool._blocks[0].state == blocks.TAKEN

    def test_memory_stays_flat(self, pair: Pair) -> None:
        def carry(count: int) -> None:
            for _ in range(count):
                assert pair.writer.send(message, 1.0)
                assert pair.reader.receive(1.0) is not None

        message = [b"header", b"x" * LARGE]
        carry(1000)
        before_kb, before_files = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, len(os.listdir("/proc/self/fd"))
        carry(100_000)
        after_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert after_kb - before_kb < 4096 and len(os.listdir("/proc/self/fd")) <= before_files
        assert pair.writer.block_bytes == pair.reader._shelf.nbytes == size_class(LARGE)


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
        """Whatever sizes come in whatever number at once, for however long."""
        pool, rng = BlockPool(shm_dir, "p"), random.Random(0)
        used: dict[int, float] = {}
        taken: list[Block] = []
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

    def test_a_line_with_small_messages_only_gives_its_blocks_up(self, pair: Pair, clock: list[float]) -> None:
        pair.carry(b"x" * LARGE)
        assert pair.writer.block_bytes == pair.reader._shelf.nbytes > 0
        clock[0] += 2 * IDLE_S
        for _ in range(RING_BYTES // 1000):  # until the ring has gone round
            pair.carry(b"x" * 1000)
        assert pair.writer.block_bytes == pair.reader._shelf.nbytes == 0

    def test_many_blocks_take_no_descriptors_and_are_counted(self, pair: Pair) -> None:
        before, kept = len(os.listdir("/proc/self/fd")), []
        for number in range(MOST_BLOCKS + 3):
            assert pair.writer.send(frames_of([LARGE], number), 1.0)
            kept.append(pair.reader.receive(1.0))
        assert pair.writer.block_bytes == MOST_BLOCKS * size_class(LARGE)
        assert len(os.listdir("/proc/self/fd")) == before
        for number, frames in enumerate(kept):
            assert frames is not None and [bytes(frame) for frame in frames] == frames_of([LARGE], number)


class TestWaiting:
    def test_wake_ends_a_wait(self, pair: Pair) -> None:
        results: list[Any] = []
        waiting = threading.Thread(target=lambda: results.append(pair.reader.receive(60.0)))
        waiting.start()
        pair.reader.wake()
        waiting.join(30.0)
        assert results == [None]
        assert pair.carry(b"x") == [b"x"]

    def test_a_wake_that_meets_nobody_is_kept(self, pair: Pair) -> None:
        pair.writer.send([b"x"], 1.0)
        pair.reader.wake()
        assert pair.reader.receive(60.0) is None
        assert pair.reader.receive(60.0) is not None

    def test_no_wake_is_lost(self, pair: Pair) -> None:
        """Wakes that fall anywhere into a wait, the moment before the sleep included."""
        turns: list[int] = []

        def wait() -> None:
            for turn in range(3000):
                assert pair.reader.receive(60.0) is None
                turns.append(turn)

        waiting = threading.Thread(target=wait)
        waiting.start()
        for turn in range(3000):
            pair.reader.wake()
            while len(turns) <= turn and waiting.is_alive():
                os.sched_yield()
        waiting.join(30.0)
        assert len(turns) == 3000

    def test_a_reader_that_takes_nothing_is_told(self, pair: Pair) -> None:
        sent = 0
        while pair.writer.send([b"x" * 1000], 0.01):
            sent += 1
        assert sent > RING_BYTES // 1100
        for _ in range(sent):
            assert pair.reader.receive(0.0) is not None
        assert pair.reader.receive(0.0) is None and pair.carry(b"y") == [b"y"]

    def test_a_message_that_stopped_half_way_is_never_seen(self, pair: Pair) -> None:
        pair.writer._pool = BlockPool(Path("/nowhere"), "line", most_bytes=0)
        assert not pair.writer.send([b"x" * RING_BYTES * 2], 0.01)
        assert pair.reader.receive(0.0) is None
        assert pair.carry(b"y" * 10) == [b"y" * 10] and pair.carry(b"z" * LARGE) == [b"z" * LARGE]

    @pytest.mark.parametrize("patient", [True, False])
    def test_a_message_half_way_goes_on_as_long_as_it_is_wanted(self, pair: Pair, patient: bool) -> None:
        pair.writer._pool = BlockPool(Path("/nowhere"), "line", most_bytes=0)
        body, received = frames_of([RING_BYTES * 3]), []

        def go_on() -> bool:
            received.append(pair.reader.receive(0.0))
            return patient

        assert pair.writer.send(body, 0.0, go_on) == patient and len(received) > patient
        received.append(pair.reader.receive(0.0))
        whole = [[bytes(frame) for frame in frames] for frames in received if frames is not None]
        assert whole == ([body] if patient else []) and pair.carry(b"y") == [b"y"]

    def test_the_clock_starts_anew_when_the_reader_takes_something(self, pair: Pair) -> None:
        pair.writer._pool = BlockPool(Path("/nowhere"), "line", most_bytes=0)
        body = frames_of([RING_BYTES * 20])
        results: list[bool] = []
        sending = threading.Thread(target=lambda: results.append(pair.writer.send(body, 30.0)))
        sending.start()
        frames = pair.reader.receive(30.0)
        sending.join(30.0)
        assert results == [True] and frames is not None and [bytes(frame) for frame in frames] == body

    @pytest.mark.parametrize("end", ["writer", "reader"])
    def test_closing_either_end_ends_the_waits(self, pair: Pair, end: str) -> None:
        while pair.writer.send([b"x" * 1000], 0.0):
            pass
        results: list[Any] = []
        sending = threading.Thread(target=lambda: results.append(pair.writer.send([b"x" * 1000], 60.0)))
        sending.start()
        (pair.writer if end == "writer" else pair.reader).close()
        sending.join(30.0)
        assert results == [False] and not pair.writer.send([b"y" * LARGE], 60.0)
        assert pair.writer.abandoned == (end == "reader")

    def test_what_was_sent_before_the_close_is_received(self, shm_dir: Path) -> None:
        writer = LineWriter(shm_dir, "line")
        assert writer.send([b"a"], 1.0) and writer.send([b"b" * LARGE], 1.0)
        writer.close()
        reader = LineReader(shm_dir, "line")
        assert not reader.ended
        assert [len(frames[0]) for frames in iter(lambda: reader.receive(60.0), None)] == [1, LARGE]
        assert reader.ended and list(shm_dir.iterdir()) == []
        assert reader.receive(0.01) is None  # the end is told at once only once: who asks on is to wait

    def test_what_nobody_will_open_is_discarded(self, shm_dir: Path) -> None:
        writer = LineWriter(shm_dir, "line")
        assert writer.send([b"b" * LARGE], 1.0)
        writer.close(discard=True)
        assert list(shm_dir.iterdir()) == []

    def test_threads_send_whole_messages_in_their_order(self, pair: Pair) -> None:
        def send(who: int) -> None:
            for number in range(500):
                size = LARGE if number % 50 == 0 else number
                assert pair.writer.send([bytes([who]), number.to_bytes(4, "little"), bytes([who]) * size], 30.0)

        threads = [threading.Thread(target=send, args=(who,)) for who in range(4)]
        for thread in threads:
            thread.start()
        last = [-1] * 4
        for _ in range(2000):
            frames = pair.reader.receive(30.0)
            assert frames is not None
            who, number = frames[0][0], int.from_bytes(frames[1], "little")
            assert number == last[who] + 1 and bytes(frames[2]) == bytes([who]) * len(frames[2])
            last[who] = number
        for thread in threads:
            thread.join()
        assert last == [499] * 4

    @pytest.mark.parametrize("coming", [False, True], ids=["idle", "left in a copy"])
    def test_who_waits_long_burns_no_core(self, pair: Pair, coming: bool) -> None:
        """Not even if the writer died while it copied a large message."""
        pair.writer._line.writer[ring.COMING] = int(coming)
        before = time.thread_time()
        assert pair.reader.receive(0.3) is None
        assert time.thread_time() - before < 0.1


class TestTwoProcesses:
    def test_messages_come_back_as_they_were(self, shm_dir: Path) -> None:
        there = LineWriter(shm_dir, "there")
        child = Child(ECHO, str(shm_dir))
        try:
            back = LineReader(shm_dir, "back")
            rng = random.Random(1)
            for number in range(300):
                messages = [
                    frames_of(
                        [rng.choice((0, 7, 900, 9000, LARGE, 5 * LARGE)) for _ in range(rng.randrange(4))], number
                    )
                    for _ in range(rng.randrange(1, 9))
                ]
                for message in messages:
                    assert there.send(message, 30.0)
                for message in messages:
                    frames = back.receive(30.0)
                    assert frames is not None and [bytes(frame) for frame in frames] == message
            there.close()
            assert back.receive(30.0) is None and back.ended
            assert child.process.wait(30.0) == 0 and list(shm_dir.iterdir()) == []
        finally:
            child.close()

    def test_a_killed_writer_leaves_whole_messages_only(self, shm_dir: Path) -> None:
        child = Child(FLOOD, str(shm_dir))
        try:
            reader, count = LineReader(shm_dir, "flood"), 0
            while (frames := reader.receive(30.0 if count < 2000 else 0.0)) is not None:
                number = int.from_bytes(frames[0], "little")
                assert number == count and bytes(frames[1]) == bytes(frames[0]) * (1 + number % 17 * 800)
                count += 1
                if count == 2000:
                    child.kill()
            assert count >= 2000 and not reader.ended
            reader.close()
        finally:
            child.close()

    def test_a_killed_reader_is_told_and_its_blocks_come_back(self, shm_dir: Path) -> None:
        writer = LineWriter(shm_dir, "there")
        child = Child(KEEP, str(shm_dir), "20")
        try:
            for _ in range(20):
                assert writer.send([b"x" * LARGE], 30.0)
            child.expect("full")
            child.kill()
            while writer.send([b"x" * 1000], 0.01):
                pass
            assert writer.block_bytes == 20 * size_class(LARGE)
            writer.close(discard=True)
            assert writer.block_bytes == 0 and list(shm_dir.iterdir()) == []
        finally:
            child.close()

    def test_a_reader_killed_in_its_sleep_harms_no_writer(self, shm_dir: Path) -> None:
        writer = LineWriter(shm_dir, "there")
        child = Child(KEEP, str(shm_dir), "1000")
        try:
            child.kill()
            assert writer.send([b"x"], 0.01)
            writer.close(discard=True)
        finally:
            child.close()


def poke(pair: Pair, kind: int, nbytes: int, payload: bytes = b"", head: int = 0) -> None:
    """Writes a record as a writer gone mad would."""
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
            (SKIP, 0, b"", 16, "16 bytes wait"),
            (MESSAGE, -1, b"", 16, "-1 bytes"),
            (MESSAGE, 1 << 40, b"", 16, "bytes wait"),
            (MESSAGE, 64, b"", 32, "32 bytes wait"),
            (MESSAGE, 16, b"", RING_BYTES + 16, "bytes wait"),
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
        with pytest.raises(TransportError, match="cannot be joined"):
            pair.reader.receive(0.0)

    def test_a_beginning_without_an_end_is_dropped(self, pair: Pair) -> None:
        poke(pair, BEGIN, 16, words(1, 2))
        assert pair.reader.receive(0.0) is None

    def test_a_segment_that_is_no_line_is_refused(self, shm_dir: Path) -> None:
        (shm_dir / "line").write_bytes(b"\0" * 4096)
        with pytest.raises(Refused, match="4096 bytes"):
            LineReader(shm_dir, "line")
