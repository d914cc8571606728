"""Compares the SHA-256 of the final weights of short runs: both sides must be bit-identical.

The hashes depend on the processor and the build of torch, so they are compared on one machine and never stored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from golden.checkout import Checkout, Row, Tell, both

SEED = 7
PENDULUM = ("ddpg", "td3", "apex-ddpg", "sac")  # presets for continuous actions; all others play CartPole-v1
PICTURES = f"{Path(__file__).parent / 'pictures.py'}:Dot"
ALWAYS = ("--device=cpu", "--learner.threads=1", "--evaluation.interval-s=0", f"--seed={SEED}")
MEMORY = ("--network.core=lstm", "--network.core-size=16")
SMALL_REPLAY = ("--replay.min-size=300", "--replay.capacity=2000")


@dataclass(frozen=True)
class Case:
    """A run whose weights are compared. Runs of one `twins` group must have equal weights within a side, too."""

    name: str
    preset: str
    env: str
    options: tuple[str, ...] = ()
    engine: str = "inline"
    twins: str = ""


def cases(presets: list[str]) -> list[Case]:
    """Returns a case for every preset, and for features that no preset enables."""
    rows = [Case(name, name, "Pendulum-v1" if name in PENDULUM else "CartPole-v1", _short(name)) for name in presets]
    quick = ("--steps=4000", "--algorithm.epochs=2")
    one = ("--actors=1", *quick)
    lock_step = ("--actors=1", "--steps=4000", "--learner.max-lag=0", "--learner.batch=0")
    special = [
        Case("ppo, Pendulum-v1", "ppo", "Pendulum-v1", quick),
        Case("ppo, lstm", "ppo", "CartPole-v1", (*quick, *MEMORY)),
        Case("impala, gru", "impala", "CartPole-v1", ("--steps=8000", "--network.core=gru", "--network.core-size=16")),
        Case("ppo, normalised", "ppo", "CartPole-v1", (*quick, "--network.normalize-observation=true")),
        Case("ppo, central", "ppo", "CartPole-v1", (*quick, "--acting=central")),
        Case("ppo, central, lstm", "ppo", "CartPole-v1", (*quick, *MEMORY, "--acting=central")),
        Case("sac, CartPole-v1", "sac", "CartPole-v1", _short("sac")),
        Case("impala, pictures", "impala", PICTURES, ("--steps=2000", "--envs-per-actor=8")),
        Case("dqn, pictures", "dqn", PICTURES, ("--steps=600", *SMALL_REPLAY)),
        Case("ppo, 1 actor, inline", "ppo", "CartPole-v1", one, twins="ppo"),
        Case("ppo, 1 actor, local", "ppo", "CartPole-v1", one, "local", twins="ppo"),
        Case("a3c, lock-step, inline", "a3c", "CartPole-v1", lock_step, twins="a3c"),
        Case("a3c, lock-step, local", "a3c", "CartPole-v1", lock_step, "local", twins="a3c"),
    ]
    return rows + [case for case in special if case.preset in presets]


def _short(preset: str) -> tuple[str, ...]:
    """Returns options for a short run: with replay a few hundred updates, and actions of the policy."""
    if preset in PENDULUM:
        return ("--steps=800", "--replay.min-size=300", "--algorithm.random-steps=300")
    if preset in ("impala", "ppo", "async-ppo", "a3c"):
        return ("--steps=8000",)
    return ("--steps=1500", "--replay.min-size=300")


def weights(side: Checkout, case: Case) -> str:
    """Returns the hash at the end of the run, or why there is none."""
    folder = side.folder / f"hash-{case.name.replace(', ', '-').replace(' ', '-')}"
    words = ("train", case.preset, case.env, f"--engine={case.engine}", *ALWAYS, *case.options)
    finished = side.echelon(*words, f"--run-dir={folder}")
    if finished.code != 0:
        return f"exit code {finished.code}: {finished.tail}"
    return str(json.loads((folder / "summary.json").read_text())["weights_sha256"])


def compare(old: Checkout, new: Checkout, tell: Tell) -> Iterator[Row]:
    before, after = old.presets(), new.presets()
    yield from (Row("hashes", name, "added", note="a preset of NEW only") for name in after if name not in before)
    twins: dict[str, str] = {}
    for case in cases(before):
        first, second = both(old, new, partial(weights, case=case))
        is_same = first == second and len(first) == 64
        note = ""
        if case.twins and twins.setdefault(case.twins, second) != second:
            is_same, note = False, "inline and local differ in NEW"
        row = Row("hashes", case.name, "same" if is_same else "differs", first, second, note)
        tell(f"hashes: {case.name}: {row.verdict} {first[:12]}{'' if is_same else f' {second[:12]} {note}'}")
        yield row
