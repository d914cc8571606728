"""QR-DQN: its loss against closed forms, the return distributions it finds, and how it acts and bootstraps."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from test_value_algorithms import DISCRETE, MASKED, SMALL, act, batch_of, flats, learn, make, observe, updater
from torch import Tensor

import echelon
from checkpoints import save_checkpoint
from echelon.algorithms.exploration import Exploration
from echelon.algorithms.model import Model
from echelon.algorithms.qr_dqn import QuantileNetwork, quantile_huber_loss, quantile_targets
from echelon.algorithms.value_networks import DuelingNetwork, HeadNetwork
from echelon.config import DqnConfig, NetworkConfig, replace
from echelon.errors import ConfigError
from echelon.objectives.values import PRIORITY_FLOOR
from echelon.presets import REPLAY_PRESETS, preset
from echelon.presets.qr_dqn import QrDqnConfig
from echelon.runs.checkpoint import load_checkpoint
from echelon.runs.metrics import read_rows
from echelon.schema import Spaces, TransitionBatch

FEW = QrDqnConfig(num_quantiles=5, double=False, dueling=False)
RULES = {"plain": FEW, "double": replace(FEW, double=True), "dueling": replace(FEW, dueling=True)}


def loss_by_hand(theta: Any, target: Any, weight: Any, kappa: float) -> float:
    """Equations 9 and 10 as loops: summed over quantiles i, averaged over target samples j and transitions."""
    total = 0.0
    for b in range(len(theta)):
        for i, quantile in enumerate(theta[b]):
            tau = (2 * (i + 1) - 1) / (2 * len(theta[b]))
            for sample in target[b]:
                u = sample - quantile
                huber = 0.5 * u * u if abs(u) <= kappa else kappa * (abs(u) - 0.5 * kappa)
                total += weight[b] * abs(tau - (1.0 if u < 0 else 0.0)) * huber / kappa / len(target[b])
    return total / len(theta)


def random_case(num_targets: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    theta, target, weight = ((4, 5), (4, num_targets), (4,))
    return tuple(
        2.0 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in (theta, target, weight)
    )


def test_a_worked_example_of_the_loss() -> None:
    theta, target, one = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 3.0]]), torch.ones(1)
    # tau is 1/4 and 3/4. From 0.0: 1/4 of (0.125, 2.5). From 1.0: |3/4 - 1| of 0.125 (below it), 3/4 of 1.5 (above).
    expected = 0.5 * 0.25 * (0.125 + 2.5) + 0.5 * (0.25 * 0.125 + 0.75 * 1.5)
    assert float(quantile_huber_loss(theta, target, one, 1.0)) == pytest.approx(expected)
    # kappa=2: everything but 3.0 from 0.0 is squared, 2 * (3 - 1) there; all of it over 2.
    expected = 0.25 * 0.25 * (0.125 + 4.0) + 0.25 * (0.25 * 0.125 + 0.75 * 2.0)
    assert float(quantile_huber_loss(theta, target, one, 2.0)) == pytest.approx(expected)


@pytest.mark.parametrize("kappa", [0.1, 1.0, 5.0])
def test_the_loss_is_that_of_its_equations(kappa: float) -> None:
    theta, target, weight = random_case()
    expected = loss_by_hand(theta.numpy(), target.numpy(), weight.numpy(), kappa)
    assert float(quantile_huber_loss(theta, target, weight, kappa)) == pytest.approx(expected, rel=1e-6)


def test_the_gradient_is_that_of_finite_differences_and_the_target_has_none() -> None:
    theta, target, weight = random_case()
    theta.requires_grad_(), target.requires_grad_()
    quantile_huber_loss(theta, target, weight, 1.0).backward()  # type: ignore[no-untyped-call]
    assert theta.grad is not None and target.grad is None
    step, found = 1e-6, torch.zeros_like(theta)
    with torch.no_grad():
        for b in range(4):
            for i in range(5):
                above, below = theta.clone(), theta.clone()
                above[b, i] += step
                below[b, i] -= step
                rise = [loss_by_hand(x.numpy(), target.numpy(), weight.numpy(), 1.0) for x in (above, below)]
                found[b, i] = (rise[0] - rise[1]) / (2 * step)
    torch.testing.assert_close(theta.grad, found, rtol=1e-5, atol=1e-6)


def test_without_a_threshold_to_speak_of_the_loss_is_least_at_the_quantiles() -> None:
    sample = torch.linspace(0.0, 1.0, 1_001).square().unsqueeze(0)  # u^2 of a uniform u: tau^2 is its quantile
    tau = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9])
    best = quantile_huber_loss(tau.square().unsqueeze(0), sample, torch.ones(1), 1e-4)
    for i in range(5):
        for shift in (-0.02, 0.02):
            other = tau.square().unsqueeze(0)
            other[0, i] += shift
            assert quantile_huber_loss(other, sample, torch.ones(1), 1e-4) > best


def test_targets_are_the_quantiles_of_the_best_next_action() -> None:
    next_quantiles = torch.tensor([[[0.0, 4.0], [1.0, 2.0]], [[5.0, 6.0], [7.0, 8.0]]])
    found = quantile_targets(
        torch.tensor([1.0, -1.0]), torch.tensor([0.5, 0.0]), torch.tensor([[3.0, 1.0], [0.0, 1.0]]), next_quantiles
    )
    assert found.tolist() == [[1.0, 3.0], [-1.0, -1.0]]


def two_states() -> TransitionBatch:
    """State 0 gives 10 in 3 of 10 cases, else 0, and leads to state 1, which gives a uniform number and ends."""
    uniform = (torch.arange(40) + 0.5) / 40
    reward = torch.cat((torch.tensor([10.0] * 12 + [0.0] * 28), uniform))
    state = torch.cat((torch.tensor([1.0, 0.0]).expand(40, 2), torch.tensor([0.0, 1.0]).expand(40, 2)))
    discount = torch.tensor([0.9] * 40 + [0.0] * 40)
    after = torch.tensor([0.0, 1.0]).expand(80, 2)
    return TransitionBatch(state, torch.zeros(80, dtype=torch.int64), reward, discount, after, torch.ones(80))


def test_the_quantiles_of_known_returns_are_found() -> None:
    spaces = Spaces(gym.spaces.Box(0.0, 1.0, (2,)), gym.spaces.Discrete(1))
    config = QrDqnConfig(num_quantiles=4, huber=0.01, double=False, dueling=False, target_period=10)
    algorithm = make(config, spaces, NetworkConfig(hidden=()))  # a table
    for rate, num in ((1e-1, 150), (1e-2, 150), (2e-3, 100)):
        update = updater(algorithm, learning_rate=rate, clip_norm=0.0)
        for _ in range(num):
            learn(algorithm, update, two_states())
    first, second = algorithm.network.quantiles(torch.eye(2)).squeeze(1).tolist()
    assert second == pytest.approx([0.125, 0.375, 0.625, 0.875], abs=0.03)  # of the uniform number
    # Before it: 0.9 of those four with 7/40 each and 10 more with 3/40 each, so the four sums where the distribution
    # function passes 1/8, 3/8, 5/8 and 7/8 are the first, third and fourth of the lower and the third of the higher.
    assert first == pytest.approx([0.9 * 0.125, 0.9 * 0.625, 0.9 * 0.875, 10.0 + 0.9 * 0.625], abs=0.06)


@pytest.mark.parametrize("name", RULES)
def test_the_errors_are_those_of_the_means_and_forbidden_actions_are_not_bootstrapped_from(name: str) -> None:
    config = RULES[name]
    algorithm, batch = make(config, MASKED), batch_of(MASKED)
    noise = torch.randn(algorithm.model.parameters.shape, generator=torch.Generator().manual_seed(2))
    algorithm.model.parameters += noise  # away from its target network
    with torch.no_grad():
        theta = algorithm.network.quantiles(batch.observation)
        online = algorithm.network.quantiles(batch.next_observation)
        later = algorithm.target.network.quantiles(batch.next_observation)
    assert not torch.equal(online.mean(-1).argmax(-1), later.mean(-1).argmax(-1)), "or double and plain were the same"
    (loss,) = algorithm.losses(batch)
    assert theta.shape == (12, 4, 5)
    chosen, target = [], []
    for i in range(12):
        allowed = [a for a in range(4) if batch.next_observation["action_mask"][i, a]] or list(range(4))
        choosing = (online if config.double else later)[i].mean(-1)
        best = max(allowed, key=lambda a, choosing=choosing: float(choosing[a]))
        target.append(batch.reward[i] + batch.discount[i] * later[i, best])
        chosen.append(theta[i, batch.action[i]])
    expected = loss_by_hand(torch.stack(chosen).numpy(), torch.stack(target).numpy(), batch.weight.numpy(), 1.0)
    assert float(loss.value.detach()) == pytest.approx(expected, rel=1e-4)
    errors = (torch.stack(target) - torch.stack(chosen)).mean(-1)
    torch.testing.assert_close(algorithm.errors, errors)
    torch.testing.assert_close(algorithm.priorities(batch), errors.abs() + PRIORITY_FLOOR)


@pytest.mark.parametrize("name", RULES)
def test_the_action_with_the_highest_mean_is_taken(name: str) -> None:
    model = Model(SMALL, MASKED, RULES[name], seed=3)
    network, observation = model.network, observe(MASKED, 50, 0)
    assert isinstance(network, QuantileNetwork)
    assert isinstance(network.inner, DuelingNetwork if name == "dueling" else HeadNetwork)
    head = network.inner.advantage_head if name == "dueling" else network.inner.head
    skewed = torch.tensor([[0.0] * 5, [-1.0, -1.0, -1.0, -1.0, 9.0], [0.5] * 5, [1.2] * 5])  # means 0, 1, 0.5, 1.2
    with torch.no_grad():
        head.weight.zero_()
        head.bias.copy_(skewed.flatten())
    observation["action_mask"][:] = torch.tensor([1, 1, 1, 0])
    observation["action_mask"][0] = 0  # allows all
    choice = act(model, observation, greedy=True)
    assert choice.action.tolist() == [3] + [1] * 49, "neither the median's choice nor a forbidden one"
    means = model.params(observation).detach()
    torch.testing.assert_close(means - means[:, :1], skewed.mean(-1).expand(50, 4))
    assert choice.action_values is not None
    torch.testing.assert_close(choice.action_values.best, means.gather(-1, choice.action.unsqueeze(-1)).squeeze(-1))
    strayed = act(model, observation, Exploration(torch.ones(50))).action
    assert set(strayed[1:].tolist()) == {0, 1, 2}


@pytest.mark.parametrize("name", RULES)
def test_a_successor_goes_on_where_a_checkpoint_was_written(name: str, tmp_path: Path) -> None:
    config = replace(RULES[name], target_period=2)
    one, other = (make(config, DISCRETE, NetworkConfig(hidden=(8,), normalize_observation=True), s) for s in (1, 2))
    update = updater(one)
    for step in range(3):
        learn(one, update, batch_of(DISCRETE, seed=step))
    assert not torch.equal(one.target.flat.parameters, one.model.parameters)
    tree = {"model": one.model.weights(), "algorithm": one.state_dict(), "optimizer": update.state_dict()}
    tree = load_checkpoint(save_checkpoint(tmp_path, tree, step=3, keep=1))
    other.model.load_weights(tree["model"], "the file")
    other.load_state_dict(tree["algorithm"])
    successor = updater(other)
    successor.load_state_dict(tree["optimizer"])
    for step in range(3, 8):
        batch = batch_of(DISCRETE, seed=step)
        learn(one, update, batch)
        learn(other, successor, copy.deepcopy(batch))
        assert torch.equal(one.priorities(batch), other.priorities(batch))
    for key, tensor in flats(one).items():
        assert torch.equal(tensor, flats(other)[key]), key
    seen = one.model.network.inner.encoders[0].normalizer
    assert float(seen.count) == 8 * 12 and torch.equal(seen.mean, other.model.network.inner.encoders[0].normalizer.mean)


def test_one_quantile_is_a_median_and_acts_as_dqn_does() -> None:
    """With a single quantile the asymmetry is 1/2 on both sides: half the loss of DQN on the same weights."""
    one = make(replace(FEW, num_quantiles=1), DISCRETE)
    plain = make(DqnConfig(double=False, dueling=False, huber=1.0), DISCRETE)
    assert torch.equal(one.model.parameters, plain.model.parameters)
    batch = batch_of(DISCRETE)
    (half,), (whole,) = one.losses(batch), plain.losses(batch)
    torch.testing.assert_close(2.0 * half.value, whole.value)
    torch.testing.assert_close(one.errors, plain.errors)


@pytest.mark.parametrize(("make_config", "message"), [
    (lambda: QrDqnConfig(num_quantiles=0), r"algorithm\.num_quantiles=0 must be at least 1"),
    (lambda: QrDqnConfig(huber=0.0), r"algorithm\.huber=0\.0 must be above 0"),
    (lambda: Model(NetworkConfig(core="gru"), DISCRETE, FEW), r'core="gru" is recurrent, but qr-dqn'),
    (lambda: Model(NetworkConfig(name="nets:make"), DISCRETE, FEW), r'"nets:make" outputs one value .* 5 quantiles'),
    (lambda: Model(SMALL, Spaces(DISCRETE.observation, gym.spaces.Box(-1, 1, (2,))), FEW), r"supports Discrete"),
])  # fmt: skip
def test_what_cannot_work_is_refused(make_config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config()


def test_the_preset_has_the_values_of_the_paper_on_atari() -> None:
    assert "qr-dqn" in REPLAY_PRESETS
    config = preset("qr-dqn", "ALE/Pong-v5")
    rule, optimizer = config.algorithm, config.optimizer
    assert isinstance(rule, QrDqnConfig) and not rule.double and not rule.dueling
    assert (rule.num_quantiles, rule.huber, rule.target_period, rule.epsilon_end) == (200, 1.0, 10_000, 0.01)
    assert (optimizer.learning_rate, optimizer.epsilon) == (5e-5, 0.01 / 32)
    assert (config.replay.n_step, config.replay.batch, config.replay.min_size) == (1, 32, 50_000)
    assert not isinstance(preset("dqn", "ALE/Pong-v5").algorithm, QrDqnConfig)


def test_a_run_learns_from_what_its_priorities_draw(tmp_path: Path, shm_dir: Path) -> None:
    fields = {
        "engine": "inline",
        "seed": 1,
        "stop.steps": 240,
        "evaluation.episodes": 0,
        "replay.prioritized": True,
    }
    fields |= {"run.dir": str(tmp_path / "run"), "shm_dir": str(shm_dir), "network.hidden": (16,)}
    fields |= {"replay.min_size": 128, "replay.capacity": 1_000, "replay.batch": 64, "algorithm.target_period": 5}
    result = echelon.train(replace(preset("qr-dqn", "CartPole-v1"), **fields), output=io.StringIO())
    assert result.status == "finished" and result.summary["env_steps"] >= 240
    rows = [row for row in read_rows(result.run_dir) if row["kind"] == "train"]
    assert rows[-1]["updates"] > 30 and rows[-1]["replay.beta"] > 0.9
    assert echelon.evaluate(result.run_dir, episodes=2)["return_mean"] >= 8.0
