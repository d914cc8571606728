"""The update on flat tensors compared to torch's optimizers with separate parameters."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import pytest
import torch

from echelon.algorithms.model import Model
from echelon.algorithms.protocol import Loss, ParameterGroup
from echelon.config import NetworkConfig, OptimizerConfig
from echelon.roles.update import LocalUpdate
from echelon.schema import Spaces

SPACES = Spaces(gym.spaces.Box(-9.0, 9.0, (3,)), gym.spaces.Discrete(2))


def loss_of(model: Model, step: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    observation = torch.randn(5, 4, 3, generator=generator)
    output = model.evaluate(observation, (), torch.zeros(5, 4, dtype=torch.bool))
    return scale * ((output.value - 1.0).square().mean() + (output.params - 0.5).square().mean())


class PerParameter:
    """Clips and steps with torch's own clipping and optimizers."""

    def __init__(self, config: OptimizerConfig, model: Model, **settings: float) -> None:
        self.config, self.model = config, model
        self.parameters = [torch.nn.Parameter(p.detach().clone()) for p in model.network.parameters()]
        kinds: dict[str, Any] = {"adam": torch.optim.Adam, "rmsprop": torch.optim.RMSprop}
        self.optimizer = kinds[config.name](self.parameters, lr=config.learning_rate, eps=config.epsilon, **settings)

    def __call__(self, loss: torch.Tensor) -> float:
        gradients = torch.autograd.grad(loss, list(self.model.network.parameters()))
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip_norm or float("inf"))
        self.optimizer.step()
        return float(norm)


@pytest.mark.parametrize("name", ["adam", "rmsprop"])
def test_the_weight_decay_of_a_group_is_an_l2_penalty(name: Any) -> None:
    config = OptimizerConfig(name=name, learning_rate=0.01, clip_norm=0.0)
    policy, flat, other = (Model(NetworkConfig(hidden=(6,)), SPACES, seed=1) for _ in range(3))
    update = LocalUpdate(config, policy, {"critic": ParameterGroup(flat, 0.01, weight_decay=0.3)})
    reference = PerParameter(config, other, weight_decay=0.3)
    for step in range(10):
        update(Loss(loss_of(flat, step), group="critic"))
        reference(loss_of(other, step))
        for found, expected in zip(flat.network.parameters(), reference.parameters, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        for parameter, expected in zip(other.network.parameters(), reference.parameters, strict=True):
            parameter.data.copy_(expected)
    assert torch.equal(policy.parameters, Model(NetworkConfig(hidden=(6,)), SPACES, seed=1).parameters)


@pytest.mark.parametrize("name", ["adam", "rmsprop"])
@pytest.mark.parametrize("clip_norm", [0.0, 0.5, 1e6])
def test_the_flat_update_equals_the_update_of_every_parameter(name: Any, clip_norm: float) -> None:
    config = OptimizerConfig(name=name, learning_rate=0.01, clip_norm=clip_norm)
    flat, other = (Model(NetworkConfig(hidden=(6,)), SPACES, seed=1) for _ in range(2))
    update, reference = LocalUpdate(config, flat), PerParameter(config, other)
    norms = []
    for step in range(20):
        norm = update(Loss(loss_of(flat, step, scale=3.0)))
        norms.append(reference(loss_of(other, step, scale=3.0)))
        assert norm is not None and float(norm) == pytest.approx(norms[-1], rel=1e-5), "that before clipping"
        for (key, found), expected in zip(flat.network.named_parameters(), reference.parameters, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}")
        for parameter, expected in zip(other.network.parameters(), reference.parameters, strict=True):
            parameter.data.copy_(expected)
    assert max(norms) > 0.5, "the clip was reached"


def test_clipping_shortens_the_gradient_and_keeps_its_direction() -> None:
    model = Model(NetworkConfig(hidden=(6,)), SPACES, seed=1)
    loss_of(model, 0, 100.0).backward()  # type: ignore[no-untyped-call]
    whole = model.gradients.clone()
    LocalUpdate(OptimizerConfig(clip_norm=0.5), model)(Loss(loss_of(model, 0, 100.0)))
    assert float(model.gradients.norm()) == pytest.approx(0.5, rel=1e-4)
    torch.testing.assert_close(model.gradients / 0.5, whole / whole.norm(), rtol=1e-4, atol=1e-6)


def test_old_gradients_do_not_add_up() -> None:
    model = Model(NetworkConfig(hidden=(6,)), SPACES, seed=1)
    update = LocalUpdate(OptimizerConfig(clip_norm=0.0, learning_rate=1e-12), model)
    update(Loss(loss_of(model, 0)))
    once = model.gradients.clone()
    update(Loss(loss_of(model, 0)))
    torch.testing.assert_close(model.gradients, once, rtol=1e-4, atol=1e-7)


def rate(update: LocalUpdate) -> float:
    return update.optimizer.learning_rate


def test_the_linear_schedule_ends_at_zero_and_the_constant_one_stays() -> None:
    model = Model(NetworkConfig(hidden=(6,)), SPACES, seed=1)
    linear = LocalUpdate(OptimizerConfig(learning_rate=0.08, schedule="linear"), model)
    for progress, expected in ((0.0, 0.08), (0.25, 0.06), (1.0, 0.0), (1.5, 0.0), (0.5, 0.04)):
        linear.schedule(progress)
        assert rate(linear) == pytest.approx(expected)
    constant = LocalUpdate(OptimizerConfig(learning_rate=0.08), model)
    constant.schedule(0.9)
    assert rate(constant) == 0.08
    for update in (linear, constant):
        update.schedule(0.75, 0.02)
        assert rate(update) == pytest.approx(0.02), "a callback sets it"
    constant.schedule(0.75)
    assert rate(constant) == 0.08
    linear.schedule(1.0)
    before = model.parameters.clone()
    linear(Loss(loss_of(model, 0)))
    assert torch.equal(model.parameters, before)


def test_the_optimizers_state_travels() -> None:
    config = OptimizerConfig(learning_rate=0.01)
    one, other = (Model(NetworkConfig(hidden=(6,)), SPACES, seed=1) for _ in range(2))
    update = LocalUpdate(config, one)
    for step in range(3):
        update(Loss(loss_of(one, step)))
    other.load_weights(one.weights(), "one")
    successor = LocalUpdate(config, other)
    successor.load_state_dict(copy.deepcopy(update.state_dict()))  # a checkpoint holds copies
    for step in range(3, 6):
        update(Loss(loss_of(one, step)))
        successor(Loss(loss_of(other, step)))
    assert torch.equal(one.parameters, other.parameters)


@pytest.mark.parametrize("name", ["adam", "rmsprop"])
def test_moments_that_torchs_optimizers_saved_are_continued(name: Any) -> None:
    config = OptimizerConfig(name=name, learning_rate=0.01, clip_norm=0.0)
    model = Model(NetworkConfig(hidden=(6,)), SPACES, seed=1)
    parameter = torch.nn.Parameter(model.parameters.clone())
    settings: dict[str, Any] = {"lr": 0.01, "eps": config.epsilon}
    reference = (
        torch.optim.Adam([parameter], fused=True, **settings)
        if name == "adam"
        else torch.optim.RMSprop([parameter], **settings)
    )
    update = LocalUpdate(config, model)
    for step in range(4):
        if step == 2:  # a new optimizer, with the weights and the moments of torch's
            update = LocalUpdate(config, model)
            update.load_state_dict({"policy": copy.deepcopy(reference.state_dict())})
        update(Loss(loss_of(model, step)))
        parameter.grad = model.gradients.clone()
        reference.step()
        assert torch.equal(model.parameters, parameter)
