"""Inflicts seeded faults on trainings of every kind, and measures how long until each goes on.

    python benchmarks/chaos.py --faults 300 --seed 1        # or: make chaos FAULTS=300 SEED=1
    python benchmarks/chaos.py --session 12 --seed 1        # plays session 12 of that seed again

A session is one run that suffers several faults in turn and then ends in one of several ways. After each fault,
training must go on; no return, length or version may be torn, lost or counted twice; a restored learner must not be
behind the newest checkpoint; after the end nothing may be left. A fault whose run does not go on within a minute is
recorded as "never", with the stacks of all processes. Writes chaos.jsonl, chaos.md and chaos.png to `--output`.
The exit code is 1 if any fault had a problem.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from faults.campaign import Record, play, sessions
from faults.kinds import KINDS
from faults.table import draw, table, totals

CORES_PER_JOB = 3
ALL = 10_000  # faults, among which a single session is looked for


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100, help="number of faults (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--session", type=int, help="play only this session")
    parser.add_argument("--kinds", default=",".join(kind.name for kind in KINDS), help="default: %(default)s")
    jobs = max(1, (os.cpu_count() or 1) // CORES_PER_JOB)
    parser.add_argument("--jobs", type=int, default=jobs, help="runs at a time (default here: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.0, help="start no session after this time; 0: no limit")
    parser.add_argument("--output", type=Path, default=Path("runs/chaos"), help="folder (default: %(default)s)")
    options = parser.parse_args()
    names = [name.strip() for name in options.kinds.split(",")]
    if unknown := [name for name in names if name not in {kind.name for kind in KINDS}]:
        parser.error(f"--kinds {unknown[0]!r}: choose from {', '.join(kind.name for kind in KINDS)}")
    options.output.mkdir(parents=True, exist_ok=True)
    for old in options.output.glob("session-*.txt"):
        old.unlink()
    records = campaign(options, names)
    (options.output / "chaos.md").write_text(f"{table(records)}\n\n{totals(records)}\n")
    with contextlib.suppress(ImportError):  # without matplotlib there is only no picture
        draw(records, options.output / "chaos.png")
    print(f"\n{table(records)}\n\n{totals(records)}; {options.output}/chaos.jsonl, chaos.md, chaos.png")
    return int(any(record.problems for record in records) or not records)


def campaign(options: argparse.Namespace, names: list[str]) -> list[Record]:
    """Plays the sessions, `--jobs` at a time, and reports each when it ends."""
    records: list[Record] = []
    began, printing = time.monotonic(), threading.Lock()
    planned = [
        session
        for session in sessions(options.seed, options.faults if options.session is None else ALL, names)
        if options.session in (None, session.number)
    ]
    with ThreadPoolExecutor(options.jobs) as pool, (options.output / "chaos.jsonl").open("w") as file:
        running: set[Future[list[Record]]] = set()
        while planned or running:
            late = options.seconds and time.monotonic() - began > options.seconds
            while planned and len(running) < options.jobs and not late:
                running.add(pool.submit(play, planned.pop(0), subprocess.Popen, options.output))
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for one in done:
                with printing:
                    for record in one.result():
                        records.append(record)
                        file.write(json.dumps(record.row) + "\n")
                        file.flush()
                        print(_line(record, len(records), time.monotonic() - began), flush=True)
    return records


def _line(record: Record, count: int, elapsed_s: float) -> str:
    moment = f" at {record.moment}" if record.moment != "now" else ""
    outcome = "never" if record.seconds is None else f"{record.seconds:.2f} s"
    problems = "".join(f"\n    {problem}" for problem in record.problems)
    what = f"{record.kind}: {record.role}: {record.fault}{moment}"
    return f"{elapsed_s:5.0f} s {count:4d} session {record.session:3d} {what}: {outcome}{problems}"


if __name__ == "__main__":
    sys.exit(main())
