"""A run folder that cannot be written: what is reported while training goes on, and where the end of the run goes."""

from __future__ import annotations

import contextlib
import glob
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from echelon.disk import is_private
from echelon.runs.checkpoint import latest_checkpoint
from echelon.runs.folder import CONFIG
from echelon.runs.report import duration

T = TypeVar("T")
RETRY_PAUSE_S = 0.5


class Outage:
    """Reports once when parts of a run cannot be written, and once when all of them are written again."""

    def __init__(self, run_dir: Path, report: Callable[[str], None]) -> None:
        self._run_dir, self._report = run_dir, report
        self._errors: dict[str, str] = {}  # by part
        self._began = 0.0

    def note(self, part: str, error: str) -> None:
        """Notes the result of the newest attempt to write `part`: its error, or "" if it is written."""
        was_whole = not self._errors
        self._errors.pop(part, None)
        if error:
            self._errors[part] = error
        if was_whole and self._errors:
            self._began = time.monotonic()
            self._report(
                f"{self._run_dir} cannot be written ({part}: {error}). Training goes on: metrics wait in memory, and "
                "the last complete checkpoint is kept. Free some space."
            )
        elif not was_whole and not self._errors:
            lasted = duration(time.monotonic() - self._began)
            self._report(f"{self._run_dir} is written again, after {lasted}.")


def newer_fallback(run_dir: Path, parent: str, checkpoint: str) -> Path | None:
    """Returns a folder in which the end of `run_dir`, or of a run of its name, was saved after `checkpoint`."""
    for path in Path(parent or tempfile.gettempdir()).glob(f"echelon-{glob.escape(run_dir.name)}-????????"):
        if is_private(path) and (found := latest_checkpoint(path / "checkpoints")) and found.name > checkpoint:
            return path
    return None


class Fallback:
    """Writes what a run leaves at its end to its folder, or to another folder if that one cannot be written.

    The other folder, `path`, is made when it is needed; it is a run folder that `echelon resume` continues.
    """

    def __init__(self, run_dir: Path, parent: str, word: str) -> None:
        """`parent` is the folder to make it in, by default the temporary folder; `word` makes its name unique."""
        self.run_dir, self.path = run_dir, Path(parent or tempfile.gettempdir()) / f"echelon-{run_dir.name}-{word}"
        self.error = self.lost = ""  # why the run folder, and why the other one, could not be written

    def write(
        self, write: Callable[[Path], T], retry_s: float = 0.0, tick: Callable[[], None] = lambda: None
    ) -> T | None:
        """Calls `write` with the run folder, for `retry_s` if it raises OSError, then with `path`.

        Calls `tick` between two attempts. Returns None if both folders cannot be written. If `path` holds an earlier
        part of the end, it gets this part as well.
        """
        deadline = time.monotonic() + retry_s
        while True:
            try:
                written = write(self.run_dir)
                if is_private(self.path):
                    with contextlib.suppress(OSError):
                        write(self.path)
                return written
            except OSError as error:
                if time.monotonic() >= deadline:
                    self.error = str(error)
                    break
            time.sleep(RETRY_PAUSE_S)
            tick()
        try:
            self._make()
            return write(self.path)
        except OSError as error:
            self.lost = str(error)
            return None

    def _make(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            self.path.mkdir(0o700)
        if not is_private(self.path):
            raise PermissionError(f"{self.path} is not a folder that only this user can enter")
        if not (self.path / CONFIG).exists():
            with contextlib.suppress(OSError):  # the checkpoint is worth more
                shutil.copyfile(self.run_dir / CONFIG, self.path / CONFIG)

    def sentence(self, what: str) -> str:
        """Returns a sentence that says where `what` is; "" if it is in the run folder."""
        if self.lost:
            return (
                f"{what} could be written neither to {self.run_dir} ({self.error}) nor to {self.path} ({self.lost}); "
                f"`echelon resume {self.run_dir}` continues from the last complete checkpoint."
            )
        if self.error:
            return (
                f"{self.run_dir} could not be written at the end of the run ({self.error}), so {what} is in "
                f"{self.path}; `echelon resume {self.path}` continues from there."
            )
        return ""
