"""Networks: map an observation tree to action parameters and a value.

`EncoderNetwork` is the default: an encoder per observation leaf, an MLP, an optional recurrent core, two heads.
Algorithms without a state value define their own `PolicyNetwork` (`algorithms.value_networks`); a user's network is an
`ActorCritic` (`custom_network`). The hot path is `act`: a small batch on one CPU thread, where the cost is the number
of operations.

Shapes: T steps, B lanes, N any number of rows (T * B, or B).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from echelon.config import NetworkConfig
from echelon.errors import ConfigError
from echelon.layers import Core, Image, Normalizer, OneHot, State, initialize
from echelon.schema import MASK, Spaces, Tree, is_image

LARGE = 8192  # elements: above this the work of an operation outweighs its call overhead


class NetworkOutput(NamedTuple):
    """Output for a sequence: params (T, B, num_params), value (T, B), and the state after the sequence."""

    params: Tensor
    value: Tensor
    state: State


class ActOutput(NamedTuple):
    """Output for one step: params (B, num_params), value (B) if requested, and the state after the step."""

    params: Tensor
    value: Tensor | None
    state: State


class PolicyNetwork(nn.Module, ABC):
    """The interface of every network that acts. Where `first` is set, the state is zeroed before the step."""

    state_shapes: tuple[tuple[int, ...], ...] = ()  # per leaf of the recurrent state, without B

    @property
    def has_statistics(self) -> bool:
        """Whether the network keeps running statistics of observations (`update_normalizer`)."""
        return any(isinstance(module, Normalizer) for module in self.modules())

    def initial_state(self, batch_size: int, device: torch.device | str) -> State:
        """Returns the recurrent state at the start of an episode."""
        return tuple(torch.zeros(batch_size, *shape, device=device) for shape in self.state_shapes)

    @abstractmethod
    def act(self, observation: Tree, state: State, first: Tensor, *, with_value: bool = False) -> ActOutput:
        """Computes one step: observation leaves (B, ...), state leaves (B, ...), first (B)."""

    def update_normalizer(self, observation: Tree, valid: Tensor) -> None:
        """Merges the valid observations into the running statistics, if the network has any."""


class ActorCritic(PolicyNetwork):
    """A network that also computes state values, over sequences."""

    @abstractmethod
    def forward(self, observation: Tree, state: State, first: Tensor) -> NetworkOutput:
        """Computes a sequence: observation leaves (T, B, ...), state leaves (B, ...), first (T, B)."""


def action_mask(observation: Tree) -> Tensor | None:
    """Returns the mask of allowed actions, the observation's entry "action_mask", or None."""
    return observation.get(MASK) if isinstance(observation, Mapping) else None


class _WideTanh(torch.autograd.Function):
    """tanh as 2 sigmoid(2x) - 1: takes a quarter of torch.tanh's time on a CPU, accurate to 1e-7."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = (x * 2.0).sigmoid_().mul_(2.0).sub_(1.0)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (y,), (gradient,) = ctx.saved_tensors, gradients
        return torch.addcmul(gradient, gradient * y, y, value=-1.0)


def tanh(x: Tensor) -> Tensor:
    if x.device.type != "cpu" or torch.compiler.is_compiling() or x.numel() < LARGE:
        return torch.tanh(x)
    wide: Tensor = _WideTanh.apply(x)  # type: ignore[no-untyped-call]
    return wide


ACTIVATIONS = {"tanh": tanh, "relu": torch.relu}


class Flat(nn.Module):
    """Flattens an array to one row of floats, normalizes them if asked, and multiplies them by `scale`."""

    def __init__(self, shape: tuple[int, ...], scale: float, normalize: bool = False) -> None:
        super().__init__()
        self.out_size = math.prod(shape)
        self.scale = scale
        self.normalizer = Normalizer(self.out_size) if normalize else None

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 2:
            x = x.reshape(x.shape[0], -1)  # not len(x), which fixes the size of a batch in an exported graph
        if x.dtype != torch.float32:
            x = x.float()
        if self.normalizer is not None:
            x = self.normalizer(x)
        return x if self.scale == 1.0 else x * self.scale


class Mlp(nn.Module):
    """Linear layers, each followed by an activation; without hidden layers, the identity."""

    def __init__(self, in_size: int, hidden: tuple[int, ...], activation: str) -> None:
        super().__init__()
        sizes = (in_size, *hidden)
        self.in_size, self.out_size = in_size, sizes[-1]
        self.activation = ACTIVATIONS[activation]
        layers = [initialize(nn.Linear(a, b), math.sqrt(2.0)) for a, b in pairwise(sizes)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.activation(layer(x))
        return x


def make_encoder(space: gym.Space[Any], config: NetworkConfig) -> Flat | OneHot | Image:
    """Returns the encoder of one leaf of an observation space; images and integers are not normalized."""
    match space:
        case gym.spaces.Discrete():
            return OneHot([int(space.n)], [int(space.start)])
        case gym.spaces.MultiDiscrete():
            return OneHot([int(n) for n in space.nvec.flat], [int(n) for n in space.start.flat])
        case gym.spaces.MultiBinary():
            return Flat(tuple(space.shape), config.observation_scale)
        case gym.spaces.Box():
            is_bytes = space.dtype == np.uint8
            scale = 1.0 / 255.0 if is_bytes else 1.0
            shape = tuple(space.shape)
            if is_image(shape, space.dtype):
                return Image(shape, scale)
            is_float = bool(np.issubdtype(space.dtype, np.floating))
            return Flat(shape, scale * config.observation_scale, config.normalize_observation and is_float)
        case _:
            raise AssertionError(f"space_leaves accepted {space}, which has no encoder")


def _observed(space: gym.Space[Any], path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], gym.Space[Any]]]:
    """Returns the path (keys from the root) and space of each leaf except the mask, in the order of the schema."""
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
    """Encoders for all leaves of an observation except the mask; their features are concatenated."""

    def __init__(self, config: NetworkConfig, space: gym.Space[Any]) -> None:
        observed = _observed(space)
        if not observed:
            raise ConfigError(
                f'the observation space {space} has no entry besides "{MASK}". Add the observation itself.'
            )
        encoders = [make_encoder(sub, config) for _, sub in observed]
        super().__init__(encoders)
        self.paths = [path for path, _ in observed]
        self.out_size = sum(encoder.out_size for encoder in encoders)
        self.has_image = any(isinstance(encoder, Image) for encoder in encoders)
        self.only_image = self.has_image and len(encoders) == 1

    def forward(self, observation: Tree, num_leading: int = 1) -> Tensor:
        """Returns the features (N, F) of all leaves."""
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
    """Encoders for every leaf, an MLP, an optional recurrent core, and heads for policy and value.

    Policy and value have separate MLPs unless `shared` is set, an image is observed, or there is a core. If an image is
    the only leaf, its encoder (512 or 256 features) feeds core and heads directly, and `hidden` is not used.
    For continuous actions the head emits the mean; the log standard deviation is a parameter that does not depend on
    the observation.
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
