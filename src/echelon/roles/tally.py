"""The tally: step counts and episode results of the actors of a run with replay, in shared memory.

Trajectories carry these themselves. Transitions are drawn repeatedly and in any order, so the tally carries them
separately. Every actor writes its own counts and its own ring of the newest episodes. The first learner writes the
counts from which the run starts, which opens the run to the actors; every learner writes the largest priority that it
has seen. Nobody waits. The counts of a dead actor pass to its successor. Episodes that the ring overwrites before the
learner reads them are still counted, but their returns are lost. Needs only numpy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from echelon.layout import ALIGNMENT
from echelon.replay.shard import join

Array = np.ndarray[Any, Any]
NUM_KEPT = 1024  # newest episodes of each actor
UNKNOWN = -1  # the environment of an episode of a worker
ENV_STEPS, EPISODES = 0, 1
OPENED = 2  # only in the row of counts from which the run starts
RESTS = 2  # in the row of an actor: whether it makes no more steps


class Tally:
    """The counts of one run, as every actor and the learner see them."""

    def __init__(self, num_actors: int, memory: Array | None = None, num_learners: int = 1) -> None:
        memory = np.zeros(self.size(num_actors, num_learners), np.uint8) if memory is None else memory
        words, kept = np.split(memory, [(1 + num_learners + num_actors) * ALIGNMENT])
        lines = words.reshape(-1, ALIGNMENT)
        self._past, self._counts = lines[0].view(np.int64), lines[1 + num_learners :].view(np.int64)
        self._top_priority = lines[1 : 1 + num_learners].view(np.float64)[:, 0]  # largest seen by each learner
        self._kept = kept.view(np.float64).reshape(num_actors, NUM_KEPT, 3)  # return, length, environment

    @staticmethod
    def size(num_actors: int, num_learners: int = 1) -> int:
        return (1 + num_learners + num_actors) * ALIGNMENT + num_actors * NUM_KEPT * 24

    @classmethod
    def at(cls, folder: Path, num_actors: int, num_learners: int = 1) -> Tally:
        """Opens the tally of a run; the first process to call this creates it."""
        return cls(num_actors, join(folder / "tally", cls.size(num_actors, num_learners)), num_learners)

    @property
    def env_steps(self) -> int:
        """Steps of the whole run, including those before a resume."""
        return int(self._past[ENV_STEPS] + self._counts[:, ENV_STEPS].sum())

    @property
    def episodes(self) -> int:
        return int(self._past[EPISODES] + self._counts[:, EPISODES].sum())

    # The learner's side.

    def open(self, env_steps: int, episodes: int) -> None:
        """Sets the counts from which the run starts, and opens it to the actors. Only the first call has an effect.

        A restarted learner finds the run already open.
        """
        if not self._past[OPENED]:
            self._past[ENV_STEPS], self._past[EPISODES] = env_steps, episodes
            self._past[OPENED] = 1

    @property
    def all_rest(self) -> bool:
        return bool(self._counts[:, RESTS].all())

    def episodes_of(self, actor: int) -> int:
        """Returns the number of this actor's episodes that have ended."""
        return int(self._counts[actor, EPISODES])

    def ended(self, actor: int, seen: int) -> Array:
        """Returns return, length and environment (n, 3) of the actor's kept episodes from number `seen` on."""
        head = self.episodes_of(actor)
        numbers = np.arange(max(seen, head - NUM_KEPT), head)
        rows = self._kept[actor, numbers % NUM_KEPT]
        # A row is written before the count increases, so one row more than the count shows may be overwritten by now.
        whole: Array = rows[numbers > self.episodes_of(actor) - NUM_KEPT]
        return whole

    def raise_top(self, priority: float, learner: int = 0) -> None:
        """Raises the largest priority seen by this learner to at least `priority`."""
        self._top_priority[learner] = max(float(self._top_priority[learner]), priority)

    @property
    def known_top(self) -> float:
        """The largest priority so far, or 0 if none is known."""
        return float(max(self._top_priority.tolist()))

    # The actor's side.

    @property
    def is_open(self) -> bool:
        return bool(self._past[OPENED])

    @property
    def top_priority(self) -> float:
        """The initial priority of a transition whose TD error is not known: the largest so far, or 1."""
        return self.known_top or 1.0

    def rest(self, actor: int, rests: bool) -> None:
        """Notes whether an actor makes no more steps, as the run has all of them."""
        self._counts[actor, RESTS] = rests

    def note(self, actor: int, env_steps: int, ended: Array, before: tuple[int, int] | None = None) -> None:
        """Adds steps of an actor, and return, length and environment (n, 3) of the episodes that ended in them.

        `before` are its counts before these steps, if a predecessor may have added some of them: then a repetition
        has no effect.
        """
        steps, count = before or self.counts_of(actor)
        for episode in ended:
            self._kept[actor, count % NUM_KEPT] = episode
            count += 1
            self._counts[actor, EPISODES] = max(count, self.episodes_of(actor))
        self._counts[actor, ENV_STEPS] = steps + env_steps

    def settle(self, actor: int, counts: tuple[int, int], ended: tuple[float, int] | None) -> None:
        """Sets the counts (steps, episodes) of an actor, and the return and length of its last episode if one ended.

        Unlike `note` it is idempotent.
        """
        env_steps, episodes = counts
        if ended is not None:
            self._kept[actor, (episodes - 1) % NUM_KEPT] = *ended, UNKNOWN
        self._counts[actor, EPISODES] = episodes
        self._counts[actor, ENV_STEPS] = env_steps

    def counts_of(self, actor: int) -> tuple[int, int]:
        """Returns the number of steps of this actor, and of its episodes that have ended."""
        return int(self._counts[actor, ENV_STEPS]), self.episodes_of(actor)
