"""The thread that polls a node, so that a member replies on the control plane whatever its other threads do.

Other threads submit tasks and sleep. The queue of tasks has no bound of its own: a thread that makes a control call
waits for it before the next. A task wakes the thread by a write to a file descriptor that the node polls with its
sockets, so no wake-up is lost.
"""

from __future__ import annotations

import os
import select
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from echelon.errors import EchelonError, TransportTimeout
from echelon.transport.channel import print_error
from echelon.transport.channel_callee import wait_for
from echelon.world.messages import PendingCall
from echelon.world.node import Node
from echelon.world.watch import MemberWatch

TICK_S = 0.5  # how often `on_tick` runs


class Ticket:
    """A pending control call; the node's thread wakes the thread that waits for it."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.pending: PendingCall | None = None
        self.value: Any = None
        self.error: BaseException | None = None

    def settle(self, pending: PendingCall) -> None:
        if not self.done.is_set():
            self.value, self.error = pending.value, pending.error
            self.done.set()

    def fail(self, error: BaseException) -> None:
        if not self.done.is_set():
            self.error = error
            self.done.set()


class NodeThread:
    """Polls `node` and checks `watch` in a thread, from `start` to `stop`."""

    def __init__(
        self, node: Node, watch: MemberWatch, on_tick: Callable[[], None], on_broken: Callable[[Exception], None]
    ) -> None:
        """`on_broken` is called in this thread with an error that ends the node; it must `fail` the other calls."""
        self.node = node
        self._watch, self._on_tick, self._on_broken = watch, on_tick, on_broken
        self._tasks: deque[Callable[[], None]] = deque()
        self._tickets: set[Ticket] = set()
        self._make_error: Callable[[], BaseException] | None = None  # after `fail`: makes the error of every call
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()  # held to write to the bell, and to close it
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="echelon-node", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self.node.thread = self._thread.ident or 0

    def do(self, task: Callable[[], None]) -> None:
        """Runs `task` in this thread, in the order of submission; after `stop` the task is dropped."""
        self._tasks.append(task)
        with self._lock:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def call(self, to: str, function: str, *args: Any, timeout_s: float) -> Any:
        """Calls `function` of the node of `to` and returns its result; from any other thread."""
        assert threading.current_thread() is not self._thread, f"{function}() would wait for itself"
        ticket = Ticket()

        def begin() -> None:
            if self._make_error is not None:
                ticket.fail(self._make_error())
                return
            self._tickets.add(ticket)
            try:
                ticket.pending = self.node.begin(to, function, args, ticket.settle)
            except EchelonError as error:
                ticket.fail(error)

        def end() -> None:
            self._tickets.discard(ticket)
            if ticket.pending is not None:
                self.node.abandon(ticket.pending)

        self.do(begin)
        try:
            if not wait_for(ticket.done, timeout_s):
                raise TransportTimeout(
                    f"{to!r} did not answer {function}() of {self.node.name!r} within {timeout_s:g} s. Is it "
                    "suspended? If it is slow, raise timeout_s."
                )
        finally:
            self.do(end)
        if ticket.error is not None:
            raise ticket.error
        return ticket.value

    def post(self, to: str, function: str, *args: Any) -> None:
        """Calls `function` of the node of `to` without a reply, from any thread."""
        self.do(lambda: self.node.post(to, function, *args))

    def fail(self, make_error: Callable[[], BaseException]) -> None:
        """Ends pending and later control calls with an error; called in this thread."""
        self._make_error = make_error
        for ticket in self._tickets:
            ticket.fail(make_error())

    def stop(self) -> None:
        """Ends the thread, which closes the node; tasks submitted before run first."""
        self._stopping = True
        self.do(lambda: None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self._run_failed(error)
        self.node.close()
        self._watch.close()
        with self._lock:
            os.close(self._bell)
            self._bell = -1

    def _work(self) -> None:
        looked_at = 0.0
        while not self._stopping or self._tasks:
            self._do_tasks()
            timeout_s = 0.0 if self._tasks or self._stopping else TICK_S
            self.node.poll(timeout_s, [self._bell, *self._watch.descriptors])
            self._clear()
            self._watch.look()
            if (now := time.monotonic()) - looked_at >= TICK_S:
                looked_at = now
                self._do(self._on_tick)

    def _run_failed(self, error: Exception) -> None:
        """Handles an unexpected error, which is a bug: closes the node, then runs tasks, so that calls end with it."""
        print_error(f"{self.node.name!r} leaves its world: {''.join(traceback.format_exception(error))}")
        for end in (lambda: self._on_broken(error), self.node.close):
            self._try(end)
        while not self._stopping or self._tasks:
            while self._tasks:
                self._try(self._tasks.popleft())
            select.select([self._bell], [], [], TICK_S)
            self._clear()

    def _try(self, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception as error:
            print_error(f"{self.node.name!r}: {type(error).__name__}: {error}")

    def _do_tasks(self) -> None:
        for _ in range(len(self._tasks)):
            self._do(self._tasks.popleft())

    def _do(self, task: Callable[[], None]) -> None:
        try:
            task()
        except EchelonError as error:
            print_error(f"{self.node.name!r}: {error}")

    def _clear(self) -> None:
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            return
