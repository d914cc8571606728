"""The command line, and the Python functions behind it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import echelon
from echelon.cli.bench import BENCHES
from echelon.cli.main import COMMANDS, main
from echelon.cli.train import SHORT, make_parser, parse_config
from echelon.config import TrainConfig, replace
from echelon.config_io import fields_of
from echelon.errors import ConfigError
from echelon.presets import PRESETS, REPLAY_PRESETS, preset
from echelon.runs.checkpoint import load_weights
from echelon.transport.session import session_name
from toy_envs import CounterEnv, make_counter

INLINE = [
    *("--engine", "inline", "--actors", "1", "--envs-per-actor", "2", "--actor.trajectory", "8"),
    *("--network.hidden", "8", "--evaluation.episodes", "0"),
]
PPO = ["--algorithm.minibatches", "2", "--algorithm.epochs", "1"]
REPLAY = ["--replay.min-size=64", "--replay.batch=16", "--replay.capacity=1000", "--replay.samples-per-insert=16"]
PENDULUM = ["Pendulum-v1", "--env-kwargs", '{"max_episode_steps": 20}']


def tiny(env: Any, engine: str = "inline", **fields: Any) -> TrainConfig:
    base = {"env.id": env, "engine": engine, "actor.num_actors": 1, "actor.envs": 2, "actor.trajectory": 8}
    rule = {"algorithm.minibatches": 2, "algorithm.epochs": 1, "evaluation.episodes": 0, "stop.steps": 100}
    return replace(preset("ppo", "CartPole-v1"), **{**base, **rule, **fields})


def options(*arguments: str) -> TrainConfig:
    return parse_config(make_parser("echelon train", ""), arguments)


@pytest.mark.parametrize(
    ("env", "family"), [("toy_envs:Film", "images"), ("toy_envs:CounterEnv", "vectors"), ("x:y", "")]
)
def test_an_unknown_environment_gets_the_values_for_what_it_observes(
    env: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    found = parse_config(make_parser("echelon train", ""), ["dqn", env], observe=True)
    assert found == preset("dqn", env, family)


def test_without_a_command_it_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"], ["-h"]):
        assert main(arguments) == 0
        out = capsys.readouterr().out
        assert all(name in out and text in out for name, text in COMMANDS.items())
    assert all(f" {name}" in COMMANDS["bench"] for name in BENCHES)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"echelon {echelon.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_helps(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [command, "--help"]
    try:
        code: Any = main(arguments)
    except SystemExit as end:
        code = end.code
    assert code == 0
    out = capsys.readouterr().out
    assert f"echelon {command}" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "ppo", "--help"],  # more than a pipe takes at once
        ["doctor"],
        ["bench", "--help"],
    ],
    ids=" ".join,
)
def test_a_command_whose_output_nobody_reads_ends_quietly(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONPATH": str(Path(echelon.__file__).parents[1])}
    with open(writer, "wb") as output:
        command = [sys.executable, "-m", "echelon.cli.main", *arguments]  # a fresh one: it ends as a shell sees it
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, env=environment, timeout=90.0)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    "command", [["train", "dqn", "no\x1b[2J-v0", "--steps", "9"], ["resume", "no\x1b[2J"], ["worker\x1b[2J"]]
)
def test_errors_are_shown_without_control_characters(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 2
    shown = "".join(capsys.readouterr())
    assert "\x1b" not in shown and r"\x1b[2J" in shown


def test_another_pipe_that_broke_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: list[str]) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("echelon.cli.doctor.run", fail)
    with pytest.raises(BrokenPipeError):
        main(["doctor"])


@pytest.mark.parametrize(("given", "code"), [((), 130), ((signal.SIGTERM,), 143), (("enough",), 130)])
def test_the_exit_code_after_an_interrupt_is_that_of_its_signal(
    given: tuple[Any, ...], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(arguments: list[str]) -> int:
        raise KeyboardInterrupt(*given)

    monkeypatch.setattr("echelon.cli.doctor.run", interrupt)
    assert main(["doctor"]) == code


def test_the_help_of_train_names_every_option_and_with_a_preset_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for words in ([], ["ppo"]):
        with pytest.raises(SystemExit) as end:
            main(["train", *words, "--help"])
        assert end.value.code == 0
        shown.append(capsys.readouterr().out)
        assert all(name in shown[-1] for name in PRESETS) and all(f"--{name} " in shown[-1] for name in SHORT)
    short, whole = shown
    for info in fields_of(preset("ppo", "CartPole-v1")):
        assert f"--{info.path.replace('_', '-')} " in whole, info.path
    assert "--optimizer." not in short and "`echelon train PRESET [ENV] --help`" in short
    for text in shown:  # --actors and --max-actors are one field, with two meanings
        actors, most = (text.partition(f"  --{name} N ")[2].partition("  --")[0] for name in ("actors", "max-actors"))
        assert actors.split() != most.split() and "--min-actors" in most


def test_options_are_read_wherever_they_stand_and_however_they_are_written() -> None:
    expected = replace(preset("ppo", "CartPole-v1"), **{"actor.envs": 4, "actor.trajectory": 16, "seed": 3})
    assert options("ppo", "CartPole-v1", "--actor.envs", "4", "--actor.trajectory=16", "--seed", "3") == expected
    assert options("--actor.envs", "4", "ppo", "--seed=3", "CartPole-v1", "--actor.trajectory", "16") == expected
    assert (
        options("ppo", "CartPole-v1", "--envs-per-actor", "4", "--actor.trajectory", "1_6", "--seed", "3") == expected
    )


@pytest.mark.parametrize(("arguments", "path", "value"), [
    (["--until-return", "-150"], "stop.until_return", -150.0),
    (["--stop.until-return", "-1.5e2"], "stop.until_return", -150.0),
    (["--steps", "1e6"], "stop.steps", 1_000_000),
    (["--acting", "central"], "acting.mode", "central"),
    (["--acting.max-wait-us", "50"], "acting.max_wait_us", 50.0),
    (["--learner.max-lag", "none"], "learner.max_lag", None),
    (["--network.hidden", "32,16"], "network.hidden", (32, 16)),
    (["--env-kwargs", '{"delay": 3}'], "env.kwargs", {"delay": 3}),
    (["--algorithm.normalize-advantage", "false"], "algorithm.normalize_advantage", False),
    (["--env.wrappers", "a:b,c:d"], "env.wrappers", ("a:b", "c:d")),
])  # fmt: skip
def test_values_of_every_kind_are_read(arguments: list[str], path: str, value: Any) -> None:
    config = options("ppo", "CartPole-v1", *arguments)
    assert config == replace(preset("ppo", "CartPole-v1"), **{path: value})


@pytest.mark.parametrize(("words", "line"), [
    (["train", "dqn", "CartPole-v1", "--help"], re.compile(r"  --([\w.-]+) .*?  \(default (.+?)\) ")),
    (["presets", "dqn", "CartPole-v1"], re.compile(r"[ *] --(\S+) +(.+)")),
], ids=["train", "presets"])  # fmt: skip
def test_the_values_that_a_command_shows_can_be_typed(
    words: list[str], line: re.Pattern[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        main(words)
    shown = dict(found.groups() for text in capsys.readouterr().out.splitlines() if (found := line.match(text)))
    typed = [
        word
        for name, value in shown.items()
        if "." in name and name.partition(".")[0] not in ("workers", "hosts")  # not for a training on one host
        for word in (f"--{name}", *shlex.split(value))
    ]
    assert {"none", "true"} <= {*typed}
    assert options("dqn", "CartPole-v1", *typed) == preset("dqn", "CartPole-v1")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", PRESETS)
def test_a_run_leaves_its_record_and_goes_on_and_plays(
    name: str, here: Path, shm_dir: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    if name == "ppo":
        request.getfixturevalue("drawn")
    rule = REPLAY if name in REPLAY_PRESETS else PPO if name.endswith("ppo") else []
    env = PENDULUM if name in ("ddpg", "td3", "apex-ddpg", "sac") else ["CartPole-v1"]
    train = ["train", name, *env, *INLINE, *rule, "--steps", "200", "--shm-dir", str(shm_dir), "--seed", "5"]
    assert main([*train, "--run-dir", "run"]) == 0
    run = here / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished" and 200 <= summary["env_steps"] < 220 and summary["seed"] == 5
    assert (run / "config.json").is_file() and (run / "metrics.jsonl").is_file()
    assert (run / "curve.png").is_file() == (name == "ppo")
    assert len(list((run / "checkpoints").iterdir())) == 1
    assert main(["eval", "run", "--episodes", "3", "--json"]) == 0
    score = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert score["episodes"] == 3 and score["return_min"] <= score["return_mean"] <= score["return_max"]
    assert (-400 if env is PENDULUM else 1) <= score["return_min"] and score["return_max"] <= 500
    assert main(["eval", "run", "--episodes", "2"]) == 0
    assert "over 2 episodes" in capsys.readouterr().out
    assert main(["resume", "run", "--steps", "400"]) == 0
    after = json.loads((run / "summary.json").read_text())
    assert 400 <= after["env_steps"] < 420 and after["updates"] > summary["updates"]
    assert after["weights_sha256"] != summary["weights_sha256"]
    steps = [json.loads(line)["env_steps"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps) and steps[-1] == after["env_steps"], "one record, appended to"
    assert list(shm_dir.iterdir()) == []


def test_eval_and_play_add_to_the_arguments_of_the_environment(
    here: Path, shm_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny("CartPole-v1", shm_dir=str(shm_dir), **{"run.dir": "run", "env.kwargs": {"max_episode_steps": 5}})
    echelon.train(config, output=io.StringIO())

    def evaluated(*words: str) -> dict[str, Any]:
        assert main(["eval", "run", "--episodes", "2", "--json", *words]) == 0
        score: dict[str, Any] = json.loads(capsys.readouterr().out)
        return score

    assert evaluated("--env-kwargs", '{"max_episode_steps": 2}')["length_mean"] == 2, "replaces the run's"
    other = evaluated("--env-kwargs", '{"sutton_barto_reward": true}')
    assert (other["length_mean"], other["return_mean"]) == (5, 0), "is added to the run's"
    same = evaluated("--env", "CartPole-v0", "--env-kwargs", '{"sutton_barto_reward": true}')
    assert (same["length_mean"], same["return_mean"]) == (5, 0), "an environment of the same name keeps the run's"
    words = ("--env", "gymnasium.envs.classic_control:CartPoleEnv", "--env-kwargs", '{"sutton_barto_reward": true}')
    alone = evaluated(*words)
    assert (alone["length_mean"] > 5, alone["return_mean"]) == (True, -1), "any other --env drops the run's"
    assert echelon.evaluate("run", env_kwargs={"max_episode_steps": 2})["length_mean"] == 2
    assert main(["eval", "run", "--episodes", "2", *words]) == 0
    assert f" actions in {words[1]} with {words[3]}: return" in capsys.readouterr().out
    assert main(["eval", "run", "--episodes", "2", *words[2:]]) == 0
    assert f" actions in the environment of the run with {words[3]}: return" in capsys.readouterr().out
    words = ["--env-kwargs", '{"max_episode_steps": 2}', "--output", "two.gif", "--json"]
    assert main(["play", "run", *words]) == 0
    assert json.loads(capsys.readouterr().out)["length_mean"] == 2


def test_the_default_folder_tells_preset_environment_seed_and_time(
    here: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echelon.runs.folder.time.strftime", lambda form: "20260102-030405")
    train = ["train", "ppo", "CartPole-v1", *INLINE, *PPO, "--steps", "50", "--shm-dir", str(shm_dir), "--seed", "7"]
    assert main(train) == 0 == main(train)
    first, second = sorted((here / "runs").iterdir())
    assert first.name == "ppo-CartPole-v1-seed7-20260102-030405" and second.name == f"{first.name}-2"
    assert all(json.loads((run / "summary.json").read_text())["run_dir"] == str(run) for run in (first, second))
    failing = ["train", "ppo", "no-such-env:Env-v0", *INLINE, *PPO, "--steps", "50", "--shm-dir", str(shm_dir)]
    assert main(failing) == 2 and sorted((here / "runs").iterdir()) == [first, second], "nothing is left"


def test_weights_of_one_run_start_another(here: Path, shm_dir: Path) -> None:
    common = [*INLINE, *PPO, "--shm-dir", str(shm_dir)]
    assert main(["train", "ppo", "CartPole-v1", *common, "--steps", "100", "--run-dir", "a"]) == 0
    frozen = [*common, "--steps", "50", "--seed", "9", "--optimizer.learning-rate", "1e-30"]
    for source in ("a", "a/weights.safetensors"):
        target = "b" if source == "a" else "c"
        assert main(["train", "ppo", "CartPole-v1", *frozen, "--run-dir", target, "--init-from", source]) == 0
        one, other = load_weights(here / "a/weights.safetensors"), load_weights(here / target / "weights.safetensors")
        assert all(bool((one[name] == other[name]).all()) for name in one)


def test_the_same_seed_gives_the_same_weights_and_another_others(here: Path, shm_dir: Path) -> None:
    hashes = []
    for run, seed in (("a", 1), ("b", 1), ("c", 2)):
        config = tiny("CartPole-v1", seed=seed, shm_dir=str(shm_dir), **{"run.dir": run})
        hashes.append(echelon.train(config, output=io.StringIO()).summary["weights_sha256"])
    assert hashes[0] == hashes[1] != hashes[2]


def test_doctor_looks_and_sweeps(shm_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--shm-dir", str(shm_dir)]) == 0
    out = capsys.readouterr().out
    assert "cores" in out and "torch" in out and "none" in out
    dead = shm_dir / session_name(4194304, "deadbeef")  # above every process number
    dead.mkdir(0o700)
    (dead / "owner.json").write_text('{"pid": 4194304, "start_ticks": 1}')
    assert main(["doctor", "--shm-dir", str(shm_dir)]) == 0
    assert "left behind" in (out := capsys.readouterr().out) and str(dead) in out and dead.exists()
    assert main(["doctor", "--shm-dir", str(shm_dir), "--sweep"]) == 0
    assert "removed" in capsys.readouterr().out and not dead.exists()


def test_python_trains_a_lambda_inline(here: Path, shm_dir: Path) -> None:
    config = tiny(lambda: CounterEnv(5), shm_dir=str(shm_dir), **{"run.dir": "run"})
    output = io.StringIO()
    result = echelon.train(config, output=output)
    assert result.status == "finished" and result.run_dir == here / "run"
    assert result.return_mean == result.summary["return_mean"] and "run" in output.getvalue()
    with pytest.raises(ConfigError, match="<lambda>"):
        echelon.evaluate("run")  # nobody can find it by name


def test_what_was_trained_inline_by_an_importable_factory_can_be_played(here: Path, shm_dir: Path) -> None:
    echelon.train(tiny(make_counter, shm_dir=str(shm_dir), **{"run.dir": "run"}), output=io.StringIO())
    assert echelon.evaluate("run", episodes=2)["length_mean"] == 3.0
    assert echelon.resume("run", steps=200, output=io.StringIO()).summary["env_steps"] >= 200


def train_on_processes(env: Callable[..., Any], shm_dir: Path) -> echelon.RunResult:
    return echelon.train(tiny(env, "local", shm_dir=str(shm_dir), **{"run.dir": "run"}), output=io.StringIO())


def test_python_trains_an_importable_factory_on_processes(here: Path, shm_dir: Path) -> None:
    result = train_on_processes(make_counter, shm_dir)
    assert result.status == "finished" and result.summary["env_steps"] >= 100
    assert json.loads((here / "run/config.json").read_text())["config"]["env"]["id"] == "toy_envs:make_counter"
    score = echelon.evaluate("run", episodes=2)
    assert score["length_mean"] == 3.0
    assert list(shm_dir.iterdir()) == []


def test_python_refuses_a_lambda_on_processes(here: Path, shm_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r'is a lambda, so other processes cannot import it; .*engine="inline"'):
        train_on_processes(lambda: CounterEnv(5), shm_dir)
    assert list(shm_dir.iterdir()) == [] and not (here / "run").exists()
