"""Buffers that the members of a group fill locally and sample globally: the common part, and the uniform buffer.

Every member keeps the items that it appends in its own memory, behind its own lock; nothing is sent until a member
samples. The sampling member splits the batch among the members in proportion to their masses (size, or sum of
priorities) and calls them in parallel. Every reply contains the member's current mass, so a batch takes one round trip,
and a second one only if the new masses give a different split. A member whose process dies is dropped: sampling
continues with the others, a message is logged, and `lost` names the member. When the host of the world dies, no member
can be reached: operations on all members raise PeerLost.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from echelon.errors import ConfigError
from echelon.replay.layout import ReplayError
from echelon.replay.sampled import Mass, apportion
from echelon.servers.buffer_items import BatchSelection, Transition, row_format
from echelon.servers.buffer_member import ALL, PRIORITY, RANDOM, UNIQUE, Answer, BufferMember, TransitionMember
from echelon.servers.buffer_peers import BufferPeers

if TYPE_CHECKING:
    from echelon.world import RpcGroup

Array = np.ndarray[Any, Any]
MAX_TRIES = 10  # attempts to draw a batch while members are lost or cleared


class Gathered(NamedTuple):
    """The replies that make up a batch, and the masses of all members by which it was split."""

    answers: dict[str, Answer]
    masses: dict[str, Mass]

    @property
    def size(self) -> int:
        return sum(len(answer["number"]) for answer in self.answers.values())


class GlobalBuffer:
    """The common part of these buffers: sizes, clearing, and batches drawn from all members."""

    def __init__(
        self,
        buffer_name: str,
        group: RpcGroup,
        member: BufferMember,
        seed: int | None,
        services: Mapping[str, Callable[..., Answer]] | None = None,
    ) -> None:
        """`services` are those of this process's `member` besides look, draw and clear; other members call them."""
        self.buffer_name, self.group = buffer_name, group
        self._member = member
        own: dict[str, Callable[..., Answer]] = {"look": member.look, "draw": member.draw, "clear": member.clear}
        self._peers = BufferPeers(buffer_name, group, own | dict(services or {}))
        own_seed = zlib.crc32(self._peers.own.encode())  # makes members draw different items
        self._rng = np.random.default_rng(None if seed is None else [seed % (1 << 64), own_seed])

    @property
    def lost(self) -> dict[str, str]:
        """The members that were dropped because their process died, and the logged message of each."""
        return dict(self._peers.lost)

    def size(self) -> int:
        """Returns the number of items of this member."""
        return int(self._member.look()["mass"][1])

    def all_size(self) -> int:
        """Returns the number of items of all members."""
        self._peers.look()
        return self._peers.mass.size

    def clear(self) -> None:
        """Removes the items of this member."""
        self._peers.note(self._peers.own, self._member.clear())

    def all_clear(self) -> None:
        """Removes the items of all members."""
        self._peers.ask("clear", {member: () for member in self._peers.members})

    def _gather(self, batch_size: int, method: str) -> Gathered:
        """Draws exactly `batch_size` items, or all if there are fewer; returns no replies if there are none.

        Replies contain the current masses of the members. If those give a different split, because members have grown,
        were cleared or are lost, the members whose part has changed draw again. When sampling by priority they do so
        only if items are missing: importance weights correct for the rest.
        """
        peers, share = self._peers, float(self._rng.random())
        peers.post("look", peers.own, ())
        if peers.mass.size < batch_size or method == ALL:
            peers.look()
        gathered = Gathered({}, {})
        for _ in range(MAX_TRIES):
            size, masses = peers.mass.size, dict(peers.masses)
            wanted = size if method == ALL else batch_size if method == RANDOM and size else min(batch_size, size)
            if wanted <= 0:
                return Gathered({}, masses)
            counts = dict(zip(masses, self._split(method, wanted, list(masses.values()), share), strict=True))
            right = {m: answer for m, answer in gathered.answers.items() if counts.get(m) == len(answer["number"])}
            due = {member: count for member, count in counts.items() if count and member not in right}
            if not due:
                return Gathered(right, masses)
            idle = [member for member, count in counts.items() if count == 0 and member != peers.own]
            peers.request_masses(idle)
            seeds = self._rng.integers(1 << 63, size=len(due)).tolist()
            given = {m: (count, method, seed) for (m, count), seed in zip(due.items(), seeds, strict=True)}
            drawn = {m: answer for m, answer in peers.ask("draw", given).items() if "number" in answer}
            gathered = Gathered(right | drawn, masses)
            if method == PRIORITY and gathered.size >= wanted:
                break
            peers.collect(idle)
        return gathered

    def _split(self, method: str, count: int, masses: list[Mass], share: float) -> list[int]:
        """Splits a batch among the members in proportion to their masses; in uniform sampling the mass is the size."""
        return [mass.size for mass in masses] if method == ALL else apportion(count, masses, share)

    def _join(self, answers: Mapping[str, Answer]) -> dict[str, Array]:
        """Concatenates the fields of all replies; raises ReplayError if the members' items differ in format."""
        first = next(iter(answers))
        form = row_format(answers[first]["form"])
        for member, answer in answers.items():
            if answer["form"] != form.spec:
                raise ReplayError(
                    f"buffer {self.buffer_name}: member {member} holds items of {answer['form']} where member {first} "
                    f"has {form.spec}. All members must store the same attributes, shapes and dtypes."
                )
        return form.join([answer["rows"] for answer in answers.values()])


def check_method(sample_method: str) -> str:
    if sample_method not in (UNIQUE, RANDOM, ALL):
        raise ConfigError(f"sample_method={sample_method!r} is none of {UNIQUE!r}, {RANDOM!r}, {ALL!r}.")
    return sample_method


def check_size(buffer_name: str, buffer_size: int) -> int:
    if buffer_size < 1:
        raise ConfigError(f"buffer {buffer_name}: buffer_size={buffer_size} must be 1 or more.")
    return int(buffer_size)


class DistributedBuffer(GlobalBuffer):
    """Transitions of all members, sampled uniformly; each member keeps its last `buffer_size`.

    All members of the group create it with the same name, and then call `group.barrier()`.
    """

    def __init__(
        self, buffer_name: str, group: RpcGroup, buffer_size: int = 1_000_000, *, seed: int | None = None
    ) -> None:
        name = f"buffer {buffer_name} of {group.get_cur_name()}"
        self._store = TransitionMember(name, check_size(buffer_name, buffer_size))
        super().__init__(buffer_name, group, self._store, seed)

    def append(self, transition: Transition) -> None:
        """Stores a transition in this member."""
        self._store.append([transition])

    def store_episode(self, episode: Sequence[Transition]) -> None:
        """Stores the transitions of an episode in this member: all, or none if one has a wrong format."""
        self._store.append(episode)

    def sample_batch(
        self,
        batch_size: int,
        concatenate: bool = True,
        device: str | torch.device | None = None,
        sample_method: str = UNIQUE,
        sample_attrs: Sequence[str] | None = None,
        additional_concat_attrs: Collection[str] = (),
    ) -> tuple[int, tuple[Any, ...] | None]:
        """Samples from all members; returns the number of items and their attributes; (0, None) if there are none.

        `random_unique` draws without replacement, and all items if there are fewer than `batch_size`; `random` draws
        with replacement; `all` returns all items. "*" in `sample_attrs` stands for a dict of all custom attributes
        that are not named there; custom attributes become tensors only if `additional_concat_attrs` names them.
        """
        gathered = self._gather(batch_size, check_method(sample_method))
        if not gathered.answers:
            return 0, None
        wanted = BatchSelection(sample_attrs, concatenate, additional_concat_attrs or (), device)
        return gathered.size, wanted.of(self._join(gathered.answers))
