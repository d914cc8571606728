"""The part of a replay that one of several learners draws from: the shards of its own actors.

All learners draw one batch together, with the same distribution as a single learner that has all shards. Each draws a
number of transitions in proportion to the mass of its shards, and importance weights are those of a single buffer.
Before every batch the learners therefore exchange their `Mass`, and after drawing their largest weight. The first
learner checks the limiter and reads the actors' tally; the others follow its decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from echelon.algorithms.peers import Peers
from echelon.replay.reader import Seen
from echelon.replay.sampled import Keys, Mass, Sampled, apportion
from echelon.roles.replay_source import ReplaySource
from echelon.roles.source import Offer, SharedSource
from echelon.roles.staging import TransitionStaging
from echelon.schema import TransitionBatch

if TYPE_CHECKING:
    from echelon.roles.plan.replay import ReplayPlan

NOTHING = np.zeros(0, np.int64)
EMPTY = Sampled(Keys(NOTHING, NOTHING), np.zeros(0), 0.0, {})  # the sample of a learner whose share of a batch is 0


class ReplayPart(ReplaySource, SharedSource):
    """Yields parts of batches, as often as the limiter allows all learners together."""

    counts_offers = False  # steps are counted when actors make them, not when a part is offered

    def __init__(self, plan: ReplayPlan, device: torch.device, peers: Peers) -> None:
        super().__init__(plan, device)
        self.peers, self.is_first = peers, peers.rank == 0
        self.prefetches = False  # the size of the next part depends on the other learners' shards at that time
        self.everything = Seen(plan.readers(), self.replay.alpha)
        if not self.is_first:
            seed = (plan.config.seed, plan.context.generation, self.learner, plan.context.incarnation)
            self.rng = np.random.default_rng(seed)

    def offer(self, version: int) -> Offer:
        """Offers the mass of its shards. Only the first learner checks whether the limiter allows a batch."""
        del version
        self._update_priorities()
        self.replay.advance()
        if self.is_first:
            self._count_actors()
        is_ready = not self.is_first or self.limiter.may_sample(self.batch_size)
        mass = self.replay.mass
        return Offer(is_ready, mass.total, mass.size, self.rng.random())

    def take_part(self, version: int, offers: Sequence[Offer]) -> TransitionBatch | None:
        masses = [Mass(offer.total, offer.size) for offer in offers]
        me, whole = self.learner, sum(masses, Mass())
        if not offers[0].is_ready:
            return None
        if whole.size < self.batch_size:
            if self.is_first:
                self._write_off()
            return None
        self.is_short = False
        counts = apportion(self.batch_size, masses, offers[0].share)
        self.limiter.note_sampled(me, counts[me])
        staging = self._next_staging()
        self._stage_part(staging, counts[me], sum(masses[:me] + masses[me + 1 :], Mass()))
        batch = self._move(staging, version)
        batch.others = (sum(counts[:me]), sum(counts[me + 1 :]))
        return batch

    def _stage_part(self, staging: TransitionStaging, count: int, elsewhere: Mass) -> None:
        """Draws `count` items. Their weights are divided by the largest weight of all learners."""
        sampled = EMPTY
        if count:
            draft = self.replay.draw(count, self.beta, self.rng, elsewhere)
            sampled = self.replay.collect(draft, staging.block.part(slice(count)))
        if self.replay.alpha > 0.0 and self.beta > 0.0:
            largest = float(self.peers.gather(torch.tensor(sampled.max_weight, dtype=torch.float64)).max())
            sampled = replace(sampled, weights=sampled.weights * (sampled.max_weight / largest))
        staging.put(sampled)

    def admit(self) -> None:
        if self.is_first:
            super().admit()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the state. The saved generator is the first learner's; the others keep their new generators."""
        if state and not self.is_first:
            state = {**state, "rng": self.rng.bit_generator.state}
        super().load_state_dict(state)
