"""The switchboard: the channels of this process to and from other members.

A channel is opened at the first call and ends with the peer. The caller requests it from the callee over the control
plane. Two processes of one host, and a process that calls itself, use two lines in shared memory, each created by its
writer. For each caller on another host, the callee listens at a separate address.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from echelon.errors import PeerLost, TransportError, TransportTimeout
from echelon.transport.channel import Refusal
from echelon.transport.channel_callee import Callee
from echelon.transport.channel_calls import Calls, Future
from echelon.transport.channel_ends import CallReader, CallWriter, SocketEnd
from echelon.transport.codec import Limits
from echelon.transport.lines import LineReader, LineWriter
from echelon.world.address import member_address
from echelon.world.directory import Member
from echelon.world.functions import Runner, Scope
from echelon.world.node import Node
from echelon.world.node_thread import NodeThread
from echelon.world.watch import MemberInfo

FREED_AT_ONCE = 10_000  # numbers in one message, whose header is limited

Failure = Callable[[str], BaseException]  # makes the error of a call from a description of it


class MemberCalls(Calls):
    """Calls to another member; also frees the results that it keeps and that this process no longer needs."""

    def __init__(self, peer: str, writer: CallWriter, reader: CallReader, limits: Limits) -> None:
        super().__init__(peer, writer, reader, limits)
        self.freed: deque[int] = deque()

    def begin(self, what: str, request: tuple[Any, ...], timeout_s: float) -> Future:
        """Starts a call, as in `Calls`, after the pending frees."""
        if self.freed:
            self.free()
        return super().begin(what, request, timeout_s)

    def free(self) -> None:
        """Sends the peer the numbers of the values that it need not keep; from any thread."""
        numbers: list[int] = []
        with contextlib.suppress(IndexError):  # none left, or another thread has taken them
            while len(numbers) < FREED_AT_ONCE:
                numbers.append(self.freed.popleft())
        if numbers and not self.post(("", "free", "", (numbers,), {}, False)):
            self.freed.extend(numbers)


class Switchboard:
    """The channels of this process, as caller and as callee.

    Any thread may use it; the node's thread runs the handlers of the node's messages.
    """

    def __init__(self, thread: NodeThread, info: MemberInfo, scope: Scope, limits: Limits) -> None:
        self._thread, self._node, self._info = thread, thread.node, info
        self._scope, self._limits = scope, limits
        self._lock = threading.Lock()
        self._opening: dict[str, threading.Lock] = {}
        self._calls: dict[str, MemberCalls] = {}
        self._served: dict[str, Callee] = {}  # by the caller's incarnation
        self._failure: Failure | None = None
        self._closed = False
        self._node.serve("open_line", self._on_open_line)
        self._node.serve("open_tcp", self._on_open_tcp)
        self._node.serve("drain", self._on_drain)

    def calls_to(self, name: str, timeout_s: float) -> MemberCalls:
        """Returns the channel to `name`, opening it the first time. Raises PeerLost if there is no such member."""
        if (calls := self._calls.get(name)) is not None:
            return calls
        with self._lock:
            opening = self._opening.setdefault(name, threading.Lock())
        deadline = time.monotonic() + timeout_s
        if not opening.acquire(timeout=timeout_s):  # another thread is opening the channel
            raise TransportTimeout(
                f"{name!r} opened no channel for {self._node.name!r} within {timeout_s:g} s. Is it suspended, or busy?"
            )
        try:
            if (calls := self._calls.get(name)) is not None:
                return calls
            return self._connect(name, max(0.0, deadline - time.monotonic()))
        finally:
            opening.release()

    def _connect(self, name: str, timeout_s: float) -> MemberCalls:
        if self._failure is not None:
            raise self._failure(f"a call to {name!r}")
        member = self._node.member(name)
        if member is None:
            raise _lost(self._node, name, self._node.why_gone(name) or "it never joined")
        opening = self._open_line if MemberInfo.of(member).is_near else self._open_tcp
        try:
            calls = self._calls[name] = opening(member, timeout_s)
        except PeerLost as error:
            if self._failure is not None:  # the member left because the world ended
                raise self._failure(f"a call to {name!r}") from error
            raise
        if self._node.member(name) != member:  # it left meanwhile, before `lose` could see this channel
            calls.fail(lambda what: _lost(self._node, name, self._node.why_gone(name), what))
        if (failure := self._failure) is not None:
            calls.fail(failure)
        return calls

    def _open_line(self, member: Member, timeout_s: float) -> MemberCalls:
        name = f"{member.name}.{secrets.token_hex(4)}"
        writer = LineWriter(Path(self._info.folder), name)
        try:
            folder, answers = self._thread.call(
                member.name,
                "open_line",
                self._node.name,
                self._node.incarnation,
                (self._info.to_wire(), name),
                timeout_s=timeout_s,
            )
            reader = LineReader(Path(folder), answers)
        except BaseException as error:
            writer.close(discard=True)
            if type(error) is TransportError:  # the member's folder is gone
                raise PeerLost(f"{member.name!r} left while {self._node.name!r} opened a channel to it.") from error
            raise
        return MemberCalls(member.name, writer, reader, self._limits)

    def _on_open_line(self, caller: str, incarnation: str, line: tuple[Any, ...]) -> tuple[str, str]:
        (info, name) = line
        info = MemberInfo.from_wire(info)
        if not info.is_near or "/" in name:
            raise Refusal(f"{caller!r} is not on this host, or its line {name[:80]!r} is not in its own folder.")
        reader = LineReader(Path(info.folder), name)
        answers = f"{caller}.{secrets.token_hex(4)}.answers"
        writer = LineWriter(Path(self._info.folder), answers)
        self._serve(caller, incarnation, reader, writer)
        return (self._info.folder, answers)

    def _open_tcp(self, member: Member, timeout_s: float) -> MemberCalls:
        own = self._node.name, self._node.incarnation
        address, name = self._thread.call(member.name, "open_tcp", *own, timeout_s=timeout_s)
        end = self._node.open_end(SocketEnd.connect, address, name)
        return MemberCalls(member.name, end.writer, end, self._limits)

    def _on_open_tcp(self, caller: str, incarnation: str) -> tuple[str, str]:
        name = secrets.token_hex(8)  # authorizes this caller only
        end = self._node.open_end(SocketEnd.listen, member_address(self._node.address, self._node.name, name), name)
        self._serve(caller, incarnation, end, end.writer)
        return (end.address, name)

    def _serve(self, caller: str, incarnation: str, reader: CallReader, writer: CallWriter) -> None:
        def ask_room() -> None:
            self._thread.post(caller, "drain", self._node.name)

        callee = Callee(caller, reader, writer, Runner(self._scope), self._limits, ask_room)
        try:
            if self._closed:
                raise Refusal(f"{self._node.name!r} is about to leave, and accepts no more callers.")
            callee.start()  # RuntimeError: no more threads can be started
        except BaseException:
            callee.close()
            raise
        if former := self._served.get(incarnation):  # the caller has abandoned it
            former.close()
        self._served[incarnation] = callee

    def _on_drain(self, peer: str) -> None:
        if calls := self._calls.get(peer):
            calls.drain()

    def tick(self) -> None:
        """Sends the pending frees to all peers; called in the node's thread."""
        for calls in list(self._calls.values()):
            if calls.freed:
                calls.free()

    def free(self, owner: str, number: int) -> None:
        """Marks a kept value as no longer needed; `tick` or the next call sends it, as a destructor may call this."""
        if calls := self._calls.get(owner):
            calls.freed.append(number)

    def lose(self, member: Member, why: str) -> None:
        """Fails the calls to `member`, which left, and stops serving it; called in the node's thread."""
        if calls := self._calls.pop(member.name, None):
            calls.fail(lambda what: _lost(self._node, member.name, why, what))
        if callee := self._served.pop(member.incarnation, None):
            callee.close()

    def fail(self, failure: Failure) -> None:
        """Fails all calls of this process, pending and later; calls to this process still run."""
        self._failure = failure
        for calls in list(self._calls.values()):
            calls.fail(failure)

    def close(self) -> None:
        """Closes all channels and refuses new callers; call it before the node closes."""
        self._closed = True
        for calls in list(self._calls.values()):
            calls.close()
        for callee in list(self._served.values()):
            callee.close()


def _lost(node: Node, name: str, why: str, what: str = "") -> PeerLost:
    if not what:
        return PeerLost(f"{node.name!r} cannot call {name!r}, which is gone: {why}.")
    return PeerLost(f"{name!r} left before it answered {what} of {node.name!r}: {why}.")
