"""Recorded learning gives the same weights as learning kernel by kernel, for every variant of a batch."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from echelon.algorithms import build_algorithm
from echelon.algorithms.model import Model
from echelon.config import AlgorithmConfig, DdpgConfig, DqnConfig, NetworkConfig, OptimizerConfig, SacConfig, replace
from echelon.presets import preset
from echelon.roles.recorded import WARM_UP, RecordedLearning
from echelon.roles.update import LocalUpdate, LossAccount, learn_once, make_learning
from echelon.schema import Spaces, TransitionBatch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="records kernels of a GPU, and torch sees none")
FLAT, PIXELS = gym.spaces.Box(-1.0, 1.0, (5,)), gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
DISCRETE, CONTINUOUS = gym.spaces.Discrete(3), gym.spaces.Box(-1.0, 1.0, (2,))
RULES: dict[str, tuple[AlgorithmConfig, Spaces]] = {
    "dqn": (DqnConfig(target_period=3), Spaces(FLAT, DISCRETE)),
    "dqn on pixels": (DqnConfig(target_period=0, target_tau=0.1), Spaces(PIXELS, DISCRETE)),
    "ddpg": (DdpgConfig(), Spaces(FLAT, CONTINUOUS)),
    "td3 without noise": (DdpgConfig(num_critics=2, policy_delay=2), Spaces(FLAT, CONTINUOUS)),
    "sac on pixels, discrete": (SacConfig(), Spaces(PIXELS, DISCRETE)),
}
NETWORK = NetworkConfig(hidden=(16,), normalize_observation=True)
NUM_BATCHES, SIZE = WARM_UP + 8, 6


class Learner:
    """An algorithm, its update, and the fixed memory of its batches."""

    def __init__(self, config: AlgorithmConfig, spaces: Spaces, device: str, rate: float = 1e-2) -> None:
        self.spaces = spaces
        model = Model(NETWORK, spaces, config, seed=1, device=device)
        self.algorithm: Any = build_algorithm(config, model, 1)
        self.update = LocalUpdate(OptimizerConfig(learning_rate=rate), model, self.algorithm.groups)
        self.account, self.batch = LossAccount(), self.draw(0, device)
        self.priorities: list[torch.Tensor] = []

    def draw(self, seed: int, device: str) -> TransitionBatch:
        rng, (seen, done) = np.random.default_rng(seed), (self.spaces.observation, self.spaces.action)

        def observation() -> torch.Tensor:
            shape = (SIZE, *(seen.shape or ()))
            if seen.dtype == np.uint8:
                return torch.from_numpy(rng.integers(256, size=shape, dtype=np.uint8)).to(device)
            return torch.from_numpy(rng.standard_normal(shape, np.float32)).to(device)

        is_discrete = isinstance(done, gym.spaces.Discrete)
        action = rng.integers(3, size=SIZE) if is_discrete else rng.uniform(-1, 1, (SIZE, 2)).astype(np.float32)
        numbers = [torch.from_numpy(rng.random(SIZE, np.float32)).to(device) for _ in range(3)]
        return TransitionBatch(
            observation(), torch.from_numpy(action).to(device), numbers[0], numbers[1], observation(), numbers[2]
        )

    def land(self, seed: int) -> TransitionBatch:
        """Returns the next batch, in the memory of the previous one."""
        new = self.draw(seed, "cpu")
        for name in ("observation", "action", "reward", "discount", "next_observation", "weight"):
            getattr(self.batch, name).copy_(getattr(new, name))
        return self.batch

    def keep(self, keys: Any, priorities: torch.Tensor) -> None:
        self.priorities.append(priorities.clone())


def tensors(algorithm: Any) -> dict[str, torch.Tensor]:
    """All tensors that learning changes."""
    found = {f"model {name}": tensor for name, tensor in algorithm.model.weights().items()}
    for name, group in algorithm.groups.items():
        found |= {f"{name} {key}": tensor for key, tensor in group.module.weights().items()}
    for name, target in algorithm.targets.items():
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
    assert one.algorithm.num_learned == other.algorithm.num_learned == NUM_BATCHES
    mine, theirs = tensors(one.algorithm), tensors(other.algorithm)
    for key, tensor in theirs.items():
        assert torch.allclose(mine[key], tensor, rtol=1e-3, atol=1e-4), key
    torch.testing.assert_close(torch.stack(one.priorities), torch.stack(other.priorities), rtol=1e-2, atol=1e-3)
    assert one.account.names == other.account.names
    means = other.account.take()
    assert one.account.take() == pytest.approx(means, rel=1e-2, abs=1e-3) and len(means) >= 3


@needs_gpu
def test_recorded_learning_draws_new_noise_for_every_batch_and_goes_on_after_a_checkpoint() -> None:
    learner = Learner(SacConfig(), Spaces(FLAT, CONTINUOUS), "cuda", rate=1e-12)
    recorded = RecordedLearning(learner.algorithm, learner.update)
    losses = []
    for _ in range(NUM_BATCHES):
        recorded(learner.land(0), learner.account, lambda: None, learner.keep)
        losses.append(learner.account.take()["loss"])
    assert len(set(losses)) == NUM_BATCHES, "the same batch, other actions"
    state = learner.algorithm.state_dict()
    assert state["num_learned"] == NUM_BATCHES
    successor = Learner(SacConfig(), Spaces(FLAT, CONTINUOUS), "cuda", rate=1e-12)
    successor.algorithm.load_state_dict(state)
    assert torch.equal(successor.algorithm.generator.get_state(), learner.algorithm.generator.get_state())


def test_what_cannot_be_recorded_is_learned_kernel_by_kernel() -> None:
    learner = Learner(*RULES["dqn"], "cpu")
    config = replace(preset("dqn", "CartPole-v1"))
    learn = make_learning(config, learner.algorithm, learner.update)
    assert not isinstance(learn, RecordedLearning), "there is no GPU"
    learn(learner.land(1), learner.account, lambda: None, learner.keep)
    assert learner.algorithm.num_learned == 1 and learner.priorities[0].shape == (SIZE,)
    assert "loss" in learner.account.take()


@needs_gpu
def test_our_networks_are_recorded_and_others_are_not() -> None:
    learner = Learner(*RULES["dqn"], "cuda")
    config = replace(preset("dqn", "CartPole-v1"), **{"optimizer.schedule": "constant"})
    fixed = {"network.name": "mine:make", "optimizer.schedule": "linear", "learner.compile": True}
    assert isinstance(make_learning(config, learner.algorithm, learner.update), RecordedLearning)
    for key, value in fixed.items():
        changed = replace(config, **{key: value})
        assert not isinstance(make_learning(changed, learner.algorithm, learner.update), RecordedLearning), key
