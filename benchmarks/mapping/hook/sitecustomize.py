"""Traces the processes of a run from inside: this folder is on their path, and Python imports this file first.

Every module of Echelon that a process imports is appended to `modules.txt`. A role, which the fork server forks,
records for each file of Echelon in which cycles one of its functions is entered, and writes their number to
`calls-PID.json`. The file `window` has two numbers that all processes share: the state, which controls recording and
writing, and the environment steps so far, which separate the cycles. All files are in the folder MAP_FOLDER.
"""

from __future__ import annotations

import collections
import json
import mmap
import os
import sys
import threading
from collections.abc import Sequence
from types import FrameType, ModuleType
from typing import Any

FOLDER = os.environ["MAP_FOLDER"]
PACKAGE = os.path.join(os.environ["MAP_SOURCES"], "")
WINDOW = os.path.join(FOLDER, "window")
ENV_FILE = "cartpole.py"  # whose `step` is an environment step
STATE, STEPS = 0, 1  # of the window
BEFORE, NOTING = 0, 1  # states; later: write
STEPS_PER_CYCLE = 2  # an actor with two environments


class Imports:
    """An import finder that finds nothing and records the requested modules."""

    def __init__(self) -> None:
        self._file = os.open(os.path.join(FOLDER, "modules.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name.partition(".")[0] == "echelon":
            os.write(self._file, f"{name}\n".encode())


class Calls:
    """Entered functions by file, in all threads of this process."""

    def __init__(self) -> None:
        with open(WINDOW, "r+b") as file:
            self._window = memoryview(mmap.mmap(file.fileno(), 16)).cast("Q")
        self._cycles: dict[str, set[int]] = collections.defaultdict(set)
        self._is_written = False
        threading.settrace(self._on_call)
        sys.settrace(self._on_call)  # called only on function entry, as it returns None

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> None:
        state = self._window[STATE]
        if state == BEFORE:
            return
        if state == NOTING:
            file = frame.f_code.co_filename
            if file.startswith(PACKAGE):
                self._cycles[file].add(self._window[STEPS] // STEPS_PER_CYCLE)
            elif frame.f_code.co_name == "step" and file.endswith(ENV_FILE):
                self._window[STEPS] += 1  # by the only actor
        elif not self._is_written:
            self._is_written = True
            self._write()

    def _write(self) -> None:
        path = os.path.join(FOLDER, f"calls-{os.getpid()}.json")
        with open(f"{path}.part", "w") as file:
            json.dump({name.removeprefix(PACKAGE): len(cycles) for name, cycles in self._cycles.items()}, file)
        os.replace(f"{path}.part", path)


sys.meta_path.insert(0, Imports())
if os.path.exists(WINDOW):
    os.register_at_fork(after_in_child=Calls)
