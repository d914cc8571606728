"""The processes of a benchmark, their shared memory, and the errors when one of them ends early."""

from __future__ import annotations

import contextlib
import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from echelon import errors
from echelon.engines.local import LocalEngine
from echelon.engines.process import Failure, ProcessSpec, how_ended
from echelon.errors import EchelonError, RunError
from echelon.transport.session import create_session

LOG_TAIL_BYTES = 4_000


@contextlib.contextmanager
def session_in(shm_dir: str) -> Iterator[Path]:
    """Creates a folder for the shared memory of one measurement; it is removed when the block ends."""
    session = create_session(shm_dir)
    try:
        yield session
    finally:
        shutil.rmtree(session, ignore_errors=True)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread while the block runs."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Processes:
    """Starts the roles of one measurement in `session`; the context manager ends those that still run."""

    def __init__(self, session: Path, preload: Sequence[str] = ()) -> None:
        self.engine = LocalEngine(str(session), preload=preload)
        self.session, self.log = session, session / "log"
        self.working: set[str] = set()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close(0.0)

    def start(self, name: str, entry: str, config: dict[str, Any]) -> None:
        """Starts the role `entry` ("module:class"); its config includes the session."""
        shared = {"session": str(self.session), **config}
        self.engine.start(ProcessSpec(name, entry, shared, log=str(self.log)))
        self.working.add(name)

    def check(self) -> None:
        """Raises the error of a process that failed or died; a normal exit is not an error."""
        for gone in self.engine.exits():
            if gone.failure is not None:
                raise error_of(gone.name, gone.failure)
            if gone.code or gone.signal:
                text = f"{gone.name} (process {gone.pid}) {gone.cause}, so the run is over."
                tail = self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace") if self.log.exists() else ""
                raise RunError(f"{text}\n{tail}".strip())
            self.working.discard(gone.name)


def error_of(name: str, failure: Failure) -> EchelonError:
    """Returns the error of a failed process: Echelon's own errors unchanged, others with their traceback."""
    if failure.expected:
        kind: type[EchelonError] = getattr(errors, failure.kind)
        return kind(failure.message)
    return RunError(f"{name} failed: {failure.kind}: {failure.message}\n\n{failure.traceback}")


def ended(name: str, code: int) -> str:
    """Returns how a process ended; a negative `code` is a signal."""
    return f"{name} {how_ended(code)}, so the run is over."


def free_port(address: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
