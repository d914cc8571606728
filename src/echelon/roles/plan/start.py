"""What a run needs before torch is there: its engine, its title, and whether it can end. The fork server imports torch
while the caller does, so nothing heavy is imported at the top."""

from __future__ import annotations

import os
from pathlib import Path

from echelon.config import TrainConfig
from echelon.engines.hosted import HostedEngine
from echelon.engines.inline import InlineEngine
from echelon.engines.local import COMPILER, LocalEngine
from echelon.errors import ConfigError
from echelon.hosts.engine import HostsEngine
from echelon.names import text_of

PRELOAD = (
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
PRELOAD_WITH_WORKERS = ("echelon.roles.learner", "echelon.roles.episode_source", "echelon.roles.gateway", COMPILER)


def make_engine(config: TrainConfig, session: Path, *, has_objects: bool) -> InlineEngine | LocalEngine:
    """What starts and ends the roles; with objects of the caller's program the learner stays in its process."""
    if config.engine == "inline":
        return InlineEngine()
    preload = PRELOAD_WITH_WORKERS if config.has_workers else PRELOAD
    if config.engine == "hosts":
        hosts = config.hosts
        return HostsEngine(str(session), (*preload, "echelon.roles.carrier"), hosts.address, hosts.lease_s)
    return HostedEngine(str(session), preload, ["learner"]) if has_objects else LocalEngine(str(session), preload)


def title(config: TrainConfig) -> str:
    learners = f" with {config.learner.num_learners} learners" if config.learner.num_learners > 1 else ""
    return f"{config.preset} on {text_of(config.env.id) or 'workers'}{learners}"


def check_stop(config: TrainConfig) -> None:
    """Refuses a run that would never end."""
    stop = config.stop
    if not (stop.steps or stop.minutes or stop.episodes or stop.until_return is not None):
        episodes = "--episodes E, " if config.has_workers else ""
        raise ConfigError(f"the run would never end: give {episodes}--steps N, --minutes M or --until-return R.")


def episodes_option(config: TrainConfig) -> str:
    """What a run that is counted in episodes can be given beside the other stop conditions."""
    return "--episodes, " if config.has_workers else ""


def num_cores_of(config: TrainConfig) -> int:
    """Cores that a run can keep busy: one process uses a second one only with more threads of the learner."""
    return (config.learner.threads or 1) if config.engine == "inline" else len(os.sched_getaffinity(0))


def is_one_process(config: TrainConfig) -> bool:
    """Whether all roles run in the caller's process."""
    return config.engine == "inline"


def find_bottleneck(config: TrainConfig, shares: dict[str, dict[str, float]], *, on_gpu: bool) -> str:
    """What limits the run, by the shares of time of its roles, and what to change; "" if that is not known."""
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
