"""The model: one flat tensor behind every parameter, and how weights are published."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from echelon.algorithms.model import Action, Mirror, Model, Policy
from echelon.config import NetworkConfig
from echelon.errors import ConfigError
from echelon.schema import Spaces, Tree
from echelon.transport.shared_memory import WeightsBoard

SPACES = Spaces(gym.spaces.Box(-9.0, 9.0, (3,)), gym.spaces.Discrete(2))
TREE = Spaces(
    gym.spaces.Dict(
        {"a": gym.spaces.Box(-9.0, 9.0, (3,)), "b": gym.spaces.Discrete(4), "c": gym.spaces.Box(0, 1, (5,))}
    ),
    gym.spaces.Box(-1.0, 1.0, (2,)),
)
CONFIGS = {
    "plain": (NetworkConfig(hidden=(7, 5)), SPACES),
    "lstm": (NetworkConfig(hidden=(7,), core="lstm", core_size=6, normalize_observation=True), SPACES),
    "tree": (NetworkConfig(hidden=(7,), normalize_observation=True), TREE),
}


def observe(spaces: Spaces, *leading: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    if isinstance(spaces.observation, gym.spaces.Box):
        return torch.randn(*leading, 3, generator=generator)
    choice = torch.randint(4, leading, generator=generator)
    return {"a": torch.randn(*leading, 3, generator=generator), "b": choice, "c": torch.rand(*leading, 5)}


def run(model: Model) -> Any:
    """What the network says about a sequence."""
    first = torch.zeros(4, 2, dtype=torch.bool)
    torch.manual_seed(1)
    with torch.no_grad():
        return model.evaluate(observe(model.spaces, 4, 2), model.network.initial_state(2, "cpu"), first)


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_and_gradients_are_views_of_one_flat_tensor_each(name: str) -> None:
    model = Model(*CONFIGS[name], seed=1)
    low, high = model.parameters.data_ptr(), model.parameters.data_ptr() + model.parameters.nbytes
    for parameter in model.network.parameters():
        assert low <= parameter.data_ptr() < high and parameter.data_ptr() % 64 == low % 64
    first = torch.zeros(4, 2, dtype=torch.bool)
    output = model.evaluate(observe(model.spaces, 4, 2), model.network.initial_state(2, "cpu"), first)
    (output.value.square().sum() + (output.params - 0.3).square().sum()).backward()
    norms = [p.grad.square().sum() for p in model.network.parameters() if p.grad is not None]
    assert len(norms) == len(list(model.network.parameters())) and all(norm > 0 for norm in norms)
    torch.testing.assert_close(model.gradients.square().sum(), torch.stack(norms).sum())
    model.parameters.zero_()
    assert all(not parameter.any() for parameter in model.network.parameters())


def test_the_seed_decides_the_weights_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    one, same, other = (Model(NetworkConfig(), SPACES, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(one.parameters, same.parameters) and not torch.equal(one.parameters, other.parameters)


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_taken_over_in_place(name: str) -> None:
    one, other = Model(*CONFIGS[name], seed=1), Model(*CONFIGS[name], seed=2)
    one.network.update_normalizer(observe(one.spaces, 4, 2), torch.ones(4, 2, dtype=torch.bool))
    before = other.parameters.data_ptr()
    other.load_weights({key: tensor.clone() for key, tensor in one.weights().items()}, "somewhere")
    assert other.parameters.data_ptr() == before and torch.equal(other.parameters, one.parameters)
    torch.testing.assert_close(run(other), run(one), rtol=0, atol=0)


def test_weights_of_another_network_are_refused_and_change_nothing() -> None:
    model = Model(NetworkConfig(hidden=(4,)), SPACES)
    before = model.parameters.clone()
    wider, deeper = Model(NetworkConfig(hidden=(5,)), SPACES), Model(NetworkConfig(hidden=(4, 4)), SPACES)
    with pytest.raises(ConfigError, match=r"torso\.layers\.0\.weight has shape \(5, 3\) in a\.file and \(4, 3\) here"):
        model.load_weights(wider.weights(), "a.file")
    with pytest.raises(ConfigError, match=r"torso\.layers\.1\.bias is only in a\.file"):
        model.load_weights(deeper.weights(), "a.file")
    with pytest.raises(ConfigError, match=r"torso\.layers\.1\.bias is missing in a\.file"):
        deeper.load_weights(model.weights(), "a.file")
    assert torch.equal(model.parameters, before)


class Odd(nn.Module):
    """A user's network with buffers of awkward sizes and types."""

    def __init__(self, num_params: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear = nn.Linear(3, num_params + 1, dtype=dtype)
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("precise", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        out = self.linear(observation.to(self.linear.weight.dtype)) + self.get_buffer("precise").sum().float()
        return out[:, :-1], out[:, -1]


@pytest.fixture
def odd_module(monkeypatch: pytest.MonkeyPatch) -> str:
    module = ModuleType("odd_networks")
    module.odd = lambda spaces, num_params: Odd(num_params)  # type: ignore[attr-defined]
    module.double = lambda spaces, num_params: Odd(num_params, torch.float64)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "odd_networks", module)
    return "odd_networks"


def test_parameters_in_another_precision_are_refused(odd_module: str) -> None:
    with pytest.raises(ConfigError, match=r"module\.linear\.weight is torch\.float64; .* float32"):
        Model(NetworkConfig(name=f"{odd_module}:double"), SPACES)


def act(policy: Policy, observation: Tree, num_rows: int, *, seed: int = 0, greedy: bool = False) -> Action:
    """The first actions of an episode."""
    state, first = policy.model.network.initial_state(num_rows, "cpu"), torch.ones(num_rows, dtype=torch.bool)
    return policy.act(observation, state, first, torch.Generator().manual_seed(seed), greedy=greedy)


@pytest.mark.parametrize("name", [*CONFIGS, "odd"])
def test_a_mirror_follows_the_weights_board(name: str, tmp_path: Path, odd_module: str) -> None:
    config, spaces = (NetworkConfig(name=f"{odd_module}:odd"), SPACES) if name == "odd" else CONFIGS[name]
    source, actor = Model(config, spaces, seed=1), Model(config, spaces, seed=2)
    board = WeightsBoard(tmp_path, source.nbytes)
    mirror, reader = Mirror(actor), WeightsBoard(tmp_path, actor.nbytes)
    policy = Policy(actor)  # made before anything is read: it must see what comes later
    if name == "odd":
        source.network.get_buffer("module.flags")[1] = True
        source.network.get_buffer("module.precise").fill_(1.0 + 2.0**-40)
        source.network.get_buffer("module.calls").fill_(1 << 40)
    for version in (1, 2):
        source.parameters += 0.5
        source.network.update_normalizer(observe(spaces, 4, 2), torch.ones(4, 2, dtype=torch.bool))
        board.publish(source.parts(), version)
        mirror.version = reader.read(mirror.memory)
        assert mirror.version == version
        for (key, expected), (_, found) in zip(source.weights().items(), actor.weights().items(), strict=True):
            assert torch.equal(found, expected) and found.dtype == expected.dtype, key
        torch.testing.assert_close(run(actor), run(source))
    observation = observe(spaces, 2)
    expected, found = act(Policy(source), observation, 2), act(policy, observation, 2)
    torch.testing.assert_close((found.action, found.log_prob), (expected.action, expected.log_prob))


def test_a_mirror_starts_with_the_models_own_weights_and_needs_no_gradients() -> None:
    model, same = Model(*CONFIGS["tree"], seed=3), Model(*CONFIGS["tree"], seed=3)
    mirror = Mirror(model)
    torch.testing.assert_close(run(model), run(same), rtol=0, atol=0)
    assert mirror.version == 0 and not any(p.requires_grad or p.grad is not None for p in model.network.parameters())


def test_a_greedy_policy_takes_the_most_likely_action_and_a_seed_repeats_the_others() -> None:
    model = Model(NetworkConfig(), SPACES, seed=0)
    observation, first = torch.randn(64, 3), torch.ones(64, dtype=torch.bool)
    greedy = act(Policy(model), observation, 64, greedy=True)
    with torch.no_grad():
        params = model.network.act(observation, (), first).params
    assert torch.equal(greedy.action, params.argmax(-1))
    one, same, other = (act(Policy(model), observation, 64, seed=seed).action for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)


@pytest.mark.parametrize("name", CONFIGS)
def test_bfloat16_computes_roughly_the_same_with_float32_weights(name: str) -> None:
    exact, mixed = Model(*CONFIGS[name], seed=1), Model(*CONFIGS[name], seed=1, precision="bfloat16")
    assert mixed.parameters.dtype == torch.float32
    expected, found = run(exact), run(mixed)
    assert found.params.dtype == found.value.dtype == torch.float32
    torch.testing.assert_close(found.value, expected.value, rtol=0.05, atol=0.05)
    assert not torch.equal(found.value, expected.value), "it was computed in another precision"
    first = torch.zeros(4, 2, dtype=torch.bool)
    output = mixed.evaluate(observe(mixed.spaces, 4, 2), mixed.network.initial_state(2, "cpu"), first)
    output.value.square().sum().backward()
    assert mixed.gradients.dtype == torch.float32 and np.isfinite(mixed.gradients.numpy()).all()
    assert bool(mixed.gradients.any())
