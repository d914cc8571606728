"""Run folders of somebody else: they run no code, lead to no other file, and end no command with a traceback."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import echelon
from echelon.cli.main import main
from echelon.config import replace
from echelon.errors import ConfigError
from running import TESTS

TINY = {"engine": "inline", "actor.num_actors": 1, "actor.envs": 2, "stop.steps": 200, "evaluation.interval_s": 0.0}


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
    """Runs a command that must end with exit code 2; returns its only line on stderr."""
    assert main([str(word) for word in words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("command", ["eval", "resume"])
def test_a_foreign_folder_runs_no_code(run: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    """`os:system` ran in both commands; the message says what would run, from which file, and the remedy."""
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
        edit(run, seed=3)
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


@pytest.mark.parametrize("words", [["eval", "."], ["resume", ".", "--steps=400"]], ids=["eval", "resume"])
def test_modules_in_the_folder_are_not_imported(run: Path, words: list[str]) -> None:
    """`cd FOLDER && echelon eval .` imported torch.py from there, and so did the processes of `resume`."""
    edit(run, engine="local", **{"env.id": "CartPole-v1"})
    for name in ("torch", "gymnasium", "safetensors", "msgspec", "json"):
        (run / f"{name}.py").write_text("import os; os._exit(99)")
    script = run.parent / "echelon"  # as pip installs it
    script.write_text("import sys; from echelon.cli.main import main; sys.exit(main(sys.argv[1:]))")
    ended = subprocess.run([sys.executable, script, *words], cwd=run, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and "do not fit" in ended.stderr
