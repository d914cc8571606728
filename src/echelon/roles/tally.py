"""The tally: what the actors of a run with replay have done, in shared memory: their steps, and how episodes ended.

Trajectories carry such news themselves; transitions are drawn in any order and often, so it travels beside them. Every
actor writes its own words and its own ring of the newest episodes; the first learner writes where the run stands that
it goes on with, which opens the run to the actors, and every learner the largest priority that it met. Nobody waits. An
actor that dies leaves its counts to its successor; episodes that the learner has not looked at before the ring came
round are counted all the same, only their returns are not known. Needs only numpy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from echelon.layout import ALIGNMENT
from echelon.replay.shard import join

Array = np.ndarray[Any, Any]
NUM_KEPT = 256  # episodes of each actor
ENV_STEPS, EPISODES = 0, 1
OPENED = 2  # beside the steps and episodes that the run goes on from


class Tally:
    """The counts of one run, as every actor and the learner see them."""

    def __init__(self, num_actors: int, memory: Array | None = None, num_learners: int = 1) -> None:
        memory = np.zeros(self.size(num_actors, num_learners), np.uint8) if memory is None else memory
        words, kept = np.split(memory, [(1 + num_learners + num_actors) * ALIGNMENT])
        lines = words.reshape(-1, ALIGNMENT)
        self._past, self._counts = lines[0].view(np.int64), lines[1 + num_learners :].view(np.int64)
        self._top_priority = lines[1 : 1 + num_learners].view(np.float64)[:, 0]  # that each learner knows of
        self._kept = kept.view(np.float64).reshape(num_actors, NUM_KEPT, 2)  # return and length

    @staticmethod
    def size(num_actors: int, num_learners: int = 1) -> int:
        return (1 + num_learners + num_actors) * ALIGNMENT + num_actors * NUM_KEPT * 16

    @classmethod
    def at(cls, folder: Path, num_actors: int, num_learners: int = 1) -> Tally:
        """The tally of a run; whoever comes first makes it."""
        return cls(num_actors, join(folder / "tally", cls.size(num_actors, num_learners)), num_learners)

    @property
    def env_steps(self) -> int:
        """Steps of the whole run, earlier parts of it included."""
        return int(self._past[ENV_STEPS] + self._counts[:, ENV_STEPS].sum())

    @property
    def episodes(self) -> int:
        return int(self._past[EPISODES] + self._counts[:, EPISODES].sum())

    # The learner's side.

    def open(self, env_steps: int, episodes: int) -> None:
        """Says what the run goes on from, once; a learner that is started again finds the run open."""
        if not self._past[OPENED]:
            self._past[ENV_STEPS], self._past[EPISODES] = env_steps, episodes
            self._past[OPENED] = 1

    def episodes_of(self, actor: int) -> int:
        """How many of this actor's episodes have ended."""
        return int(self._counts[actor, EPISODES])

    def ended(self, actor: int, seen: int) -> Array:
        """Return and length (n, 2) of the actor's episodes from number `seen` on, as far as they are kept."""
        head = self.episodes_of(actor)
        numbers = np.arange(max(seen, head - NUM_KEPT), head)
        rows = self._kept[actor, numbers % NUM_KEPT]
        # A row is written before the count moves, so one more than counted may be overwritten by now.
        whole: Array = rows[numbers > self.episodes_of(actor) - NUM_KEPT]
        return whole

    def raise_top(self, priority: float, learner: int = 0) -> None:
        """Notes that a transition of this learner had this priority."""
        self._top_priority[learner] = max(float(self._top_priority[learner]), priority)

    @property
    def known_top(self) -> float:
        """The largest priority so far; 0: none is known."""
        return float(max(self._top_priority.tolist()))

    # The actor's side.

    @property
    def is_open(self) -> bool:
        return bool(self._past[OPENED])

    @property
    def top_priority(self) -> float:
        """What a transition starts with whose priority nobody knows yet: the largest so far."""
        return self.known_top or 1.0

    def note(self, actor: int, env_steps: int, returns: Array, lengths: Array) -> None:
        """The actor made so many steps, in which episodes with these returns and lengths ended."""
        count = int(self._counts[actor, EPISODES])
        for value, length in zip(returns.tolist(), lengths.tolist(), strict=True):
            self._kept[actor, count % NUM_KEPT] = value, length
            count += 1
            self._counts[actor, EPISODES] = count
        self._counts[actor, ENV_STEPS] += env_steps

    def settle(self, actor: int, counts: tuple[int, int], ended: tuple[float, int] | None) -> None:
        """The actor has made steps and ended episodes to these counts, the last with this return and length.

        As `note`, but saying it twice is saying it once.
        """
        env_steps, episodes = counts
        if ended is not None:
            self._kept[actor, (episodes - 1) % NUM_KEPT] = ended
        self._counts[actor, EPISODES] = episodes
        self._counts[actor, ENV_STEPS] = env_steps

    def counts_of(self, actor: int) -> tuple[int, int]:
        """The steps that this actor has made, and its episodes that have ended."""
        return int(self._counts[actor, ENV_STEPS]), self.episodes_of(actor)
