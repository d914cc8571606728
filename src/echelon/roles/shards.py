"""The shards role: a shard server as a process of a run.

Waits for: questions of learners, and appends while a learner waits for news. Wakes: the actors of its host. If it dies,
the supervisor starts another, which listens at the same address; the learner asks it again and nothing is lost.
"""

from __future__ import annotations

from typing import Any

from echelon.roles.context import Context
from echelon.roles.plan.replay import ReplayPlan
from echelon.roles.serving import Serving
from echelon.servers.shards import ShardServer
from echelon.transport.session import secret_of
from echelon.transport.sockets import announce


class Shards(Serving):
    """Answers what has come, a step at a time."""

    KIND = "shards"
    server: ShardServer

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        plan = ReplayPlan(context)
        file = plan.server_file
        address = file.read_text() if file.exists() else context.train.replay.address
        self.server = ShardServer(plan.folder, plan.wire, plan.rule, address, secret_of(plan.folder))
        announce(file, self.server.address)

    def times(self) -> dict[str, float]:
        return {"transfer": self.server.work_s, "wait": self.server.wait_s}

    def figures(self) -> dict[str, Any]:
        """What it gave away: answers, transitions, and what was refused."""
        server = self.server
        return {"answers": server.num_answers, "items": server.num_items, "refused": server.num_refused}


def shards(config: dict[str, Any]) -> Shards:
    """The entry of a shard server's process."""
    return Shards(Context.from_config(config))
