"""Run folders of somebody else: they run no code, lead to no other file, and end no command with a traceback."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import echelon
from echelon.cli.main import main
from echelon.config import replace
from echelon.errors import ConfigError
from running import TESTS

TINY = {"engine": "inline", "actor.num_actors": 1, "actor.envs": 2, "stop.steps": 200, "evaluation.episodes": 0}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder that this user made here, with a checkpoint."""
    path = tmp_path_factory.mktemp("made") / "run"
    changes = {**TINY, "env.id": "toy_envs:CounterEnv", "run.dir": str(path)}
    echelon.train(replace(echelon.preset("impala", "CartPole-v1"), **changes), output=io.StringIO())
    return path


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def edit(run: Path, **fields: Any) -> None:
    """Changes the configuration in a run folder, as in an editor."""
    record = json.loads((run / "config.json").read_text())
    for path, value in fields.items():
        section, _, name = path.rpartition(".")
        (record["config"][section] if section else record["config"])[name] = value
    (run / "config.json").write_text(json.dumps(record))


def forget(run: Path) -> None:
    """Makes the folder one of an Echelon that wrote no mark."""
    record = json.loads((run / "config.json").read_text())
    del record["mark"]
    (run / "config.json").write_text(json.dumps(record))


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """Runs a command that must end with exit code 2 and one message; returns the message."""
    assert main([str(word) for word in words]) == 2
    message = capsys.readouterr().err
    assert message.count("echelon: ") == 1 and message.startswith("echelon: ") and "Traceback" not in message
    return message


@pytest.mark.parametrize("command", ["eval", "play", "resume"])
def test_a_foreign_folder_runs_no_code(run: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    """`os:system` ran in the commands; the message says what would run, from which file, and the remedy."""
    trace = run / "trace"
    edit(run, **{"env.id": "os:system", "env.kwargs": {"command": f"touch {trace}"}})
    line = refused(capsys, command, run)
    assert "env.id='os:system'" in line and str(run / "config.json") in line and "/os.py" in line and "--trust" in line
    assert not trace.exists()


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"env.id": "toy_envs:Counter-v0"}, str(TESTS / "toy_envs.py")),
        ({"env.id": "/somewhere/env.py:make"}, "/somewhere/env.py"),
        ({"env.id": "CartPole-v1", "env.wrappers": ["toy_envs:Doubled"]}, str(TESTS / "toy_envs.py")),
        ({"env.id": "CartPole-v1", "network.name": "toy_envs:network"}, str(TESTS / "toy_envs.py")),
        ({"env.id": "GymV21Environment-v0", "env.kwargs": {"env_id": "os:Any-v0"}}, ""),
    ],
)
def test_every_name_of_code_is_checked(
    run: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, Any], place: str
) -> None:
    edit(run, **fields)
    line = refused(capsys, "eval", run)
    assert list(fields)[-1 if "kwargs" not in str(fields) else 0] in line and place in line


def test_what_this_user_made_here_needs_no_trust(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run), "--episodes", "1"]) == 0
    assert main(["resume", str(run), "--steps", "400"]) == 0
    assert main(["eval", str(run), "--episodes", "1"]) == 0, "a resume marks it again"


@pytest.mark.parametrize("how", ["another machine", "edited", "old"])
def test_own_code_of_others_is_asked_for_once(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "edited":
        edit(run, **{"env.kwargs": {"length": 5}})
    elif how == "old":
        forget(run)
    else:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert "--trust" in refused(capsys, "eval", run)
    assert "--trust" in refused(capsys, "resume", run, "--steps", "400")
    with pytest.raises(ConfigError, match="trust=True"):
        echelon.evaluate(run)
    assert main(["eval", str(run), "--episodes", "1", "--trust"]) == 0
    assert main(["resume", str(run), "--steps", "400", "--trust"]) == 0
    assert main(["eval", str(run), "--episodes", "1"]) == 0, "the resume made it this user's"


def test_fields_that_name_no_code_may_be_edited(run: Path) -> None:
    edit(run, seed=3)
    assert main(["eval", str(run), "--episodes", "1"]) == 0


def test_plain_names_of_others_need_no_trust(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Folders of older releases, of other machines and edited ones go on as before."""
    edit(run, **{"env.id": "CartPole-v1"})
    forget(run)
    main(["eval", str(run)])
    assert "do not fit" in capsys.readouterr().err, "the weights are read: they are another environment's"


def test_the_environment_that_the_user_names_is_trusted(run: Path) -> None:
    edit(run, **{"env.id": "os:system"})
    assert main(["eval", str(run), "--episodes", "1", "--env", "toy_envs:CounterEnv"]) == 0


def test_no_mark_can_be_made_without_the_key(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The mark is of the whole configuration, and no other text passes for one."""
    record = json.loads((run / "config.json").read_text())
    for mark in (record["mark"][:-1], record["mark"].upper(), "", "é" * 64, None, 7, ["x"], {}):
        (run / "config.json").write_text(json.dumps({**record, "mark": mark}))
        assert "--trust" in refused(capsys, "eval", run)


def test_a_run_goes_on_where_no_key_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    changes = {**TINY, "run.dir": str(tmp_path / "run")}
    echelon.train(replace(echelon.preset("impala", "CartPole-v1"), **changes), output=io.StringIO())
    assert echelon.evaluate(tmp_path / "run", episodes=1)["episodes"] == 1


def test_modules_in_the_folder_are_not_imported(run: Path) -> None:
    """`cd FOLDER && echelon resume .` imported msgspec.py from there, and its processes imported torch.py."""
    edit(run, engine="local", **{"env.id": "CartPole-v1"})
    for name in ("torch", "gymnasium", "safetensors", "msgspec", "json"):
        (run / f"{name}.py").write_text("import os; os._exit(99)")
    script = run.parent / "echelon"  # as pip installs it
    script.write_text("import sys; from echelon.cli.main import main; sys.exit(main(sys.argv[1:]))")
    words = [sys.executable, script, "resume", ".", "--steps=400"]
    ended = subprocess.run(words, cwd=run, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and "do not fit" in ended.stderr


FILES = ["config.json", "summary.json", ".lock", "metrics.jsonl", "checkpoints", "logs", "replay", "open_episodes"]


@pytest.mark.parametrize("name", [*FILES, "checkpoints/*/state.json", "checkpoints/*/tensors.safetensors"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_links_pipes_and_devices_in_a_folder_are_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, kind: str
) -> None:
    """Through a link, `resume` appended to a file elsewhere, or truncated it; a pipe held it up for ever."""
    edit(run, **{"env.id": "CartPole-v1"})
    [path] = list(run.glob(name)) or [run / name]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir() if path.is_dir() else elsewhere.write_text("kept")
    if path.exists():
        shutil.move(path, tmp_path / "moved")
    if kind == "link":
        path.symlink_to(elsewhere)
    else:
        os.mkfifo(path)
    for command in ("eval", "resume"):
        line = refused(capsys, command, run)
        assert str(path) in line and "not a regular file" in line
    assert elsewhere.is_dir() or elsewhere.read_text() == "kept"


def test_a_folder_behind_a_link_and_links_of_the_users_own_are_fine(run: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to(run.parent)
    (run / "notes").symlink_to(tmp_path)
    assert main(["eval", str(tmp_path / "runs" / "run"), "--episodes", "1"]) == 0


def test_a_deep_folder_is_looked_through(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1,200 levels, more than a function can call itself; a link at the bottom is found."""
    edit(run, **{"env.id": "CartPole-v1"})
    deep = str(run / "logs")
    for _ in range(1_200):
        os.makedirs(deep := f"{deep}/a", exist_ok=True)
    os.symlink("/etc/passwd", f"{deep}/link")
    assert "not a regular file" in refused(capsys, "eval", run)
    subprocess.run(["rm", "-r", run / "logs"], check=True)  # Python's own removal calls itself


@pytest.mark.parametrize("name", ["weights.safetensors", "metrics.jsonl", "logs"])
def test_a_folder_in_place_of_a_file_is_refused(run: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    path = run / name
    if path.is_dir():
        shutil.rmtree(path)
        path.write_text("")
    else:
        path.unlink(missing_ok=True)
        path.mkdir()
    assert str(path) in refused(capsys, "resume", run, "--steps", "400")


def test_weights_to_start_from_are_read_from_no_link(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.move(run / "checkpoints", tmp_path / "moved")
    (run / "checkpoints").symlink_to(tmp_path / "moved")
    words = ["train", "impala", "CartPole-v1", "--engine=inline", "--steps=100", f"--run-dir={tmp_path / 'new'}"]
    assert str(run / "checkpoints") in refused(capsys, *words, f"--init-from={run}")


@pytest.mark.parametrize("name", ["config.json", "checkpoints/*/state.json", "checkpoints/*/tensors.safetensors"])
def test_a_huge_file_is_not_read(run: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    [path] = run.glob(name)
    os.truncate(path, 1 << 40)  # sparse
    assert str(path) in refused(capsys, "eval", run) and path.stat().st_size == 1 << 40


def test_planted_temporary_names_are_not_written_through(run: Path, tmp_path: Path) -> None:
    """Files are replaced by renaming a temporary one, whose name others can guess."""
    victim = tmp_path / "victim"
    victim.write_text("kept")
    for name in ("config.json", "summary.json", "curve.png", "weights.safetensors", "processes.json"):
        for planted in (run / f".{name}.{os.getpid()}", run / f".{name}"):
            planted.symlink_to(victim)
    assert main(["resume", str(run), "--steps", "400"]) == 0
    assert victim.read_text() == "kept"


def forge(run: Path, change: Callable[[Any, dict[str, torch.Tensor]], None]) -> None:
    """Changes the tree in the newest checkpoint and makes its checksums right again."""
    [path] = (run / "checkpoints").iterdir()
    state = json.loads((path / "state.json").read_text())
    tensors = safetensors.torch.load((path / "tensors.safetensors").read_bytes())
    change(state["structure"], tensors)
    raw = safetensors.torch.save(tensors)
    text = json.dumps(state["structure"], separators=(",", ":"))
    sums = {"tensors_sha256": raw, "structure_sha256": text.encode()}
    state |= {name: hashlib.sha256(data).hexdigest() for name, data in sums.items()}
    (path / "tensors.safetensors").write_bytes(raw)
    (path / "state.json").write_text(json.dumps(state))


def put(place: str, value: Any) -> Callable[[Any, dict[str, torch.Tensor]], None]:
    def change(tree: Any, tensors: dict[str, torch.Tensor]) -> None:
        *path, last = place.split("/")
        for name in path:
            tree = tree[int(name) if isinstance(tree, list) else name]
        tree[int(last) if isinstance(tree, list) else last] = value

    return change


FORGED = {
    "counters/env_steps": [2**63, "many", {"$tensor": "state.rng"}],
    "counters/returns": ["x", {"$items": [[[], 1]]}],
    "counters": [None],
    "wall_s": [1e300, {"$float": "inf"}],
    "generation": [2**40],
    "version": [2**63],
    "rng": [{"$tensor": "none"}],
    "model": [[], {"$items": [[1, 2]]}],
    "optimizer": [None, {"policy": {"state": {"$items": [[0, {"step": 1}]]}}}],
    "algorithm": [{}, {"rewards": {"returns": 1, "count": 1, "mean": 1, "squares": -1}}],
    "algorithm/generator": [{"$array": "state.rng", "dtype": "O", "shape": [1]}],
}


@pytest.mark.parametrize(("place", "value"), [(place, value) for place, values in FORGED.items() for value in values])
def test_a_consistently_forged_checkpoint_ends_with_a_message(
    run: Path, capsys: pytest.CaptureFixture[str], place: str, value: Any
) -> None:
    """Its checksums are right; what it holds is not this run's."""
    forge(run, put(place, value))
    line = refused(capsys, "resume", run, "--steps", "400")
    assert str(run / "checkpoints") in line or "weights do not fit" in line


@pytest.mark.parametrize("field", ["algorithm.name", "algorithm", "env", "preset", "engine"])
def test_a_value_of_another_type_is_refused(run: Path, capsys: pytest.CaptureFixture[str], field: str) -> None:
    edit(run, **{field: {"x": [1]}})
    assert field in refused(capsys, "eval", run)


@pytest.mark.parametrize("hidden", [[1 << 24, 1 << 24], [1 << 40], [2**63]])
def test_a_network_of_a_forged_size_is_not_made(
    run: Path, capsys: pytest.CaptureFixture[str], hidden: list[int]
) -> None:
    edit(run, **{"network.hidden": hidden})
    assert "network.hidden" in refused(capsys, "eval", run)
