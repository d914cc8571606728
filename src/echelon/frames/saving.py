"""Versions of a frame on disk: NAME_VERSION.safetensors with all tensors, NAME_VERSION.json with the rest.

The JSON file is moved into place last, so a version that has one is complete.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from echelon.errors import ConfigError
from echelon.runs.packing import Packed, pack, unpack


def save_state(folder: Path, name: str, version: int, state: dict[str, Any]) -> None:
    """Writes `state`, a tree of tensors, numbers and strings, as `version`; replaces an existing one."""
    if version < 0:
        raise ConfigError(f"version={version} of {name} cannot be saved: versions start at 0.")
    folder.mkdir(parents=True, exist_ok=True)
    packed = pack(state)
    index, tensors = folder / f"{name}_{version}.json", folder / f"{name}_{version}.safetensors"
    new = [path.with_name(f"{path.name}.{os.getpid()}.part") for path in (tensors, index)]
    try:
        save_file(packed.tensors, new[0])
        new[1].write_text(json.dumps({"format": 1, "state": packed.structure}))
        index.unlink(missing_ok=True)  # only now: the old version stays valid until the new one is written
        os.replace(new[0], tensors)
        os.replace(new[1], index)
    finally:
        for path in new:
            path.unlink(missing_ok=True)


def load_state(folder: Path, name: str, version: int = -1) -> tuple[int, dict[str, Any]]:
    """Returns the number and the state of `version`; -1 stands for the newest."""
    pattern = re.compile(rf"{re.escape(name)}_(\d+)\.json")
    matches = (pattern.fullmatch(path.name) for path in folder.glob(f"{name}_*.json"))
    there = sorted(int(match[1]) for match in matches if match)
    if not there or (version >= 0 and version not in there):
        wanted = f"version {version}" if version >= 0 else "any version"
        has = f"versions {', '.join(map(str, there))}" if there else "none"
        raise ConfigError(f"{folder} does not contain {wanted} of {name}; it has {has}. Save one there first.")
    chosen = version if version >= 0 else there[-1]
    path = folder / f"{name}_{chosen}.json"
    try:
        index = json.loads(path.read_text())
        state: dict[str, Any] = unpack(Packed(index["state"], load_file(path.with_suffix(".safetensors"))))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ConfigError(f"{path} and its tensors cannot be read: {error!r}. Load another version.") from error
    return chosen, state
