"""Output that never blocks: a reader that stalls, is slow, leaves or comes back."""

from __future__ import annotations

import io
import os
import pty
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from echelon.runs.nonblocking import MAX_WAITING_BYTES, STALLED_S, nonblocking_output

READ_BYTES = 1 << 16


class Pipe:
    """A pipe whose reader is the test, with a text stream at its other end."""

    def __init__(self) -> None:
        self.reader, writer = os.pipe()
        self.stream: TextIO = os.fdopen(writer, "w")

    def fill(self) -> int:
        """Fills the pipe with empty lines; returns their number."""
        own, num = os.open(f"/proc/self/fd/{self.stream.fileno()}", os.O_WRONLY | os.O_NONBLOCK), 0
        try:
            while True:
                num += os.write(own, b"\n")
        except BlockingIOError:
            return num
        finally:
            os.close(own)

    def read(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            data += os.read(self.reader, READ_BYTES)
        return data

    def close(self) -> None:
        os.close(self.reader)
        self.stream.close()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


def test_everything_comes_in_order(pipe: Pipe) -> None:
    with nonblocking_output(pipe.stream) as output:
        for number in range(1000):
            print(number, "größe", file=output, flush=True)
    expected = "".join(f"{number} größe\n" for number in range(1000)).encode()
    assert pipe.read(len(expected)) == expected


def test_nobody_waits_for_a_stalled_pipe_and_what_is_dropped_is_counted(pipe: Pipe) -> None:
    num_empty, line, num_lines = pipe.fill(), "x" * 99, 4 * MAX_WAITING_BYTES // 100
    threads = set(threading.enumerate())
    with nonblocking_output(pipe.stream) as output:
        for number in range(num_lines):
            print(f"{number:9}{line[9:]}", file=output)
        text = pipe.read(num_empty + 1)[num_empty:]
        while not text.endswith(f"{num_lines - 1:9}{line[9:]}\n".encode()):
            text += os.read(pipe.reader, READ_BYTES)
    notices = [one for one in text.splitlines() if one.startswith(b"echelon: ")]  # several if the reader pauses
    num_dropped = sum(int(notice.split()[1]) for notice in notices)
    numbers = [int(one[:9]) for one in text.splitlines() if len(one) == len(line)]  # the last one before may be cut
    assert numbers == sorted(numbers) and len(numbers) + num_dropped == num_lines and notices
    assert set(threading.enumerate()) == threads


def stalled_terminal() -> TextIO:
    """A terminal after Ctrl-S; its other end stays open with the process."""
    _, terminal = pty.openpty()
    termios.tcflow(terminal, termios.TCOOFF)
    return os.fdopen(terminal, "w")


@pytest.mark.parametrize("what", ["pipe", "terminal"])
def test_the_end_comes_soon_though_the_reader_stalls(pipe: Pipe, what: str) -> None:
    pipe.fill()
    stream = pipe.stream if what == "pipe" else stalled_terminal()
    began = time.monotonic()
    with nonblocking_output(stream) as output:
        assert output.isatty() == (what == "terminal")
        print("lost" * 10_000, file=output, flush=True)
        assert time.monotonic() - began < STALLED_S
    assert time.monotonic() - began < 10 * STALLED_S


def test_a_writer_that_goes_on_does_not_hold_up_the_end(pipe: Pipe) -> None:
    """Its writes wake whoever waits for the reader, but are no sign of one."""
    pipe.fill()
    ended = threading.Event()

    def write(stream: TextIO) -> None:
        while not ended.wait(STALLED_S / 10):
            stream.write("more\n")

    with nonblocking_output(pipe.stream) as stream:
        print("something", file=stream)
        thread = threading.Thread(target=write, args=(stream,))
        thread.start()
        began = time.monotonic()
    took_s = time.monotonic() - began
    ended.set()
    pipe.read(1)
    thread.join()
    assert took_s < 10 * STALLED_S


def test_a_slow_reader_gets_everything(pipe: Pipe) -> None:
    num_empty, line, taken = pipe.fill(), "slow" * 5_000, list[bytes]()

    def read() -> None:
        while sum(map(len, taken)) < num_empty + len(line):
            time.sleep(STALLED_S / 100)
            taken.append(os.read(pipe.reader, 4096))

    reader = threading.Thread(target=read)
    reader.start()
    with nonblocking_output(pipe.stream) as output:
        print(line, end="", file=output)
    reader.join(60.0)
    assert b"".join(taken)[num_empty:] == line.encode()


def test_a_reader_that_left_is_noticed(pipe: Pipe) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), pipe.reader)
    with pytest.raises(BrokenPipeError), nonblocking_output(pipe.stream) as output:
        deadline = time.monotonic() + 60.0
        print("first", file=output)
        while time.monotonic() < deadline:
            output.flush()
    with pytest.raises(BrokenPipeError), nonblocking_output(pipe.stream) as output:
        print("last", file=output)


def test_a_full_disk_drops_text_and_raises_nothing() -> None:
    with open("/dev/full", "w") as full, nonblocking_output(full) as output:
        for _ in range(10):
            print("lost", file=output, flush=True)


def test_both_streams_of_a_program_keep_their_order_in_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "both"
    with path.open("a") as first, path.open("a") as second:
        monkeypatch.setattr(sys, "stdout", first)
        monkeypatch.setattr(sys, "stderr", second)
        with nonblocking_output() as output:
            with nonblocking_output() as again:
                assert again is output is sys.stdout is not first
            for number in range(50):
                print("out", number)
            print("error", file=sys.stderr)
        assert (sys.stdout, sys.stderr) == (first, second)
        print("afterwards", flush=True)
    assert path.read_text().splitlines() == [*(f"out {number}" for number in range(50)), "error", "afterwards"]


def test_a_fork_prints_too(pipe: Pipe) -> None:
    with nonblocking_output(pipe.stream) as output:
        if (pid := os.fork()) == 0:
            print("child", file=output, flush=True)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert pipe.read(6) == b"child\n"


def test_what_is_no_file_stays_as_it_is() -> None:
    memory = io.StringIO()
    with nonblocking_output(memory) as output:
        assert output is memory
