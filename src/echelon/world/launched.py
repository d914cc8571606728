"""The process that `launch` starts: it enters the world, runs the function, and serves until all are done."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from typing import Any

from echelon.engines.process import failure_of
from echelon.errors import ConfigError, EchelonError, RunError, WorldStopped
from echelon.transport.codec import encode
from echelon.world.entrance import LIMITS, Entrance
from echelon.world.functions import MAIN
from echelon.world.node import Node
from echelon.world.watch import NO_INFO
from echelon.world.world import World, get_world

REPORT_S = 5.0  # how long the host may take to accept the report of a failure

_loading = False


def is_loading() -> bool:
    """Whether this process is running the script of its launcher, to define its functions."""
    return _loading


@dataclass(frozen=True, slots=True)
class Script:
    """The program's script: its file, and the package in which it runs."""

    path: str
    package: str

    @classmethod
    def of_this_process(cls) -> Script:
        main = sys.modules[MAIN[0]]
        return cls(str(getattr(main, "__file__", None) or ""), str(getattr(main, "__package__", None) or ""))

    def load(self) -> None:
        """Runs the script as `__mp_main__`, as multiprocessing does; both names then refer to its module."""
        global _loading
        loader = SourceFileLoader(MAIN[1], self.path)
        spec = importlib.util.spec_from_file_location(MAIN[1], self.path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        module.__package__ = self.package
        sys.modules[MAIN[0]] = sys.modules[MAIN[1]] = module
        _loading = True
        try:
            loader.exec_module(module)
        finally:
            _loading = False


class MemberRole:
    """Runs the launched function as the only step of its process."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.finished = False
        self._entrance = Entrance(**config["entrance"], launched=True)
        self._script, self._path, self._argv = Script(**config["script"]), str(config["function"]), config["argv"]

    def step(self, timeout_s: float) -> bool:
        del timeout_s
        self.finished = True
        sys.argv[:] = self._argv
        if self._script.path:
            self._script.load()
        module = self._path.partition(":")[0]
        if module != MAIN[0]:
            importlib.import_module(module)
        world = World.launched(self._entrance, module)
        with contextlib.suppress(WorldStopped):  # another member ended the world
            self._run(world)
        return True

    def _run(self, world: World) -> None:
        args = world.control("task")
        try:
            value = world.scope.function(self._path)(world, *args)
        except WorldStopped:
            raise
        except SystemExit as end:
            if end.code not in (0, None):
                error = RunError(f"{world.name!r} (rank {world.rank}) called exit({end.code!r}).")
                _report(world, error)
                raise error from None
            if get_world() is world:  # else the function has left the world itself
                world.end(f"{world.name!r} called exit(0)")
            return
        except BaseException as error:
            _report(world, error)
            raise
        try:
            encode(value, LIMITS)
        except ConfigError as error:
            unsendable = ConfigError(f"what {self._path}() returned in {world.name!r} cannot be sent: {error}")
            _report(world, unsendable)
            raise unsendable from None
        if get_world() is world:
            world.control("result", world.name, value, timeout_s=threading.TIMEOUT_MAX)
            world.stop()
        else:  # the function stopped it
            courier = f"{world.name}:result"
            address = self._entrance.address
            with Node.join(address, courier, timeout_s=world.timeout_s, limits=LIMITS, info=NO_INFO.to_wire()) as node:
                node.call(node.host_name, "result", world.name, value, timeout_s=threading.TIMEOUT_MAX)

    def close(self) -> None:
        if world := get_world():
            world.stop()


def _report(world: World, error: BaseException) -> None:
    """Ends the world with `error` as the reason, before this process exits and the others see only its exit."""
    if get_world() is world:
        with contextlib.suppress(EchelonError, WorldStopped):  # another member failed first
            failure = failure_of(error)
            world.control("failed", world.name, failure.kind, failure.message, failure.traceback, timeout_s=REPORT_S)
