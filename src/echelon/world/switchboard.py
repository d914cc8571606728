"""The switchboard: who talks to whom by which line; it makes lines at the first call and ends them with their peer.

The caller makes the line of its calls and asks the callee, by the control plane, to open it; the callee makes the line
of the answers. Processes of one host have lines through shared memory, others relays; so has a process with itself.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from echelon.errors import PeerLost, TransportError, TransportTimeout
from echelon.transport.codec import Limits
from echelon.transport.lines import LineReader, LineWriter
from echelon.world.calls import Calls
from echelon.world.directory import Member
from echelon.world.functions import Scope
from echelon.world.messages import RELAY_BYTES, Refusal
from echelon.world.node import Node
from echelon.world.node_thread import NodeThread
from echelon.world.relay import Loop, Reader, RelayReader, RelayWriter, Writer
from echelon.world.serving import Serving
from echelon.world.watch import Card

Failure = Callable[[str], BaseException]  # makes the error of a call, which it is told in words


class Switchboard:
    """Every line of one process; calls may come from any thread, what comes from the node does so in its thread."""

    def __init__(self, thread: NodeThread, card: Card, scope: Scope, limits: Limits) -> None:
        self._thread, self._node, self._card = thread, thread.node, card
        self._scope, self._limits = scope, limits
        self._lock = threading.Lock()
        self._opening: dict[str, threading.Lock] = {}
        self._calls: dict[str, Calls] = {}
        self._servings: dict[str, Serving] = {}  # by the caller's incarnation
        self._writers: dict[bytes, RelayWriter] = {}
        self._relays: dict[str, list[bytes]] = {}  # by the peer's incarnation
        self._failure: Failure | None = None
        self._node.serve("open_line", self._on_open_line)
        self._node.serve("open_relay", self._on_open_relay)
        self._node.serve("drain", self._on_drain)
        self._node.serve("credit", self._on_credit)

    def calls_to(self, name: str, timeout_s: float) -> Calls:
        """The calls to `name`; makes the line the first time. Raises PeerLost where there is no such member."""
        if (calls := self._calls.get(name)) is not None:
            return calls
        with self._lock:
            opening = self._opening.setdefault(name, threading.Lock())
        deadline = time.monotonic() + timeout_s
        if not opening.acquire(timeout=timeout_s):  # another thread makes it
            raise TransportTimeout(
                f"{name!r} opened no line for {self._node.name!r} within {timeout_s:g} s. Is it stopped, or busy?"
            )
        try:
            if (calls := self._calls.get(name)) is not None:
                return calls
            return self._connect(name, max(0.0, deadline - time.monotonic()))
        finally:
            opening.release()

    def _connect(self, name: str, timeout_s: float) -> Calls:
        if self._failure is not None:
            raise self._failure(f"a call to {name!r}")
        member = self._node.member(name)
        if member is None:
            raise _lost(self._node, name, self._node.why_gone(name) or "it never came")
        calls = self._calls[name] = self._open(member, timeout_s)
        if self._node.member(name) != member:  # it left meanwhile, and nobody would tell these calls
            calls.fail(lambda what: _lost(self._node, name, self._node.why_gone(name), what))
        if (failure := self._failure) is not None:
            calls.fail(failure)
        return calls

    def _open(self, member: Member, timeout_s: float) -> Calls:
        if member.name == self._node.name:
            return self._open_here()
        if Card.of(member).is_near:
            return self._open_line(member, timeout_s)
        return self._open_relay(member, timeout_s)

    def _open_here(self) -> Calls:
        requests, answers = Loop(), Loop()
        calls = Calls(self._node.name, requests.writer, answers.reader, self._limits)
        self._serve(self._node.name, "", requests.reader, answers.writer, calls.drain)
        return calls

    def _open_line(self, member: Member, timeout_s: float) -> Calls:
        name = f"{member.name}.{secrets.token_hex(4)}"
        writer = LineWriter(Path(self._card.folder), name)
        try:
            folder, answers = self._thread.call(
                member.name,
                "open_line",
                self._node.name,
                self._node.incarnation,
                (self._card.to_wire(), name),
                timeout_s=timeout_s,
            )
            reader = LineReader(Path(folder), answers)
        except BaseException as error:
            writer.close(discard=True)
            if type(error) is TransportError:  # its folder is gone
                raise PeerLost(f"{member.name!r} left while {self._node.name!r} began to call it.") from error
            raise
        return Calls(member.name, writer, reader, self._limits)

    def _on_open_line(self, caller: str, incarnation: str, line: tuple[Any, ...]) -> tuple[str, str]:
        (card, name) = line
        card = Card.from_wire(card)
        if not card.is_near or "/" in name:
            raise Refusal(f"{caller!r} is not on this host, or names no line of its own.")
        reader = LineReader(Path(card.folder), name)
        answers = f"{caller}.{secrets.token_hex(4)}.answers"
        writer = LineWriter(Path(self._card.folder), answers)
        self._serve(caller, incarnation, reader, writer, self._asks_room(caller))
        return (self._card.folder, answers)

    def _open_relay(self, member: Member, timeout_s: float) -> Calls:
        answers, reader = self._relay_reader(member.name, member.incarnation)
        own = (self._node.address, answers)
        relay = self._thread.call(
            member.name, "open_relay", self._node.name, self._node.incarnation, own, timeout_s=timeout_s
        )
        return Calls(member.name, self._relay_writer(member.incarnation, member.address, relay), reader, self._limits)

    def _on_open_relay(self, caller: str, incarnation: str, answers: tuple[Any, ...]) -> bytes:
        address, relay = answers
        own, reader = self._relay_reader(caller, incarnation)
        writer = self._relay_writer(incarnation, address, relay)
        self._serve(caller, incarnation, reader, writer, self._asks_room(caller))
        return own

    def _relay_reader(self, peer: str, incarnation: str) -> tuple[bytes, RelayReader]:
        relay = secrets.token_bytes(RELAY_BYTES)
        reader = RelayReader(lambda messages, nbytes: self._thread.post(peer, "credit", relay, messages, nbytes))
        self._node.relays[relay] = reader.deliver
        self._relays.setdefault(incarnation, []).append(relay)
        return relay, reader

    def _relay_writer(self, incarnation: str, address: str, relay: bytes) -> RelayWriter:
        writer = self._writers[relay] = RelayWriter(
            lambda frames: self._thread.do(lambda: self._send(address, relay, frames))
        )
        self._relays.setdefault(incarnation, []).append(relay)
        return writer

    def _serve(
        self, caller: str, incarnation: str, reader: Reader, writer: Writer, ask_room: Callable[[], None]
    ) -> None:
        serving = Serving(caller, reader, writer, self._scope, self._limits, ask_room)
        try:
            serving.start()
        except RuntimeError:  # the machine has no more threads for us
            serving.close()
            raise
        self._servings[incarnation] = serving

    def _asks_room(self, caller: str) -> Callable[[], None]:
        return lambda: self._thread.post(caller, "drain", self._node.name)

    def _send(self, address: str, relay: bytes, frames: list[bytes]) -> None:
        if not self._node.forward(address, relay, frames):  # cannot be: its window is smaller than the queue
            raise PeerLost(f"{address} takes nothing in, and a message to it is lost.")

    def _on_drain(self, peer: str) -> None:
        if calls := self._calls.get(peer):
            calls.drain()

    def _on_credit(self, relay: bytes, messages: int, num_bytes: int) -> None:
        if writer := self._writers.get(relay):
            writer.acknowledge(messages, num_bytes)

    def tick(self) -> None:
        """Tells peers what they need not keep; in the thread of the node."""
        for calls in list(self._calls.values()):
            if calls.freed:
                calls.free()

    def free(self, owner: str, number: int) -> None:
        """A kept value is no longer needed; only noted here, as this may run in the middle of anything."""
        if calls := self._calls.get(owner):
            calls.freed.append(number)

    def lose(self, member: Member, why: str) -> None:
        """`member` is gone; in the thread of the node."""
        if calls := self._calls.pop(member.name, None):
            calls.fail(lambda what: _lost(self._node, member.name, why, what))
        if serving := self._servings.pop(member.incarnation, None):
            serving.close()
        for relay in self._relays.pop(member.incarnation, ()):
            self._writers.pop(relay, None)
            self._node.relays.pop(relay, None)

    def fail(self, failure: Failure) -> None:
        """Nothing more is called from here; what is called here still runs."""
        self._failure = failure
        for calls in list(self._calls.values()):
            calls.fail(failure)

    def close(self) -> None:
        """Ends every line."""
        for calls in self._calls.values():
            calls.close()
        for serving in self._servings.values():
            serving.close()


def _lost(node: Node, name: str, why: str, what: str = "") -> PeerLost:
    if not what:
        return PeerLost(f"{node.name!r} cannot call {name!r}, which is gone: {why}.")
    return PeerLost(f"{name!r} left before it answered {what} of {node.name!r}: {why}.")
