"""The host agent: one process per host that joins a run; owns that host's shared memory and starts its roles.

It is the coordinator of its roles as they see it: their world is in its session, and so are their ring and their board.
It waits for all of them at once: commands and answers of the head, slots that its actors commit, exits, reports. Slots
go up in the order of each stream, several under way, and stay in the ring until the head has them. Weights come down on
a connection of their own, before the grants that assume them. An agent that has heard nothing for a lease ends its
roles, as the head then gives them to another host; a connection that comes back before costs nothing. If the agent is
killed, the fork server ends its roles and removes its session.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from echelon.engines.local import LocalEngine
from echelon.engines.process import CRASHES, Exit, ProcessSpec
from echelon.errors import EchelonError, PeerLost
from echelon.hosts.messages import (
    COMMANDS,
    EVENTS,
    GAUGES,
    JOIN,
    MAX_BYTES,
    NEWER,
    QUEUED_BYTES,
    Assignment,
    Command,
    Dismiss,
    Ended,
    Event,
    JoinRequest,
    Left,
    Report,
    Reported,
    Signal,
    Start,
    Started,
    question,
    unpack,
)
from echelon.memory_check import check_fits, check_processes, free_memory
from echelon.transport.channel import HEADER, Part
from echelon.transport.channel_client import Client, PendingRequest
from echelon.transport.secret import secret_from_environment
from echelon.transport.segments import open_segment
from echelon.transport.session import create_session, start_ticks
from echelon.transport.shared_memory import SlotRing, WeightsBoard
from echelon.transport.slot_wire import SLOTS, SlotBytes
from echelon.version import __version__
from echelon.world.exits import take_exits
from echelon.world.node import Node

ASK_AGAIN_S = 0.2  # while the run is not ready
LOOK_S = 0.1
GAUGES_S = 0.25  # between two posts of what the roles show
SILENT_S = 5.0  # without a word from the carrier, before the user is told
GOODBYE_S = 1.0
LOG_TAIL_BYTES = 6_000
Reporter = Callable[[str], None]


class Agent:
    """Takes part in the run at `address` (tcp://HOST:PORT) until it is over."""

    def __init__(self, address: str, shm_dir: str, report: Reporter, name: str = "") -> None:
        self.name, self.address, self.report = name or socket.gethostname(), address, report
        self.over = ""  # why this host leaves
        self._secret = secret_from_environment()
        self._token, self._num_commands, self._event_number = 0, 0, 0
        self._events: list[Event] = []
        self._reporting: PendingRequest | None = None
        self._roles: dict[str, int | None] = {}
        self._gauges: dict[str, np.ndarray[Any, Any]] = {}
        self._gauges_at = 0.0
        self._has_failed = self._is_warned = False
        self._closing = contextlib.ExitStack()  # what was made last is ended first
        try:
            self._control = self._connect("the run", address, MAX_BYTES)
            self._session = create_session(shm_dir)
            self._closing.callback(shutil.rmtree, self._session, ignore_errors=True)
            self._logs = make_log_folder()
            self._closing.callback(self._remove_logs)
            self._engine, self._assignment = self._join()
            self._make()
        except BaseException as error:
            self.close(str(error))
            raise

    def _connect(self, what: str, address: str, max_bytes: int, queued: int = 8) -> Client:
        name = b"h" + os.urandom(15)  # by which the head knows it again
        client = Client(what, address, self._secret, max_bytes, queued=queued, name=name)
        self._closing.callback(client.close)
        return client

    def _join(self) -> tuple[LocalEngine, Assignment]:
        """Waits for the run to be ready, while the fork server imports; raises Refused if it takes no more hosts."""
        make = functools.partial(question, JoinRequest(__version__, self.name, len(os.sched_getaffinity(0))))
        engine, state = None, ""
        while True:
            request = self._control.ask(JOIN, make)
            while not self._control.wait(request, 1.0):
                if self._control.silent_s > 1.0 and state != "silent":
                    state = "silent"
                    self.report(f"waiting for the run at {self.address}: {self._control.why_silent()}")
            assert request.answer is not None
            assignment: Assignment = unpack(request.answer, Assignment)
            if engine is None:
                engine = LocalEngine(str(self._session), assignment.preload)
                self._closing.callback(engine.close, 0.0)
            if not assignment.wait:
                return engine, assignment
            if state != "heard":
                state = "heard"
                self.report(f"joined {self.address}, which is preparing its run")
            time.sleep(ASK_AGAIN_S)

    def _make(self) -> None:
        assignment, session = self._assignment, self._session
        self._token = assignment.token
        self._slots = SlotBytes.from_wire(assignment.slot)
        num, slots = assignment.streams, assignment.slots
        nbytes = SlotRing.size(self._slots, num, slots) + WeightsBoard.size(assignment.weights)
        check_processes(num, free_memory())
        check_fits(nbytes, "this host's share of the run", free_memory(session.parent), "--actors or --envs-per-actor")
        self._ring = SlotRing(session, self._slots, num, slots)
        self._board = WeightsBoard(session, assignment.weights)
        self._closing.callback(self._ring.close)
        self._node = Node.host(f"ipc://{session}/world")
        self._closing.callback(self._node.close)
        self._node.serve("message", functools.partial(self._send_report, "message"))
        self._node.serve("env_restarted", functools.partial(self._send_report, "env_restarted"))
        host, port = self.address.rpartition(":")[0], assignment.bulk.rpartition(":")[2]
        self._bulk = f"{host}:{port}"
        self._most_slots = max(2, QUEUED_BYTES // self._slots.nbytes)  # under way
        self._up = self._connect("the run's carrier", self._bulk, HEADER.size, self._most_slots)
        self._down = self._connect("the run's carrier", self._bulk, max(assignment.weights, 8 * num))
        self._under_way: list[deque[PendingRequest]] = [deque() for _ in range(num)]
        self._asked_at = self._heard_at = time.monotonic()  # the latter: of the last question that was answered
        self._asking, self._newer = self._ask_commands(), self._ask_newer()
        actors = f"{num} actor{'s' * (num > 1)}"
        self.report(f"{self.name} takes part with {actors}; the logs of its roles are in {self._logs}")

    def run(self) -> str:
        """Works until the run is over, or this host must leave it; says why."""
        looked_at = 0.0
        while not self.over:
            is_control = self._sleep()
            self._up.poll()
            self._down.poll()
            self._take_newer()
            self._send_slots()
            if is_control or time.monotonic() >= looked_at + LOOK_S:  # slots come often, all else seldom
                looked_at = time.monotonic()
                self._node.poll(0.0)
                self._control.poll()
                self._take_commands()
                self._look_at_roles()
                self._send_events()
                self._check_links()
        return self.over

    def _sleep(self) -> bool:
        """Until something comes; whether that is anything else than slots, weights and answers about them."""
        bulk: list[Any] = [self._up.socket, self._down.socket, self._ring.ready.descriptor]
        others = [item for item, _ in self._node.watched]
        others += [self._control.socket, *self._engine.descriptors]
        ready = zmq.zmq_poll([(item, zmq.POLLIN) for item in [*bulk, *others]], int(1000 * LOOK_S))
        came = [item for item, _ in ready]
        if self._ring.ready.descriptor in came:
            self._ring.ready.clear()
        return any(item in others for item in came)

    # Control.

    def _ask_commands(self) -> PendingRequest:
        self._asked_at = time.monotonic()
        own = (self._num_commands, self._token, 0)
        return self._control.ask(COMMANDS, lambda: [bytearray(HEADER.size)], own=own)

    def _take_commands(self) -> None:
        if self._asking.answer is None:
            return
        self._heard_at = self._asked_at
        commands: list[Command] = unpack(self._asking.answer, list[Command])
        for command in commands:
            self._num_commands += 1
            self._carry_out(command)
        self._asking = self._ask_commands()

    def _carry_out(self, command: Command) -> None:
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
        return replace(spec, config={**spec.config, **here}, log=str(self._log(spec.name)))

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def _send_report(self, function: Reported, text: str) -> None:
        self._events.append(Report(function, text))

    def _look_at_roles(self) -> None:
        for gone in take_exits(self._engine, self._node):
            self._roles[gone.name] = None
            self._events.append(self._describe(gone))
        for name, known in self._roles.items():
            pid = self._engine.pid(name)
            if pid is not None and pid != known:
                self._roles[name] = pid
                self._events.append(Started(name, pid))
        if time.monotonic() >= self._gauges_at:
            self._gauges_at = time.monotonic() + GAUGES_S
            for name in set(self._roles) - set(self._gauges):
                if (path := self._session / "gauges" / name).exists():
                    self._gauges[name] = open_segment(path)
            rows = {name: memory.tobytes() for name, memory in self._gauges.items()}
            self._control.post(GAUGES, question(rows), own=(0, self._token, 0))

    def _describe(self, gone: Exit) -> Ended:
        """How a role ended; with the end of its log, if that says why."""
        log, is_crash = "", not gone.failure and (gone.signal in CRASHES or not gone.signal)
        self._has_failed |= is_crash or gone.failure is not None
        if is_crash and self._log(gone.name).exists():
            log = self._log(gone.name).read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
        return Ended(gone.name, gone.pid, gone.code, gone.signal, gone.ended_with, log, gone.failure)

    def _send_events(self) -> None:
        if self._reporting is not None and self._reporting.answer is not None:
            self._reporting = None
        if self._reporting is None and self._events:
            events, self._events = self._events, []
            self._reporting = self._send(events)

    def _send(self, events: list[Event]) -> PendingRequest:
        self._event_number += 1
        make = functools.partial(question, events)
        return self._control.ask(EVENTS, make, number=self._event_number, own=(0, self._token, 0))

    def _check_links(self) -> None:
        silent_s = time.monotonic() - self._heard_at
        if silent_s > self._assignment.lease_s:
            self._engine.close(0.0)  # before anything else
            raise PeerLost(
                f"the run at {self.address} was not heard for {silent_s:.0f} s, so {self.name} has ended its roles: by "
                f"now they may be given to another host. {self._control.why_silent()}"
            )
        if not self._is_warned and not self._down.has_heard and self._down.silent_s > SILENT_S:
            self._is_warned = True
            text = (
                f"{self.name} reaches the run at {self.address}, but not its second port, {self._bulk}, to which "
                f"trajectories go: {self._down.why_silent()} --hosts.bulk-port fixes that port."
            )
            self.report(text)
            self._send_report("message", text)

    # Bulk.

    def _ask_newer(self) -> PendingRequest:
        version, granted = self._board.version, self._ring.granted.copy()

        def make() -> list[bytearray]:
            return [bytearray(HEADER.size) + granted.tobytes()]

        return self._down.ask(NEWER, make, own=(version, self._assignment.first, self._token))

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
        ring, left = self._ring, self._most_slots - sum(map(len, self._under_way))
        for stream, under_way in enumerate(self._under_way):
            while under_way and under_way[0].answer is not None:
                under_way.popleft()
                ring.release(stream)
                left += 1
            while left > 0 and len(under_way) < ring.num_ready(stream):
                left -= 1
                count = int(ring.released[stream]) + len(under_way)
                parts = self._slots.pack(ring.readable(stream, len(under_way))["slot"])
                message: list[Part] = [bytearray(HEADER.size), *parts]
                number = count * ring.num_streams + stream + 1
                own = (self._assignment.first + stream, count, self._token)
                under_way.append(self._up.ask(SLOTS, functools.partial(_same, message), number=number, own=own))

    # The end.

    def close(self, why: str = "") -> None:
        """Ends the roles, reports why this host leaves, and removes everything but the logs where a role failed."""
        with self._closing:
            if self._token:
                self._engine.close(0.0)
                self.over = self.over or why or "it was stopped"
                with contextlib.suppress(EchelonError):
                    self._control.wait(self._send([Left(self.over)]), GOODBYE_S)

    def _remove_logs(self) -> None:
        if not self._has_failed:
            shutil.rmtree(self._logs, ignore_errors=True)


def make_log_folder() -> Path:
    """A folder for the logs of this agent's roles; those of agents that are dead go."""
    for folder in Path(tempfile.gettempdir()).glob("echelon-host-*-*"):
        pid = folder.name.split("-")[2]
        if pid.isdecimal() and start_ticks(int(pid)) is None:
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"echelon-host-{os.getpid()}-"))


def _same(message: list[Part]) -> list[Part]:
    return message


def take_part(address: str, shm_dir: str, report: Reporter, name: str = "") -> str:
    """Joins the run at `address`, works for it until it is over or a signal comes, and says why it left."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    agent = Agent(address, shm_dir, report, name)
    try:
        why = agent.run()
    except EchelonError as error:
        agent.close(str(error))
        raise
    except BaseException:
        agent.close()
        raise
    agent.close(why)
    return why
