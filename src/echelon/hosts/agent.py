"""The host agent: one process per host that joins a run; owns that host's shared memory and starts its roles.

It is the coordinator of its roles as they see it: their world is in its session, and so are their ring and their board.
It waits for all of them at once: commands and answers of the head, slots that its actors commit, exits, reports. Slots
go up in the order of each stream, several under way, and stay in the ring until the head has them. Weights come down
before the grants that assume them. An agent that has heard nothing for a lease ends its roles, as the head then gives
them to another host; a connection that comes back before costs nothing. If the agent is killed, the fork server ends
its roles and removes its session. Imports no torch: the roles have it from their fork server.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
import signal
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from echelon.engines.local import LocalEngine
from echelon.engines.process import Exit, ProcessSpec
from echelon.errors import PeerLost, Refused
from echelon.hosts.messages import (
    COMMANDS,
    EVENTS,
    GAUGES,
    JOIN,
    MAX_BYTES,
    NEWER,
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
    question,
    unpack,
)
from echelon.transport.channel import HEADER, Part
from echelon.transport.channel_client import Client, Request
from echelon.transport.secret import secret_from_environment
from echelon.transport.segments import open_segment
from echelon.transport.session import create_session
from echelon.transport.shared_memory import SlotRing, WeightsBoard
from echelon.transport.slot_wire import SLOTS, SlotBytes
from echelon.world.node import Node

ASK_AGAIN_S = 0.2  # while the run is not ready
LOOK_S = 0.1
GAUGES_S = 0.25  # between two posts of what the roles show
QUEUED_SLOTS = 64  # under way at most
REPORTED = ("message", "env_restarted")  # what roles may report to the coordinator
GOODBYE_S = 1.0
Tell = Callable[[str], None]


class Agent:
    """Takes part in the run at `address` (tcp://HOST:PORT) until it is over."""

    def __init__(self, address: str, shm_dir: str, tell: Tell, name: str = "") -> None:
        self.name, self.address, self.tell = name or socket.gethostname(), address, tell
        self._secret = secret_from_environment()
        identity = b"h" + os.urandom(15)
        self._control = Client("the run", address, self._secret, MAX_BYTES, name=identity)
        self._assignment = self._join()
        self._session = create_session(shm_dir)
        self._logs = Path(tempfile.mkdtemp(prefix="echelon-host-"))
        self._engine: LocalEngine | None = None
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _join(self) -> Assignment:
        """Waits for the run to be ready; raises Refused if it does not take this host."""
        make = functools.partial(question, JoinRequest(PROTOCOL, self.name, len(os.sched_getaffinity(0))))
        waits = False
        while True:
            request = self._control.ask(JOIN, make)
            while not self._control.wait(request, 1.0):
                if not waits and self._control.silent_s > 1.0:
                    waits = True
                    self.tell(f"waiting for the run at {self.address}: {self._control.why_silent()}")
            assert request.answer is not None
            assignment: Assignment = unpack(request.answer, Assignment)
            if not assignment.wait:
                return assignment
            if not waits:
                waits = True
                self.tell(f"joined {self.address}, which is still preparing its run")
            time.sleep(ASK_AGAIN_S)

    def _make(self) -> None:
        assignment, session = self._assignment, self._session
        self._slots = SlotBytes.from_wire(assignment.slot)
        self._ring = SlotRing(session, self._slots, assignment.streams, assignment.slots)
        self._board = WeightsBoard(session, assignment.weights)
        self._engine = LocalEngine(str(session), assignment.preload)
        self._node = Node.host(f"ipc://{session}/world")
        for function in REPORTED:
            self._node.serve(function, functools.partial(self._report, function))
        host, _, _ = self.address.rpartition(":")
        bulk = f"{host}:{assignment.bulk.rpartition(':')[2]}"
        most = max(assignment.weights, 8 * assignment.streams)
        name = b"b" + os.urandom(15)
        self._bulk = Client("the run's carrier", bulk, self._secret, most, queued=2 * QUEUED_SLOTS, name=name)
        self._events: list[Event] = []
        self._event_number = 0
        self._reporting: Request | None = None
        self._asking, self._asked_at, self._num_commands = self._ask_commands(), time.monotonic(), 0
        self._heard_at = self._asked_at  # when the last question was sent that the head has answered
        self._newer = self._ask_newer()
        self._under_way: list[deque[Request]] = [deque() for _ in range(assignment.streams)]
        self._gauges_at = 0.0
        self._roles: dict[str, int | None] = {}
        self.over = ""  # why this host leaves
        self.tell(f"{self.name} takes part with {assignment.streams} actors; logs of its roles: {self._logs}")

    def run(self) -> str:
        """Works until the run is over, or this host must leave it; says why."""
        looked_at = 0.0
        while not self.over:
            is_control = self._sleep()
            self._bulk.poll()
            self._take_newer()
            self._send_slots()
            if is_control or time.monotonic() >= looked_at + LOOK_S:  # slots come often, all else seldom
                looked_at = time.monotonic()
                self._node.poll(0.0)
                self._control.poll()
                self._take_commands()
                self._look_at_roles()
                self._send_events()
                self._check_lease()
        return self.over

    def _sleep(self) -> bool:
        """Until something comes; whether that is anything else than slots, and answers about them."""
        assert self._engine is not None
        bulk: list[Any] = [self._bulk.socket, self._ring.ready.descriptor]
        others = [item for item, _ in self._node.watched]
        others += [self._control.socket, *self._engine.descriptors]
        ready = zmq.zmq_poll([(item, zmq.POLLIN) for item in [*bulk, *others]], int(1000 * LOOK_S))
        came = [item for item, _ in ready]
        if self._ring.ready.descriptor in came:
            self._ring.ready.clear()
        return any(item in others for item in came)

    # Control.

    @property
    def _token(self) -> int:
        return self._assignment.token

    def _ask_commands(self) -> Request:
        self._asked_at = time.monotonic()
        own = (getattr(self, "_num_commands", 0), self._token, 0)
        return self._control.ask(COMMANDS, lambda: [bytearray(HEADER.size)], own=own)

    def _take_commands(self) -> None:
        if self._asking.answer is None:
            return
        self._heard_at = self._asked_at
        commands: list[Command] = unpack(self._asking.answer, list[Command])
        for command in commands:
            self._num_commands += 1
            self._obey(command)
        self._asking = self._ask_commands()

    def _obey(self, command: Command) -> None:
        assert self._engine is not None
        match command:
            case Start(spec):
                self._engine.start(self._local(ProcessSpec(**spec)))
                self._roles.setdefault(spec["name"], None)
            case Signal(name, number):
                self._engine.signal(name, number)
            case Dismiss(why):
                self.over = why

    def _local(self, spec: ProcessSpec) -> ProcessSpec:
        """`spec` as it is on this host."""
        here = {
            "session": str(self._session),
            "address": self._node.address,
            "run_dir": str(self._logs),
            "streams": [self._assignment.first, self._assignment.streams],
        }
        log = str(self._logs / f"{spec.name}.log")
        return dataclasses.replace(spec, config={**spec.config, **here}, log=log)

    def _report(self, function: str, *args: Any) -> None:
        self._events.append(Report(function, list(args)))

    def _look_at_roles(self) -> None:
        assert self._engine is not None
        for gone in self._engine.exits():
            self._roles[gone.name] = None
            self._node.forget(gone.name, gone.cause)
            self._events.append(Ended(_told(gone)))
        for name, known in self._roles.items():
            pid = self._engine.pid(name)
            if pid is not None and pid != known:
                self._roles[name] = pid
                self._events.append(Started(name, pid))
        if time.monotonic() >= self._gauges_at:
            self._gauges_at = time.monotonic() + GAUGES_S
            rows = {path.name: open_segment(path).tobytes() for path in (self._session / "gauges").glob("[!.]*")}
            self._control.post(GAUGES, question(rows), own=(0, self._token, 0))

    def _send_events(self) -> None:
        if self._reporting is not None and self._reporting.answer is not None:
            self._reporting = None
        if self._reporting is None and self._events:
            events, self._events = self._events, []
            self._event_number += 1
            make = functools.partial(question, events)
            self._reporting = self._control.ask(EVENTS, make, number=self._event_number, own=(0, self._token, 0))

    def _check_lease(self) -> None:
        silent_s = time.monotonic() - self._heard_at
        if silent_s > self._assignment.lease_s:
            raise PeerLost(
                f"the run at {self.address} was not heard for {silent_s:.0f} s, so {self.name} has ended its roles: by "
                f"now they may be given to another host. {self._control.why_silent()}"
            )

    # Bulk.

    def _ask_newer(self) -> Request:
        version, granted = self._board.version, self._ring.granted.copy()

        def make() -> list[bytearray]:
            return [bytearray(HEADER.size) + granted.tobytes()]

        return self._bulk.ask(NEWER, make, own=(version, self._assignment.first, self._token))

    def _take_newer(self) -> None:
        """The weights first: an actor that is admitted finds those that its admission assumes."""
        if self._newer.answer is None:
            return
        _, grants, weights = self._newer.answer
        version = self._newer.own[0]
        if len(weights) and version > self._board.version:
            self._board.publish([np.frombuffer(weights, np.uint8)], version)
        for stream, granted in enumerate(np.frombuffer(grants, np.int64).tolist()):
            if granted > self._ring.granted[stream]:
                self._ring.granted[stream] = granted
                self._ring.free[stream].ring()
        self._newer = self._ask_newer()

    def _send_slots(self) -> None:
        ring = self._ring
        for stream, under_way in enumerate(self._under_way):
            while under_way and under_way[0].answer is not None:
                under_way.popleft()
                ring.release(stream)
            while len(under_way) < min(ring.num_ready(stream), QUEUED_SLOTS // len(self._under_way) + 1):
                count = int(ring.released[stream]) + len(under_way)
                parts = self._slots.pack(ring.readable(stream, len(under_way))["slot"])
                message: list[Part] = [bytearray(HEADER.size), *parts]
                number = count * ring.num_streams + stream + 1
                own = (self._assignment.first + stream, count, self._token)
                under_way.append(self._bulk.ask(SLOTS, functools.partial(_same, message), number=number, own=own))

    # The end.

    def close(self) -> None:
        """Ends the roles, says goodbye, and removes everything but the logs of roles that failed."""
        if self._engine is not None:
            self._engine.close(0.0)
            with contextlib.suppress(Refused):
                self._say_goodbye()
            self._node.close()
            self._bulk.close()
            self._ring.close()
        self._control.close()
        shutil.rmtree(self._session, ignore_errors=True)
        if self.over:
            shutil.rmtree(self._logs, ignore_errors=True)

    def _say_goodbye(self) -> None:
        why, self._events = self.over or "it was stopped", []
        self._event_number += 1
        left = self._control.ask(
            EVENTS, lambda: question([Left(why)]), number=self._event_number, own=(0, self._token, 0)
        )
        self._control.wait(left, GOODBYE_S)


def _same(message: list[Part]) -> list[Part]:
    return message


def _told(gone: Exit) -> dict[str, Any]:
    failure = dataclasses.asdict(gone.failure) if gone.failure else None
    fields = {name: getattr(gone, name) for name in ("name", "pid", "code", "signal", "ended_with")}
    return {**fields, "failure": failure}


def take_part(address: str, shm_dir: str, tell: Tell, name: str = "") -> str:
    """Joins the run at `address`, works for it until it is over or a signal comes, and says why it left."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    agent = Agent(address, shm_dir, tell, name)
    try:
        return agent.run()
    finally:
        agent.close()
