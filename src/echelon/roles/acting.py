"""Acting as an actor sees it: it submits what a group of its environments sees and collects actions, at once or later.

Local acting answers with the actor's own copy of the policy; central acting (`central_acting`) asks an inference
server, and the actor can step another group meanwhile. Nothing here blocks but `wait`, no longer than it is sent.

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
    """What a group sees at one step, as arrays and as the policy takes it; views made beforehand, nothing is copied."""

    leaves: list[Array]  # (K, ...), in the order of schema.space_leaves
    first: Array  # (K,)
    observation: Tree  # the leaves as tensors
    first_tensor: torch.Tensor

    @classmethod
    def of(cls, space: gym.Space[Any], leaves: list[Array], first: Array) -> ActRequest:
        observation = unflatten(space, iter([torch.from_numpy(leaf) for leaf in leaves]))
        return cls(leaves, first, observation, torch.from_numpy(first))


class Values(NamedTuple):
    """What the action taken is worth (K,), and what the policy's own would be."""

    chosen: Array
    best: Array


class ActReply(NamedTuple):
    """Actions and their log-probabilities, and the version of the weights that chose them.

    The arrays are the group's until it submits again. `values` are there where priorities are made of them.
    """

    action: Array
    log_prob: Array
    version: int
    values: Values | None = None


class Acting(Protocol):
    """Who chooses the actions of an actor's groups."""

    def begin(self, group: int) -> bool:
        """Makes ready for a trajectory of `group`; False if that has to wait."""

    def submit(self, group: int, question: ActRequest) -> None:
        """Asks for the actions of `group`, whose last answer was collected."""

    def collect(self, group: int) -> ActReply | None:
        """The answer to what `group` asked last, if it is there."""

    def state_before(self, group: int) -> Sequence[Array]:
        """The recurrent state that the last answer of `group` started from."""

    @property
    def asking(self) -> bool:
        """Whether an answer is still to come that `wait` can wait for."""

    def wait(self, timeout_s: float) -> None:
        """Sleeps until one of the questions has its answer, at most `timeout_s`."""

    def close(self) -> None: ...


class Exploring:
    """How far the groups of an actor stray from their policy, each environment as its place in the run says."""

    def __init__(
        self, explorers: Sequence[Explorer], env_steps: Callable[[], int], distribution: Distribution, seed: int
    ) -> None:
        """One of `explorers` for each group; `env_steps` tells how many steps the run has made."""
        self.explorers, self.env_steps, self.distribution = explorers, env_steps, distribution
        self.rng = torch.Generator().manual_seed(seed)

    def now(self, group: int) -> Exploration | None:
        return self.explorers[group].at(self.env_steps())

    def change(self, group: int, question: ActRequest, answer: ActReply) -> ActReply:
        """What becomes of an answer that an inference server gave, which knows nothing of exploration."""
        exploration = self.now(group)
        if exploration is None:
            return answer
        sent = Sample(torch.tensor(answer.action), torch.tensor(answer.log_prob))
        with torch.inference_mode():
            sample = exploration.apply(self.distribution, sent, self.rng, action_mask(question.observation))
        return ActReply(sample.action.numpy(), sample.log_prob.numpy(), answer.version)
