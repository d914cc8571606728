"""The functions behind the command line: train and resume.

Heavy modules are imported inside functions: a process without a role that needs torch never imports it.
"""

from __future__ import annotations

import contextlib
import shutil
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TextIO

from echelon.config import EnvId, HostsConfig, StopConfig, TrainConfig, replace
from echelon.engines.inline import InlineEngine
from echelon.engines.local import LocalEngine
from echelon.errors import ConfigError, EchelonError, RunError, escaped_lines
from echelon.roles.plan.start import check_stop, find_bottleneck, make_engine, title
from echelon.transport.session import create_session

if TYPE_CHECKING:
    from echelon.interrupts import Interrupts
    from echelon.roles.context import Context
    from echelon.roles.user_objects import UserObjects
    from echelon.runs.folder import RunFolder
    from echelon.world.node import Node


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a run: its summary, and its folder."""

    status: str  # solved, finished, stopped, no_updates
    run_dir: Path
    summary: dict[str, Any]
    was_interrupted: bool = False  # by a signal; also if it came too late to change the status

    @property
    def return_mean(self) -> float | None:
        value: float | None = self.summary["return_mean"]
        return value


@dataclass(frozen=True, slots=True)
class Past:
    """The state of a run before it is resumed."""

    generation: int = 0
    wall_s: float = 0.0
    row: dict[str, Any] = field(default_factory=dict)  # counters and progress at the checkpoint
    place: str = ""  # the checkpoint, for the user


class RunFinished(ConfigError):
    """The run to resume has already reached its end."""


NO_PAST = Past()
WORKERS, RAY, LEAST = "workers.address", "hosts.ray_address", "hosts.min_actors"
HOSTS_FIELDS = ("min_actors", "address", "bulk_port", "lease_s", "ray_address")  # of a resumed run
NO_FIELDS: Mapping[str, str] = MappingProxyType({})


def train(config: TrainConfig, *, output: TextIO | None = None) -> RunResult:
    """Trains with `config`; returns when a stop condition holds or the user interrupts."""
    return run(config, output=output)


def resume(
    run_dir: str | Path,
    *,
    steps: int = 0,
    minutes: float = 0.0,
    until_return: float | None = None,
    episodes: int = 0,
    learners: int | None = None,
    hosts: int | None = None,
    engine: str | None = None,
    output: TextIO | None = None,
    user_objects: UserObjects | None = None,
    epochs: int | None = None,
    fields: Mapping[str, str] = NO_FIELDS,
    env: EnvId | None = None,
    wrappers: Sequence[EnvId] | None = None,
    network: EnvId | None = None,
    trust: bool = False,
) -> RunResult:
    """Resumes the run in `run_dir` from its newest checkpoint; stop conditions that are given replace the old ones.

    `learners` and `hosts` change the number of learners and hosts, `engine` the engine. `fields` sets fields of the
    section hosts by path, as {"hosts.address": "tcp://0.0.0.0:7000"}, and "workers.address" in a run with workers;
    "address" is that, or the address of the Ray cluster. The run remembers all of them. `env`, `wrappers` and `network`
    are names or callables in place of the run's: a run that was trained with a lambda needs it again. Only with `trust`
    are environments, wrappers and networks of other packages or files imported that somebody else's configuration
    names.
    """
    from echelon.config_io import set_fields
    from echelon.roles.stopping import num_episodes, progress, stop_reason, stop_text
    from echelon.runs.checkpoint import load_parts, newest_intact
    from echelon.runs.folder import RunFolder
    from echelon.runs.outage import newer_fallback
    from echelon.runs.progress import NAMES, Progress

    if epochs is not None:
        warnings.warn("epochs= is now episodes=; the next release drops the old name.", FutureWarning, stacklevel=2)
        episodes = epochs
    folder = RunFolder.open(Path(run_dir))
    own = {"env.id": env, "env.wrappers": wrappers, "network.name": network}
    own = {path: value for path, value in own.items() if value is not None}
    config = replace(folder.load_config(trust=trust, given=own), **own)
    found = newest_intact(folder.checkpoints)
    if found is None:
        raise ConfigError(f"{run_dir} has no checkpoint to resume from. Start a new run with another --run-dir.")
    saved = Progress.read(load_parts(found[0], NAMES), found[0])
    counters, wall_s = saved.counters, saved.wall_s
    if steps or minutes or episodes or until_return is not None:
        config = replace(config, stop=StopConfig(steps, minutes, until_return, episodes))
    if learners is not None:
        config = replace(config, learner=replace(config.learner, num_learners=learners, threads=0))  # 0: chosen again
    fields = dict(fields)
    least = fields.pop(LEAST, None)
    if least is not None and not least.isdecimal():
        raise ConfigError(f"hosts.min_actors={least} is not a number of actors. Give a whole number, 0 or more.")
    config = _on_hosts(config, engine, hosts, None if least is None else int(least))
    if (address := fields.pop("address", None)) is not None and config.engine == "ray":
        fields[RAY] = address
    elif address is not None:
        fields[WORKERS] = address if "://" in address else f"tcp://{address}"
    if stray := next((path for path in fields if path != WORKERS and not path.startswith("hosts.")), None):
        raise ConfigError(f"--{stray} cannot change when a run is resumed. `echelon resume --help` shows what can.")
    if WORKERS in fields and not config.has_workers:
        given = address or fields[WORKERS]
        raise ConfigError(f"--address {given} has no effect: {run_dir} has no workers and no Ray cluster. Remove it.")
    config = set_fields(config, fields)
    stray = next((path for path in fields if path != WORKERS), None)
    if stray is not None and not config.has_hosts:
        raise ConfigError(f"--{stray} has no effect: {run_dir} runs on one host. Add --hosts N.")
    past_episodes = num_episodes(config, counters.episodes, counters.updates)
    reason = stop_reason(config.stop, counters.env_steps, counters.returns, wall_s, past_episodes)
    if reason:
        raise RunFinished(
            f"{run_dir} has reached its end ({stop_text(config.stop)}; it has trained for {counters.env_steps:,} "
            f"steps and {wall_s / 60:.1f} minutes). Give a larger total with "
            "--steps, --minutes, --episodes or --until-return."
        )
    config = replace(config, run=replace(config.run, dir=str(run_dir)))
    if user_objects is not None and user_objects.address:
        config = replace(config, workers=replace(config.workers, address=user_objects.address))
    row = {name: getattr(counters, name) for name in ("env_steps", "episodes", "updates", "dropped", "return_max")}
    row["progress"] = progress(config.stop, counters.env_steps, wall_s, past_episodes)
    place = f"resuming from {found[0].name} ({counters.env_steps:,} steps)"
    if other := newer_fallback(Path(run_dir), config.run.fallback_dir, found[0].name):
        place += (
            f". {other} has a newer checkpoint of a run of this name: if it is the end of this run, which could not be "
            "written here, resume it instead"
        )
    return run(config, Past(max(saved.generation, saved.epoch) + 1, wall_s, row, place), output, user_objects)


def _on_hosts(config: TrainConfig, engine: str | None, count: int | None, least: int | None) -> TrainConfig:
    """Returns `config` with another engine, number of hosts or `hosts.min_actors`, where they are given.

    One host is this machine, unless others may join (`least`); several stay with Ray.
    """
    if engine is None and count is None and least is None:
        return config
    hosts = config.hosts
    count, least = hosts.count if count is None else count, hosts.min_actors if least is None else least
    several = "ray" if config.engine == "ray" else "hosts"
    engine = engine or (several if count != 1 or least else "local")
    if engine not in ("hosts", "ray"):
        count, least = 1, 0
    address = hosts.ray_address if engine == "ray" else ""
    return replace(config, engine=engine, hosts=replace(hosts, count=count, min_actors=least, ray_address=address))


def train_or_resume(config: TrainConfig, *, output: TextIO | None = None) -> RunResult | None:
    """Resumes the run in the run folder of `config`, or trains if there is none; returns None for a finished run.

    Of `config`, a resumed run takes the stop conditions and the section hosts. A folder without a checkpoint, as a run
    leaves it that is killed at its start, is renamed to NAME.incomplete, and the run starts again.
    """
    from echelon.runs.checkpoint import latest_checkpoint
    from echelon.runs.folder import CONFIG, LOCK, RunFolder

    if not config.run.dir:
        raise ConfigError("--auto-resume has no run to look for: give --run-dir DIR.")
    check_stop(config)
    path = Path(config.run.dir)
    names = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    if names and (CONFIG in names or names <= {"checkpoints", "logs", LOCK}):
        if latest_checkpoint(path / "checkpoints") is not None:
            hosts = {f"hosts.{name}": str(getattr(config.hosts, name)) for name in HOSTS_FIELDS}
            stop, several = config.stop, config.has_hosts
            try:
                return resume(
                    path,
                    steps=stop.steps,
                    minutes=stop.minutes,
                    until_return=stop.until_return,
                    episodes=stop.episodes,
                    hosts=config.hosts.count if several else None,
                    engine=config.engine if several else None,
                    fields=hosts if several else NO_FIELDS,
                    output=output,
                )
            except RunFinished as finished:
                print(escaped_lines(str(finished)), file=output, flush=True)
                return None
        aside = path.with_name(f"{path.name}.incomplete")
        with RunFolder(path).held():  # refuses the folder of a run that has just started
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
    return train(config, output=output)


def run(
    config: TrainConfig, past: Past = NO_PAST, output: TextIO | None = None, user_objects: UserObjects | None = None
) -> RunResult:
    """Runs a training from start to end: session, engine, validation, folder, coordinator, summary.

    With `user_objects`, the learner runs in the user's process.
    """
    from echelon.runs.nonblocking import nonblocking_output

    with nonblocking_output(output) as stream:
        return _run(config, past, stream, user_objects)


def _run(config: TrainConfig, past: Past, output: TextIO, user_objects: UserObjects | None) -> RunResult:
    from echelon.roles.stopping import constant_schedules

    began = time.monotonic()
    check_stop(config)

    def report(text: str) -> None:
        print(escaped_lines(text), file=output, flush=True)

    report(f"preparing {title(config)}")
    if past.place:
        report(past.place)
    if constant := constant_schedules(config):
        report(
            f"--until-return alone does not define the length of the run, so {' and '.join(constant)} to the end. Also "
            "give --steps or --minutes to enable the schedule."
        )
    session = create_session(config.shm_dir)
    engine: InlineEngine | LocalEngine | None = None
    try:
        engine = make_engine(config, session, has_objects=user_objects is not None)
        from echelon.roles.plan.preparation import prepare, world_address
        from echelon.world.node import Node

        with _preserved(engine), contextlib.closing(Node.host(world_address(config, session))) as world:
            world.serve("message", report)
            start = began - past.wall_s
            context, choice = prepare(config, session, engine, world, past.generation, start, report, user_objects)
            acting = {"asked": config.acting.mode, "mode": choice.mode, "why": choice.reason}
            return _train_in(context, engine, world, past, acting, output, config.hosts)
    finally:
        if engine is not None:
            engine.close(0.0)
        shutil.rmtree(session, ignore_errors=True)


def _preserved(engine: InlineEngine | LocalEngine) -> contextlib.AbstractContextManager[None]:
    """Returns a context that restores the settings of this process if the learner runs in it."""
    if not engine.is_here("learner"):
        return contextlib.nullcontext()
    from echelon.process_state import preserve_state

    return preserve_state()


def _train_in(
    context: Context,
    engine: InlineEngine | LocalEngine,
    world: Node,
    past: Past,
    acting: dict[str, str],
    output: TextIO,
    hosts: HostsConfig,
) -> RunResult:
    from echelon import config_io
    from echelon.interrupts import Interrupts
    from echelon.runs.console import final_summary
    from echelon.runs.folder import SUMMARY, RunFolder

    config, run_dir = context.train, context.run_dir
    config_json = config_io.to_json(replace(config, hosts=hosts))  # `hosts` as the user gave it
    folder = RunFolder.open(run_dir) if past.generation else RunFolder.create(run_dir, unique=not config.run.dir)
    context = context.in_folder(folder.path)
    with folder.held(), Interrupts() as interrupts:  # to the end: the record is complete whenever the user interrupts
        with folder.starting():
            folder.write_config(config_json, context.spaces)
            (folder.path / SUMMARY).unlink(missing_ok=True)  # of the part before the resume
        figures = {**_coordinate(context, engine, world, folder, past, output, interrupts), "acting": acting}
        fallback = context.fallback
        fallback.write(lambda path: RunFolder(path).write_summary(figures))
    final_summary(figures, output)
    if error := figures.get("disk_error") or fallback.sentence("its summary"):
        raise RunError(error)
    return RunResult(figures["status"], folder.path, figures, interrupts.came)


def _coordinate(
    context: Context,
    engine: InlineEngine | LocalEngine,
    world: Node,
    folder: RunFolder,
    past: Past,
    output: TextIO,
    interrupts: Interrupts,
) -> dict[str, Any]:
    """Runs the coordinator; returns the summary, and writes it if the run fails."""
    from echelon.roles.coordinator import Coordinator
    from echelon.runs.console import Console
    from echelon.runs.episode_log import EpisodeLog
    from echelon.runs.folder import RunFolder
    from echelon.runs.metrics import MetricsWriter

    with folder.starting():
        metrics = MetricsWriter(folder.path, append=past.generation > 0)
        interval = context.train.run.log_interval
        log = EpisodeLog(folder.path, interval, past.row) if interval else None
    console = Console(title(context.train), context.run_dir, output, lines=log is None)
    fallback = context.fallback
    coordinator = Coordinator(context, engine, world, console, metrics, interrupts, log)
    coordinator.row = past.row
    try:
        figures = coordinator.run()
    except BaseException as error:
        if isinstance(error, ConfigError) and folder.is_new and not coordinator.row.get("env_steps"):
            folder.discard()  # no step was learned from: leave no incomplete folder
        elif isinstance(error, EchelonError):
            failed = {"status": "failed", "error": str(error), **_base(context), **coordinator.row}
            fallback.write(lambda path: RunFolder(path).write_summary(failed))
        raise
    finally:
        console.close()
        fallback.write(metrics.write_waiting)
        metrics.close()
        if log is not None:
            log.close()
    if unwritten := fallback.sentence("the rest of its metrics"):
        figures.setdefault("disk_error", unwritten)
    return _summary(context, coordinator, figures)


def _base(context: Context) -> dict[str, Any]:
    from echelon.runs.folder import versions

    learners = context.train.learner.num_learners
    return {"seed": context.train.seed, "learners": learners, "versions": versions(), "run_dir": str(context.run_dir)}


def _summary(context: Context, coordinator: Any, figures: dict[str, Any]) -> dict[str, Any]:
    from echelon.roles.outcome import outcome
    from echelon.runs.report import drawn_curve

    shares = coordinator.shares()
    here = {name: share for name, share in shares.items() if not coordinator.engine.place(name)}
    limit = find_bottleneck(context.train, here, on_gpu=str(figures["device"]).startswith("cuda"))
    hosts = coordinator.engine.hosts()
    return {
        **outcome(context.train, figures, str(context.run_dir)),
        **figures,
        "wall_s": coordinator.trained_s,
        "evaluation_return": coordinator.evaluation_return,
        **coordinator.evaluations_summary(),
        "restarts": coordinator.restarts,
        "env_restarts": coordinator.env_restarts,
        "time": shares,
        **coordinator.figures(),
        "bottleneck": limit,
        **({"hosts": hosts} if hosts else {}),
        "curve": drawn_curve(context.run_dir),
        **_base(context),
    }
