"""`echelon list [DIR]`: the runs in a folder, newest first."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from echelon.cli.main import Parser
from echelon.cli.output import progress_bar
from echelon.names import short_name
from echelon.runs.records import RUNNING, RunRecord, read_runs, runs_in
from echelon.runs.tables import MISSING, age_text, count_text, return_text, text_table, time_text

HEADER = ("run", "preset", "env", "seed", "status", "steps", "return", "time", "age")
LEFT = ("run", "preset", "env", "status")
DEFAULT_DIR = "runs"


def run(arguments: Sequence[str]) -> int:
    parser = Parser(
        prog="echelon list",
        description="List the runs in a folder and in the groups of `echelon train --seeds` in it, newest first. A run "
        "without a summary is `running` while its process lives, else `crashed`; `damaged`: its config.json cannot be "
        "read. The return is the mean of the last 100 episodes, the age the time since the run last wrote something.",
    )
    parser.add_argument("dir", metavar="DIR", nargs="?", help=f"folder with runs (default {DEFAULT_DIR})")
    parser.add_argument("--json", action="store_true", help="print JSON: a list of objects")
    known = parser.parse_args(list(arguments))
    folder = Path(known.dir or DEFAULT_DIR)
    paths = [] if known.dir is None and not folder.exists() else runs_in(folder)
    with progress_bar("reading", "runs") as show:
        records = read_runs(paths, show)
    records.sort(key=lambda record: (record.status == RUNNING, record.written_at), reverse=True)
    if known.json:
        print(json.dumps([record.to_json() for record in records], indent=2))
    elif records:
        print("\n".join(text_table(HEADER, [_row(record, folder) for record in records], left=LEFT)))
    else:
        print(f"there are no runs in {folder}: `echelon train` writes its run folders there, or to --run-dir DIR")
    return 0


def _row(record: RunRecord, folder: Path) -> list[str]:
    name = os.path.relpath(record.path, folder)
    return [
        name if name != "." else str(record.path),
        record.preset or MISSING,
        short_name(record.env) or MISSING,
        MISSING if record.seed is None else str(record.seed),
        record.outcome,
        count_text(record.env_steps),
        return_text(record.return_mean),
        time_text(record.wall_s),
        age_text(time.time() - record.written_at),
    ]
