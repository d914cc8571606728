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
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from echelon.engines.inline import World
from echelon.engines.local import LocalEngine
from echelon.engines.process import Exit, Failure, ProcessSpec
from echelon.errors import Refused
from echelon.hosts.messages import (
    COMMANDS,
    EVENTS,
    GAUGES,
    JOIN,
    MAX_BYTES,
    PROTOCOL,
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
from echelon.transport.secret import secret_from_environment
from echelon.transport.segments import open_segment

GRACE_S = 2.0  # beyond the lease, before a silent host is given up
AWAY_S = 1.0  # between two looks at most so much counts: the rest this process itself was stopped
BURST = 256
LOOK_S = 0.05
GOODBYE_S = 2.0  # how long agents may take to hear that the run is over
CARRIER = "carrier"
SIGKILL = 9
Tell = Callable[[str], None]


@dataclass(slots=True)
class Host:
    """An agent that joined."""

    name: str
    token: int
    connection: bytes
    streams: range  # the actors that it has
    heard: float
    commands: list[Command] = field(default_factory=list)
    num_told: int = 0  # of them, as far as the agent says
    num_events: int = 0  # the last one that was taken
    pids: dict[str, int] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)  # to be started, and not known to have been
    lost: str = ""  # why it is given up


class HostsEngine(LocalEngine):
    """Starts roles here and elsewhere; the first host that joins has the actors behind those of the head, and so on."""

    def __init__(self, session: str, preload: Sequence[str], address: str, num_hosts: int, lease_s: float) -> None:
        super().__init__(session, preload)
        self._folder, self._num_hosts, self._lease_s = Path(session), num_hosts, lease_s
        self._control = Server("hosts", address, secret_from_environment(), MAX_BYTES)
        self._hosts: dict[int, Host] = {}  # by token, those that are lost among them
        self._places: dict[str, int] = {}  # of a role elsewhere, the token
        self._assignment: Assignment | None = None
        self._streams: list[range] = []
        self._far_exits: list[Exit] = []
        self._reports: list[tuple[str, list[Any]]] = []
        self._fenced: list[Host] = []  # lost, and their roles not yet told of
        self._looked_at = time.monotonic()
        for service, handler in ((JOIN, self._on_join), (COMMANDS, self._on_asked), (EVENTS, self._on_events)):
            self._control.serve(service, handler)
        self._control.serve(GAUGES, self._on_gauges)

    @property
    def address(self) -> str:
        """What agents join."""
        return self._control.address

    def gather(
        self, assignment: Assignment, streams: Sequence[range], carrier: Path, tell: Callable[[str], None]
    ) -> None:
        """Waits until every host is there; `streams` are the actors of each, the head's first, and `carrier` is the
        file that the carrier writes its address to."""
        self._assignment, self._streams, self._carrier = assignment, list(streams), carrier
        self._ownership = Ownership(self._folder, self._streams[-1].stop)
        missing = 0
        while len(self._hosts) < self._num_hosts - 1:
            if missing != (missing := self._num_hosts - 1 - len(self._hosts)):
                name, _, port = self.address.removeprefix("tcp://").rpartition(":")
                name = socket.gethostname() if name == "0.0.0.0" else name
                tell(f"waiting for {missing} more host{'s' * (missing > 1)}: echelon host --join {name}:{port}")
            self._serve(LOOK_S)
        for host in self._hosts.values():
            tell(f"host {host.name} has actors {host.streams.start} to {host.streams.stop - 1}")

    # What agents say.

    def _on_join(self, message: Message) -> None:
        request = unpack(message.frames, JoinRequest)
        if request.protocol != PROTOCOL:
            raise Refused(f"it speaks protocol {request.protocol}, this run {PROTOCOL}: install the same echelon")
        assignment = self._assignment
        if assignment is None:
            self._control.answer(message, pack(Assignment(wait=True)))
            return
        host = next((one for one in self._hosts.values() if one.connection == message.connection), None)
        if host is not None:
            self._heard(host.token)
        else:
            if len(self._hosts) == self._num_hosts - 1:
                raise Refused(f"the run has its {self._num_hosts} hosts already")
            token, streams = secrets.randbits(62) + 1, self._streams[len(self._hosts) + 1]
            host = Host(request.name[:64], token, message.connection, streams, time.monotonic())
            self._hosts[token] = host
            self._ownership.give(streams, token)
            self._places |= {f"actor-{stream}": token for stream in streams}
        if not self._carrier.exists():  # it listens soon
            self._control.answer(message, pack(Assignment(wait=True)))
            return
        answer = msgspec.structs.replace(
            assignment,
            token=host.token,
            first=host.streams.start,
            streams=len(host.streams),
            lease_s=self._lease_s,
            bulk=self._carrier.read_text(),
        )
        self._control.answer(message, pack(answer))

    def _heard(self, token: int) -> Host:
        host = self._hosts.get(token)
        if host is None or host.lost:
            raise Refused(host.lost if host else "this run does not know the host")
        host.heard = time.monotonic()
        return host

    def _on_asked(self, message: Message) -> None:
        taken, token, _ = message.own
        host = self._heard(token)
        host.num_told = taken

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
        match event:
            case Started(name, pid):
                host.pids[name] = pid
                host.asked.discard(name)
            case Ended(told):
                failure = told.pop("failure", None)
                gone = Exit(**told, failure=Failure(**failure) if failure else None)
                host.asked.discard(gone.name)
                if host.pids.get(gone.name) in (None, gone.pid):
                    host.pids.pop(gone.name, None)
                self._far_exits.append(gone)
            case Report(function, args):
                self._reports.append((function, args))
            case Left(why):
                self._lose(host, f"host {host.name} left: {why}")

    def _on_gauges(self, message: Message) -> None:
        host = self._heard(message.own[1])
        rows: dict[str, bytes] = unpack(message.frames, dict[str, bytes])
        for name, row in rows.items():
            path = self._folder / "gauges" / name
            if self._places.get(name) == host.token and path.exists():
                memory = open_segment(path)
                if len(row) == memory.nbytes:
                    memory[:] = bytearray(row)

    # Leases.

    def _look(self) -> None:
        now = time.monotonic()
        away_s = now - self._looked_at - AWAY_S  # this process was stopped: it could hear nobody meanwhile
        self._looked_at = now
        for host in self._hosts.values():
            host.heard = min(now, host.heard + max(0.0, away_s))
            if not host.lost and now - host.heard > self._lease_s + GRACE_S:
                self._lose(host, f"host {host.name} was not heard for {now - host.heard:.0f} s")
        for host in list(self._fenced):
            if self._ownership.is_seen or super().pid(CARRIER) is None:
                self._fenced.remove(host)
                for name in [*host.pids, *host.asked - set(host.pids)]:
                    gone = Exit(name, host.pids.get(name, 0), -1, SIGKILL, ended_with=host.lost)
                    self._far_exits.append(gone)

    def _lose(self, host: Host, why: str) -> None:
        """Nothing of this host counts any more; its roles may be started again when the carrier knows that."""
        host.lost = why
        self._ownership.give(host.streams, HERE)
        self._places = {name: token for name, token in self._places.items() if token != host.token}
        self._fenced.append(host)

    def _serve(self, timeout_s: float) -> None:
        if not self._control.take(BURST):
            self._control.sleep(timeout_s)
        self._look()

    # What the supervisor asks.

    def _host_of(self, name: str) -> Host | None:
        return self._hosts.get(self._places.get(name, HERE))

    def start(self, spec: ProcessSpec) -> None:
        host = self._host_of(spec.name)
        if host is None:
            super().start(spec)
        else:
            host.asked.add(spec.name)
            host.commands.append(Start(dataclasses.asdict(spec)))

    def run(self, world: World, timeout_s: float) -> None:
        world.poll(timeout_s, [*self.descriptors, *self._control.descriptors])
        while self._control.take(BURST) == BURST:
            pass

    def exits(self) -> list[Exit]:
        if self._control.is_open:
            self._control.take(BURST)
            self._look()
        exits, self._far_exits = self._far_exits, []
        return exits + super().exits()

    def reports(self) -> list[tuple[str, list[Any]]]:
        reports, self._reports = self._reports, []
        return reports

    def place(self, name: str) -> str:
        host = self._host_of(name)
        return host.name if host else ""

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
        """Sends the agents home, too."""
        living = [host for host in self._hosts.values() if not host.lost]
        if self._control.is_open:
            for host in living:
                host.commands.append(Dismiss("the run is over"))
            deadline = time.monotonic() + GOODBYE_S
            while any(not host.lost for host in living) and time.monotonic() < deadline:
                self._serve(LOOK_S)
            self._control.close()
        super().close(timeout_s)


def streams_of_hosts(num_actors: int, num_hosts: int) -> list[range]:
    """The actors of each host, as even as can be; the head's first."""
    bounds = [host * num_actors // num_hosts for host in range(num_hosts + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]
