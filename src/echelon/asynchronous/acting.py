"""How a worker chooses actions: with a copy of the learner's model, or with the user's policy object.

Shapes: K environments.
"""

from __future__ import annotations

from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import torch

from echelon.algorithms.exploration import Explorer
from echelon.algorithms.model import Mirror, Model, Policy
from echelon.config import TrainConfig
from echelon.errors import DivergedError, EnvError, Refused
from echelon.roles.user_policy import StateLayout, load_state
from echelon.schema import Spaces, Tree, action_leaf, unflatten

Array = np.ndarray[Any, Any]
NUM_RUNGS = 256  # of the exploration ladder that any number of workers shares


class WorkerActing(Protocol):
    """Chooses the actions of a worker."""

    version: int

    def load(self, weights: Array, version: int) -> None:
        """Loads the weights of `version`, in the format of the learner's board."""

    def act(self, observation: list[Array], evaluates: Array, env_steps: int) -> Array:
        """Returns actions (K, ...) for leaves (K, ...), greedy where `evaluates`; `env_steps` are those of the run."""

    def to_env(self, action: Array) -> Array:
        """Converts `action` to the actions of the environments."""


def rungs(place: int, num_envs: int) -> list[int]:
    """Returns the rungs of the exploration ladder for the environments of the worker number `place`.

    Bit-reversed numbers (the van der Corput sequence) spread any number of workers over the whole ladder.
    """
    bits = NUM_RUNGS.bit_length() - 1
    numbers = [(place * num_envs + env) % NUM_RUNGS for env in range(num_envs)]
    return [int(f"{number:0{bits}b}"[::-1], 2) for number in numbers]


class ModelActing:
    """Acts with a copy of the model, built from the learner's configuration."""

    def __init__(self, config: TrainConfig, spaces: Spaces, place: int, num_envs: int, seed: int) -> None:
        torch.set_num_threads(1)
        self.version, self.space = 0, spaces.observation
        self.model = Model(config.network, spaces, config.algorithm, seed=config.seed)
        self.mirror = Mirror(self.model)
        self.policy = Policy(self.model, noise_correlation=config.algorithm.noise_correlation)
        self.state, self.rng = self.policy.initial_state(num_envs), torch.Generator().manual_seed(seed)
        self.first = torch.zeros(num_envs, dtype=torch.bool)
        self.explorer = Explorer(config.algorithm, rungs(place, num_envs), NUM_RUNGS)

    def load(self, weights: Array, version: int) -> None:
        if weights.shape != self.mirror.memory.shape or weights.dtype != np.uint8:
            raise Refused(
                f"the learner's weights are {weights.nbytes} bytes, this worker's network has "
                f"{self.mirror.memory.nbytes}. Install the same versions on both sides."
            )
        self.mirror.memory[:] = weights
        self.version = version

    def act(self, observation: list[Array], evaluates: Array, env_steps: int) -> Array:
        tree = unflatten(self.space, iter([torch.from_numpy(leaf) for leaf in observation]))
        if evaluates.all():
            action: Array = self.policy.act(tree, self.state, self.first, self.rng, greedy=True).action.numpy()
        else:
            exploration = self.explorer.at(env_steps)
            chosen = self.policy.act(tree, self.state, self.first, self.rng, exploration)
            action, self.state = chosen.action.numpy(), chosen.state
            if evaluates.any():
                greedy = self.policy.act(tree, self.state, self.first, self.rng, greedy=True).action.numpy()
                action[evaluates] = greedy[evaluates]
        if action.dtype.kind == "f" and not np.isfinite(action).all():
            raise DivergedError(f"the policy of version {self.version} chose an action that is not finite.")
        return action

    def to_env(self, action: Array) -> Array:
        return self.model.distribution.to_env(action)


class UserActing:
    """Acts with the user's policy, one environment at a time."""

    def __init__(self, policy: Any, layout: StateLayout, spaces: Spaces) -> None:
        self.version, self.policy, self.layout, self.space = 0, policy, layout, spaces.observation
        self.leaf, self.action_space = action_leaf(spaces.action), spaces.action

    def load(self, weights: Array, version: int) -> None:
        if weights.shape != (self.layout.nbytes,) or weights.dtype != np.uint8:
            raise Refused(f"the learner's state is {weights.nbytes} bytes, but its layout has {self.layout.nbytes}.")
        load_state(self.policy, self.layout.unpack(weights))
        self.version = version

    def act(self, observation: list[Array], evaluates: Array, env_steps: int) -> Array:
        del env_steps
        action = np.zeros((len(evaluates), *self.leaf.shape), self.leaf.dtype)
        for row, evaluate in enumerate(evaluates.tolist()):
            one = np.asarray(self.policy.act(self._row(observation, row), explore=not evaluate))
            if one.shape != self.leaf.shape or not np.can_cast(one.dtype, self.leaf.dtype, "same_kind"):
                raise EnvError(
                    f"{type(self.policy).__name__}.act returned {one.shape} of {one.dtype}; the action space "
                    f"{self.action_space} takes {self.leaf.shape} of {self.leaf.dtype}."
                )
            action[row] = one
        if isinstance(self.action_space, gym.spaces.Box):  # the learner must get the action that was executed
            action = np.clip(action, self.action_space.low, self.action_space.high)
        return action

    def _row(self, observation: list[Array], row: int) -> Tree:
        return unflatten(self.space, iter([leaf[row].copy() for leaf in observation]))

    def to_env(self, action: Array) -> Array:
        return action.astype(self.action_space.dtype)
