"""One of several learners: it takes its part of every batch, and steps when all of them do.

Waits for: a batch from its own actors, then for the other learners, before every batch (`Meeting`) and at every step in
it (`Learners`). The first of them publishes, saves and tells; the others learn the same weights, and leave with it. If
one dies or hangs, the supervisor ends the others and starts all of them again, from the newest checkpoint.
"""

from __future__ import annotations

import time
from typing import Any, cast

import torch

from echelon.errors import TransportError
from echelon.roles.context import Context
from echelon.roles.learner import Learner
from echelon.roles.learners import Learners
from echelon.roles.meeting import Meeting
from echelon.roles.source import Counters, Offer, SharedSource
from echelon.schema import Batch, GradientBatch, TransitionBatch


class JointLearner(Learner):
    """Learns from its part of one batch a step."""

    source: SharedSource

    def _restore(self) -> None:
        """Everybody goes on from the same checkpoint; what the source counts is its own, and goes on at the first."""
        self.peers, self.is_first = cast(Learners, self.pupil.peers), self.context.index == 0
        self.is_bounded, self._version = self.context.train.learner.max_lag is not None, 0
        self.counters = Counters()
        super()._restore()
        if self.is_first:
            own = self.source.counters
            own.env_steps, own.episodes = self.counters.env_steps, self.counters.episodes
        self.meeting = Meeting(self.peers, self.source, self.counters)
        self.fresh_lag = self.meeting.fresh_lag

    def step(self, timeout_s: float) -> bool:
        """Meets the others, and learns with them if everybody can; waits for a part of its own before."""
        before = self.counters.env_steps
        offers = self._meet(timeout_s)
        if self.meeting.is_over:
            self._finish()
            return True
        start = time.perf_counter()
        batch = self.source.take_part(self.version, offers)
        taken = time.perf_counter()
        self.station.phases["transfer"] += taken - start
        if batch is None:
            self._report_if_due()
            return False
        self._work(batch, taken, self._progress(before))
        return True

    def _meet(self, timeout_s: float) -> list[Offer]:
        """Tells the others what it has for the next batch; nothing, if the run is over with the last one."""
        is_over = self.is_first and bool(self._stop_reason())
        offer = Offer(is_ready=False) if is_over else self._find(timeout_s)
        start = time.perf_counter()
        offers = self.meeting.hold(offer, is_over or self.station.stop_requested, super()._elapsed_s)
        self.station.waited(start)
        return offers

    def _find(self, timeout_s: float) -> Offer:
        """What the source has for the next batch, or has after `timeout_s`."""
        start = time.perf_counter()
        offer = self.source.offer(self.version)
        if not offer.is_ready:
            self.source.listen()
            offer = self.source.offer(self.version)
        self.station.phases["transfer"] += time.perf_counter() - start
        if not offer.is_ready:
            self.source.wait(self.station, timeout_s)
            offer = self.source.offer(self.version)
        return offer

    def _learn(self, batch: Batch | TransitionBatch | GradientBatch) -> None:
        before = self.peers.spent_s
        super()._learn(batch)
        self._count_exchange("learn", before)

    def _count_exchange(self, phase: str, before: float) -> None:
        """What was spent with the others since `before` is no part of the phase that it lies in."""
        spent_s = self.peers.spent_s - before
        self.station.phases[phase] -= spent_s
        self.station.phases["exchange"] += spent_s

    @property
    def version(self) -> int:
        return self._version

    @property
    def _elapsed_s(self) -> float:
        """As the first learner's clock had it when they met: rates that follow the time are the same for all."""
        return self.meeting.elapsed_s

    def _publish(self) -> None:
        """The first publishes. With a bound on the lag nobody admits actors before that, so they wait for it."""
        is_new = self._version == 0
        self._version += 1
        if self.is_first:
            self._version = max(self.board.version, self.past_version) + 1
            self.board.publish(self.pupil.parts(), self._version)
        if is_new:
            self._agree()
        elif self.is_bounded:
            before = self.peers.spent_s
            self.peers.gather(torch.zeros(1))
            self._count_exchange("transfer", before)
        self.source.admit()

    def _agree(self) -> None:
        """All begin at the first one's version, with weights that must be the same."""
        weights = sum(float(tensor.double().sum()) for tensor in self.pupil.weights().values())
        each = self.peers.gather(torch.tensor([self._version, self.counters.updates, weights], dtype=torch.float64))
        if not torch.equal(each[:, 1:], each[:1, 1:].expand(len(each), 2)):
            raise TransportError(
                f"the learners {', '.join(self.peers.names)} begin with different weights (updates and sums of "
                f"weights: {each[:, 1:].tolist()}). Do all of them read the same {self.checkpoints}?"
            )
        self._version = int(each[0, 0])

    def _report_if_due(self) -> None:
        if self.is_first:
            super()._report_if_due()
        else:
            self._tell_news()

    def _checkpoint_if_possible(self) -> None:
        if self.is_first:
            super()._checkpoint_if_possible()

    def _finish(self) -> None:
        if self.is_first:
            super()._finish()
        self.finished = True


def joint_learner(config: dict[str, Any]) -> JointLearner:
    """The entry of the process of one of several learners."""
    return JointLearner(Context.from_config(config))
