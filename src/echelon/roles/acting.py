"""Acting as an actor sees it: it submits what a group of its environments sees and collects actions, at once or later.

Local acting answers with the actor's own copy of the policy. Central acting lays the question on the board of act
requests, where an inference server answers it, so that the actor can step another group meanwhile. Nothing here blocks
but `wait`, and that no longer than it is told.

Shapes: K environments of a group.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import gymnasium as gym
import numpy as np
import torch

from echelon.algorithms.model import Mirror, Model
from echelon.algorithms.policy import Policy
from echelon.schema import Tree, unflatten
from echelon.transport.act_board import ActBoard, ActLayout, Seat
from echelon.transport.act_tcp import RemoteSeat, wait_any
from echelon.transport.futex import NUM_MASKS
from echelon.transport.shared_memory import WeightsBoard

Array = np.ndarray[Any, Any]
ADDRESS_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Question:
    """What a group sees at one step, as arrays and as the policy takes it; views made beforehand, nothing is copied."""

    leaves: list[Array]  # (K, ...), in the order of schema.space_leaves
    first: Array  # (K,)
    observation: Tree  # the leaves as tensors
    first_tensor: torch.Tensor

    @classmethod
    def of(cls, space: gym.Space[Any], leaves: list[Array], first: Array) -> Question:
        observation = unflatten(space, iter([torch.from_numpy(leaf) for leaf in leaves]))
        return cls(leaves, first, observation, torch.from_numpy(first))


class Values(NamedTuple):
    """What the action taken is worth (K,), and what the policy's own would be."""

    chosen: Array
    best: Array


class Answer(NamedTuple):
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

    def submit(self, group: int, question: Question) -> None:
        """Asks for the actions of `group`, whose last answer was collected."""

    def collect(self, group: int) -> Answer | None:
        """The answer to what `group` asked last, if it is there."""

    def state_before(self, group: int) -> Sequence[Array]:
        """The recurrent state that the last answer of `group` started from."""

    @property
    def asking(self) -> bool:
        """Whether an answer is still to come that `wait` can wait for."""

    def wait(self, timeout_s: float) -> None:
        """Sleeps until one of the questions has its answer, at most `timeout_s`."""

    def close(self) -> None: ...


class LocalActing:
    """Answers with a copy of the policy that follows the weights board; one version for a whole trajectory."""

    def __init__(self, model: Model, board: WeightsBoard, num_envs: list[int], seeds: list[int]) -> None:
        self.mirror, self.board = Mirror(model), board
        self.policies = [Policy(model, n, seed) for n, seed in zip(num_envs, seeds, strict=True)]
        self._questions: dict[int, Question] = {}
        self._before = [policy.state for policy in self.policies]

    def refresh(self) -> int:
        """Takes over newer weights if there are any; returns the version that acts from now on."""
        if self.board.version > self.mirror.version:
            self.mirror.version = self.board.read(self.mirror.memory)
        return self.mirror.version

    def begin(self, group: int) -> bool:
        del group
        self.refresh()
        return True

    def submit(self, group: int, question: Question) -> None:
        self._questions[group] = question

    def collect(self, group: int) -> Answer:
        question, policy = self._questions[group], self.policies[group]
        self._before[group] = policy.state
        sample = policy.act(question.observation, question.first_tensor)
        return Answer(sample.action.numpy(), sample.log_prob.numpy(), self.mirror.version)

    def state_before(self, group: int) -> Sequence[Array]:
        return [leaf.numpy() for leaf in self._before[group]]

    @property
    def asking(self) -> bool:
        return False  # `collect` answers at once

    def wait(self, timeout_s: float) -> None:
        del timeout_s

    def close(self) -> None:
        pass


class Seated(ABC):
    """What asking has in common wherever the server is: a seat for each group."""

    def __init__(self, num_groups: int, client: int, incarnation: int) -> None:
        self.client, self.incarnation = client, incarnation
        self._seats: list[Seat | RemoteSeat | None] = [None] * num_groups
        self._asking: dict[int, None] = {}  # groups that wait for the server, the longest first

    @abstractmethod
    def begin(self, group: int) -> bool: ...

    @abstractmethod
    def wait(self, timeout_s: float) -> None: ...

    def submit(self, group: int, question: Question) -> None:
        seat = self._seat(group)
        for target, source in zip(seat.observation, question.leaves, strict=True):
            target[...] = source
        seat.first[...] = question.first
        self._asking[group] = None
        seat.ask()

    def collect(self, group: int) -> Answer | None:
        seat = self._seat(group)
        if not seat.answered:
            return None
        self._asking.pop(group, None)
        return Answer(seat.action, seat.log_prob, seat.version)

    def state_before(self, group: int) -> Sequence[Array]:
        return self._seat(group).state_before()

    @property
    def asking(self) -> bool:
        return bool(self._asking)

    def close(self) -> None:
        for seat in self._seats:
            if seat is not None:
                seat.leave()

    def _seat(self, group: int) -> Seat | RemoteSeat:
        seat = self._seats[group]
        assert seat is not None, f"group {group} of actor {self.client} asks before it begins"
        return seat


class CentralActing(Seated):
    """Asks the inference server over shared memory; needs no model.

    A seat is taken once the last question of whoever sat there before is answered: so the server never takes what a
    dead actor asked for a question of this one, and gives it a clean state. If the server dies, questions stay on the
    board for its successor.
    """

    def __init__(self, board: ActBoard, client: int, incarnation: int) -> None:
        super().__init__(board.layout.num_groups, client, incarnation)
        self.board = board
        self._round = board.rounds[board.layout.server_of(client)]

    def begin(self, group: int) -> bool:
        if self._seats[group] is not None:
            return True
        if not self._is_answered(group):
            self._asking[group] = None  # what the one before asked
            return False
        self._asking.pop(group, None)
        self._seats[group] = Seat(self.board, self.client, group, self.incarnation)
        return True

    def wait(self, timeout_s: float) -> None:
        deadline, mask = time.monotonic() + timeout_s, 0
        for group in self._asking:
            mask |= 1 << self._index(group) % NUM_MASKS
        while True:
            seen = self._round.value
            left_s = deadline - time.monotonic()
            if left_s <= 0.0 or any(self._is_answered(group) for group in self._asking):
                return
            self._round.wait(seen, left_s, mask)

    def _index(self, group: int) -> int:
        return group * self.board.layout.num_clients + self.client

    def _is_answered(self, group: int) -> bool:
        index = self._index(group)
        return bool(self.board.asked[index] == self.board.answered[index])


class RemoteActing(Seated):
    """Asks the inference server over TCP, where it says that it listens; needs no model, and no shared memory with it.

    If the server dies, its successor listens at the same address and questions are repeated.
    """

    def __init__(
        self, layout: ActLayout, address_file: Path, client: int, incarnation: int, secret: str | None = None
    ) -> None:
        super().__init__(layout.num_groups, client, incarnation)
        self.layout, self.address_file, self.secret = layout, address_file, secret
        self._remote: dict[int, RemoteSeat] = {}  # the seats by group

    def begin(self, group: int) -> bool:
        if self._seats[group] is None:
            if not self.address_file.exists():
                return False
            address = self.address_file.read_text()
            seat = RemoteSeat(address, self.layout, self.client, group, self.incarnation, self.secret)
            self._seats[group] = self._remote[group] = seat
        self._seat(group).wants_state = True  # a trajectory starts from it; the later answers do without
        return True

    def collect(self, group: int) -> Answer | None:
        answer = super().collect(group)
        if answer is not None:
            self._seat(group).wants_state = False
        return answer

    @property
    def asking(self) -> bool:
        return bool(self._asking) or None in self._seats

    def wait(self, timeout_s: float) -> None:
        if self._asking:
            wait_any([self._remote[group] for group in self._asking], timeout_s)
        else:
            time.sleep(min(timeout_s, ADDRESS_POLL_S))  # the server is just starting
