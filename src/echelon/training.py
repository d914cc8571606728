"""Train, resume and evaluate: what the command line does, as functions.

Nothing heavy is imported at the top: the fork server imports torch while this process does.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from echelon.config import StopConfig, TrainConfig
from echelon.engines.inline import InlineEngine
from echelon.engines.local import LocalEngine
from echelon.errors import ConfigError, EchelonError
from echelon.transport.session import check_room, create_session

if TYPE_CHECKING:
    from echelon.roles.choice import Choice
    from echelon.roles.context import Context
    from echelon.runs.folder import RunFolder
    from echelon.schema import Spaces

PRELOAD = ("echelon.roles.learner", "echelon.roles.inference", "echelon.roles.actor", "echelon.roles.evaluator")


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run came to: its summary, and the folder with everything else."""

    status: str  # solved, finished, stopped
    run_dir: Path
    summary: dict[str, Any]

    @property
    def return_mean(self) -> float | None:
        value: float | None = self.summary["return_mean"]
        return value


@dataclass(frozen=True, slots=True)
class Past:
    """What a resumed run has behind it."""

    epoch: int = 0
    wall_s: float = 0.0
    row: dict[str, Any] = field(default_factory=dict)  # where it stood


def train(config: TrainConfig, *, output: TextIO | None = None) -> RunResult:
    """Trains as `config` says and returns when a stop condition holds or the user interrupts."""
    return _run(config, Past(), output)


def resume(
    run_dir: str | Path,
    *,
    steps: int = 0,
    minutes: float = 0.0,
    until_return: float | None = None,
    output: TextIO | None = None,
) -> RunResult:
    """Goes on with the run in `run_dir` from its newest checkpoint; what is given replaces the old stop condition."""
    from echelon.roles.learner import stop_reason
    from echelon.runs.checkpoint import load_checkpoint, newest_intact
    from echelon.runs.folder import RunFolder

    folder = RunFolder.open(Path(run_dir))
    config = _read_config(folder)
    found = newest_intact(folder.checkpoints)
    if found is None:
        raise ConfigError(f"{run_dir} has no checkpoint to go on from. Train anew with another --run-dir.")
    tree = load_checkpoint(found[0])
    counters, wall_s = tree["counters"], tree["wall_s"]
    if steps or minutes or until_return is not None:
        config = replace(config, stop=StopConfig(steps, minutes, until_return))
    reason = stop_reason(config.stop, counters["env_steps"], counters["returns"], time.time() - wall_s)
    if reason:
        raise ConfigError(
            f"{run_dir} has reached its end ({_told(config.stop)}; it has {counters['env_steps']:,} steps and "
            f"{wall_s / 60:.1f} minutes behind it). Give a larger total with --steps, --minutes or --until-return."
        )
    config = replace(config, run=replace(config.run, dir=str(run_dir)))
    row = {name: counters[name] for name in ("env_steps", "episodes", "updates", "dropped", "return_max")}
    return _run(config, Past(int(tree["epoch"]) + 1, wall_s, row), output)


def _told(stop: StopConfig) -> str:
    texts = (("steps", stop.steps or None), ("minutes", stop.minutes or None), ("until-return", stop.until_return))
    return ", ".join(f"--{name} {value:g}" for name, value in texts if value is not None)


def _read_config(folder: RunFolder) -> TrainConfig:
    """The configuration of a run; what does not fit is told with the file that it stands in."""
    from echelon import config_io

    try:
        return config_io.from_json(folder.read_config())
    except ConfigError as error:
        raise ConfigError(f"{folder.path / 'config.json'} cannot be used: {error}") from error


def _run(config: TrainConfig, past: Past, output: TextIO | None) -> RunResult:
    """The whole life of a run: session, engine, validation, folder, coordinator, summary."""
    began, output = time.time(), output or sys.stdout
    _check_stop(config)
    tell = functools.partial(print, file=output, flush=True)
    tell(f"preparing {config.preset} on {_env_text(config)}")
    session = create_session(config.shm_dir)
    engine = InlineEngine() if config.engine == "inline" else LocalEngine(str(session), PRELOAD)
    try:
        context, choice = _prepare(config, session, engine, past, began, tell)
        acting = {"asked": config.acting.mode, "mode": choice.mode, "why": choice.reason}
        return _train_in(context, engine, past, acting, output)
    finally:
        engine.close(0.0)
        shutil.rmtree(session, ignore_errors=True)


def _check_stop(config: TrainConfig) -> None:
    stop = config.stop
    if not (stop.steps or stop.minutes or stop.until_return is not None):
        raise ConfigError("the run would never end: give --steps N, --minutes M or --until-return R.")


def _prepare(
    config: TrainConfig,
    session: Path,
    engine: InlineEngine | LocalEngine,
    past: Past,
    began: float,
    tell: Callable[[str], None],
) -> tuple[Context, Choice]:
    """Checks everything that can be checked before a folder or a role exists, and chooses who acts."""
    from echelon.envs.make import probe_spaces
    from echelon.names import describe_callable
    from echelon.roles.choice import choose_acting
    from echelon.roles.context import Context
    from echelon.roles.placement import pick_device
    from echelon.roles.plan import Plan
    from echelon.runs.checkpoint import find_weights
    from echelon.runs.folder import default_run_dir
    from echelon.transport.curve import check_secret, secret_from_environment
    from echelon.transport.segments import check_platform

    config = _with_whole_paths(config)
    env_text = _env_text(config)
    if config.engine != "inline":
        check_platform()
        if not isinstance(config.env.id, str):
            config = replace(config, env=replace(config.env, id=describe_callable(config.env.id)))
    spaces: Spaces = probe_spaces(config.env)
    short = env_text if ".py:" not in env_text else Path(env_text).name.replace(".py:", "-")
    run_dir = Path(config.run.dir) if config.run.dir else default_run_dir(config.preset, short)
    context = Context(
        name="coordinator",
        index=0,
        incarnation=0,
        epoch=past.epoch,
        train=config,
        spaces=spaces,
        state_shapes=(),
        session=session,
        address=f"ipc://{session}/world" if config.engine != "inline" else f"inproc://{session.name}",
        run_dir=run_dir.absolute(),
        started_at=began - past.wall_s,
    )
    model = Plan(context).model
    pick_device(config.learner.device, model.parameters.numel())
    if config.run.init_from and past.epoch == 0:
        model.load_weights(find_weights(config.run.init_from), config.run.init_from)
    choice = choose_acting(context, engine, model)
    if choice.mode != config.acting.mode:
        tell(f"acting: {choice.mode} ({choice.reason})")
    if choice.mode == "central":
        pick_device(config.acting.device, model.parameters.numel(), "--acting.device")
        if config.acting.transport == "tcp":
            check_secret(config.acting.address, secret_from_environment())
    config = replace(config, acting=replace(config.acting, mode=choice.mode))
    context = replace(context, train=config, state_shapes=model.network.state_shapes)
    plan = Plan(context)
    if config.experience == "replay":
        plan.replay.check()
    check_room(session, plan.shared_bytes())
    plan.make()
    return context, choice


def _with_whole_paths(config: TrainConfig) -> TrainConfig:
    """`config` with files named by their whole path, so that the run can be gone on with from any folder."""
    from echelon.names import absolute

    env = replace(config.env, wrappers=tuple(absolute(name) for name in config.env.wrappers))
    if isinstance(env.id, str):
        env = replace(env, id=absolute(env.id))
    return replace(config, env=env, network=replace(config.network, name=absolute(config.network.name)))


def _env_text(config: TrainConfig) -> str:
    """The environment as the record names it; what cannot be imported (inline only) has no name to be found by."""
    from echelon.names import describe_callable

    id = config.env.id
    if isinstance(id, str):
        return id
    try:
        return describe_callable(id)
    except ConfigError:
        return str(getattr(id, "__qualname__", type(id).__qualname__))


def _train_in(
    context: Context, engine: InlineEngine | LocalEngine, past: Past, acting: dict[str, str], output: TextIO
) -> RunResult:
    from echelon import config_io
    from echelon.runs.console import final_summary
    from echelon.runs.folder import SUMMARY, RunFolder

    config = context.train
    env_text = _env_text(config)
    config_json = config_io.to_json(config, env_text)
    folder = RunFolder.open(context.run_dir) if past.epoch else RunFolder.create(context.run_dir)
    with folder.held():
        folder.write_config(config_json)
        (folder.path / SUMMARY).unlink(missing_ok=True)  # of the part that is being gone on with
        figures = {**_coordinate(context, engine, folder, past, output), "acting": acting}
        folder.write_summary(figures)
    final_summary(figures, output)
    return RunResult(figures["status"], folder.path, figures)


def _coordinate(
    context: Context, engine: InlineEngine | LocalEngine, folder: RunFolder, past: Past, output: TextIO
) -> dict[str, Any]:
    """Runs the coordinator; returns the summary, and writes it should the run fail."""
    from echelon.roles.coordinator import Coordinator
    from echelon.runs.console import Console
    from echelon.runs.metrics import MetricsWriter
    from echelon.world.world import World

    console = Console(f"{context.train.preset} on {_env_text(context.train)}", context.run_dir, output)
    world = World.host(context.address)
    metrics = MetricsWriter(folder.path, append=past.epoch > 0)
    coordinator = Coordinator(context, engine, world, console, metrics)
    coordinator.row = past.row
    try:
        figures = coordinator.run()
    except BaseException as error:
        if isinstance(error, ConfigError) and not coordinator.row.get("env_steps"):
            shutil.rmtree(folder.path, ignore_errors=True)  # nothing was learned: leave nothing half-written
        elif isinstance(error, EchelonError):
            folder.write_summary({"status": "failed", "error": str(error), **_base(context), **coordinator.row})
        raise
    finally:
        console.close()
        world.close()
        metrics.close()
    return _summary(context, coordinator, figures)


def _base(context: Context) -> dict[str, Any]:
    from echelon.runs.folder import versions

    return {"seed": context.train.seed, "versions": versions(), "run_dir": str(context.run_dir)}


def _summary(context: Context, coordinator: Any, figures: dict[str, Any]) -> dict[str, Any]:
    from echelon.runs.bottleneck import bottleneck

    status = {"steps": "finished", "minutes": "finished", "return": "solved"}.get(figures["reason"], "stopped")
    shares = coordinator.shares()
    evaluation = coordinator.evaluation
    inline = context.train.engine == "inline"
    cores, processes = (1, 1) if inline else (len(os.sched_getaffinity(0)), len(shares))
    bounded = context.train.learner.max_lag is not None
    replayed = context.train.experience == "replay"
    limit = ""
    if shares:
        limit = bottleneck(shares, num_cores=cores, num_processes=processes, lag_bounded=bounded, replayed=replayed)
    return {
        "status": status,
        **figures,
        "wall_s": time.time() - context.started_at,
        "evaluation_return": evaluation["return_mean"] if evaluation else None,
        "restarts": coordinator.restarts,
        "env_restarts": coordinator.env_restarts,
        "time": shares,
        "inference": coordinator.serving,
        "bottleneck": limit,
        "curve": _curve(context.run_dir),
        **_base(context),
    }


def _curve(run_dir: Path) -> str | None:
    """The learning curve's path; a run is not lost because it could not be drawn."""
    from echelon.runs.report import draw_curve

    try:
        return str(draw_curve(run_dir))
    except (ConfigError, ImportError):  # nothing to draw yet, or no matplotlib
        return None


def evaluate(run_dir: str | Path, *, episodes: int = 10, seed: int = 1) -> dict[str, Any]:
    """Plays greedy episodes with the newest weights of a run; returns their statistics."""
    import torch

    from echelon.algorithms.model import Model
    from echelon.envs.make import env_seeds, probe_spaces
    from echelon.roles.evaluator import EVALUATION_SEED, Match
    from echelon.runs.checkpoint import find_weights
    from echelon.runs.folder import RunFolder

    if episodes < 1:
        raise ConfigError(f"episodes={episodes} must be at least 1.")
    config = _read_config(RunFolder.open(Path(run_dir)))
    torch.set_num_threads(1)
    model = Model(config.network, probe_spaces(config.env), config.algorithm, seed=config.seed)
    model.load_weights(find_weights(str(run_dir)), str(run_dir))
    model.network.eval()
    match = Match(config.env, model, episodes, env_seeds(seed, EVALUATION_SEED + 1, 0, episodes))
    try:
        return match.play(seed).summary()
    finally:
        match.close()
