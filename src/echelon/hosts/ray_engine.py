"""The engine of a Ray cluster: the engine of several hosts, whose agents Ray starts, one on each other node.

Ray does nothing finer: it starts an agent on every node, and says when a node or an agent is gone, so that its host is
given up immediately, not after a lease. Everything else is between the agents and the head, as without Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from echelon.engines.ray_cluster import RayCluster
from echelon.errors import EchelonError, RunError, TransportError, escaped
from echelon.hosts.agent import take_part
from echelon.hosts.engine import HostsEngine
from echelon.transport.secret import is_loopback

ENTRY = f"{__name__}:run_agent"


class RayEngine(HostsEngine):
    """Starts roles on this node, the head, and on the other nodes of `cluster`; it owns the cluster."""

    def __init__(
        self, session: str, preload: Sequence[str], cluster: RayCluster, address: str, lease_s: float, shm_dir: str
    ) -> None:
        self._cluster = cluster
        self._known: set[str] = set()  # reports of nodes that do not take part
        try:
            super().__init__(session, preload, address, lease_s)
            name, _, port = self.address.removeprefix("tcp://").rpartition(":")
            join = f"tcp://{cluster.ip if name == '0.0.0.0' else name}:{port}"
            cluster.start(ENTRY, {"address": join, "shm_dir": shm_dir})
        except BaseException:
            cluster.close()
            raise

    @property
    def num_nodes(self) -> int:
        """The nodes of the cluster when this engine was made, this one included."""
        return self._cluster.num_nodes

    @property
    def descriptors(self) -> list[int]:
        return [*super().descriptors, *self._cluster.descriptors]

    @property
    def _how_to_join(self) -> str:
        return "Ray starts an agent on every node of its cluster that has a free CPU"

    def _look(self) -> None:
        for event in self._cluster.events():
            if not self._over:  # else all agents leave
                self._on_ray_event(event)
        super()._look()

    def _on_ray_event(self, event: dict[str, Any]) -> None:
        if event["event"] == "failed":
            text = f"the connection to the Ray cluster is lost, and its nodes with it: {escaped(event['text'])}"
            if self._places is None:
                raise RunError(text)
            self._report(text)
            for one in self._hosts.values():
                if not one.lost:  # Ray has killed its agent
                    self._lose(one, "is lost (with the Ray cluster)")
            return
        node, why = event["node"], escaped(event["why"])
        host = next((one for one in self._hosts.values() if one.name == node and not one.lost), None)
        if host is not None:
            self._lose(host, f"is lost ({why})")
        elif (text := f"the Ray node {node} does not take part: {why}") not in self._known:
            self._known.add(text)
            self._report(text)

    def close(self, timeout_s: float) -> None:
        super().close(timeout_s)
        self._cluster.close()


def make_address(address: str, cluster: RayCluster) -> str:
    """Returns where the head listens: on the node's address in the cluster instead of on the loopback."""
    name, _, port = address.removeprefix("tcp://").rpartition(":")
    return f"tcp://{cluster.ip}:{port}" if is_loopback(name) or name == "localhost" else address


def run_agent(address: str, shm_dir: str, name: str) -> dict[str, Any]:
    """Runs the host agent in an actor of Ray. An agent that was refused or has lost the run tries again later."""

    def report(text: str) -> None:
        print(text, flush=True)

    try:
        return {"why": take_part(address, shm_dir, report, name), "again": False}
    except EchelonError as error:
        return {"why": str(error), "again": isinstance(error, TransportError)}
