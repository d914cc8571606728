"""Members of a launch on a Ray cluster: one actor of Ray on every other node starts that node's members.

Ray does nothing finer: it starts the actors, and reports the nodes that are gone. An actor takes the members of its
node from the launcher, starts them with a local engine, and sends their exits and what they print to the launcher. If
the launcher is killed, Ray ends its actors, and their fork servers end the members.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from echelon.engines.local import LocalEngine
from echelon.engines.process import Exit, Failure, ProcessSpec
from echelon.engines.ray_cluster import RayCluster
from echelon.errors import ConfigError, EchelonError, PeerLost, escaped
from echelon.transport.session import create_session
from echelon.world.entrance import LIMITS, SHM_DIR
from echelon.world.functions import MAIN
from echelon.world.node import Node
from echelon.world.watch import NO_INFO

STARTER = "launcher:on-"  # before the name of a node: its actor among the peers of the launcher
LOOK_S = 0.1
JOIN_S = 20.0
TERMINATE_S = 2.0  # how long a member may run after SIGTERM
LEAVE_S = 5.0  # how long an actor may take to leave after its members
PRINTED_BYTES = 1 << 16


class RayMembers(LocalEngine):
    """Starts `num` members: equal parts, in the order of the ranks, on this node and on others of the cluster."""

    def __init__(self, session: str, preload: Sequence[str], address: str, num: int, timeout_s: float) -> None:
        self._cluster = RayCluster(address, Path(session) / "ray.log")
        try:
            super().__init__(session, preload)
        except BaseException:
            self._cluster.close()
            raise
        self._num, self._num_parts, self._timeout_s = num, min(num, self._cluster.num_nodes), timeout_s
        self._parts: dict[int, list[ProcessSpec]] = {part: [] for part in range(1, self._num_parts)}  # not yet taken
        self._num_started = 0
        self._places: dict[str, str] = {}  # member of another node -> that node
        self._left: set[str] = set()  # those that have ended
        self._unfit: set[str] = set()  # nodes that take no part
        self._far_exits: list[Exit] = []
        self._node: Node | None = None

    @property
    def address(self) -> str:
        """Where the launcher listens: the address of this node in the cluster."""
        return f"tcp://{self._cluster.ip}:0"

    @property
    def descriptors(self) -> list[int]:
        return [*super().descriptors, *self._cluster.descriptors]

    def serve(self, node: Node, function: str, script: str) -> None:
        """Starts the actors, which report to `node`, the launcher's; members call `function` of the file `script`."""
        self._node = node
        self._deadline = time.monotonic() + self._timeout_s
        node.serve("members", self._on_members)
        node.serve("exited", self._on_exited)
        node.serve("printed", _print)
        arguments = {"address": node.address, "preload": self._preload, "function": function, "script": script}
        self._cluster.start(f"{__name__}:run_members", arguments)

    def start(self, spec: ProcessSpec) -> None:
        part = self._num_started * self._num_parts // self._num
        self._num_started += 1
        if part:
            self._parts[part].append(spec)
        else:
            super().start(spec)

    def place(self, name: str) -> str:
        return self._places.get(name, "")

    def _on_members(self, node: str) -> list[dict[str, Any]]:
        """Gives the next part to a node; nothing if all parts are taken."""
        specs = self._parts.pop(min(self._parts)) if self._parts else []
        self._places |= {spec.name: node for spec in specs}
        return [dataclasses.asdict(spec) for spec in specs]

    def _on_exited(self, fields: dict[str, Any]) -> None:
        failure = fields.pop("failure")
        self._end(Exit(**fields, failure=Failure(**failure) if failure else None))

    def _end(self, gone: Exit) -> None:
        if gone.name in self._places and gone.name not in self._left:
            self._left.add(gone.name)
            self._far_exits.append(gone)

    def _lose(self, node: str, how: str) -> None:
        """Ends the members of a node."""
        for name in [name for name, place in self._places.items() if place == node]:
            self._end(Exit(name, 0, -1, int(signal.SIGKILL), ended_with=how))
        if self._node is not None and self._node.member(STARTER + node):
            self._node.forget(STARTER + node, how)

    def _look(self) -> None:
        """Handles what Ray reports; raises ConfigError if too few nodes can take part."""
        for event in self._cluster.events():
            if event["event"] == "failed":
                how = f"the connection to the Ray cluster was lost ({escaped(event['text'])})"
                for node in set(self._places.values()):
                    self._lose(node, how)
                if self._parts:
                    raise PeerLost(f"{how} before its nodes had started their members.")
                continue
            node, why = event["node"], escaped(event["why"]).rstrip(".")
            self._lose(node, f"the Ray node {node} was lost ({why})")
            if node not in self._places.values():
                self._unfit.add(node)
            if self._parts and len(self._unfit) > self._cluster.num_nodes - self._num_parts:
                raise ConfigError(f"the Ray node {node} cannot run members of launch(): {why}.")

    def exits(self) -> list[Exit]:
        self._look()
        if self._parts and time.monotonic() > self._deadline:
            raise ConfigError(
                f"{len(self._parts)} nodes of the Ray cluster have not started members of launch() within "
                f"{self._timeout_s:g} s. Each needs a free CPU: see `ray status`, or raise timeout_s."
            )
        exits, self._far_exits = self._far_exits, []
        return exits + super().exits()

    def signal(self, name: str, number: int) -> None:
        """Signals a member of this node; actors end theirs when this engine closes."""
        if name not in self._places:
            super().signal(name, number)

    def close(self, timeout_s: float) -> None:
        """Ends all members, and waits until nothing of them is left on any node."""
        self._parts.clear()
        node, self._node = self._node, None
        if node is not None:
            for name in _starters(node):
                node.post(name, "leave")
        super().close(timeout_s)
        if node is not None:
            deadline = time.monotonic() + TERMINATE_S + LEAVE_S
            while _starters(node) and self._cluster.descriptors and time.monotonic() < deadline:
                node.poll(LOOK_S, self._cluster.descriptors)
                self._look()
        self._cluster.close()


def _starters(node: Node) -> list[str]:
    return [name for name in node.members if name.startswith(STARTER)]


def _print(text: bytes) -> None:
    sys.stdout.write(text.decode(errors="replace"))
    sys.stdout.flush()


# In an actor of Ray, on another node.


def run_members(address: str, preload: list[str], function: str, script: str, name: str) -> dict[str, Any]:
    """Runs the members of the node `name` until all have ended, or until the launcher ends them."""
    why = "its members have ended"
    try:
        _check_program(function, script)
        with Node.join(address, STARTER + name, timeout_s=JOIN_S, limits=LIMITS, info=NO_INFO.to_wire()) as node:
            if specs := [ProcessSpec(**spec) for spec in node.call(node.host_name, "members", name)]:
                _NodeMembers(node).run(preload, specs)
    except EchelonError as error:
        why = str(error)
    return {"why": why, "again": False}


def _check_program(function: str, script: str) -> None:
    """Raises ConfigError if this node lacks the script or the module of the launched function."""
    module = function.partition(":")[0]
    missing = f"the file {script}" if script and not Path(script).is_file() else ""
    try:
        if module != MAIN[0] and importlib.util.find_spec(module) is None:
            missing = f"the module {module}"
    except ImportError:  # of its package
        missing = f"the module {module}"
    if missing:
        raise ConfigError(f"{missing} is not there. It must be at the same place on every node, or installed.")


class _NodeMembers:
    """The members of this node."""

    def __init__(self, node: Node) -> None:
        self._node, self._is_over = node, False
        node.on_lost = lambda member, why: self._leave() if member.name == node.host_name else None
        node.serve("leave", self._leave)
        node.serve("ended", lambda why: None)  # members are told, too, and leave by themselves

    def _leave(self) -> None:
        self._is_over = True

    def run(self, preload: list[str], specs: list[ProcessSpec]) -> None:
        session = create_session(SHM_DIR)
        output, end = os.pipe()
        os.set_blocking(output, False)
        try:
            with _standard_output(end):
                engine = LocalEngine(str(session), preload)
            os.close(end)
            try:
                self._follow(engine, specs, output)
            finally:
                engine.close(TERMINATE_S)
                self._send_printed(output)
        finally:
            os.close(output)
            shutil.rmtree(session, ignore_errors=True)

    def _follow(self, engine: LocalEngine, specs: list[ProcessSpec], output: int) -> None:
        running = {spec.name for spec in specs}
        for spec in specs:
            engine.start(spec)
        while running and not self._is_over:
            self._node.poll(LOOK_S, [*engine.descriptors, output])
            self._send_printed(output)
            for gone in engine.exits():
                running.discard(gone.name)
                self._node.call(self._node.host_name, "exited", dataclasses.asdict(gone))
        for name in running:
            engine.signal(name, signal.SIGTERM)

    def _send_printed(self, output: int) -> None:
        with contextlib.suppress(BlockingIOError, EchelonError):
            while text := os.read(output, PRINTED_BYTES):
                self._node.call(self._node.host_name, "printed", text)


@contextlib.contextmanager
def _standard_output(descriptor: int) -> Iterator[None]:
    """Makes `descriptor` the standard output and error of processes that are started in this context."""
    own = {number: os.dup(number) for number in (1, 2)}
    for number in own:
        os.dup2(descriptor, number)
    try:
        yield
    finally:
        for number, saved in own.items():
            os.dup2(saved, number)
            os.close(saved)
