"""The acting interface of an actor: it submits the observations of a group of environments and collects actions.

Local acting uses the actor's own copy of the policy and replies immediately. Central acting (`central_acting`) sends
the request to an inference server, and the actor steps another group in the meantime. Only `wait` blocks, for at most
its timeout.

Shapes: K environments of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import gymnasium as gym
import numpy as np
import torch

from echelon.algorithms.exploration import Exploration, Explorer
from echelon.networks import action_mask
from echelon.objectives.distributions import Distribution, Sample
from echelon.schema import Tree, unflatten

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class ActRequest:
    """The observations of a group at one step, as arrays and as tensors for the policy.

    All of them are views that are created in advance; nothing is copied.
    """

    leaves: list[Array]  # (K, ...), in the order of schema.space_leaves
    first: Array  # (K,)
    observation: Tree  # the leaves as tensors
    first_tensor: torch.Tensor

    @classmethod
    def of(cls, space: gym.Space[Any], leaves: list[Array], first: Array) -> ActRequest:
        observation = unflatten(space, iter([torch.from_numpy(leaf) for leaf in leaves]))
        return cls(leaves, first, observation, torch.from_numpy(first))


class Values(NamedTuple):
    """Values (K,) of the actions taken, and of the actions that the policy would take without exploration."""

    chosen: Array
    best: Array


class ActReply(NamedTuple):
    """Actions and their log-probabilities, and the version of the weights that chose them.

    The arrays are valid until the group submits again. `values` is set if initial priorities are computed from it.
    """

    action: Array
    log_prob: Array
    version: int
    values: Values | None = None


class Acting(Protocol):
    """Chooses the actions for an actor's groups."""

    def begin(self, group: int) -> bool:
        """Prepares a trajectory of `group`. Returns False if it cannot begin yet."""

    def submit(self, group: int, request: ActRequest) -> None:
        """Requests actions for `group`. Its previous reply must have been collected."""

    def collect(self, group: int) -> ActReply | None:
        """Returns the reply to the last request of `group`, or None if it has not arrived."""

    def state_before(self, group: int) -> Sequence[Array]:
        """Returns the state from which the last reply to `group` was computed (`Policy.initial_state`)."""

    @property
    def asking(self) -> bool:
        """Whether a reply is outstanding that `wait` can wait for."""

    def wait(self, timeout_s: float) -> None:
        """Sleeps until a reply to an outstanding request arrives, for at most `timeout_s`."""

    def close(self) -> None: ...


class Exploring:
    """The exploration of an actor's groups; that of each environment depends on its index in the run."""

    def __init__(
        self, explorers: Sequence[Explorer], env_steps: Callable[[], int], distribution: Distribution, seed: int
    ) -> None:
        """`explorers` has one entry for each group; `env_steps` returns the environment steps of the run so far."""
        self.explorers, self.env_steps, self.distribution = explorers, env_steps, distribution
        self.rng = torch.Generator().manual_seed(seed)
        self._begun: dict[int, tuple[Exploration | None, torch.Tensor | None]] = {}  # by group, of its request

    def now(self, group: int) -> Exploration | None:
        return self.explorers[group].at(self.env_steps())

    def begin(self, group: int, request: ActRequest, version: int) -> ActReply | None:
        """Draws which rows of a request take random actions; returns the reply if all do, so that it needs no policy.

        `version` is that of the reply.
        """
        exploration = self.now(group)
        is_random = exploration.draw_random_rows(self.rng) if exploration is not None else None
        self._begun[group] = exploration, is_random
        if is_random is None or not is_random.all():
            return None
        params = torch.zeros(len(is_random), self.distribution.num_params)
        action = self.distribution.random(params, self.rng, action_mask(request.observation))
        return ActReply(action.numpy(), np.zeros(len(is_random), np.float32), version)

    def change(self, group: int, request: ActRequest, reply: ActReply) -> ActReply:
        """Applies what `begin` has drawn to the reply of an inference server, which replies without exploration."""
        exploration, is_random = self._begun[group]
        if exploration is None:
            return reply
        sent = Sample(torch.tensor(reply.action), torch.tensor(reply.log_prob))
        with torch.inference_mode():
            sample = exploration.apply(self.distribution, sent, self.rng, action_mask(request.observation), is_random)
        return ActReply(sample.action.numpy(), sample.log_prob.numpy(), reply.version)
