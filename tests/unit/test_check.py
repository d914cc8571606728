"""The checks of an environment: quickly before a run, and in full by `echelon check`."""

from __future__ import annotations

import io
import json
import random
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import echelon
import toy_envs as toy
from echelon.cli.main import main
from echelon.config import EnvConfig, replace
from echelon.envs.check import QUICK_STEPS, quick_check
from echelon.envs.make import probe_spaces
from echelon.errors import EnvError
from echelon.presets import preset

FAULTS = {
    "shape": r"observation\.x of step 1 has shape \(4,\); its space has \(3,\)",
    "nan": r"observation\.x\[1\] is nan at step 2",
    "infinity": r"observation\.x\[1\] is inf at step 2",
    "dtype": r"observation\.picture\[0, 0, 0\] is 0\.5 at the first reset, which does not fit the uint8",
    "entry": r"has the keys \['x'\] and lacks \['action_mask', 'picture'\]",
    "mask": r"the mask of step 2 allows no action: \[0, 0\]",
    "reset": r"reset returned a dict with the keys .*\. reset must return \(observation, info\)",
    "step": r"step returned 4 values .* Split the old `done`",
    "done": "terminated of step 1 is 'no'",
    "reward": "the reward of step 1 is nan",
    "rewards": r"the reward of step 1 is an array of shape \(2,\), not one number",
    "raise": r"step 2 raised RuntimeError: the simulator burnt down, at .*toy_envs.py:\d+ in step",
    "again": r"the reset after step 5 raised RuntimeError: it cannot be reset twice, at .*toy_envs.py:\d+ in reset",
}


def probe(env: Any, *, may_interrupt: bool = True, **fields: Any) -> None:
    config = EnvConfig(id=env, **fields)
    probe_spaces(config, partial(quick_check, config=config, may_interrupt=may_interrupt))


def tiny(env: Any, folder: Path, **fields: Any) -> echelon.TrainConfig:
    small = {"actor.num_actors": 1, "actor.envs": 2, "actor.trajectory": 8, "network.hidden": (8,), "engine": "inline"}
    rule = {"algorithm.minibatches": 2, "algorithm.epochs": 1, "evaluation.interval_s": 0.0, "stop.steps": 100}
    return replace(preset("ppo", "x:y"), **{**small, **rule, "env.id": env, "run.dir": str(folder / "run"), **fields})


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_environment_is_refused_before_a_run_starts(tmp_path: Path, fault: str) -> None:
    config = tiny(toy.FaultyEnv, tmp_path, **{"env.kwargs": {"fault": fault}})
    with pytest.raises(EnvError, match=f"toy_envs:FaultyEnv has 1 error; nothing was started(.|\n)*{FAULTS[fault]}"):
        echelon.train(config, output=io.StringIO())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("engine", ["inline", "local"])
def test_a_run_shows_the_warnings_once_and_ends_if_a_conversion_loses_a_value(
    tmp_path: Path, shm_dir: Path, engine: str
) -> None:
    output, fields = io.StringIO(), {"engine": engine, "shm_dir": str(shm_dir), "stop.steps": 10_000}
    with pytest.raises(EnvError, match=r"at its step 31 .*observation\[1\] is 0\.5, which does not fit the uint8"):
        echelon.train(tiny("toy_envs:CastEnv", tmp_path, **fields), output=output)
    [line] = [line for line in output.getvalue().splitlines() if "It is converted" in line]
    assert "toy_envs:CastEnv" in line and "float32" in line and "uint8" in line


def test_so_it_is_with_a_process_for_each_role(tmp_path: Path, shm_dir: Path) -> None:
    fields = {"env.kwargs": {"fault": "nan"}, "engine": "local", "shm_dir": str(shm_dir)}
    with pytest.raises(EnvError, match=FAULTS["nan"]):
        echelon.train(tiny("toy_envs:FaultyEnv", tmp_path, **fields), output=io.StringIO())
    assert not (tmp_path / "run").exists()


def test_a_reset_without_seed_names_the_line_of_its_definition() -> None:
    with pytest.raises(EnvError, match=r"reset does not accept seed= and options=, at .*toy_envs.py:\d+"):
        probe(toy.SeedlessEnv)


@pytest.mark.parametrize("fault", ["", "bounds", "float64", "draw"])
def test_what_training_can_handle_is_no_error(fault: str) -> None:
    probe(toy.FaultyEnv, kwargs={"fault": fault})


@pytest.mark.parametrize(
    "env", [toy.CounterEnv, toy.TreeEnv, toy.MaskedEnv, toy.Film, toy.make_tree_vector, "Pendulum-v1", "CartPole-v1"]
)
def test_sound_environments_pass(env: Any) -> None:
    probe(env)


@pytest.mark.parametrize(
    ("env", "kwargs", "text"),
    [
        (toy.make_faulty_vector, {"fault": "nan"}, r"observation\.x\[0, 1\] is nan at step 2"),
        (toy.make_faulty_vector, {"fault": "mask"}, "allows no action"),
        (toy.make_flat_rewards, {}, "not 1 numbers"),
        (toy.StutteringVectorEnv, {}, "ended twice in a row"),
    ],
)
def test_vector_environments_are_checked_as_a_whole(env: Any, kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(EnvError, match=text):
        probe(env, kwargs=kwargs)


def test_environments_that_may_raise_are_not_refused_for_it() -> None:
    probe(toy.FaultyEnv, kwargs={"fault": "raise"}, on_error="restart")
    with pytest.raises(EnvError, match="is nan"):
        probe(toy.FaultyEnv, kwargs={"fault": "nan"}, on_error="restart")


def test_a_slow_environment_is_interrupted_where_the_process_ends_soon() -> None:
    begun = time.monotonic()
    probe(toy.FaultyEnv, kwargs={"fault": "slow"})
    assert time.monotonic() - begun < 1.5


def test_in_a_shared_process_or_a_thread_slow_calls_are_not_interrupted() -> None:
    probe(toy.DawdlingEnv, may_interrupt=False)
    thread = threading.Thread(target=probe, args=(toy.DawdlingEnv,))
    thread.start()
    thread.join()


def test_the_check_is_short_creates_nothing_and_leaves_the_generators_alone(tmp_path: Path) -> None:
    def state() -> list[Any]:
        return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]  # type: ignore[index]

    class Global(toy.CounterEnv):
        def step(self, action: Any) -> toy.Step:
            random.random(), np.random.rand(), torch.rand(1)
            return super().step(action)

    before = state()
    probe(Global)
    assert state() == before
    probe(toy.FaultyEnv, kwargs={"log": str(tmp_path / "log")})
    lines = (tmp_path / "log").read_text().split()
    assert lines.count("made") == 1 and 10 < lines.count("step") <= QUICK_STEPS


def test_the_check_does_not_change_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sha(name: str) -> str:
        return str(echelon.train(tiny(toy.CounterEnv, tmp_path / name), output=io.StringIO()).summary["weights_sha256"])

    checked = sha("checked")
    monkeypatch.setattr("echelon.roles.plan.sizing.quick_check", lambda *_, **__: [])
    assert sha("unchecked") == checked


def report(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    assert main(["check", *arguments, "--steps", "50", "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_the_command_shows_network_values_and_speed(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "toy_envs:FaultyEnv")
    assert found["ok"] and {check["level"] for check in found["checks"]} == {"ok", "info"}
    mask, picture, x = found["network"]
    assert "masks the actions" in mask and "normalized" in x
    assert "channels last, uint8 scaled to 0 to 1 -> convolutions" in picture
    assert found["family"] == "images" and found["zoo"] and "Categorical" in found["distribution"]
    assert found["presets"]["td3"] == "does not support this action space"
    assert set(found["steps_per_s"]) == {"1", "8"} and min(found["steps_per_s"].values()) > 0


@pytest.mark.parametrize("fault", [*FAULTS, "creation"])
def test_the_command_exits_with_1_for_a_faulty_environment(capsys: pytest.CaptureFixture[str], fault: str) -> None:
    found = report(capsys, "toy_envs:FaultyEnv", "--env-kwargs", json.dumps({"fault": fault}), code=1)
    assert sum(check["level"] == "error" for check in found["checks"]) == 1


def test_the_environment_of_the_readme_is_sound(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    (block,) = (part for part in text.split("```python\n") if part.startswith("# corridor.py"))
    (tmp_path / "corridor.py").write_text(block.partition("```")[0])
    assert report(capsys, f"{tmp_path}/corridor.py:Corridor")["ok"]


def test_the_command_passes_actions_as_gymnasium_samples_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toy.CastEnv, "actions", [])
    report(capsys, "toy_envs:CastEnv", "--env-kwargs", '{"value": 1}')
    assert {type(action) for action in toy.CastEnv.actions} == {np.int64}


class TableEnv(toy.StillEnv):
    """Observes a picture of floats without an axis of channels."""

    observation_space = gym.spaces.Box(0, 1, (48, 64), np.float32)

    def reset(self, **keywords: Any) -> tuple[Any, dict[str, Any]]:
        return np.zeros((48, 64), np.float32), super().reset(**keywords)[1]

    def step(self, action: Any) -> Any:
        return np.ones((48, 64), np.float32), *super().step(action)[1:]


def test_a_large_table_may_be_meant_as_an_image(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "test_check:TableEnv")
    [info] = [check for check in found["checks"] if check["check"] == "image"]
    assert (info["level"], "axis" in info["remedy"]) == ("info", True)


def test_a_reward_that_is_not_finite_has_no_scale(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "toy_envs:FaultyEnv", "--env-kwargs", '{"fault": "reward"}', code=1)
    assert "reward scale" not in {check["check"] for check in found["checks"]}


def test_a_missing_entry_is_named_without_the_arrays(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "toy_envs:FaultyEnv", "--env-kwargs", '{"fault": "entry"}', code=1)
    [error] = [check for check in found["checks"] if check["level"] == "error"]
    assert "picture" in error["text"] and "array" not in error["text"] and "Box" not in error["text"]


def test_an_environment_without_spaces_is_a_finding_and_not_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "test_bad_input:NoSpacesEnv", code=1)
    assert "gymnasium.spaces" in found["checks"][0]["text"]


@pytest.mark.parametrize(
    ("fault", "text"), [("bounds", "its bounds are"), ("float64", "It is converted"), ("draw", "same seed and actions")]
)
def test_the_command_warns_of_what_training_can_handle(
    capsys: pytest.CaptureFixture[str], fault: str, text: str
) -> None:
    found = report(capsys, "toy_envs:FaultyEnv", "--env-kwargs", json.dumps({"fault": fault}))
    [warning] = [check for check in found["checks"] if check["level"] == "warning"]
    assert text in warning["text"] and warning["remedy"]


def test_the_command_prints_lines_and_refuses_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "CartPole-v1", "--steps", "30"]) == 0
    out = capsys.readouterr().out
    assert "no errors" in out and "tuned for CartPole" in out and "mario" not in out
    assert main(["check", "Pendulum-v1", "--steps", "30", "--preset", "dqn"]) == 1
    out = capsys.readouterr().out
    assert "does not fit: this algorithm supports Discrete" in out and "settings:" not in out
    assert main(["check", "toy_envs:CounterEnv", "--steps", "30", "--preset", "sac"]) in (0, 1)
    assert "no values are tuned" in capsys.readouterr().out
    assert main(["check", "CartPole-v1", "--steps", "30", "--network.name", "test_bad_input:misfit_network"]) == 1
    assert "misfit_network" in capsys.readouterr().out
    for wrong in (["Nope-v3"], ["CartPole-v1", "--steps", "0"], ["CartPole-v1", "--env-kwargs", "["], []):
        assert main(["check", *wrong]) == 2
