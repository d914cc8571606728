"""Builds the configured network: a built-in one, or a user's module behind the same interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from echelon.config import NetworkConfig
from echelon.errors import ConfigError, raised_at
from echelon.layers import State
from echelon.names import resolve, text_of
from echelon.networks import ActorCritic, ActOutput, EncoderNetwork, NetworkOutput, PolicyNetwork
from echelon.schema import MASK, Spaces, Tree, map_tree, space_leaves


def build_network(
    config: NetworkConfig,
    spaces: Spaces,
    num_params: int,
    auto: Callable[[NetworkConfig, Spaces, int], PolicyNetwork] | None = None,
) -> PolicyNetwork:
    """Returns the network of `config`; `auto` builds the built-in one, by default an `EncoderNetwork`.

    The initial weights come from torch's global generator, so seed it first.
    """
    space_leaves(spaces.observation)  # raises on spaces that Echelon does not support
    _check_mask(spaces, num_params)
    if config.name == "auto":
        return (auto or EncoderNetwork)(config, spaces, num_params)
    network = CustomNetwork(_load_module(config.name, spaces, num_params))
    _check_output(text_of(config.name), network, spaces, num_params)
    return network


def _check_mask(spaces: Spaces, num_params: int) -> None:
    if not isinstance(spaces.observation, gym.spaces.Dict) or MASK not in spaces.observation.spaces:
        return
    shape = tuple(spaces.observation[MASK].shape or ())
    if isinstance(spaces.action, gym.spaces.Box) or shape != (num_params,):
        expected = "no mask" if isinstance(spaces.action, gym.spaces.Box) else f"shape {(num_params,)}"
        raise ConfigError(
            f'observation["{MASK}"] of shape {shape} does not fit the action space {spaces.action}: expected '
            f"{expected}. Give it one entry per choice (1 = allowed), or rename the key if it is not a mask."
        )


class CustomNetwork(ActorCritic):
    """Adapts a user's module to the `ActorCritic` interface.

    Without `state_shapes`, `forward(observation) -> (params, value)` receives a flat batch: leaves (N, ...), params
    (N, num_params), value (N,). With `state_shapes`, `forward(observation, state, first) -> (params, value, state)`
    receives sequences, as `ActorCritic.forward` does. Such a module can define
    `act(observation, state, first) -> (params, value, state)` for one step, with None as the value if it computes none;
    otherwise a step is a sequence of length 1. A module can also define `update_normalizer`.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.is_sequence = hasattr(module, "state_shapes")
        shapes = getattr(module, "state_shapes", ())
        self.state_shapes = tuple(tuple(int(n) for n in shape) for shape in shapes)

    @property
    def has_statistics(self) -> bool:
        return hasattr(self.module, "update_normalizer")

    def forward(self, observation: Tree, state: State, first: torch.Tensor) -> NetworkOutput:
        if self.is_sequence:
            params, value, state = self.module(observation, state, first)
            return NetworkOutput(params.float(), value.float(), tuple(state))
        params, value = self.module(map_tree(lambda leaf: leaf.flatten(0, 1), observation))
        return NetworkOutput(params.float().unflatten(0, first.shape), value.float().unflatten(0, first.shape), state)

    def act(self, observation: Tree, state: State, first: torch.Tensor, *, with_value: bool = False) -> ActOutput:
        if not self.is_sequence:
            params, value = self.module(observation)
            return ActOutput(params.float(), value.float() if with_value else None, state)
        act = getattr(self.module, "act", None)
        if act is not None:
            step = act(observation, state, first)
            value = step[1] if len(step) == 3 else None
            if value is not None or not with_value:
                return ActOutput(step[0].float(), None if value is None else value.float(), tuple(step[-1]))
        output = self(map_tree(lambda leaf: leaf.unsqueeze(0), observation), state, first.unsqueeze(0))
        return ActOutput(output.params.squeeze(0), output.value.squeeze(0), output.state)

    def update_normalizer(self, observation: Tree, valid: torch.Tensor) -> None:
        if self.has_statistics:
            update: Any = self.module.update_normalizer
            update(observation, valid)


def _load_module(target: str | Callable[..., Any], spaces: Spaces, num_params: int) -> nn.Module:
    """Calls the factory, or the one named "module:factory" or "file.py:factory", and returns its module."""
    name = text_of(target)
    try:
        factory: Any = resolve(target) if isinstance(target, str) else target
    except ConfigError as error:
        raise ConfigError(f"network.name={error}") from error
    try:
        module = factory(spaces, num_params)
    except Exception as error:
        raise ConfigError(
            f'network.name="{name}" raised {type(error).__name__}: {error}{raised_at(error)}. It is called as '
            f"factory(spaces, num_params={num_params}) and must return a torch.nn.Module."
        ) from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f'network.name="{name}" returned a {type(module).__name__}; return a torch.nn.Module.')
    return module


def _blank(space: gym.Space[Any], leading: tuple[int, ...]) -> Tree:
    """Returns a placeholder observation of `space`: zeros, or the first choice of discrete leaves."""
    match space:
        case gym.spaces.Dict():
            return {key: _blank(space[key], leading) for key in sorted(space.spaces)}
        case gym.spaces.Tuple():
            return tuple(_blank(sub, leading) for sub in space.spaces)
        case _:
            leaf = space_leaves(space)[0]
            array = np.zeros((*leading, *leaf.shape), leaf.dtype)
            array += getattr(space, "start", 0)
            return torch.from_numpy(array)


@torch.no_grad()
def _check_output(name: str, network: CustomNetwork, spaces: Spaces, num_params: int) -> None:
    """Runs a user's network once on a placeholder sequence and raises ConfigError if a shape is wrong."""
    T, B = 2, 3
    was_training = network.training
    network.eval()  # so that running statistics (batch norm) do not change
    state, first = network.initial_state(B, "cpu"), torch.ones(T, B, dtype=torch.bool)
    steps = _blank(spaces.observation, (T, B))
    try:
        output = network(steps, state, first)
        row = map_tree(lambda leaf: leaf[0], steps)
        step, value = network.act(row, state, first[0]), network.act(row, state, first[0], with_value=True).value
    except Exception as error:
        raise ConfigError(
            f'network.name="{name}" failed on an observation of {spaces.observation} with {num_params} action '
            f"parameters: {type(error).__name__}: {error}{raised_at(error)}. Its forward must return (params, "
            "value), or (params, value, state) if it has state_shapes."
        ) from error
    network.train(was_training)
    states = tuple((B, *shape) for shape in network.state_shapes)
    checks = {
        "params": (output.params.shape, (T, B, num_params)),
        "value": (output.value.shape, (T, B)),
        "params of act": (step.params.shape, (B, num_params)),
        "value of act": (value.shape if value is not None else (), (B,)),
        "state": (tuple(tuple(leaf.shape) for leaf in output.state), states),
        "state of act": (tuple(tuple(leaf.shape) for leaf in step.state), states),
    }
    for what, (got, expected) in checks.items():
        if tuple(got) != expected:
            raise ConfigError(
                f'network.name="{name}" does not fit the action space {spaces.action}: {what} has the shape '
                f"{tuple(got)}, expected {expected} for {T} steps of {B} lanes. The last dimension of params must "
                f"be num_params={num_params}; value has only the leading dimensions (value.squeeze(-1))."
            )
