"""Progress output, and the check of a report file."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from echelon.errors import ConfigError

REDRAW_INTERVAL_S = 0.25  # drawing takes processor time from the measurement
FIRST_LINE_S, LINE_INTERVAL_S = 2.0, 10.0  # until the first line, and between lines, without a terminal


class Show(Protocol):
    """Shows how much is done, of a total if that is known, and a figure beside it."""

    def __call__(self, num_done: int, total: int | None, beside: str = "") -> None: ...


@contextlib.contextmanager
def progress_bar(label: str, unit: str) -> Iterator[Show]:
    """Yields a function that shows the progress: a bar, removed at the end, or lines without a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[unit]}"))
    console = Console(stderr=True)
    on_terminal = console.is_terminal
    with Progress(*columns, console=console, transient=True, auto_refresh=False, disable=not on_terminal) as bar:
        task = bar.add_task(label, total=None, unit=unit)
        next_s = time.monotonic() + (0.0 if on_terminal else FIRST_LINE_S)

        def show(num_done: int, total: int | None, beside: str = "") -> None:
            nonlocal next_s
            if (now := time.monotonic()) < next_s:
                return
            next_s = now + (REDRAW_INTERVAL_S if on_terminal else LINE_INTERVAL_S)
            shown = f"{unit}, {beside}" if beside else unit
            bar.update(task, completed=num_done, total=total, unit=shown, refresh=True)
            if not on_terminal:
                whole = f" of {total:,}" if total is not None else ""
                print(f"{label}: {num_done:,}{whole} {shown}", file=sys.stderr, flush=True)

        yield show


def check_writable(path: Path, option: str) -> None:
    """Raises ConfigError unless a report can be written to `path`; call it before the measurement."""
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{option} {path} cannot be written: name a file in an existing, writable folder.")
