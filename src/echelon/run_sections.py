"""The sections of the configuration about a run as a whole: evaluation, the run folder, its end, hosts, supervision."""

from __future__ import annotations

from typing import Annotated

from msgspec.structs import force_setattr

from echelon.fields import Section, doc, require, require_address

MIN_START_TIMEOUT_S = 10.0


class EvaluationConfig(Section, frozen=True):
    """Greedy evaluation during training and at its end, with separate seeds."""

    SECTION = "evaluation"

    interval_s: Annotated[float, doc("time between two evaluations; 0: only one at the end", "s", ge=0)] = 60.0
    episodes: Annotated[int, doc("episodes per evaluation; 0: no evaluation at all", "episodes", ge=0)] = 10
    limit_s: Annotated[
        float, doc("time limit of the evaluation at the end; it counts the episodes that have ended by then", "s", gt=0)
    ] = 60.0


class RunConfig(Section, frozen=True):
    """The run folder."""

    SECTION = "run"

    dir: Annotated[str, doc("the run folder (default: runs/PRESET-ENV-seedS-TIME)")] = ""
    checkpoint_interval_s: Annotated[float, doc("time between two checkpoints", "s", ge=0)] = 30.0
    keep_checkpoints: Annotated[
        int, doc("number of newest checkpoints that are kept, besides the best weights", ge=1)
    ] = 3
    init_from: Annotated[str, doc("run folder, checkpoint or weights file to take the initial weights from")] = ""
    log_interval: Annotated[
        int, doc("a line in the console and in episodes.log every so many episodes; 0: no log", "episodes", ge=0)
    ] = 0
    timeline: Annotated[
        bool, doc("record when each trajectory and each batch begins and ends, in timeline/ROLE.jsonl")
    ] = False
    fallback_dir: Annotated[
        str, doc("folder for the final checkpoint if the run folder is full (default: the temporary folder)")
    ] = ""


class StopConfig(Section, frozen=True):
    """When the run stops: as soon as one condition holds."""

    SECTION = "stop"

    steps: Annotated[
        int, doc("stop after this many environment steps, at the end of a batch; 0: no limit", "steps", ge=0)
    ] = 0
    minutes: Annotated[float, doc("stop after this time; 0: no limit", "minutes", ge=0)] = 0.0
    until_return: Annotated[float | None, doc("stop when the mean return of the last 100 episodes reaches this")] = None
    episodes: Annotated[
        int,
        doc("stop after this many episodes, with workers after learning from so many; 0: no limit", "episodes", ge=0),
    ] = 0


class HostsConfig(Section, frozen=True):
    """Several hosts, with `engine=hosts` or `ray`: the head, which runs the learner, and hosts whose agents join it."""

    SECTION = "hosts"

    count: Annotated[
        int, doc("number of hosts, including the head; with engine=ray, the least number of nodes", ge=1)
    ] = 1
    min_actors: Annotated[
        int,
        doc("actors that always run; the others run while the hosts have a core for each; 0: all always run", ge=0),
    ] = 0
    address: Annotated[str, doc("address the head listens on for host agents; port 0: any free port")] = (
        "tcp://127.0.0.1:0"
    )
    bulk_port: Annotated[
        int, doc("second port of the head, for trajectories and weights; 0: any free port", ge=0, le=65_535)
    ] = 0
    lease_s: Annotated[
        float, doc("a host that is silent for this long is given up; its actors start on other hosts", "s", ge=1)
    ] = 30.0
    ray_address: Annotated[
        str, doc("Ray cluster of engine=ray: auto, the one of this node, or HOST:PORT; unset: a local one for the run")
    ] = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if "://" not in self.address:
            force_setattr(self, "address", f"tcp://{self.address}")
        require_address(self.address, "hosts.address")
        if self.ray_address not in ("", "auto"):
            require(
                "://" not in self.ray_address,
                f"hosts.ray_address={self.ray_address} is not the address of a cluster. Write HOST:PORT, as `ray "
                "start` prints it, on one of its nodes.",
            )
            require_address(f"tcp://{self.ray_address}", "hosts.ray_address")

    @property
    def hostname(self) -> str:
        """The name or address of the head."""
        return self.address.removeprefix("tcp://").rpartition(":")[0]

    @property
    def bulk_address(self) -> str:
        """The address on which the head receives slots."""
        return f"{self.address.rpartition(':')[0]}:{self.bulk_port}"


class SupervisionConfig(Section, frozen=True):
    """How the coordinator handles roles that die or hang."""

    SECTION = "supervision"

    hang_timeout_s: Annotated[
        float,
        doc(
            "a role that makes no progress for this long counts as hung; four times as long to start or compile",
            "s",
            gt=0,
        ),
    ] = 30.0
    max_same_failures: Annotated[
        int, doc("the run ends when the same exception occurs this often within failure_window_s", ge=1)
    ] = 3
    failure_window_s: Annotated[float, doc("time window in which equal exceptions are counted", "s", ge=0)] = 60.0

    @property
    def start_timeout_s(self) -> float:
        """The hang timeout of a role without progress yet: imports, compilation, slow environments.

        It follows the hang timeout, but is never shorter than an ordinary start on a busy machine.
        """
        return max(MIN_START_TIMEOUT_S, 4.0 * self.hang_timeout_s)
