"""Checkpoints: a tree of state as safetensors and JSON, written atomically and verified when read.

A checkpoint is a folder `step_000000012345` with `tensors.safetensors` (every tensor and array) and `state.json` (the
rest, and the SHA-256 of both). A rename publishes it, so a reader never sees a partial one. A crash leaves at most
temporary folders: the next reader removes them, and restores a checkpoint whose replacement was not completed. The
learner writes the checkpoints of a run, the evaluator the best weights (`runs/best.py`) beside them; any number of
processes may read. A writer holds a lock on the folder, which the kernel releases when it dies; processes in other
containers see it too, whereas a pid would mean nothing there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors

from echelon.disk import MAX_JSON_BYTES, put_file, put_folder, read_json, read_regular, sync
from echelon.errors import ConfigError
from echelon.memory_check import total_memory
from echelon.runs.packing import Packed, as_bytes, pack, unpack

if TYPE_CHECKING:
    import torch

FORMAT = 1
TENSORS, STATE = "tensors.safetensors", "state.json"
NEWEST = "newest"  # a name for the newest intact checkpoint
BEST, FINAL = "best", "weights.safetensors"  # the folder of the best weights; the file of the final ones
# What decoding and loading a tree raise if it is not what `pack` made of this run's state.
UNDECODABLE = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError)
MAX_STRUCTURE_BYTES = MAX_JSON_BYTES - 4096  # leaves room for the hashes
TICK_S = 0.1  # interval of `tick` calls while waiting for the disk
FOREIGN_TEMPORARY_AGE_S = 3600.0  # age at which a temporary folder of another host counts as abandoned

_STEP = re.compile(r"step_(\d{12,})")
_TEMPORARY = re.compile(r"\.tmp-(?P<host>.+)\.[^.]+")


class CheckpointWriter:
    """Writes the checkpoints of a run in a separate thread, so that the learner does not wait for the disk.

    `save` waits only while the previous checkpoint is being written; while it waits, it calls `tick`, so that a slow
    disk does not count as a hang. The next `save` or `wait` raises the error of a failed write.
    """

    def __init__(self, folder: Path, keep: int, tick: Callable[[], None] = lambda: None) -> None:
        if keep < 1:
            raise ConfigError(f"keep={keep} checkpoints in {folder}: keep at least 1.")
        self.folder, self.keep, self._tick = folder, keep, tick
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._under_way: Future[None] | None = None

    def save(self, tree: Any, *, step: int) -> Path:
        """Starts writing a snapshot of `tree` as the checkpoint of `step`; returns its future path."""
        self.wait()  # first, so that only one copy of the tree is in memory
        self.begin(_put, self.folder, _Content.of(tree), step, self.keep)
        return self.folder / f"step_{step:012d}"

    def begin(self, write: Callable[..., None], *args: Any) -> None:
        """Runs `write(*args)` in the writer thread, after the current write."""
        self.wait()
        self._under_way = self._pool.submit(write, *args)

    @property
    def has_ended(self) -> bool:
        """Whether a write has ended whose result `wait` has not returned yet."""
        return self._under_way is not None and self._under_way.done()

    def wait(self) -> bool:
        """Waits until the newest checkpoint is on disk and old ones are removed; False if nothing was being written."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return False
        while not wait_for([under_way], TICK_S).done:
            self._tick()
        under_way.result()
        return True

    def close(self) -> None:
        self._pool.shutdown()


@dataclass(frozen=True, slots=True)
class _Content:
    """A serialized tree."""

    tensors: bytes
    structure: str

    @classmethod
    def of(cls, tree: Any) -> _Content:
        packed = pack(tree)
        structure = _canonical(packed.structure)
        if len(structure) > MAX_STRUCTURE_BYTES:
            raise ConfigError(
                f"the state to save has {len(structure):,} bytes besides its tensors; at most {MAX_STRUCTURE_BYTES:,} "
                "can be restored. Keep large data of your policy in tensors or arrays."
            )
        return cls(_tensor_files().save(packed.tensors), structure)


def _put(folder: Path, content: _Content, step: int, keep: int) -> None:
    _put_as(folder, f"step_{step:012d}", content, step)
    past = [path for path in all_checkpoints(folder) if _step(path) <= step]
    for path in set(all_checkpoints(folder)) - set(past[-keep:]):
        aside = _temporary(folder, f"old-{path.name}")
        with contextlib.suppress(OSError):
            path.rename(aside)  # first, so that a reader never sees a part of it
        shutil.rmtree(aside, ignore_errors=True)


def put_tree(folder: Path, name: str, tree: Any, step: int) -> None:
    """Writes `tree` as the checkpoint `name`, or replaces it."""
    _put_as(folder, name, _Content.of(tree), step)


def _put_as(folder: Path, name: str, content: _Content, step: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / name
    new, old = _temporary(folder, f"new-{name}"), _temporary(folder, name)
    with _locked(folder, wait=True):
        _clear(folder, is_written=False)
        new.mkdir()
        try:
            _write(new, content, step)
            put_folder(new, target, old)
        finally:
            shutil.rmtree(new, ignore_errors=True)


def load_checkpoint(path: Path) -> Any:
    """Returns the tree saved at `path`, tensors on the CPU.

    Raises ConfigError, which names the previous checkpoint, if this one is damaged.
    """
    structure, raw = _verified(path)
    try:
        return unpack(Packed(structure, _tensor_files().load(raw)))
    except (safetensors.SafetensorError, *UNDECODABLE) as error:
        raise _damaged(path, path / STATE, f"its content does not decode ({error!r})") from error


def load_parts(path: Path, names: Collection[str]) -> dict[str, Any]:
    """Returns those of the named parts that the tree at `path` has. They hold no tensors, so torch is not needed."""
    structure, _ = _verified(path)
    try:
        return {name: unpack(Packed(structure[name])) for name in names if name in structure}
    except UNDECODABLE as error:
        raise _damaged(path, path / STATE, f"its content does not decode ({error!r})") from error


def latest_checkpoint(folder: Path) -> Path | None:
    """Returns the newest checkpoint in `folder`, not verified; removes leftovers of dead writers first."""
    if any(folder.glob(".tmp-*")):
        with _locked(folder, wait=False) as is_mine:
            _clear(folder, is_written=not is_mine)
    found = all_checkpoints(folder)
    return found[-1] if found else None


def newest_intact(folder: Path) -> tuple[Path, str] | None:
    """Returns the newest intact checkpoint, and a message about newer damaged ones ("" if there are none).

    Returns None if there is no checkpoint; raises ConfigError if all are damaged.
    """
    if latest_checkpoint(folder) is None:
        return None
    troubles: list[str] = []
    for path in reversed(all_checkpoints(folder)):
        try:
            _verified(path)
        except ConfigError as error:
            if not path.exists():  # its run has removed it, and has a newer one
                return newest_intact(folder)
            troubles.append(str(error))
        else:
            return path, "".join(f"{trouble}\n" for trouble in troubles) + f"Using {path}." if troubles else ""
    others = [path.name for path in (folder / BEST, folder.parent / FINAL) if path.exists()]
    left = f"\nFor eval, play, export and --init-from there is also {' and '.join(others)}." if others else ""
    raise ConfigError(f"no checkpoint in {folder} is intact:\n" + "\n".join(troubles) + left)


def weights_sha256(tensors: Mapping[str, torch.Tensor]) -> str:
    """Returns a hash of names, dtypes, shapes and bytes, independent of order, device and file."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode() + b"\n")
        digest.update(as_bytes(tensor).numpy().data)
    return digest.hexdigest()


def save_weights(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Writes a plain safetensors file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    put_file(path, _tensor_files().save(copies, dict(metadata)))
    sync(path.parent)


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a safetensors file, on the CPU."""
    try:
        tensors: dict[str, torch.Tensor] = _tensor_files().load(_read_tensors(path))
        return tensors
    except (OSError, safetensors.SafetensorError, *UNDECODABLE) as error:
        raise unreadable_weights(path, error) from error


def _tensor_files() -> Any:
    """Returns `safetensors.torch`, imported on first use, because the coordinator must not import torch."""
    import safetensors.torch

    return safetensors.torch


def _write(folder: Path, content: _Content, step: int) -> None:
    state = {
        "format": FORMAT,
        "step": step,
        "tensors_sha256": hashlib.sha256(content.tensors).hexdigest(),
        "structure_sha256": hashlib.sha256(content.structure.encode()).hexdigest(),
    }
    put_file(folder / TENSORS, content.tensors)
    put_file(folder / STATE, (json.dumps(state)[:-1] + f', "structure": {content.structure}}}\n').encode())
    sync(folder)


def _verified(path: Path) -> tuple[Any, bytes]:
    """Returns the structure and the tensor bytes of a checkpoint, after checking its format and hashes."""
    try:
        state = read_json(path / STATE)
    except (OSError, ValueError) as error:
        raise _damaged(path, path / STATE, f"it cannot be read ({error})") from error
    if not isinstance(state, dict) or "structure" not in state:
        raise _damaged(path, path / STATE, "it has no structure")
    if state.get("format") != FORMAT:
        raise ConfigError(
            f"the checkpoint {path / STATE} has format {state.get('format')!r}; this Echelon reads format {FORMAT}. "
            "Resume it with the version that wrote it (see versions in the run's config.json)."
        )
    text = _canonical(state["structure"])
    if hashlib.sha256(text.encode()).hexdigest() != state.get("structure_sha256"):
        raise _damaged(path, path / STATE, "the SHA-256 of its structure is wrong")
    try:
        raw = _read_tensors(path / TENSORS)
    except OSError as error:
        raise _damaged(path, path / TENSORS, f"it cannot be read ({error})") from error
    found = hashlib.sha256(raw).hexdigest()
    if found != state.get("tensors_sha256"):
        wanted = str(state.get("tensors_sha256"))
        raise _damaged(path, path / TENSORS, f"its SHA-256 is {found[:12]}…, {STATE} has {wanted[:12]}…")
    return state["structure"], raw


def _read_tensors(path: Path) -> bytes:
    # The tensors are a copy of the file's content. Not of the free memory: if it is short, the file is not damaged.
    return read_regular(path, total_memory() // 2)


def _damaged(path: Path, file: Path, what: str) -> ConfigError:
    earlier = [other for other in all_checkpoints(path.parent) if _step(other) < _step(path)]
    remedy = (
        f"Use the previous checkpoint {earlier[-1]}." if earlier else "There is no earlier checkpoint: start a new run."
    )
    return ConfigError(f"the checkpoint file {file} is damaged: {what}. {remedy}")


def unreadable_weights(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"the weights file {path} cannot be read: {error}. Give an intact .safetensors "
        "file, as `echelon export --format safetensors` writes it; .onnx and .pt2 files are for other programs."
    )


def all_checkpoints(folder: Path) -> list[Path]:
    """Returns the checkpoints of a folder by their steps, those that are damaged included; not the best weights."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _STEP.fullmatch(path.name)), key=_step)


def _step(path: Path) -> int:
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else sys.maxsize


def _temporary(folder: Path, what: str) -> Path:
    return folder / f".tmp-{socket.gethostname()}.{what}"


@contextlib.contextmanager
def _locked(folder: Path, *, wait: bool) -> Iterator[bool]:
    """Holds the lock of `folder`; yields False if another process of this host has it or the disk has no locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        yield False
        return
    try:
        yield True
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # explicitly: a fork of this process may share the descriptor
        os.close(descriptor)


def _clear(folder: Path, *, is_written: bool) -> None:
    """Removes or restores leftovers of dead writers; `is_written`: a writer of this host may be alive."""
    for path in folder.glob(".tmp-*"):
        if (match := _TEMPORARY.fullmatch(path.name)) is None:
            continue
        if _is_old(path) if match["host"] != socket.gethostname() else not is_written:
            _put_back(path)


def _is_old(path: Path) -> bool:
    """Returns whether a temporary folder of another host, whose locks are invisible, is old enough to be abandoned."""
    try:
        return time.time() - path.stat().st_mtime > FOREIGN_TEMPORARY_AGE_S
    except FileNotFoundError:  # its writer has finished
        return False


def _put_back(path: Path) -> None:
    """Removes a temporary folder, or restores the checkpoint its writer moved aside before it died."""
    target = path.with_name(path.name.rpartition(".")[2])
    if (_STEP.fullmatch(target.name) or target.name == BEST) and not target.exists():
        with contextlib.suppress(OSError):  # another reader does the same, or the disk is full
            path.rename(target)
        if not target.exists():
            return
    shutil.rmtree(path, ignore_errors=True)


def _canonical(structure: Any) -> str:
    return json.dumps(structure, separators=(",", ":"), allow_nan=False)
