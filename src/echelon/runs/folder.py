"""The run folder: all files of one training, sufficient to repeat, resume, evaluate and report it.

`config.json`, `metrics.jsonl`, `episodes.csv`, TensorBoard events, `checkpoints/`, `replay/`, `open_episodes/`,
`timeline/`, `logs/`, and at the end `summary.json`, `curve.png`.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon import config_io
from echelon.config import TrainConfig, replace
from echelon.disk import check_regular, open_regular, put_file, read_json
from echelon.errors import ConfigError
from echelon.runs.episode_log import LOG, PICTURE
from echelon.runs.episodes import EPISODES
from echelon.runs.metrics import METRICS, plain
from echelon.runs.policy_spec import UNREADABLE, spaces_from_json, spaces_to_json
from echelon.runs.timeline import TIMELINE
from echelon.schema import Spaces
from echelon.trust import check_names, has_mark, mark, run_folder

FORMAT = 1
CONFIG, SUMMARY, LOCK = "config.json", "summary.json", ".lock"
FILES = (CONFIG, SUMMARY, LOCK, METRICS, EPISODES, "weights.safetensors", "curve.png", "processes.json", LOG, PICTURE)
OPEN_EPISODES = "open_episodes"
FOLDERS = ("checkpoints", "replay", OPEN_EPISODES, "logs", "videos", TIMELINE)
GIT_TIMEOUT_S = 2.0
UNUSED: Mapping[str, Any] = {"env.id": "", "env.wrappers": (), "network.name": "auto"}  # names that import nothing
REMEDIES = {  # for a field whose callable cannot be imported
    "id": 'evaluate("{0}", env=make_env), play("{0}", env=make_env) or resume("{0}", env=make_env)',
    "wrappers": 'evaluate("{0}", env=make_wrapped_env) or resume("{0}", wrappers=[...])',
    "name": 'evaluate("{0}", network=make_network), play("{0}", network=make_network) or '
    'resume("{0}", network=make_network)',
}


def check_new(path: Path) -> None:
    """Raises ConfigError if `path` is a folder that is not empty."""
    try:
        taken = path.exists() and any(path.iterdir())
    except OSError as error:
        raise _cannot_be_made(path, error) from error
    if taken:
        how = f"that run with `echelon resume {path}`"
        if runs := _runs_in(path):
            of_seeds = all(name.startswith("seed-") for name in runs)
            how = "those runs with --seeds and --auto-resume" if of_seeds else "one of its runs with `echelon resume`"
        raise ConfigError(f"the run folder {path} is not empty. Continue {how}, or choose another --run-dir.")


def not_a_run(path: Path) -> ConfigError:
    """Returns the error for a path that should be a run folder; it says what the path is."""
    if os.path.isfile(path):
        return ConfigError(f"{path} is a file. Give the folder of its run.")
    if not os.path.isdir(path):
        return ConfigError(f"there is no run folder {path}. Give the folder that `echelon train` printed.")
    if runs := _runs_in(path):
        some = ", ".join(runs[:4]) + (", ..." if len(runs) > 4 else "")
        return ConfigError(f"{path} is not a run folder, but has {len(runs)} in it: {some}. Give one of them.")
    return ConfigError(f"{path} is not a run folder: it has no {CONFIG}. Give the folder that `echelon train` printed.")


def _runs_in(path: Path) -> list[str]:
    """Returns the names of the run folders in `path`."""
    try:
        return sorted(entry.name for entry in path.iterdir() if os.path.lexists(entry / CONFIG))
    except OSError:
        return []


def check_entries(path: Path) -> None:
    """Raises ConfigError if a file or folder of a run is a link, a pipe or a device, or one in place of the other.

    The run folder itself may be reached through a link, and other entries in it are not used.
    """
    try:
        check_regular(path / name for name in (*FILES, *FOLDERS))
    except OSError as error:
        raise ConfigError(
            f"the run folder {path} cannot be used: {error.filename}: {error.strerror}. Echelon writes only files "
            "and folders there: remove it, or replace it by a copy of what it leads to."
        ) from error
    wrong = [path / name for name in FILES if (path / name).is_dir()]
    wrong += [path / name for name in FOLDERS if (path / name).is_file()]
    if wrong:
        found, expected = ("folder", "file") if wrong[0].is_dir() else ("file", "folder")
        raise ConfigError(
            f"the run folder {path} cannot be used: {wrong[0]} is a {found}, not a {expected}. Remove it."
        )


def _cannot_be_made(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"the run folder {path} cannot be created: {error}. Choose another --run-dir.")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one run; use `create` or `open`."""

    path: Path
    is_new: bool = False  # created by `create`: all content belongs to this run
    had_root: bool = False  # `path` existed before, empty

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @classmethod
    def create(cls, path: Path, *, unique: bool = False) -> RunFolder:
        """Creates a new folder that only this user can enter; raises ConfigError if it exists and is not empty.

        An existing empty folder keeps its mode. With `unique`, a folder that exists is left alone, and the new one is
        named after it: NAME-2, NAME-3, ...
        """
        if unique:
            path = make_unique(path)
        else:
            check_new(path)
        run = cls(path, is_new=True, had_root=not unique and path.exists())
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=unique or run.had_root)
            run.checkpoints.mkdir()
            run.logs.mkdir()
        except OSError as error:
            raise _cannot_be_made(path, error) from error
        return run

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Opens an existing run; raises ConfigError unless it has an intact config.json of this format."""
        if not os.path.isdir(path) or not os.path.lexists(path / CONFIG):
            raise not_a_run(path)
        check_entries(path)
        run = cls(path)
        run.read_config()
        return run

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Raises ConfigError, and removes a new folder, if a file cannot be written at the start of a run."""
        try:
            yield
        except OSError as error:
            if self.is_new:
                self.discard()
            raise ConfigError(
                f"the run folder {self.path} cannot be written: {error}. Free some space, or use another disk."
            ) from error

    def discard(self) -> None:
        """Removes the files of a new run, and the folder unless it existed before."""
        assert self.is_new, f"{self.path} holds the past of a run"
        for path in list(self.path.iterdir()) if self.had_root else [self.path]:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    path.unlink()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Locks this folder against other runs; the kernel releases the lock when the process ends in any way."""
        with self.starting():
            descriptor = open_regular(self.path / LOCK, os.O_RDWR | os.O_CREAT)
        with open(descriptor, "r+b", buffering=0) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                pid = file.read(20).decode(errors="replace")
                raise ConfigError(
                    f"{self.path} belongs to a run that is still running (process "
                    f"{pid if pid.isdecimal() else 'unknown'}). Wait for it, or stop it with Ctrl-C, then resume."
                ) from error
            with contextlib.suppress(OSError):  # the number serves the message above only
                file.truncate(0)
                file.write(str(os.getpid()).encode())
            yield

    def write_config(self, config_json: Mapping[str, Any], spaces: Spaces | None = None) -> None:
        """Writes the configuration with the file format, the library versions, this user's mark and the `spaces`."""
        record = {"format": FORMAT, "versions": versions(), "config": dict(config_json), "mark": mark(config_json)}
        if spaces is not None:
            record["spaces"] = spaces_to_json(spaces)
        _write_json(self.path / CONFIG, record)

    def load_config(self, *, trust: bool, given: Iterable[str] = ()) -> TrainConfig:
        """Returns the configuration, whose code can and may be imported; raises ConfigError unless all of it may be.

        `trust`: the user trusts whoever wrote it; `given`: paths of names in place of which the caller has others.
        """
        record, config = self._read_record(), self.parse_config()
        used = replace(config, **{name: UNUSED[name] for name in given})
        for name, value in config_io.unnamed_callables(used).items():
            raise ConfigError(
                f"{self.path} was trained with {name}={value!r}, a callable that cannot be imported: a lambda, a local "
                f"or a notebook function. Pass it again, in Python: {REMEDIES[name.split('.')[1]].format(self.path)}."
            )
        check_trust(self.path / CONFIG, record, used, trust=trust)
        return config

    def parse_config(self) -> TrainConfig:
        """Returns the configuration, to be shown: use `load_config` to import the code that it names."""
        try:
            return config_io.from_json(self.read_config())
        except ConfigError as error:
            raise ConfigError(f"{self.path / CONFIG} cannot be used: {error}") from error

    def read_config(self) -> dict[str, Any]:
        """Returns the configuration that `write_config` wrote, as data: use `load_config` to run it."""
        config: dict[str, Any] = self._read_record()["config"]
        return config

    def read_spaces(self) -> Spaces | None:
        """Returns the spaces of the run's environment; None if an older release wrote the folder."""
        data = self._read_record().get("spaces")
        if data is None:
            return None
        try:
            return spaces_from_json(data)
        except UNREADABLE as error:
            raise ConfigError(
                f"{self.path / CONFIG} is damaged: its spaces cannot be read ({error!r:.200}). Restore it from a copy."
            ) from error

    def _read_record(self) -> dict[str, Any]:
        path = self.path / CONFIG
        record = _read_json(path, "Restore it from a copy, or start a new run.")
        _check_record(path, record)
        return record

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        _write_json(self.path / SUMMARY, plain(summary))


def _check_record(path: Path, record: Mapping[str, Any]) -> None:
    """Raises ConfigError unless `record`, the content of `path`, is what `write_config` writes."""
    if "format" not in record:
        raise ConfigError(f"{path} is not what Echelon writes: it has no format. Restore it from a copy.")
    if record["format"] != FORMAT:
        raise ConfigError(
            f"{path} has format {record.get('format')!r}; this Echelon reads format {FORMAT}. Use the version "
            f"that wrote it: {record.get('versions')}."
        )
    config = record.get("config")
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is damaged: config={config!r} is not an object. Restore it, or start a new run.")


def check_trust(path: Path, record: Mapping[str, Any], used: TrainConfig, *, trust: bool) -> None:
    """Raises ConfigError if `record`, which another user wrote, names code that `used` would import."""
    if not trust and not has_mark(record["config"], record.get("mark")):
        check_names(used, run_folder(path))


def load_record(path: Path, record: Mapping[str, Any], *, trust: bool) -> TrainConfig:
    """Returns the configuration in a run's config.json, wherever that is; its code may be imported."""
    _check_record(path, record)
    try:
        config = config_io.from_json(record["config"])
    except ConfigError as error:
        raise ConfigError(f"{path} cannot be used: {error}") from error
    check_trust(path, record, config, trust=trust)
    return config


def default_run_dir(preset: str, env: str, seed: str) -> Path:
    """Returns a name such as runs/impala-CartPole-v1-seed0-20260102-030405; `seed` is "seed0", or "seeds0-4"."""
    env = re.sub(r"[^\w.-]+", "-", env.replace(".py:", "-"))[-60:].strip("-.") or "env"
    return Path("runs") / f"{preset}-{env}-{seed}-{time.strftime('%Y%m%d-%H%M%S')}"


def make_unique(path: Path) -> Path:
    """Creates the folder `path`, or NAME-2, NAME-3, ... if that exists, for this user only; returns its path.

    The kernel creates a folder for one caller only, so runs that start in the same second get different folders.
    """
    stem, count = path, 1
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                path.mkdir(mode=0o700)
            except FileExistsError:
                count += 1
                path = stem.with_name(f"{stem.name}-{count}")
            else:
                return path
    except OSError as error:
        raise _cannot_be_made(path, error) from error


def versions() -> dict[str, str | None]:
    """Returns the versions of Python and of the libraries that affect results, and two commits.

    `git` is that of Echelon's checkout, `project_git` that of the repository of the current folder.
    """
    names = ("torch", "echelon", "gymnasium", "numpy")
    libraries = {name: _version(name) for name in names}
    source = Path(__file__).resolve().parents[2]
    own = _commit(source.parent) if source.name == "src" else None  # an installed package has no commit
    return {"python": platform.python_version(), **libraries, "git": own, "project_git": _commit(Path.cwd())}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return getattr(sys.modules.get(name), "__version__", None)


def _commit(place: Path) -> str | None:
    """Returns the commit of the repository that `place` is in, if it is in one."""
    command = ["git", "-C", str(place), "rev-parse", "--short", "HEAD"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
    put_file(path, f"{text}\n".encode())


def _read_json(path: Path, remedy: str) -> dict[str, Any]:
    try:
        data = read_json(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. {remedy}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}. {remedy}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is damaged: it holds {data!r:.40}, not an object. {remedy}")
    return data
