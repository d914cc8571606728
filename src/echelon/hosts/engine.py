"""The engine of several hosts: starts roles as processes of this host, the head, and of hosts whose agents have joined.

It listens for agents (`hosts.messages`, control) in the coordinator's own loop. It sends an agent the roles to start;
`exits` and `reports` return their exits and reports with those of local roles. Agents may join and leave at any time;
`Places` moves actors between hosts. Fencing: an agent that has received no reply for a lease ends its roles. The head
gives the host up GRACE_S later, and its actors start elsewhere once the carrier discards slots from that host.
"""

from __future__ import annotations

import dataclasses
import functools
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from echelon.control_groups import num_cores
from echelon.engines.inline import MessageLoop
from echelon.engines.local import LocalEngine
from echelon.engines.process import Exit, ProcessSpec, Store
from echelon.errors import Refused, escaped
from echelon.hosts.balance import balance, divide_among_learners
from echelon.hosts.bound import BoundRoles
from echelon.hosts.gauges import FarGauges
from echelon.hosts.joining import Look, Reporter, WaitReport, join_command, require_fit
from echelon.hosts.logs import append
from echelon.hosts.members import Host, unique_name
from echelon.hosts.messages import (
    COMMANDS,
    EVENTS,
    GAUGES,
    JOIN,
    MAX_BYTES,
    STORE,
    Assignment,
    Dismiss,
    Ended,
    Event,
    JoinRequest,
    Left,
    Logged,
    Release,
    Report,
    Signal,
    Start,
    Started,
    pack,
    unpack,
)
from echelon.hosts.ownership import Ownership
from echelon.hosts.places import Places, actor_of
from echelon.hosts.quorum import Quorum
from echelon.transport.channel import Message
from echelon.transport.channel_server import Server
from echelon.transport.secret import REMEDY
from echelon.transport.shared_memory import SlotRing

GRACE_S = 2.0  # beyond the lease, before a silent host is given up
AWAY_S = 1.0  # a longer gap between two looks at leases means that this process was suspended; the excess is ignored
BURST = 256
LOOK_S = 0.05
STALE_S = 2.0  # gauges of a host that was silent for longer are stale
GOODBYE_S = 5.0  # how long agents may take to learn that the run is over; on busy cores one may not run for 2 s
CARRIER = "carrier"


class HostsEngine(LocalEngine):
    """Starts roles on all hosts: actors where `Places` has them, inference servers on each, all others at the head."""

    def __init__(self, session: str, preload: Sequence[str], address: str, lease_s: float) -> None:
        super().__init__(session, preload)
        self._folder, self._lease_s = Path(session), lease_s
        self._control = Server("hosts", address, MAX_BYTES, report=self._report)
        self._head = Host(socket.gethostname(), num_cores(), is_head=True)
        self._hosts: dict[bytes, Host] = {}  # the others by connection, lost ones included
        self._assignment: Assignment | None = None
        self._quorum = Quorum(0)  # until `gather`
        self._places: Places | None = None  # from the start of the first role on
        self._bound = BoundRoles()
        self._has_bulk = True  # False: every host has a learner, so no trajectory goes to the head
        self._changes: list[str] = []  # hosts that came and went since the actors were divided
        self._waiting: dict[str, ProcessSpec] = {}  # actors to be started when they may
        self._far_exits: list[Exit] = []
        self._reports: list[tuple[str, str]] = []
        self._gauges = FarGauges(self._folder)
        self._has_reported_handshake = False
        self._over = ""
        self._looked_at = time.monotonic()
        self._control.serve(JOIN, self._on_join)
        self._control.serve(COMMANDS, self._on_asked)
        self._control.serve(EVENTS, self._on_events)
        self._control.serve(GAUGES, self._on_gauges)
        self._control.serve(STORE, self._on_store)

    @property
    def address(self) -> str:
        """The address that agents join."""
        return self._control.address

    @property
    def _living(self) -> list[Host]:
        """The hosts that take part, in the order in which they joined."""
        return [self._head, *(host for host in self._hosts.values() if not host.lost)]

    def gather(
        self, assignment: Assignment, quorum: Quorum, ring: SlotRing | None, carrier: Path, report: Reporter, look: Look
    ) -> None:
        """Waits until enough hosts have joined, and divides the actors among them.

        `ring` counts the actors' slots; the carrier writes its address to the file `carrier`; `look` is called several
        times a second. Hosts that join later get actors of the others, or actors that have no host yet.
        """
        self._assignment, self._quorum, self._counts, self._carrier = assignment, quorum, ring, carrier
        self._has_bulk = assignment.has_bulk
        waiting = WaitReport(self._how_to_join, report)
        while self._missing:
            look()
            waiting.look(self._missing, quorum.without(self._living))
            self._serve(LOOK_S)
            for _, text in self.reports():
                report(text)
        self._hosts = {connection: host for connection, host in self._hosts.items() if not host.lost}
        num_actors, ownership = assignment.streams, Ownership(self._folder, assignment.streams)
        divide = functools.partial(balance, least=quorum.min_actors or num_actors)
        self._places = Places(num_actors, ownership, self._end, divide if self._has_bulk else divide_among_learners)
        self._places.divide(self._living)
        self._places.settle(has_carrier=False)
        for host in self._hosts.values():
            self._equip(host)

    @property
    def _how_to_join(self) -> str:
        return join_command(self.address)

    @property
    def _missing(self) -> str:
        """What the start of the run waits for; nothing if it need not wait."""
        return self._quorum.missing(self._living) if self._places is None else ""

    def placement(self) -> list[Host]:
        """Returns the hosts that take part, with their actors."""
        return self._living

    # What agents send.

    def _on_join(self, message: Message) -> None:
        request: JoinRequest = unpack(message.frames, JoinRequest)
        require_fit(request)
        if message.connection in self._hosts:
            self._sender_of(message)
        elif self._over:
            raise Refused(self._over)
        elif self._assignment is not None:
            if self._assignment.check and not request.is_checked:
                check = Assignment(wait=True, preload=self._preload, check=self._assignment.check)
                self._control.answer(message, pack(check))
                return
            self._admit(request, message.connection)
        host = self._hosts.get(message.connection)
        name = host.name if host else ""
        answer = Assignment(wait=True, over=self._over, name=name, missing=self._missing, preload=self._preload)
        is_divided = self._places is not None and not self._changes and (not self._has_bulk or self._carrier.exists())
        if host is not None and self._assignment is not None and is_divided and not self._over:
            answer = msgspec.structs.replace(
                self._assignment,
                name=host.name,
                num_actors=len(host.actors),
                lease_s=self._lease_s,
                bulk=self._carrier.read_text() if self._has_bulk else "",
                preload=self._preload,
            )
        self._control.answer(message, pack(answer))

    def _admit(self, request: JoinRequest, connection: bytes) -> None:
        if not self._has_bulk and (self._places is not None or not self._missing):
            raise Refused(f"host {request.name}: the run has all of its hosts already, with a learner on each")
        name, cores = unique_name(escaped(request.name), self._living), max(1, request.cores)
        host = self._hosts[connection] = Host(name, cores, cpus=request.cpus, received_at=time.monotonic())
        if self._places is not None:
            self._equip(host)
            self._changes.append(f"host {name} joined")

    def _equip(self, host: Host) -> None:
        has_server = self._assignment is not None and self._assignment.act_bytes > 0
        self._bound.equip(host, has_server=has_server, has_learner=not self._has_bulk)

    def _sender_of(self, message: Message) -> Host:
        """Returns the host that sent `message`; raises Refused if the host is not, or no longer, in this run."""
        host = self._hosts.get(message.connection)
        if host is None or host.lost:
            restarted = "the run was restarted after this host joined; run `echelon host --join` again"
            raise Refused(host.lost if host else restarted)
        host.received_at = time.monotonic()
        return host

    def _on_asked(self, message: Message) -> None:
        taken, host = message.own[0], self._sender_of(message)

        def answer() -> None:
            self._control.answer(message, pack(host.commands[taken:]))

        if len(host.commands) > taken:
            answer()
        else:
            self._control.hold(message, lambda: len(host.commands) > taken, answer)

    def _on_events(self, message: Message) -> None:
        host = self._sender_of(message)
        events: list[Event] = unpack(message.frames, list[Event])
        if message.number > host.num_events:  # else it is a repetition
            host.num_events = message.number
            for event in events:
                self._take_event(host, event)
        self._control.answer(message)

    def _take_event(self, host: Host, event: Event) -> None:
        """Handles one event; ignores those about roles that the host does not have."""
        match event:
            case Started(name, pid) if self._host_of(name) is host:
                host.pids[name] = pid
                host.asked.discard(name)
            case Ended(name=name, pid=pid) if self._host_of(name) is host:
                host.asked.discard(name)
                if host.pids.get(name) in (None, pid):
                    host.pids.pop(name, None)
                fields = {one: getattr(event, one) for one in event.__struct_fields__}
                self._far_exits += self._others([Exit(**fields)])
            case Logged(name, written) if self._host_of(name) is host and name in host.logs:
                append(Path(host.logs[name]), written)
            case Report(function, text):
                self._reports.append((function, text))
            case Left() if self._over:
                host.is_dismissed = True
            case Left(why):
                self._lose(host, f"left: {escaped(why.rstrip('.'))}")

    def _on_gauges(self, message: Message) -> None:
        host = self._sender_of(message)
        rows: dict[str, bytes] = unpack(message.frames, dict[str, bytes])
        self._gauges.show({name: row for name, row in rows.items() if self._host_of(name) is host})

    def share_store(self, store: Store) -> None:
        self._store = store  # before the first role starts

    def _on_store(self, message: Message) -> None:
        host = self._sender_of(message)
        operation: list[Any] = unpack(message.frames, list[Any])
        if message.number > host.num_stored:  # else it is a repetition
            host.num_stored, host.stored = message.number, pack(self._store(*operation))
        self._control.answer(message, host.stored)

    # Leases.

    def _look(self) -> None:
        now = time.monotonic()
        if self._control.num_refused_handshakes and not self._has_reported_handshake:
            self._has_reported_handshake = True
            self._report(f"refused a connection: its secret is not that of this run. {REMEDY}")
        if now >= self._looked_at + LOOK_S:  # not after every message: there may be many hosts
            away_s, self._looked_at = now - self._looked_at - AWAY_S, now
            for host in self._hosts.values():
                host.received_at = min(now, host.received_at + max(0.0, away_s))
                if not host.lost:
                    self._check_lease(host, now - host.received_at)
        if self._places is not None:
            if self._changes:
                self._report(f"{'; '.join(self._changes)}; {self._places.divide(self._living) or 'no actor moves'}")
                self._changes.clear()
            exits = self._places.settle(has_carrier=super().pid(CARRIER) is not None or CARRIER in self._asked)
            if exits is not None:
                self._far_exits += exits
                waiting, self._waiting = self._waiting, {}
                for spec in waiting.values():
                    self.start(spec)

    def _check_lease(self, host: Host, silent_s: float) -> None:
        left_s = self._lease_s + GRACE_S - silent_s
        if left_s < 0.0:
            self._lose(host, f"is lost (silent for {silent_s:.0f} s)")
        elif text := host.note_silence(silent_s, left_s):
            self._report(text)

    def _lose(self, host: Host, why: str) -> None:
        """Gives a host up: refuses its messages, and moves its actors to the others. Its inference server has ended."""
        host.lost = f"host {host.name} {why}"
        host.commands.clear()
        self._far_exits += self._bound.lose(host)
        if self._places is not None:
            self._changes.append(host.lost)
        else:
            self._report(host.lost)

    def _report(self, text: str) -> None:
        self._reports.append(("message", text))

    def _serve(self, timeout_s: float) -> None:
        if not self._control.take(BURST):
            self._control.sleep(timeout_s)
        self._look()

    # What the supervisor asks.

    def start(self, spec: ProcessSpec) -> None:
        host = self._host_of(spec.name)
        if self._places is not None and not self._places.may_start(spec.name):
            self._waiting[spec.name] = spec
        elif host is None:
            super().start(spec)
        elif not host.lost:  # an inference server is not started on another host
            is_new = host.note_start(spec.name)
            if host is self._head:
                super().start(spec)
            else:
                stream = actor_of(spec.name) if self._has_bulk and spec.name not in host.roles else None
                slot = int(self._counts.head[stream]) if is_new and stream is not None and self._counts else None
                host.asked.add(spec.name)
                host.logs[spec.name] = spec.log
                token = self._places.token(stream) if self._places is not None and stream is not None else 0
                host.commands.append(Start(dataclasses.asdict(spec), stream, slot, token))

    def joined(self) -> list[int]:
        return self._bound.joined()

    def _host_of(self, name: str) -> Host | None:
        """Returns the host of a role; None for those of the head besides actors."""
        bound = self._bound.of(name)
        return self._places.of(name) if bound is None and self._places is not None else bound

    def _is_far(self, host: Host | None) -> TypeGuard[Host]:
        return host is not None and host is not self._head

    def _end(self, host: Host, name: str) -> bool:
        """Ends an actor that is to be moved; returns False if it is not running."""
        if host is self._head:
            is_running = super().pid(name) is not None or name in self._asked
            super().signal(name, signal.SIGKILL)
            return is_running
        host.commands.append(Release(name))
        return name in host.pids or name in host.asked

    def _others(self, exits: list[Exit]) -> list[Exit]:
        """Returns the exits that are not part of a move."""
        return [gone for gone in exits if self._places is None or not self._places.take_exit(gone)]

    def run(self, world: MessageLoop, timeout_s: float) -> None:
        world.poll(timeout_s, [*self.descriptors, *self._control.descriptors])

    def exits(self) -> list[Exit]:
        if self._control.is_open:
            while self._control.take(BURST) >= BURST:
                pass
            self._look()
        exits, self._far_exits = self._far_exits, []
        return exits + self._others(super().exits())

    def reports(self) -> list[tuple[str, str]]:
        reports, self._reports = self._reports, []
        return reports

    def hosts(self) -> list[dict[str, Any]]:
        return [host.summary for host in (self._head, *self._hosts.values())]

    def place(self, name: str) -> str:
        host = self._host_of(name)
        return host.name if self._is_far(host) else ""

    def has_current_gauge(self, name: str) -> bool:
        host = self._host_of(name)
        if name in self._waiting:
            return False
        return not self._is_far(host) or time.monotonic() - host.received_at < STALE_S

    def pid(self, name: str) -> int | None:
        host = self._host_of(name)
        return host.pids.get(name) if self._is_far(host) else super().pid(name)

    def signal(self, name: str, number: int) -> None:
        host = self._host_of(name)
        if self._is_far(host):
            host.commands.append(Signal(name, number))
        else:
            super().signal(name, number)

    def close(self, timeout_s: float) -> None:
        """Dismisses the agents, waiting up to GOODBYE_S for them to leave, then closes the local engine."""
        if self._control.is_open:
            self._over = "the run is over"
            living = [host for host in self._hosts.values() if not host.lost]
            for host in living:
                host.commands.append(Dismiss(self._over))
            deadline = time.monotonic() + GOODBYE_S
            while any(not host.is_dismissed and not host.lost for host in living) and time.monotonic() < deadline:
                self._serve(LOOK_S)
            self._control.close()
        super().close(timeout_s)
