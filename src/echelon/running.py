"""One run from start to end: session, engine, validation, folder, coordinator, summary.

Heavy modules are imported inside functions: a process without a role that needs torch never imports it.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from echelon.callbacks.calls import CallbackList
from echelon.config import HostsConfig, TrainConfig, replace
from echelon.engines.inline import InlineEngine
from echelon.engines.local import LocalEngine
from echelon.errors import ConfigError, EchelonError, RunError, escaped_lines
from echelon.interrupts import Interrupts
from echelon.names import check_not_loading
from echelon.roles.plan.start import check_stop, find_bottleneck, make_engine, preparation_text, title
from echelon.transport.session import create_session

if TYPE_CHECKING:
    from echelon.roles.context import Context
    from echelon.roles.plan.stages import Stages
    from echelon.roles.user_objects import UserObjects
    from echelon.runs.folder import RunFolder
    from echelon.world.node import Node


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a run: its summary, and its folder. Its repr leaves the summary out, which fills a screen."""

    status: str  # solved, finished, stopped, no_updates
    run_dir: Path
    summary: dict[str, Any] = field(repr=False)
    # The one that interrupted the run, 0 if none has; also if it came too late to change the status.
    signal: int = field(default=0, repr=False)

    @property
    def return_mean(self) -> float | None:
        value: float | None = self.summary["return_mean"]
        return value

    @property
    def exit_code(self) -> int:
        """The exit code of a program that made only this run: not 0 if a signal stopped it."""
        return 128 + self.signal if self.signal and self.status == "stopped" else 0


@dataclass(frozen=True, slots=True)
class Past:
    """The state of a run before it is resumed."""

    generation: int = 0
    wall_s: float = 0.0
    row: dict[str, Any] = field(default_factory=dict)  # counters and progress at the checkpoint
    place: str = ""  # the checkpoint, for the user


NO_PAST = Past()


def run(
    config: TrainConfig,
    past: Past = NO_PAST,
    output: TextIO | None = None,
    user_objects: UserObjects | None = None,
    callbacks: Sequence[object] = (),
) -> RunResult:
    """Runs a training; with `user_objects`, the learner runs in the user's process."""
    from echelon.runs.nonblocking import nonblocking_output

    check_not_loading("train()")
    calls = CallbackList(callbacks)
    with Interrupts() as interrupts, nonblocking_output(output) as stream:
        return _run(config, past, stream, user_objects, interrupts, calls)


def _run(
    config: TrainConfig,
    past: Past,
    output: TextIO,
    user_objects: UserObjects | None,
    interrupts: Interrupts,
    calls: CallbackList,
) -> RunResult:
    from echelon.roles.stopping import constant_schedules

    began = time.monotonic()
    check_stop(config)

    def report(text: str) -> None:
        print(escaped_lines(text), file=output, flush=True)

    report(preparation_text(config))
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
        from echelon.roles.plan.stages import Stages
        from echelon.world.node import Node

        with _preserved(engine), contextlib.closing(Node.host(world_address(config, session))) as world:
            world.serve("message", report)
            start = began - past.wall_s
            stages = Stages(report, check=interrupts.check)
            context, choice = prepare(config, session, engine, world, past.generation, start, stages, user_objects)
            acting = {"asked": config.acting.mode, "mode": choice.mode, "why": choice.reason}
            return _train_in(
                _Run(context, engine, world, past, acting, output, stages, interrupts, calls), config.hosts
            )
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


@dataclass(frozen=True, slots=True)
class _Run:
    """What a run has from its preparation on."""

    context: Context
    engine: InlineEngine | LocalEngine
    world: Node
    past: Past
    acting: dict[str, str]
    output: TextIO
    stages: Stages
    interrupts: Interrupts
    callbacks: CallbackList


def _train_in(run: _Run, hosts: HostsConfig) -> RunResult:
    from echelon import config_io
    from echelon.runs.console import final_summary
    from echelon.runs.folder import SUMMARY, RunFolder

    config, run_dir = run.context.train, run.context.run_dir
    config_json = config_io.to_json(replace(config, hosts=hosts))  # `hosts` as the user gave it
    folder = RunFolder.open(run_dir) if run.past.generation else RunFolder.create(run_dir, unique=not config.run.dir)
    context = run.context.in_folder(folder.path)
    with folder.held():
        with folder.starting():
            folder.write_config(config_json, context.spaces)
            (folder.path / SUMMARY).unlink(missing_ok=True)  # of the part before the resume
        figures = _coordinate(run, context, folder)
        fallback = context.fallback
        fallback.write(lambda path: RunFolder(path).write_summary(figures))
    final_summary(figures, run.output)
    if error := figures.get("disk_error") or fallback.sentence("its summary"):
        raise RunError(error)
    return RunResult(figures["status"], folder.path, figures, run.interrupts.number)


def _coordinate(run: _Run, context: Context, folder: RunFolder) -> dict[str, Any]:
    """Runs the coordinator; returns the summary, and writes it before `on_end`, and if the run fails."""
    from echelon.roles.coordinator import Coordinator
    from echelon.runs.console import Console
    from echelon.runs.episode_log import EpisodeLog
    from echelon.runs.folder import RunFolder
    from echelon.runs.metrics import MetricsWriter

    row, callbacks = run.past.row, run.callbacks
    with folder.starting():
        metrics = MetricsWriter(folder.path, append=run.past.generation > 0)
        metrics.episodes.drop_after(row.get("env_steps", 0))
        log = EpisodeLog(folder.path, context.train, row) if context.train.run.log_interval else None
    console = Console(title(context.train), context.run_dir, run.output, lines=log is None)
    fallback = context.fallback
    coordinator = Coordinator(
        context, run.engine, run.world, console, metrics, run.interrupts, log, callbacks, run.stages
    )
    coordinator.row = coordinator.training.row = row
    summary: dict[str, Any] = {}
    try:
        figures = coordinator.run()
        summary = {**_summary(context, coordinator, figures), "acting": run.acting}
        fallback.write(lambda path: RunFolder(path).write_summary(summary))
        callbacks.end(summary)
    except BaseException as error:
        text = str(error) if isinstance(error, EchelonError) else f"{type(error).__name__}: {error}"
        failed = {**_base(context), **coordinator.row, **summary, "status": "failed", "error": text}
        callbacks.end_failed(failed, console.message)
        if isinstance(error, ConfigError) and folder.is_new and not coordinator.row.get("env_steps"):
            folder.discard()  # no step was learned from: leave no incomplete folder
        elif isinstance(error, EchelonError):
            fallback.write(lambda path: RunFolder(path).write_summary(failed))
        raise
    finally:
        console.close()
        fallback.write(metrics.write_waiting)
        metrics.close()
        if log is not None:
            log.close()
    if unwritten := fallback.sentence("the rest of its metrics"):
        summary.setdefault("disk_error", unwritten)
    return summary


def _base(context: Context) -> dict[str, Any]:
    from echelon.runs.folder import versions

    learners = context.train.learner.num_learners
    return {"seed": context.train.seed, "learners": learners, "versions": versions(), "run_dir": str(context.run_dir)}


def _summary(context: Context, coordinator: Any, figures: dict[str, Any]) -> dict[str, Any]:
    from echelon.roles.outcome import outcome
    from echelon.runs.report import drawn_curve

    shares = coordinator.shares()
    here = {name: share for name, share in shares.items() if not coordinator.engine.place(name)}
    limit = find_bottleneck(context.train, here, {**figures, **coordinator.figures()})
    hosts = coordinator.engine.hosts()
    return {
        **outcome(context.train, figures, str(context.run_dir)),
        **figures,
        "wall_s": coordinator.trained_s,
        "evaluation_return": coordinator.evaluation_return,
        **coordinator.evaluations_summary(),
        "start": coordinator.stages.seconds,
        "restarts": coordinator.restarts,
        "env_restarts": coordinator.env_restarts,
        "time": shares,
        **coordinator.figures(),
        "bottleneck": limit,
        **({"hosts": hosts} if hosts else {}),
        "logged": coordinator.training.logged,
        "curve": drawn_curve(context.run_dir),
        **_base(context),
    }
