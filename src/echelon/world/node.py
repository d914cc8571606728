"""The control plane: named processes that find, call and watch each other.

The host maintains the directory of members. It sends the directory to each process that joins, and the changes to all
members. Calls and posts go directly from member to member.

A Node belongs to one thread of one process and works only inside `call`, `post` and `poll`: it has no thread of its
own, and a member that does not poll does not reply. A member that waits in `call` serves requests meanwhile, so two
members that call each other do not deadlock; a handler may therefore start while another one of the same member waits.
Create the Node after a fork, in the process that uses it; using it in a forked copy raises ConfigError.

Bounds: see `Endpoint`. A full queue never blocks: a post is dropped and counted, a call waits for room until its
timeout. A Node does not detect the death of a peer: the process that watches the peer calls `forget` on the host, and
then every wait for the peer raises PeerLost. If the host dies, the world is over: calls to the host time out, or raise
PeerLost after `lose_host`.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from echelon.errors import ConfigError, PeerLost, Refused, RpcException, TransportTimeout
from echelon.transport.channel import Refusal
from echelon.transport.codec import DEFAULT_LIMITS, Limits
from echelon.world.address import NAME, check_name, is_sibling, member_address, remove
from echelon.world.directory import Directory, Member
from echelon.world.endpoint import Arrival, Endpoint
from echelon.world.messages import ControlRequest, Messenger, PendingCall

__all__ = ["Node", "RpcException"]

NOTIFY_S = 0.02  # joins within this time are sent to the others in one message

_local_nodes: weakref.WeakValueDictionary[str, Node] = weakref.WeakValueDictionary()  # address -> Node of this process


class Node(Messenger):
    """A named member of the world: it finds the others by name, calls them and is called."""

    def __init__(self, me: Member, host_address: str, limits: Limits) -> None:
        """Binds at the address of `me`; use `Node.host` or `Node.join` instead."""
        endpoint = Endpoint(me.address, limits.total_bytes)
        super().__init__(dataclasses.replace(me, address=endpoint.address), endpoint, limits)
        self.admit: Callable[[Member], str] = lambda member: ""  # host: why a process may not join, or ""
        self.on_lost: Callable[[Member, str], None] = lambda member, why: None  # called for every member that leaves
        self.farewell = "the host closed the world"  # host: the reason sent to the others when it closes
        self.dropped = 0  # posts that found no peer or no room
        self.watched = endpoint.watched  # the sockets, for callers that poll them together with others
        self._host_address = host_address or self.address
        self._host: Member | None = None
        self._directory = Directory()
        self._held: list[Arrival] = []  # requests received while joining, before the caller could `serve` anything
        self._outdated: set[str] = set()  # host: members whose queue was full when a change was sent
        self._notify_at = 0.0  # host: when the joins since the last message are sent to the others
        self.thread = threading.get_ident()  # the thread that polls it
        _local_nodes[self.address] = self

    @classmethod
    def host(
        cls,
        address: str,
        name: str = "coordinator",
        *,
        limits: Limits = DEFAULT_LIMITS,
        info: tuple[Any, ...] = (),
    ) -> Node:
        """Opens a world at `address` and maintains its directory; others can join only while the host polls."""
        check_name(name)
        world = cls(Member(name, address, os.getpid(), secrets.token_hex(8), info), "", limits)
        world._host = world._me
        world._enter(world._me)
        return world

    @classmethod
    def join(
        cls,
        address: str,
        name: str,
        *,
        timeout_s: float = 10.0,
        limits: Limits = DEFAULT_LIMITS,
        info: tuple[Any, ...] = (),
        on_silence: Callable[[TransportTimeout], float] | None = None,
    ) -> Node:
        """Joins the world hosted at `address`; replaces a previous member called `name`.

        If the host has not replied after `timeout_s`, the request is sent again, with the timeout that `on_silence`
        returns; `on_silence` may raise to give up. Joining is idempotent, and a new host may have replaced the first.

        Others may call this member immediately. Requests are handled from the first `poll` or `call` on, so call
        `serve` before.
        """
        check_name(name)
        incarnation = secrets.token_hex(8)
        own = member_address(address, name, incarnation)
        world = cls(Member(name, own, os.getpid(), incarnation, info), address, limits)
        host = Member(f"the host at {address}", address, 0, "")  # its real name is in the reply
        world._directory.members[host.name] = host
        try:
            match world._request_join(host, timeout_s, on_silence):
                case (str(host_name), directory):
                    world._adopt(Directory.from_wire(directory))
                    world._host = world._directory.members.get(host_name)
                case other:
                    raise Refused(f"the host at {address} answered a join with a {type(other).__name__}.")
        except BaseException:
            world._endpoint.send(address, world._frames(0, "_leave", ()))  # the host may yet read our `_join`
            world.close()
            raise
        return world

    def _request_join(
        self, host: Member, timeout_s: float, on_silence: Callable[[TransportTimeout], float] | None
    ) -> Any:
        while True:
            try:
                return self._ask(host, "_join", (self.address, self._me.pid, self._me.info), timeout_s)
            except TransportTimeout as error:
                if on_silence is None:
                    raise
                timeout_s = on_silence(error)

    @property
    def _is_host(self) -> bool:
        return self._host is self._me

    @property
    def members(self) -> list[str]:
        """The names of all members, the host and this one among them."""
        return sorted(self._directory.members)

    @property
    def host_address(self) -> str:
        """The address that others join."""
        return self._host_address

    @property
    def host_name(self) -> str:
        """The name of the member that maintains the directory."""
        return self._host.name if self._host else ""

    def member(self, name: str) -> Member | None:
        """Returns the member called `name`, or None."""
        return self._directory.members.get(name)

    def why_gone(self, name: str) -> str:
        """Returns why `name` left, or "" if it is a member or never was one."""
        return self._directory.gone.get(name, "")

    def call(self, to: str, function: str, *args: Any, timeout_s: float = 5.0) -> Any:
        """Calls `function` of member `to` and returns its result; waits for `to` to join if it never did.

        Raises RpcException with the remote traceback if the handler raised, Refused if `to` serves no such function,
        PeerLost if `to` has left or leaves meanwhile, TransportTimeout after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while (member := self._directory.members.get(to)) is None:
            if to in self._directory.gone:
                raise PeerLost(f"{self.name!r} cannot call {to!r}, which is gone: {self._directory.gone[to]}.")
            if time.monotonic() >= deadline:
                raise TransportTimeout(
                    f"{self.name!r} waited {timeout_s} s to call {function}(), but no {to!r} joined. "
                    f"The members are {', '.join(self.members)}."
                )
            self._wait(deadline, self._host_address)
        return self._ask(member, function, args, timeout_s)

    def post(self, to: str, function: str, *args: Any) -> None:
        """Calls `function` of `to` without a reply; the posts and calls of one sender arrive in order.

        Never blocks: if there is no such member or its queue is full, the post is dropped and counted.
        """
        frames = self._frames(0, function, args)
        member = self._directory.members.get(to)
        if member is None or not self._endpoint.send(member.address, frames):
            self.dropped += 1

    def begin(
        self, to: str, function: str, args: tuple[Any, ...], on_settled: Callable[[PendingCall], None]
    ) -> PendingCall:
        """Calls `function` of `to` without waiting; a later `poll` calls `on_settled`. Raises PeerLost if `to` left."""
        member = self._directory.members.get(to)
        if member is None:
            why = self.why_gone(to) or "it never joined"
            raise PeerLost(f"{self.name!r} cannot call {to!r}, which is gone: {why}.")
        return self._begin(member, function, args, on_settled)

    def poll(self, timeout_s: float = 0.0, fds: Sequence[int] = ()) -> bool:
        """Serves the received messages, after waiting up to `timeout_s` for one or for one of `fds` to be readable.

        Returns whether a message was received.
        """
        came, held = False, []
        if self._host is not None and self._held:
            held, self._held, timeout_s = self._held, [], 0.0
        if self._directory.changes or self._outdated:
            timeout_s = min(timeout_s, max(0.0, self._notify_at - time.monotonic()))
        for arrival in itertools.chain(held, self._endpoint.arrivals(timeout_s, fds)):
            came = True
            self._num_arrivals += 1
            if arrival.address:
                self._take_answer(arrival)
            elif self._host is None:
                self._held.append(arrival)
            else:
                self._take_request(arrival)
        if self._directory.changes and time.monotonic() >= self._notify_at and not self._endpoint.closed:
            self._notify_everyone()
        if self._outdated and time.monotonic() >= self._notify_at and not self._endpoint.closed:
            self._notify_at = time.monotonic() + NOTIFY_S
            self._outdated = {name for name in self._outdated if not self._send_directory(name)}
        return came

    def forget(self, name: str, reason: str) -> None:
        """Removes a member (host only): pending and later calls to it raise PeerLost with `reason`."""
        self._require_host("forget")
        if name == self.name:
            raise ConfigError(f"the host {name!r} cannot forget itself. Close it.")
        self._remove_member(name, reason)

    def lose_host(self, why: str) -> None:
        """Removes the host from the local directory: this member has found out by itself that the host is dead."""
        if self._host is not None and not self._is_host and self._directory.remove(self._host.name, why):
            self._directory.changes.clear()  # only the host sends changes
            self._forget(self._host)
            remove(self._host.address)

    def close(self) -> None:
        """Leaves the world, after waiting up to 200 ms to send the last posts; closing the host ends the world."""
        if self._endpoint.closed or os.getpid() != self._me.pid:
            return
        others = list(self._directory.members.values()) if self._is_host else []
        if self._is_host:
            self._directory.remove(self.name, self.farewell)
            self._notify_everyone()
        elif self._host is not None:
            self.post(self._host.name, "_leave")
        self._endpoint.close()
        for member in others:  # only now: the link to one that has just joined may still have to be connected
            remove(member.address)
        _local_nodes.pop(self.address, None)

    def __enter__(self) -> Node:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # Requests and replies.

    def _ask(self, member: Member, function: str, args: tuple[Any, ...], timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        number = next(self._numbers)
        frames = self._frames(number, function, args)
        pending = self._pending[number] = PendingCall(member, function)
        sent = False
        try:
            while not pending.settled:
                if self._directory.members.get(member.name) != member:
                    why = self._directory.why_gone(member)
                    raise PeerLost(f"{member.name!r} left before it answered {function}() of {self.name!r}: {why}.")
                if (now := time.monotonic()) >= deadline:
                    raise TransportTimeout(
                        f"{member.name!r} (process {member.pid}) did not answer {function}() of {self.name!r} within "
                        f"{timeout_s} s. Is it dead, suspended, or busy without polling? If it is slow, raise "
                        "timeout_s."
                    )
                sent = sent or self._endpoint.send(member.address, frames)
                self._wait(deadline if sent else min(deadline, now + 0.01), member.address)
        finally:
            del self._pending[number]
        if pending.error is not None:
            raise pending.error
        return pending.value

    def _wait(self, deadline: float, address: str) -> None:
        """Serves until a message was received or until `deadline`; first polls the peers that share this thread."""
        near = [_local_nodes.get(one) for one in dict.fromkeys((address, self._host_address))]
        mine = (self.thread, self._me.pid)  # a forked process inherits nodes that it must not poll
        local = [world for world in near if world and world is not self and (world.thread, world._me.pid) == mine]
        for world in local:
            world.poll()
        self.poll(0.001 if local else max(0.0, deadline - time.monotonic()))

    # Membership: the world's own functions.

    def _why_refused(self, request: ControlRequest) -> str:
        """Returns why the sender's requests are refused, or "": it is a retired incarnation, or it never joined.

        Only the host can check that the sender joined: the directory of other members may lack a process that has just
        joined.
        """
        if why := self._directory.retired.get(request.incarnation):
            return f"this incarnation of {request.sender[:80]!r} was declared gone: {why}."
        known = self._directory.members.get(request.sender)
        if self._is_host and request.function != "_join" and (not known or known.incarnation != request.incarnation):
            return f"{request.sender[:80]!r} has not joined this world."
        return ""

    def _run_control(self, request: ControlRequest) -> Any:
        match request.function, request.args:
            case "_join", (str(address), int(pid), tuple(info)) if self._is_host:
                return self._on_join(Member(request.sender, address, pid, request.incarnation, info))
            case "_leave", () if self._is_host:
                return self._remove_member(request.sender, "it left")
            case "_echo", () if request.incarnation == self.incarnation:
                return None
            case "_directory", (directory,) if self._host and request.incarnation == self._host.incarnation:
                return self._adopt(Directory.from_wire(directory))
            case "_changed", (int(version), directory) if self._host and request.incarnation == self._host.incarnation:
                return self._on_changed(version, Directory.from_wire(directory))
            case "_missed", () if self._is_host:
                self._outdated.add(request.sender)
                return None
        raise Refusal(f"{self.name!r} does not accept {request.function[:80]!r} from {request.sender[:80]!r}.")

    def _on_join(self, member: Member) -> tuple[Any, ...]:
        if member.name == self.name or not NAME.fullmatch(member.name) or not NAME.fullmatch(member.incarnation):
            raise Refusal(f"no process can join as {member.name[:80]!r}: the host has that name, or it is invalid.")
        if not is_sibling(self.address, member.address):
            raise Refusal(f"the address {member.address[:200]!r} of {member.name!r} does not belong to {self.address}.")
        if not self._directory.holds(member):  # else it sent the request again, as our reply was late
            if why := self.admit(member):
                raise Refusal(why)
            is_known = member.name in self._directory.members or member.name in self._directory.gone
            self._enter(member)
            if is_known or time.monotonic() >= self._notify_at:  # else `poll` sends all joins until then together
                self._notify_everyone()
        return (self.name, self._directory.to_wire())

    def _enter(self, member: Member) -> None:
        if old := self._directory.add(member):
            self._lose(old)

    def _remove_member(self, name: str, reason: str) -> None:
        if old := self._directory.remove(name, reason):
            self._notify_everyone()  # before pending calls fail: their callers may ask next for the members
            self._lose(old)

    def _lose(self, member: Member) -> None:
        self._forget(member)
        remove(member.address)  # a killed process leaves its socket file behind

    def _adopt(self, newer: Directory) -> None:
        for member in self._directory.adopt(newer):
            self._forget(member)

    def _forget(self, member: Member) -> None:
        self._endpoint.drop(member.address)
        why = self._directory.why_gone(member)
        self._lose_pending(member, why)
        self.on_lost(member, why)

    def _on_changed(self, version: int, changed: Directory) -> None:
        left = self._directory.update(version, changed)
        if left is None and self._host is not None:
            self.post(self._host.name, "_missed")
        for member in left or ():
            self._forget(member)

    def _notify_everyone(self) -> None:
        """Sends the changes of the directory to all members.

        Members that joined meanwhile have some of the changes already. A member that missed a change replies `_missed`.
        """
        self._notify_at = time.monotonic() + NOTIFY_S
        version, changed = self._directory.take_changes()
        frames = self._frames(0, "_changed", (version, changed.to_wire()))
        for member in self._directory.members.values():
            if member != self._me and not self._endpoint.send(member.address, frames):
                self._outdated.add(member.name)

    def _send_directory(self, name: str) -> bool:
        frames = self._frames(0, "_directory", (self._directory.to_wire(),))
        member = self._directory.members.get(name)
        return member is None or self._endpoint.send(member.address, frames)

    def _require_host(self, function: str) -> None:
        if not self._is_host:
            raise ConfigError(f"only the host can call {function}(), and {self.name!r} is not the host.")
