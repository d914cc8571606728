"""The layout of a gradient in its slot, together with the step and episode counts of its part of the rollout.

Shapes: P parameters of the model, V values reported by its losses, S statistics, E most episodes that end in a part.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from echelon.algorithms.a3c import SHOWN, Gradient, num_statistics
from echelon.algorithms.model import Model
from echelon.config import ActorConfig
from echelon.layout import ArrayField, place, size_of, views_of

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class GradientSchema:
    """The layout of one gradient slot.

    `version` is the version of the weights that acted and at which the gradient was computed. `env_steps` is the number
    of valid steps in the part. The first `num_episodes` rows of `episodes` hold the return, length and environment of
    the episodes that ended in it.
    """

    num_parameters: int
    num_statistics: int
    max_episodes: int
    fields: tuple[ArrayField, ...] = field(init=False)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        fields = place(
            [
                ("gradient", (self.num_parameters,), np.float32),
                ("values", (len(SHOWN),), np.float32),
                ("statistics", (self.num_statistics,), np.float64),
                ("version", (1,), np.int64),
                ("env_steps", (1,), np.int64),
                ("num_episodes", (1,), np.int64),
                ("episodes", (self.max_episodes, 3), np.float64),
            ]
        )
        object.__setattr__(self, "fields", fields)
        object.__setattr__(self, "nbytes", size_of(fields))

    @classmethod
    def of(cls, actor: ActorConfig, num_gradients: int, model: Model) -> GradientSchema:
        """Returns the layout for an actor that computes `num_gradients` gradients from each rollout."""
        largest = -(-actor.envs_per_actor // num_gradients)  # environments per gradient
        return cls(model.parameters.numel(), num_statistics(model), actor.trajectory * largest)

    def views(self, memory: memoryview | Array) -> dict[str, Array]:
        """Returns every field as an array over `memory` (one slot), without copying."""
        return views_of(self.fields, memory)


def write(slot: dict[str, Array], gradient: Gradient, views: dict[str, Array], columns: slice) -> None:
    """Fills `slot` with a gradient and the counts of its part, which is `columns` of the trajectory in `views`."""
    slot["gradient"][...] = gradient.flat.numpy()
    slot["values"][...] = gradient.values.numpy()
    slot["statistics"][...] = gradient.statistics.numpy()
    slot["version"][0] = views["version"].min()
    slot["env_steps"][0] = views["valid"][:, columns].sum()
    returns, lengths = views["episode_return"][:, columns], views["episode_length"][:, columns]
    ended = lengths.nonzero()
    count = slot["num_episodes"][0] = len(ended[0])
    slot["episodes"][:count].T[...] = returns[ended], lengths[ended], columns.start + ended[1]
