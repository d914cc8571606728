"""Reads the metrics and the episodes of a run as columns: numpy arrays by name, or a pandas DataFrame."""

from __future__ import annotations

import difflib
import io
import os
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np

from echelon.disk import read_regular
from echelon.errors import ConfigError
from echelon.runs.episodes import BLOCK_BYTES, EPISODES, INTEGERS, MAX_BYTES
from echelon.runs.folder import CONFIG, not_a_run
from echelon.runs.metrics import METRICS, read_rows
from echelon.runs.report import ordered_rows

Array = np.ndarray[Any, Any]
Columns = dict[str, Array]


@overload
def read_metrics(run_dir: str | Path, *, prefix: str = "", kind: str = "train") -> Columns: ...
@overload
def read_metrics(run_dir: str | Path, *, prefix: str = "", kind: str = "train", pandas: Literal[False]) -> Columns: ...
@overload
def read_metrics(run_dir: str | Path, *, prefix: str = "", kind: str = "train", pandas: Literal[True]) -> Any: ...
def read_metrics(run_dir: str | Path, *, prefix: str = "", kind: str = "train", pandas: bool = False) -> Any:
    """Returns the metrics of a run as arrays by column name, one entry per report; with `pandas`, as a DataFrame.

    `prefix` selects columns, as "loss."; "env_steps" is always among them. `kind` selects the reports of training
    ("train"), the evaluations ("evaluation") or what callbacks logged ("callback"); each has columns of its own. A
    number that a report lacks is NaN, a text is "". A column of integers has the type int64 unless one is missing.
    Reports that a resume from an earlier checkpoint repeated are left out. The run may still be running.
    """
    path = _file_of(run_dir, METRICS)
    found = ordered_rows(read_rows(path.parent))
    if kind not in found:
        kinds = ", ".join(name for name, some in found.items() if some)
        raise ConfigError(f'{path} has no rows of kind="{kind}". Its rows have the kinds: {kinds or "none yet"}.')
    rows = found[kind]
    names = list(dict.fromkeys(name for row in rows for name in row if name != "kind"))
    chosen = [name for name in names if name == "env_steps" or name.startswith(prefix)]
    has_all = kind != "train" or any(row.get("updates") for row in rows)  # before the first update, columns are missing
    if rows and has_all and not any(name.startswith(prefix) for name in chosen):
        raise ConfigError(f'no column of {path} begins with prefix="{prefix}".{_near_prefixes(prefix, names)}')
    columns = {name: _column([row.get(name) for row in rows]) for name in chosen}
    return _frame(columns) if pandas else columns


@overload
def read_episodes(run_dir: str | Path) -> Columns: ...
@overload
def read_episodes(run_dir: str | Path, *, pandas: Literal[False]) -> Columns: ...
@overload
def read_episodes(run_dir: str | Path, *, pandas: Literal[True]) -> Any: ...
def read_episodes(run_dir: str | Path, *, pandas: bool = False) -> Any:
    """Returns the columns of `episodes.csv`, one entry per training episode that ended; with `pandas`, a DataFrame.

    A column of integers has the type int64; "actor" and "env" are NaN if they are not known.
    """
    path = _file_of(run_dir, EPISODES)
    try:
        data = read_regular(path, MAX_BYTES + BLOCK_BYTES * 64)
    except OSError as error:
        raise ConfigError(
            f"the episodes {path} cannot be read: {error}. Give the folder of a run of this release: earlier ones "
            "wrote no such file."
        ) from error
    head, _, body = data[: data.rfind(b"\n") + 1].partition(b"\n")  # a last line that is being written is ignored
    names = head.decode("utf-8", "replace").split(",")
    body = body.replace(b",,", b",nan,").replace(b",,", b",nan,")
    try:
        table = np.loadtxt(io.BytesIO(body), delimiter=",", ndmin=2) if body else np.zeros((0, len(names)))
        columns = dict(zip(names, table.T, strict=True))
    except ValueError as error:
        raise ConfigError(f"{path} is not a table of episodes: {error}. Remove what was added to it.") from error
    for name in INTEGERS:
        if name in columns and np.isfinite(columns[name]).all():
            columns[name] = columns[name].astype(np.int64)
    return _frame(columns) if pandas else columns


def _file_of(run_dir: str | Path, name: str) -> Path:
    """Returns the path of a file of a run; raises ConfigError if it is absent and `run_dir` is no run folder."""
    folder = Path(run_dir)
    if not os.path.lexists(folder / name) and not os.path.lexists(folder / CONFIG):
        raise not_a_run(folder)
    return folder / name


def _near_prefixes(prefix: str, names: list[str]) -> str:
    """Returns the groups of columns ("loss.") and the columns that are close to `prefix`, or all groups."""
    groups = sorted({name.partition(".")[0] + "." for name in names if "." in name})
    near = difflib.get_close_matches(prefix.rstrip("."), [*groups, *names], n=3)
    return f" Did you mean {' or '.join(near)}?" if near else f" Groups of columns: {', '.join(groups) or 'none'}."


def _column(values: list[Any]) -> Array:
    if any(isinstance(value, str) for value in values):
        return np.array(["" if value is None else str(value) for value in values])
    if all(type(value) is int and abs(value) < 2**63 for value in values):
        return np.array(values, np.int64)
    return np.array([value if isinstance(value, int | float) else np.nan for value in values], np.float64)


def _frame(columns: Columns) -> Any:
    try:
        frames = import_module("pandas")
    except ImportError as error:
        raise ConfigError(
            "pandas=True needs pandas, which is not installed: `pip install pandas`, or leave it out and get arrays."
        ) from error
    return frames.DataFrame(columns)
