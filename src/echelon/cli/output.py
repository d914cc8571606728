"""Progress output, and the check of a report file."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from echelon.errors import ConfigError

REDRAW_INTERVAL_S = 0.25  # drawing takes processor time from the measurement
LINE_INTERVAL_S = 10.0  # between lines, without a terminal


@contextlib.contextmanager
def progress_bar(label: str, unit: str) -> Iterator[Callable[[int, int | None], None]]:
    """Yields a function that shows (done, total or None): a bar, removed at the end, or lines without a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    console = Console(stderr=True)
    on_terminal = console.is_terminal
    with Progress(*columns, console=console, transient=True, auto_refresh=False, disable=not on_terminal) as bar:
        task = bar.add_task(label, total=None)
        interval_s = REDRAW_INTERVAL_S if on_terminal else LINE_INTERVAL_S
        last_s = 0.0 if on_terminal else time.monotonic()

        def show(num_done: int, total: int | None) -> None:
            nonlocal last_s
            if (now := time.monotonic()) - last_s < interval_s:
                return
            last_s = now
            bar.update(task, completed=num_done, total=total, refresh=True)
            if not on_terminal:
                whole = f" of {total:,}" if total is not None else ""
                print(f"{label}: {num_done:,}{whole} {unit}", file=sys.stderr, flush=True)

        yield show


def check_writable(path: Path, option: str) -> None:
    """Raises ConfigError unless a report can be written to `path`; call it before the measurement."""
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{option} {path} cannot be written: name a file in an existing, writable folder.")
