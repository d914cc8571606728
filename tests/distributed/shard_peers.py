"""Programs for both sides of shards over TCP, for the tests: `python shard_peers.py serve|learn JSON`.

A server prints its address, serves until its input ends, and prints its counts. A number in its input is the number of
refusals to wait for before that, because a refused client may give up before the server notices it. A learner reads the
shards of its own host in place and the others through a server. For every input line {"batches": n} it learns from n
prefetched batches and prints a report. The checksum of every item is verified. `replay_roles` has the writers.
"""

from __future__ import annotations

import collections
import json
import select
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from echelon.errors import EchelonError
from echelon.replay.limiter import Limiter
from echelon.replay.reader import PriorityColumn, Reader, ShardReader
from echelon.replay.remote import Link
from echelon.replay.remote_wait import RemoteWait
from echelon.replay.sharded import Replay
from echelon.replay.wire import ReplayWire
from echelon.servers.shards import ShardServer
from replay_roles import BATCH, CAPACITY, RULE, checksum, layout

PATIENCE_S = 60.0
HERE, ELSEWHERE = [0, 1], [2, 3]  # shards of the learner's host, and of the other


def tell(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def serve(folder: str, address: str) -> None:
    server = ShardServer(Path(folder), ReplayWire(layout(), ELSEWHERE, RULE), RULE, address)
    tell(address=server.address)
    while not any(select.select([sys.stdin], [], [], 0.0)):
        server.step(0.05)
    num_refused, deadline = int(sys.stdin.readline() or 0), time.monotonic() + PATIENCE_S
    while server.num_refused < num_refused and time.monotonic() < deadline:
        server.step(0.05)
    tell(num_refused=server.num_refused, num_items=server.num_items, torch="torch" in sys.modules)
    server.close()


class Learner:
    """Learns as a learner's source does, with batches in flight."""

    def __init__(self, folder: str, address: str, num_ahead: int, lost_after_s: float) -> None:
        place = Path(folder)
        self.limiter, self.num_ahead = Limiter.at(place, RULE), num_ahead
        columns = [PriorityColumn.at(place, index, CAPACITY) for index in ELSEWHERE]
        self.link = Link(address, ReplayWire(layout(), ELSEWHERE, RULE), columns, self.limiter, lost_after_s)
        self.link.arrive(30.0)
        readers: list[Reader] = [ShardReader.at(place, index, layout()) for index in HERE]
        self.replay = Replay([*readers, *self.link.readers], alpha=1.0)
        self.remote_wait = RemoteWait([self.link], self.limiter.listen(0))
        self.rng, self.drafts = np.random.default_rng(0), collections.deque[Any]()
        self.lost: list[str] = []

    def take(self) -> bool:
        """Returns one batch, if the limiter allows it and it has arrived."""
        replay, limiter = self.replay, self.limiter
        replay.advance()
        while len(self.drafts) <= self.num_ahead and replay.size >= BATCH and limiter.may_sample(BATCH):
            limiter.note_sampled(0, BATCH)
            self.drafts.append(replay.draw(BATCH, 0.4, self.rng))
        if not self.drafts or not self.drafts[0].is_ready():
            return False
        drawn = replay.collect(self.drafts.popleft())
        np.testing.assert_array_equal(drawn.fields["number"], drawn.keys.number)
        np.testing.assert_array_equal(drawn.fields["checksum"], checksum(drawn.fields))
        replay.update(drawn.keys, drawn.fields["priority"])
        self.drawn += np.bincount(drawn.keys.shard, minlength=RULE.num_shards)
        return True

    def learn(self, batches: int) -> None:
        self.drawn = np.zeros(RULE.num_shards, np.int64)
        while batches:
            self.remote_wait.listen()
            if self.take():
                batches -= 1
            else:
                self.remote_wait.wait(1.0)
        lost, self.replay.lost = self.replay.lost, []
        tell(
            drawn=self.drawn.tolist(), sizes=self.replay.sizes, lost=lost,
            inserted=self.limiter.inserted, sampled=self.limiter.sampled,
        )  # fmt: skip


def learn(folder: str, address: str, num_ahead: int = 2, lost_after_s: float = 10.0) -> None:
    try:
        learner = Learner(folder, address, num_ahead, lost_after_s)
        tell(torch="torch" in sys.modules)
        for line in sys.stdin:
            learner.learn(**json.loads(line))
        learner.link.close()
    except EchelonError as error:
        tell(error=type(error).__name__, text=str(error))


if __name__ == "__main__":
    {"serve": serve, "learn": learn}[sys.argv[1]](**json.loads(sys.argv[2]))
