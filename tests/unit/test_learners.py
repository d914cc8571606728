"""Several learners with parts of a batch compared to one learner with the whole, in float64, for every algorithm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import pytest
import torch

from echelon.algorithms import build_algorithm
from echelon.algorithms import model as model_module
from echelon.algorithms.model import Model
from echelon.algorithms.peers import ALONE, Peers
from echelon.algorithms.protocol import Algorithm
from echelon.config import (
    AlgorithmConfig,
    DdpgConfig,
    DqnConfig,
    ImpalaConfig,
    NetworkConfig,
    OptimizerConfig,
    PpoConfig,
    SacConfig,
)
from echelon.objectives import distributions
from echelon.roles.update import LocalUpdate, learn_once
from echelon.schema import Batch, Spaces, TransitionBatch
from learner_threads import in_threads, make_learners
from stage import Noted

T, B, NUM_BATCHES = 5, 12, 20
SEEN = gym.spaces.Box(-9.0, 9.0, (3,))
DISCRETE, CONTINUOUS = Spaces(SEEN, gym.spaces.Discrete(3)), Spaces(SEEN, gym.spaces.Box(-1.0, 1.0, (2,)))


@pytest.fixture
def precise(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Uses float64, so that results that differ only by rounding agree to ten digits."""
    torch.set_default_dtype(torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(model_module, "PRECISION", torch.float64)
    monkeypatch.setattr(
        distributions, "_log_probabilities", lambda scores, mask: distributions.forbid(scores, mask).log_softmax(-1)
    )
    yield
    torch.set_default_dtype(torch.float32)


class Pupil:
    """An algorithm, its model and its update."""

    def __init__(self, config: AlgorithmConfig, spaces: Spaces, network: NetworkConfig, peers: Peers) -> None:
        self.model = Model(network, spaces, config, seed=3)
        self.algorithm: Algorithm = build_algorithm(config, self.model, 5, peers)
        optimizer = OptimizerConfig(learning_rate=0.01, clip_norm=0.5)
        self.update = LocalUpdate(optimizer, self.model, self.algorithm.groups, peers)
        self.account = Noted()

    def learn(self, batches: list[Any]) -> None:
        for batch in batches:
            learn_once(self.algorithm, batch, self.update, self.account)

    def tensors(self) -> dict[str, torch.Tensor]:
        found = dict(enumerate(self.model.tensors()))
        for name, group in self.algorithm.groups.items():
            found |= {f"{name}-{i}": tensor for i, tensor in enumerate(group.module.tensors())}  # type: ignore[misc]
        return {str(name): tensor for name, tensor in found.items()}


def learn_apart(
    config: AlgorithmConfig, spaces: Spaces, network: NetworkConfig, wholes: list[Any], parts: list[list[Any]]
) -> None:
    """Learns from whole batches alone and from their parts together; all learners must end with the same weights."""
    alone = Pupil(config, spaces, network, ALONE)
    before = alone.model.parameters.clone()
    together = [Pupil(config, spaces, network, peers) for peers in make_learners(len(parts))]
    alone.learn(wholes)
    in_threads([lambda p=learner, b=batches: p.learn(b) for learner, batches in zip(together, parts, strict=True)])  # type: ignore[misc]
    learned = float((alone.model.parameters - before).abs().max())
    assert learned > 0.01, "there was something to learn"
    apart = max(
        float((tensor - alone.tensors()[name]).abs().max())
        for learner in together
        for name, tensor in learner.tensors().items()
    )
    print(f"measured: largest difference {apart:.1e}, where weights moved by {learned:.2f}")
    for learner in together:
        for name, tensor in learner.tensors().items():
            torch.testing.assert_close(
                tensor, alone.tensors()[name], rtol=0.0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )
        assert torch.equal(learner.model.parameters, together[0].model.parameters), "to the last bit"
        for mine, whole in zip(learner.account.noted, alone.account.noted, strict=True):
            assert mine == pytest.approx(whole, abs=1e-9)


def trajectories(spaces: Spaces, seed: int, state: int = 0) -> Batch:
    """A batch of random numbers in which some steps are not valid."""
    generator = torch.Generator().manual_seed(seed)
    flags = torch.rand(4, T + 1, B, generator=generator)
    if isinstance(spaces.action, gym.spaces.Discrete):
        action = torch.randint(3, (T, B), generator=generator)
    else:
        action = torch.randn(T, B, 2, generator=generator)
    return Batch(
        observation=2.0 * torch.randn(T + 1, B, 3, generator=generator) + 1.0,
        first=flags[0] < 0.2,
        action=action,
        log_prob=-torch.rand(T, B, generator=generator) - 0.5,
        reward=torch.randn(T, B, generator=generator) + 0.3,
        terminated=flags[1, :-1] < 0.1,
        truncated=flags[2, :-1] < 0.1,
        valid=flags[3, :-1] > 0.25,
        state=(torch.randn(B, state, generator=generator),) if state else (),
        lanes=torch.arange(B),
    )


def transitions(spaces: Spaces, seed: int) -> TransitionBatch:
    generator = torch.Generator().manual_seed(seed)
    if isinstance(spaces.action, gym.spaces.Discrete):
        action = torch.randint(3, (B,), generator=generator)
    else:
        action = torch.rand(B, 2, generator=generator) * 2.0 - 1.0
    return TransitionBatch(
        observation=2.0 * torch.randn(B, 3, generator=generator) + 1.0,
        action=action,
        reward=torch.randn(B, generator=generator),
        discount=0.9 * (torch.rand(B, generator=generator) > 0.2),
        next_observation=2.0 * torch.randn(B, 3, generator=generator) + 1.0,
        weight=torch.rand(B, generator=generator),
    )


def rows(batch: TransitionBatch, start: int, stop: int) -> TransitionBatch:
    """The part of `batch` of a learner that has rows `start` to `stop - 1`."""
    cut = slice(start, stop)
    return TransitionBatch(
        observation=batch.observation[cut],
        action=batch.action[cut],
        reward=batch.reward[cut],
        discount=batch.discount[cut],
        next_observation=batch.next_observation[cut],
        weight=batch.weight[cut],
        others=(start, B - stop),
    )


@pytest.mark.usefixtures("precise")
@pytest.mark.parametrize(
    ("config", "spaces", "size"),
    [
        (ImpalaConfig(), DISCRETE, 2),
        (ImpalaConfig(), CONTINUOUS, 3),
        (ImpalaConfig(normalize_advantage=True, normalize_reward=True), DISCRETE, 2),
        (ImpalaConfig(normalize_advantage=True, normalize_reward=True, minibatches=3), CONTINUOUS, 2),
        (PpoConfig(epochs=2, minibatches=4, value_clip=0.2, entropy_weight=0.01), DISCRETE, 2),
        (PpoConfig(epochs=1, minibatches=2, lag_correction="vtrace", normalize_reward=True), DISCRETE, 3),
        (PpoConfig(epochs=2, minibatches=2, lag_correction="decoupled"), CONTINUOUS, 2),
        (PpoConfig(epochs=1, minibatches=3, normalize_advantage=False), CONTINUOUS, 2),
    ],
    ids=[
        "impala",
        "impala-3",
        "impala-normalised",
        "impala-pieces",
        "ppo",
        "ppo-vtrace-3",
        "ppo-decoupled",
        "ppo-plain",
    ],
)
def test_learners_of_trajectories_equal_one_with_the_whole_batch(
    config: AlgorithmConfig, spaces: Spaces, size: int
) -> None:
    network = NetworkConfig(hidden=(6,), normalize_observation=True)
    wholes = [trajectories(spaces, seed) for seed in range(NUM_BATCHES)]
    columns = torch.arange(B).tensor_split(size)
    parts = [[whole.select(mine) for whole in wholes] for mine in columns]
    learn_apart(config, spaces, network, wholes, parts)


@pytest.mark.usefixtures("precise")
@pytest.mark.parametrize("config", [ImpalaConfig(minibatches=2), PpoConfig(epochs=1, minibatches=4)])
def test_learners_of_a_network_that_remembers_equal_one(config: AlgorithmConfig) -> None:
    """Minibatches consist of whole lanes, so a learner's part of one may be empty."""
    network = NetworkConfig(hidden=(6,), core="gru", core_size=4)
    wholes = [trajectories(DISCRETE, seed, state=4) for seed in range(NUM_BATCHES)]
    parts = [[whole.select(mine) for whole in wholes] for mine in torch.arange(B).tensor_split(4)]
    learn_apart(config, DISCRETE, network, wholes, parts)


@pytest.mark.usefixtures("precise")
@pytest.mark.parametrize(
    ("config", "spaces"),
    [
        (DqnConfig(target_period=7), DISCRETE),
        (DqnConfig(target_period=0, target_tau=0.1, dueling=False), DISCRETE),
        (DdpgConfig(), CONTINUOUS),
        (DdpgConfig(num_critics=2, policy_delay=2, target_noise=0.2, huber=1.0, publish_critic=True), CONTINUOUS),
        (SacConfig(), CONTINUOUS),
        (SacConfig(), DISCRETE),
        (SacConfig(learn_temperature=False), CONTINUOUS),
        (SacConfig(normalize_reward=True), CONTINUOUS),
    ],
    ids=["dqn", "dqn-soft", "ddpg", "td3", "sac", "sac-discrete", "sac-fixed", "sac-scaled"],
)
@pytest.mark.parametrize("normalize", [False, True])
def test_learners_of_transitions_equal_one_whatever_their_shares(
    config: AlgorithmConfig, spaces: Spaces, normalize: bool
) -> None:
    """Importance weights are those of the whole batch; shares change from batch to batch and may be empty."""
    network = NetworkConfig(hidden=(6,), activation="relu", normalize_observation=normalize)
    wholes = [transitions(spaces, seed) for seed in range(NUM_BATCHES)]
    cuts = [(5 * seed) % (B + 1) for seed in range(NUM_BATCHES)]
    assert {0, B} <= set(cuts)
    first = [rows(whole, 0, cut) for whole, cut in zip(wholes, cuts, strict=True)]
    second = [rows(whole, cut, B) for whole, cut in zip(wholes, cuts, strict=True)]
    learn_apart(config, spaces, network, wholes, [first, second])
