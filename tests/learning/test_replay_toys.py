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
from echelon.runs.metrics import read_rows

Learn = Callable[..., echelon.RunResult]
SOFT = {"algorithm.random_steps": 200, "algorithm.target_tau": 0.02, "algorithm.critic_learning_rate": 5e-3}
RULES: dict[str, dict[str, Any]] = {
    "dqn": {"algorithm.epsilon_steps": 600, "algorithm.target_period": 50},
    "apex-dqn": {"algorithm.target_period": 50},
    "ddpg": {**SOFT, "algorithm.critic_weight_decay": 0.0},  # rewards are far below 1 here
    "td3": SOFT,
    "apex-ddpg": SOFT,
    "sac": SOFT,
}


@pytest.fixture
def learn(tmp_path: Path, shm_dir: Path) -> Learn:
    """Trains a small network with large steps."""

    def train(name: str, env: Any, steps: int, **fields: Any) -> echelon.RunResult:
        common = {"env.id": env, "engine": "inline", "seed": 1, "stop.steps": steps, "evaluation.episodes": 0}
        places = {"run.dir": str(tmp_path / "run"), "shm_dir": str(shm_dir)}
        size = {"actor.num_actors": 2, "actor.envs": 4, "network.hidden": (32,), "optimizer.learning_rate": 5e-3}
        size |= {"replay.min_size": 200, "replay.batch": 64, "replay.samples_per_insert": 48.0}
        config = replace(preset(name, "CartPole-v1"), **{**common, **places, **size, **RULES[name], **fields})
        return echelon.train(config, output=io.StringIO())

    return train


@pytest.mark.parametrize("name", [pytest.param("dqn", marks=pytest.mark.full), "apex-dqn"])
def test_a_chain_needs_credit_over_several_steps(name: str, learn: Learn) -> None:
    assert play(learn(name, Chain, 2_400), 5) == 1.0


def test_entropy_finds_the_best_arm(learn: Learn) -> None:
    fields = {"algorithm.target_entropy": 0.3, "algorithm.temperature": 0.2}
    assert play(learn("sac", Bandit, 800, **fields), 5) == 1.0


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.full) for name in ("ddpg", "td3")), "apex-ddpg", "sac"]
)
def test_a_continuous_target_is_hit(name: str, learn: Learn) -> None:
    fields = {"algorithm.target_entropy": -3.0, "algorithm.temperature": 0.1} if name == "sac" else {}
    assert play(learn(name, Target, 1_600, **fields), 5) > -0.01


def test_importance_weights_correct_the_more_the_further_a_run_is(learn: Learn) -> None:
    fields = {"replay.beta_start": 0.2, "replay.beta_end": 0.8, "replay.samples_per_insert": 8.0}
    rows = read_rows(learn("apex-dqn", Chain, 800, **fields).run_dir)
    found = [(row["progress"], row["replay.beta"]) for row in rows if row["kind"] == "train"]
    assert found[-1] == pytest.approx((1.0, 0.8), abs=0.02)  # the last update may be a step or two before the end
    learning = [(progress, beta) for progress, beta in found if progress > 0.3]  # the first batch waits for min_size
    assert all(beta == pytest.approx(0.2 + 0.6 * progress, abs=0.02) for progress, beta in learning)
