"""The process that is Ray's driver: it connects to a cluster and runs one function on each of its other nodes.

It is a process of its own because Ray aborts a driver that has lost its cluster for a minute, and sets signal handlers:
a run must survive both. It exchanges lines of JSON with its starter, `ray_cluster.RayCluster`, on standard input and
output, and leaves when its input ends, even if the starter was killed. Ray ends the actors of a driver that has left.

Actors are never restarted by Ray (`max_restarts=0`). A node whose function failed gets another actor RETRY_S later.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any, TextIO

LEAST_VERSION = (2, 54)  # older ones let anybody on the network delete and run jobs: CVE-2026-27482, CVE-2025-62593
INSTALL = "pip install 'echelon[ray]'"
LOOK_S = 0.5
RETRY_S = 10.0
DRAIN_S = 3.0  # an agent that has said goodbye removes its files
REACH_S = 5.0
LOCAL_STORE_BYTES = 80 * 2**20  # Ray's minimum is 75 MiB; nothing is stored in it
TOKENS = "RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"
# Ray before ray-project/ray#62492 hides all GPUs from an actor that requests none. Roles choose theirs themselves.
SEES_GPUS = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "error", "RAY_NUM_REDIS_GET_RETRIES": "3"}
NO_MODE = (
    "RAY_AUTH_MODE is not token. Ray runs code for everybody who reaches an address of its cluster, so Echelon uses "
    "only clusters with token authentication: set RAY_AUTH_MODE=token on every node before `ray start`, and here"
)


class Unusable(Exception):
    """The cluster cannot be used; the text is for the user."""


@dataclass(slots=True)
class RayNode:
    """Another node of the cluster."""

    name: str
    node_id: str
    result: Any = None  # the reference of its running actor's result
    actor: Any = None  # it ends when this reference is gone
    start_at: float = 0.0  # when its next actor may start


class Driver:
    """Follows the nodes of the cluster; runs in the main thread of its process."""

    def __init__(self, ray: Any, output: TextIO) -> None:
        self._ray, self._output = ray, output
        self._nodes: dict[str, RayNode] = {}
        self._task: dict[str, Any] | None = None  # what every other node runs
        self._own_id = ray.get_runtime_context().get_node_id()

    def send(self, **event: Any) -> None:
        print(json.dumps(event), file=self._output, flush=True)

    def connected(self) -> None:
        living = self._living()
        self.send(event="connected", ip=living[self._own_id]["NodeManagerAddress"], nodes=len(living))

    def _living(self) -> dict[str, dict[str, Any]]:
        return {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}

    def take(self, command: dict[str, Any]) -> None:
        self._task = command

    def look(self) -> None:
        """Reports nodes that are gone and functions that ended; starts actors on nodes that have none."""
        living = self._living()
        for node_id in [node_id for node_id in self._nodes if node_id not in living]:
            self.send(event="ended", node=self._nodes.pop(node_id).name, why="its Ray node is dead")
        for node in self._nodes.values():
            if node.result is not None and self._ray.wait([node.result], timeout=0)[0]:
                self._end(node)
        for node_id, found in living.items():
            if node_id not in self._nodes and node_id != self._own_id:
                self._nodes[node_id] = RayNode(self._name(found["NodeManagerAddress"], node_id), node_id)
        if self._task is not None:
            for node in self._nodes.values():
                if node.result is None and time.monotonic() >= node.start_at:
                    self._start(node, self._task)

    def drain(self) -> None:
        """Waits shortly for functions that are about to return: Ray kills what runs when this process leaves."""
        if running := [node.result for node in self._nodes.values() if node.result is not None]:
            self._ray.wait(running, num_returns=len(running), timeout=DRAIN_S)

    def _name(self, ip: str, node_id: str) -> str:
        """Returns the address of a node, with its id where Ray still knows, or has, another node of that address."""
        return ip if all(node.name != ip for node in self._nodes.values()) else f"{ip}-{node_id[:6]}"

    def _start(self, node: RayNode, task: dict[str, Any]) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        options = {"num_cpus": 1, "max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": there}
        options["runtime_env"] = SEES_GPUS
        node.actor = self._ray.remote(OnNode).options(**options).remote()
        arguments = {**task["arguments"], "name": node.name}
        node.result = node.actor.run.remote(task["entry"], arguments, task["environment"])

    def _end(self, node: RayNode) -> None:
        try:
            answer = self._ray.get(node.result)
        except self._ray.exceptions.RayActorError:
            answer = {"why": "Ray reports that its process died", "again": True}
        except Exception as error:  # what it runs cannot be imported there, or failed
            answer = {"why": f"{type(error).__name__}: {error}".strip().splitlines()[-1], "again": True}
        node.result = node.actor = None
        node.start_at = time.monotonic() + (RETRY_S if answer["again"] else float("inf"))
        self.send(event="ended", node=node.name, why=answer["why"])


class OnNode:
    """The actor of a node."""

    def run(self, entry: str, arguments: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
        """Calls "module:function" in the main thread of this process; returns its text, and whether to run it again."""
        os.environ.update(environment)
        module, _, function = entry.partition(":")
        answer: dict[str, Any] = getattr(importlib.import_module(module), function)(**arguments)
        return answer


def import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise Unusable(f"Ray is needed, but {error}. Install it: {INSTALL}") from error
    numbers = tuple(int(number) for number in ray.__version__.split(".")[:2])
    if numbers < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise Unusable(f"Ray {ray.__version__} is installed; {least} or newer is needed, for its security. {INSTALL}")
    return ray


def connect(ray: Any, address: str, closing: contextlib.ExitStack) -> None:
    """Connects to the cluster at `address`, or starts a local one if it is ""; `closing` undoes that."""
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if not address:
        folder = closing.enter_context(tempfile.TemporaryDirectory(prefix="echelon-ray-", ignore_cleanup_errors=True))
        options |= {"num_cpus": 1, "include_dashboard": False, "object_store_memory": LOCAL_STORE_BYTES}
        options |= {"_temp_dir": folder, "_node_ip_address": "127.0.0.1"}
    elif address != "auto":
        check_reachable(address)
    closing.callback(ray.shutdown)
    try:
        ray.init(address=address or "local", **options)
    except ray.exceptions.AuthenticationError as error:
        raise Unusable(f"Ray has no token here: put the token of the cluster into {TOKENS}") from error
    except (ConnectionError, RuntimeError, ValueError) as error:
        causes = f"no cluster runs there, its token differs from that of {TOKENS}, or this host is not one of its nodes"
        raise Unusable(
            f"Ray cannot connect to {address or 'a local cluster'}: {error}. One of these: {causes}"
        ) from error


def check_reachable(address: str) -> None:
    """Raises Unusable if nothing listens at HOST:PORT; Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), REACH_S).close()
    except (OSError, ValueError) as error:
        raise Unusable(
            f"there is no Ray cluster at {address}: {error}. `ray start --head` prints its address"
        ) from error


def prepare_environment(address: str) -> None:
    """Sets what Ray reads when it is imported; raises Unusable without token authentication."""
    os.environ.update(QUIET)
    if not address:  # it listens on all interfaces, so it needs a token, too: one that only its processes know
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": os.urandom(32).hex()}
    elif os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        raise Unusable(NO_MODE)


def main() -> None:
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints goes to the log
    [address] = sys.argv[1:]
    try:
        with contextlib.ExitStack() as closing:
            prepare_environment(address)
            ray = import_ray()
            connect(ray, address, closing)
            driver = Driver(ray, output)
            driver.connected()
            follow(driver)
            driver.drain()
    except Unusable as error:
        print(json.dumps({"event": "failed", "text": str(error)}), file=output, flush=True)


def follow(driver: Driver) -> None:
    """Looks at the cluster until the starter closes our input."""
    buffer = b""
    while True:
        if select.select([0], [], [], LOOK_S)[0]:
            if not (data := os.read(0, 1 << 16)):
                return
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                driver.take(json.loads(line))
        driver.look()


if __name__ == "__main__":
    main()
