"""A prioritized buffer of transitions that the members of a group fill locally and sample globally.

Every member has a sum tree over priority**alpha. The part of a batch that a member draws is proportional to the sum of
its tree, so the probability of an item is proportional to its priority, whichever member has it. Importance weights are
(N * P)**-beta, divided by the largest of the batch (Schaul et al., 2016). N is the number of items of all members; P is
the probability with which the item was actually drawn: its member's share of the batch, times its share of that
member's tree. The weights are therefore correct even if a tree has changed since the member last reported its sum.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike

from echelon.errors import ConfigError
from echelon.replay.layout import ReplayError
from echelon.replay.sampled import Mass, importance
from echelon.replay.sum_tree import check_priorities
from echelon.servers.buffer import Gathered, GlobalBuffer, check_size
from echelon.servers.buffer_items import BatchSelection, Transition
from echelon.servers.buffer_member import PRIORITY, TransitionMember

if TYPE_CHECKING:
    from echelon.world import RpcGroup

Array = np.ndarray[Any, Any]
Indexes = dict[str, tuple[Array, Array]]  # member -> the slots of its items, and their versions


class PrioritizedBatch(NamedTuple):
    """A batch: its size, the attributes, the location of its items, and their importance weights (the largest is 1)."""

    size: int
    batch: tuple[Any, ...] | None
    indexes: Indexes | None
    weights: Array | None  # (size,) float64


class DistributedPrioritizedBuffer(GlobalBuffer):
    """Transitions of all members, sampled by priority; each member keeps its last `buffer_size`.

    The probability of an item with priority x is proportional to (|x| + epsilon)**alpha. `beta` grows with every batch
    that this member samples, up to 1. All members of the group create the buffer with the same name and settings, and
    then call `group.barrier()`.
    """

    def __init__(
        self,
        buffer_name: str,
        group: RpcGroup,
        buffer_size: int = 1_000_000,
        epsilon: float = 1e-2,
        alpha: float = 0.6,
        beta: float = 0.4,
        beta_increment_per_sampling: float = 1e-3,
        *,
        seed: int | None = None,
    ) -> None:
        """The parameters are those of Machin, plus `seed`."""
        if not (epsilon > 0.0 and 0.0 <= alpha <= 1.0 and 0.0 <= beta <= 1.0 and beta_increment_per_sampling >= 0.0):
            raise ConfigError(
                f"buffer {buffer_name}: alpha={alpha} and beta={beta} must be between 0 and 1, epsilon={epsilon} must "
                "be above 0, so that every item can be drawn, and "
                f"beta_increment_per_sampling={beta_increment_per_sampling} must be 0 or more."
            )
        self.epsilon, self.alpha, self.beta = epsilon, alpha, beta
        self.beta_increment_per_sampling = beta_increment_per_sampling
        name = f"buffer {buffer_name} of {group.get_cur_name()}"
        self._store = TransitionMember(name, check_size(buffer_name, buffer_size), alpha)
        super().__init__(buffer_name, group, self._store, seed, {"update": self._store.update})

    def append(self, transition: Transition, priority: float | None = None) -> None:
        """Stores a transition in this member; the default priority is the highest that the member has seen."""
        self._store.append([transition], None if priority is None else [abs(float(priority)) + self.epsilon])

    def store_episode(self, episode: Sequence[Transition], priorities: Sequence[float] | None = None) -> None:
        """Stores the transitions of an episode in this member: all, or none if one has a wrong format."""
        if priorities is not None and len(priorities) != len(episode):
            raise ReplayError(
                f"buffer {self.buffer_name}: got {len(priorities)} priorities for an episode of {len(episode)} "
                "transitions; pass one for each."
            )
        given = None if priorities is None else [abs(float(priority)) + self.epsilon for priority in priorities]
        self._store.append(episode, given)

    def sample_batch(
        self,
        batch_size: int,
        concatenate: bool = True,
        device: str | torch.device | None = None,
        sample_attrs: Sequence[str] | None = None,
        additional_concat_attrs: Collection[str] = (),
    ) -> PrioritizedBatch:
        """Samples from all members by priority, at most as many items as there are.

        Returns (0, None, None, None) if there are none. An item may appear more than once. For the attributes, see
        `DistributedBuffer.sample_batch`.
        """
        gathered = self._gather(batch_size, PRIORITY)
        answers = gathered.answers
        if not answers:
            return PrioritizedBatch(0, None, None, None)
        weights = self._weigh(gathered)
        self.beta = min(1.0, self.beta + self.beta_increment_per_sampling)
        indexes = {}
        for member, answer in answers.items():
            version, index = np.divmod(answer["number"], answer["capacity"])
            indexes[member] = (index, version)
        wanted = BatchSelection(sample_attrs, concatenate, additional_concat_attrs or (), device)
        return PrioritizedBatch(len(weights), wanted.of(self._join(answers)), indexes, weights)

    def _weigh(self, gathered: Gathered) -> Array:
        """Returns the weights of a batch, from each member's share of the batch and each item's share of its member."""
        total = sum(mass.total for mass in gathered.masses.values())
        chances = [answer["chance"] * (gathered.masses[m].total / total) for m, answer in gathered.answers.items()]
        return importance(np.concatenate(chances), Mass(1.0, self._peers.mass.size), self.beta)[0]

    @property
    def passed_over(self) -> int:
        """Number of priority updates whose item was overwritten, cleared or lost, according to the replies so far."""
        self._peers.collect(self._peers.members)
        return self._peers.passed_over

    def update_priority(self, priorities: ArrayLike | torch.Tensor, indexes: Mapping[str, tuple[Array, Array]]) -> None:
        """Sets new priorities for the items of a batch, in the order of the batch.

        Items that were overwritten since, and those of lost members, are skipped. The call does not wait for replies;
        the next batch that this member samples uses the new priorities.
        """
        given = priorities.detach().cpu().numpy() if isinstance(priorities, torch.Tensor) else np.asarray(priorities)
        values = np.abs(given.astype(np.float64).reshape(-1)) + self.epsilon
        num = sum(len(index) for index, _ in indexes.values())
        if len(values) != num:
            raise ReplayError(f"buffer {self.buffer_name}: got {len(values)} priorities for {num} items.")
        check_priorities(values, f"buffer {self.buffer_name}")
        begin = 0
        for member, (index, version) in indexes.items():
            end = begin + len(index)
            if member not in self._peers.masses and member not in self._peers.lost:
                raise ReplayError(
                    f"buffer {self.buffer_name}: {member!r} is not one of the members {self._peers.members}. Pass the "
                    "indexes that `sample_batch` returned."
                )
            if end > begin:
                self._peers.post("update", member, (index, version, values[begin:end]))
            if member in self._peers.lost:
                self._peers.passed_over += len(index)
            begin = end
