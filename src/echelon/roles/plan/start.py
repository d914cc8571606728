"""The parts of a run that follow from its configuration: engine, roles, title, stop conditions. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.config import EnvConfig, TrainConfig, replace
from echelon.control_groups import num_cores
from echelon.engines.hosted import HostedEngine
from echelon.engines.inline import InlineEngine
from echelon.engines.local import LocalEngine
from echelon.engines.process import IDLE
from echelon.errors import ConfigError
from echelon.families import is_atari, is_mario
from echelon.names import check_file, short_name

if TYPE_CHECKING:
    from echelon.hosts.engine import HostsEngine

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
)
PRELOAD_WITH_WORKERS = (
    "echelon.roles.plan.sizing",
    "echelon.roles.pending_workers",
    "echelon.roles.learner",
    "echelon.roles.episode_source",
    "echelon.roles.gateway",
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


EVALUATOR = RoleSpec("evaluator", "evaluator", nice=EVALUATOR_NICE)


def roles_of(config: TrainConfig) -> list[RoleSpec]:
    """Returns the roles of a run in the order in which they are started."""
    roles = [RoleSpec(name, "learner", index) for index, name in enumerate(config.learner_names)]
    if config.has_workers:
        return [*roles, RoleSpec("gateway", "gateway")]
    if config.has_hosts and not config.is_spread:  # otherwise no trajectory leaves its host
        roles.append(RoleSpec("carrier", "carrier"))
    if config.algorithm.experience == "replay" and config.replay.transport == "tcp":
        roles.append(RoleSpec("shards-0", "shards"))
    if config.acting.mode == "central":
        roles += [RoleSpec(f"inference-{index}", "inference", index) for index in range(config.acting.servers)]
    nice = IDLE if _yields(config) else 0
    roles += [RoleSpec(f"actor-{index}", "actor", index, nice) for index in range(config.actor.num_actors)]
    if config.evaluation.interval_s > 0 and config.evaluation.episodes:
        roles.append(EVALUATOR)
    return roles


def is_evaluated_at_end(config: TrainConfig) -> bool:
    """Returns whether the final weights of a run are evaluated. Those of a run with workers are not: workers do it."""
    return config.evaluation.episodes > 0 and not config.has_workers


def roles_to_stop(config: TrainConfig) -> list[str]:
    """Returns the roles that stop before the final weights are evaluated.

    None if there are other hosts: their agents watch the roles, and dismissing them belongs to the end of the run.
    """
    return [] if config.has_hosts else [role.name for role in roles_of(config) if role != EVALUATOR]


def roles_of_host(config: TrainConfig, number: int) -> list[RoleSpec]:
    """Returns the roles that another host has besides its actors: an inference server near them."""
    is_central = config.acting.mode == "central"
    return [RoleSpec(f"inference-{number}", "inference", number)] if is_central else []


def _yields(config: TrainConfig) -> bool:
    """Returns whether actors yield to the learner: if it computes with all cores, and waits for them in between.

    Its threads wait for each other, so an actor on one of the cores stops all of them. The actors run when the learner
    waits for them. Super Mario Bros on two cores is a quarter faster.
    """
    return config.replay.exact and config.learner.threads >= num_cores() > 1


def ranks_of(config: TrainConfig) -> dict[str, int]:
    """Returns the ranks by role that a run with a log of its episodes reports: the learners first, then the actors."""
    if not config.run.log_interval:
        return {}
    ranked = [role.name for role in roles_of(config) if role.kind in ("learner", "actor")]
    return {name: rank for rank, name in enumerate(ranked)}


def num_evaluations(config: TrainConfig) -> int:
    """Returns how many of the newest evaluations are averaged for the shown return."""
    return NUM_EVALUATIONS if config.has_workers else 1


def num_episodes(config: TrainConfig, episodes: int, updates: int) -> int:
    """Returns the number of episodes by which a run may be stopped, given how many ended and the number of updates.

    With workers these are the episodes for which all updates have been made.
    """
    return updates // config.workers.updates if config.has_workers else episodes


def num_first_steps(config: TrainConfig) -> int:
    """Returns the environment steps that the first update needs; 0 with replay, which needs transitions instead."""
    steps = config.batch_trajectories * config.actor.trajectory * config.actor.envs_per_actor
    return 0 if config.experience == "replay" else steps


def loses_steps(config: TrainConfig) -> bool:
    """Returns whether a restart of the learners loses steps. With replay the actors count them, so none are lost."""
    return config.experience != "replay"


def restored_text(config: TrainConfig, place: str, steps: int, updates: int) -> str:
    """Returns the message about learners that restart from `place`, having lost `steps` and `updates`."""
    who = "the learners resume" if config.learner.num_learners > 1 else "the learner resumes"
    lost = f"{updates:,} updates"
    if loses_steps(config):
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
    if config.has_hosts:
        return _make_hosts_engine(config, session, (*preload, "echelon.roles.carrier"))
    if not has_objects:
        return LocalEngine(str(session), preload)
    here = ["learner"] if config.workers.spaces == "worker" else ["learner", PREPARATION]
    return HostedEngine(str(session), preload, here)


def _make_hosts_engine(config: TrainConfig, session: Path, preload: tuple[str, ...]) -> HostsEngine:
    from echelon.engines.ray_cluster import RayCluster
    from echelon.hosts.engine import HostsEngine
    from echelon.hosts.ray_engine import RayEngine, make_address

    hosts = config.hosts
    if config.engine == "hosts":
        return HostsEngine(str(session), preload, hosts.address, hosts.lease_s)
    cluster = RayCluster(hosts.ray_address, session / "ray.log")
    address = make_address(hosts.address, cluster) if hosts.ray_address else hosts.address
    return RayEngine(str(session), preload, cluster, address, hosts.lease_s, config.shm_dir)


def with_nodes(config: TrainConfig, engine: InlineEngine | LocalEngine) -> TrainConfig:
    """Returns `config` with the address of the head, and the number of hosts, that follow from a Ray cluster.

    The run waits for all nodes, but not for more than it has actors, unless `hosts.count` or `hosts.min_actors` say
    how many suffice.
    """
    if config.engine != "ray":
        return config
    from echelon.hosts.ray_engine import RayEngine

    assert isinstance(engine, RayEngine)
    hosts, num = config.hosts, min(engine.num_nodes, config.actor.num_actors)
    count = hosts.count if hosts.count > 1 or hosts.min_actors else num
    return replace(config, hosts=replace(hosts, address=engine.address, count=count))


def title(config: TrainConfig) -> str:
    learners = f" with {config.learner.num_learners} learners" if config.learner.num_learners > 1 else ""
    return f"{config.preset} on {short_name(config.env.id) or 'workers'}{learners}"


def preparation_text(config: TrainConfig) -> str:
    """Returns the first message of a run, which may end up to one batch after `stop.steps`."""
    actor, text = config.actor, f"preparing {title(config)}"
    is_larger = config.learner.batch == 0 and actor.exceed_envs
    if config.experience == "queue" and (config.stop.steps or is_larger):
        text += f", batches of {num_first_steps(config):,} steps"
        if is_larger:
            text += f" (with --actors {actor.total_envs}: {actor.trajectory * actor.total_envs:,})"
    return text


def check_stop(config: TrainConfig) -> None:
    """Raises ConfigError if the run has no stop condition."""
    stop = config.stop
    if not (stop.steps or stop.minutes or stop.episodes or stop.until_return is not None):
        from echelon.envs.make import check_id
        from echelon.runs.weights import weights_path

        for name in (config.env.id, config.network.name):  # mistakes there are reported first
            if isinstance(name, str):
                check_file(name)
        if isinstance(config.env.id, str):
            check_id(config.env.id)
        if config.run.init_from:
            weights_path(config.run.init_from)
        raise ConfigError(
            "the run would never end: give --steps N, --minutes M, --episodes E or --until-return R (in Python "
            "stop.steps=N)."
        )


def num_cores_of(config: TrainConfig) -> int:
    """Returns the number of cores that a run can use. A single process uses as many as its learner has threads."""
    return (config.learner.threads or 1) if config.engine == "inline" else num_cores()


def is_one_process(config: TrainConfig) -> bool:
    """Returns whether all roles run in the caller's process."""
    return config.engine == "inline"


def find_bottleneck(config: TrainConfig, shares: dict[str, dict[str, float]], figures: Mapping[str, Any]) -> str:
    """Returns what limits the run and what to change, by the time shares of its roles; "" if it is not known.

    `figures` are those of the summary. Shares say nothing about a run without updates, whose learner only waited.
    """
    from echelon.runs.bottleneck import bottleneck, workers_bottleneck

    if not figures["updates"]:
        return ""
    on_gpu = str(figures["device"]).startswith("cuda")
    if config.has_workers:
        if "learner" not in shares:
            return ""
        num_behind = figures["episodes"] - num_episodes(config, 0, figures["updates"])
        num_workers = int(figures["workers"].get("workers", 1))
        return workers_bottleneck(shares["learner"], num_behind, num_workers, on_gpu=on_gpu, has_gpu=has_gpu())
    if not shares:
        return ""
    inline, is_queue, actor = is_one_process(config), config.algorithm.experience == "queue", config.actor
    grows = is_queue and config.learner.batch == 0 and (actor.envs > 0 or actor.exceed_envs)
    return bottleneck(
        shares,
        num_cores=1 if inline else num_cores(),
        num_processes=1 if inline else len(shares),
        lag_bounded=config.learner.max_lag is not None,
        replayed=config.algorithm.experience == "replay",
        on_gpu=on_gpu,
        has_gpu=has_gpu(),
        vectorised=_is_vectorised(config.env),
        num_joined=actor.num_actors if grows else 0,
        smaller_batch="--envs-per-actor 0" if actor.envs else f"--actors {actor.total_envs}",
    )


def has_gpu() -> bool:
    """Returns whether this machine has a GPU for torch, by the files of its driver: NVIDIA's, AMD's or that of WSL."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or any(Path(name).exists() for name in ("/dev/kfd", "/dev/dxg"))


def _is_vectorised(env: EnvConfig) -> bool:
    """Returns whether one call steps all environments of an actor, as far as the configuration tells."""
    id = env.id if isinstance(env.id, str) else ""
    is_known = env.vector == "auto" and (is_atari(id) or is_mario(id))
    return env.vector == "vector_entry_point" or is_known or id.startswith("envpool:")
