"""Acting that strays from the policy, as rules that learn action values need it.

With local acting the policy explores, and says what its actions are worth. With central acting the inference server
answers as it does everywhere, and the actor strays from what it says: how far is each environment's own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from echelon.algorithms.exploration import Exploration, Explorer
from echelon.algorithms.value_policy import ValuePolicy, stray
from echelon.networks import action_mask
from echelon.objectives.distributions import Distribution, Sample
from echelon.roles.acting import Acting, Answer, LocalActing, Question, Values
from echelon.transport.shared_memory import WeightsBoard

Array = np.ndarray[Any, Any]


class Straying:
    """How far the groups of an actor stray at this point of the run."""

    def __init__(self, explorers: list[Explorer], env_steps: Callable[[], int]) -> None:
        """One of `explorers` for each group; `env_steps` tells how many steps the run has made."""
        self.explorers, self.env_steps = explorers, env_steps

    def now(self, group: int) -> Exploration | None:
        return self.explorers[group].at(self.env_steps())


class ExploringActing(LocalActing):
    """Answers with a copy of a value policy that strays from its own actions."""

    def __init__(self, policy: ValuePolicy, board: WeightsBoard, straying: Straying) -> None:
        super().__init__(policy.model, board, [], [])
        self.policy, self.straying = policy, straying

    def collect(self, group: int) -> Answer:
        choice = self.policy.act(self._questions[group].observation, self.straying.now(group))
        values = choice.values and Values(choice.values.chosen.numpy(), choice.values.best.numpy())
        return Answer(choice.action.numpy(), choice.log_prob.numpy(), self.mirror.version, values)

    def state_before(self, group: int) -> Sequence[Array]:
        del group
        return ()  # single transitions hold no state, so neither do the networks that learn from them


class StrayingActing:
    """Asks an inference server, and strays from its answers."""

    def __init__(self, acting: Acting, distribution: Distribution, straying: Straying, seed: int) -> None:
        self.acting, self.distribution, self.straying = acting, distribution, straying
        self.generator = torch.Generator().manual_seed(seed)
        self._questions: dict[int, Question] = {}

    def begin(self, group: int) -> bool:
        return self.acting.begin(group)

    def submit(self, group: int, question: Question) -> None:
        self._questions[group] = question
        self.acting.submit(group, question)

    def collect(self, group: int) -> Answer | None:
        answer = self.acting.collect(group)
        exploration = self.straying.now(group) if answer is not None else None
        if answer is None or exploration is None:
            return answer
        mask = action_mask(self._questions[group].observation)
        told = Sample(torch.tensor(answer.action), torch.tensor(answer.log_prob))
        with torch.inference_mode():
            sample = stray(self.distribution, told, self.generator, mask, exploration)
        return Answer(sample.action.numpy(), sample.log_prob.numpy(), answer.version)

    def state_before(self, group: int) -> Sequence[Array]:
        return self.acting.state_before(group)

    @property
    def asking(self) -> bool:
        return self.acting.asking

    def wait(self, timeout_s: float) -> None:
        self.acting.wait(timeout_s)

    def close(self) -> None:
        self.acting.close()
