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
    _check_network(text_of(config.name), network, spaces, num_params, learns_value=auto is None)
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


def sample_observation(space: gym.Space[Any], leading: tuple[int, ...], rng: np.random.Generator) -> Tree:
    """Returns an observation of `space`: random numbers, a mask that allows all, the first choice of other leaves."""
    match space:
        case gym.spaces.Dict():
            found = {key: sample_observation(space[key], leading, rng) for key in sorted(space.spaces)}
            mask = found.get(MASK)
            return {**found, MASK: torch.ones_like(mask)} if isinstance(mask, torch.Tensor) else found
        case gym.spaces.Tuple():
            return tuple(sample_observation(sub, leading, rng) for sub in space.spaces)
    leaf = space_leaves(space)[0]
    array = np.zeros((*leading, *leaf.shape), leaf.dtype) + getattr(space, "start", 0)
    if isinstance(space, gym.spaces.Box):
        largest = 1.0 if leaf.dtype.kind == "f" else 256.0
        array = np.clip(rng.uniform(0.0, largest, array.shape), space.low, space.high)
    return torch.from_numpy(array.astype(leaf.dtype))


def _outputs(network: CustomNetwork, spaces: Spaces) -> list[tuple[tuple[int, ...], NetworkOutput | ActOutput]]:
    """Calls a user's network in every way that training does; returns the leading dimensions and the output of each."""
    rng, T, B = np.random.default_rng(0), 2, 3
    if not network.is_sequence:
        rows = {n: torch.ones(n, dtype=torch.bool) for n in (T * B, 1)}
        return [
            ((n,), network.act(sample_observation(spaces.observation, (n,), rng), (), first, with_value=True))
            for n, first in rows.items()
        ]
    state, first = network.initial_state(B, "cpu"), torch.ones(T, B, dtype=torch.bool)
    steps = sample_observation(spaces.observation, (T, B), rng)
    row = map_tree(lambda leaf: leaf[0], steps)
    acts = [((B,), network.act(row, state, first[0], with_value=with_value)) for with_value in (False, True)]
    return [((T, B), network(steps, state, first)), *acts]


def _check_network(name: str, network: CustomNetwork, spaces: Spaces, num_params: int, *, learns_value: bool) -> None:
    """Calls a user's network on random observations; raises ConfigError if training could not use what it returns."""
    was_training = network.training
    network.eval()  # so that running statistics (batch norm) do not change
    try:
        with torch.enable_grad():
            outputs = _outputs(network, spaces)
    except Exception as error:
        space = " ".join(f"{spaces.observation}".split())  # numpy pads the bounds of a Box
        raise ConfigError(
            f'network.name="{name}" failed on an observation of {space} with {num_params} action '
            f"parameters: {type(error).__name__}: {error}{raised_at(error)}. Its forward must return (params, "
            "value), or (params, value, state) if it has state_shapes."
        ) from error
    network.train(was_training)
    trains = any(parameter.requires_grad for parameter in network.parameters())
    for leading, output in outputs:
        is_act = network.is_sequence and len(leading) == 1
        _check_shapes(name, network, output, leading, " of act" * is_act, spaces, num_params)
        learned = {"params": output.params, **({"value": output.value} if learns_value else {})}
        for what, tensor in learned.items():
            if tensor is not None and not tensor.isfinite().all():
                raise ConfigError(
                    f'network.name="{name}": {what}{" of act" * is_act} has NaN or infinity for finite observations '
                    f"{leading}. Look for a division by 0, the logarithm of 0, or parameters that are not initialized."
                )
            if tensor is not None and trains and not is_act and not tensor.requires_grad:
                raise ConfigError(
                    f'network.name="{name}": {what} does not depend on the parameters of the network, so nothing could '
                    "be learned. Return what its layers compute, without detach(), torch.no_grad() or numpy()."
                )


def _check_shapes(
    name: str,
    network: CustomNetwork,
    output: NetworkOutput | ActOutput,
    leading: tuple[int, ...],
    suffix: str,
    spaces: Spaces,
    num_params: int,
) -> None:
    states = tuple((leading[-1], *shape) for shape in network.state_shapes)
    checks = {
        "params": (tuple(output.params.shape), (*leading, num_params)),
        "value": (leading if output.value is None else tuple(output.value.shape), leading),
        "state": (tuple(tuple(leaf.shape) for leaf in output.state), states),
    }
    names = "T, B" if len(leading) == 2 else "B" if network.is_sequence else "N"
    for what, (got, expected) in checks.items():
        if got != expected:
            raise ConfigError(
                f'network.name="{name}" does not fit the action space {spaces.action}: {what}{suffix} has the shape '
                f"{got}, expected {expected} for {names} = {', '.join(map(str, leading))}. The last dimension of "
                f"params must be num_params={num_params}; value has only the leading dimensions (value.squeeze(-1))."
            )
