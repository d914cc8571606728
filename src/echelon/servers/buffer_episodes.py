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
MEAN_STEPS = 1000  # of an episode, for the default of `num_steps`


@dataclass(frozen=True, slots=True)
class EpisodeList(Sequence[dict[str, Any]]):
    """Whole episodes, concatenated: episode i has the steps `offsets[i]` to `offsets[i + 1] - 1`.

    `attrs` has the attributes of all steps: dicts of tensors (N, ...) for `state`, `action` and `next_state`, tensors
    (N, ...) for the others. `episodes[i]` has the attributes of one episode.
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
    """Episodes of all members, sampled uniformly; each member keeps its last `buffer_size`.

    A member stores up to `num_steps` steps, in episodes of any length (by default 1,000 steps times `buffer_size`;
    memory is allocated as the buffer fills). When it is full, the oldest episodes are evicted. All members of the group
    create the buffer with the same name, and then call `group.barrier()`.
    """

    def __init__(
        self, buffer_name: str, group: RpcGroup, buffer_size: int = 500, num_steps: int = 0, *, seed: int | None = None
    ) -> None:
        size = check_size(buffer_name, buffer_size)
        name = f"buffer {buffer_name} of {group.get_cur_name()}"
        self._store = EpisodeMember(name, size, num_steps or size * MEAN_STEPS)
        super().__init__(buffer_name, group, self._store, seed)

    def append(self, episode: Transition | Sequence[Transition]) -> None:
        """Stores an episode in this member: its transitions, or one dict of attributes with a row for every step."""
        self._store.append(episode)

    def store_episode(self, episode: Transition | Sequence[Transition]) -> None:
        """Stores an episode in this member; the same as `append`, by the name that transition buffers use."""
        self._store.append(episode)

    def sample_batch(
        self,
        batch_size: int,
        device: str | torch.device | None = None,
        sample_method: str = UNIQUE,
        sample_attrs: Sequence[str] | None = None,
    ) -> tuple[int, EpisodeList | None]:
        """Samples whole episodes from all members; returns their number and the episodes; (0, None) if there are none.

        `random_unique` draws without replacement, and all episodes if there are fewer than `batch_size`; `random` draws
        with replacement; `all` returns all episodes.
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
