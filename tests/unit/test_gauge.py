"""Gauges: a row of shared memory per role, which outlives its writer and belongs to one incarnation at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.roles.gauge import FIGURES, NUM_FIGURES, PHASES, Gauge

NOTHING = dict.fromkeys(PHASES, 0.0)


def test_what_a_role_shows_is_seen_by_another_process_of_the_session(tmp_path: Path) -> None:
    seen, mine, other = Gauge(tmp_path, "actor-0"), Gauge(tmp_path, "actor-0"), Gauge(tmp_path, "actor-1")
    mine.begin(0)
    mine.show(7, {**NOTHING, "env": 1.5, "wait": 0.25})
    assert seen.progress(0) == 7 and seen.phases(0) == {**NOTHING, "env": 1.5, "wait": 0.25}
    assert other.progress(0) == 0 and other.phases(0) == NOTHING


def test_a_row_belongs_to_one_incarnation(tmp_path: Path) -> None:
    seen = Gauge(tmp_path, "actor-0")
    assert seen.progress(0) == 0, "it has not begun"
    first = Gauge(tmp_path, "actor-0")
    first.begin(0)
    first.show(7, {**NOTHING, "env": 1.5})
    assert seen.progress(1) == 0 and seen.phases(1) == NOTHING, "its successor has not begun"
    assert seen.phases(0)["env"] == 1.5, "but its last values are still readable"
    Gauge(tmp_path, "actor-0").begin(1)
    assert (seen.progress(0), seen.progress(1), seen.phases(1)) == (0, 0, NOTHING)


@pytest.mark.parametrize("kind", FIGURES)
def test_figures_come_back_as_they_were_shown(tmp_path: Path, kind: str) -> None:
    names = FIGURES[kind]
    assert len(names) <= NUM_FIGURES
    gauge, seen = Gauge(tmp_path, kind), Gauge(tmp_path, kind)
    assert seen.figures(kind) == {}
    gauge.begin(0)
    assert seen.figures(kind) == {}
    gauge.show_figures(kind, {names[0]: 3, names[1]: 0.5})
    assert seen.figures(kind) == {names[0]: 3, names[1]: 0.5} and isinstance(seen.figures(kind)[names[0]], int)
    gauge.show_figures(kind, dict.fromkeys(names, 2**40))
    assert seen.figures(kind) == dict.fromkeys(names, 2**40)


def test_a_figure_without_a_place_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"rounds.*shards"):
        Gauge(tmp_path, "x").show_figures("shards", {"rounds": 1})
