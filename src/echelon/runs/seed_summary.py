"""The results of several seeds of one training: a table, and `summary.json` in the folder of all runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from echelon.disk import put_file
from echelon.runs.folder import SUMMARY
from echelon.runs.metrics import plain
from echelon.runs.records import RunRecord
from echelon.runs.tables import MISSING, count_text, return_text, text_table, time_text

HEADER = ("seed", "status", "steps", "return", "evaluation", "time")
FIGURES = {"env_steps": count_text, "return_mean": return_text, "evaluation_return": return_text, "wall_s": time_text}
Outcomes = Mapping[int, tuple[str, str]]  # by seed: status and error
Records = Mapping[int, RunRecord]  # by seed, of the runs that have a folder


def quartiles(values: Sequence[float | None]) -> tuple[float, float, float] | None:
    """Returns the first quartile, the median and the third quartile of the values that are known; None without one."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    low, middle, high = np.percentile(known, [25, 50, 75])
    return float(low), float(middle), float(high)


def seed_table(outcomes: Outcomes, records: Records) -> list[str]:
    """Returns the lines of a table: a row per seed, then the median and the interquartile range of those that ended.

    Seeds that failed or were stopped have a row, but count for neither: their figures are those of a shorter run.
    """
    rows = []
    for seed, (status, _) in outcomes.items():
        record = records.get(seed)
        cells = [show(getattr(record, name)) if record else MISSING for name, show in FIGURES.items()]
        rows.append([str(seed), outcome_text(status, record), *cells])
    if len(ended := _ended(outcomes, records)) > 1:
        spread = {name: quartiles([getattr(record, name) for record in ended]) for name in FIGURES}
        for index, label in ((1, "median"), (0, "25 %"), (2, "75 %")):
            cells = [show(q[index] if (q := spread[name]) else None) for name, show in FIGURES.items()]
            rows.append([label, f"of {len(ended)}", *cells])
    return text_table(HEADER, rows, left=("status",))


def outcome_text(status: str, record: RunRecord | None) -> str:
    """Returns the status of a training, with that of its goal if its run folder has the same status."""
    return record.outcome if record is not None and record.status == status else status


def write_seed_summary(group: Path, outcomes: Outcomes, records: Records) -> None:
    """Writes `summary.json` of all seeds to the folder `group`."""
    runs: list[dict[str, Any]] = []
    for seed, (status, error) in outcomes.items():
        record = records.get(seed)
        figures = {name: getattr(record, name) if record else None for name in FIGURES}
        figures["goal_reached"] = record.goal_reached if record else None
        runs.append({"seed": seed, "status": status, "run_dir": str(group / f"seed-{seed}"), **figures, "error": error})
    ended = _ended(outcomes, records)
    spread = {name: quartiles([getattr(record, name) for record in ended]) for name in FIGURES}
    median = {name: found[1] if found else None for name, found in spread.items()}
    ranges = {name: [found[0], found[2]] if found else None for name, found in spread.items()}
    data = {"runs": runs, "num_ended": len(ended), "median": median, "interquartile_range": ranges}
    put_file(group / SUMMARY, f"{json.dumps(plain(data), indent=2)}\n".encode())


def _ended(outcomes: Outcomes, records: Records) -> list[RunRecord]:
    """Returns the records of the seeds that reached the end of their training."""
    return [record for seed, record in records.items() if outcomes[seed][0] in ("finished", "solved")]
