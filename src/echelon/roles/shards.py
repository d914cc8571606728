"""The shards role: a shard server as a process of a run.

Waits for: questions of learners, and appends while a learner waits for news. Wakes: the actors of its host. If it dies,
the supervisor starts another, which listens at the same address; the learner asks it again and nothing is lost.
"""

from __future__ import annotations

import time
from typing import Any

from echelon.roles.context import Context, Station
from echelon.roles.replay_plan import ReplayPlan
from echelon.servers.shards import ShardServer
from echelon.transport.door import announce
from echelon.transport.session import secret_of

REPORT_S = 1.0


class Shards:
    """Answers what has come, a step at a time."""

    def __init__(self, context: Context) -> None:
        self.station, self.finished, self.next_report = Station(context), False, 0.0
        plan = ReplayPlan(context)
        file = plan.server_file
        address = file.read_text() if file.exists() else context.train.replay.address
        self.server = ShardServer(plan.folder, plan.wire, plan.rule, address, secret_of(plan.folder))
        announce(file, self.server.address)

    def step(self, timeout_s: float) -> bool:
        if self.station.stop_requested:
            self.finished = True
            return False
        worked = self.server.step(timeout_s)
        phases = self.station.phases
        phases["transfer"], phases["wait"] = self.server.work_s, self.server.wait_s
        self.station.progress += 1
        now = time.perf_counter()
        if now >= self.next_report:
            self.next_report = now + REPORT_S
            self._tell()
        self.station.tick(now)
        return worked

    def _tell(self) -> None:
        """What it gave away, for the record: answers, transitions, and what was refused."""
        server = self.server
        figures = {"answers": server.num_answers, "items": server.num_items, "refused": server.num_refused}
        self.station.report("shards", self.station.world.name, figures)

    def close(self) -> None:
        self._tell()
        self.server.close()
        self.station.close()


def shards(config: dict[str, Any]) -> Shards:
    """The entry of a shard server's process."""
    return Shards(Context.from_config(config))
