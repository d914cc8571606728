"""Starts the members of a world without `launch`, each running a program, and collects their outcomes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from multiprocessing.forkserver import ensure_running
from typing import Any
from unittest.mock import patch

from echelon.world import World
from running import TESTS

PATIENCE_S = 120.0  # a bound on what should take milliseconds, on a machine that may be busy
TIMEOUT_S = 60.0  # of the worlds
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["world_programs", "world_faults", "echelon.world.world", "frozen"])
SEARCHED = [str(TESTS.parent / "src"), str(TESTS), str(TESTS / "distributed")]


@dataclass
class Outcome:
    """The outcome of one member."""

    process: ForkServerProcess
    pipe: Connection
    value: Any = None
    error: str = ""

    def collect(self) -> Outcome:
        """Waits until the member has ended."""
        if self.pipe.poll(PATIENCE_S):
            with contextlib.suppress(EOFError):  # it was killed
                self.value, self.error = self.pipe.recv()
        self.process.join(PATIENCE_S)
        return self


def attend(entrance: tuple[Any, ...], program: Callable[..., Any], args: tuple[Any, ...], pipe: Connection) -> None:
    """Creates a World, runs a program in it, and reports its outcome."""
    try:
        name, rank, size, address = entrance
        world = World(name, rank, size, address, timeout_s=TIMEOUT_S)
        value = program(world, *args)
    except Exception as error:
        pipe.send((None, f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from None
    pipe.send((value, ""))


def ensure_forkserver() -> None:
    """Starts the fork server, unless it runs: it ignores what this process searches for the modules to preload."""
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join([*SEARCHED, os.environ.get("PYTHONPATH", "")])):
        ensure_running()


@contextlib.contextmanager
def started(
    program: Callable[..., Any], size: int = 2, args: tuple[Any, ...] = (), address: str = "", guests: int = 0
) -> Iterator[list[Outcome]]:
    """Starts the members of a world, and guests without a rank, each running `program`; ends all of them afterwards."""
    ensure_forkserver()
    members = []
    entrances = [(f"m{rank}", rank, size, address) for rank in range(size)]
    entrances += [(f"guest{i}", -1, -1, address) for i in range(guests)]
    try:
        for entrance in entrances:
            here, there = FORKSERVER.Pipe()
            process = FORKSERVER.Process(target=attend, args=(entrance, program, args, there))
            process.start()
            there.close()
            members.append(Outcome(process, here))
        yield members
    finally:
        for member in members:
            member.process.kill()
            member.process.join()
            member.process.close()
            member.pipe.close()


def run(program: Callable[..., Any], size: int = 2, args: tuple[Any, ...] = ()) -> list[Any]:
    """Returns the results of `program` in all members of a world; raises the error of a member that failed."""
    with started(program, size, args) as members:
        outcomes = [member.collect() for member in members]  # all of them: the first error may follow from another's
        failed = [(one.error, one.process.exitcode) for one in outcomes if one.error or one.process.exitcode]
        assert not failed, failed
        return [outcome.value for outcome in outcomes]
