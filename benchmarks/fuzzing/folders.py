"""Fuzzes run folders: `eval` and `resume` read mutated ones, and the curve is drawn from them.

Files are damaged, forged with checksums that are right, or replaced by links and pipes. Every command must end with
success, or with exit code 2 and one message; no code that a folder names may run, and no file outside it may change.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from echelon.cli.main import main
from echelon.config import replace
from echelon.errors import ConfigError
from echelon.presets import preset
from echelon.runs.report import draw_curve
from echelon.training import train
from fuzzing.harness import Finding, Trial
from fuzzing.mutations import mutate_bytes, mutate_json

DEFAULT_COUNT, BLOCK = 2_000, 20
STEPS = 120
SMALL = {"engine": "inline", "actor.num_actors": 1, "actor.envs": 2, "actor.trajectory": 5, "seed": 7}
SMALL |= {"evaluation.episodes": 0, "network.hidden": (4,), "stop.steps": STEPS}
REPLAY = {"replay.checkpoint": True, "replay.capacity": 200, "replay.min_size": 20, "replay.batch": 4}
KEPT = "kept"


def make_templates(root: Path) -> list[Path]:
    """Trains two small runs; returns their folders."""
    made = []
    for name, changes in (("impala", {}), ("dqn", REPLAY)):
        path = root / name
        config = replace(preset(name, "CartPole-v1"), **SMALL, **changes, **{"run.dir": str(path)})
        train(config, output=io.StringIO())
        made.append(path)
    return made


class Scene:
    """A copy of a run folder to mutate, and files that must not change."""

    def __init__(self, root: Path) -> None:
        self.templates = make_templates(root)
        self.run, self.victim, self.trace = root / "run", root / "victim", root / "trace"
        (root / "folder").mkdir()
        self.victim.write_text(KEPT)
        self.links = [self.victim, root / "folder", root, Path("/dev/zero"), Path("/dev/tty"), root / "none"]

    def reset(self, chance: random.Random) -> None:
        shutil.rmtree(self.run, ignore_errors=True)
        shutil.copytree(chance.choice(self.templates), self.run)

    def check(self, what: str) -> None:
        if self.trace.exists():
            self.trace.unlink()
            raise Finding("the folder ran a command", what)
        if self.victim.read_text() != KEPT or list(self.links[1].iterdir()):
            raise Finding("a file outside the folder was changed", what)


def mutate(scene: Scene, chance: random.Random) -> str:
    """Changes the run folder; returns what was changed."""
    kind = chance.choice([damage, plant, forge_tree, forge_tree, forge_tensors, forge_snapshot, edit_config, edit_rows])
    return f"{kind.__name__}: {kind(scene, chance)}"


def _files(run: Path) -> list[Path]:
    return sorted(path for path in run.rglob("*") if path.is_file())


def damage(scene: Scene, chance: random.Random) -> str:
    path = chance.choice(_files(scene.run))
    how = int(chance.random() * 6)
    if how == 0:
        path.unlink()
    elif how == 1:
        os.truncate(path, 1 << 40)  # sparse
    else:
        path.write_bytes(mutate_bytes(path.read_bytes(), chance, 4 + int(chance.random() * 8)))
    return f"{path.relative_to(scene.run)} {how}"


def plant(scene: Scene, chance: random.Random) -> str:
    names = [*_files(scene.run), *(path for path in scene.run.rglob("*") if path.is_dir()), scene.run / "replay"]
    names += [scene.run / f".{name}.{os.getpid()}" for name in ("config.json", "summary.json", "curve.png")]
    names += [scene.run / "checkpoints" / f".tmp-{os.uname().nodename}.{what}" for what in ("new", f"step_{9:012d}")]
    path = chance.choice(sorted(set(names)))
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    target = chance.choice(scene.links)
    if chance.random() < 0.7:
        path.symlink_to(target)
    elif chance.random() < 0.7:
        os.mkfifo(path)
    else:
        path.mkdir()
    return f"{path.relative_to(scene.run)} to {target}"


def forge_tree(scene: Scene, chance: random.Random) -> str:
    path = chance.choice(sorted((scene.run / "checkpoints").iterdir()))
    state = json.loads((path / "state.json").read_text())
    what = mutate_json(state if chance.random() < 0.1 else state["structure"], chance)
    _seal(path, state, (path / "tensors.safetensors").read_bytes())
    return what


def forge_tensors(scene: Scene, chance: random.Random) -> str:
    path = chance.choice(sorted((scene.run / "checkpoints").iterdir()))
    raw = (path / "tensors.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    if chance.random() < 0.7:
        what = mutate_json(header, chance)
    else:
        data, what = mutate_bytes(data, chance, 4 + int(chance.random() * 8)), "the data"
    text = json.dumps(header).encode()
    _seal(path, json.loads((path / "state.json").read_text()), len(text).to_bytes(8, "little") + text + data)
    return what


def _seal(path: Path, state: Any, tensors: bytes) -> None:
    """Writes a checkpoint with checksums that are right."""
    if isinstance(state, dict) and isinstance(state.get("structure"), object):
        text = json.dumps(state.get("structure"), separators=(",", ":"))
        state["structure_sha256"] = hashlib.sha256(text.encode()).hexdigest()
        state["tensors_sha256"] = hashlib.sha256(tensors).hexdigest()
    (path / "tensors.safetensors").write_bytes(tensors)
    (path / "state.json").write_text(json.dumps(state))


def forge_snapshot(scene: Scene, chance: random.Random) -> str:
    found = sorted((scene.run / "replay").glob("step_*"))
    if not found:
        return forge_tree(scene, chance)
    path = found[-1]
    header = json.loads((path / "replay.json").read_text())["snapshot"]
    if chance.random() < 0.5:
        what = mutate_json(header, chance)
    else:
        name = chance.choice(sorted(header["files"]))
        data = (path / name).read_bytes()
        new = bytearray(data)
        for _ in range(1 + int(chance.random() * 40)):
            new[int(chance.random() * len(new))] = int(chance.random() * 256)
        (path / name).write_bytes(new)
        header["files"][name] = [len(new), zlib.crc32(new)]
        what = name
    text = json.dumps(header)
    (path / "replay.json").write_text(f'{{"crc32": {zlib.crc32(text.encode())}, "snapshot": {text}}}\n')
    return what


def edit_config(scene: Scene, chance: random.Random) -> str:
    path = scene.run / "config.json"
    record = json.loads(path.read_text())
    if chance.random() < 0.3:
        command = {"command": f"touch {scene.trace}"}
        id = chance.choice(["os:system", "subprocess:getoutput", "echelon.names:importlib.os.system", "os:Any-v0"])
        record["config"]["env"] |= {"id": id, "kwargs": {"cmd" if "getoutput" in id else "command": command["command"]}}
        what = id
    else:
        what = mutate_json(record if chance.random() < 0.2 else record["config"], chance)
    path.write_text(json.dumps(record))
    return what


def edit_rows(scene: Scene, chance: random.Random) -> str:
    path = scene.run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    what = mutate_json(rows, chance)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows) if isinstance(rows, list) else "")
    return what


def add_options(parser: argparse.ArgumentParser) -> None:
    pass


def run_command(words: list[str], what: object) -> str:
    """Runs a command in this process; returns its outcome, and raises Finding unless it ends as it should."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace")
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code: object = main(words)
    except SystemExit as ended:  # --help
        code = ended.code or 0
    except Exception as error:
        raise Finding(f"`echelon {' '.join(words)}` raised {type(error).__name__}", what) from error
    err.flush()
    message = err.buffer.getvalue().decode()
    if code not in (0, 2):
        raise Finding(f"`echelon {' '.join(words)}` ended with exit code {code}: {message}", what)
    if code == 2 and (message.count("echelon: ") != 1 or "Traceback" in message):
        raise Finding(f"`echelon {' '.join(words)}` ended without one message: {message}", what)
    return "done" if code == 0 else "refused"


def make(options: argparse.Namespace) -> Trial:
    torch.set_num_threads(1)
    scene = Scene(Path(tempfile.mkdtemp()))
    actions: dict[str, Callable[[str], str]] = {
        "eval": lambda what: run_command(["eval", str(scene.run), "--episodes", "1"], what),
        "resume": lambda what: run_command(["resume", str(scene.run), "--steps", str(STEPS + 20)], what),
        "curve": lambda what: _draw(scene.run),
    }

    def trial(chance: random.Random) -> str:
        scene.reset(chance)
        what = mutate(scene, chance)
        # Sizes in a configuration are the user's to choose: a run with a million actors is not started here.
        action = chance.choice(["eval", "resume", "curve"] if not what.startswith("edit_config") else ["eval", "curve"])
        try:
            outcome = actions[action](what)
        except Finding:
            raise
        except Exception as error:
            raise Finding(f"{action} raised {type(error).__name__}", what) from error
        scene.check(what)
        return f"{action} {outcome}"

    return trial


def _draw(run: Path) -> str:
    try:
        draw_curve(run)
    except ConfigError:
        return "refused"
    return "done"
