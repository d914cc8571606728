"""The episode source: batches of transitions from workers, a fixed number of batches per episode.

The learner waits until an episode arrives for which updates are due; the gateway's append wakes it. If the learner is
behind, workers do not wait for it: items that it has not drawn are evicted like any others, and it makes the
outstanding updates from the items that remain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from echelon.roles.replay_source import ReplaySource
from echelon.schema import TransitionBatch

if TYPE_CHECKING:
    from echelon.roles.plan.replay import ReplayPlan


class EpisodeSource(ReplaySource):
    """Yields `workers.updates` batches for each episode, after which the weights are published."""

    rate_window_s = 30.0  # long, because steps arrive in whole episodes
    counts_episodes = True

    def __init__(self, plan: ReplayPlan, device: torch.device) -> None:
        super().__init__(plan, device)
        self.publish_every = plan.config.workers.updates  # updates per episode

    def _is_due(self) -> bool:
        """Returns whether an update is due for the episodes received so far."""
        return self.counters.updates < self.publish_every * self.tally.episodes

    def _fetch(self, version: int) -> TransitionBatch | None:
        return super()._fetch(version) if self.tally.is_open and self._is_due() else None

    def _may_draw(self) -> bool:
        return self._is_due() and super()._may_draw()
