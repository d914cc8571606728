"""A3C alone: its gradients against plain A2C, minibatches, statistics, and the server's steps."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from echelon.algorithms import GradientServer, Impala, Model
from echelon.algorithms.a3c import A3c, Gradient
from echelon.algorithms.model import Mirror
from echelon.config import A3cConfig, ImpalaConfig, NetworkConfig, replace
from echelon.errors import ConfigError
from echelon.presets import preset
from echelon.roles.plan.layouts import window
from echelon.runs.bottleneck import bottleneck
from echelon.schema import Batch, GradientBatch, Spaces
from stage import Stage

T, B, F, A = 7, 6, 3, 3
SPACES = Spaces(gym.spaces.Box(-9.0, 9.0, (F,)), gym.spaces.Discrete(A))
SCALED = {"normalize_reward": True, "reward_clip": 5.0}


def make_batch(seed: int = 0, lanes: range = range(B)) -> Batch:
    """Lanes that terminate, that truncate, and that go on."""
    draw = np.random.default_rng(seed)
    terminated, truncated, valid = (np.zeros((T, B), bool), np.zeros((T, B), bool), np.ones((T, B), bool))
    terminated[1, 0] = terminated[3, 4] = truncated[2, 1] = True
    valid[2, 0] = valid[4, 4] = valid[3, 1] = False
    tensors = {
        "first": np.concatenate([np.zeros((1, B), bool), ~valid]),
        "action": draw.integers(A, size=(T, B)),
        "log_prob": np.zeros((T, B), np.float32),
        "reward": np.where(valid, draw.normal(size=(T, B)), 0.0).astype(np.float32),
        "terminated": terminated,
        "truncated": truncated,
        "valid": valid,
    }
    observation = torch.from_numpy(draw.normal(size=(T + 1, B, F)).astype(np.float32))
    numbers = {name: torch.from_numpy(array) for name, array in tensors.items()}
    return Batch(observation, **numbers, state=(), lanes=torch.tensor(lanes))


def make_model(algorithm: Any = None, **network: Any) -> Model:
    return Model(NetworkConfig(hidden=(5,), **network), SPACES, algorithm or A3cConfig(), seed=3)


def plain_loss(network: nn.Module, batch: Batch, config: A3cConfig) -> torch.Tensor:
    """Advantage actor-critic as it is written down, step by step, in the network's own precision."""
    flat = network(batch.observation, (), batch.first)
    losses = []
    num_steps, num_lanes = batch.valid.shape
    for b in range(num_lanes):
        gain = flat.value[num_steps, b].detach()
        for t in reversed(range(num_steps)):
            if not batch.valid[t, b]:  # what follows is another episode; what came before looks ahead to here
                gain = flat.value[t, b].detach()
                continue
            gain = batch.reward[t, b] + config.discount * (0.0 if batch.terminated[t, b] else gain)
            choice = torch.distributions.Categorical(logits=flat.params[t, b])
            advantage = gain - flat.value[t, b]
            loss = -choice.log_prob(batch.action[t, b]) * advantage.detach()
            losses.append(loss + config.value_weight * 0.5 * advantage**2 - config.entropy_weight * choice.entropy())
    return torch.stack(losses).mean()


def copied(gradient: Gradient) -> Gradient:
    return Gradient(gradient.flat.clone(), gradient.values.clone(), gradient.statistics.clone())


def gradients_of(config: A3cConfig, batch: Batch, model: Model | None = None) -> list[Gradient]:
    return [copied(gradient) for gradient in A3c(config, model or make_model(config)).gradients(batch)]


def served(*gradients: Gradient) -> GradientBatch:
    total = torch.stack([gradient.flat for gradient in gradients]).sum(0)
    values = torch.stack([gradient.values for gradient in gradients]).mean(0)
    return GradientBatch(total, len(gradients), values, [gradient.statistics for gradient in gradients])


def named_gradients(model: Model, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    model.gradients.copy_(flat)
    return {
        name: parameter.grad.clone()
        for name, parameter in model.network.named_parameters()
        if parameter.grad is not None
    }


def test_the_gradient_is_that_of_plain_a2c() -> None:
    config, batch, model = A3cConfig(discount=0.9, entropy_weight=0.03), make_batch(), make_model()
    plain = copy.deepcopy(model.network)
    loss = plain_loss(plain, batch, config)
    loss.backward()  # type: ignore[no-untyped-call]
    [gradient] = gradients_of(config, batch, model)
    assert float(gradient.values[0]) == pytest.approx(float(loss.detach()), abs=1e-6)
    found = named_gradients(model, gradient.flat)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-6)
        assert found[name].abs().max() > 1e-4, f"{name} has a gradient"


def test_pieces_bring_a_gradient_each_and_all_of_them_count() -> None:
    batch, whole = make_batch(), gradients_of(A3cConfig(), make_batch())[0]
    pieces = gradients_of(A3cConfig(minibatches=4), batch)
    steps = [batch.valid[:, part].sum() for part in A3c(A3cConfig(minibatches=4), make_model()).columns(B)]
    assert len(pieces) == 4 and [int(count) for count in steps] == [6, 13, 7, 13]
    weighed = sum(count * piece.flat for count, piece in zip(steps, pieces, strict=True)) / sum(steps)
    torch.testing.assert_close(weighed, whole.flat, rtol=1e-5, atol=1e-6)
    assert len({tuple(piece.flat.tolist()) for piece in pieces}) == 4, "each is its own"


def test_what_comes_in_any_order_makes_the_same_step() -> None:
    first, second = (gradients_of(A3cConfig(), make_batch(seed))[0] for seed in (1, 2))
    found = {}
    for reduce in ("mean", "sum"):
        config = A3cConfig(reduce=reduce)  # type: ignore[arg-type]
        server = GradientServer(config, make_model(config))
        [ahead], [behind] = (list(server.losses(served(*pair))) for pair in ((first, second), (second, first)))
        assert ahead.gradient is not None and behind.gradient is not None
        torch.testing.assert_close(ahead.gradient, behind.gradient, rtol=0, atol=0)
        found[reduce] = ahead.gradient
        assert float(ahead.value) == pytest.approx(float(first.values[0] + second.values[0]) / 2)
    torch.testing.assert_close(found["sum"], first.flat + second.flat)
    torch.testing.assert_close(found["mean"], found["sum"] / 2)


def test_statistics_of_many_actors_are_those_of_one_that_saw_everything() -> None:
    """What pieces of two actors' rollouts say, merged, is what a learner finds that sees all trajectories."""
    config = A3cConfig(minibatches=2, **SCALED)  # type: ignore[arg-type]
    batches = [make_batch(1), make_batch(2, range(B, 2 * B)), make_batch(3)]
    actors = [A3c(config, make_model(config, normalize_observation=True)) for _ in range(2)]
    server = GradientServer(config, make_model(config, normalize_observation=True))
    for actor, batch in zip((0, 1, 0), batches, strict=True):
        for gradient in actors[actor].gradients(batch):
            server.finish(served(copied(gradient)))
    rule = ImpalaConfig(normalize_reward=True)
    seer = Impala(rule, make_model(rule, normalize_observation=True), seed=0)
    for batch in batches:
        seer.finish(batch)
    assert server.rewards.deviation == pytest.approx(seer.rewards.deviation, rel=1e-9)
    for mine, other in zip(server.model.network.buffers(), seer.model.network.buffers(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)
    assert float(actors[0].model.network.state_dict()["encoders.0.normalizer.count"]) == 0, "actors keep none"


def test_the_scale_of_rewards_travels_with_the_weights() -> None:
    config = A3cConfig(**SCALED)  # type: ignore[arg-type]
    server = GradientServer(config, make_model(config))
    actor = make_model(config)
    mirror = Mirror(actor)
    batch = make_batch()
    before = float(gradients_of(config, batch, make_model(config))[0].values[2])
    server.finish(served(*gradients_of(config, batch)))
    np.concatenate([part.reshape(-1).view(np.uint8) for part in server.model.parts()], out=mirror.memory)
    assert float(actor.reward_deviation) == server.rewards.deviation != 1.0  # type: ignore[arg-type]
    learning = make_model(config)
    assert learning.reward_deviation is not None
    learning.reward_deviation.fill_(server.rewards.deviation)
    assert float(gradients_of(config, batch, learning)[0].values[2]) != before, "and rewards are divided by it"
    again = GradientServer(config, make_model(config))
    again.load_state_dict(server.state_dict())
    assert again.model.reward_deviation == server.rewards.deviation
    assert server.model.weights().keys() == make_model(ImpalaConfig()).weights().keys(), "weights are weights"


@pytest.fixture
def staged(tmp_path: Path) -> Iterator[Any]:
    stages = []

    def make(**changes: Any) -> Stage:
        shape = {"actor.num_actors": 1, "actor.envs": 4, "actor.trajectory": 8, "network.hidden": (5,)}
        settings = {"engine": "inline", "acting.mode": "local", "learner.device": "cpu", "stop.steps": 10**6}
        plain = {"network.normalize_observation": False, "algorithm.normalize_advantage": False}
        plain |= {"optimizer.schedule": "constant"}
        config = replace(preset("a3c", "CartPole-v1"), **{**shape, **settings, **plain, **changes})
        stages.append(Stage(tmp_path, config))
        return stages[-1]

    yield make
    for stage in stages:
        stage.close()


def step_until(stage: Stage, actor: Any, count: int) -> None:
    while int(stage.ring.head[actor.index]) < count:
        assert actor.step(0.0)


def test_one_actor_and_the_server_make_the_step_of_plain_a2c(staged: Any) -> None:
    """Through the roles: rollout, slot, sum, optimizer, board."""
    rule = {"algorithm.normalize_reward": False, "algorithm.gae_lambda": 1.0, "optimizer.name": "rmsprop"}
    stage = staged(**rule, **{"optimizer.clip_norm": 0.0})
    learner, actor = stage.learner(), stage.actor()
    config, plain = stage.context.train, copy.deepcopy(learner.trainable.model.network)
    step_until(stage, actor, 1)
    rollout = actor.experience.rollout.batch
    plain_loss(plain, rollout, config.algorithm).backward()  # type: ignore[no-untyped-call]
    settings = config.optimizer
    torch.optim.RMSprop(plain.parameters(), lr=settings.learning_rate, alpha=0.99, eps=settings.epsilon).step()
    version = stage.board.version
    assert learner.step(0.0)
    assert stage.board.version == version + 1 and learner.counters.updates == 1
    assert learner.counters.env_steps == int(rollout.valid.sum()) > 0
    for (name, found), expected in zip(
        learner.trainable.model.network.named_parameters(), plain.parameters(), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_every_minibatch_is_handed_over_with_what_it_counts_for(staged: Any) -> None:
    stage = staged(**{"algorithm.minibatches": 3, "actor.slots": 2, "actor.trajectory": 40})
    learner, actor = stage.learner(), stage.actor()
    steps = episodes = 0
    for rollout in range(1, 5):
        step_until(stage, actor, 3 * rollout)
        steps += int(actor.experience.views["valid"].sum())
        episodes += int((actor.experience.views["episode_length"] > 0).sum())
        for _ in range(3):
            assert learner.step(0.0)
    counters = learner.counters
    assert (counters.env_steps, counters.episodes, counters.updates) == (steps, episodes, 12)
    assert episodes >= 4 and counters.return_mean == pytest.approx(sum(counters.lengths) / len(counters.lengths))
    assert counters.lag_max == 2, "the third of a rollout is applied two versions after the first"
    assert not learner.step(0.0) and learner.counters.updates == 12


def test_a_rollout_begins_only_where_all_its_gradients_have_room(staged: Any) -> None:
    stage = staged(**{"algorithm.minibatches": 3, "actor.slots": 1, "learner.batch": 1})
    actor, ring = stage.actor(), stage.ring
    ring.grant(0, 2)
    assert not actor.step(0.0) and not actor.experience.admits(0)
    ring.grant(0, 3)
    step_until(stage, actor, 3)
    assert not actor.step(0.0), "and waits for the next three"
    for _ in range(2):
        ring.release(0)
        ring.grant(0, 3)
        assert not actor.step(0.0)
    ring.release(0)
    ring.grant(0, 3)
    step_until(stage, actor, 6)


@pytest.mark.parametrize(("batch", "max_lag", "pieces", "expected"), [
    (1, None, 1, 2),
    (1, None, 4, 8),
    (12, None, 4, 10),
    (0, 0, 1, 1),
    (8, 0, 4, 4),
    (8, 1, 4, 8),
    (4, 2, 4, 6),
])  # fmt: skip
def test_how_many_gradients_an_actor_may_be_ahead(batch: int, max_lag: int | None, pieces: int, expected: int) -> None:
    fields = {"actor.slots": 2, "learner.batch": batch, "learner.max_lag": max_lag, "algorithm.minibatches": pieces}
    assert window(replace(preset("a3c", "CartPole-v1"), **fields)) == expected


def test_what_could_never_be_is_refused() -> None:
    config = preset("a3c", "CartPole-v1")
    fields = {"learner.batch": 0, "learner.max_lag": 0, "algorithm.minibatches": 4}
    with pytest.raises(
        ConfigError,
        match=r"minibatches=4 gradients .* learner\.batch=2 and learner\.max_lag=0\. Use --learner\.batch 8",
    ):
        window(replace(config, **fields))
    with pytest.raises(ConfigError, match=r"acting\.mode=central does not work with a3c"):
        replace(config, **{"acting.mode": "central"})
    with pytest.raises(ConfigError, match=r"algorithm\.minibatches=9 exceeds the 6 environments of an actor"):
        gradients_of(A3cConfig(minibatches=9), make_batch())
    with pytest.raises(ConfigError, match=r"does not work with a3c: it is on-policy"):
        replace(config, **{"workers.address": "tcp://127.0.0.1:0"})
    with pytest.raises(ConfigError, match=r"only one learner can receive a3c's gradients\. Use --learners 1"):
        replace(config, **{"learner.num_learners": 2})


class Counting(nn.Module):
    """A network of the user's that keeps statistics by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(F, A + 1)

    def forward(self, observation: torch.Tensor) -> Any:
        out = self.head(observation)
        return out[:, :A], out[:, A]

    def update_normalizer(self, observation: torch.Tensor, valid: torch.Tensor) -> None: ...


def make_counting(spaces: Spaces, num_params: int) -> nn.Module:
    del spaces, num_params
    return Counting()


def test_statistics_that_cannot_be_added_up_are_refused() -> None:
    model = Model(NetworkConfig(name=f"{__name__}:make_counting"), SPACES, A3cConfig())
    with pytest.raises(ConfigError, match=r"\(update_normalizer\), which a3c cannot"):
        GradientServer(A3cConfig(), model)


def test_learning_of_actors_is_named_as_what_takes_the_time() -> None:
    actor = {"env": 0.3, "act": 0.2, "learn": 0.45, "transfer": 0.05}
    told = bottleneck({"learner": {"learn": 0.2, "wait": 0.8}, "actor-0": actor}, num_cores=8, num_processes=2)
    assert "the actors, computing gradients (learn 45% of an actor's time" in told
    assert "A smaller network or a preset that learns on a GPU would cost less" in told
    busy = bottleneck({"learner": {"learn": 1.0}, "actor-0": actor}, num_cores=2, num_processes=2)
    assert "or less work: a smaller network or a preset that learns on a GPU would" in busy
