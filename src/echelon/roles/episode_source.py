"""The episode source: batches of transitions that workers brought, so many for every episode.

The learner waits for an episode that it has not made its updates for; the gateway's append wakes it. If the learner is
behind, nobody waits for it: items that it has not drawn are evicted as any others, and it makes the missing updates
from what is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from echelon.roles.replay_source import ReplaySource
from echelon.schema import TransitionBatch

if TYPE_CHECKING:
    from echelon.roles.plan.replay import ReplayPlan


class EpisodeSource(ReplaySource):
    """Batches for `workers.updates` updates of each episode; then the weights are published."""

    rate_window_s = 30.0  # steps come as whole episodes, in lumps
    counts_episodes = True

    def __init__(self, plan: ReplayPlan, device: torch.device) -> None:
        super().__init__(plan, device)
        self.publish_every = plan.config.workers.updates  # the updates of one episode

    def _is_due(self) -> bool:
        """Whether an update is due, by the episodes that are in."""
        return self.counters.updates < self.publish_every * self.tally.episodes

    def _fetch(self, version: int) -> TransitionBatch | None:
        return super()._fetch(version) if self.tally.is_open and self._is_due() else None

    def _may_draw(self) -> bool:
        return self._is_due() and super()._may_draw()
