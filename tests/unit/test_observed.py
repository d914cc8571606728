"""What an unknown environment observes is found out in a process that leaves nothing behind."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from echelon.envs.observed import observed_family
from running import processes_marked
from warm import MARK

ENV = f"{Path(__file__).parents[1]}/unruly.py:ParentalEnv"


def test_what_the_environment_starts_ends_with_the_look_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, mark := secrets.token_hex(8))
    assert observed_family(ENV, {}, []) == "vectors"
    assert processes_marked(mark) == []
