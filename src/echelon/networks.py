"""Networks: from an observation tree to action parameters and a value.

`build_network` reads the spaces and the config and returns an `ActorCritic`: our own (`EncoderNetwork`: an encoder per
observation leaf, an MLP, an optional recurrent core, two heads) or a user's module (`CustomNetwork`); rules that learn
no value beside their policy bring a `PolicyNetwork` of their own. The hot path is `act`, one small batch on one CPU
thread, where the number of operations is what costs.

Shapes: T steps, B lanes, N any number of rows (T * B, or B).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from echelon.config import NetworkConfig
from echelon.errors import ConfigError
from echelon.layers import Core, Flat, Image, Mlp, State, initialize, make_encoder
from echelon.names import resolve
from echelon.schema import Spaces, Tree, map_tree, space_leaves

MASK = "action_mask"


class NetworkOutput(NamedTuple):
    """What a network says about a sequence: params (T, B, num_params), value (T, B), and the state after it."""

    params: Tensor
    value: Tensor
    state: State


class ActOutput(NamedTuple):
    """What a network says about one step: params (B, num_params), value (B) if asked for, and the state after it."""

    params: Tensor
    value: Tensor | None
    state: State


class PolicyNetwork(nn.Module, ABC):
    """What every network that acts offers; the state is zeroed where `first`, before the step."""

    state_shapes: tuple[tuple[int, ...], ...] = ()  # per leaf of the recurrent state, without B

    def initial_state(self, batch_size: int, device: torch.device | str) -> State:
        """The state before anything was seen."""
        return tuple(torch.zeros(batch_size, *shape, device=device) for shape in self.state_shapes)

    @abstractmethod
    def act(self, observation: Tree, state: State, first: Tensor, *, with_value: bool = False) -> ActOutput:
        """One step: leaves (B, ...), state leaves (B, ...), first (B)."""

    def update_normalizer(self, observation: Tree, valid: Tensor) -> None:
        """Merge the valid observations into the running statistics, where the network keeps any."""


class ActorCritic(PolicyNetwork):
    """A network that also says what its observations are worth, over sequences."""

    @abstractmethod
    def forward(self, observation: Tree, state: State, first: Tensor) -> NetworkOutput:
        """A sequence: leaves (T, B, ...), state leaves (B, ...), first (T, B)."""


def action_mask(observation: Tree) -> Tensor | None:
    """The mask of allowed actions that the observation carries under the key "action_mask", or None."""
    return observation.get(MASK) if isinstance(observation, Mapping) else None


def build_network(
    config: NetworkConfig,
    spaces: Spaces,
    num_params: int,
    auto: Callable[[NetworkConfig, Spaces, int], PolicyNetwork] | None = None,
) -> PolicyNetwork:
    """The network `config` asks for (`auto` makes ours, an `EncoderNetwork` unless told otherwise).

    Weights are drawn from torch's global generator, so seed it first.
    """
    space_leaves(spaces.observation)  # refuses what Echelon cannot carry
    _check_mask(spaces, num_params)
    if config.name == "auto":
        return (auto or EncoderNetwork)(config, spaces, num_params)
    network = CustomNetwork(_load_module(config.name, spaces, num_params))
    _check_output(config.name, network, spaces, num_params)
    return network


def _check_mask(spaces: Spaces, num_params: int) -> None:
    if not isinstance(spaces.observation, gym.spaces.Dict) or MASK not in spaces.observation.spaces:
        return
    shape = tuple(spaces.observation[MASK].shape or ())
    if isinstance(spaces.action, gym.spaces.Box) or shape != (num_params,):
        expected = "none" if isinstance(spaces.action, gym.spaces.Box) else (num_params,)
        raise ConfigError(
            f'observation["{MASK}"] of shape {shape} does not mask the action space {spaces.action}: expected shape '
            f"{expected}. Give it one entry per choice (1 = allowed), or use another key if it is not a mask."
        )


def _observed(space: gym.Space[Any], path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], gym.Space[Any]]]:
    """Where each encoded leaf hangs (keys from the root) and its space, in the order of the schema; not the mask."""
    match space:
        case gym.spaces.Dict():
            keys = [key for key in sorted(space.spaces) if (*path, key) != (MASK,)]
            return [entry for key in keys for entry in _observed(space[key], (*path, key))]
        case gym.spaces.Tuple():
            return [entry for i, sub in enumerate(space.spaces) for entry in _observed(sub, (*path, i))]
        case _:
            return [(path, space)]


def _leaf(tree: Tree, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


class Encoders(nn.ModuleList):
    """An encoder for every leaf of an observation but the mask, their features side by side."""

    def __init__(self, config: NetworkConfig, space: gym.Space[Any]) -> None:
        observed = _observed(space)
        if not observed:
            raise ConfigError(f'the observation space {space} holds nothing beside "{MASK}" to act on.')
        encoders = [make_encoder(sub, config.normalize_observation) for _, sub in observed]
        super().__init__(encoders)
        self.paths = [path for path, _ in observed]
        self.out_size = sum(encoder.out_size for encoder in encoders)
        self.has_image = any(isinstance(encoder, Image) for encoder in encoders)
        self.only_image = self.has_image and len(encoders) == 1

    def forward(self, observation: Tree, num_leading: int = 1) -> Tensor:
        """All leaves as features (N, F)."""
        features = []
        for path, encoder in zip(self.paths, self, strict=True):
            leaf = _leaf(observation, path)
            features.append(encoder(leaf if num_leading == 1 else leaf.flatten(0, num_leading - 1)))
        return features[0] if len(features) == 1 else torch.cat(features, -1)

    @torch.no_grad()
    def update_normalizer(self, observation: Tree, valid: Tensor) -> None:
        for path, encoder in zip(self.paths, self, strict=True):
            if isinstance(encoder, Flat) and encoder.normalizer is not None:
                encoder.normalizer.update(_leaf(observation, path).flatten(valid.dim()).flatten(0, -2), valid.flatten())


class EncoderNetwork(ActorCritic):
    """Encoders for every leaf, an MLP, an optional core, and heads for policy and value.

    Policy and value have MLPs of their own unless the config shares them, an image is seen, or a core remembers. An
    image seen alone goes from its encoder (512 or 256 features) straight to core and heads; `hidden` is for the rest.
    Continuous actions: the head emits the mean, and the log standard deviation is a parameter that sees nothing.
    """

    def __init__(self, config: NetworkConfig, spaces: Spaces, num_params: int) -> None:
        super().__init__()
        self.encoders = Encoders(config, spaces.observation)
        hidden = () if self.encoders.only_image else config.hidden

        self.torso = Mlp(self.encoders.out_size, hidden, config.activation)
        self.core = Core(config.core, self.torso.out_size, config.core_size) if config.core != "none" else None
        shared = config.shared or self.encoders.has_image or self.core is not None
        self.value_torso = None if shared else Mlp(self.torso.in_size, hidden, config.activation)
        self.state_shapes = self.core.state_shapes if self.core is not None else ()

        out_size = config.core_size if self.core is not None else self.torso.out_size
        is_gaussian = isinstance(spaces.action, gym.spaces.Box)
        num_means = num_params // 2 if is_gaussian else num_params
        self.policy_head = initialize(nn.Linear(out_size, num_means), 0.01)
        self.value_head = initialize(nn.Linear(out_size, 1), 1.0)
        self.log_std = nn.Parameter(torch.full((num_means,), config.initial_log_std)) if is_gaussian else None

    def _params(self, hidden: Tensor) -> Tensor:
        params: Tensor = self.policy_head(hidden).float()
        if self.log_std is None:
            return params
        return torch.cat((params, self.log_std.expand_as(params)), -1)

    def forward(self, observation: Tree, state: State, first: Tensor) -> NetworkOutput:
        features = self.encoders(observation, 2)
        policy = self.torso(features).unflatten(0, first.shape)
        if self.core is not None:
            policy, state = self.core(policy, state, first)
        value = policy if self.value_torso is None else self.value_torso(features).unflatten(0, first.shape)
        return NetworkOutput(self._params(policy), self.value_head(value).squeeze(-1).float(), state)

    def act(self, observation: Tree, state: State, first: Tensor, *, with_value: bool = False) -> ActOutput:
        features = self.encoders(observation)
        hidden = self.torso(features)
        if self.core is not None:
            state = self.core.step(hidden, state, first)
            hidden = state[0]
        value: Tensor | None = None
        if with_value:
            valued = hidden if self.value_torso is None else self.value_torso(features)
            value = self.value_head(valued).squeeze(-1).float()
        return ActOutput(self._params(hidden), value, state)

    def update_normalizer(self, observation: Tree, valid: Tensor) -> None:
        self.encoders.update_normalizer(observation, valid)


class CustomNetwork(ActorCritic):
    """A user's module behind the common interface.

    Without `state_shapes` its `forward(observation) -> (params, value)` sees a plain batch: leaves (N, ...), params
    (N, num_params), value (N,). With `state_shapes` its `forward(observation, state, first) -> (params, value, state)`
    sees sequences as ours does, and may bring `act(observation, state, first) -> (params, value, state)` for one step,
    where the value may be None (else: a sequence of one step), and `update_normalizer`.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.is_sequence = hasattr(module, "state_shapes")
        shapes = getattr(module, "state_shapes", ())
        self.state_shapes = tuple(tuple(int(n) for n in shape) for shape in shapes)

    def forward(self, observation: Tree, state: State, first: Tensor) -> NetworkOutput:
        if self.is_sequence:
            params, value, state = self.module(observation, state, first)
            return NetworkOutput(params.float(), value.float(), tuple(state))
        params, value = self.module(map_tree(lambda leaf: leaf.flatten(0, 1), observation))
        return NetworkOutput(params.float().unflatten(0, first.shape), value.float().unflatten(0, first.shape), state)

    def act(self, observation: Tree, state: State, first: Tensor, *, with_value: bool = False) -> ActOutput:
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

    def update_normalizer(self, observation: Tree, valid: Tensor) -> None:
        update = getattr(self.module, "update_normalizer", None)
        if update is not None:
            update(observation, valid)


def _load_module(name: str, spaces: Spaces, num_params: int) -> nn.Module:
    """The module that the factory named "module:factory" or "file.py:factory" makes."""
    try:
        factory: Any = resolve(name)
    except ConfigError as error:
        raise ConfigError(f"network.name={error}") from error
    try:
        module = factory(spaces, num_params)
    except Exception as error:
        raise ConfigError(
            f'network.name="{name}" raised {type(error).__name__}: {error}. It is called as factory(spaces, '
            f"num_params={num_params}) and has to return a torch.nn.Module."
        ) from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f'network.name="{name}" returned a {type(module).__name__}; return a torch.nn.Module.')
    return module


def _blank(space: gym.Space[Any], leading: tuple[int, ...]) -> Tree:
    """An observation of `space` that says nothing: zeros, or the first choice of discrete leaves."""
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
    """Run a user's network once on a blank sequence and refuse outputs that do not fit."""
    T, B = 2, 3
    was_training = network.training
    network.eval()  # so that no statistic of the module (batch norm) learns from it
    state, first = network.initial_state(B, "cpu"), torch.ones(T, B, dtype=torch.bool)
    steps = _blank(spaces.observation, (T, B))
    try:
        output = network(steps, state, first)
        row = map_tree(lambda leaf: leaf[0], steps)
        step, value = network.act(row, state, first[0]), network.act(row, state, first[0], with_value=True).value
    except Exception as error:
        raise ConfigError(
            f'network.name="{name}" failed on an observation of {spaces.observation} with {num_params} action '
            f"parameters: {type(error).__name__}: {error}. Its forward must return (params, value), or (params, value, "
            "state) if it has state_shapes."
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
                f"{tuple(got)}, expected {expected} for {T} steps of {B} lanes. Give params a last dimension of "
                f"num_params={num_params} and value none beyond the leading ones (value.squeeze(-1))."
            )
