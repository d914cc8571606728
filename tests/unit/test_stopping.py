"""When a run is over, and how far it is."""

from __future__ import annotations

import time

import pytest

from echelon.config import StopConfig
from echelon.roles.source import RETURN_WINDOW
from echelon.roles.stopping import progress, stop_reason

ALL = StopConfig(steps=1_000, minutes=2.0, until_return=10.0, epochs=8)
FULL = [10.0] * RETURN_WINDOW


@pytest.mark.parametrize(
    ("env_steps", "elapsed_s", "epochs", "returns", "reason", "part"),
    [
        (0, 0.0, 0, [], "", 0.0),
        (500, 30.0, 2, FULL[1:], "", 0.5),
        (100, 90.0, 2, [0.0, *FULL[1:]], "", 0.75),
        (100, 30.0, 7, [], "", 0.875),
        (1_000, 0.0, 0, [], "steps", 1.0),
        (1_200, 0.0, 8, [], "steps", 1.0),
        (0, 0.0, 8, [], "epochs", 1.0),
        (0, 121.0, 0, [], "minutes", 1.0),
        (0, 0.0, 0, FULL, "return", 0.0),
    ],
)
def test_the_nearest_limit_counts(
    env_steps: int, elapsed_s: float, epochs: int, returns: list[float], reason: str, part: float
) -> None:
    assert stop_reason(ALL, env_steps, returns, time.time() - elapsed_s, epochs) == reason
    assert progress(ALL, env_steps, elapsed_s, epochs) == pytest.approx(part)


def test_a_run_without_limits_goes_on() -> None:
    assert stop_reason(StopConfig(), 10**9, FULL, 0.0, 10**6) == ""
    assert progress(StopConfig(), 10**9, 10.0**9, 10**6) == 0.0
