"""Output that never blocks the program: a thread per stream writes what is printed.

A reader may stall: a stopped pager, a terminal after Ctrl-S, a full pipe. The process that supervises a run must go on.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import threading
from collections.abc import Iterator
from typing import Any, TextIO, cast

MAX_WAITING_BYTES = 2**18
CHUNK_BYTES = 4096  # written at a time, so that a slow reader is not taken for a stalled one
STALLED_S = 1.0  # at the end, how long the reader may take for a chunk
ORDER_S = 0.2  # how long a stream waits for earlier text on stdout: both often go to one file


class NonBlockingStream:
    """A text stream in place of `stream`: `write` returns immediately, and a thread writes to the file.

    At most MAX_WAITING_BYTES wait for the reader; beyond that the oldest lines are dropped, and their number is written
    in their place. After the reader of a pipe has left, `write` and `flush` raise BrokenPipeError. Text that cannot be
    written for another reason (the terminal closed, the disk is full) is dropped. After `finish`, and in a fork of the
    process, there is no thread: text goes directly to `stream`.
    """

    def __init__(self, stream: TextIO, after: NonBlockingStream | None = None) -> None:
        stream.flush()
        self._stream, self._after, self._pid = stream, after, os.getpid()
        self._descriptor = os.dup(stream.fileno())  # the thread may outlive the stream
        self._changed = threading.Condition()
        self._waiting = bytearray()
        self._num_dropped = 0  # lines
        self._num_chunks = 0  # that the reader has taken
        self._is_writing = self._is_closed = False
        self.broken: BrokenPipeError | None = None  # the reader has left
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)  # it may be blocked at exit
        self._thread.start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)  # encoding, fileno, isatty, ...

    def write(self, text: str) -> int:
        if not self._has_thread:
            return self._stream.write(text)
        with self._changed:
            self._check()
            self._waiting += text.encode(self._stream.encoding, "replace")
            if (excess := len(self._waiting) - MAX_WAITING_BYTES) > 0:
                end = self._waiting.find(b"\n", excess) + 1 or len(self._waiting)
                self._num_dropped += self._waiting.count(b"\n", 0, end)
                del self._waiting[:end]
            self._changed.notify_all()
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        """Raises BrokenPipeError if the reader has left; does not wait for the reader."""
        if not self._has_thread:
            self._stream.flush()
            return
        with self._changed:
            self._check()

    def settle(self, timeout_s: float) -> bool:
        """Waits until everything is written; returns False if the reader does not take a chunk within `timeout_s`."""
        with self._changed:
            while not self._is_settled:
                before = self._num_chunks
                if not self._changed.wait_for(lambda: self._is_settled or self._num_chunks != before, timeout_s):  # noqa: B023
                    return False
        return True

    @property
    def _is_settled(self) -> bool:
        return bool(self.broken) or not (self._waiting or self._is_writing)

    def finish(self) -> None:
        """Waits until everything is written, but not for a stalled reader, and ends the thread."""
        is_settled = False
        try:
            is_settled = self.settle(STALLED_S)
        finally:
            with self._changed:
                self._is_closed = True
                self._waiting.clear()
                self._changed.notify_all()
        if is_settled:
            self._thread.join()

    @property
    def _has_thread(self) -> bool:
        return not self._is_closed and os.getpid() == self._pid

    def _check(self) -> None:
        if self.broken is not None:
            raise BrokenPipeError(*self.broken.args)

    def _run(self) -> None:
        is_line_start = True
        while (taken := self._take()) is not None:
            num_dropped, chunk = taken
            notice = f"echelon: {num_dropped} lines are missing here: they could not be written in time\n"
            if self._after is not None:
                self._after.settle(ORDER_S)
            try:
                if num_dropped:
                    self._put((notice if is_line_start else f"\n{notice}").encode())
                self._put(chunk)
                is_line_start = chunk.endswith(b"\n")
            except BrokenPipeError as error:
                with self._changed:
                    self.broken = error
            except OSError:
                with self._changed:
                    self._num_dropped += num_dropped + chunk.count(b"\n")
        os.close(self._descriptor)

    def _take(self) -> tuple[int, bytes] | None:
        """Waits for text; returns the number of lines dropped before it and its next chunk, or None at the end."""
        with self._changed:
            self._is_writing = False
            self._num_chunks += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._is_closed or self.broken)
            if self._is_closed or self.broken:
                return None
            self._is_writing = True
            chunk = bytes(self._waiting[:CHUNK_BYTES])
            del self._waiting[:CHUNK_BYTES]
            num_dropped, self._num_dropped = self._num_dropped, 0
            return num_dropped, chunk

    def _put(self, data: bytes) -> None:
        # Not through the stream: the interpreter could not flush it at exit while this thread is blocked in it.
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # another process made the file non-blocking
                poller = select.poll()
                poller.register(self._descriptor, select.POLLOUT)
                poller.poll()


@contextlib.contextmanager
def nonblocking_output(output: TextIO | None = None) -> Iterator[TextIO]:
    """Makes sys.stdout and sys.stderr non-blocking for a while; yields `output` (default: sys.stdout), made so too.

    Streams that are no files, such as those of a notebook, stay as they are. If there is no stdout (`>&-`), the yielded
    stream drops everything. At the end a stalled reader is not waited for; BrokenPipeError is raised if the reader of a
    pipe has left. Calls may be nested.
    """
    before, made = (sys.stdout, sys.stderr), list[NonBlockingStream]()

    def nonblocking(stream: TextIO) -> TextIO:
        if not _is_file(stream):
            return stream
        made.append(NonBlockingStream(stream, made[0] if made else None))
        return cast(TextIO, made[-1])

    sys.stdout, sys.stderr = map(nonblocking, before)
    try:
        if output is not None and output is not before[0]:
            yield nonblocking(output)
        elif before[0] is not None:
            yield sys.stdout
        else:
            with open(os.devnull, "w") as nowhere:
                yield nowhere
    finally:
        sys.stdout, sys.stderr = before
        for stream in made:
            stream.finish()
    if broken := next((stream.broken for stream in made if stream.broken), None):
        raise broken


def _is_file(stream: TextIO | None) -> bool:
    try:
        return isinstance(stream, io.TextIOWrapper) and stream.fileno() >= 0
    except (OSError, ValueError):  # in memory, or closed
        return False
