"""What a command tells its user, as a test sees it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import warm


def children() -> set[int]:
    """The living children of this process, and what it had forked."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:  # it ended meanwhile
                continue
            if int(parent) == os.getpid() and state != "Z":
                found.add(int(folder.name))
    return found | warm.living()


@dataclass
class Told:
    """What a command said."""

    code: int
    out: str
    err: str


Command = Callable[..., Told]


def assert_told(told: Told, code: int, *fragments: str) -> None:
    """One message on stderr, in one piece, that holds every fragment."""
    assert told.code == code, told.err or told.out
    assert told.err.startswith("echelon: ") and told.err.count("echelon: ") == 1, told.err
    assert "Warning" not in told.err, told.err
    if code == 2:
        assert "Traceback" not in told.err, told.err
    for fragment in fragments:
        assert fragment in told.err, told.err
