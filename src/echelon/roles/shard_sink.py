"""The shard sink: stores trajectories of actors on other hosts in their replay shards, which are at the head.

The carrier is the writer of these shards. It does with each row of a trajectory what an actor of the head does with
each step, in the same code (`ReplayExperience`): n-step returns, frames, initial priorities, limiter and tally.

It also grants these actors their slots. The first slot of an actor is granted by the rule that actors of the head obey:
if one more trajectory fits into the band of the limiter. Slots ahead, with which an actor goes on while its trajectory
is on the link, must fit together with all that are granted. Where the learner is the bottleneck, actors of the head are
faster to use what it has sampled; so an actor that has stored less than the average is granted its first slot as long
as the limiter is within its band. The band is exceeded by at most one append per actor, as on one host, and by what
the slots ahead bring, which actors of the head do not see (`actor.slots` of each actor, where the learner keeps up).

The carrier counts a slot after it was stored. If it dies in between, its successor receives the slot again. Steps and
episodes are still counted once, because the counts before the slot are kept (`_before`). Transitions of that one
trajectory may then be in the replay twice. Transitions that were incomplete are lost, as with an actor that dies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from echelon.roles.context import Station
from echelon.roles.replay_experience import START_POLL_S, ReplayExperience
from echelon.transport.segments import join_segment
from echelon.transport.shared_memory import Doorbell

if TYPE_CHECKING:
    from echelon.roles.plan.parts import Plan

Array = np.ndarray[Any, Any]
PERIOD = 64  # trajectories of one actor over which shares are compared: an actor that was away does not catch up
NUMBER, STEPS, EPISODES = 0, 1, 2  # words of each stream: the slot being stored, from 1 on, and the counts before it
ONLY_TEAM = 0


class ShardSink:
    """Stores slots in the shards of their actors."""

    def __init__(self, plan: Plan, station: Station) -> None:
        self.ring, self._plan, self._station = plan.slot_counts(), plan, station
        self._limiter, self._tally = plan.replay.limiter(), plan.replay.tally()
        self._slots, self._columns = plan.slot_bytes, slice(0, plan.schema.num_envs)
        words = join_segment(plan.context.session / "stored", 8 * 3 * self.ring.num_streams)
        self._words = words.view(np.int64).reshape(-1, 3)
        self._experiences: dict[int, ReplayExperience] = {}
        self._marks = self._limiter.inserted_by_shard  # at the start of the period
        self.bells: list[Doorbell] = [self._limiter.sampled_bell]

    @property
    def env_steps(self) -> int:
        return self._tally.env_steps

    @property
    def patience_s(self) -> float:
        return 1.0 if self._tally.is_open else START_POLL_S

    def serve(self, streams: Sequence[int]) -> None:
        kept = {stream: one for stream, one in self._experiences.items() if stream in streams}
        self._experiences = kept | {stream: self._make(stream) for stream in streams if stream not in kept}
        self._words[[stream for stream in range(self.ring.num_streams) if stream not in streams], NUMBER] = 0

    def _make(self, stream: int) -> ReplayExperience:
        experience = ReplayExperience(self._plan.replay, self._plan.schema, stream, self._station)
        experience.pages(ONLY_TEAM, self._columns)
        return experience

    def grant(self) -> None:
        """Grants slots to the streams in turn, as far as the limiter and the slots of their hosts allow."""
        while self._grant_each():
            pass

    def _grant_each(self) -> bool:
        """Grants one slot to each stream, as far as possible; returns whether any may be granted another."""
        ring, streams = self.ring, sorted(self._experiences)
        pending = {stream: int(ring.granted[stream] - ring.head[stream]) for stream in streams}
        needy = [stream for stream in streams if pending[stream] < ring.num_slots]
        self._limiter.watch_samples(bool(needy))
        total, stored = sum(pending.values()), self._stored_lately()
        for stream in sorted(needy, key=lambda stream: (pending[stream], stored[stream])):
            num = total + 1 if pending[stream] else int(stored[stream] >= stored.mean())
            if not self._experiences[stream].may_store(num):
                return False
            ring.granted[stream] += 1
            total += 1
        return bool(needy)

    def _stored_lately(self) -> Array:
        """Returns how many items of each shard were stored in this period."""
        inserted = self._limiter.inserted_by_shard
        if (inserted - self._marks).max() > PERIOD * self._limiter.rule.chunk:
            self._marks = inserted
        return inserted - self._marks

    def write(self, stream: int, parts: Sequence[memoryview]) -> None:
        experience = self._experiences[stream]
        window = experience.windows[ONLY_TEAM]
        self._slots.unpack(parts, experience.memory)
        before = self._before(stream)
        window.begin()
        for row in window.page.rows:
            experience.store(window, row, row.reply)
        experience.count(window, before)

    def _before(self, stream: int) -> tuple[int, int]:
        """Returns the steps and episodes of a stream before its next slot, of which a predecessor may have counted."""
        words, number = self._words[stream], int(self.ring.head[stream]) + 1
        if words[NUMBER] != number:
            words[STEPS], words[EPISODES] = self._tally.counts_of(stream)
            words[NUMBER] = number
        return int(words[STEPS]), int(words[EPISODES])
