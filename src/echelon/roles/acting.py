"""Local acting: the actor's own copy of the policy, behind the same two calls as the inference server."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from echelon.algorithms.model import Mirror, Model
from echelon.algorithms.policy import Policy
from echelon.objectives.distributions import Sample
from echelon.schema import Tree
from echelon.transport.shared_memory import WeightsBoard


@dataclass(slots=True)
class Ticket:
    """A question that was asked: collect it to get the actions."""

    group: int
    observation: Tree
    first: torch.Tensor


class LocalActing:
    """Answers act requests with a copy of the policy that follows the weights board."""

    def __init__(self, model: Model, board: WeightsBoard, num_envs: list[int], seeds: list[int]) -> None:
        self.mirror, self.board = Mirror(model), board
        self.policies = [Policy(model, n, seed) for n, seed in zip(num_envs, seeds, strict=True)]

    def refresh(self) -> int:
        """Takes over newer weights if there are any; returns the version that acts from now on."""
        if self.board.version > self.mirror.version:
            self.mirror.version = self.board.read(self.mirror.memory)
        return self.mirror.version

    def state(self, group: int) -> tuple[torch.Tensor, ...]:
        return self.policies[group].state

    def submit(self, group: int, observation: Tree, first: torch.Tensor) -> Ticket:
        return Ticket(group, observation, first)

    def collect(self, ticket: Ticket) -> Sample:
        return self.policies[ticket.group].act(ticket.observation, ticket.first)
