"""Configuration files, --dry-run, and the values that --help shows."""

from __future__ import annotations

import io
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

import echelon
from echelon.cli.learner import OPTIONS, with_address
from echelon.cli.main import main
from echelon.cli.train import make_parser, parse_config
from echelon.config import TrainConfig, replace
from echelon.config_files import to_toml
from echelon.errors import ConfigError
from echelon.presets import PRESETS, preset
from telling import Command, assert_told
from toy_envs import make_counter

TINY = {
    **{"engine": "inline", "actor.num_actors": 1, "actor.envs": 2, "actor.trajectory": 8, "stop.steps": 32},
    **{"algorithm.minibatches": 2, "algorithm.epochs": 1, "evaluation.interval_s": 0.0, "run.dir": "run"},
}


KWARGS = ['{"sizes": [1, true], "a b": {"c": 1.5, "d": "\\n\\"#"}}', '{"sizes": [1, null]}']


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def options(*arguments: str) -> TrainConfig:
    return parse_config(make_parser("echelon train", ""), arguments)


def write(text: str, name: str = "my.toml") -> str:
    Path(name).write_text(text)
    return name


@pytest.mark.parametrize("name", PRESETS)
def test_a_dry_run_prints_a_file_that_runs_the_same(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    kwargs = KWARGS[name == "ppo"]
    given = [
        *(name, "Pendulum-v1", "--steps", "1e6", "--optimizer.learning-rate", "1e-5", "--env-kwargs", kwargs),
        *("--env.wrappers", "gymnasium.wrappers:TimeLimit(max_episode_steps=9),a:b", "--until-return", "-1.5"),
    ]
    assert main(["train", *given, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert options("--config", write(text)) == options(*given)
    assert list(Path.cwd().iterdir()) == [Path.cwd() / "my.toml"]
    assert "learning_rate = 1e-05  # preset: " in text and "steps = 1000000  # preset: 0" in text
    assert 'until_return = -1.5  # preset: "none"' in text and 'id = "Pendulum-v1"\n' in text


def test_a_dry_run_of_a_preset_marks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "ppo", "CartPole-v1", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "# preset:" not in text and text == text.rstrip() + "\n"
    assert to_toml(preset("ppo", "CartPole-v1"), preset("ppo", "CartPole-v1")) in text


def test_learner_and_bench_dry_run_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["learner", "sac", "Pendulum-v1", "--address", "127.0.0.1:5", "--episodes", "9", "--dry-run"]) == 0
    file = write(capsys.readouterr().out)
    parser = make_parser("echelon learner", "", ["--config", file], OPTIONS)
    config = parse_config(parser, with_address(["--config", file]), OPTIONS)
    assert config.workers.address == "tcp://127.0.0.1:5" and config.stop.episodes == 9
    assert main(["bench", "train", "ppo", "CartPole-v1", "--dry-run"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["preset"] == "ppo"
    file = write("[algorithm]\nepochs = 3")
    assert main(["bench", "async", "CartPole-v1", "--config", file, "--dry-run"]) == 0
    shown = tomllib.loads(capsys.readouterr().out)
    assert shown["algorithm"]["epochs"] == 3 and shown["actor"]["trajectory"] == 512


def test_options_override_the_file_and_the_file_the_preset() -> None:
    file = write(
        'preset = "ppo"\nseed = 3\n[env]\nid = "Pendulum-v1"\n[stop]\nsteps = 1e6\n[learner]\nmax_lag = "none"'
    )
    expected = replace(preset("ppo", "Pendulum-v1"), **{"seed": 4, "stop.steps": 1_000_000, "learner.max_lag": None})
    for given in ([], ["ppo"], ["Pendulum-v1"], ["ppo", "Pendulum-v1"]):
        assert options(*given, "--config", file, "--seed", "4") == expected
    as_json = write(json.dumps({"preset": "ppo", "seed": 3, "network": {"hidden": [8]}}), "my.json")
    assert options("CartPole-v1", "--config", as_json) == replace(
        preset("ppo", "CartPole-v1"), **{"seed": 3, "network.hidden": (8,)}
    )


def test_fields_that_must_fit_each_other_may_be_in_file_and_options() -> None:
    file = write("[replay]\nmin_size = 2000000")  # above the capacity of the preset
    assert options("dqn", "CartPole-v1", "--config", file, "--replay.capacity", "3e6").replay.min_size == 2_000_000


@pytest.mark.parametrize(
    ("text", "arguments", "fragments"),
    [
        ('preset = "dqn"', ["ppo", "CartPole-v1"], ["preset='dqn'", "'ppo'", "Remove one"]),
        ('[env]\nid = "Pendulum-v1"', ["ppo", "CartPole-v1"], ["env.id='Pendulum-v1'", "'CartPole-v1'"]),
        ("[optimizer]\nlearnin_rate = 1", ["ppo", "CartPole-v1"], ["my.toml", "Did you mean optimizer.learning_rate?"]),
        ("steps = 1", ["ppo", "CartPole-v1"], ["my.toml", "no field steps", "stop.steps"]),
        ("[actr]\nenvs = 1", ["ppo", "CartPole-v1"], ["my.toml", "no field actr.envs", "actor.envs"]),
        ("actor = 1", ["ppo", "CartPole-v1"], ["actor=1 is a section"]),
        ("[actor]\nenvs = 'many'", ["ppo", "CartPole-v1"], ["my.toml", "actor.envs='many'", "int"]),
        ("optimiser = 3", ["ppo", "CartPole-v1"], ["my.toml", "Did you mean optimizer?", "section"]),
        ("[replay]\nbatch = 7", ["ppo", "CartPole-v1"], ["replay.batch=7 has no effect", "no replay"]),
        ('[algorithm]\nname = "dqn"', ["ppo", "CartPole-v1"], ["algorithm.name='dqn'", "the preset ppo"]),
        ("seed = ", ["ppo", "CartPole-v1"], ["my.toml is not TOML"]),
        ("seed: 1", ["ppo", "CartPole-v1"], ["my.toml is not TOML", "JSON", "YAML is not read"]),
        ("seed = 1", [], ["names no preset"]),
        ('preset = "ppo"', [], ["the environment is missing"]),
        ('preset = "pppo"', ["CartPole-v1"], ["'pppo'", "Did you mean"]),
    ],
)
def test_a_mistake_in_a_file_is_told(text: str, arguments: list[str], fragments: list[str], command: Command) -> None:
    file = str(Path("my.toml").absolute())
    Path(file).write_text(text)
    assert_told(command("train", *arguments, "--config", file, "--dry-run"), 2, *fragments)


def test_a_file_that_is_not_there_is_told(command: Command) -> None:
    assert_told(command("train", "--config", "none.toml"), 2, "--config none.toml cannot be read: No such file")


def recorded(shm_dir: Path, **changes: Any) -> TrainConfig:
    """Trains into `run`; returns the configuration that it had."""
    config = replace(preset("ppo", "toy_envs:make_counter"), **{**TINY, "shm_dir": str(shm_dir), **changes})
    echelon.train(config, output=io.StringIO())
    return config


def test_the_configuration_of_a_run_is_taken_as_it_is(shm_dir: Path) -> None:
    config = recorded(shm_dir, **{"env.id": make_counter})
    found = options("--config", "run/config.json")
    chosen = {"run.dir": "", "env.id": "toy_envs:make_counter", "acting.mode": "local"}
    assert replace(found, **{"learner.threads": 0}) == replace(config, **chosen)
    assert options("--config", "run/config.json", "--seed", "9").seed == 9
    with pytest.raises(ConfigError, match=r"env\.id='toy_envs:make_counter', the command 'CartPole-v1'"):
        options("ppo", "CartPole-v1", "--config", "run/config.json")


def test_the_configuration_of_a_foreign_run_names_no_code(shm_dir: Path) -> None:
    recorded(shm_dir)
    record = json.loads(Path("run/config.json").read_text())
    for name in ("run/config.json", "copy.json"):
        Path(name).write_text(json.dumps({**record, "mark": "0" * 64}))
        with pytest.raises(ConfigError, match=r"asks for env\.id='toy_envs:make_counter', code .*--trust"):
            options("--config", name)
        assert options("--config", name, "--trust").env.id == "toy_envs:make_counter"
    Path("run/config.json").write_text(json.dumps(record["config"]))  # without a mark it is not a file of values
    with pytest.raises(ConfigError, match="it has no format"):
        options("--config", "run/config.json")


@pytest.mark.parametrize(
    "arguments", [["dqn", "ALE/Pong-v5", "--help"], ["--seed", "3", "dqn", "--help", "ALE/Pong-v5"]]
)
def test_help_shows_the_values_for_the_environment(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", *arguments])
    text = capsys.readouterr().out
    assert "dqn preset for ALE/Pong-v5" in text
    assert f"(default {preset('dqn', 'ALE/Pong-v5').replay.capacity})" in text
