"""Recorded learning gives the same weights as learning kernel by kernel, for every variant of a batch."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from echelon.algorithms import build_algorithm
from echelon.algorithms.impala import Impala
from echelon.algorithms.model import Model
from echelon.config import (
    AlgorithmConfig,
    DdpgConfig,
    DqnConfig,
    ImpalaConfig,
    NetworkConfig,
    OptimizerConfig,
    PpoConfig,
    SacConfig,
    replace,
)
from echelon.presets import preset
from echelon.roles.loss_account import LossAccount
from echelon.roles.recorded import WARM_UP, RecordedLearning
from echelon.roles.update import LocalUpdate, learn_once, make_learning
from echelon.schema import Batch, Spaces, TransitionBatch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="records kernels of a GPU, and torch sees none")
FLAT, PIXELS = gym.spaces.Box(-1.0, 1.0, (5,)), gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
DISCRETE, CONTINUOUS = gym.spaces.Discrete(3), gym.spaces.Box(-1.0, 1.0, (2,))
RULES: dict[str, tuple[AlgorithmConfig, Spaces]] = {
    "dqn": (DqnConfig(target_period=3), Spaces(FLAT, DISCRETE)),
    "dqn on pixels": (DqnConfig(target_period=0, target_tau=0.1), Spaces(PIXELS, DISCRETE)),
    "ddpg": (DdpgConfig(), Spaces(FLAT, CONTINUOUS)),
    "td3 without noise": (DdpgConfig(num_critics=2, policy_delay=2), Spaces(FLAT, CONTINUOUS)),
    "sac on pixels, discrete": (SacConfig(), Spaces(PIXELS, DISCRETE)),
    "impala": (ImpalaConfig(trace_lambda=0.95), Spaces(FLAT, CONTINUOUS)),
    "impala on pixels": (ImpalaConfig(normalize_advantage=True, reward_clip=1.0), Spaces(PIXELS, DISCRETE)),
}
NETWORK = NetworkConfig(hidden=(16,), normalize_observation=True)
NUM_BATCHES, SIZE, STEPS = WARM_UP + 8, 6, 5


class Learner:
    """An algorithm, its update, and the fixed memory of its batches."""

    def __init__(self, config: AlgorithmConfig, spaces: Spaces, device: str, rate: float = 1e-2) -> None:
        self.spaces = spaces
        model = Model(NETWORK, spaces, config, seed=1, device=device)
        self.algorithm: Any = build_algorithm(config, model, 1)
        self.update = LocalUpdate(OptimizerConfig(learning_rate=rate), model, self.algorithm.groups)
        self.account, self.batch = LossAccount(), self.draw(0, device)
        self.priorities: list[torch.Tensor] = []

    def draw(self, seed: int, device: str) -> Batch | TransitionBatch:
        rng, (seen, done) = np.random.default_rng(seed), (self.spaces.observation, self.spaces.action)

        def observation(*shape: int) -> torch.Tensor:
            shape = (*shape, *(seen.shape or ()))
            if seen.dtype == np.uint8:
                return torch.from_numpy(rng.integers(256, size=shape, dtype=np.uint8)).to(device)
            return torch.from_numpy(rng.standard_normal(shape, np.float32)).to(device)

        def action(*shape: int) -> torch.Tensor:
            is_discrete = isinstance(done, gym.spaces.Discrete)
            drawn = rng.integers(3, size=shape) if is_discrete else rng.uniform(-1, 1, (*shape, 2)).astype(np.float32)
            return torch.from_numpy(drawn).to(device)

        def number(*shape: int) -> torch.Tensor:
            return torch.from_numpy(rng.random(shape, np.float32)).to(device)

        if not isinstance(self.algorithm, Impala):
            return TransitionBatch(
                observation(SIZE), action(SIZE), number(SIZE), number(SIZE), observation(SIZE), number(SIZE)
            )
        ends = number(STEPS, SIZE) < 0.2
        return Batch(
            observation(STEPS + 1, SIZE),
            first=torch.cat((ends[:1], ends)),
            action=action(STEPS, SIZE),
            log_prob=-number(STEPS, SIZE),
            reward=number(STEPS, SIZE),
            terminated=ends,
            truncated=~ends & (number(STEPS, SIZE) < 0.1),
            valid=number(STEPS, SIZE) < 0.9,
            state=(),
            lanes=torch.arange(SIZE),
        )

    def land(self, seed: int) -> Batch | TransitionBatch:
        """Returns the next batch, in the memory of the previous one."""
        new = self.draw(seed, "cpu")
        for one in fields(new):
            value = getattr(new, one.name)
            if isinstance(value, torch.Tensor):
                getattr(self.batch, one.name).copy_(value)
        return self.batch

    def keep(self, keys: Any, priorities: torch.Tensor) -> None:
        self.priorities.append(priorities.clone())


def tensors(algorithm: Any) -> dict[str, torch.Tensor]:
    """All tensors that learning changes."""
    found = {f"model {name}": tensor for name, tensor in algorithm.model.weights().items()}
    for name, group in algorithm.groups.items():
        found |= {f"{name} {key}": tensor for key, tensor in group.module.weights().items()}
    for name, target in getattr(algorithm, "targets", {}).items():
        found |= {f"target {name} {key}": tensor for key, tensor in target.flat.weights().items()}
    return found


@needs_gpu
@pytest.mark.parametrize("name", RULES)
def test_recorded_learning_changes_the_same_as_learning_kernel_by_kernel(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # Adam amplifies the smallest differences
    one, other = Learner(*RULES[name], "cuda"), Learner(*RULES[name], "cuda")
    recorded = RecordedLearning(one.algorithm, one.update)
    for seed in range(NUM_BATCHES):
        recorded(one.land(seed), one.account, lambda: None, one.keep)
        learn_once(other.algorithm, other.land(seed), other.update, other.account, acknowledge=other.keep)
    assert len(recorded.recordings) == (2 if name in ("dqn", "td3 without noise") else 1)
    if not isinstance(one.algorithm, Impala):
        assert one.algorithm.num_learned == other.algorithm.num_learned == NUM_BATCHES
    mine, theirs = tensors(one.algorithm), tensors(other.algorithm)
    for key, tensor in theirs.items():
        assert torch.allclose(mine[key], tensor, rtol=1e-3, atol=1e-4), key
    for priorities, expected in zip(one.priorities, other.priorities, strict=True):
        torch.testing.assert_close(priorities, expected, rtol=1e-2, atol=1e-3)
    assert one.account.names == other.account.names
    means = other.account.take()
    assert one.account.take() == pytest.approx(means, rel=1e-2, abs=1e-3) and len(means) >= 3


@needs_gpu
def test_a_new_learning_rate_reaches_recorded_learning() -> None:
    """It is a constant of the recorded kernels."""
    learner = Learner(*RULES["dqn"], "cuda")
    recorded = RecordedLearning(learner.algorithm, learner.update)

    def learn() -> torch.Tensor:
        for seed in range(NUM_BATCHES):
            recorded(learner.land(seed), learner.account, lambda: None, learner.keep)
        return learner.algorithm.model.parameters.clone()

    before, after = learn(), learn()
    assert not torch.equal(before, after)
    learner.update.schedule(0.0, 1e-30)
    assert torch.equal(learn(), after)
    learner.update.schedule(0.0)
    assert not torch.equal(learn(), after)


@needs_gpu
def test_recorded_learning_draws_new_noise_for_every_batch_and_goes_on_after_a_checkpoint() -> None:
    learner = Learner(SacConfig(), Spaces(FLAT, CONTINUOUS), "cuda", rate=1e-12)
    recorded = RecordedLearning(learner.algorithm, learner.update)
    losses = []
    for _ in range(NUM_BATCHES):
        recorded(learner.land(0), learner.account, lambda: None, learner.keep)
        losses.append(learner.account.take()["loss.policy"])
    assert len(set(losses)) == NUM_BATCHES, "the same batch, other actions"
    state = learner.algorithm.state_dict()
    assert state["num_learned"] == NUM_BATCHES
    successor = Learner(SacConfig(), Spaces(FLAT, CONTINUOUS), "cuda", rate=1e-12)
    successor.algorithm.load_state_dict(state)
    assert torch.equal(successor.algorithm.generator.get_state(), learner.algorithm.generator.get_state())


@pytest.mark.parametrize(
    ("config", "network"),
    [
        (PpoConfig(), NETWORK),
        (ImpalaConfig(epochs=2), NETWORK),
        (ImpalaConfig(normalize_reward=True), NETWORK),
        (ImpalaConfig(), NetworkConfig(core="gru", core_size=4)),
    ],
)
def test_operations_that_depend_on_the_batch_are_not_recorded(config: AlgorithmConfig, network: NetworkConfig) -> None:
    model = Model(network, Spaces(FLAT, DISCRETE), config, seed=1, device="cpu")
    assert not build_algorithm(config, model, 1).is_static
    plain = Model(NETWORK, Spaces(FLAT, DISCRETE), ImpalaConfig(), seed=1, device="cpu")
    assert build_algorithm(ImpalaConfig(), plain, 1).is_static


def test_what_cannot_be_recorded_is_learned_kernel_by_kernel() -> None:
    learner = Learner(*RULES["dqn"], "cpu")
    config = replace(preset("dqn", "CartPole-v1"))
    learn = make_learning(config, learner.algorithm, learner.update)
    assert not isinstance(learn, RecordedLearning), "there is no GPU"
    learn(learner.land(1), learner.account, lambda: None, learner.keep)
    assert learner.algorithm.num_learned == 1 and learner.priorities[0].shape == (SIZE,)
    assert "loss.total" in learner.account.take()


@needs_gpu
def test_our_networks_are_recorded_and_others_are_not() -> None:
    learner = Learner(*RULES["dqn"], "cuda")
    config = replace(preset("dqn", "CartPole-v1"), **{"optimizer.schedule": "constant"})
    fixed = {"network.name": "mine:make", "optimizer.schedule": "linear", "learner.compile": True}
    assert isinstance(make_learning(config, learner.algorithm, learner.update), RecordedLearning)
    for key, value in fixed.items():
        changed = replace(config, **{key: value})
        assert not isinstance(make_learning(changed, learner.algorithm, learner.update), RecordedLearning), key
