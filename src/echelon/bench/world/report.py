"""The report of `echelon bench world`: what either library reached, as JSON and as a table."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echelon.bench.machine import hardware
from echelon.bench.replay.setting import Measure
from echelon.bench.world.setting import Setting
from echelon.runs.folder import versions

BENCH = "world"


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """One run: its setting, and its figures."""

    setting: Setting
    measures: Sequence[Measure]

    def to_json(self) -> dict[str, Any]:
        return {
            "bench": BENCH,
            "setting": dataclasses.asdict(self.setting),
            "measures": [dataclasses.asdict(measure) for measure in self.measures],
            "hardware": hardware(),
            "versions": versions(),
        }

    def write(self, path: Path) -> None:
        """Replaces the file at `path`, whole or not at all."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)

    def table(self) -> str:
        """Medians over the turns with their quartiles, and how many times as good ours is."""
        setting, names = self.setting, list(self.measures[0].by)
        width = max(len(measure.name) for measure in self.measures)
        head = (
            f"small {setting.small:,} bytes, large {setting.large:,} bytes, {setting.in_flight} calls in flight, "
            f"transport {setting.transport}, {setting.rounds} turns each"
        )
        titles = "".join(f"{name:>12}{'quartiles':>20}" for name in names)
        rows = [f"{'':<{width}}  {'':>7}{titles}" + (f"{'better':>9}" if len(names) > 1 else "")]
        for measure in self.measures:
            cells = "".join(
                f"{shown(spread.median):>12}{f'{shown(spread.low)} – {shown(spread.high)}':>20}"
                for spread in measure.by.values()
            )
            rows.append(f"{measure.name:<{width}}  {measure.unit:>7}{cells}{_better(measure)}")
        return "\n".join([head, "", *rows])


def _better(measure: Measure) -> str:
    """How many times as good ours is, by the medians beside it: less time, or more of anything else."""
    ours, *peers = (spread.median for spread in measure.by.values())
    if not peers:
        return ""
    return f"{peers[0] / ours if measure.unit == 'us' else ours / peers[0]:>8.1f}×"


def shown(value: float) -> str:
    """A figure with three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
