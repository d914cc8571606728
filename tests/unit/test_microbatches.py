"""`learner.microbatches`: the same gradient, losses and statistics as with whole minibatches, in less memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from echelon.algorithms.model import Model
from echelon.algorithms.peers import ALONE, Peers
from echelon.algorithms.protocol import Loss
from echelon.bench.allocated import Allocated
from echelon.config import AlgorithmConfig, ImpalaConfig, NetworkConfig, PpoConfig, TrainConfig, replace
from echelon.errors import ConfigError
from echelon.presets import preset
from echelon.roles.plan.layouts import window
from echelon.roles.queue_source import QueueSource
from echelon.roles.update import ModelTrainable, learn_once
from echelon.schema import Batch, Spaces, TrajectorySchema
from echelon.transport.shared_memory import SlotRing
from learner_threads import in_threads, make_learners
from stage import Noted

T, B = 6, 12
SEEN = gym.spaces.Box(-9.0, 9.0, (3,))
DISCRETE, CONTINUOUS = Spaces(SEEN, gym.spaces.Discrete(3)), Spaces(SEEN, gym.spaces.Box(-1.0, 1.0, (2,)))
PPO = PpoConfig(epochs=2, minibatches=2, normalize_reward=True)


class Learning:
    """A learner's model and update; keeps the gradient of every optimizer step, and learns too slowly to matter."""

    def __init__(
        self, rule: AlgorithmConfig, spaces: Spaces, microbatches: int, peers: Peers = ALONE, **network: Any
    ) -> None:
        settings = {"hidden": (8, 8), "normalize_observation": True, **network}
        config = replace(
            TrainConfig(algorithm=rule, network=NetworkConfig(**settings)),
            **{"learner.microbatches": microbatches, "optimizer.learning_rate": 1e-12, "optimizer.clip_norm": 0.0},
        )
        model = Model(config.network, spaces, rule, seed=3, microbatches=config.learner.microbatches)
        self.trainable, self.account = ModelTrainable(config, model, peers), Noted()
        self.gradients: list[torch.Tensor] = []
        optimizer = self.trainable.update.optimizer
        step = optimizer.step

        def noted_step() -> None:
            self.gradients.append(model.gradients.clone())
            step()

        optimizer.step = noted_step  # type: ignore[method-assign]

    def learn(self, *batches: Batch) -> Learning:
        for batch in batches:
            self.trainable.learn(batch, self.account, lambda: None, None)
        return self


def make_batch(spaces: Spaces, seed: int = 0, state: tuple[int, ...] = ()) -> Batch:
    """Random trajectories with few valid steps in some lanes, and none in the first two."""
    generator = torch.Generator().manual_seed(seed)
    flags = torch.rand(4, T + 1, B, generator=generator)
    action = torch.randn(T, B, 2, generator=generator)
    return Batch(
        observation=2.0 * torch.randn(T + 1, B, 3, generator=generator) + 1.0,
        first=flags[0] < 0.2,
        action=action if isinstance(spaces.action, gym.spaces.Box) else (3 * flags[0, :-1]).long(),
        log_prob=-torch.rand(T, B, generator=generator) - 0.5,
        reward=torch.randn(T, B, generator=generator) + 0.3,
        terminated=flags[1, :-1] < 0.1,
        truncated=flags[2, :-1] < 0.1,
        valid=flags[3, :-1] < torch.arange(-1, B - 1) / B,
        state=tuple(torch.randn(B, size, generator=generator) for size in state),
        lanes=torch.arange(B),
    )


def assert_same(found: Learning, expected: Learning) -> None:
    """Checks the gradients of all optimizer steps, and the losses and statistics of all batches."""
    assert len(found.gradients) == len(expected.gradients) > 0
    for one, other in zip(found.gradients, expected.gradients, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-6
    for mine, whole in zip(found.account.noted, expected.account.noted, strict=True):
        assert mine == pytest.approx(whole, rel=1e-5, abs=1e-6)
    for mine, whole in zip(found.trainable.model.tensors(), expected.trainable.model.tensors(), strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-5, atol=1e-6)
    rewards = [learning.trainable.algorithm.state_dict()["rewards"] for learning in (found, expected)]
    assert rewards[0]["squares"] == pytest.approx(rewards[1]["squares"])
    torch.testing.assert_close(rewards[0]["returns"], rewards[1]["returns"])


@pytest.mark.parametrize(
    ("rule", "spaces"),
    [
        (ImpalaConfig(normalize_reward=True), DISCRETE),
        (ImpalaConfig(epochs=2, minibatches=2), CONTINUOUS),
        (PPO, DISCRETE),
        (replace(PPO, lag_correction="vtrace", value_clip=0.2, entropy_weight=0.01), CONTINUOUS),
        (replace(PPO, lag_correction="decoupled"), CONTINUOUS),
        (replace(PPO, normalize_advantage=False), DISCRETE),
    ],
    ids=["impala", "impala-minibatches", "ppo", "ppo-vtrace", "ppo-decoupled", "ppo-plain"],
)
@pytest.mark.parametrize("microbatches", [2, 5, 6])
def test_the_gradient_is_that_of_the_whole_minibatch(rule: AlgorithmConfig, spaces: Spaces, microbatches: int) -> None:
    batches = [make_batch(spaces, seed) for seed in range(2)]
    assert_same(
        Learning(rule, spaces, microbatches).learn(*batches), Learning(rule, spaces, microbatches=1).learn(*batches)
    )


@pytest.mark.parametrize("core", ["gru", "lstm"])
@pytest.mark.parametrize("rule", [ImpalaConfig(), PPO], ids=["impala", "ppo"])
def test_the_gradient_of_a_recurrent_network_is_the_same(rule: AlgorithmConfig, core: str) -> None:
    network, state = {"core": core, "core_size": 4}, (4,) * (2 if core == "lstm" else 1)
    batches = [make_batch(DISCRETE, seed, state) for seed in range(2)]
    expected = Learning(rule, DISCRETE, 1, **network).learn(*batches)
    assert_same(Learning(rule, DISCRETE, 4, **network).learn(*batches), expected)


@pytest.mark.parametrize("rule", [ImpalaConfig(normalize_reward=True), PPO], ids=["impala", "ppo"])
def test_several_learners_accumulate_together(rule: AlgorithmConfig) -> None:
    """Each accumulates its own microbatches, and one all-reduce for each optimizer step sums them."""
    whole = make_batch(DISCRETE)
    learners = [Learning(rule, DISCRETE, 3, peers) for peers in make_learners(2)]
    parts = [whole.select(columns) for columns in torch.arange(B).tensor_split(2)]
    in_threads([lambda x=x, part=part: x.learn(part) for x, part in zip(learners, parts, strict=True)])  # type: ignore[misc]
    expected = Learning(rule, DISCRETE, microbatches=1).learn(whole)
    for learner in learners:
        for one, other in zip(learner.gradients, expected.gradients, strict=True):
            assert float((one - other).norm() / other.norm()) < 1e-6
        assert learner.account.noted[0] == pytest.approx(expected.account.noted[0], rel=1e-5, abs=1e-6)
    assert torch.equal(learners[0].gradients[0], learners[1].gradients[0])


def assembled(folder: Path, num_actors: int, data: dict[str, np.ndarray[Any, Any]]) -> Batch:
    """Returns the batch of `num_actors` actors that together have written `data`, of B environments."""
    envs = B // num_actors
    fields = {"actor.num_actors": num_actors, "actor.envs": envs, "actor.trajectory": T, "learner.batch": num_actors}
    config, schema = replace(TrainConfig(), **fields, **{"learner.max_lag": 0}), TrajectorySchema(DISCRETE, T, envs)
    folder.mkdir()
    ring = SlotRing(folder, schema, num_actors, window(config))
    source = QueueSource(config, schema, ring, torch.device("cpu"))
    source.admit()
    for actor in range(num_actors):
        for name, view in ring.writable(actor).items():
            view[...] = data[name][:, actor * envs : (actor + 1) * envs] if name != "version" else 1
        ring.commit(actor)
    batch = source.take(1)
    source.close()
    assert isinstance(batch, Batch)
    return batch


@pytest.mark.parametrize("rule", [ImpalaConfig(), PPO], ids=["impala", "ppo"])
def test_several_actors_give_the_gradient_of_one_with_all_their_environments(
    tmp_path: Path, rule: AlgorithmConfig
) -> None:
    draw, batch = np.random.default_rng(0), make_batch(DISCRETE)
    data: dict[str, Any] = {name: getattr(batch, name).numpy() for name in ("observation", "first", "action", "valid")}
    data |= {name: getattr(batch, name).numpy() for name in ("log_prob", "reward", "terminated", "truncated")}
    data |= {"episode_return": draw.random((T, B)), "episode_length": np.zeros((T, B))}
    expected = Learning(rule, DISCRETE, microbatches=1).learn(assembled(tmp_path / "one", 1, data))
    for count in (2, 4):
        found = Learning(rule, DISCRETE, microbatches=count).learn(assembled(tmp_path / str(count), count, data))
        assert_same(found, expected)


@pytest.mark.parametrize("rule", [ImpalaConfig(), replace(PPO, minibatches=1)], ids=["impala", "ppo"])
def test_activations_need_a_part_of_the_memory(rule: AlgorithmConfig) -> None:
    batch = make_batch(DISCRETE).select(torch.arange(B).repeat(40))
    peaks = []
    for microbatches in (1, 8):
        learning = Learning(rule, DISCRETE, microbatches, hidden=(64, 64)).learn(batch)  # creates Adam's moments
        with Allocated() as allocated:
            learning.learn(batch)
        peaks.append(allocated.peak)
    assert peaks[1] < 0.25 * peaks[0], f"peaks in bytes: {peaks}"


@pytest.mark.parametrize(
    ("name", "fields", "told"),
    [
        ("impala", {"algorithm.normalize_advantage": True}, "Use --algorithm.normalize-advantage false, or --learner"),
        ("a3c", {}, "does not work with a3c: the actors compute the gradients. Use --algorithm.minibatches"),
        ("dqn", {}, "does not work with dqn: it learns from transitions. Lower --replay.batch, or --learner.micro"),
        ("ppo", {"learner.microbatches": 0}, "learner.microbatches=0 must be at least 1"),
    ],
)
def test_what_cannot_be_split_is_refused(name: str, fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        replace(preset(name, "CartPole-v1"), **{"learner.microbatches": 2, **fields})


@pytest.mark.parametrize(
    ("rule", "network", "most"),
    [
        (ImpalaConfig(), {}, B),
        (ImpalaConfig(minibatches=4), {}, 3),
        (PPO, {}, B),
        (replace(PPO, minibatches=9), {}, T * B // 9),
        (PPO, {"core": "gru", "core_size": 4}, B // 2),
    ],
)
def test_more_microbatches_than_sequences_are_refused(rule: AlgorithmConfig, network: Any, most: int) -> None:
    batch = make_batch(DISCRETE, state=(4,) if network else ())
    Learning(rule, DISCRETE, most, **network).learn(batch)
    with pytest.raises(ConfigError, match=f"microbatches={most + 1} exceeds the {most} sequences"):
        Learning(rule, DISCRETE, most + 1, **network).learn(batch)


def test_an_algorithm_with_several_losses_is_refused() -> None:
    learning, batch = Learning(ImpalaConfig(), DISCRETE, microbatches=2), make_batch(DISCRETE)

    class TwoLosses:
        model = learning.trainable.model

        def minibatches(self, batch: Batch) -> list[Batch]:
            return [batch]

        def losses(self, minibatch: Batch) -> list[Loss]:
            return [Loss(torch.zeros(())), Loss(torch.zeros(()))]

    with pytest.raises(ConfigError, match=r"one loss per minibatch, but TwoLosses has 2\. Use --learner\.microbatches"):
        learn_once(TwoLosses(), batch, learning.trainable.update, learning.account)  # type: ignore[arg-type]
