"""The coordinator of `--transport shm` and `tcp`: starts the agent and the observers, lets them go, reads the results.

It waits for the agent to say that a phase can begin, and for the end of all. A process that fails or dies ends the run
with its error; whatever ends the run, no process and no shared memory is left.
"""

from __future__ import annotations

import dataclasses
import functools
import select
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from echelon import errors
from echelon.bench.rpc.results import JOIN, MEASURE, WARM_UP, Results, layout_of
from echelon.bench.rpc.setting import Progress, Raw, Setting, check_port
from echelon.engines.local import LocalEngine
from echelon.engines.process import Exit, ProcessSpec
from echelon.errors import EchelonError, RunError
from echelon.roles.interrupts import Interrupts
from echelon.transport.act_board import ActBoard
from echelon.transport.segments import check_platform
from echelon.transport.session import create_session

LOG = "log"
LOG_TAIL_BYTES = 4_000
LOOK_INTERVAL_S = 0.05


def run(setting: Setting, progress: Progress, kind: type[Coordinator] | None = None) -> Raw:
    """Measures `setting` with real processes on this machine; `kind` drives them."""
    check_platform()
    if setting.transport == "tcp":
        check_port(setting)
    session = create_session(setting.shm_dir)
    try:
        coordinator = (kind or Coordinator)(setting, session, progress)
        try:
            with coordinator.interrupts:
                coordinator.drive()
        finally:
            coordinator.engine.close(0.0)  # whoever is still there is not needed
        return coordinator.results.raw()
    finally:
        shutil.rmtree(session, ignore_errors=True)


class Coordinator:
    """One run, from the first process to the last."""

    preload: Sequence[str] = ("echelon.bench.rpc.observer",)  # what the processes find imported

    def __init__(self, setting: Setting, session: Path, progress: Progress) -> None:
        self.setting, self.session, self.progress = setting, session, progress
        self.results = Results(session, setting, create=True)
        self.engine = LocalEngine(str(session), preload=self.preload)
        self.working: set[str] = set()
        self.interrupts = Interrupts(signal.SIGINT)  # raised anywhere else, Python may lose it: inside of a finalizer

    def drive(self) -> None:
        """Starts everybody and lets them go through the phases together, until all have ended."""
        setting, results = self.setting, self.results
        ActBoard(self.session, layout_of(setting))  # made before anybody joins it
        self._start("agent", "echelon.bench.rpc.agent:Agent")
        for index in range(setting.num_observers):
            self._start(f"observer{index + 2}", "echelon.bench.rpc.observer:Observer", index=index)
        for phase in (JOIN, WARM_UP, MEASURE):
            self._until(functools.partial(results.may_begin, phase))
            results.begin(phase)
        self._until(lambda: not self.working)

    def _start(self, name: str, entry: str, **config: int) -> None:
        shared = {"setting": dataclasses.asdict(self.setting), "session": str(self.session)}
        self.engine.start(ProcessSpec(name, entry, {**shared, **config}, log=str(self.session / LOG)))
        self.working.add(name)

    def _until(self, condition: Callable[[], bool]) -> None:
        """Waits for `condition`; raises the error of a process that ended before its work was done."""
        while not condition():
            if self.interrupts.came:
                raise KeyboardInterrupt
            select.select([self.engine.descriptor], [], [], LOOK_INTERVAL_S)
            for gone in self.engine.exits():
                if gone.code or gone.signal:
                    raise self._error_of(gone)
                self.working.discard(gone.name)
            self.progress(int(self.results.num_answered.sum()), self.setting.num_requests)

    def _error_of(self, gone: Exit) -> EchelonError:
        failure = gone.failure
        if failure is not None and failure.expected:
            kind: type[EchelonError] = getattr(errors, failure.kind)
            return kind(failure.message)
        if failure is not None:
            return RunError(f"{gone.name} failed: {failure.kind}: {failure.message}\n\n{failure.traceback}")
        how = f"was ended by {signal.Signals(gone.signal).name}" if gone.signal else f"left with code {gone.code}"
        log = self.session / LOG
        tail = log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip() if log.exists() else ""
        return RunError(f"{gone.name} (process {gone.pid}) {how}, so the run is over.{tail and chr(10) + tail}")
