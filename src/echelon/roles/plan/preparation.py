"""Prepares a run before its folder and its roles exist: checks it, finds its spaces and chooses its acting mode."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

from echelon import config_io, errors
from echelon.config import TrainConfig, replace
from echelon.control_groups import num_cores
from echelon.engines.inline import InlineEngine
from echelon.engines.local import LocalEngine
from echelon.engines.process import CRASHES, INHERITED, ProcessSpec
from echelon.errors import ConfigError, RunError
from echelon.hosts.engine import HostsEngine
from echelon.hosts.members import Host, actors_text
from echelon.hosts.quorum import Quorum
from echelon.memory_check import check_fits, check_processes, free_memory
from echelon.names import absolute, describe_callable, short_name, text_of
from echelon.roles.context import Context
from echelon.roles.plan.choice import Choice, choose_acting
from echelon.roles.plan.findings import PREPARED, USER_LAYOUT, Prepared
from echelon.roles.plan.memory import PreparedMemory
from echelon.roles.plan.replay import ReplayPlan
from echelon.roles.plan.stages import Stages
from echelon.roles.plan.start import PREPARATION, roles_of, with_nodes
from echelon.roles.user_objects import UserObjects
from echelon.runs.folder import check_new, default_run_dir
from echelon.transport.secret import secret_for
from echelon.world.exits import take_exits
from echelon.world.node import Node

LOOK_S = 0.05
MAX_PREPARATIONS = 3  # of a preparation that is killed from outside
AnyEngine = InlineEngine | LocalEngine


def prepare(
    config: TrainConfig,
    session: Path,
    engine: AnyEngine,
    world: Node,
    generation: int,
    started_at: float,
    stages: Stages,
    user_objects: UserObjects | None = None,
) -> tuple[Context, Choice]:
    """Checks a run and creates its shared memory. Returns its context and the chosen acting mode."""
    config = with_nodes(with_whole_paths(config), engine)
    text = short_name(config.env.id) or "workers"
    if config.engine != "inline":
        config = config_io.map_callables(config, _importable)
    if config.has_workers:
        secret_for(config.workers.address)
    run_dir = Path(config.run.dir or default_run_dir(config.preset, text, f"seed{config.seed}"))
    if generation == 0 and config.run.dir:
        check_new(run_dir)
    if config.run.fallback_dir and not os.access(f"{config.run.fallback_dir}/", os.W_OK):
        raise ConfigError(
            f"run.fallback_dir={config.run.fallback_dir} is not a folder that can be written. Create it, or leave it "
            "unset for the temporary folder."
        )
    chosen = _describe_user_policy(config, session, user_objects)
    prepared = _find_out(config, session, engine, world, generation, stages, user_objects)
    for warning in prepared.warnings:
        stages.report(f"warning: {warning}")
    learner = replace(config.learner, threads=prepared.threads)
    config = replace(config, learner=learner, workers=replace(config.workers, address=prepared.address))
    context = Context(
        name="coordinator",
        index=0,
        incarnation=0,
        generation=generation,
        train=config,
        spaces=prepared.spaces,
        state_shapes=prepared.state_shapes,
        session=session,
        address=world.host_address,
        run_dir=run_dir.resolve() if ".." in run_dir.parts else run_dir.absolute(),  # a link stays, as it may move
        started_at=started_at,
        shares_process=config.engine == "inline",
        hostname=config.hosts.hostname if config.is_spread else "127.0.0.1",
        user_objects=user_objects,
    )
    if config.experience == "replay":
        ReplayPlan(context).check()
    choice = chosen or _choose(context, prepared, stages)
    context = replace_fields(context, train=replace(config, acting=replace(config.acting, mode=choice.mode)))
    memory = PreparedMemory(context, prepared)
    stages.begin("memory", "creating the shared memory")
    _make(memory, stages.report)
    if isinstance(engine, HostsEngine):
        stages.begin("hosts")
        began = time.monotonic()
        quorum = Quorum(config.hosts.count, config.hosts.min_actors)
        counts = memory.slot_counts() if not config.is_spread else None
        engine.gather(memory.assignment(), quorum, counts, memory.carrier_file, stages.report, stages.look)
        stages.report(placement_table(context.train, engine.placement(), prepared.device))
        waited_s = time.monotonic() - began  # does not count towards --minutes
        context = replace_fields(context, started_at=context.started_at + waited_s)
    return context, choice


def world_address(config: TrainConfig, session: Path) -> str:
    """Returns the address of the coordinator's world."""
    return f"ipc://{session}/world" if config.engine != "inline" else f"inproc://{session.name}"


def _describe_user_policy(config: TrainConfig, session: Path, user_objects: UserObjects | None) -> Choice | None:
    """Writes the layout of the user policy's state, if there is one. Returns local acting: workers act with it."""
    if user_objects is None or user_objects.policy is None:
        if config.algorithm.is_users:
            raise ConfigError(
                f"{config.run.dir or 'this run'} trains a user policy: start it from the program that has it "
                "(AsyncLearningNode, with resume=True to resume)."
            )
        return None
    from echelon.roles.user_policy import StateLayout, state_of

    layout = StateLayout.of(state_of(user_objects.policy))
    (session / USER_LAYOUT).write_text(json.dumps(layout.to_json()))
    return Choice("local", "workers act with the user policy")


def _find_out(
    config: TrainConfig,
    session: Path,
    engine: AnyEngine,
    world: Node,
    generation: int,
    stages: Stages,
    user_objects: UserObjects | None,
) -> Prepared:
    """Runs the preparation and returns its result. Raises its error if it fails; repeats it if it is killed."""
    spaces = user_objects.spaces if user_objects is not None else None
    values = {
        "train": config if engine.is_here(PREPARATION) else config_io.to_json(config),
        "session": str(session),
        "address": world.host_address,
        "generation": generation,
        "spaces": spaces.to_json() if spaces is not None else None,
    }
    spec = ProcessSpec(PREPARATION, "echelon.roles.plan.sizing:preparation", values, INHERITED)
    for _ in range(MAX_PREPARATIONS):
        stages.begin("imports", "importing torch")
        engine.start(spec)
        while not (exits := take_exits(engine, world)):
            if engine.pid(PREPARATION) is not None:
                waits = config.has_workers and config.workers.spaces == "worker"  # for a worker, which it announces
                stages.begin("environment", "" if waits else f"checking {text_of(config.env.id)}")
            stages.look()
            engine.run(world, LOOK_S)
        [gone] = exits
        if gone.failure is not None and gone.failure.expected:
            known: Any = getattr(errors, gone.failure.kind, RunError)
            raise known(gone.failure.message)
        if not gone.ended_with and (not gone.signal or gone.signal in CRASHES):
            break  # not killed from outside
    if gone.signal or gone.code or not (session / PREPARED).exists():  # a crash, or the environment called exit
        more = f"\n{gone.failure.traceback}" if gone.failure is not None else ""
        raise RunError(
            "the run could not be prepared: the process that reads the environment's spaces and creates the model "
            f"{gone.cause}. Check env.id={text_of(config.env.id)} and --network.name.{more}"
        )
    return Prepared.read(session / PREPARED)


def _choose(context: Context, prepared: Prepared, stages: Stages) -> Choice:
    """Chooses the acting mode and makes the checks that depend on it."""
    config = context.train
    choice = choose_acting(context, prepared)
    if choice.mode != config.acting.mode and not config.has_workers:
        stages.report(f"acting: {choice.mode} ({choice.reason})")
    if choice.mode == "central" and config.acting.transport == "tcp":
        secret_for(config.acting.address)
    if config.experience == "replay" and config.replay.transport == "tcp":
        secret_for(config.replay.address)
    return choice


def _make(memory: PreparedMemory, report: Callable[[str], None]) -> None:
    context = memory.context
    if not context.shares_process:
        num_actors, hosts = context.train.actor.num_actors, context.train.hosts
        at_head = num_actors // hosts.count
        if hosts.min_actors:
            at_head = min(at_head, num_cores())
        check_processes(len(roles_of(context.train)) - num_actors + at_head, free_memory())
    sizes = "--envs-per-actor, --actor.trajectory or --actor.slots"
    check_fits(memory.shared_bytes(), "the run's shared memory", free_memory(context.session.parent), sizes)
    for text in memory.make():
        report(text)


def placement_table(config: TrainConfig, hosts: Sequence[Host], device: str) -> str:
    """Returns which roles each host runs, as a table; `device` is that of the learner."""
    rows = [("host", "cores", "roles")]
    elsewhere = {name for host in hosts for name in host.roles}
    others = [role for role in roles_of(config) if role.kind != "actor" and role.name not in elsewhere]
    for host in hosts:
        roles = [*host.roles]
        if host is hosts[0]:
            roles = [f"{role.name} on {device}" if role.kind == "learner" else role.name for role in others]
        roles += [actors_text(host.actors)] if host.actors else []
        rows.append((host.name, str(host.cores), ", ".join(roles)))
    if idle := sorted(set(range(config.actor.num_actors)).difference(*(host.actors for host in hosts))):
        rows.append(("none yet", "", actors_text(idle)))
    width = max(len(name) for name, _, _ in rows)
    return "\n".join(f"  {name:<{width}}  {cores:>5}  {roles}" for name, cores, roles in rows)


def _importable(path: str, function: Callable[..., Any]) -> str:
    """Returns the name of `function`, the value of the field `path`, for other processes."""
    try:
        return describe_callable(function)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def with_whole_paths(config: TrainConfig) -> TrainConfig:
    """Returns `config` with absolute paths of files, so that the run can be resumed from any folder."""
    run = config.run
    if run.fallback_dir:
        run = replace(run, fallback_dir=str(Path(run.fallback_dir).absolute()))
    wrappers = tuple(map(_absolute, config.env.wrappers))
    env = replace(config.env, id=_absolute(config.env.id), wrappers=wrappers)
    return replace(config, env=env, run=run, network=replace(config.network, name=_absolute(config.network.name)))


def _absolute(target: str | Callable[..., Any]) -> str | Callable[..., Any]:
    return absolute(target) if isinstance(target, str) else target
