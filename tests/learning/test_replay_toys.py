"""Toy environments whose optimum is known: every preset with replay reaches it through the roles, inline."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_toys import Bandit, Chain, Target, play

import echelon
from echelon.config import replace
from echelon.presets import preset

Learn = Callable[..., echelon.RunResult]
SOFT = {"algorithm.random_steps": 200, "algorithm.target_tau": 0.02, "algorithm.critic_learning_rate": 5e-3}
RULES: dict[str, dict[str, Any]] = {
    "dqn": {"algorithm.epsilon_steps": 600, "algorithm.target_period": 50},
    "apex-dqn": {"algorithm.target_period": 50},
    "ddpg": SOFT,
    "apex-ddpg": SOFT,
    "sac": SOFT,
}


@pytest.fixture
def learn(tmp_path: Path, shm_dir: Path) -> Learn:
    """Trains a small network with large steps."""

    def train(name: str, env: Any, steps: int, **fields: Any) -> echelon.RunResult:
        common = {"env.id": env, "engine": "inline", "seed": 1, "stop.steps": steps, "evaluation.interval_s": 0.0}
        places = {"run.dir": str(tmp_path / "run"), "shm_dir": str(shm_dir)}
        size = {"actor.num_actors": 2, "actor.envs": 4, "network.hidden": (32,), "optimizer.learning_rate": 5e-3}
        size |= {"replay.min_size": 200, "replay.batch": 64, "replay.samples_per_insert": 48.0}
        config = replace(preset(name, "CartPole-v1"), **{**common, **places, **size, **RULES[name], **fields})
        return echelon.train(config, output=io.StringIO())

    return train


@pytest.mark.parametrize("name", ["dqn", "apex-dqn"])
def test_a_chain_needs_credit_over_several_steps(name: str, learn: Learn) -> None:
    assert play(learn(name, Chain, 2_400), 5) == 1.0


def test_entropy_finds_the_best_arm(learn: Learn) -> None:
    fields = {"algorithm.target_entropy": 0.3, "algorithm.temperature": 0.2}
    assert play(learn("sac", Bandit, 800, **fields), 5) == 1.0


@pytest.mark.parametrize("name", ["ddpg", "apex-ddpg", "sac"])
def test_a_continuous_target_is_hit(name: str, learn: Learn) -> None:
    fields = {"algorithm.target_entropy": -3.0, "algorithm.temperature": 0.1} if name == "sac" else {}
    assert play(learn(name, Target, 1_600, **fields), 5) > -0.01
