"""Buffers that the members of a group fill locally and sample globally; here the one of transitions, uniformly.

Every member keeps what it appends in its own memory, behind its own lock; nothing travels until somebody samples. Who
samples decides, by what the members weigh, how many items each of them draws, and calls all of them at once. What they
weigh by then comes along with every answer, so a batch costs one round trip, and a second one only if another split
follows from it. A member whose process dies is left out: sampling goes on with the rest, a message is logged, and
`lost` names it. When the host of the world dies, nobody can be reached: what concerns all members raises PeerLost.
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
MAX_TRIES = 10  # to draw a batch while members are lost or cleared


class Gathered(NamedTuple):
    """The answers that make up a batch, and what all members were thought to weigh when it was split."""

    answers: dict[str, Answer]
    masses: dict[str, Mass]

    @property
    def size(self) -> int:
        return sum(len(answer["number"]) for answer in self.answers.values())


class GlobalBuffer:
    """What all these buffers have in common: sizes, clearing, and batches drawn from every member."""

    def __init__(
        self,
        buffer_name: str,
        group: RpcGroup,
        member: BufferMember,
        seed: int | None,
        services: Mapping[str, Callable[..., Answer]] | None = None,
    ) -> None:
        """`services` are those that the own member has for the others beside looking, drawing and clearing."""
        self.buffer_name, self.group = buffer_name, group
        self._member = member
        own: dict[str, Callable[..., Answer]] = {"look": member.look, "draw": member.draw, "clear": member.clear}
        self._peers = BufferPeers(buffer_name, group, own | dict(services or {}))
        own_seed = zlib.crc32(self._peers.own.encode())  # so that members draw different items
        self._rng = np.random.default_rng(None if seed is None else [seed % (1 << 64), own_seed])

    @property
    def lost(self) -> dict[str, str]:
        """The members that were left out because their process died, and the message about each."""
        return dict(self._peers.lost)

    def size(self) -> int:
        """How many items this member holds."""
        return int(self._member.look()["mass"][1])

    def all_size(self) -> int:
        """How many items all members hold together."""
        self._peers.look()
        return self._peers.mass.size

    def clear(self) -> None:
        """Forgets what this member holds."""
        self._peers.note(self._peers.own, self._member.clear())

    def all_clear(self) -> None:
        """Forgets what all members hold."""
        self._peers.ask("clear", {member: () for member in self._peers.members})

    def _gather(self, batch_size: int, method: str) -> Gathered:
        """What makes up a batch of exactly `batch_size` items, or of all there are; no answers if there are none.

        With the items come the sizes that their members have by now. Where another split follows from those, since
        members have grown, were cleared or are lost, the ones whose part has changed draw it anew. By priority that is
        done only if items are missing: importance weights make up for the rest.
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
            peers.glance(idle)
            seeds = self._rng.integers(1 << 63, size=len(due)).tolist()
            given = {m: (count, method, seed) for (m, count), seed in zip(due.items(), seeds, strict=True)}
            drawn = {m: answer for m, answer in peers.ask("draw", given).items() if "number" in answer}
            gathered = Gathered(right | drawn, masses)
            if method == PRIORITY and gathered.size >= wanted:
                break
            peers.hear(idle)
        return gathered

    def _split(self, method: str, count: int, masses: list[Mass], share: float) -> list[int]:
        """How many of a batch each member draws: in proportion to what it weighs, which if uniform is its size."""
        return [mass.size for mass in masses] if method == ALL else apportion(count, masses, share)

    def _join(self, answers: Mapping[str, Answer]) -> dict[str, Array]:
        """The fields of all answers, one after the other; raises ReplayError if members hold different things."""
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
    """Transitions of all members, each as likely to be drawn as any other; a member keeps its last `buffer_size`.

    All members of the group make it, with the same name; then `group.barrier()`.
    """

    def __init__(
        self, buffer_name: str, group: RpcGroup, buffer_size: int = 1_000_000, *, seed: int | None = None
    ) -> None:
        name = f"buffer {buffer_name} of {group.get_cur_name()}"
        self._store = TransitionMember(name, check_size(buffer_name, buffer_size))
        super().__init__(buffer_name, group, self._store, seed)

    def append(self, transition: Transition) -> None:
        """Keeps a transition here."""
        self._store.append([transition])

    def store_episode(self, episode: Sequence[Transition]) -> None:
        """Keeps the transitions of an episode here: all, or none if one does not fit."""
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
        """Draws from all members; returns how many, and the attributes asked for; (0, None) if there are none.

        `random_unique` draws no item twice and all there are if those are fewer than `batch_size`, `random` may draw
        one twice, `all` takes everything. "*" in `sample_attrs` is a dict of all the user's own attributes that are not
        named; those become tensors only if `additional_concat_attrs` names them.
        """
        gathered = self._gather(batch_size, check_method(sample_method))
        if not gathered.answers:
            return 0, None
        wanted = BatchSelection(sample_attrs, concatenate, additional_concat_attrs or (), device)
        return gathered.size, wanted.of(self._join(gathered.answers))
