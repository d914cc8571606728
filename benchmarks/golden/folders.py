"""Run folders that OLD wrote: NEW resumes them and evaluates their weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from golden.checkout import Checkout, Row, Tell, both
from golden.hashes import ALWAYS

GREEDY = ("--episodes=3", "--seed=5", "--json")


@dataclass(frozen=True)
class Case:
    """A run that stops after `steps` and is resumed to three times as many."""

    name: str
    preset: str
    env: str
    steps: int
    options: tuple[str, ...]
    repeats: bool  # both sides must reach the same weights


KEPT = ("--replay.checkpoint=true", "--replay.min-size=300")
CASES = (
    Case("impala, inline", "impala", "CartPole-v1", 6_000, ("--engine=inline",), True),
    Case("impala, local", "impala", "CartPole-v1", 6_000, ("--engine=local",), False),
    Case("ppo, lstm, inline", "ppo", "CartPole-v1", 2_000, ("--engine=inline", "--network.core=lstm"), True),
    Case("a3c, inline", "a3c", "CartPole-v1", 6_000, ("--engine=inline",), True),
    Case("dqn with its replay, inline", "dqn", "CartPole-v1", 1_000, ("--engine=inline", *KEPT), True),
    Case("apex-dqn with its replay, local", "apex-dqn", "CartPole-v1", 1_000, ("--engine=local", *KEPT), False),
    Case("sac, inline", "sac", "Pendulum-v1", 1_200, ("--engine=inline",), True),
)


@dataclass(frozen=True)
class Outcome:
    """The result of a side: the greedy returns before the resume, and the weights at the end."""

    played: str
    weights: str
    failure: str = ""


def go_on(side: Checkout, case: Case, name: str) -> Outcome:
    played = side.echelon("eval", name, *GREEDY)
    if played.code != 0:
        return Outcome("", "", f"eval: exit code {played.code}: {played.tail}")
    total = 3 * case.steps
    resumed = side.echelon("resume", name, f"--steps={total}")
    if resumed.code != 0:
        return Outcome("", "", f"resume: exit code {resumed.code}: {resumed.tail}")
    summary = json.loads((side.folder / name / "summary.json").read_text())
    if summary["status"] != "finished" or summary["env_steps"] < total:
        return Outcome("", "", f"resume: {summary['status']} at {summary['env_steps']} of {total} steps")
    returns = json.loads(played.output[played.output.index("{") :])
    return Outcome(json.dumps(returns, sort_keys=True), summary["weights_sha256"])


def compare(old: Checkout, new: Checkout, tell: Tell) -> Iterator[Row]:
    for case in CASES:
        name = f"folder-{case.name.replace(', ', '-').replace(' ', '-')}"
        words = ("train", case.preset, case.env, *ALWAYS, f"--steps={case.steps}", *case.options)
        written = old.echelon(*words, f"--run-dir={old.folder / name}")
        if written.code != 0:
            yield Row("folders", case.name, "skipped", note=f"OLD cannot write it: {written.tail}")
            continue
        shutil.copytree(old.folder / name, new.folder / name)
        row = _judged(case, *both(old, new, partial(go_on, case=case, name=name)))
        tell(f"folders: {case.name}: {row.verdict} {row.note}")
        yield row


def _judged(case: Case, first: Outcome, second: Outcome) -> Row:
    if first.failure or second.failure:
        told = (one.failure or "resumed" for one in (first, second))
        return Row("folders", case.name, "differs" if second.failure else "skipped", *told)
    if first.played != second.played:
        return Row("folders", case.name, "differs", first.played, second.played, "greedy episodes differ")
    if case.repeats and first.weights != second.weights:
        return Row("folders", case.name, "differs", first.weights, second.weights, "resumed weights differ")
    return Row("folders", case.name, "same", note="resumed and evaluated" + (", same weights" if case.repeats else ""))
