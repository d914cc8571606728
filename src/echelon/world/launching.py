"""launch: runs a function in several processes of one world, and returns the results."""

from __future__ import annotations

import dataclasses
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from echelon.engines.local import COMPILER, LocalEngine
from echelon.engines.process import INHERITED, Exit, ProcessSpec
from echelon.errors import ConfigError, EchelonError, PeerLost, RpcException
from echelon.transport.codec import encode
from echelon.transport.session import create_session
from echelon.world.address import check_name
from echelon.world.entrance import HOST_SOCKET, LIMITS, SHM_DIR
from echelon.world.exits import take_exits
from echelon.world.functions import MAIN, name_of
from echelon.world.launched import Script, is_loading
from echelon.world.messages import Deferred
from echelon.world.node import Node
from echelon.world.ray_members import RayMembers
from echelon.world.registry import Registry
from echelon.world.watch import write_info

HOST = "launcher:host"  # the name of the launcher's node, which is not a member of the world
PRELOAD = ("torch", "echelon.world.launched", "echelon.world.collective_group")
LIKELY = {"gymnasium": "gymnasium", "echelon.frames": "echelon.frames", "echelon.servers.starting": COMPILER}
LOOK_S = 0.2
GRACE_S = 5.0  # how long a member may run after the world has ended
FAILED_GRACE_S = 1.0  # the same after a failure
TERMINATE_S = 2.0  # how long a member may run after SIGTERM


def launch(
    fn: Callable[..., Any],
    world_size: int,
    args: Sequence[Any] = (),
    engine: str = "local",
    *,
    address: str = "",
    timeout_s: float = 60.0,
    names: Sequence[str] | None = None,
) -> list[Any]:
    """Calls `fn(world, *args)` in `world_size` processes; returns their results in rank order.

    They are processes of this machine, or, with `engine="ray"`, of the nodes of the Ray cluster at `address` ("auto" or
    HOST:PORT): equal parts in rank order, the first on this node. Without an address, a Ray of this machine is started.

    A member whose function has returned serves the others until all have returned. `exit(0)` in a member ends the
    world: blocking calls of the others raise WorldStopped, and the result of a member that did not return is None. A
    failure of a member stops the others and is raised here, as RpcException with the remote traceback, or as PeerLost
    with the member and the signal that ended it. `names` are the names of the ranks, by default "0", "1" and so on.
    However it ends, `launch` leaves no processes or files behind.
    """
    if engine not in ("local", "ray"):
        raise ConfigError(
            f'there is no engine {engine!r} for launch: use "local", processes of this machine, or "ray", processes of '
            "the nodes of a Ray cluster."
        )
    if address and engine != "ray":
        raise ConfigError(f'address={address!r} is that of a Ray cluster: use it with engine="ray".')
    if is_loading():
        raise ConfigError(
            "launch() was called in one of its own processes while that loaded the script, so it would launch "
            'processes forever. Put the call under `if __name__ == "__main__":`.'
        )
    members = [str(rank) for rank in range(world_size)] if names is None else list(names)
    _check(world_size, members)
    try:
        encode(tuple(args), LIMITS)
    except ConfigError as error:
        raise ConfigError(f"args of launch() cannot be sent to its processes: {error}") from None
    function, script = name_of(fn), Script.of_this_process()
    if function.startswith(MAIN[0]) and not Path(script.path).is_file():
        raise ConfigError(
            f"{fn.__name__}() was not read from a file, so no other process can load it. Save it in a .py file, and "
            "run or import that file."
        )
    run = Launch(members, tuple(args), timeout_s, address if engine == "ray" else None)
    try:
        run.start(function, script)
        while not run.is_over:
            run.step()
    finally:
        run.close()
    return run.results()


def _preload() -> tuple[str, ...]:
    """Returns the modules to preload: the basics, plus those that go with modules the caller has already imported."""
    return (*PRELOAD, *(module for sign, module in LIKELY.items() if sign in sys.modules))


def _check(world_size: int, names: list[str]) -> None:
    if world_size < 1 or len(names) != world_size or len(set(names)) < world_size:
        raise ConfigError(
            f"launch() needs a world_size of at least 1 and as many distinct names; got {world_size} and {names}."
        )
    for name in names:
        check_name(name)


class Launch:
    """One launch: its processes, its host, and their results; runs in the launcher's thread.

    The processes are on this machine unless there is a `ray_address` ("": a Ray of this machine alone).
    """

    def __init__(self, members: list[str], args: tuple[Any, ...], timeout_s: float, ray_address: str | None) -> None:
        self._members, self._args, self._timeout_s = members, args, timeout_s
        self._results: dict[str, Any] = {}
        self._returned: list[Deferred] = []
        self._left: set[str] = set()
        self._failure: EchelonError | None = None
        self._deadline = 0.0  # after the end of the world: when the remaining processes are terminated
        self._engine: LocalEngine
        self._session = create_session(SHM_DIR)
        try:
            session, address = str(self._session), f"ipc://{self._session}/{HOST_SOCKET}"
            if ray_address is None:
                self._engine = LocalEngine(session, _preload())
            else:
                self._engine = RayMembers(session, _preload(), ray_address, len(members), timeout_s)
                address = self._engine.address
            info = write_info(-1, 0, self._session)  # lets the members watch this process
            self._node = Node.host(address, HOST, limits=LIMITS, info=info.to_wire())
        except BaseException:
            self.close()
            raise
        self._registry = Registry(self._node, len(members), frozenset(members))
        self._node.on_lost = self._registry.on_lost
        self._node.serve("task", lambda: self._args)
        self._node.serve("result", self._on_result)
        self._node.serve("failed", self._on_failed)
        self._node.serve("ended", lambda why: None)

    def start(self, function: str, script: Script) -> None:
        """Starts the processes."""
        for rank, name in enumerate(self._members):
            entrance = {
                "name": name,
                "rank": rank,
                "size": len(self._members),
                "address": self._node.address,
                "timeout_s": self._timeout_s,
            }
            config = {
                "entrance": entrance,
                "script": dataclasses.asdict(script),
                "function": function,
                "argv": sys.argv,
            }
            spec = ProcessSpec(name, "echelon.world.launched:MemberRole", config, log=INHERITED, ends_by_signals=True)
            self._engine.start(spec)
        if isinstance(self._engine, RayMembers):
            self._engine.serve(self._node, function, script.path)

    def _on_result(self, name: str, value: Any) -> Deferred:
        self._results[name] = value
        answer = Deferred()
        self._returned.append(answer)
        if len(self._results) == len(self._members):
            for returned in self._returned:
                returned.settle(None)
        return answer

    def _on_failed(self, name: str, kind: str, message: str, traceback: str) -> None:
        """Records the failure that a member reports before it leaves.

        A PeerLost is ignored: the exit of the lost peer has more details.
        """
        if not self._registry.ended and kind != PeerLost.__name__:
            self._fail(RpcException(f"{self._who(name)} failed with {kind}: {message}", kind, traceback))

    def _fail(self, failure: EchelonError) -> None:
        self._failure = failure
        self._registry.end(str(failure.args[0]))

    def _who(self, name: str, pid: int | None = None) -> str:
        member = self._node.member(name)
        process = pid or (member.pid if member else self._engine.pid(name))
        place = f" on {node}" if (node := self._engine.place(name)) else ""
        return f"{name!r} (rank {self._members.index(name)}, process {process}{place})"

    @property
    def is_over(self) -> bool:
        return len(self._left) == len(self._members)

    def step(self) -> None:
        """Waits up to LOOK_S for events and handles them."""
        self._node.poll(LOOK_S, [*self._engine.descriptors, *self._registry.watch.descriptors])
        for gone in take_exits(self._engine, self._node):
            self._on_exit(gone)
        self._registry.watch.look()
        if self._registry.ended and not self._deadline:
            self._deadline = time.monotonic() + (FAILED_GRACE_S if self._failure else GRACE_S)
        if self._deadline and time.monotonic() >= self._deadline:
            for name in set(self._members) - self._left:
                self._engine.signal(name, signal.SIGTERM)
            self._engine.close(TERMINATE_S)
            self._left.update(self._members)

    def _on_exit(self, gone: Exit) -> None:
        self._left.add(gone.name)
        if self._registry.ended:
            return
        who = self._who(gone.name, gone.pid)
        if gone.failure is not None:  # it failed before it could report the failure
            text = f"{who} failed with {gone.failure.kind}: {gone.failure.message}"
            self._fail(RpcException(text, gone.failure.kind, gone.failure.traceback))
        elif gone.ended_with:
            self._fail(PeerLost(f"{gone.ended_with}, and every member with it."))
        elif gone.signal or gone.code or gone.name not in self._results:
            what = "" if gone.signal or gone.name in self._results else " without a result"
            self._fail(PeerLost(f"{who} {gone.cause}{what}; the others were stopped."))

    def results(self) -> list[Any]:
        """Returns the results in rank order; raises the failure that ended the launch, if there is one."""
        if self._failure is not None:
            raise self._failure
        return [self._results.get(name) for name in self._members]

    def close(self) -> None:
        """Ends the processes that still run, and removes the session folder."""
        if engine := getattr(self, "_engine", None):
            engine.close(0.0)
        if node := getattr(self, "_node", None):
            node.close()
            self._registry.watch.close()
        shutil.rmtree(self._session, ignore_errors=True)
