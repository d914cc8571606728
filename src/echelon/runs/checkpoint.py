"""Checkpoints: a tree of state as safetensors and JSON, written whole or not at all, verified when read.

A checkpoint is a folder `step_000000012345` with `tensors.safetensors` (every tensor and array) and `state.json` (the
rest, and the SHA-256 of both). It appears by a rename, so a reader never sees half of one; a crash leaves at most
temporary folders, which the next look cleans away; one that was not replaced gets its name back. One process writes a
folder of checkpoints; any number may read it. The writer holds a lock of the folder, which the kernel releases when it
dies: processes of another container see it, too, where the writer's process number means nothing.
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

from echelon.disk import put_folder, sync
from echelon.errors import ConfigError
from echelon.runs.packing import Packed, as_bytes, pack, unpack

if TYPE_CHECKING:
    import torch

FORMAT = 1
TENSORS, STATE = "tensors.safetensors", "state.json"
TICK_S = 0.1  # between two signs of life of who waits for the disk
FOREIGN_TEMPORARY_AGE_S = 3600.0  # a temporary folder of another host is taken for abandoned after this

_STEP = re.compile(r"step_(\d{12,})")
_TEMPORARY = re.compile(r"\.tmp-(?P<host>.+)\.[^.]+")


class CheckpointWriter:
    """Writes the checkpoints of a run in a thread of its own, so that who learns does not wait for the disk.

    `save` waits only while the checkpoint before it is still being written; whoever waits, however slow the disk is,
    calls `tick` meanwhile. What went wrong with one is raised by the next `save` or `wait`.
    """

    def __init__(self, folder: Path, keep: int, tick: Callable[[], None] = lambda: None) -> None:
        if keep < 1:
            raise ConfigError(f"keep={keep} checkpoints in {folder}: at least 1 has to be kept.")
        self.folder, self.keep, self._tick = folder, keep, tick
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._under_way: Future[None] | None = None

    def save(self, tree: Any, *, step: int) -> Path:
        """Begins to write `tree`, as it is now, as the checkpoint of `step`; returns where it will be."""
        self.wait()  # first: what the tree takes while it is written is there once
        self.begin(_put, self.folder, _Content.of(tree), step, self.keep)
        return self.folder / f"step_{step:012d}"

    def begin(self, write: Callable[..., None], *args: Any) -> None:
        """Begins to write whatever `write` does, after what is being written."""
        self.wait()
        self._under_way = self._pool.submit(write, *args)

    def wait(self) -> None:
        """Until the newest is on the disk, and others are removed."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            while not wait_for([under_way], TICK_S).done:
                self._tick()
            under_way.result()

    def close(self) -> None:
        self._pool.shutdown()


def save_checkpoint(folder: Path, tree: Any, *, step: int, keep: int) -> Path:
    """Write `tree` as the checkpoint of `step` and remove all but the newest `keep`; returns its path.

    Checkpoints beyond `step` belong to a future that a resume from an earlier one gave up (or that was damaged): they
    are removed too, so the newest by number is always the newest by time.
    """
    with contextlib.closing(CheckpointWriter(folder, keep)) as writer:
        path = writer.save(tree, step=step)
        writer.wait()
    return path


@dataclass(frozen=True, slots=True)
class _Content:
    """A tree as bytes."""

    tensors: bytes
    structure: str

    @classmethod
    def of(cls, tree: Any) -> _Content:
        packed = pack(tree)
        return cls(_tensor_files().save(packed.tensors), _canonical(packed.structure))


def _put(folder: Path, content: _Content, step: int, keep: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"step_{step:012d}"
    new, old = _temporary(folder, "new"), _temporary(folder, target.name)
    with _locked(folder, wait=True):
        _clear(folder, is_written=False)
        new.mkdir()
        try:
            _write(new, content, step)
            put_folder(new, target, old)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    past = [path for path in _checkpoints(folder) if _step(path) <= step]
    for path in set(_checkpoints(folder)) - set(past[-keep:]):
        shutil.rmtree(path, ignore_errors=True)


def load_checkpoint(path: Path) -> Any:
    """The tree saved at `path`, tensors on the CPU; damage raises ConfigError and names the previous checkpoint."""
    structure, raw = _verified(path)
    try:
        return unpack(Packed(structure, _tensor_files().load(raw)))
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise _damaged(path, path / STATE, f"its content does not decode ({error!r})") from error


def load_parts(path: Path, names: Collection[str]) -> dict[str, Any]:
    """Those parts of the tree saved at `path`, as far as it has them; no tensor is in them, so this needs no torch."""
    structure, _ = _verified(path)
    try:
        return {name: unpack(Packed(structure[name])) for name in names if name in structure}
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise _damaged(path, path / STATE, f"its content does not decode ({error!r})") from error


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint in `folder`, unread; what a dead writer left is cleared away first."""
    if any(folder.glob(".tmp-*")):
        with _locked(folder, wait=False) as is_mine:
            _clear(folder, is_written=not is_mine)
    found = _checkpoints(folder)
    return found[-1] if found else None


def newest_intact(folder: Path) -> tuple[Path, str] | None:
    """The newest checkpoint that verifies, and a message about the damaged ones passed over ("" if none).

    None if there is no checkpoint at all; ConfigError if there are some and every one is damaged.
    """
    if latest_checkpoint(folder) is None:
        return None
    troubles: list[str] = []
    for path in reversed(_checkpoints(folder)):
        try:
            _verified(path)
        except ConfigError as error:
            troubles.append(str(error))
        else:
            return path, "".join(f"{trouble}\n" for trouble in troubles) + f"Using {path}." if troubles else ""
    raise ConfigError(f"no checkpoint in {folder} is intact:\n" + "\n".join(troubles))


def weights_sha256(tensors: Mapping[str, torch.Tensor]) -> str:
    """One hash of names, dtypes, shapes and bytes, whatever the order, the device or the file they lie in."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode() + b"\n")
        digest.update(as_bytes(tensor).numpy().data)
    return digest.hexdigest()


def save_weights(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a plain safetensors file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _write_file(temporary, _tensor_files().save(copies, dict(metadata)))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, on the CPU."""
    try:
        tensors: dict[str, torch.Tensor] = _tensor_files().load(path.read_bytes())
        return tensors
    except (OSError, safetensors.SafetensorError) as error:
        raise _unreadable_weights(path, error) from error


def find_weights(path: str) -> dict[str, torch.Tensor]:
    """The weights in a file, or those of a run folder: its newest checkpoint's, or what it ended with."""
    where = Path(path)
    if where.is_file():
        return load_weights(where)
    found = newest_intact(where / "checkpoints")
    if found is not None:
        return dict(load_checkpoint(found[0])["model"])
    if (where / "weights.safetensors").is_file():
        return load_weights(where / "weights.safetensors")
    raise ConfigError(f"{path} is neither a weights file nor a run folder with a checkpoint. Name one that is.")


def weights_metadata(path: Path) -> dict[str, str]:
    """The metadata given to `save_weights`."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            return dict(file.metadata() or {})
    except (OSError, safetensors.SafetensorError) as error:
        raise _unreadable_weights(path, error) from error


def _tensor_files() -> Any:
    """Files of torch's tensors; imported when one is read or written, as a coordinator does neither."""
    import safetensors.torch

    return safetensors.torch


def _write(folder: Path, content: _Content, step: int) -> None:
    state = {
        "format": FORMAT,
        "step": step,
        "tensors_sha256": hashlib.sha256(content.tensors).hexdigest(),
        "structure_sha256": hashlib.sha256(content.structure.encode()).hexdigest(),
    }
    _write_file(folder / TENSORS, content.tensors)
    _write_file(folder / STATE, (json.dumps(state)[:-1] + f', "structure": {content.structure}}}\n').encode())
    sync(folder)


def _verified(path: Path) -> tuple[Any, bytes]:
    """The structure and the tensor bytes of a checkpoint whose format and hashes are right."""
    try:
        state = json.loads((path / STATE).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
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
        raise _damaged(path, path / STATE, "its structure does not have the SHA-256 it names")
    try:
        raw = (path / TENSORS).read_bytes()
    except OSError as error:
        raise _damaged(path, path / TENSORS, f"it cannot be read ({error})") from error
    found = hashlib.sha256(raw).hexdigest()
    if found != state.get("tensors_sha256"):
        wanted = str(state.get("tensors_sha256"))
        raise _damaged(path, path / TENSORS, f"its SHA-256 is {found[:12]}…, {STATE} says {wanted[:12]}…")
    return state["structure"], raw


def _damaged(path: Path, file: Path, what: str) -> ConfigError:
    earlier = [other for other in _checkpoints(path.parent) if _step(other) < _step(path)]
    remedy = f"Use the previous checkpoint {earlier[-1]}." if earlier else "There is no earlier one: start a new run."
    return ConfigError(f"the checkpoint file {file} is damaged: {what}. {remedy}")


def _unreadable_weights(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"the weights file {path} cannot be read: {error}. Give a whole .safetensors file.")


def _checkpoints(folder: Path) -> list[Path]:
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
    """Holds the lock of `folder`; says False where another process of this host has it, or the disk knows no locks."""
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
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a fork of this process may have the descriptor, too
        os.close(descriptor)


def _clear(folder: Path, *, is_written: bool) -> None:
    """Removes, or puts back, what dead writers left; `is_written` if one of this host may be alive."""
    for path in folder.glob(".tmp-*"):
        if (match := _TEMPORARY.fullmatch(path.name)) is None:
            continue
        if _is_old(path) if match["host"] != socket.gethostname() else not is_written:
            _put_back(path)


def _is_old(path: Path) -> bool:
    """Whether a temporary folder of another host, which has other locks, is so old that its writer must be dead."""
    try:
        return time.time() - path.stat().st_mtime > FOREIGN_TEMPORARY_AGE_S
    except FileNotFoundError:  # its writer is done
        return False


def _put_back(path: Path) -> None:
    """Removes a temporary folder; what its writer was about to replace, when it died between two renames, stays."""
    target = path.with_name(path.name.rpartition(".")[2])
    if _STEP.fullmatch(target.name) and not target.exists():
        with contextlib.suppress(OSError):  # somebody else who looks does the same, or the disk is full
            path.rename(target)
        if not target.exists():
            return
    shutil.rmtree(path, ignore_errors=True)


def _canonical(structure: Any) -> str:
    return json.dumps(structure, separators=(",", ":"), allow_nan=False)


def _write_file(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
