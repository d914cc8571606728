"""Lines deliver every message whole, in order and once, lose no wake-up, and survive the death of either process."""

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

from echelon.transport import blocks, ring
from echelon.transport.blocks import BlockPool, size_class
from echelon.transport.lines import LineReader, LineWriter
from echelon.transport.ring import PIECE_BYTES, RING_BYTES
from line_pair import Pair, frames_of

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


@pytest.fixture
def pair(shm_dir: Path) -> Iterator[Pair]:
    pair = Pair(shm_dir)
    yield pair
    pair.close()
    assert list(shm_dir.iterdir()) == []


class Child:
    """A process at the other end of a line."""

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


sizes = st.lists(
    st.integers(0, 64) | st.integers(0, PIECE_BYTES) | st.integers(PIECE_BYTES - 100, 3 * PIECE_BYTES), max_size=6
)


class TestInOneProcess:
    @given(messages=st.lists(sizes, min_size=1, max_size=12), chance=st.randoms(use_true_random=False))
    @settings(deadline=None, max_examples=80)
    def test_every_message_arrives_once_in_order(self, messages: list[list[int]], chance: random.Random) -> None:
        """Any sizes, and any interleaving of sends and receives."""
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
        """Wakes at any moment of a wait, including just before the sleep."""
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
        assert reader.receive(0.01) is None  # only the first receive returns immediately; later ones wait

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
        """Also if the writer dies while it copies a large message."""
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
