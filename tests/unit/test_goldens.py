"""The comparison of two checkouts: what counts as a difference of names, options and figures."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from golden import figures, names, public_names
from golden.hashes import cases

HELP = """\
usage: echelon train [-h] [--actors N] PRESET ENV

options:
  -h, --help            show this help message and exit
  --learners N          learner processes (default 1; N divides the actors)
  --on-env-error stop|restart
                        what an environment that raises does to the run
  --seed S              seed of everything drawn
  --output-dir DIR, --output_dir DIR
                        where files go (the folder of the report)

every field:
  --seed int  (default 0)
  --network.hidden comma-separated int  (default 64,64)
  --workers.address str  (default "") where they come to
"""


def test_options_are_told_by_value_and_default() -> None:
    assert names.options("train", HELP) == {
        "train --help": "",
        "train --learners": "N = 1",
        "train --on-env-error": "stop|restart",
        "train --seed": "S | int = 0",
        "train --output-dir": "DIR",
        "train --network.hidden": "comma-separated int = 64,64",
        "train --workers.address": 'str = ""',
    }


def test_a_benchmark_has_its_default_at_the_end() -> None:
    text = "  --small VALUE      bytes of the small tensor (1024)\n  --output FILE      write the report here\n"
    assert names.options("echelon bench world", text) == {
        "echelon bench world --small": "VALUE = 1024",
        "echelon bench world --output": "FILE",
    }


def test_what_is_gone_or_changed_differs_and_what_is_new_is_added() -> None:
    old = {"kept": "(a)", "hidden": "", "gone": "", "changed": "(a=1)"}
    there = {"kept": "(a)", "hidden": "", "changed": "(a=2)", "fresh": ""}
    public = {name: text for name, text in there.items() if name != "hidden"}  # still there, though not promised
    *rows, total = names.differences("names", old, public, there)
    assert {row.item: (row.verdict, row.note) for row in rows} == {
        "gone": ("differs", "gone"),
        "changed": ("differs", "changed"),
        "fresh": ("added", ""),
    }
    assert (total.item, total.verdict) == ("2 of 4 names", "differs")


@dataclass
class Described:
    amount: int = 3
    parts: list[int] = field(default_factory=list)


def test_signatures_leave_annotations_out() -> None:
    def function(a: int, /, b: str = "x", *rest: int, c: float = 0.5) -> None: ...

    assert public_names.signature(function) == "(positional a, b='x', *rest, keyword c=0.5)"
    assert public_names.signature(Described) == "(amount=3, parts=...)"
    assert public_names.signature(3) == ""


def test_every_preset_has_a_hash() -> None:
    chosen = cases(["ppo", "sac", "a-new-one"])
    assert [case.env for case in chosen[:3]] == ["CartPole-v1", "Pendulum-v1", "CartPole-v1"]
    assert {case.preset for case in chosen} == {"ppo", "sac", "a-new-one"}  # nothing of presets that are not there


@pytest.mark.parametrize("ratio", [0.9, 1.0, 1.2])
def test_interval_of_ratios(ratio: float) -> None:
    assert figures.interval([ratio] * 4) == pytest.approx((ratio, ratio))
    low, high = figures.interval([0.98 * ratio, ratio, ratio, ratio / 0.98])
    half = 3.18 * (math.log(1 / 0.98) * math.sqrt(2 / 3)) / 2
    assert (low, high) == pytest.approx((ratio * math.exp(-half), ratio * math.exp(half)))
    assert figures.interval([ratio]) == (0.0, math.inf)
