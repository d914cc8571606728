"""One run of `echelon bench world`: the two libraries take turns, ours and theirs, theirs and ours, and so on.

Whatever slows the machine down for a while slows both down, and a ratio compares turns that were neighbours in time.
"""

from __future__ import annotations

from echelon.bench.replay.setting import Measure
from echelon.bench.world import pair
from echelon.bench.world.setting import Progress, Setting
from echelon.bench.world.turn import UNITS

OURS = "echelon"


def run(setting: Setting, progress: Progress) -> tuple[Measure, ...]:
    libraries = [OURS]
    if setting.peer != "none":
        from echelon.bench.world.torch_rpc import check

        check()
        libraries.append(setting.peer)
    figures: dict[str, list[dict[str, float]]] = {library: [] for library in libraries}
    total = setting.rounds * len(libraries)
    for number in range(setting.rounds):
        for library in libraries if number % 2 == 0 else libraries[::-1]:
            progress(sum(map(len, figures.values())), total)
            figures[library].append(pair.take_turn(library, setting))
    progress(total, total)
    return tuple(
        Measure.of(figure, unit, {library: [turn[figure] for turn in turns] for library, turns in figures.items()})
        for figure, unit in UNITS.items()
    )
