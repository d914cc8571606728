"""The functions behind the command line: train and resume."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TextIO

from echelon.config import EnvId, StopConfig, TrainConfig, replace
from echelon.errors import ConfigError, escaped_lines
from echelon.fields import option_text
from echelon.names import text_of
from echelon.roles.plan.start import check_stop, num_episodes
from echelon.running import Past, RunResult, run

if TYPE_CHECKING:
    from echelon.roles.user_objects import UserObjects

__all__ = ["RunFinished", "RunResult", "resume", "run", "train", "train_or_resume"]


class RunFinished(ConfigError):
    """The run to resume has already reached its end."""


WORKERS, RAY, LEAST = "workers.address", "hosts.ray_address", "hosts.min_actors"
HOSTS_FIELDS = ("min_actors", "address", "bulk_port", "lease_s", "ray_address")  # of a resumed run
NO_FIELDS: Mapping[str, str] = MappingProxyType({})
CHOSEN = {"acting.mode": "auto", "learner.threads": 0}  # values that a run replaces by its own choice


def train(config: TrainConfig, *, callbacks: Sequence[object] = (), output: TextIO | None = None) -> RunResult:
    """Trains with `config` until a stop condition holds or the user interrupts; for `callbacks` see `CallbackList`."""
    if not isinstance(config, TrainConfig):
        raise ConfigError(f'train() takes a configuration, not {config!r:.80}: echelon.preset("ppo", "CartPole-v1").')
    return run(config, output=output, callbacks=callbacks)


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
    callbacks: Sequence[object] = (),
) -> RunResult:
    """Resumes the run in `run_dir` from its newest checkpoint; stop conditions that are given replace the old ones.

    `learners` and `hosts` change the number of learners and hosts, `engine` the engine. `fields` sets fields of the
    section hosts by path, as {"hosts.address": "tcp://0.0.0.0:7000"}, and "workers.address" in a run with workers;
    "address" is that, or the address of the Ray cluster. The run remembers all of them. `env`, `wrappers` and `network`
    are names or callables in place of the run's: a run that was trained with a lambda needs it again. Only with `trust`
    are environments, wrappers and networks of other packages or files imported that somebody else's configuration
    names. `callbacks` are those of `train`: the run does not remember them.
    """
    from echelon.config_io import set_fields
    from echelon.roles.stopping import progress, raised_rate, stop_reason, stop_text
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
    with folder.held():  # refuses a run that is still running: it may have no checkpoint yet
        found = newest_intact(folder.checkpoints)
    if found is None:
        raise ConfigError(f"{run_dir} has no checkpoint to resume from. Start a new run with another --run-dir.")
    saved = Progress.read(load_parts(found[0], NAMES), found[0])
    counters, wall_s = saved.counters, saved.wall_s
    past_stop = config.stop
    if steps or minutes or episodes or until_return is not None:
        config = replace(config, stop=StopConfig(steps, minutes, until_return, episodes))
    if learners is not None:
        config = replace(config, learner=replace(config.learner, num_learners=learners, threads=0))  # 0: chosen again
    fields = dict(fields)
    if (least := fields.pop(LEAST, None)) is not None and not least.isdecimal():
        raise ConfigError(f"hosts.min_actors={least} is not a number of actors. Give a whole number, 0 or more.")
    config = _on_hosts(config, engine, hosts, None if least is None else int(least))
    if (address := fields.pop("address", None)) is not None and config.engine == "ray":
        fields[RAY] = address
    elif address is not None:
        fields[WORKERS] = address if "://" in address else f"tcp://{address}"
    if stray := next((path for path in fields if path != WORKERS and not path.startswith("hosts.")), None):
        raise ConfigError(f"--{stray} cannot change when a run is resumed. `echelon resume --help` shows what can.")
    if WORKERS in fields and not config.has_workers:
        raise ConfigError(f"--address has no effect: {run_dir} has no workers and no Ray cluster. Remove it.")
    config = set_fields(config, fields)
    if not config.has_hosts and (stray := next((path for path in fields if path != WORKERS), None)):
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
    row = _known_at(folder.path, counters.env_steps)
    row |= {name: getattr(counters, name) for name in ("env_steps", "episodes", "updates", "dropped", "return_max")}
    row["progress"] = progress(config.stop, counters.env_steps, wall_s, past_episodes)
    place = f"resuming from {found[0].name} ({counters.env_steps:,} steps)"
    if other := newer_fallback(Path(run_dir), config.run.fallback_dir, found[0].name):
        place += (
            f". {other} has a newer checkpoint of a run of this name: if it is the end of this run, which could not be "
            "written here, resume it instead"
        )
    before = progress(past_stop, counters.env_steps, wall_s, past_episodes)
    if saved.learning_rate is None and (text := raised_rate(config, before, row["progress"])):
        place += f". {text}"
    past = Past(max(saved.generation, saved.epoch) + 1, wall_s, row, place)
    return run(config, past, output, user_objects, callbacks)


def _known_at(run_dir: Path, env_steps: int) -> dict[str, Any]:
    """Returns what the metrics of a run know at this number of steps, without what its roles did until then."""
    from echelon.runs.metrics import last_rows

    rows = [row for row in last_rows(run_dir) if row.get("kind") == "train" and row.get("env_steps", 0) <= env_steps]
    groups = ("time.", "inference.", "shards.", "workers.")
    return {name: value for name, value in rows[-1].items() if not name.startswith(groups)} if rows else {}


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


def train_or_resume(
    config: TrainConfig,
    *,
    given: Collection[str] = (),
    callbacks: Sequence[object] = (),
    output: TextIO | None = None,
) -> RunResult | None:
    """Resumes the run in the run folder of `config`, or trains if there is none; returns None for a finished run.

    Of `config`, a resumed run takes the stop conditions and the section hosts. A run of another preset or environment
    is refused; other values that the user has `given` (fields and sections) and that differ are reported. A folder
    without a checkpoint, as a run leaves it that is killed at its start, is renamed to NAME.incomplete, and the run
    starts again.
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
            if ignored := _ignored(path, config, given):
                print(escaped_lines(ignored), file=output, flush=True)
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
                    callbacks=callbacks,
                )
            except RunFinished as finished:
                print(escaped_lines(str(finished)), file=output, flush=True)
                return None
        aside = path.with_name(f"{path.name}.incomplete")
        with RunFolder(path).held():  # refuses the folder of a run that has just started
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
    return train(config, callbacks=callbacks, output=output)


def _ignored(path: Path, config: TrainConfig, given: Collection[str]) -> str:
    """Returns a warning about `given` values of `config` that the run in `path` does not take, or "".

    Raises ConfigError if that run has another preset or environment.
    """
    from echelon.config_io import fields_of
    from echelon.roles.plan.preparation import with_whole_paths
    from echelon.runs.folder import RunFolder

    both = RunFolder.open(path).parse_config(), with_whole_paths(config)
    run, command = (f"{one.preset} on {text_of(one.env.id)}" for one in both)
    if run != command:
        raise ConfigError(
            f"{path} is a run of {run}, and the command names {command}. Give another --run-dir, or continue that run "
            f"with `echelon resume {path}`."
        )
    past, asked = ({info.path: info.value for info in fields_of(one)} for one in both)
    taken = {"stop", "hosts", "run.dir", *(("engine",) if config.has_hosts else ())}
    kept = [
        f"{name}={option_text(past[name])}, not {option_text(value)}"
        for name, value in asked.items()
        if (places := {name, name.partition(".")[0]}) & {*given} and not places & taken
        if value not in (past[name], CHOSEN.get(name, past[name]))
    ]
    more = "a resumed run takes only its limits and hosts from the command. For other values start a new run"
    return f"warning: {path} keeps {'; '.join(kept)}: {more} (--init-from {path})." if kept else ""
