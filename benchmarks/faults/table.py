"""Tables and pictures of the records of faults."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from faults.campaign import Record
from faults.catalogue import COORDINATOR


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value that at least `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(100 * share) // 100) - 1)]


def kind_of(role: str) -> str:
    return re.sub(r"-\d+$", "", role)


def groups(records: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    """Returns the records by role, without its index, and fault."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        found.setdefault((kind_of(record.role), record.fault), []).append(record)
    return dict(sorted(found.items()))


def table(records: Sequence[Record]) -> str:
    lines = ["| role | fault | faults | p50 s | p99 s | never | other problems |", "|---|---|---|---|---|---|---|"]
    for (role, fault), group in groups(records).items():
        seconds = [record.seconds for record in group if record.seconds is not None]
        p50, p99 = (f"{statistics.median(seconds):.2f}", f"{percentile(seconds, 0.99):.2f}") if seconds else ("-", "-")
        never = len(group) - len(seconds)
        other = sum(bool(record.problems) and record.seconds is not None for record in group)
        lines.append(f"| {role} | {fault} | {len(group)} | {p50} | {p99} | {never} | {other} |")
    return "\n".join(lines)


def totals(records: Sequence[Record]) -> str:
    never = sum(record.seconds is None for record in records)
    problems = sum(bool(record.problems) and record.seconds is not None for record in records)
    hit = [record for record in records if record.fault.startswith("kill") and record.role != COORDINATOR]
    kills = [record.seconds for record in hit if record.seconds is not None]
    text = f"{len(records)} faults, {never} never recovered, {problems} with other problems"
    if kills:
        text += f"; kills of roles: p50 {statistics.median(kills):.2f} s, p99 {percentile(kills, 0.99):.2f} s"
    return text


def draw(records: Sequence[Record], path: Path) -> None:
    """Draws every recovery time as a dot, one row per role and fault; crosses never recovered."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = groups(records)
    figure, axes = plt.subplots(figsize=(9.0, 1.2 + 0.24 * len(found)), layout="constrained")
    slowest = max((record.seconds or 0.0 for record in records), default=1.0)
    for number, group in enumerate(found.values()):
        seconds = [max(record.seconds, 0.01) for record in group if record.seconds is not None]
        axes.plot(seconds, [number] * len(seconds), "o", color="#4269d0", alpha=0.5, markersize=5)
        never = [slowest * 1.3 for record in group if record.seconds is None]
        axes.plot(never, [number] * len(never), "x", color="#d62728", markersize=8)
    axes.set_yticks(range(len(found)), [f"{role}: {fault}" for role, fault in found], fontsize=8)
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("seconds from the fault until training continues, or the run has ended")
    axes.set_title(totals(records), fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)
