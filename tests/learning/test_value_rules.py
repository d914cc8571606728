"""Toy environments whose optimum is known: every rule that learns action values reaches it, from fixed seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from test_toys import Bandit, Chain, Cut, Masked, Step, Target
from value_loop import Training

from echelon.config import replace
from echelon.presets import REPLAY_PRESETS

DISCRETE = {
    "dqn": {"preset": "dqn", "algorithm.epsilon_steps": 600, "algorithm.target_period": 50},
    "dqn plain": {
        "preset": "dqn",
        "algorithm.double": False,
        "algorithm.dueling": False,
        "algorithm.target_period": 0,
        "algorithm.target_tau": 0.02,
        "algorithm.epsilon_steps": 600,
    },
    "apex-dqn": {"preset": "apex-dqn", "algorithm.target_period": 50},
    "sac": {"preset": "sac", "algorithm.target_entropy": 0.3, "algorithm.temperature": 0.2},
}
CONTINUOUS = {
    "ddpg": {"preset": "ddpg", "algorithm.critic_weight_decay": 0.0},  # rewards are far below 1 here
    "td3": {"preset": "td3"},
    "apex-ddpg": {"preset": "apex-ddpg"},
    "sac": {"preset": "sac", "algorithm.target_entropy": -3.0, "algorithm.temperature": 0.1},
}


class Reach(gym.Env[Any, Any]):
    """A point at -1 or 1 is moved by half the action, four times; it costs its distance squared: 0.25 at best."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(-3.0, 3.0, (2,), np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.x, self.t = 0.0, 0

    def look(self) -> Any:
        return np.array([self.x, self.t / 4.0], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.x, self.t = float(self.np_random.choice([-1.0, 1.0])), 0
        return self.look(), {}

    def step(self, action: Any) -> Step:
        self.x, self.t = self.x + 0.5 * float(action[0]), self.t + 1
        return self.look(), -self.x * self.x, self.t == 4, False, {}


Learn = Callable[..., Training]


def cases(rules: dict[str, Any], *full: str) -> list[Any]:
    """The names of the rules; `full` are left to `make test-full`."""
    return [pytest.param(name, marks=pytest.mark.full) if name in full else name for name in rules]


@pytest.fixture
def learn() -> Iterator[Learn]:
    """Trains a small network with large steps."""
    started: list[Training] = []

    def train(rule: dict[str, Any], env: Any, steps: int, **fields: Any) -> Training:
        torch.set_num_threads(1)
        config = REPLAY_PRESETS[rule["preset"]]("CartPole-v1")
        common = {"env.id": env, "seed": 1, "network.hidden": (32,), "optimizer.learning_rate": 5e-3}
        common |= {"replay.min_size": 200, "replay.batch": 64, "replay.samples_per_insert": 48.0}
        if config.algorithm.name != "dqn":
            common |= {"algorithm.random_steps": 200, "algorithm.target_tau": 0.02}
            common |= {"algorithm.critic_learning_rate": 5e-3}
        training = Training(replace(config, **{**common, **rule, **fields}), num_envs=8, episodes=20)
        started.append(training)
        for point in training.run(steps, steps):
            training.greedy = point.greedy
        return training

    yield train
    for training in started:
        training.close()


@pytest.mark.parametrize("name", cases(DISCRETE, "dqn", "apex-dqn"))  # the chain asks more of them
def test_bandit(name: str, learn: Learn) -> None:
    assert learn(DISCRETE[name], Bandit, 800).greedy == 1.0


@pytest.mark.parametrize("name", cases(DISCRETE, "apex-dqn"))  # test_replay_toys.py has it
def test_a_chain_needs_credit_over_several_steps(name: str, learn: Learn) -> None:
    assert learn(DISCRETE[name], Chain, 2_400).greedy == 1.0


@pytest.mark.parametrize("name", cases(DISCRETE, "dqn plain", "apex-dqn"))  # they mask as dqn does
def test_masked_actions_are_never_taken_and_the_best_of_the_others_is(name: str, learn: Learn) -> None:
    assert learn(DISCRETE[name], Masked, 2_000).greedy > 0.95


@pytest.mark.parametrize("name", cases(CONTINUOUS, "apex-ddpg", "sac"))  # test_replay_toys.py has them
def test_a_continuous_target_is_hit(name: str, learn: Learn) -> None:
    assert learn(CONTINUOUS[name], Target, 1_600).greedy > -0.01


@pytest.mark.parametrize("name", CONTINUOUS)
def test_a_point_is_moved_where_it_costs_least(name: str, learn: Learn) -> None:
    assert learn(CONTINUOUS[name], Reach, 2_000).greedy > -0.29  # -0.25 is the best


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize(("terminates", "least", "most"), [(False, 9.0, 11.0), (True, 1.0, 4.1)])
def test_what_is_cut_goes_on_and_what_ends_does_not(
    terminates: bool, least: float, most: float, n_step: int, learn: Learn
) -> None:
    """1 a step for ever is worth 1 / (1 - 0.9); of five steps at most 1 + 0.9 + ... + 0.9^4 is left."""
    fields = {"env.kwargs": {"terminates": terminates}, "algorithm.discount": 0.9, "replay.n_step": n_step}
    training = learn(DISCRETE["dqn"], Cut, 1_600, **{**fields, "algorithm.target_period": 20})
    with torch.no_grad():
        value = float(training.model.params(torch.ones(1, 1)).max())
    assert least < value < most
