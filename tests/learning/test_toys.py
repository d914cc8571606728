"""Toy environments whose optimum is known: every preset reaches it, inline, from fixed seeds."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import echelon
from echelon.algorithms import Model
from echelon.config import TrainConfig, replace
from echelon.envs.make import probe_spaces
from echelon.envs.recall import Recall
from echelon.presets import preset
from echelon.runs.weights import find_weights

Step = tuple[Any, float, bool, bool, dict[str, Any]]
RULES = ["impala", "ppo", "a3c"]


class Bandit(gym.Env[Any, Any]):
    """One step, four arms; the third is the best."""

    PAY = (0.0, 0.4, 1.0, 0.6)

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
        self.action_space = gym.spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def step(self, action: Any) -> Step:
        return np.ones(1, np.float32), self.PAY[action], True, False, {}


class Chain(gym.Env[Any, Any]):
    """Five states: going on pays 1 at the far end only, turning back pays 0.3 at once and ends the episode."""

    NUM_STATES = 5

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Discrete(self.NUM_STATES)
        self.action_space = gym.spaces.Discrete(2)
        self.state = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.state = 0
        return self.state, {}

    def step(self, action: Any) -> Step:
        if action == 0:
            return self.state, 0.3, True, False, {}
        self.state = min(self.state + 1, self.NUM_STATES - 1)
        over = self.state == self.NUM_STATES - 1
        return self.state, float(over), over, False, {}


class Target(Bandit):
    """Continuous: the closer to 0.3, the better; the best is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def step(self, action: Any) -> Step:
        return np.ones(1, np.float32), -float((action[0] - 0.3) ** 2), True, False, {}


class Pair(Bandit):
    """Two choices at once: half a point for the last of the first, half for naming what is seen with the second."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Discrete(4)
        self.action_space = gym.spaces.MultiDiscrete([3, 4])
        self.seen = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.seen = int(self.np_random.integers(4))
        return self.seen, {}

    def step(self, action: Any) -> Step:
        return self.seen, 0.5 * (action[0] == 2) + 0.5 * (action[1] == self.seen), True, False, {}


class Masked(Bandit):
    """Some of five actions are allowed, as the mask says and `options` shows; the highest of them pays 1."""

    def __init__(self) -> None:
        self.action_space = gym.spaces.Discrete(5)
        self.observation_space = gym.spaces.Dict(
            {"action_mask": gym.spaces.MultiBinary(5), "options": gym.spaces.Box(0.0, 1.0, (5,), np.float32)}
        )
        self.allowed = np.ones(5, np.int8)

    def look(self) -> Any:
        return {"action_mask": self.allowed, "options": self.allowed.astype(np.float32)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.allowed = (self.np_random.random(5) < 0.5).astype(np.int8)
        self.allowed[self.np_random.integers(5)] = 1
        return self.look(), {}

    def step(self, action: Any) -> Step:
        assert self.allowed[action], f"action {action} is not allowed by {self.allowed}"
        return self.look(), float(action == np.flatnonzero(self.allowed)[-1]), True, False, {}


class Cut(Bandit):
    """Pays 1 a step for ever, in one state; cut (or ended) every five steps."""

    def __init__(self, terminates: bool) -> None:
        super().__init__()
        self.action_space = gym.spaces.Discrete(2)
        self.terminates, self.t = terminates, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.t = 0
        return super().reset(seed=seed)

    def step(self, action: Any) -> Step:
        self.t += 1
        over = self.t == 5
        return np.ones(1, np.float32), 1.0, over and self.terminates, over and not self.terminates, {}


Learn = Callable[..., echelon.RunResult]
PLAIN = ("impala", "a3c")  # rules whose rewards are normalized here


@pytest.fixture
def learn(tmp_path: Path, shm_dir: Path) -> Learn:
    """Trains a small network with large steps."""

    def train(name: str, env: Any, steps: int, **fields: Any) -> echelon.RunResult:
        config = preset(name, "CartPole-v1")
        common = {"engine": "inline", "seed": 1, "shm_dir": str(shm_dir), "run.dir": str(tmp_path / "run")}
        shape = {"actor.num_actors": 1, "actor.envs": 16, "actor.trajectory": 16, "network.hidden": (16,)}
        rule = {"optimizer.learning_rate": 0.01, "evaluation.episodes": 0, "stop.steps": steps, "env.id": env}
        rule |= {"optimizer.schedule": "constant", "network.normalize_observation": False}
        if name.endswith("ppo"):
            rule |= {"algorithm.epochs": 4, "algorithm.minibatches": 4, "algorithm.entropy_weight": 0.01}
        rule |= {"algorithm.normalize_advantage": name.endswith("ppo"), "algorithm.normalize_reward": name in PLAIN}
        return echelon.train(replace(config, **{**common, **shape, **rule, **fields}), output=io.StringIO())

    return train


def play(result: echelon.RunResult, episodes: int = 50) -> float:
    """The mean return of greedy episodes."""
    return float(echelon.evaluate(result.run_dir, episodes=episodes)["return_mean"])


@pytest.mark.parametrize("name", [*RULES, "async-ppo"])
def test_bandit(name: str, learn: Learn) -> None:
    result = learn(name, Bandit, 6_000)
    assert play(result, 5) == 1.0
    assert result.return_mean is not None and result.return_mean > 0.9, "and it is chosen nearly always"


@pytest.mark.parametrize("name", RULES)
def test_a_chain_needs_credit_over_several_steps(name: str, learn: Learn) -> None:
    assert play(learn(name, Chain, 15_000), 5) == 1.0


@pytest.mark.parametrize("name", RULES)
def test_a_continuous_target_is_hit(name: str, learn: Learn) -> None:
    fields = {"optimizer.schedule": "linear", "algorithm.entropy_weight": 0.0}  # the last steps are the finest
    if name != "ppo":
        fields |= {"actor.trajectory": 4}  # one step a batch: more and smaller batches
    assert play(learn(name, Target, 12_000, **fields), 5) > -0.01


@pytest.mark.parametrize("name", RULES)
def test_two_choices_at_once(name: str, learn: Learn) -> None:
    assert play(learn(name, Pair, 12_000)) == 1.0


@pytest.mark.parametrize("name", RULES)
def test_masked_actions_are_never_taken_and_the_best_of_the_others_is(name: str, learn: Learn) -> None:
    assert play(learn(name, Masked, 20_000, **{"stop.until_return": 0.95})) > 0.95


def value_of(result: echelon.RunResult, config_fields: dict[str, Any]) -> float:
    """What the value network says of the only state."""
    env = replace(TrainConfig(), **config_fields).env
    model = Model(replace(TrainConfig(), **{"network.hidden": (16,)}).network, probe_spaces(env))
    model.load_weights(find_weights(str(result.run_dir)), "the run")
    with torch.no_grad():
        return float(model.evaluate(torch.ones(1, 1, 1), (), torch.zeros(1, 1, dtype=torch.bool)).value)


@pytest.mark.parametrize("name", RULES)
def test_what_is_cut_is_worth_as_much_as_if_it_went_on(name: str, learn: Learn) -> None:
    fields = {"env.id": Cut, "env.kwargs": {"terminates": False}}
    result = learn(name, Cut, 30_000, **{"env.kwargs": fields["env.kwargs"], "algorithm.discount": 0.9})
    assert value_of(result, fields) == pytest.approx(10.0, rel=0.1)  # 1 / (1 - 0.9)


@pytest.mark.parametrize("name", RULES)
def test_what_ends_is_worth_what_it_still_pays(name: str, learn: Learn) -> None:
    fields = {"env.id": Cut, "env.kwargs": {"terminates": True}}
    result = learn(name, Cut, 10_000, **{"env.kwargs": fields["env.kwargs"], "algorithm.discount": 0.9})
    assert 1.0 < value_of(result, fields) < 4.1  # at most 1 + 0.9 + ... + 0.9^4


@pytest.mark.parametrize(("name", "core"), [("impala", "lstm"), ("a3c", "lstm"), ("ppo", "lstm"), ("ppo", "gru")])
def test_memory_solves_recall(name: str, core: str, learn: Learn) -> None:
    fields = {"env.kwargs": {"delay": 3}, "network.core": core, "network.core_size": 16, "stop.until_return": 0.95}
    assert play(learn(name, Recall, 30_000, **fields)) > 0.9


def test_without_memory_recall_stays_at_chance(learn: Learn) -> None:
    result = learn("ppo", Recall, 10_000, **{"env.kwargs": {"delay": 3}})
    assert abs(play(result, 200)) < 0.3
    assert result.return_mean is not None and abs(result.return_mean) < 0.4


@pytest.mark.parametrize("name", RULES)
def test_cart_pole_is_balanced(name: str, learn: Learn) -> None:
    fields = {"network.hidden": (64,), "stop.until_return": 195.0, "actor.envs": 16 if name == "ppo" else 32}
    if name == "ppo":
        fields |= {"actor.trajectory": 32, "optimizer.learning_rate": 3e-3, "algorithm.entropy_weight": 0.0}
    else:
        fields |= {"optimizer.learning_rate": 5e-3}
    result = learn(name, "CartPole-v1", 200_000, **fields)
    assert result.status == "solved", result.summary
    assert result.return_mean is not None and result.return_mean >= 195
