"""The meeting: how several learners go from batch to batch together, and keep one account of them all.

Before every batch each of them tells the others what it has for it, what it counted since, and whether the run is to
stop; all of them hear all, so all decide alike. What is counted of a part that is offered counts when the batch is
taken: what nobody learns from is in no account. Who waits: whoever has its part of the batch, for those who have not;
they come as soon as they do, or after a tenth of a second without, so nobody waits longer for a sign of life than a
batch takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from echelon.algorithms.peers import Peers
from echelon.roles.source import Counters, Offer, SharedSource
from echelon.roles.stopping import RETURN_WINDOW

COUNTED = ("env_steps", "episodes", "dropped", "lag_sum", "lag_steps")  # added up
OTHERS = ("is_over", "elapsed_s", "lag_max", "return_max", "num_ended")
NUM_WORDS = len(Offer._fields) + len(OTHERS) + len(COUNTED) + 2 * RETURN_WINDOW


class Meeting:
    """One learner's seat in it."""

    def __init__(self, peers: Peers, source: SharedSource, counters: Counters) -> None:
        """`counters` become those of all learners; the source keeps its own."""
        self.peers, self.source, self.counters = peers, source, counters
        self.is_over, self.elapsed_s = False, 0.0  # as the first learner says
        self.fresh_lag: list[tuple[float, int]] = []  # lag mean and max of batches since the last report, of the first
        self._reported = self._counts()
        self._heard: list[list[list[float]]] = [[] for _ in range(peers.size)]  # of each learner, not counted yet

    def hold(self, offer: Offer, is_over: bool, elapsed_s: float) -> list[Offer]:
        """Tells the others, and hears their offers; the counters are everybody's from here on."""
        everybody = self.peers.gather(self._words(offer, is_over, elapsed_s)).tolist()
        offers, size = [], len(Offer._fields)
        for words, heard in zip(everybody, self._heard, strict=True):
            is_ready, total, count, share = words[:size]
            offers.append(Offer(bool(is_ready), total, int(count), share))
            heard.append(words[size + 2 :])
        self.is_over = any(words[size] for words in everybody)
        self.elapsed_s = everybody[0][size + 1]
        is_taken = all(offer.is_ready for offer in offers) and not self.is_over
        if is_taken or not self.source.counts_offers:
            self._add_up([words for heard in self._heard for words in heard])  # in the order of the learners
            for heard in self._heard:
                heard.clear()
        return offers

    def _counts(self) -> list[float]:
        return [getattr(self.source.counters, name) for name in COUNTED]

    def _words(self, offer: Offer, is_over: bool, elapsed_s: float) -> torch.Tensor:
        """What is told: the offer, OTHERS, COUNTED since the last time, returns and lengths of episodes that ended."""
        counters, counts, lags = self.source.counters, self._counts(), self.source.fresh_lag
        lag_max = max((peak for _, peak in lags), default=0)
        top = counters.return_max if counters.return_max is not None else -math.inf
        returns, lengths = list(counters.returns), list(counters.lengths)
        words = torch.zeros(NUM_WORDS, dtype=torch.float64)
        news = [now - before for now, before in zip(counts, self._reported, strict=True)]
        head = [*map(float, offer), is_over, elapsed_s, lag_max, top, len(returns), *news, *returns]
        words[: len(head)] = torch.tensor(head, dtype=torch.float64)
        if lengths:
            words[-len(lengths) :] = torch.tensor(lengths, dtype=torch.float64)
        self._reported = counts
        counters.returns.clear()
        counters.lengths.clear()
        lags.clear()
        return words

    def _add_up(self, heard: Sequence[list[float]]) -> None:
        counters, lag_sum, lag_steps = self.counters, 0.0, 0.0
        for lag_max, return_max, num_ended, *words in heard:
            for name, value in zip(COUNTED, words, strict=False):
                setattr(counters, name, getattr(counters, name) + (value if name == "lag_sum" else int(value)))
            lag_sum, lag_steps = lag_sum + words[3], lag_steps + words[4]
            counters.lag_max = max(counters.lag_max, int(lag_max))
            ended = words[len(COUNTED) : len(COUNTED) + int(num_ended)]
            lengths = words[len(words) - int(num_ended) :]
            for value, length in zip(ended, lengths, strict=True):
                counters.note_episode(value, int(length))
            if math.isfinite(return_max):  # of episodes that are not among the newest
                best = counters.return_max
                counters.return_max = return_max if best is None else max(best, return_max)
        if lag_steps and self.peers.rank == 0:
            self.fresh_lag.append((lag_sum / lag_steps, max(int(words[0]) for words in heard)))
