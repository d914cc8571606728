"""The parts of a run that follow from its configuration: engine, roles, title, stop conditions. Needs no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from echelon.config import TrainConfig
from echelon.engines.hosted import HostedEngine
from echelon.engines.inline import InlineEngine
from echelon.engines.local import COMPILER, LocalEngine
from echelon.errors import ConfigError
from echelon.hosts.engine import HostsEngine
from echelon.names import text_of

PREPARATION = "preparation"
PRELOAD = (
    "echelon.roles.plan.sizing",
    "echelon.roles.learner",
    "echelon.roles.learners",
    "echelon.roles.actor",
    "echelon.roles.inference",
    "echelon.roles.evaluator",
    "echelon.roles.queue_source",
    "echelon.roles.replay_part",
    "echelon.roles.replay_experience",
    "echelon.roles.gradient_source",
    "echelon.roles.gradient_experience",
    "echelon.roles.central_acting",
    COMPILER,
)
PRELOAD_WITH_WORKERS = (
    "echelon.roles.plan.sizing",
    "echelon.roles.pending_workers",
    "echelon.roles.learner",
    "echelon.roles.episode_source",
    "echelon.roles.gateway",
    COMPILER,
)

EVALUATOR_NICE = 10
NUM_EVALUATIONS = 10  # evaluations of workers in the shown mean, as each of them is a single episode


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """A role of the run. `kind` names both the module of the role and the function in it that creates the role."""

    name: str
    kind: str
    index: int = 0
    nice: int = 0


def roles_of(config: TrainConfig) -> list[RoleSpec]:
    """Returns the roles of a run in the order in which they are started."""
    roles = [RoleSpec(name, "learner", index) for index, name in enumerate(config.learner_names)]
    if config.has_workers:
        return [*roles, RoleSpec("gateway", "gateway")]
    if config.engine == "hosts":
        roles.append(RoleSpec("carrier", "carrier"))
    if config.algorithm.experience == "replay" and config.replay.transport == "tcp":
        roles.append(RoleSpec("shards-0", "shards"))
    if config.acting.mode == "central":
        roles += [RoleSpec(f"inference-{index}", "inference", index) for index in range(config.acting.servers)]
    roles += [RoleSpec(f"actor-{index}", "actor", index) for index in range(config.actor.num_actors)]
    if config.evaluation.interval_s > 0:
        roles.append(RoleSpec("evaluator", "evaluator", nice=EVALUATOR_NICE))
    return roles


def num_evaluations(config: TrainConfig) -> int:
    """Returns how many of the newest evaluations are averaged for the shown return."""
    return NUM_EVALUATIONS if config.has_workers else 1


def restored_text(config: TrainConfig, place: str, steps: int, updates: int) -> str:
    """Returns the message about learners that restart from `place`, having lost `steps` and `updates`."""
    who = "the learners resume" if config.learner.num_learners > 1 else "the learner resumes"
    lost = f"{updates:,} updates"
    if config.algorithm.experience != "replay":  # with replay, actors count the steps, so none are lost
        lost = f"{max(steps, 0):,} steps and {lost}"
    return f"{who} from {place}" + (f"; {lost} since then are lost" if updates > 0 else "")


def make_engine(config: TrainConfig, session: Path, *, has_objects: bool) -> InlineEngine | LocalEngine:
    """Returns the engine that starts and ends the roles.

    If the caller passes objects (`has_objects`), the learner runs in the caller's process. So does the preparation,
    unless it waits for a worker: an environment may be registered only there.
    """
    if config.engine == "inline":
        return InlineEngine()
    preload = PRELOAD_WITH_WORKERS if config.has_workers else PRELOAD
    if config.engine == "hosts":
        hosts = config.hosts
        return HostsEngine(str(session), (*preload, "echelon.roles.carrier"), hosts.address, hosts.lease_s)
    if not has_objects:
        return LocalEngine(str(session), preload)
    here = ["learner"] if config.workers.spaces == "worker" else ["learner", PREPARATION]
    return HostedEngine(str(session), preload, here)


def title(config: TrainConfig) -> str:
    learners = f" with {config.learner.num_learners} learners" if config.learner.num_learners > 1 else ""
    return f"{config.preset} on {text_of(config.env.id) or 'workers'}{learners}"


def check_stop(config: TrainConfig) -> None:
    """Raises ConfigError if the run has no stop condition."""
    stop = config.stop
    if not (stop.steps or stop.minutes or stop.episodes or stop.until_return is not None):
        episodes = "--episodes E, " if config.has_workers else ""
        raise ConfigError(f"the run would never end: give {episodes}--steps N, --minutes M or --until-return R.")


def episodes_option(config: TrainConfig) -> str:
    """Returns the additional stop option of runs with workers, for messages; "" for other runs."""
    return "--episodes, " if config.has_workers else ""


def num_cores_of(config: TrainConfig) -> int:
    """Returns the number of cores that a run can use. A single process uses as many as its learner has threads."""
    return (config.learner.threads or 1) if config.engine == "inline" else len(os.sched_getaffinity(0))


def is_one_process(config: TrainConfig) -> bool:
    """Returns whether all roles run in the caller's process."""
    return config.engine == "inline"


def find_bottleneck(config: TrainConfig, shares: dict[str, dict[str, float]], *, on_gpu: bool) -> str:
    """Returns what limits the run and what to change, by the time shares of its roles; "" if it is not known."""
    from echelon.runs.bottleneck import bottleneck, workers_bottleneck

    if config.has_workers:
        return workers_bottleneck(shares["learner"]) if "learner" in shares else ""
    if not shares:
        return ""
    inline = is_one_process(config)
    return bottleneck(
        shares,
        num_cores=1 if inline else len(os.sched_getaffinity(0)),
        num_processes=1 if inline else len(shares),
        lag_bounded=config.learner.max_lag is not None,
        replayed=config.algorithm.experience == "replay",
        on_gpu=on_gpu,
    )
