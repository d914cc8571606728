"""Trains several kinds of run side by side for a while, and checks that no process of them grows.

    python benchmarks/soak.py --minutes 20

Every ten seconds it reads the anonymous memory and the open descriptors of every process, and counts the segments of
every run. After a warm-up, the first third of the time, memory may grow by at most 1 MB a minute in each process (the
slope of a line through the samples), and the numbers of descriptors and segments must not grow. The exit code is 1 if
something grew.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from faults.campaign import begin
from faults.kinds import KINDS
from faults.scene import Scene

SAMPLE_S = 10.0
MOST_MB_PER_MINUTE = 1.0
DISK_MB = 256


@dataclass(frozen=True)
class Sample:
    """One look at a process, or at the segments of a run, which have no memory of their own here."""

    at_s: float
    memory_mb: float
    count: int  # descriptors, or segments


def look(pid: int, at_s: float) -> Sample:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Sample(at_s, int(status["RssAnon"].split()[0]) / 1024, len(list(Path(f"/proc/{pid}/fd").iterdir())))


def sample(scenes: dict[str, Scene], at_s: float, seen: dict[str, list[Sample]]) -> None:
    for name, scene in scenes.items():
        processes = {role: entry["pid"] for role, entry in scene.entries().items()}
        processes |= {f"{scene.kind.company} {number}": one.pid for number, one in enumerate(scene.company)}
        for role, pid in processes.items():
            with contextlib.suppress(OSError, KeyError):  # it has just ended: the number of restarts shows that
                seen.setdefault(f"{name}: {role} ({pid})", []).append(look(pid, at_s))
        segments = sum(path.is_file() for path in scene.memory.rglob("*"))
        seen.setdefault(f"{name}: segments", []).append(Sample(at_s, 0.0, segments))


def slope(samples: list[Sample]) -> float:
    """Returns the growth of the memory in MB a minute."""
    times = [one.at_s / 60 for one in samples]
    return statistics.linear_regression(times, [one.memory_mb for one in samples]).slope


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="default: %(default)s")
    parser.add_argument("--kinds", default="impala,apex-dqn tcp,workers", help="default: %(default)s")
    options = parser.parse_args()
    words = ["--env.on-error=restart", "--supervision.hang-timeout-s=60"]
    seen: dict[str, list[Sample]] = {}
    with contextlib.ExitStack() as stack:
        scenes = {}
        for kind in [kind for kind in KINDS if kind.name in options.kinds.split(",")]:
            scenes[kind.name] = Scene(kind, words, subprocess.Popen, DISK_MB)
            stack.callback(scenes[kind.name].close)
        for scene in scenes.values():
            begin(scene)
        began = time.monotonic()
        while (at_s := time.monotonic() - began) < 60 * options.minutes:
            sample(scenes, at_s, seen)
            print(f"\r{at_s / 60:5.1f} of {options.minutes:g} minutes", end="", file=sys.stderr, flush=True)
            time.sleep(SAMPLE_S)
        restarts = sum(scene.output.text().count("starting") for scene in scenes.values())
    late = {name: [one for one in found if one.at_s > 20 * options.minutes] for name, found in seen.items()}
    print("\n| process | memory MB | growth MB/min | descriptors or segments |\n|---|---|---|---|")
    grown = []
    for name, found in sorted(late.items()):
        if len(found) < 3:
            grown.append(f"{name} did not live long enough")
            continue
        growth, counts = slope(found), [one.count for one in found]
        half = len(counts) // 2
        print(f"| {name} | {found[-1].memory_mb:.1f} | {growth:+.3f} | {min(counts)} to {max(counts)} |")
        if growth > MOST_MB_PER_MINUTE or max(counts[half:]) > max(counts[:half]):
            grown.append(name)
    print(f"{len(late)} rows, {restarts} restarts; grown: {', '.join(grown) or 'none'}")
    return int(bool(grown or restarts))


if __name__ == "__main__":
    sys.exit(main())
