"""Callables, and names with arguments, wherever a configuration takes a name."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from torch import nn

import echelon
from echelon.cli.train import make_parser, parse_config
from echelon.config import TrainConfig, replace
from echelon.config_io import from_json, to_json
from echelon.envs.make import probe_spaces
from echelon.errors import ConfigError
from echelon.frames import DQNApex
from echelon.names import describe_callable, resolve
from echelon.presets import PRESETS, preset
from toy_envs import CounterEnv, make_counter

SMALL = {
    **{"engine": "inline", "actor.num_actors": 1, "actor.envs": 2, "actor.trajectory": 8, "stop.steps": 32},
    **{"algorithm.minibatches": 2, "algorithm.epochs": 1, "evaluation.interval_s": 0.0},
}


class Halves(nn.Module):
    """A linear policy and value."""

    def __init__(self, num_inputs: int, num_params: int) -> None:
        super().__init__()
        self.layer = nn.Linear(num_inputs, num_params + 1)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = self.layer(observation.float().flatten(1))
        return both[:, :-1], both[:, -1]


def make_halves(spaces: Any, num_params: int, num_inputs: int = 4) -> nn.Module:
    return Halves(num_inputs, num_params)


class Noted(gym.Wrapper[Any, Any, Any, Any]):
    """Notes its arguments."""

    notes: list[tuple[int, str]] = []  # noqa: RUF012

    def __init__(self, env: gym.Env[Any, Any], size: int = 0, mode: str = "") -> None:
        super().__init__(env)
        self.notes.append((size, mode))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(shm_dir: Path, env: Any = "CartPole-v1", **changes: Any) -> dict[str, Any]:
    """Trains for a few steps; returns the configuration that the run folder has."""
    config = replace(preset("ppo", env), **{**SMALL, "run.dir": "run", "shm_dir": str(shm_dir), **changes})
    assert echelon.train(config, output=io.StringIO()).status == "finished"
    recorded: dict[str, Any] = json.loads(Path("run/config.json").read_text())["config"]
    return recorded


def options(*arguments: str) -> TrainConfig:
    return parse_config(make_parser("echelon train", ""), ["ppo", "CartPole-v1", *arguments])


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("env", [make_counter, lambda: CounterEnv(5), functools.partial(CounterEnv, length=4)])
def test_every_preset_takes_a_callable(name: str, env: Callable[..., Any]) -> None:
    assert preset(name, env).env.id is env


def test_a_callable_in_place_of_the_preset_is_told() -> None:
    with pytest.raises(ConfigError, match=r'preset\("ppo", make_env\)'):
        preset(make_counter, "CartPole-v1")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("test_callables:Noted(size=3, mode='a, (b)')", (3, "a, (b)")),
        ("test_callables:Noted(4, 'x:y')", (4, "x:y")),  # after the environment
        ("test_callables:Noted()", (0, "")),
        ("test_callables:Noted", (0, "")),
    ],
)
def test_a_wrapper_is_called_with_the_arguments_in_its_name(name: str, expected: tuple[int, str]) -> None:
    Noted.notes.clear()
    probe_spaces(options("--env.wrappers", f"{name},{name}").env)
    assert Noted.notes == [expected] * 2


@pytest.mark.parametrize(
    "arguments",
    [
        "size=open('x')",
        "size=x",
        "__import__('os')",
        "*[1]",
        "**{'size': 1}",
        "1)(2",
        "size=1, size=2",
        "size=",
        "[" * 5000,
    ],
)
def test_arguments_of_a_name_are_never_evaluated(arguments: str) -> None:
    with pytest.raises(ConfigError, match="arguments must be literals") as found:
        resolve(f"test_callables:Noted({arguments})")
    assert "object at" not in str(found.value)


def test_wrong_arguments_of_a_wrapper_are_told() -> None:
    with pytest.raises(ConfigError, match=r"Noted\(width=3\)\", which raised TypeError: .*'width'"):
        probe_spaces(options("--env.wrappers", "test_callables:Noted(width=3)").env)


def test_a_factory_takes_arguments_in_its_name() -> None:
    assert resolve("toy_envs:CounterEnv(7)")().length == resolve("toy_envs:CounterEnv(length=7)")().length == 7
    config = replace(TrainConfig(), **{"env.id": "toy_envs:CounterEnv(length=7)"})
    assert probe_spaces(config.env).action == CounterEnv().action_space


def test_a_partial_is_named_with_its_arguments() -> None:
    made = functools.partial(functools.partial(CounterEnv, length=3), length=4)
    assert describe_callable(made) == "toy_envs:CounterEnv(length=4)"
    assert resolve(describe_callable(made))().length == 4
    for unnamed in (functools.partial(CounterEnv, 4), functools.partial(CounterEnv, length=object())):
        with pytest.raises(ConfigError, match='engine="inline"'):
            describe_callable(unnamed)


def test_python_trains_with_callables_inline(here: Path, shm_dir: Path) -> None:
    limit = functools.partial(gym.wrappers.TimeLimit, max_episode_steps=3)
    recorded = train(shm_dir, **{"network.name": make_halves, "env.wrappers": [limit, "test_callables:Noted"]})
    assert recorded["network"]["name"] == "test_callables:make_halves"
    short, noted = recorded["env"]["wrappers"]
    assert short.endswith(":TimeLimit(max_episode_steps=3)") and noted == "test_callables:Noted"
    assert echelon.evaluate("run", episodes=2)["length_mean"] == 3.0


def test_python_trains_with_callables_on_processes(here: Path, shm_dir: Path) -> None:
    limit = functools.partial(gym.wrappers.TimeLimit, max_episode_steps=3)
    network = functools.partial(make_halves, num_inputs=4)
    recorded = train(shm_dir, engine="local", **{"network.name": network, "env.wrappers": limit})
    assert recorded["network"]["name"] == "test_callables:make_halves(num_inputs=4)"
    assert echelon.evaluate("run", episodes=2)["length_mean"] == 3.0


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"env.id": lambda: CounterEnv(5)}, "env.id"),
        ({"env.wrappers": ("test_callables:Noted", lambda env: env)}, "env.wrappers.1"),
        ({"network.name": lambda spaces, num_params: Halves(4, num_params)}, "network.name"),
    ],
)
def test_a_lambda_is_refused_where_processes_must_import_it(
    changes: dict[str, Any], path: str, here: Path, shm_dir: Path
) -> None:
    with pytest.raises(ConfigError, match=rf'^{path}: .* is a lambda, .*engine="inline" only.*"my_module:make"'):
        train(shm_dir, engine="local", **changes)
    assert not (here / "run").exists()


def test_a_configuration_with_callables_survives_json() -> None:
    wrappers = (functools.partial(Noted, size=2), "test_callables:Noted(3)")
    config = replace(preset("ppo", make_counter), **{"env.wrappers": wrappers, "network.name": make_halves})
    again = from_json(json.loads(json.dumps(to_json(config))))
    assert again.env.id == "toy_envs:make_counter" and again.network.name == "test_callables:make_halves"
    assert again.env.wrappers == ("test_callables:Noted(size=2)", "test_callables:Noted(3)")


@pytest.mark.usefixtures("drawn")
def test_a_run_of_lambdas_is_evaluated_and_resumed_with_them(here: Path, shm_dir: Path) -> None:
    def make_short() -> CounterEnv:
        return CounterEnv(5)

    def network(spaces: Any, num_params: int) -> nn.Module:
        return Halves(3, num_params)

    train(shm_dir, make_short, **{"network.name": network, "env.wrappers": [lambda env: env]})
    for missing, remedy in (
        ({}, r"env\.id=.*evaluate\(\"run\", env=make_env\), .*resume\(\"run\", env=make_env\)"),
        ({"env": make_short}, r"network\.name=.*evaluate\(\"run\", network=make_network\)"),
    ):
        with pytest.raises(ConfigError, match=remedy):
            echelon.evaluate("run", **missing)  # type: ignore[arg-type]
    assert echelon.evaluate("run", episodes=2, env=make_short, network=network)["length_mean"] == 5.0
    with pytest.raises(ConfigError, match=r"env\.wrappers\.0=.*resume\(\"run\", wrappers="):
        echelon.resume("run", steps=64, env=make_short, network=network)
    given: dict[str, Any] = {"env": make_short, "wrappers": [], "network": network}
    result = echelon.resume("run", steps=64, output=io.StringIO(), **given)
    assert result.summary["env_steps"] >= 64 and (here / "run/curve.png").exists()


def test_a_learning_rate_that_is_no_number_is_told() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate='fast' does not fit: expected finite number"):
        replace(preset("ppo", "CartPole-v1"), **{"optimizer.learning_rate": "fast"})
    with pytest.raises(ConfigError, match="DQNApex: learning_rate='fast' does not fit"):
        frame = DQNApex.__new__(DQNApex)
        frame.add_optimizers(torch.optim.Adam, [(nn.Linear(1, 1), "fast")], None)  # type: ignore[list-item]


def test_a_whole_number_may_be_written_as_1e6() -> None:
    config = echelon.replace(preset("ppo", "CartPole-v1"), **{"stop.steps": 1e6})
    assert config.stop.steps == 1_000_000 and isinstance(config.stop.steps, int)
    with pytest.raises(ConfigError, match=r"stop\.steps=1\.5 does not fit: expected int"):
        echelon.replace(config, **{"stop.steps": 1.5})


def test_an_unknown_field_is_told_with_the_nearest() -> None:
    config = preset("ppo", "CartPole-v1")
    for path, hint in {"learning_rat": "optimizer.learning_rate", "optimizer.rate": "optimizer.learning_rate"}.items():
        with pytest.raises(ConfigError, match=hint):
            replace(config, **{path: 1})
    with pytest.raises(ConfigError, match=r"The nearest are (\S+), (\S+), (\S+)\. `echelon train"):
        replace(config, xyz=1)


def test_a_script_that_trains_when_it_is_loaded_is_refused(tmp_path: Path) -> None:
    """Each process of its training would load it, and start the next training."""
    script = tmp_path / "script.py"
    script.write_text(
        "import echelon\n\ndef make():\n    pass\n\nechelon.train(echelon.preset('ppo', make))\n",
    )
    with pytest.raises(ConfigError, match=r"script\.py:6 in <module>.*`if __name__ == \"__main__\":`"):
        resolve(f"{script}:make")
    script.write_text("def make():\n    return 3\n")
    assert resolve(f"{script}:make")() == 3


def test_options_of_the_built_in_network_are_refused_beside_an_own_one() -> None:
    parser = make_parser("echelon train", "")
    for option, value in {"core": "gru", "hidden": "32,32", "normalize-observation": "true"}.items():
        words = ["ppo", "CartPole-v1", "--network.name", "nets.py:make", f"--network.{option}", value]
        with pytest.raises(ConfigError, match=rf"network\.{option.replace('-', '_')} has no effect.*nets\.py:make"):
            parse_config(parser, words)
    with pytest.raises(ConfigError, match=r"network\.core='gru' has no effect.*state_shapes"):
        replace(preset("ppo", "CartPole-v1"), **{"network.name": make_halves, "network.core": "gru"})
