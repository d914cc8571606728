"""What a check of an environment found: each finding has a level, what was seen and the remedy."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Level = Literal["ok", "info", "warning", "error"]
STEP_REMEDY = "step must return (observation, reward, terminated, truncated, info)."
OLD_STEP_REMEDY = f"{STEP_REMEDY} Split the old `done`: terminated if the episode is over, truncated if it was cut."


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    level: Level
    check: str  # what was checked: "observation", "reward", ...
    text: str
    remedy: str = ""
    traceback: str = ""  # of an exception of the environment

    def __str__(self) -> str:
        return f"{self.check}: {self.text}{f' {self.remedy}' if self.remedy else ''}"


@dataclass(slots=True)
class Findings:
    """Findings in the order of their discovery; a repeated one is kept once."""

    entries: list[Finding] = field(default_factory=list)
    _keys: set[tuple[str, str]] = field(default_factory=set)

    def add(self, level: Level, check: str, text: str, remedy: str = "", *, key: str = "", traceback: str = "") -> None:
        """Adds a finding, unless `check` already has one with the same `key` (default: `text`)."""
        if (check, key or text) not in self._keys:
            self._keys.add((check, key or text))
            self.entries.append(Finding(level, check, text, remedy, traceback))

    def of(self, *levels: Level) -> list[Finding]:
        return [entry for entry in self.entries if entry.level in levels]

    def has_problem(self, check: str) -> bool:
        return any(entry.check == check for entry in self.of("warning", "error"))


def definition(function: Any) -> str:
    """Returns where `function` is defined, FILE:LINE, or an empty text."""
    try:
        return f"{inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]}"
    except (TypeError, OSError):
        return ""


def step_problem(found: Any) -> tuple[str, str] | None:
    """Returns what is wrong with the form of what `step` returned, and the remedy; None if it is right."""
    is_sequence = isinstance(found, tuple | list)
    if is_sequence and len(found) == 5:
        return None
    remedy = OLD_STEP_REMEDY if is_sequence and len(found) == 4 else STEP_REMEDY
    return f"step returned {shown(found)}.", remedy


def shown(value: Any) -> str:
    """Returns what a value is, for a message."""
    if isinstance(value, tuple | list):
        return f"{len(value)} values ({', '.join(type(one).__name__ for one in value)})"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {sorted(map(str, value))}"
    if isinstance(value, np.ndarray) and value.ndim:
        return f"an array of shape {value.shape}"
    return f"{value!r:.80} ({type(value).__name__})"
