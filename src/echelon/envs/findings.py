"""What a check of an environment found: each finding has a level, what was seen and the remedy."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["ok", "info", "warning", "error"]


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
