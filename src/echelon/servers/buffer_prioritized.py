"""A prioritized buffer of transitions that the members of a group fill locally and sample globally.

Every member has a tree of its own over priority**alpha. Of a batch, a member draws in proportion to its tree's sum, so
that an item is drawn in proportion to its priority wherever it lies. Importance weights are (N * P)**-beta over the
largest of the batch (Schaul et al., 2016), where N counts the items of all members and P is the probability with which
an item was really drawn: the share of the batch that its member got, times its share of that member's tree. So they are
right also where a member's tree has changed since it last told its sum.
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
Indexes = dict[str, tuple[Array, Array]]  # of every member: the slots of its items, and the version of each


class PrioritizedBatch(NamedTuple):
    """A batch, how many items it has, where those lie, and their importance weights, of which the largest is 1."""

    size: int
    batch: tuple[Any, ...] | None
    indexes: Indexes | None
    weights: Array | None  # (size,) float64


class DistributedPrioritizedBuffer(GlobalBuffer):
    """Transitions of all members, drawn by priority; a member keeps its last `buffer_size`.

    An item of priority x is drawn in proportion to (|x| + epsilon)**alpha; `beta` grows with every batch that this
    member draws, up to 1. All members of the group make the buffer, with the same name and settings; then
    `group.barrier()`.
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
        """The parameters, but `seed`, are Machin's."""
        if not (epsilon > 0.0 and 0.0 <= alpha <= 1.0 and 0.0 <= beta <= 1.0 and beta_increment_per_sampling >= 0.0):
            raise ConfigError(
                f"buffer {buffer_name}: alpha={alpha} and beta={beta} must lie between 0 and 1, epsilon={epsilon} "
                "above 0, so that no item is out of reach, and "
                f"beta_increment_per_sampling={beta_increment_per_sampling} must be 0 or more."
            )
        self.epsilon, self.alpha, self.beta = epsilon, alpha, beta
        self.beta_increment_per_sampling = beta_increment_per_sampling
        name = f"buffer {buffer_name} of {group.get_cur_name()}"
        self._store = TransitionMember(name, check_size(buffer_name, buffer_size), alpha)
        super().__init__(buffer_name, group, self._store, seed, {"update": self._store.update})

    def append(self, transition: Transition, priority: float | None = None) -> None:
        """Keeps a transition here; without a priority it gets the highest that this member has seen."""
        self._store.append([transition], None if priority is None else [abs(float(priority)) + self.epsilon])

    def store_episode(self, episode: Sequence[Transition], priorities: Sequence[float] | None = None) -> None:
        """Keeps the transitions of an episode here: all, or none if one does not fit."""
        if priorities is not None and len(priorities) != len(episode):
            raise ReplayError(
                f"buffer {self.buffer_name}: {len(priorities)} priorities came for an episode of {len(episode)} "
                "transitions; give one for each."
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
        """Draws from all members by priority, at most as many as there are; (0, None, None, None) if there are none.

        An item may be there more than once. Attributes are those of `DistributedBuffer.sample_batch`.
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
        """The weights of a batch, from the part of it that every member got and every item's share of its member."""
        total = sum(mass.total for mass in gathered.masses.values())
        chances = [answer["chance"] * (gathered.masses[m].total / total) for m, answer in gathered.answers.items()]
        return importance(np.concatenate(chances), Mass(1.0, self._peers.mass.size), self.beta)[0]

    @property
    def passed_over(self) -> int:
        """New priorities from here that no item got, as it was overwritten, cleared or lost; as far as is known."""
        self._peers.hear(self._peers.members)
        return self._peers.passed_over

    def update_priority(self, priorities: ArrayLike | torch.Tensor, indexes: Mapping[str, tuple[Array, Array]]) -> None:
        """Gives the items of a batch new priorities, in the order of the batch.

        Those that were overwritten since are passed over, as are those of members that are lost. Nobody is waited for:
        what this member samples next sees the new priorities.
        """
        given = priorities.detach().cpu().numpy() if isinstance(priorities, torch.Tensor) else np.asarray(priorities)
        values = np.abs(given.astype(np.float64).reshape(-1)) + self.epsilon
        num = sum(len(index) for index, _ in indexes.values())
        if len(values) != num:
            raise ReplayError(f"buffer {self.buffer_name}: {len(values)} priorities came for {num} items.")
        check_priorities(values, f"buffer {self.buffer_name}")
        begin = 0
        for member, (index, version) in indexes.items():
            end = begin + len(index)
            if member not in self._peers.masses and member not in self._peers.lost:
                raise ReplayError(
                    f"buffer {self.buffer_name}: {member!r} is no member; those are {self._peers.members}. Pass the "
                    "indexes that `sample_batch` gave."
                )
            if end > begin:
                self._peers.post("update", member, (index, version, values[begin:end]))
            if member in self._peers.lost:
                self._peers.passed_over += len(index)
            begin = end
