"""A buffer of whole episodes that the members of a group fill locally and sample globally."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from echelon.servers.buffer import GlobalBuffer, check_method, check_size
from echelon.servers.buffer_items import BatchSelection, Transition, names_of
from echelon.servers.buffer_member import UNIQUE, EpisodeMember

if TYPE_CHECKING:
    from echelon.world import RpcGroup

Array = np.ndarray[Any, Any]
MEAN_STEPS = 1000  # of an episode: what room is made for by default


@dataclass(frozen=True, slots=True)
class EpisodeList(Sequence[dict[str, Any]]):
    """Whole episodes, end to end: episode i is the steps from `offsets[i]` to before `offsets[i + 1]`.

    `attrs` has the attributes of all steps: dicts of tensors (N, ...) for `state`, `action` and `next_state`, tensors
    (N, ...) for the others. `episodes[i]` has those of one episode.
    """

    offsets: Array  # (n + 1,)
    attrs: dict[str, Any]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: Any) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        where = slice(int(self.offsets[index % len(self)]), int(self.offsets[index % len(self) + 1]))
        return {
            name: {key: part[where] for key, part in value.items()} if isinstance(value, dict) else value[where]
            for name, value in self.attrs.items()
        }


class DistributedEpisodeBuffer(GlobalBuffer):
    """Episodes of all members, each as likely to be drawn as any other; a member keeps its last `buffer_size`.

    Episodes of any length share the room of `num_steps` steps that each member has (by default 1,000 for every episode;
    memory is taken as it fills); the oldest make way when it is used up. All members of the group make the buffer, with
    the same name; then `group.barrier()`.
    """

    def __init__(
        self, buffer_name: str, group: RpcGroup, buffer_size: int = 500, num_steps: int = 0, *, seed: int | None = None
    ) -> None:
        size = check_size(buffer_name, buffer_size)
        name = f"buffer {buffer_name} of {group.get_cur_name()}"
        self._store = EpisodeMember(name, size, num_steps or size * MEAN_STEPS)
        super().__init__(buffer_name, group, self._store, seed)

    def append(self, episode: Transition | Sequence[Transition]) -> None:
        """Keeps an episode here: its transitions, or one dict of attributes that have a row for every step."""
        self._store.append(episode)

    def store_episode(self, episode: Transition | Sequence[Transition]) -> None:
        """Keeps an episode here: `append` by the name that buffers of transitions have for it."""
        self._store.append(episode)

    def sample_batch(
        self,
        batch_size: int,
        device: str | torch.device | None = None,
        sample_method: str = UNIQUE,
        sample_attrs: Sequence[str] | None = None,
    ) -> tuple[int, EpisodeList | None]:
        """Draws whole episodes from all members; returns how many, and them; (0, None) if there are none.

        `random_unique` draws none twice and all there are if those are fewer than `batch_size`, `random` may draw one
        twice, `all` takes everything.
        """
        answers = self._gather(batch_size, check_method(sample_method)).answers
        if not answers:
            return 0, None
        fields = self._join(answers)
        lengths = np.concatenate([answer["length"] for answer in answers.values()])
        names = names_of(fields) if sample_attrs is None else list(sample_attrs)
        values = BatchSelection(names, True, names, device).of(fields)
        return len(lengths), EpisodeList(
            np.concatenate([[0], np.cumsum(lengths)]), dict(zip(names, values, strict=True))
        )
