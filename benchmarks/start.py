"""Where the seconds of a start go: python benchmarks/start.py [--repeats 5] [PRESET ENV OPTION...]

Runs `echelon train PRESET ENV OPTION... --minutes 5` several times and prints medians. The total is the wall time from
the start of the process until metrics.jsonl has a row with an update; the file is read every 10 ms. The learner reports
at most every 0.1 s, so the row may appear up to 0.1 s after the update. All other options have their defaults: the
evaluator runs, too. The other lines are the parts of the total: `command` lasts until the first line of output, the
stages are those of `start` in summary.json, and `between` is the rest. Default: ppo CartPole-v1.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

POLL_S = 0.01
TOTAL = "in total"
ECHELON = [sys.executable, "-m", "echelon.cli.main"]


def time_help() -> float:
    begun = time.perf_counter()
    subprocess.run([*ECHELON, "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun


def has_update(metrics: Path) -> bool:
    rows = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    return any(json.loads(row).get("updates") for row in rows if row.endswith("\n"))


def time_start(arguments: list[str], folder: Path) -> dict[str, float]:
    """Returns the seconds of each stage of one start, and of all of it."""
    run = folder / "run"
    words = [*ECHELON, "train", *arguments, "--minutes", "5", "--run-dir", str(run)]
    begun = time.perf_counter()
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        command_s = time.perf_counter() - begun
        while process.poll() is None and not has_update(run / "metrics.jsonl"):
            time.sleep(POLL_S)
        total_s = time.perf_counter() - begun
        process.send_signal(signal.SIGINT)
        output = process.stdout.read()
    if not has_update(run / "metrics.jsonl"):
        raise SystemExit(f"{' '.join(words)} left with code {process.returncode}:\n{output}")
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    stages = {"command": command_s, **summary.get("start", {})}
    return {**stages, "between": total_s - sum(stages.values()), TOTAL: total_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    known, arguments = parser.parse_known_args()
    print(f"echelon --help  {statistics.median(time_help() for _ in range(known.repeats)):6.2f} s")
    starts = []
    for _ in range(known.repeats):
        with tempfile.TemporaryDirectory() as folder:
            starts.append(time_start(arguments or ["ppo", "CartPole-v1"], Path(folder)))
    for stage in dict.fromkeys(stage for start in starts for stage in start):
        print(f"{stage:<14}  {statistics.median(start.get(stage, 0.0) for start in starts):6.2f} s")


if __name__ == "__main__":
    main()
