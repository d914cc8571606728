"""What comes before a run: all that can be checked before a folder or a role exists, its spaces, and who acts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from echelon.config import TrainConfig, replace
from echelon.engines.inline import InlineEngine
from echelon.engines.local import LocalEngine
from echelon.envs.make import probe_spaces
from echelon.errors import ConfigError
from echelon.hosts.engine import HostsEngine, streams_of_hosts
from echelon.memory_check import check_fits, check_processes, free_memory
from echelon.names import absolute, describe_callable, text_of
from echelon.roles.context import Context
from echelon.roles.pending_workers import await_spaces
from echelon.roles.placement import pick_device
from echelon.roles.plan.choice import Choice, choose_acting
from echelon.roles.plan.layouts import minibatch_samples
from echelon.roles.plan.parts import Plan, roles_of
from echelon.roles.plan.placement import learner_threads
from echelon.roles.user_objects import UserObjects
from echelon.roles.user_policy import StateLayout, state_of
from echelon.runs.checkpoint import find_weights
from echelon.runs.folder import check_new, default_run_dir
from echelon.schema import Spaces
from echelon.transport.secret import check_secret, secret_from_environment


def prepare(
    config: TrainConfig,
    session: Path,
    engine: InlineEngine | LocalEngine,
    generation: int,
    started_at: float,
    report: Callable[[str], None],
    user_objects: UserObjects | None = None,
) -> tuple[Context, Choice]:
    """The context of a run that can be, its memory made; and who chooses actions in it."""
    config = _with_whole_paths(config)
    text = text_of(config.env.id) or "workers"
    if config.engine != "inline" and not isinstance(config.env.id, str):
        config = replace(config, env=replace(config.env, id=describe_callable(config.env.id)))
    if config.has_workers:
        check_secret(config.workers.address, secret_from_environment())
    own = (
        StateLayout.of(state_of(user_objects.policy))
        if user_objects is not None and user_objects.policy is not None
        else None
    )
    spaces, config = _find_spaces(config, own, user_objects, report)
    short = text if ".py:" not in text else Path(text).name.replace(".py:", "-")
    run_dir = Path(config.run.dir) if config.run.dir else default_run_dir(config.preset, short)
    if generation == 0:
        check_new(run_dir)
    context = Context(
        name="coordinator",
        index=0,
        incarnation=0,
        generation=generation,
        train=config,
        spaces=spaces,
        state_shapes=(),
        session=session,
        address=f"ipc://{session}/world" if config.engine != "inline" else f"inproc://{session.name}",
        run_dir=run_dir.absolute(),
        started_at=started_at,
        shares_process=config.engine == "inline",
        user_objects=user_objects,
    )
    if own is not None:
        Plan(context).user_layout_file.write_text(json.dumps(own.to_json()))
        choice = Choice("local", "the policy is the user's own")
    else:
        context, choice = _choose(context, engine, report)
    _make_memory(context, report)
    if isinstance(engine, HostsEngine):
        plan, streams = Plan(context), streams_of_hosts(config.actor.num_actors, config.hosts.count)
        engine.gather(plan.assignment(), streams, plan.carrier_file, report)
    return context, choice


def _find_spaces(
    config: TrainConfig, own: StateLayout | None, user_objects: UserObjects | None, report: Callable[[str], None]
) -> tuple[Spaces, TrainConfig]:
    """What is observed and done, and the configuration with the address that workers know by then."""
    if config.algorithm.is_users and own is None:
        raise ConfigError(
            f"{config.run.dir or 'this run'} trains a policy of its user's own: run the program that brings it "
            "(AsyncLearningNode, with resume=True to go on)."
        )
    if user_objects is not None and user_objects.spaces is not None:
        return user_objects.spaces, config
    if config.has_workers and config.workers.spaces == "worker":
        spaces, address = await_spaces(config, own, report)
        return spaces, replace(config, workers=replace(config.workers, address=address))
    return probe_spaces(config.env), config


def _choose(
    context: Context, engine: InlineEngine | LocalEngine, report: Callable[[str], None]
) -> tuple[Context, Choice]:
    """Checks what depends on the model, and chooses who acts and with how many threads the learner learns."""
    config, model = context.train, Plan(context).model
    threads = learner_threads(config, model.parameters.numel(), minibatch_samples(config))
    config = replace(config, learner=replace(config.learner, threads=threads))
    context = dataclasses.replace(context, train=config)
    if config.run.init_from and context.generation == 0:
        model.load_weights(find_weights(config.run.init_from), config.run.init_from)
    if config.experience == "replay":
        Plan(context).replay.check()
    choice = choose_acting(context, engine, model)
    if choice.mode != config.acting.mode and not config.has_workers:
        report(f"acting: {choice.mode} ({choice.reason})")
    if choice.mode == "central":
        pick_device(config.acting.device, model.parameters.numel(), "--acting.device")
        if config.acting.transport == "tcp":
            check_secret(config.acting.address, secret_from_environment())
    if config.experience == "replay" and config.replay.transport == "tcp":
        check_secret(config.replay.address, secret_from_environment())
    config = replace(config, acting=replace(config.acting, mode=choice.mode))
    return dataclasses.replace(context, train=config, state_shapes=model.network.state_shapes), choice


def _make_memory(context: Context, report: Callable[[str], None]) -> None:
    plan = Plan(context)
    if not context.shares_process:
        elsewhere = context.train.actor.num_actors - actors_at_head(context.train)
        check_processes(len(roles_of(context.train)) - elsewhere, free_memory())
    sizes = "--envs-per-actor, --actor.trajectory or --actor.slots"
    check_fits(plan.shared_bytes(), "the run's shared memory", free_memory(context.session.parent), sizes)
    for text in plan.make():
        report(text)


def actors_at_head(config: TrainConfig) -> int:
    """The actors on this host."""
    return len(streams_of_hosts(config.actor.num_actors, config.hosts.count)[0])


def _with_whole_paths(config: TrainConfig) -> TrainConfig:
    """`config` with files named by their whole path, so that the run can be gone on with from any folder."""
    env = replace(config.env, wrappers=tuple(absolute(name) for name in config.env.wrappers))
    if isinstance(env.id, str):
        env = replace(env, id=absolute(env.id))
    return replace(config, env=env, network=replace(config.network, name=absolute(config.network.name)))
