"""The engine of several hosts: starts roles as processes of this host, the head, and of hosts whose agents have joined.

It listens for agents (`hosts.messages`, control) in the coordinator's own loop. It sends an agent the roles to start;
`exits` and `reports` return their exits and reports with those of local roles. Fencing: an agent that has received no
reply for a lease ends its roles. The head gives the host up GRACE_S later, and starts its actors itself once the
carrier rejects slots from that host.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from echelon.engines.inline import MessageLoop
from echelon.engines.local import LocalEngine
from echelon.engines.process import Exit, ProcessSpec
from echelon.errors import Refused, escaped
from echelon.hosts.members import Host, summarize
from echelon.hosts.messages import (
    COMMANDS,
    EVENTS,
    GAUGES,
    JOIN,
    MAX_BYTES,
    Assignment,
    Dismiss,
    Ended,
    Event,
    JoinRequest,
    Left,
    Report,
    Signal,
    Start,
    Started,
    pack,
    unpack,
)
from echelon.hosts.ownership import HERE, Ownership
from echelon.transport.channel import Message
from echelon.transport.channel_server import Server
from echelon.transport.secret import REMEDY, SECRET_VARIABLE, is_loopback
from echelon.transport.segments import open_segment
from echelon.version import __version__

GRACE_S = 2.0  # beyond the lease, before a silent host is given up
AWAY_S = 1.0  # a longer gap between two calls of `_look` means that this process was suspended; the excess is ignored
WAIT_REPORT_S = 30.0  # between two reports that hosts are missing
SILENT_S = 5.0  # before the user is warned of a silent host
BURST = 256
LOOK_S = 0.05
STALE_S = 2.0  # gauges of a host that was silent for longer are stale
GOODBYE_S = 2.0  # how long agents may take to learn that the run is over
CARRIER = "carrier"
Array = np.ndarray[Any, Any]
Reporter = Callable[[str], None]


class HostsEngine(LocalEngine):
    """Starts roles on all hosts. Actors are assigned in order: the head has the first, then each host as it joined."""

    def __init__(self, session: str, preload: Sequence[str], address: str, lease_s: float) -> None:
        super().__init__(session, preload)
        self._folder, self._lease_s = Path(session), lease_s
        self._control = Server("hosts", address, MAX_BYTES, report=self._report)
        self._hosts: dict[bytes, Host] = {}  # by connection, lost ones included
        self._places: dict[str, Host] = {}  # of roles on other hosts
        self._assignment: Assignment | None = None
        self._free: list[range] = []  # the actors of hosts that have not joined
        self._has_gathered = False
        self._own_streams, self._own_starts = range(0), list[str]()
        self._far_exits: list[Exit] = []
        self._reports: list[tuple[str, str]] = []
        self._fenced: list[Host] = []  # lost, but the carrier may not have seen it yet
        self._gauges: dict[str, Array] = {}
        self._has_reported_handshake = False
        self._over = ""
        self._looked_at = time.monotonic()
        self._control.serve(JOIN, self._on_join)
        self._control.serve(COMMANDS, self._on_asked)
        self._control.serve(EVENTS, self._on_events)
        self._control.serve(GAUGES, self._on_gauges)

    @property
    def address(self) -> str:
        """The address that agents join."""
        return self._control.address

    def gather(self, assignment: Assignment, streams: Sequence[range], carrier: Path, report: Reporter) -> None:
        """Waits until every host has joined.

        `streams` are the actors of each host, the head's first; `carrier` is the file to which the carrier will write
        its address. A host that leaves, or is silent for a lease, is replaced by the next that joins.
        """
        self._own_streams, self._free, self._carrier = streams[0], list(streams[1:]), carrier
        self._ownership = Ownership(self._folder, streams[-1].stop)
        self._assignment = assignment
        missing, began, next_report = 0, time.monotonic(), 0.0
        while self._free:
            if missing != len(self._free):
                missing, next_report = len(self._free), time.monotonic() + WAIT_REPORT_S
                hosts = f"{missing} more host{'s' * (missing > 1)}"
                report(f"waiting for {hosts}: {self._command}")
                joined = len(streams) - missing
                without = f"--hosts {joined}" if joined > 1 else "--engine local"
                give_up = f"Ctrl-C gives up; {without} trains without {'them' if missing > 1 else 'it'}"
            elif time.monotonic() >= next_report:
                next_report += WAIT_REPORT_S
                report(f"still waiting for {hosts} after {time.monotonic() - began:.0f} s ({give_up})")
            self._serve(LOOK_S)
            for _, text in self.reports():
                report(text)
        self._has_gathered = True
        self._hosts = {connection: host for connection, host in self._hosts.items() if not host.lost}
        for host in self._hosts.values():
            report(f"host {host.name} has {host.actors}")

    @property
    def _command(self) -> str:
        """The command to run on another host, as far as this host can tell."""
        name, _, port = self.address.removeprefix("tcp://").rpartition(":")
        if is_loopback(name):
            only = "this user on this machine only; --hosts.address tcp://0.0.0.0:PORT admits other machines"
            return f"echelon host --join {name}:{port} ({only})"
        known = socket.gethostname() if name == "0.0.0.0" else name
        return f"echelon host --join {known}:{port} (with the same {SECRET_VARIABLE})"

    # What agents send.

    def _on_join(self, message: Message) -> None:
        request: JoinRequest = unpack(message.frames, JoinRequest)
        if request.version != __version__:
            versions = f"it has Echelon {request.version} and this run has {__version__}"
            raise Refused(f"host {request.name}: {versions}; install the same version")
        if self._over:
            raise Refused(self._over)
        if message.connection in self._hosts:
            self._sender_of(message)
        elif self._assignment is not None:
            self._admit(request, message.connection)
        host = self._hosts.get(message.connection)
        name = host.name if host else ""
        answer = Assignment(wait=True, name=name, missing=len(self._free), preload=self._preload)
        if host is not None and self._assignment is not None and self._has_gathered and self._carrier.exists():
            answer = msgspec.structs.replace(
                self._assignment,
                name=host.name,
                token=host.token,
                first=host.streams.start,
                streams=len(host.streams),
                lease_s=self._lease_s,
                bulk=self._carrier.read_text(),
                preload=self._preload,
            )
        self._control.answer(message, pack(answer))

    def _admit(self, request: JoinRequest, connection: bytes) -> None:
        if not self._free:
            full = "the run has all of its hosts already; one that left cannot join again"
            raise Refused(f"host {request.name}: {full}")
        token, streams = secrets.randbits(62) + 1, self._free.pop(0)
        name = self._unique(escaped(request.name))
        host = self._hosts[connection] = Host(name, token, streams, time.monotonic())
        self._ownership.give(streams, token)
        self._places |= {f"actor-{stream}": host for stream in streams}

    def _unique(self, name: str) -> str:
        """Returns `name`, or NAME-2, NAME-3 and so on where hosts of that name take part."""
        names = {socket.gethostname(), *(host.name for host in self._hosts.values() if not host.lost)}
        others = (f"{name}-{number}" for number in itertools.count(2))
        return name if name not in names else next(other for other in others if other not in names)

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
            case Started(name, pid) if self._places.get(name) is host:
                host.pids[name] = pid
                host.asked.discard(name)
            case Ended(name=name, pid=pid) if self._places.get(name) is host:
                host.asked.discard(name)
                if host.pids.get(name) in (None, pid):
                    host.pids.pop(name, None)
                fields = {one: getattr(event, one) for one in event.__struct_fields__}
                self._far_exits.append(Exit(**fields))
            case Report(function, text):
                self._reports.append((function, text))
            case Left() if self._over:
                host.is_dismissed = True
            case Left(why):
                self._lose(host, f"left: {escaped(why.rstrip('.'))}")

    def _on_gauges(self, message: Message) -> None:
        host = self._sender_of(message)
        rows: dict[str, bytes] = unpack(message.frames, dict[str, bytes])
        for name, row in rows.items():
            if self._places.get(name) is not host:
                continue
            if name not in self._gauges and (path := self._folder / "gauges" / name).exists():
                self._gauges[name] = open_segment(path)
            memory = self._gauges.get(name)
            if memory is not None and len(row) == memory.nbytes:
                memory[:] = np.frombuffer(row, np.uint8)

    # Leases.

    def _look(self) -> None:
        now = time.monotonic()
        away_s = now - self._looked_at - AWAY_S
        self._looked_at = now
        if self._control.num_refused_handshakes and not self._has_reported_handshake:
            self._has_reported_handshake = True
            self._report(f"refused a connection: its secret is not that of this run. {REMEDY}")
        for host in self._hosts.values():
            host.received_at = min(now, host.received_at + max(0.0, away_s))
            if not host.lost:
                self._check_lease(host, now - host.received_at)
        for host in list(self._fenced):
            if self._ownership.is_seen or super().pid(CARRIER) is None:
                self._fenced.remove(host)
                for name in [*host.pids, *host.asked - set(host.pids)]:
                    pid, number = host.pids.get(name, 0), int(signal.SIGKILL)
                    self._far_exits.append(Exit(name, pid, -1, number, ended_with=host.lost, is_reported=True))
                for spec in host.postponed:
                    self._own_starts.append(spec.name)
                    super().start(spec)

    def _check_lease(self, host: Host, silent_s: float) -> None:
        left_s = self._lease_s + GRACE_S - silent_s
        if left_s < 0.0:
            self._lose(host, f"is lost (silent for {silent_s:.0f} s)")
        elif silent_s > SILENT_S and not host.is_silent and self._has_gathered:
            host.is_silent = True
            soon = f"this host starts its {host.actors} in {left_s:.0f} s unless it is back"
            self._report(f"host {host.name} has been silent for {silent_s:.0f} s; {soon}")
        elif silent_s <= SILENT_S and host.is_silent:
            host.is_silent = False
            self._report(f"host {host.name} is back")

    def _lose(self, host: Host, why: str) -> None:
        """Gives a host up: refuses its messages, and lets its roles start here once the carrier rejects its slots."""
        host.lost = f"host {host.name} {why}"
        self._ownership.give(host.streams, HERE)
        self._places = {name: place for name, place in self._places.items() if place is not host}
        if self._has_gathered:
            self._report(f"{host.lost}; this host starts its {host.actors}")
            self._fenced.append(host)
        else:
            self._report(host.lost)
            self._free.insert(0, host.streams)

    def _report(self, text: str) -> None:
        self._reports.append(("message", text))

    def _serve(self, timeout_s: float) -> None:
        if not self._control.take(BURST):
            self._control.sleep(timeout_s)
        self._look()

    # What the supervisor asks.

    def start(self, spec: ProcessSpec) -> None:
        host = self._places.get(spec.name)
        fenced = next((one for one in self._fenced if spec.name in map("actor-{}".format, one.streams)), None)
        if fenced is not None:
            fenced.postponed.append(spec)
        elif host is None:
            self._own_starts.append(spec.name)
            super().start(spec)
        else:
            host.asked.add(spec.name)
            host.commands.append(Start(dataclasses.asdict(spec)))

    def run(self, world: MessageLoop, timeout_s: float) -> None:
        world.poll(timeout_s, [*self.descriptors, *self._control.descriptors])

    def exits(self) -> list[Exit]:
        if self._control.is_open:
            while self._control.take(BURST) >= BURST:
                pass
            self._look()
        exits, self._far_exits = self._far_exits, []
        return exits + super().exits()

    def reports(self) -> list[tuple[str, str]]:
        reports, self._reports = self._reports, []
        return reports

    def hosts(self) -> list[dict[str, Any]]:
        head = summarize(socket.gethostname(), self._own_streams, self._own_starts)
        return [head, *(host.summary for host in self._hosts.values())]

    def place(self, name: str) -> str:
        host = self._places.get(name)
        return host.name if host else ""

    def has_current_gauge(self, name: str) -> bool:
        host = self._places.get(name)
        return host is None or time.monotonic() - host.received_at < STALE_S

    def pid(self, name: str) -> int | None:
        host = self._places.get(name)
        return super().pid(name) if host is None else host.pids.get(name)

    def signal(self, name: str, number: int) -> None:
        host = self._places.get(name)
        if host is None:
            super().signal(name, number)
        else:
            host.commands.append(Signal(name, number))

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


def streams_of_hosts(num_actors: int, num_hosts: int) -> list[range]:
    """Returns the actors of each host, divided as evenly as possible; those of the head come first."""
    bounds = [host * num_actors // num_hosts for host in range(num_hosts + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]
