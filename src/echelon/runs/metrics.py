"""The metrics of a run: one flat JSON object per line in `metrics.jsonl`, and its numbers as TensorBoard scalars.

Columns of a group share a prefix, as `loss.policy` and `loss.value`. Rows of earlier releases had nested objects
instead; reading makes them flat.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.disk import AppendFile, open_regular, put_file, read_regular
from echelon.errors import ConfigError
from echelon.runs.episodes import EPISODES, EpisodeWriter
from echelon.runs.events import EventWriter

METRICS = "metrics.jsonl"
MAX_BYTES = 1 << 28  # of the file, to be read as a whole: more than the rows of a week
MAX_ROW_BYTES = 1 << 20
TAIL_BYTES = 1 << 16  # of the file, for its last rows
_NO_SCALARS = ("kind", "env_steps")


class MetricsWriter:
    """Appends rows; a row is visible to readers when `write` returns, unless the disk is full: then `error` is set.

    Rows that cannot be written wait in memory (`AppendFile`), in order, and are written with a later row. The "kind" of
    a row ("train" if absent) prefixes the TensorBoard tags, in which a slash separates groups; its "env_steps" is their
    step. A new run never overwrites an existing file; a resumed run (`append`) first removes an incomplete last line,
    which a crash can leave. `episodes` writes the episodes of the run.
    """

    def __init__(self, run_dir: Path, append: bool) -> None:
        self._run_dir, path = run_dir, run_dir / METRICS
        if append:
            _drop_broken_end(path)
        try:
            self._file = AppendFile(path, is_new=not append)
        except FileExistsError as error:
            raise ConfigError(
                f"{path} already exists: a new run does not overwrite the record of another. Continue that run with "
                f"`echelon resume {run_dir}`, or choose another --run-dir."
            ) from error
        self._events = EventWriter(run_dir)
        self.episodes = EpisodeWriter(run_dir, append=append)

    def write(self, row: Mapping[str, Any]) -> None:
        data = plain(row)
        self._file.append(json.dumps(data, allow_nan=False).encode() + b"\n")
        step = data.get("env_steps")
        if isinstance(step, int):
            self._events.scalars(step, scalars(data, str(data.get("kind", "train"))), time.time())

    @property
    def error(self) -> OSError | None:
        """Why the newest rows are not on disk yet; None if they are."""
        return self._file.error or self._events.error or self.episodes.error

    def write_waiting(self, run_dir: Path) -> None:
        """Writes the rows that wait to `run_dir`, this run's folder or another."""
        for file, name in ((self._file, METRICS), (self.episodes.file, EPISODES)):
            if run_dir == self._run_dir:
                file.append()
                if file.error is not None:
                    raise file.error
            elif file.waiting:
                put_file(run_dir / name, b"".join(file.waiting))

    def close(self) -> None:
        self._file.close()
        self.episodes.file.close()
        self._events.close()


def read_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Returns every complete row of a run; a last line that is still being written is ignored."""
    path = run_dir / METRICS
    try:
        lines = read_regular(path, MAX_BYTES).split(b"\n")[:-1]  # the part after the last newline is incomplete
    except OSError as error:
        raise ConfigError(f"the metrics {path} cannot be read: {error}. Give the folder of a run.") from error
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        row = _row(line)
        if row is not None:
            rows.append(row)
        elif number < len(lines):
            raise ConfigError(f"{path}, line {number}, is not a JSON object: {line[:60]!r}. Remove that line.")
    return rows


def last_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the complete rows at the end of the metrics, without the rest of a long file; [] if there are none."""
    try:
        with open(open_regular(run_dir / METRICS, os.O_RDONLY), "rb") as file:
            begin = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
            file.seek(begin)
            lines = file.read(TAIL_BYTES).split(b"\n")
    except OSError:
        return []
    whole = lines[1:-1] if begin else lines[:-1]  # the first line may have lost its beginning
    return [row for line in whole if (row := _row(line)) is not None]


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
        return flat(row) if isinstance(row, dict) else None
    except (ValueError, RecursionError):
        return None


def flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values of nested objects by dotted names; a flat row stays as it is."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def _drop_broken_end(path: Path) -> None:
    """Removes what follows the last newline, and the line before it unless it is a row."""
    if not path.exists():
        return
    with open(open_regular(path, os.O_RDWR), "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        begin = max(0, size - MAX_ROW_BYTES)
        file.seek(begin)
        data = file.read(MAX_ROW_BYTES)
        end = data.rfind(b"\n") + 1
        last = data.rfind(b"\n", 0, max(end - 1, 0)) + 1
        if begin and not last:
            raise ConfigError(f"{path} is damaged: it does not end with rows. Remove it, or restore it from a copy.")
        if end and _row(data[last:end]) is None:
            end = last
        file.truncate(begin + end)


def plain(value: Any) -> Any:
    """Returns `value` as strict JSON: numpy and torch values as numbers, paths as text, non-finite numbers as null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def scalars(row: Mapping[str, Any], kind: str) -> dict[str, float]:
    """Returns the numbers of a plain row by their TensorBoard tags, which begin with `kind`."""
    numbers = {name: float(value) for name, value in row.items() if _is_scalar(name, value)}
    return {f"{kind}/{name.replace('.', '/')}": value for name, value in numbers.items()}


def _is_scalar(name: str, value: Any) -> bool:
    return name not in _NO_SCALARS and isinstance(value, int | float) and not isinstance(value, bool)
