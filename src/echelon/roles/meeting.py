"""The meeting: an all-gather before every batch by which several learners agree on it and share their counters.

Each learner contributes its offer for the batch, its counts since the last meeting, and whether the run should stop;
the first one also the time, and the learning rate that a callback has set.
All learners receive the same data, so all take the same decision. The counts of an offered part are added when the
batch is taken: data that is never learned from is never counted. A learner whose part is ready waits for the others.
They join as soon as their part is ready, or after a tenth of a second without one, so that no learner waits for a sign
of life longer than a batch takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from echelon.algorithms.peers import Peers
from echelon.roles.source import Counters, Offer, SharedSource
from echelon.roles.stopping import RETURN_WINDOW

COUNTED = ("env_steps", "episodes", "dropped", "lag_sum", "lag_steps")  # summed over the learners
OTHERS = ("is_over", "elapsed_s", "learning_rate", "lag_max", "return_max", "num_ended")
NUM_WORDS = len(Offer._fields) + len(OTHERS) + len(COUNTED) + 2 * RETURN_WINDOW


class Meeting:
    """One learner's side of the meetings."""

    def __init__(self, peers: Peers, source: SharedSource, counters: Counters) -> None:
        """`counters` receives the totals of all learners; the source keeps its own counts."""
        self.peers, self.source, self.counters = peers, source, counters
        self.is_over, self.elapsed_s = False, 0.0  # if any learner is over; the first learner's time
        self.learning_rate: float | None = None  # that of the first learner
        self.fresh_lag: list[tuple[float, int]] = []  # lag mean and max of batches since the last report, at rank 0
        self._reported = self._counts()
        self._pending: list[list[list[float]]] = [[] for _ in range(peers.size)]  # received, not yet counted

    def hold(self, offer: Offer, is_over: bool, elapsed_s: float, learning_rate: float | None = None) -> list[Offer]:
        """Exchanges offers and counts with the other learners, updates the counters and returns all offers."""
        gathered = self.peers.gather(self._words(offer, is_over, elapsed_s, learning_rate)).tolist()
        offers, size = [], len(Offer._fields)
        for words, pending in zip(gathered, self._pending, strict=True):
            is_ready, total, count, share = words[:size]
            offers.append(Offer(bool(is_ready), total, int(count), share))
            pending.append(words[size + 3 :])
        self.is_over = any(words[size] for words in gathered)
        self.elapsed_s = gathered[0][size + 1]
        self.learning_rate = gathered[0][size + 2] or None
        is_taken = all(offer.is_ready for offer in offers) and not self.is_over
        if is_taken or not self.source.counts_offers:
            self._add_up([words for pending in self._pending for words in pending])  # in the order of the learners
            for pending in self._pending:
                pending.clear()
        return offers

    def _counts(self) -> list[float]:
        return [getattr(self.source.counters, name) for name in COUNTED]

    def _words(self, offer: Offer, is_over: bool, elapsed_s: float, learning_rate: float | None) -> torch.Tensor:
        """Returns the contribution of this learner.

        It holds the offer, OTHERS, the increments of COUNTED, and the returns and lengths of episodes that ended.
        """
        counters, counts, lags = self.source.counters, self._counts(), self.source.fresh_lag
        lag_max = max((peak for _, peak in lags), default=0)
        top = counters.return_max if counters.return_max is not None else -math.inf
        returns, lengths = list(counters.returns), list(counters.lengths)
        words = torch.zeros(NUM_WORDS, dtype=torch.float64)
        news = [now - before for now, before in zip(counts, self._reported, strict=True)]
        head = [
            *map(float, offer),
            is_over,
            elapsed_s,
            learning_rate or 0.0,
            lag_max,
            top,
            len(returns),
            *news,
            *returns,
        ]
        words[: len(head)] = torch.tensor(head, dtype=torch.float64)
        if lengths:
            words[-len(lengths) :] = torch.tensor(lengths, dtype=torch.float64)
        self._reported = counts
        counters.returns.clear()
        counters.lengths.clear()
        lags.clear()
        return words

    def _add_up(self, received: Sequence[list[float]]) -> None:
        counters, lag_sum, lag_steps = self.counters, 0.0, 0.0
        for lag_max, return_max, num_ended, *words in received:
            for name, value in zip(COUNTED, words, strict=False):
                setattr(counters, name, getattr(counters, name) + (value if name == "lag_sum" else int(value)))
            lag_sum, lag_steps = lag_sum + words[3], lag_steps + words[4]
            counters.lag_max = max(counters.lag_max, int(lag_max))
            ended = words[len(COUNTED) : len(COUNTED) + int(num_ended)]
            lengths = words[len(words) - int(num_ended) :]
            for value, length in zip(ended, lengths, strict=True):
                counters.note_episode(value, int(length))
            if math.isfinite(return_max):  # may belong to an episode that is no longer among the newest
                best = counters.return_max
                counters.return_max = return_max if best is None else max(best, return_max)
        if lag_steps and self.peers.rank == 0:
            self.fresh_lag.append((lag_sum / lag_steps, max(int(words[0]) for words in received)))
