"""The weights of a run: finding a checkpoint by name or path, and reading what it holds of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.disk import read_json
from echelon.errors import ConfigError
from echelon.runs.checkpoint import (
    BEST,
    FINAL,
    NEWEST,
    STATE,
    all_checkpoints,
    latest_checkpoint,
    load_checkpoint,
    load_weights,
    newest_intact,
)
from echelon.runs.folder import CONFIG, check_entries
from echelon.runs.progress import misfit

if TYPE_CHECKING:
    import torch


def find_weights(path: str) -> dict[str, torch.Tensor]:
    """Returns the weights of a file, a checkpoint or a run folder: its newest checkpoint's, else its final weights."""
    return read_weights(weights_path(path))


def run_of(path: str | Path, name: str = NEWEST) -> tuple[Path, str]:
    """Returns the run folder, and its checkpoint for `weights_path`: the path of a checkpoint in it names both."""
    path = Path(path)
    if name == NEWEST and os.path.isfile(path / STATE):
        found = path.resolve()  # of a link, or relative to the folder of checkpoints
        return found.parent.parent, str(found)
    return path, name


def weights_path(path: str, name: str = NEWEST) -> Path:
    """Returns a checkpoint of the run folder `path`, by name or path; `path` itself if it is one, or a weights file."""
    where = Path(path)
    if os.sep in name and os.path.isfile(Path(name) / STATE):
        return Path(name)
    if os.path.isfile(where):
        return where.resolve()
    if os.path.isfile(where / STATE):
        return where
    check_entries(where)
    folder, final = where / "checkpoints", where / FINAL
    if name != NEWEST:
        latest_checkpoint(folder)  # restores a checkpoint whose replacement was not completed
        others = [entry for entry in (folder / BEST, final) if entry.exists()]
        found = {entry.name: entry for entry in [*all_checkpoints(folder), *others]}
        if name not in found:
            has = ", ".join([*found, *([NEWEST] if found else [])]) or "none"
            why = ", as no evaluation of the run has completed" if name == BEST else ""
            raise ConfigError(f"{path} has no checkpoint {name!r}{why}. It has {has}.")
        return found[name]
    if (newest := newest_intact(folder)) is not None:
        return newest[0]
    if final.is_file():
        return final
    if (where / CONFIG).exists():
        raise ConfigError(
            f"{path} has no checkpoint: a run writes one every --run.checkpoint-interval-s seconds and at its end. "
            "Wait for it if the run still trains, or give another run."
        )
    raise ConfigError(f"{path} is neither a weights file nor a run folder with a checkpoint. Give one of them.")


def steps_of(path: Path) -> int | None:
    """Returns the environment steps at which a checkpoint was saved; None for a weights file."""
    try:
        return int(read_json(path / STATE)["step"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Returns the weights of a checkpoint or of a weights file."""
    if not path.is_dir():
        return load_weights(path)
    tree = load_checkpoint(path)
    if not isinstance(tree, dict) or not isinstance(tree.get("model"), dict):
        raise misfit(path, "it has no weights")
    return dict(tree["model"])
