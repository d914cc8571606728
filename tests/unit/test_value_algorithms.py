"""DQN, DDPG and SAC: losses, networks, targets, acting and checkpoints."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from checkpoints import save_checkpoint
from echelon import config_io
from echelon.algorithms import Ddpg, Dqn, Model, Sac, build_algorithm
from echelon.algorithms.exploration import Exploration, Explorer, epsilon_ladder, noise_ladder
from echelon.algorithms.model import Action, FlatModule, Mirror, Policy
from echelon.algorithms.protocol import Loss
from echelon.algorithms.target import TargetNetwork
from echelon.algorithms.value_networks import Critic, DuelingNetwork, HeadNetwork
from echelon.config import (
    AlgorithmConfig,
    DdpgConfig,
    DqnConfig,
    ImpalaConfig,
    NetworkConfig,
    OptimizerConfig,
    ReplayConfig,
    SacConfig,
)
from echelon.errors import ConfigError
from echelon.objectives.values import PRIORITY_FLOOR
from echelon.presets import REPLAY_PRESETS, preset
from echelon.roles.update import LocalUpdate
from echelon.runs.checkpoint import load_checkpoint
from echelon.schema import Spaces, TransitionBatch, Tree
from echelon.transport.shared_memory import WeightsBoard

SMALL = NetworkConfig(hidden=(8, 6))
DISCRETE = Spaces(gym.spaces.Box(-9.0, 9.0, (3,)), gym.spaces.Discrete(4))
CONTINUOUS = Spaces(gym.spaces.Box(-9.0, 9.0, (3,)), gym.spaces.Box(-2.0, 2.0, (2,)))
MASKED = Spaces(
    gym.spaces.Dict({"action_mask": gym.spaces.MultiBinary(4), "x": gym.spaces.Box(-9.0, 9.0, (3,))}),
    gym.spaces.Discrete(4),
)

PIXELS = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
TD3 = DdpgConfig(num_critics=2, policy_delay=2, target_noise=0.2)
TD3N = DdpgConfig(num_critics=2, policy_delay=2, target_noise=0.2, normalize_reward=True)
RULES: dict[str, tuple[AlgorithmConfig, Spaces]] = {
    "dqn": (DqnConfig(), DISCRETE),
    "dqn soft": (DqnConfig(dueling=False, double=False, target_period=0, target_tau=0.1), DISCRETE),
    "ddpg": (DdpgConfig(), CONTINUOUS),
    "td3": (TD3, CONTINUOUS),
    "ddpg valued": (DdpgConfig(publish_critic=True), CONTINUOUS),
    "sac": (SacConfig(), CONTINUOUS),
    "sac fixed": (SacConfig(learn_temperature=False), CONTINUOUS),
    "sac discrete": (SacConfig(), DISCRETE),
    "sac scaled": (SacConfig(normalize_reward=True), CONTINUOUS),
}


def observe(spaces: Spaces, size: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 3, generator=generator)
    if isinstance(spaces.observation, gym.spaces.Dict):
        return {"action_mask": torch.randint(2, (size, 4), generator=generator), "x": x}
    return x


def batch_of(spaces: Spaces, size: int = 12, seed: int = 0) -> TransitionBatch:
    generator = torch.Generator().manual_seed(seed + 100)
    if isinstance(spaces.action, gym.spaces.Discrete):
        action = torch.randint(4, (size,), generator=generator)
    else:
        action = torch.rand(size, 2, generator=generator) * 2.0 - 1.0
    return TransitionBatch(
        observation=observe(spaces, size, seed),
        action=action,
        reward=torch.randn(size, generator=generator),
        discount=0.9 * (torch.rand(size, generator=generator) < 0.8),
        next_observation=observe(spaces, size, seed + 1),
        weight=torch.rand(size, generator=generator),
        keys=np.arange(size),
    )


def make(config: AlgorithmConfig, spaces: Spaces, network: NetworkConfig = SMALL, seed: int = 1) -> Any:
    return build_algorithm(config, Model(network, spaces, config, seed=seed), seed)


def updater(algorithm: Any, **fields: Any) -> LocalUpdate:
    return LocalUpdate(OptimizerConfig(**fields), algorithm.model, algorithm.groups)


def learn(algorithm: Any, update: LocalUpdate, batch: TransitionBatch) -> list[Loss]:
    losses = []
    for minibatch in algorithm.minibatches(batch):
        for loss in algorithm.losses(minibatch):
            update(loss)
            losses.append(loss)
    algorithm.finish(batch)
    return losses


def flats(algorithm: Any) -> dict[str, Tensor]:
    """Every flat tensor that the algorithm owns, copied."""
    found = {"model": algorithm.model.parameters.clone()}
    found |= {name: group.module.parameters.clone() for name, group in algorithm.groups.items()}
    return found | {f"target {name}": t.flat.parameters.clone() for name, t in algorithm.targets.items()}


@pytest.mark.parametrize(("name", "expected"), [
    ("dqn", ["policy"]),
    ("ddpg", ["critic", "policy"]),
    ("sac", ["critic", "policy", "temperature"]),
    ("sac fixed", ["critic", "policy"]),
    ("sac discrete", ["critic", "policy", "temperature"]),
])  # fmt: skip
def test_losses_come_in_order_and_each_changes_its_own_group(name: str, expected: list[str]) -> None:
    algorithm = make(*RULES[name])
    update, seen = updater(algorithm), []
    for loss in algorithm.losses(batch_of(RULES[name][1])):
        before = flats(algorithm)
        update(loss)
        changed = [key for key, tensor in flats(algorithm).items() if not torch.equal(tensor, before[key])]
        assert changed == [loss.group.replace("policy", "model")]
        assert torch.isfinite(loss.value) and all(torch.isfinite(metric) for metric in loss.metrics.values())
        seen.append(loss.group)
    assert seen == expected


@pytest.mark.parametrize("name", RULES)
def test_a_batch_learned_again_and_again_is_learned(name: str) -> None:
    config, spaces = RULES[name]
    algorithm = make(config, spaces, NetworkConfig(hidden=(64, 64)))
    update, batch = updater(algorithm, learning_rate=1e-3, clip_norm=0.0), batch_of(spaces)
    batch.discount = torch.zeros(12)  # the targets stand still
    first = learn(algorithm, update, batch)[0].value.detach()
    for _ in range(200):
        last = learn(algorithm, update, batch)[0].value.detach()
    assert float(last) < 0.1 * float(first)


@pytest.mark.parametrize("unit", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("config", [DqnConfig(normalize_reward=True), TD3N, SacConfig(normalize_reward=True)])
def test_normalized_rewards_make_learning_independent_of_their_unit(config: AlgorithmConfig, unit: float) -> None:
    spaces = DISCRETE if isinstance(config, DqnConfig) else CONTINUOUS
    learned = []
    for scale in (1.0, unit):
        algorithm = make(config, spaces)
        batches = [dataclasses.replace(batch_of(spaces, seed=seed)) for seed in range(4)]
        for batch in batches:
            batch.reward *= scale
        algorithm.finish(batches[0])  # seen before the first update, as its scale is not known
        update = updater(algorithm)
        for batch in batches[1:]:
            learn(algorithm, update, batch)
        learned.append(flats(algorithm))
    for name, tensor in learned[0].items():
        torch.testing.assert_close(tensor, learned[1][name], atol=1e-6, rtol=1e-4)


def test_normalized_rewards_have_a_mean_square_of_one() -> None:
    algorithm, batch = make(DqnConfig(normalize_reward=True), DISCRETE), batch_of(DISCRETE)
    nothing = dataclasses.replace(batch, reward=torch.zeros(12))
    algorithm.finish(nothing)
    assert torch.equal(next(algorithm.minibatches(batch)).reward, batch.reward), "rewards of 0 have no magnitude"
    algorithm = make(DqnConfig(normalize_reward=True), DISCRETE)
    algorithm.finish(batch)
    assert float(next(algorithm.minibatches(batch)).reward.square().mean()) == pytest.approx(1.0, rel=1e-5)


def test_the_first_rewards_after_many_of_zero_are_bounded() -> None:
    algorithm, batch = make(DqnConfig(normalize_reward=True), DISCRETE), batch_of(DISCRETE)
    for _ in range(500):
        algorithm.finish(dataclasses.replace(batch, reward=torch.zeros(12)))
    one = dataclasses.replace(batch, reward=torch.eye(12)[0])
    algorithm.finish(one)
    assert next(algorithm.minibatches(one)).reward.tolist() == [10.0, *[0.0] * 11]


def test_dqn_has_the_errors_of_its_equation() -> None:
    algorithm, batch = make(DqnConfig(huber=0.0), MASKED), batch_of(MASKED)
    algorithm.model.parameters += 0.1 * torch.randn_like(algorithm.model.parameters)  # away from its target network
    with torch.no_grad():
        q, after = algorithm.model.params(batch.observation), algorithm.model.params(batch.next_observation)
        later = algorithm.target.params(batch.next_observation)
    (loss,) = algorithm.losses(batch)
    for i in range(12):
        allowed = [a for a in range(4) if batch.next_observation["action_mask"][i, a]] or list(range(4))
        best = max(allowed, key=lambda a, i=i: float(after[i, a]))
        error = batch.reward[i] + batch.discount[i] * later[i, best] - q[i, batch.action[i]]
        torch.testing.assert_close(algorithm.errors[i].detach(), error)
    torch.testing.assert_close(loss.value, (0.5 * algorithm.errors**2 * batch.weight).mean())
    torch.testing.assert_close(algorithm.priorities(batch), algorithm.errors.detach().abs() + PRIORITY_FLOOR)


def test_without_double_the_target_network_chooses_too() -> None:
    algorithm, batch = make(DqnConfig(double=False), DISCRETE), batch_of(DISCRETE)
    algorithm.model.parameters += torch.randn_like(algorithm.model.parameters)
    next(algorithm.losses(batch))
    with torch.no_grad():
        target = batch.reward + batch.discount * algorithm.target.params(batch.next_observation).amax(-1)
        chosen = algorithm.model.params(batch.observation).gather(-1, batch.action.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(algorithm.errors.detach(), target - chosen)


def test_ddpg_climbs_its_critic() -> None:
    algorithm, batch = make(DdpgConfig(), CONTINUOUS), batch_of(CONTINUOUS)
    critic, policy = algorithm.losses(batch)
    with torch.no_grad():
        after = torch.tanh(algorithm.target_policy.params(batch.next_observation))
        target = batch.reward + batch.discount * algorithm.target_critic.network(batch.next_observation, after)[0]
        q = algorithm.critic.network(batch.observation, batch.action)
        own = algorithm.critic.network(batch.observation, torch.tanh(algorithm.model.params(batch.observation)))
    assert q.shape == (1, 12)
    torch.testing.assert_close(critic.value, (0.5 * (target - q[0]) ** 2 * batch.weight).mean())
    torch.testing.assert_close(policy.value, -own.mean())


def test_td3_delays_its_policy_and_its_targets() -> None:
    algorithm = make(TD3, CONTINUOUS)
    update, groups, moved = updater(algorithm), [], []
    for step in range(4):
        before = flats(algorithm)
        groups.append([loss.group for loss in learn(algorithm, update, batch_of(CONTINUOUS, seed=step))])
        after = flats(algorithm)
        moved.append({name: not torch.equal(before[name], after[name]) for name in before})
    assert groups == [["critic"], ["critic", "policy"]] * 2
    assert [m["target critic"] for m in moved] == [m["target policy"] for m in moved] == [False, True, False, True]
    assert algorithm.errors.shape == (2, 12) and algorithm.priorities(None).shape == (12,)


def test_sac_has_the_losses_of_its_equations() -> None:
    algorithm, batch = make(SacConfig(temperature=0.3, target_entropy=-1.5), CONTINUOUS), batch_of(CONTINUOUS)
    generator = torch.Generator().manual_seed(1)  # draws what the algorithm draws
    distribution, model = algorithm.model.distribution, algorithm.model
    with torch.no_grad():
        after = distribution.sample(model.params(batch.next_observation), generator)
        later = algorithm.target.network(batch.next_observation, after.action).amin(0)
        target = batch.reward + batch.discount * (later - 0.3 * after.log_prob)
        q = algorithm.critic.network(batch.observation, batch.action)
        now = distribution.sample(model.params(batch.observation), generator)
        own = algorithm.critic.network(batch.observation, now.action).amin(0)
    critic, policy, temperature = algorithm.losses(batch)
    torch.testing.assert_close(critic.value, (0.5 * (target - q) ** 2 * batch.weight).sum(0).mean())
    torch.testing.assert_close(policy.value, (0.3 * now.log_prob - own).mean())
    torch.testing.assert_close(temperature.value, -0.3 * (now.log_prob.mean() - 1.5))


def test_the_entropy_that_sac_aims_for() -> None:
    assert make(SacConfig(), CONTINUOUS).target_entropy(observe(CONTINUOUS, 5, 0)) == -2.0
    fraction = SacConfig(target_entropy_fraction=0.3)
    assert make(fraction, DISCRETE).target_entropy(observe(DISCRETE, 5, 0)) == pytest.approx(0.3 * np.log(4.0))
    masks = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    observation = {"action_mask": masks, "x": torch.zeros(4, 3)}
    found = make(fraction, MASKED).target_entropy(observation)
    torch.testing.assert_close(found, 0.3 * torch.tensor([2.0, 1.0, 4.0, 4.0]).log())
    explicit = SacConfig(target_entropy=1.2, target_entropy_fraction=0.3)
    assert make(explicit, MASKED).target_entropy(observation) == 1.2


def test_the_temperature_stays_bounded_where_few_actions_are_allowed() -> None:
    space = gym.spaces.Dict({"action_mask": gym.spaces.MultiBinary(8), "x": gym.spaces.Box(-9.0, 9.0, (3,))})
    observation = {"action_mask": torch.tensor([1, 1, 0, 0, 0, 0, 0, 0]).repeat(12, 1), "x": torch.zeros(12, 3)}
    batch = dataclasses.replace(
        batch_of(CONTINUOUS), observation=observation, next_observation=observation, action=torch.arange(12) % 2
    )
    found = []
    for target in (None, 0.98 * math.log(8.0)):  # two actions never have this much entropy
        config = SacConfig(target_entropy=target, temperature_learning_rate=1e-2)
        algorithm = make(config, Spaces(space, gym.spaces.Discrete(8)))
        update = updater(algorithm, clip_norm=0.0)
        for _ in range(400):  # as far as 4,000 updates at the default rate
            learn(algorithm, update, batch)
        found.append(float(algorithm.log_temperature.detach().exp()))
    assert found[0] < 2.0 and found[1] > 20.0


def test_discrete_sac_expects_over_the_allowed_actions() -> None:
    algorithm, batch = make(SacConfig(temperature=0.3), MASKED), batch_of(MASKED)
    with torch.no_grad():
        mask = batch.next_observation["action_mask"]
        allowed = (mask != 0) | (mask.sum(-1, keepdim=True) == 0)
        logits = algorithm.model.params(batch.next_observation).masked_fill(~allowed, -torch.inf)
        p = torch.softmax(logits, -1)
        entropy = torch.distributions.Categorical(p).entropy()
        later = (p * algorithm.target.network(batch.next_observation).amin(0)).sum(-1) + 0.3 * entropy
        q = algorithm.critic.network(batch.observation)[:, torch.arange(12), batch.action]
    next(algorithm.losses(batch))
    torch.testing.assert_close(algorithm.errors.detach(), batch.reward + batch.discount * later - q)


def test_stacked_critics_equal_critics_of_their_own() -> None:
    critic = Critic(SMALL, CONTINUOUS, 2)
    observation, action = torch.randn(5, 3), torch.rand(5, 2)
    found = critic(observation, action)
    assert found.shape == (2, 5) and not torch.equal(found[0], found[1])
    for i in range(2):
        x = torch.cat((observation, action), -1)
        for layer in critic.layers:
            x = torch.tanh(x @ layer.weight[i] + layer.bias[i])
        torch.testing.assert_close(found[i], (x @ critic.head.weight[i] + critic.head.bias[i]).squeeze(-1))


def test_dueling_values_are_the_states_value_and_centred_advantages() -> None:
    network, observation = DuelingNetwork(SMALL, DISCRETE, 4), torch.randn(5, 3)
    with torch.no_grad():
        before = network.act(observation, (), torch.zeros(0)).params
        network.advantage_head.bias += 7.0  # to all alike: nobody's advantage
        torch.testing.assert_close(network.act(observation, (), torch.zeros(0)).params, before)
        network.value_head.bias += 3.0
        torch.testing.assert_close(network.act(observation, (), torch.zeros(0)).params, before + 3.0)
        network.advantage_head.bias[0] += 4.0
        shift = network.act(observation, (), torch.zeros(0)).params - before - 3.0
    torch.testing.assert_close(shift, torch.tensor([3.0, -1.0, -1.0, -1.0]).expand(5, 4))


@pytest.mark.parametrize("hidden", [(), (16,), (32, 16)])
@pytest.mark.parametrize("config", [DqnConfig(), DqnConfig(dueling=False), SacConfig()])
def test_pixels_and_any_depth(config: AlgorithmConfig, hidden: tuple[int, ...]) -> None:
    algorithm = make(config, Spaces(PIXELS, gym.spaces.Discrete(4)), NetworkConfig(hidden=hidden, activation="relu"))
    pixels = torch.randint(256, (2, 4, 84, 84), dtype=torch.uint8)
    one = torch.ones(2)
    batch = TransitionBatch(pixels, torch.tensor([0, 3]), one, 0.9 * one, pixels, one)
    learn(algorithm, updater(algorithm), batch)
    assert algorithm.model.params(pixels).shape == (2, 4)
    assert sum(parameter.numel() for parameter in algorithm.model.leaves) > 1_600_000, "the Nature CNN"


def test_targets_follow_softly_or_are_copied() -> None:
    source = FlatModule(nn.Linear(3, 2), "cpu")
    soft, hard = TargetNetwork(source, tau=0.25), TargetNetwork(source)
    start = source.parameters.clone()
    source.parameters += 1.0
    soft.follow()
    torch.testing.assert_close(soft.flat.parameters[:6], (start + 0.25)[:6])
    assert torch.equal(hard.flat.parameters, start)
    hard.follow()
    assert torch.equal(hard.flat.parameters, source.parameters)
    assert not any(parameter.requires_grad for parameter in soft.network.parameters())


def test_a_hard_target_is_copied_after_every_period_and_a_soft_one_follows_every_batch() -> None:
    hard, soft = make(DqnConfig(target_period=3), DISCRETE), make(DqnConfig(target_period=0, target_tau=0.5), DISCRETE)
    for algorithm in (hard, soft):
        start, update, copied = algorithm.model.parameters.clone(), updater(algorithm), []
        for number in range(1, 8):
            before = algorithm.target.flat.parameters.clone()
            learn(algorithm, update, batch_of(DISCRETE))
            now = algorithm.target.flat.parameters
            if algorithm is hard and torch.equal(now, algorithm.model.parameters):
                copied.append(number)
            elif algorithm is soft:
                torch.testing.assert_close(now, torch.lerp(before, algorithm.model.parameters, 0.5))
        assert not torch.equal(start, algorithm.model.parameters)
        assert copied == ([3, 6] if algorithm is hard else [])


@pytest.mark.parametrize("name", ["dqn", "td3", "sac"])
def test_normalised_observations_reach_critics_and_targets(name: str) -> None:
    config, spaces = RULES[name]
    if isinstance(config, DqnConfig):
        config = DqnConfig(target_period=6)
    network = NetworkConfig(hidden=(8,), normalize_observation=True)
    algorithm = make(config, spaces, network)
    update = updater(algorithm)
    batch = batch_of(spaces)
    batch.observation = batch.observation * 3.0 + 5.0
    for _ in range(7):  # a period of the hard target and one more
        learn(algorithm, update, batch)
    modules = [algorithm.model.network, *(t.network for t in algorithm.targets.values())]
    modules += [group.module.network for key, group in algorithm.groups.items() if key == "critic"]
    assert len(modules) == {"dqn": 2, "td3": 4, "sac": 3}[name]
    for module in modules:
        torch.testing.assert_close(module.encoders[0].normalizer.mean, batch.observation.mean(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", RULES)
def test_a_successor_goes_on_where_a_checkpoint_was_written(name: str, tmp_path: Path) -> None:
    config, spaces = RULES[name]
    one, other = make(config, spaces, seed=1), make(config, spaces, seed=2)
    update = updater(one)
    for step in range(3):
        learn(one, update, batch_of(spaces, seed=step))
    tree = {"model": one.model.weights(), "algorithm": one.state_dict(), "optimizer": update.state_dict()}
    tree = load_checkpoint(save_checkpoint(tmp_path, tree, step=3, keep=1))
    other.model.load_weights(tree["model"], "the file")
    other.load_state_dict(tree["algorithm"])
    successor = updater(other)
    successor.load_state_dict(tree["optimizer"])
    for step in range(3, 8):
        batch = batch_of(spaces, seed=step)
        learn(one, update, batch)
        learn(other, successor, copy.deepcopy(batch))
        assert torch.equal(one.priorities(batch), other.priorities(batch))
    for key, tensor in flats(one).items():
        assert torch.equal(tensor, flats(other)[key]), key


def test_a_checkpoint_of_another_kind_of_device_brings_all_but_its_random_numbers() -> None:
    one, other = (make(*RULES["sac"], seed=seed) for seed in (1, 2))
    learn(one, updater(one), batch_of(CONTINUOUS))
    state = one.state_dict()
    state["generator"] = state["generator"][:16]  # as a GPU's generator has it
    other.load_state_dict(state)
    assert other.num_learned == 1
    assert torch.equal(other.critic.parameters, one.critic.parameters)
    learn(other, updater(other), batch_of(CONTINUOUS))


def act(model: Model, observation: Tree, exploration: Exploration | None = None, *, greedy: bool = False) -> Action:
    rng, first = torch.Generator().manual_seed(5), torch.zeros(0, dtype=torch.bool)
    return Policy(model, with_action_values=True).act(observation, (), first, rng, exploration, greedy=greedy)


@pytest.mark.parametrize(("name", "published"), [("dqn", 1), ("ddpg", 1), ("ddpg valued", 2), ("sac", 1)])
def test_only_what_acts_is_published_and_a_mirror_acts_alike(name: str, published: int, tmp_path: Path) -> None:
    config, spaces = RULES[name]
    algorithm = make(config, spaces)
    actor = Model(SMALL, spaces, config, seed=9)
    assert len(algorithm.model.parts()) == published and algorithm.model.nbytes == actor.nbytes
    board = WeightsBoard(tmp_path, actor.nbytes)
    mirror = Mirror(actor)
    learn(algorithm, updater(algorithm), batch_of(spaces))
    board.publish(algorithm.model.parts(), 1)
    mirror.version = board.read(mirror.memory)
    observation = observe(spaces, 6, 3)
    expected, found = act(algorithm.model, observation), act(actor, observation)
    torch.testing.assert_close(found, expected)
    assert (found.action_values is None) == (name in ("ddpg", "sac"))
    torch.testing.assert_close(act(actor, observation, greedy=True), act(algorithm.model, observation, greedy=True))


def test_the_values_of_actions_are_the_networks() -> None:
    algorithm = make(DqnConfig(), MASKED)
    observation = observe(MASKED, 50, 0)
    observation["action_mask"][0] = 0
    choice = act(algorithm.model, observation, Exploration(torch.full((50,), 0.7)))
    q = algorithm.model.params(observation).detach()
    mask = observation["action_mask"].bool() | ~observation["action_mask"].bool().any(-1, keepdim=True)
    assert choice.action_values is not None and bool(mask.gather(-1, choice.action.unsqueeze(-1)).all())
    torch.testing.assert_close(choice.action_values.chosen, q.gather(-1, choice.action.unsqueeze(-1)).squeeze(-1))
    torch.testing.assert_close(choice.action_values.best, q.masked_fill(~mask, -torch.inf).amax(-1))
    valued = make(DdpgConfig(publish_critic=True, num_critics=2), CONTINUOUS)
    x = observe(CONTINUOUS, 50, 0)
    noisy = Exploration(noise=torch.full((50,), 0.5))
    choice = act(valued.model, x, noisy)
    own = torch.tanh(valued.model.params(x))
    assert choice.action_values is not None and not torch.equal(choice.action, own)
    torch.testing.assert_close(choice.action_values.chosen, valued.critic.network(x, choice.action).amin(0).detach())
    torch.testing.assert_close(choice.action_values.best, valued.critic.network(x, own).amin(0).detach())


def test_every_row_explores_by_itself() -> None:
    model = Model(SMALL, DISCRETE, DqnConfig(), seed=0)
    observation = torch.randn(1, 3).expand(4_000, 3)
    best = int(model.params(observation[:1]).argmax())
    epsilon = torch.tensor([0.0, 1.0, 0.4, 0.0]).repeat(1_000)
    choice = act(model, observation, Exploration(epsilon))
    strayed = (choice.action != best).reshape(1_000, 4).float().mean(0).tolist()
    assert strayed[0] == strayed[3] == 0.0
    assert strayed[1] == pytest.approx(0.75, abs=0.05) and strayed[2] == pytest.approx(0.3, abs=0.05)
    assert not choice.log_prob.any()


def test_noise_and_warm_up_are_per_row_and_within_bounds() -> None:
    model = Model(SMALL, CONTINUOUS, DdpgConfig(), seed=0)
    observation = torch.randn(1, 3).expand(4_000, 3)
    own = torch.tanh(model.params(observation[:1])).detach()
    noise = torch.tensor([0.0, 0.2]).repeat(2_000)
    action = act(model, observation, Exploration(noise=noise)).action.reshape(2_000, 2, 2)
    torch.testing.assert_close(action[:, 0], own.expand(2_000, 2))
    assert (action[:, 1] - own).std(0).tolist() == pytest.approx([0.2, 0.2], rel=0.1)
    random = torch.tensor([0.0, 1.0]).repeat(2_000)
    action = act(model, observation, Exploration(random, noise)).action.reshape(2_000, 2, 2)
    torch.testing.assert_close(action[:, 0], own.expand(2_000, 2))
    assert float(action[:, 1].var()) == pytest.approx(1.0 / 3.0, rel=0.06) and float(action.abs().max()) <= 1.0


def test_the_ladders_of_ape_x() -> None:
    found = epsilon_ladder(8).tolist()
    assert found == pytest.approx([0.4 ** (1 + 7 * i / 7) for i in range(8)], rel=1e-5)
    assert epsilon_ladder(1).tolist() == pytest.approx([0.4])
    assert noise_ladder(3, 0.4, 0.1).tolist() == pytest.approx([0.4, 0.2, 0.1])
    for epsilon_steps, env_steps, done in (
        (0, 0, 1.0),
        (100, 0, 0.0),
        (100, 25, 0.25),
        (100, 100, 1.0),
        (100, 500, 1.0),
    ):
        explorer = Explorer(DqnConfig(epsilon_ladder=True, epsilon_steps=epsilon_steps), range(2, 4), 8)
        exploration = explorer.at(env_steps)
        assert exploration is not None and exploration.random is not None
        assert exploration.random.tolist() == pytest.approx([1.0 + done * (rung - 1.0) for rung in found[2:4]])


def test_on_atari_the_ladder_holds_from_the_first_step() -> None:
    exploration = Explorer(preset("apex-dqn", "ALE/Pong-v5").algorithm, range(4), 4).at(0)
    assert exploration is not None and exploration.random is not None
    assert torch.equal(exploration.random, epsilon_ladder(4))


def exploration_at(config: AlgorithmConfig, env_steps: int) -> dict[str, list[float] | None] | None:
    found = Explorer(config, range(1, 3), 4).at(env_steps)
    if found is None:
        return None
    return {
        "random": None if found.random is None else found.random.tolist(),
        "noise": None if found.noise is None else found.noise.tolist(),
    }


def test_exploration_falls_by_the_steps_of_the_run() -> None:
    dqn = DqnConfig(epsilon_start=1.0, epsilon_end=0.2, epsilon_steps=100)
    for env_steps, expected in ((0, 1.0), (50, 0.6), (100, 0.2), (10**9, 0.2)):
        found = exploration_at(dqn, env_steps)
        assert found is not None and found["random"] == pytest.approx([expected, expected])
    ddpg = DdpgConfig(random_steps=10, noise=0.3)
    assert exploration_at(ddpg, 9) == {"random": [1.0, 1.0], "noise": pytest.approx([0.3, 0.3])}
    assert exploration_at(ddpg, 10) == {"random": None, "noise": pytest.approx([0.3, 0.3])}
    assert exploration_at(DdpgConfig(random_steps=0, noise=0.0), 0) == {"random": None, "noise": [0.0, 0.0]}
    assert exploration_at(SacConfig(random_steps=10), 9) == {"random": [1.0, 1.0], "noise": None}
    assert exploration_at(SacConfig(random_steps=10), 10) is None
    assert exploration_at(ImpalaConfig(), 0) is None


@pytest.mark.parametrize(("make_config", "message"), [
    (lambda: DqnConfig(target_tau=0.1), r"target_period=500 and algorithm\.target_tau=0\.1.*Set one"),
    (lambda: DqnConfig(target_period=0), r"target_period=0 and algorithm\.target_tau=0\.0"),
    (lambda: DqnConfig(epsilon_end=1.5), r"algorithm\.epsilon_end=1\.5 must be between 0 and 1"),
    (lambda: DdpgConfig(target_tau=0.0), r"algorithm\.target_tau=0\.0 must be above 0"),
    (lambda: DdpgConfig(noise=0.1, noise_ladder=0.2), r"noise_ladder=0\.2 exceeds algorithm\.noise=0\.1"),
    (lambda: SacConfig(temperature=0.0), r"algorithm\.temperature=0\.0 must be above 0"),
    (lambda: ReplayConfig(batch=64, min_size=32), r"replay\.min_size=32 is below replay\.batch=64"),
    (lambda: ReplayConfig(capacity=500, min_size=1_000), r"min_size=1000 exceeds replay\.capacity=500.*wait forever"),
    (lambda: ReplayConfig(n_step=0), r"replay\.n_step=0 must be at least 1"),
    (lambda: ReplayConfig(alpha=1.1), r"replay\.alpha=1\.1 must be between 0 and 1"),
])  # fmt: skip
def test_what_cannot_work_is_refused(make_config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config()


def test_a_network_with_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'network\.core="lstm" is recurrent, but dqn learns from single transitions'):
        Model(NetworkConfig(core="lstm"), DISCRETE, DqnConfig())


def test_mixed_precision_learns_roughly_the_same() -> None:
    for config, spaces in (RULES["dqn"], RULES["td3"], RULES["sac"]):
        values = []
        for precision in ("float32", "bfloat16"):
            model = Model(NetworkConfig(hidden=(32,)), spaces, config, seed=1, precision=precision)
            algorithm = build_algorithm(config, model, 1)
            values.append(learn(algorithm, updater(algorithm), batch_of(spaces))[0].value)
            assert model.parameters.dtype == torch.float32 and values[-1].dtype == torch.float32
        torch.testing.assert_close(values[1], values[0], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", "ALE/Pong-v5"])
@pytest.mark.parametrize("name", REPLAY_PRESETS)
def test_a_preset_names_itself_and_travels_as_json(name: str, env: str) -> None:
    config = REPLAY_PRESETS[name](env)
    assert config.preset == name and config.env.id == env
    assert config_io.from_json(json.loads(json.dumps(config_io.to_json(config)))) == config
    assert config.replay.prioritized == name.startswith("apex-")
    assert config.algorithm.reward_clip == float(env.startswith("ALE/") and name != "mario")


def test_the_network_that_acts_fits_the_rule() -> None:
    assert isinstance(Model(SMALL, DISCRETE, DqnConfig()).network, DuelingNetwork)
    assert isinstance(Model(SMALL, DISCRETE, DqnConfig(dueling=False)).network, HeadNetwork)
    assert isinstance(make(DqnConfig(), DISCRETE), Dqn)
    assert isinstance(make(TD3, CONTINUOUS), Ddpg) and isinstance(make(SacConfig(), CONTINUOUS), Sac)
    sizes = {n: make(*RULES[n]).model.distribution.num_params for n in ("dqn", "ddpg", "sac", "sac discrete")}
    assert sizes == {"dqn": 4, "ddpg": 2, "sac": 4, "sac discrete": 4}
