"""The engine of several hosts: roles as processes of this one, the head, and of those whose agents have joined.

It listens for agents (`hosts.messages`, control) in the coordinator's own loop. An agent is told what to start; what it
reports comes out of `exits` and `reports` as if it were here. Fencing: an agent that has heard nothing for a lease ends
its roles; one that was not heard for a lease and a little more is given up here, and only then do its actors go to the
head, when the carrier has seen that they did.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from echelon.engines.inline import MessageLoop
from echelon.engines.local import LocalEngine
from echelon.engines.process import Exit, ProcessSpec
from echelon.errors import Refused
from echelon.hosts.messages import (
    COMMANDS,
    EVENTS,
    GAUGES,
    JOIN,
    MAX_BYTES,
    Assignment,
    Command,
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
from echelon.transport.secret import is_loopback, secret_from_environment
from echelon.transport.segments import open_segment
from echelon.version import __version__

GRACE_S = 2.0  # beyond the lease, before a silent host is given up
AWAY_S = 1.0  # between two looks at most so much counts: the rest this process itself was stopped
BURST = 256
LOOK_S = 0.05
HEARD_S = 2.0  # what a host shows is new if it was heard within so long
GOODBYE_S = 2.0  # how long agents may take to hear that the run is over
CARRIER = "carrier"
Array = np.ndarray[Any, Any]
Reporter = Callable[[str], None]


@dataclass(slots=True)
class Host:
    """An agent that joined."""

    name: str
    token: int
    connection: bytes
    streams: range  # the actors that it has
    heard: float
    commands: list[Command] = field(default_factory=list)
    num_events: int = 0  # the last one that was taken
    pids: dict[str, int] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)  # to be started, and not known to have been
    lost: str = ""  # why it is given up
    postponed: list[ProcessSpec] = field(default_factory=list)  # to be started at the head when it may be


class HostsEngine(LocalEngine):
    """Starts roles here and elsewhere; the first host that joins has the actors behind those of the head, and so on."""

    def __init__(self, session: str, preload: Sequence[str], address: str, lease_s: float) -> None:
        super().__init__(session, preload)
        self._folder, self._lease_s = Path(session), lease_s
        self._control = Server("hosts", address, secret_from_environment(), MAX_BYTES)
        self._hosts: dict[int, Host] = {}  # by token, those that are lost among them
        self._places: dict[str, int] = {}  # of a role elsewhere, the token
        self._assignment: Assignment | None = None
        self._free: list[range] = []  # the actors of hosts that have not joined
        self._far_exits: list[Exit] = []
        self._reports: list[tuple[str, str]] = []
        self._fenced: list[Host] = []  # lost, and the carrier may not know yet
        self._gathering: Reporter | None = None  # until every host is there
        self._gauges: dict[str, Array] = {}
        self._over = ""
        self._looked_at = time.monotonic()
        self._control.serve(JOIN, self._on_join)
        self._control.serve(COMMANDS, self._on_asked)
        self._control.serve(EVENTS, self._on_events)
        self._control.serve(GAUGES, self._on_gauges)

    @property
    def address(self) -> str:
        """What agents join."""
        return self._control.address

    def gather(self, assignment: Assignment, streams: Sequence[range], carrier: Path, report: Reporter) -> None:
        """Waits until every host is there; `streams` are the actors of each, the head's first, and `carrier` is the
        file that the carrier writes its address to."""
        self._free, self._carrier = list(streams[1:]), carrier
        self._ownership = Ownership(self._folder, streams[-1].stop)
        self._assignment, self._gathering, missing = assignment, report, 0
        while self._free:
            if missing != (missing := len(self._free)):
                report(f"waiting for {missing} more host{'s' * (missing > 1)}: echelon host --join {self._shown}")
            self._serve(LOOK_S)
        self._gathering = None
        for host in self._hosts.values():
            report(f"host {host.name} has actors {host.streams.start} to {host.streams.stop - 1}")

    @property
    def _shown(self) -> str:
        """The address as other hosts know it, as far as can be said here."""
        name, _, port = self.address.removeprefix("tcp://").rpartition(":")
        if name == "0.0.0.0":
            return f"{socket.gethostname()}:{port}"
        only = " (from this machine alone; --hosts.address tcp://0.0.0.0:PORT lets others in)"
        return f"{name}:{port}{only if is_loopback(name) else ''}"

    # What agents say.

    def _on_join(self, message: Message) -> None:
        request: JoinRequest = unpack(message.frames, JoinRequest)
        if request.version != __version__:
            raise Refused(f"it is Echelon {request.version}, and the run {__version__}: install the same")
        if self._over:
            raise Refused(self._over)
        host = next((one for one in self._hosts.values() if one.connection == message.connection), None)
        if host is not None:
            self._heard(host.token)
        elif self._assignment is not None:
            host = self._admit(request, message.connection)
        answer = Assignment(wait=True, preload=self._preload)
        if host is not None and self._assignment is not None and self._carrier.exists():
            answer = msgspec.structs.replace(
                self._assignment,
                token=host.token,
                first=host.streams.start,
                streams=len(host.streams),
                lease_s=self._lease_s,
                bulk=self._carrier.read_text(),
                preload=self._preload,
            )
        self._control.answer(message, pack(answer))

    def _admit(self, request: JoinRequest, connection: bytes) -> Host:
        if not self._free:
            raise Refused("the run has all of its hosts already")
        token, streams = secrets.randbits(62) + 1, self._free.pop(0)
        host = self._hosts[token] = Host(request.name, token, connection, streams, time.monotonic())
        self._ownership.give(streams, token)
        self._places |= {f"actor-{stream}": token for stream in streams}
        return host

    def _heard(self, token: int) -> Host:
        host = self._hosts.get(token)
        if host is None or host.lost:
            raise Refused(host.lost if host else "this run does not know the host")
        host.heard = time.monotonic()
        return host

    def _on_asked(self, message: Message) -> None:
        taken, token, _ = message.own
        host = self._heard(token)

        def answer() -> None:
            self._control.answer(message, pack(host.commands[taken:]))

        if len(host.commands) > taken:
            answer()
        else:
            self._control.hold(message, lambda: len(host.commands) > taken, answer)

    def _on_events(self, message: Message) -> None:
        host = self._heard(message.own[1])
        events: list[Event] = unpack(message.frames, list[Event])
        if message.number > host.num_events:  # else it comes again
            host.num_events = message.number
            for event in events:
                self._take_event(host, event)
        self._control.answer(message)

    def _take_event(self, host: Host, event: Event) -> None:
        """What a host says of roles that it does not have is passed over."""
        match event:
            case Started(name, pid) if self._places.get(name) == host.token:
                host.pids[name] = pid
                host.asked.discard(name)
            case Ended(name=name, pid=pid) if self._places.get(name) == host.token:
                host.asked.discard(name)
                if host.pids.get(name) in (None, pid):
                    host.pids.pop(name, None)
                fields = {one: getattr(event, one) for one in event.__struct_fields__}
                self._far_exits.append(Exit(**fields))
            case Report(function, text):
                self._reports.append((function, text))
            case Left(why):
                self._lose(host, f"host {host.name} left: {why}")

    def _on_gauges(self, message: Message) -> None:
        host = self._heard(message.own[1])
        rows: dict[str, bytes] = unpack(message.frames, dict[str, bytes])
        for name, row in rows.items():
            if self._places.get(name) != host.token:
                continue
            if name not in self._gauges and (path := self._folder / "gauges" / name).exists():
                self._gauges[name] = open_segment(path)
            memory = self._gauges.get(name)
            if memory is not None and len(row) == memory.nbytes:
                memory[:] = np.frombuffer(row, np.uint8)

    # Leases.

    def _look(self) -> None:
        now = time.monotonic()
        away_s = now - self._looked_at - AWAY_S  # this process was stopped: it could hear nobody meanwhile
        self._looked_at = now
        for host in list(self._hosts.values()):
            host.heard = min(now, host.heard + max(0.0, away_s))
            if not host.lost and now - host.heard > self._lease_s + GRACE_S:
                self._lose(host, f"host {host.name} was not heard for {now - host.heard:.0f} s")
        for host in list(self._fenced):
            if self._ownership.is_seen or super().pid(CARRIER) is None:
                self._fenced.remove(host)
                for name in [*host.pids, *host.asked - set(host.pids)]:
                    pid = host.pids.get(name, 0)
                    self._far_exits.append(Exit(name, pid, -1, int(signal.SIGKILL), ended_with=host.lost))
                for spec in host.postponed:
                    super().start(spec)

    def _lose(self, host: Host, why: str) -> None:
        """Nothing of this host counts any more; its roles may be started again when the carrier knows that."""
        host.lost = why
        self._ownership.give(host.streams, HERE)
        self._places = {name: token for name, token in self._places.items() if token != host.token}
        if self._gathering is None:
            self._fenced.append(host)
            return
        del self._hosts[host.token]  # it had nothing to do yet: the next that joins has its place
        self._free.insert(0, host.streams)
        self._gathering(why)

    def _serve(self, timeout_s: float) -> None:
        if not self._control.take(BURST):
            self._control.sleep(timeout_s)
        self._look()

    # What the supervisor asks.

    def _host_of(self, name: str) -> Host | None:
        return self._hosts.get(self._places.get(name, HERE))

    def start(self, spec: ProcessSpec) -> None:
        host = self._host_of(spec.name)
        fenced = next((one for one in self._fenced if spec.name in map("actor-{}".format, one.streams)), None)
        if fenced is not None:
            fenced.postponed.append(spec)
        elif host is None:
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

    def place(self, name: str) -> str:
        host = self._host_of(name)
        return host.name if host else ""

    def hears(self, name: str) -> bool:
        host = self._host_of(name)
        return host is None or time.monotonic() - host.heard < HEARD_S

    def pid(self, name: str) -> int | None:
        host = self._host_of(name)
        return super().pid(name) if host is None else host.pids.get(name)

    def signal(self, name: str, number: int) -> None:
        host = self._host_of(name)
        if host is None:
            super().signal(name, number)
        else:
            host.commands.append(Signal(name, number))

    def close(self, timeout_s: float) -> None:
        """Dismisses the agents, too."""
        if self._control.is_open:
            self._over = "the run is over"
            living = [host for host in self._hosts.values() if not host.lost]
            for host in living:
                host.commands.append(Dismiss(self._over))
            deadline = time.monotonic() + GOODBYE_S
            while any(not host.lost for host in living) and time.monotonic() < deadline:
                self._serve(LOOK_S)
            self._control.close()
        super().close(timeout_s)


def streams_of_hosts(num_actors: int, num_hosts: int) -> list[range]:
    """The actors of each host, as even as can be; the head's first."""
    bounds = [host * num_actors // num_hosts for host in range(num_hosts + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]
