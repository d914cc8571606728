"""The shards role: a shard server as a process of a run.

Waits for: requests of learners, and for appends while a learner waits for new items. Wakes: the actors of its host. If
it dies, the supervisor starts a new one, which listens at the same address; the learner resends its requests and
nothing is lost.
"""

from __future__ import annotations

from typing import Any

from echelon.roles.context import Context
from echelon.roles.plan.replay import ReplayPlan
from echelon.roles.serving import Serving
from echelon.servers.shards import ShardServer
from echelon.transport.sockets import announce


class Shards(Serving):
    """The shards role: handles pending requests in each step."""

    KIND = "shards"
    server: ShardServer

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        plan = ReplayPlan(context)
        file = plan.server_file
        address = file.read_text() if file.exists() else context.train.replay.address
        self.server = ShardServer(plan.folder, plan.wire, plan.rule, address, self.report)
        announce(file, self.server.address)

    def times(self) -> dict[str, float]:
        return {"transfer": self.server.work_s, "wait": self.server.wait_s}

    def figures(self) -> dict[str, Any]:
        """Returns the number of replies, of transitions sent and of refused messages."""
        server = self.server
        return {"answers": server.num_answers, "items": server.num_items, "refused": server.num_refused}


def shards(config: dict[str, Any]) -> Shards:
    """The entry point of a shard server process."""
    return Shards(Context.from_config(config))
