"""Networks of algorithms that learn action values: the acting network and the critics.

Shapes: N critics, B rows, F features, A actions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn

from echelon.config import AlgorithmConfig, NetworkConfig
from echelon.custom_network import build_network
from echelon.errors import ConfigError
from echelon.layers import State, initialize
from echelon.names import resolve, text_of
from echelon.networks import ACTIVATIONS, ActOutput, Encoders, Mlp, PolicyNetwork
from echelon.objectives.distributions import Distribution, make_distribution
from echelon.presets.ddpg import DdpgConfig
from echelon.presets.dqn import DqnConfig
from echelon.schema import Spaces, Tree, action_leaf


class HeadNetwork(PolicyNetwork):
    """Encoders, an MLP and one linear head: the values of actions, or the parameters of their distribution.

    If an image is the only leaf, its encoder feeds the head directly, as in every built-in network.
    """

    def __init__(self, config: NetworkConfig, spaces: Spaces, num_params: int) -> None:
        super().__init__()
        self.encoders = Encoders(config, spaces.observation)
        hidden = () if self.encoders.only_image else config.hidden
        self.torso = Mlp(self.encoders.out_size, hidden, config.activation)
        self.head = initialize(nn.Linear(self.torso.out_size, num_params), 0.01)

    def act(self, observation: Tree, state: State, first: Tensor, *, with_value: bool = False) -> ActOutput:
        return ActOutput(self.head(self.torso(self.encoders(observation))).float(), None, state)

    def update_normalizer(self, observation: Tree, valid: Tensor) -> None:
        self.encoders.update_normalizer(observation, valid)


class DuelingNetwork(PolicyNetwork):
    """Action values as the sum of a state value and action advantages (Wang et al., 2016, eq. 9).

    The last hidden layer is twice as wide: one half is the value stream, the other the advantage stream.
    """

    def __init__(self, config: NetworkConfig, spaces: Spaces, num_params: int) -> None:
        super().__init__()
        self.encoders = Encoders(config, spaces.observation)
        before = () if self.encoders.only_image else config.hidden[:-1]
        last = config.hidden[-1] if config.hidden else 0
        self.torso = Mlp(self.encoders.out_size, before, config.activation)
        self.streams = Mlp(self.torso.out_size, (2 * last,) if last else (), config.activation)
        self.size = last or self.torso.out_size  # of a stream
        self.value_head = initialize(nn.Linear(self.size, 1), 0.01)
        self.advantage_head = initialize(nn.Linear(self.size, num_params), 0.01)

    def act(self, observation: Tree, state: State, first: Tensor, *, with_value: bool = False) -> ActOutput:
        streams = self.streams(self.torso(self.encoders(observation)))
        advantage: Tensor = self.advantage_head(streams[:, -self.size :])
        value: Tensor = self.value_head(streams[:, : self.size])
        return ActOutput((value + advantage - advantage.mean(-1, keepdim=True)).float(), None, state)

    def update_normalizer(self, observation: Tree, valid: Tensor) -> None:
        self.encoders.update_normalizer(observation, valid)


class StackedLinear(nn.Module):
    """N parallel linear layers, (N, B, in) to (N, B, out), in one operation."""

    def __init__(self, num: int, in_size: int, out_size: int, gain: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num, in_size, out_size))
        self.bias = nn.Parameter(torch.zeros(num, 1, out_size))
        for weight in self.weight:
            nn.init.orthogonal_(weight, gain)

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x, self.weight)


class Critic(nn.Module):
    """N critics in one module: the value of a continuous action (N, B), or of every discrete action (N, B, A).

    They share only the encoders, which have trainable parameters only for images.
    """

    def __init__(self, config: NetworkConfig, spaces: Spaces, num: int) -> None:
        super().__init__()
        self.encoders = Encoders(config, spaces.observation)
        self.num, self.num_values = num, 0
        action_size = math.prod(action_leaf(spaces.action).shape)
        if isinstance(spaces.action, gym.spaces.Discrete):
            action_size, self.num_values = 0, int(spaces.action.n)
        self.activation = ACTIVATIONS[config.activation]
        sizes = (self.encoders.out_size + action_size, *config.hidden)
        self.layers = nn.ModuleList(StackedLinear(num, a, b, math.sqrt(2.0)) for a, b in pairwise(sizes))
        self.head = StackedLinear(num, sizes[-1], self.num_values or 1, 0.01)

    def forward(self, observation: Tree, action: Tensor | None = None) -> Tensor:
        return self.value_of(self.encoders(observation), action)

    def value_of(self, features: Tensor, action: Tensor | None = None) -> Tensor:
        """Returns the values of actions, from the encoders' features of the observation."""
        x = features if action is None else torch.cat((features, action), -1)
        x = x.expand(self.num, *x.shape)
        for layer in self.layers:
            x = self.activation(layer(x))
        values: Tensor = self.head(x).float()
        return values if self.num_values else values.squeeze(-1)

    def update_normalizer(self, observation: Tree, valid: Tensor) -> None:
        self.encoders.update_normalizer(observation, valid)


@dataclass(frozen=True, slots=True)
class PolicyParts:
    """The parts of a policy: a network, its action distribution, and a critic if actors need one."""

    network: PolicyNetwork
    distribution: Distribution
    critic: Critic | None = None


def acting_distribution(algorithm: AlgorithmConfig, action_space: gym.Space[Any]) -> Distribution:
    """Returns the action distribution of `algorithm`."""
    return make_distribution(action_space, algorithm.distribution)


def build_acting(config: NetworkConfig, spaces: Spaces, algorithm: AlgorithmConfig) -> PolicyParts:
    """Builds the acting parts of `algorithm`; weights come from torch's global generator, so seed it first."""
    build: Any = resolve(algorithm.network)
    acting: PolicyParts = build(config, spaces, algorithm)
    return acting


def actor_critic(config: NetworkConfig, spaces: Spaces, algorithm: AlgorithmConfig) -> PolicyParts:
    """Builds a network for action parameters and state values, with or without a recurrent core."""
    distribution = acting_distribution(algorithm, spaces.action)
    return PolicyParts(build_network(config, spaces, distribution.num_params), distribution)


def head(config: NetworkConfig, spaces: Spaces, algorithm: AlgorithmConfig) -> PolicyParts:
    return without_memory(config, spaces, HeadNetwork, algorithm)


def action_values(config: NetworkConfig, spaces: Spaces, algorithm: DqnConfig) -> PolicyParts:
    return without_memory(config, spaces, DuelingNetwork if algorithm.dueling else HeadNetwork, algorithm)


def head_and_critic(config: NetworkConfig, spaces: Spaces, algorithm: DdpgConfig) -> PolicyParts:
    acting = head(config, spaces, algorithm)
    critic = Critic(config, spaces, algorithm.num_critics) if algorithm.publish_critic else None
    return PolicyParts(acting.network, acting.distribution, critic)


def without_memory(
    config: NetworkConfig,
    spaces: Spaces,
    auto: Callable[[NetworkConfig, Spaces, int], PolicyNetwork],
    algorithm: AlgorithmConfig,
) -> PolicyParts:
    """Builds `auto`, or the user's network, for an algorithm that learns from single transitions."""
    distribution = acting_distribution(algorithm, spaces.action)
    network = build_network(config, spaces, distribution.num_params, auto)
    if config.core != "none" or network.state_shapes:
        what = f'network.core="{config.core}"' if config.core != "none" else f'network.name="{text_of(config.name)}"'
        raise ConfigError(
            f"{what} is recurrent, but {algorithm.name} learns from single transitions, which have no recurrent state. "
            "Use a network without a core (stack frames in the environment instead), or impala or ppo."
        )
    return PolicyParts(network, distribution)
