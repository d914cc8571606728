"""What a run shows and records until its first update."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from echelon.config import replace
from echelon.presets import preset
from echelon.roles.plan.stages import Stages
from echelon.training import train


class Sleepy(gym.Env[Any, Any]):
    """Takes 5 ms for a step; every episode has 10."""

    observation_space, action_space = gym.spaces.Box(-1.0, 1.0, (2,)), gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(0.005)
        self.t += 1
        return np.zeros(2, np.float32), 1.0, self.t == 10, False, {}


def test_a_run_without_an_update_says_what_it_does_and_records_its_start(shm_dir: Path, tmp_path: Path) -> None:
    changes = {
        "env.id": Sleepy,
        "engine": "inline",
        "actor.num_actors": 1,
        "actor.envs": 1,
        "actor.trajectory": 320,  # at least 1.6 s
        "learner.batch": 1,
        "stop.steps": 320,
        "evaluation.episodes": 0,
        "run.dir": str(tmp_path / "run"),
        "shm_dir": str(shm_dir),
    }
    output = io.StringIO()
    result = train(replace(preset("impala", "CartPole-v1"), **changes), output=output)
    assert "of 320 steps" in output.getvalue() and "collecting" in output.getvalue()
    assert list(result.summary["start"]) == ["imports", "memory", "roles", "first update"]


def test_stages_that_take_long_are_announced_ever_more_rarely() -> None:
    now_s, lines = 0.0, list[str]()
    stages = Stages(lines.append, lambda: now_s)
    stages.begin("environment", "checking Sleepy")
    for now_s in (1.0, 2.5, 3.0, 6.0):  # noqa: B007
        stages.look()
    stages.begin("acting")
    now_s = 60.0
    stages.look()
    stages.end()
    assert lines == ["checking Sleepy (2 s so far)", "checking Sleepy (6 s so far)"]
    assert stages.seconds == {"environment": 6.0, "acting": 54.0}
