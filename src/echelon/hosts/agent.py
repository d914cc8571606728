"""The host agent: one process on each host that joins a run; it owns that host's shared memory and starts its roles.

Roles of this host see the agent as their coordinator: their world, ring and board are in its session. The agent waits
on commands and replies of the head, slots that its actors commit, exits, and reports of its roles. An agent that has
received no reply for a lease ends its roles, because the head then starts them elsewhere; if the connection recovers
earlier, nothing is restarted. If the agent is killed, the fork server ends its roles and removes its session.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import zmq

from echelon.control_groups import num_cores
from echelon.engines.local import LocalEngine
from echelon.engines.process import CRASHES, Exit, ProcessSpec
from echelon.errors import EchelonError, PeerLost, RunError
from echelon.hosts.bulk import Bulk
from echelon.hosts.cpus import own_cpus
from echelon.hosts.joining import describe_wait, own_address, why_lost, why_unfit
from echelon.hosts.logs import LogTails, make_log_folder
from echelon.hosts.messages import (
    COMMANDS,
    EVENTS,
    GAUGES,
    JOIN,
    MAX_BYTES,
    STORE,
    Assignment,
    Command,
    Dismiss,
    Ended,
    Event,
    JoinRequest,
    Left,
    Logged,
    Release,
    Report,
    Reported,
    Signal,
    Start,
    Started,
    request_frames,
    unpack,
)
from echelon.interrupts import Interrupts
from echelon.memory_check import check_fits, check_processes, free_memory
from echelon.status_file import StatusFile
from echelon.transport.channel import HEADER
from echelon.transport.channel_client import Client, PendingRequest
from echelon.transport.segments import open_segment
from echelon.transport.session import create_session
from echelon.version import __version__
from echelon.world.exits import take_exits
from echelon.world.node import Node

ASK_AGAIN_S = 0.2  # while the run is not ready
LOOK_S = 0.1
GAUGES_S = 0.25  # between two posts of the gauges of the roles
SILENT_S = 5.0  # without a reply, before the user is warned (of the carrier) and probes see it (of the run)
GOODBYE_S = 1.0
STORE_S = 4.0  # how long the head may take to reply to a learner that looks for the others
DRAIN_S = 3.0  # how long complete trajectories may take to be sent when this host leaves
Reporter = Callable[[str], None]


class Agent:
    """Takes part in the run at `address` (tcp://HOST:PORT) until it is over."""

    def __init__(self, address: str, shm_dir: str, report: Reporter, name: str = "", status_file: str = "") -> None:
        self.name, self.address, self.report = name or socket.gethostname(), address, report
        self.over = ""  # why this host leaves
        self._num_commands, self._event_number, self._num_stored = 0, 0, 0
        self._events: list[Event] = []
        self._reporting: PendingRequest | None = None
        self._roles: dict[str, int | None] = {}
        self._streams: dict[str, int] = {}  # of actors
        self._gauges: dict[str, np.ndarray[Any, Any]] = {}
        self._gauges_at = 0.0  # when gauges and logs are sent next
        self._has_failed = self._is_warned = False
        self._failures: dict[str, str] = {}  # of roles that the head has not started again
        self._joining: PendingRequest | None = None
        self._preloading: LocalEngine | None = None  # the engine, from the first reply of the head on
        self._closing = contextlib.ExitStack()  # closes in the reverse order of creation
        try:
            self._interrupts = self._closing.enter_context(Interrupts())
            self._status = StatusFile(status_file)
            self._closing.callback(self._status.remove)
            self._control = self._connect("the run", address, MAX_BYTES, queued=8)
            self._closing.callback(self._control.close)
            self._session = create_session(shm_dir)
            self._closing.callback(shutil.rmtree, self._session, ignore_errors=True)
            self._logs = make_log_folder()
            self._tails = LogTails(self._logs)
            self._closing.callback(self._remove_logs)
        except BaseException:
            self._closing.close()
            raise

    def _connect(self, what: str, address: str, max_bytes: int, **options: Any) -> Client:
        name = b"h" + os.urandom(15)  # by this name the head recognizes the agent after a reconnect
        return Client(what, address, max_bytes, name=name, **options)

    def join(self) -> None:
        """Joins the run and waits until it is ready, or over; raises Refused if the run takes no more hosts.

        Meanwhile the fork server of this host preloads modules.
        """
        request, state = JoinRequest(__version__, self.name, num_cores(), own_cpus()), ""
        while True:
            self._joining = self._control.ask(JOIN, functools.partial(request_frames, request))
            while not self._control.wait(self._joining, LOOK_S):
                self._tick()
                if self._control.silent_s > 1.0 and state != "silent":
                    state = "silent"
                    self.report(f"waiting for the run at {self.address}: {self._control.why_silent()}")
            assert self._joining.answer is not None
            assignment: Assignment = unpack(self._joining.answer, Assignment)
            self._status.report(joined=bool(assignment.name))
            if assignment.over:  # a short run may end before this host has its first role
                self.over = assignment.over
                return
            if self._preloading is None:
                self._preloading = LocalEngine(str(self._session), assignment.preload)
                self._closing.callback(self._preloading.close, 0.0)
            if assignment.check and not request.is_checked:
                self.report(f"checking whether this host can run the actors of {self.address}")
                check = ProcessSpec(**{**assignment.check, "log": str(self._tails.path("check"))})
                request.failure = why_unfit(self._preloading, check, self._tick)
                request.is_checked = not request.failure
                continue
            if not assignment.wait:
                self._make(assignment, self._preloading)
                return
            if state != (state := describe_wait(self.address, assignment)):
                self.report(state)
            time.sleep(ASK_AGAIN_S)
            self._interrupts.check()

    def _tick(self) -> None:
        self._status.report(joined=False)
        self._interrupts.check()

    def _make(self, assignment: Assignment, engine: LocalEngine) -> None:
        session, num = self._session, assignment.num_actors
        self.name, self._assignment, self._engine = assignment.name, assignment, engine
        self._check_memory(num)
        host, port = self.address.rpartition(":")[0], assignment.bulk.rpartition(":")[2]
        self._bulk: Bulk | None = None
        self._hostname = "" if assignment.has_bulk else own_address(self.address)  # where other learners reach this one
        if assignment.has_bulk:
            self._bulk = Bulk(session, assignment, f"{host}:{port}", self._connect)
            self._closing.callback(self._bulk.close)
        self._node = Node.host(f"ipc://{session}/world")
        self._closing.callback(self._node.close)
        self._node.serve("store", self._ask_store)
        self._node.serve("message", functools.partial(self._send_report, "message"))
        self._node.serve("env_restarted", functools.partial(self._send_report, "env_restarted"))
        self._asked_at = self._heard_at = time.monotonic()  # `_heard_at`: send time of the newest answered request
        self._asking = self._ask_commands()
        actors = f"{num} actor{'s' * (num != 1)}"
        self.report(f"{self.name} takes part with {actors}; the logs of its roles are in {self._logs}")

    def _check_memory(self, num_actors: int) -> None:
        """Raises ConfigError unless so many actors fit into the memory of this host."""
        check_processes(num_actors + bool(self._assignment.act_bytes), free_memory())
        memory, what = free_memory(self._session.parent), "this host's share of the run"
        size = Bulk.size(self._assignment, num_actors) + self._assignment.streams * self._assignment.act_bytes
        check_fits(size, what, memory, "--actors or --envs-per-actor")

    def run(self) -> str:
        """Works until the run is over or this host must leave it; returns the reason."""
        looked_at = time.monotonic()
        while not self.over:
            self._interrupts.check()
            is_control = self._sleep()
            if self._bulk is not None:
                self._bulk.work()
            if is_control or time.monotonic() >= looked_at + LOOK_S:  # slots are frequent, everything else is rare
                before, looked_at = looked_at, time.monotonic()
                self._node.poll(0.0)
                self._control.poll()
                self._take_commands()
                self._look_at_roles()
                self._send_events()
                self._check_links(looked_at - before)
        return self.over

    def _sleep(self) -> bool:
        """Waits for work; returns whether any of it is not bulk traffic (slots, weights and their replies)."""
        bulk, others = self._bulk.watched if self._bulk else [], [item for item, _ in self._node.watched]
        others += [self._control.socket, *self._engine.descriptors]
        ready = zmq.zmq_poll([(item, zmq.POLLIN) for item in [*bulk, *others]], int(1000 * LOOK_S))
        came = [item for item, _ in ready]
        if self._bulk is not None:
            self._bulk.clear_doorbell(came)
        return any(item in others for item in came)

    # Control.

    def _ask_commands(self) -> PendingRequest:
        self._asked_at = time.monotonic()
        own = (self._num_commands, 0, 0)
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
            case Start(spec, stream, slot, token):
                if self._bulk is not None and stream is not None and slot is not None:
                    check_processes(1, free_memory())
                    self._bulk.adopt(stream, slot, token)
                    self._streams[spec["name"]] = stream
                self._engine.start(self._local(ProcessSpec(**spec)))
                self._roles.setdefault(spec["name"], None)
                self._failures.pop(spec["name"], None)
            case Signal(name, number):
                self._engine.signal(name, number)
            case Release(name):
                self._engine.signal(name, signal.SIGKILL)
                self._failures.pop(name, None)
                if self._bulk is not None and name in self._streams:
                    self._bulk.drop(self._streams.pop(name))
            case Dismiss(why) if self._failures:
                name, cause = next(iter(self._failures.items()))
                raise RunError(f"{why}: {name} of this host {cause}")
            case Dismiss(why):
                self.over = why

    def _local(self, spec: ProcessSpec) -> ProcessSpec:
        """Returns `spec` with the session, address and folders of this host."""
        here = {
            "session": str(self._session),
            "address": self._node.address,
            "run_dir": str(self._logs),
            "hostname": self._hostname,
            "is_at_head": False,
        }
        return replace(spec, config={**spec.config, **here}, log=str(self._tails.path(spec.name)))

    def _send_report(self, function: Reported, text: str) -> None:
        self._events.append(Report(function, text))

    def _ask_store(self, *operation: Any) -> Any:
        """Passes an operation of a learner on the store to the head, and waits for the result."""
        self._num_stored += 1
        request = self._control.ask(STORE, functools.partial(request_frames, operation), number=self._num_stored)
        if not self._control.wait(request, STORE_S):
            self._control.forget(request)
            raise PeerLost(f"the run at {self.address} has not replied for {STORE_S:g} s.")
        assert request.answer is not None
        return unpack(request.answer, Any)

    def _look_at_roles(self) -> None:
        for gone in take_exits(self._engine, self._node):
            self._roles[gone.name] = None
            self._send_log(gone.name)
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
            self._control.post(GAUGES, request_frames(rows))
            for name in self._roles if self._reporting is None else ():  # else the link is slow: later
                self._send_log(name)

    def _send_log(self, name: str) -> None:
        if text := self._tails.new(name):
            self._events.append(Logged(name, text))

    def _describe(self, gone: Exit) -> Ended:
        """Returns how a role ended."""
        is_finished = not gone.code and gone.name.startswith("learner-")  # with the first learner
        is_crash = not gone.failure and (gone.signal in CRASHES or not gone.signal) and not is_finished
        if is_crash or gone.failure is not None:
            self._has_failed, self._failures[gone.name] = True, gone.cause.partition("\n")[0]
        return Ended(gone.name, gone.pid, gone.code, gone.signal, gone.ended_with, gone.failure)

    def _send_events(self) -> None:
        if self._reporting is not None and self._reporting.answer is not None:
            self._reporting = None
        if self._reporting is None and self._events:
            events, self._events = self._events, []
            self._reporting = self._send(events)

    def _send(self, events: list[Event]) -> PendingRequest:
        self._event_number += 1
        make = functools.partial(request_frames, events)
        return self._control.ask(EVENTS, make, number=self._event_number)

    def _check_links(self, away_s: float) -> None:
        """Raises PeerLost if there was no reply for a lease; `away_s` is the time since the last look."""
        lease_s, silent_s = self._assignment.lease_s, time.monotonic() - self._heard_at
        self._status.report(joined=silent_s < SILENT_S)
        if silent_s > lease_s:
            self._engine.close(0.0)  # before anything else
            raise PeerLost(why_lost(self.name, self.address, lease_s, silent_s, away_s))
        if self._bulk is not None and not self._is_warned and (why := self._bulk.why_unreached(SILENT_S)):
            self._is_warned = True
            text = (
                f"{self.name} reaches the run at {self.address}, but not its second port, {self._bulk.address}, to "
                f"which trajectories go: {why} Set that port with --hosts.bulk-port, and open it."
            )
            self.report(text)
            self._send_report("message", text)

    # The end.

    def interrupt(self) -> str:
        """Leaves because the user asked to; returns what the run does."""
        num = sum(pid is not None and name.startswith("actor-") for name, pid in self._roles.items())
        actors = f": ending {num} actor{'s' * (num > 1)} (Ctrl-C again: leave immediately)" if num else ""
        self.report(f"leaving{actors}")
        if self.close("it was stopped", drain_s=DRAIN_S):
            return "the run goes on without this host" if self._roles else "the run waits for another host"
        return "the run did not reply; it gives this host up after the lease" if self._roles else "no run was joined"

    def close(self, why: str, drain_s: float = 0.0) -> bool:
        """Ends the roles, reports to the head why this host leaves, and removes everything but the logs of failures.

        Before the report, complete trajectories are sent for up to `drain_s`. Returns whether the head has acknowledged
        the report. A KeyboardInterrupt meanwhile kills the roles, but does not skip it: without it the head would wait
        a lease for this host.
        """
        self.over = self.over or why
        with self._closing:
            try:
                if self._preloading is not None:
                    self._preloading.close(0.0)
                if drain_s and self._streams and self._bulk is not None:
                    self._drain(self._bulk, drain_s)
            except KeyboardInterrupt:
                if self._preloading is not None:
                    self._preloading.kill()
            return self._say_goodbye()

    def _drain(self, bulk: Bulk, timeout_s: float) -> None:
        with contextlib.suppress(EchelonError):  # the carrier refuses this host
            if left := bulk.drain(timeout_s):
                self.report(f"{left} trajector{'ies' if left > 1 else 'y'} could not be sent within {timeout_s:g} s")

    def _say_goodbye(self) -> bool:
        if self._joining is None:
            return False
        self._control.forget(self._joining)  # a repetition would join again
        for name in self._roles:
            self._send_log(name)
        patience_s = GOODBYE_S if self._control.has_heard else 0.0
        try:
            return self._control.wait(self._send([*self._events, Left(self.over)]), patience_s)
        except (EchelonError, KeyboardInterrupt):  # the run does not know this host, or is over; or the user insists
            return False

    def _remove_logs(self) -> None:
        if self._has_failed:
            self.report(f"logs kept in {self._logs}")
        else:
            shutil.rmtree(self._logs, ignore_errors=True)


def take_part(address: str, shm_dir: str, report: Reporter, name: str = "", status_file: str = "") -> str:
    """Joins the run at `address` and works for it until it is over or a signal comes; returns why it left."""
    agent = Agent(address, shm_dir, report, name, status_file)
    try:
        agent.join()
        why = agent.run()
    except KeyboardInterrupt:
        return agent.interrupt()
    except BaseException as error:
        agent.close(str(error))
        raise
    agent.close(why)
    return why
