"""Using what was trained: `echelon.load` in a user's own loop, `echelon export` for other programs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import echelon
from echelon import export
from echelon.cli.main import main
from echelon.envs.make import env_seeds
from echelon.errors import ConfigError, ExportError
from echelon.objectives.distributions import ActionScale
from echelon.policy import TrainedPolicy
from echelon.roles.evaluator import EVALUATION_SEED
from echelon.runs.checkpoint import save_weights
from echelon.runs.weights import read_weights
from policy_runs import RUNS, Averaging, PolicyRuns
from toy_envs import MaskedEnv

EXAMPLE = Path(__file__).parents[2] / "examples" / "onnx_policy.py"
NO_ONNX = "the extra onnx is not installed"
# The others have the graph of one of these, for ONNX; `make test-full` exports them, too.
GRAPHS = ("qr-dqn", "sac-continuous", "gru", "tree", "masked-dqn", "image")
UNNEEDED = """
import sys
import echelon
policy = echelon.load(sys.argv[1])
policy.act(policy.spaces.observation.sample())
own = ("envs", "engines", "world", "hosts", "replay", "servers", "roles", "training", "evaluation", "asynchronous")
unneeded = {"zmq", "matplotlib", "rich", "pygame", "PIL", "ray", "onnx", *(f"echelon.{name}" for name in own)}
print(sorted(unneeded & set(sys.modules)))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> PolicyRuns:
    return PolicyRuns(tmp_path_factory.mktemp("runs"))


def sampled(policy: TrainedPolicy, count: int) -> list[Any]:
    space = policy.spaces.observation
    space.seed(3)
    return [space.sample() for _ in range(count)]


def stacked(space: gym.Space[Any], observations: list[Any]) -> Any:
    empty = gym.vector.utils.create_empty_array(space, len(observations))
    return gym.vector.utils.concatenate(space, observations, empty)


@pytest.mark.parametrize("name", RUNS)
def test_a_batch_gets_the_actions_of_its_rows_and_a_lone_file_acts_like_its_run(
    runs: PolicyRuns, tmp_path: Path, name: str
) -> None:
    policy = echelon.load(runs[name])
    shutil.copy(runs[name] / "weights.safetensors", tmp_path)
    alone = echelon.load(tmp_path / "weights.safetensors")
    assert policy.is_recurrent == (name in ("gru", "lstm", "tree", "custom"))
    state, states = None, [None, None, None]
    for _ in range(3):
        rows = sampled(policy, 3)
        batch = stacked(policy.spaces.observation, rows)
        step = policy.act(batch, state)
        assert np.array_equal(alone.act(batch, state).action, step.action)
        for i, row in enumerate(rows):
            action, states[i] = policy.act(row, states[i])  # type: ignore[call-overload]
            assert policy.spaces.action.contains(action)
            np.testing.assert_allclose(action, step.action[i], atol=1e-5)
        state = step.state


@pytest.mark.parametrize("name", ["gru", "td3"])
def test_an_own_loop_reaches_what_evaluate_reports(runs: PolicyRuns, name: str) -> None:
    (seed,) = env_seeds(1, EVALUATION_SEED + 1, 0, 1)
    policy, env = echelon.load(runs[name]), gym.make(RUNS[name][1])
    (observation, _), state, total, ended = env.reset(seed=seed), None, 0.0, False
    while not ended:
        action, state = policy.act(observation, state)
        observation, reward, terminated, truncated, _ = env.step(action)
        total, ended = total + float(reward), terminated or truncated
    assert total == pytest.approx(echelon.evaluate(runs[name], episodes=1)["return_mean"], rel=1e-5)


def test_rows_that_begin_an_episode_do_not_use_their_state(runs: PolicyRuns) -> None:
    policy = echelon.load(runs["gru"])
    batch = np.stack(sampled(policy, 2))
    _, state = policy.act(batch)
    mixed, begun, gone_on = policy.act(batch, state, first=[True, False]), policy.act(batch), policy.act(batch, state)
    assert torch.equal(mixed.state[0][0], begun.state[0][0]) and torch.equal(mixed.state[0][1], gone_on.state[0][1])
    assert not torch.equal(begun.state[0][1], gone_on.state[0][1])


def test_sampled_actions_follow_the_seed(runs: PolicyRuns) -> None:
    observations = np.zeros((64, 3), np.float32)
    one, same, other = (
        echelon.load(runs["sac-continuous"], seed=seed).act(observations, greedy=False).action for seed in (1, 1, 2)
    )
    assert np.array_equal(one, same) and not np.array_equal(one, other) and len(np.unique(one)) > 32


def test_tensors_are_observations_too(runs: PolicyRuns) -> None:
    policy = echelon.load(runs["ppo"])
    row = sampled(policy, 1)[0]
    assert policy.act(torch.from_numpy(row)).action == policy.act(row).action == policy.act(row.tolist()).action


def test_a_mask_is_part_of_the_observation_or_given(runs: PolicyRuns) -> None:
    masked, env = echelon.load(runs["masked"]), MaskedEnv()
    observation, ended = env.reset(seed=0)[0], False
    while not ended:
        observation, _, ended, _, _ = env.step(masked.act(observation).action)  # raises if it is forbidden
    observation, _ = env.reset()
    for choice in range(5):
        only = np.arange(5) == choice
        assert masked.act(observation, mask=only).action == choice
        assert masked.act({"x": observation["x"]}, mask=only).action == choice
        assert (
            masked.act(stacked(masked.spaces.observation, [observation] * 3), mask=only).action.tolist() == [choice] * 3
        )
    cart = echelon.load(runs["ppo"])
    assert cart.act(np.zeros((2, 4)), mask=[[0, 1], [1, 0]]).action.tolist() == [1, 0]
    knobs = echelon.load(runs["knobs"])
    assert knobs.act(np.zeros(3), mask=[0, 1, 0, 0, 0, 1, 1, 0, 0]).action.tolist() == [2, 3, -1]


@pytest.mark.parametrize(
    ("name", "observation", "options", "expected"),
    [
        ("ppo", np.zeros(3), {}, r"observation has the shape \(3,\); expected \(4,\)"),
        ("ppo", np.zeros((2, 2, 4)), {}, r"has the shape \(2, 2, 4\)"),
        ("ppo", "left", {}, r"not an array of numbers: .*[^.]\.$"),
        ("ppo", (np.zeros(4), {}), {}, "give its first item"),
        ("ppo", np.zeros(4), {"mask": [1, 1, 1]}, r"mask has the shape \(3,\); expected \(2,\)"),
        ("td3", np.zeros(3), {"mask": [1]}, "continuous actions"),
        ("ppo", np.zeros(4), {"state": (np.zeros((1, 8)),)}, "Give the state that act"),
        ("gru", np.zeros((2, 4)), {"state": (np.zeros((1, 8)),)}, "for 2 observations"),
        ("image", np.zeros((10, 10, 3)), {}, "whole numbers"),
        ("masked", {"x": np.zeros(3)}, {}, "the key 'action_mask' of observation is missing"),
        ("masked", {"x": np.zeros(3), "action_mask": np.ones(5), "y": 0}, {}, "observation has the key 'y'"),
        ("masked", np.zeros(3), {}, "an array of shape .*expected a dict with the keys 'action_mask', 'x'"),
        ("masked", {"x": np.zeros(3), "action_mask": np.zeros(5, bool)}, {}, "allows none of 5 choices in row 0"),
        ("masked", {"x": np.zeros(3)}, {"mask": [0] * 5}, "allows none"),
        ("knobs", np.zeros(3), {"mask": [1, 1, 0, 0, 0, 0, 1, 1, 1]}, "allows none of 4 choices"),
        ("gru", np.array([[0, 0, 0, 0], [0, np.nan, 0, 0]]), {}, "observation holds nan in row 1"),
        ("gru", np.full(4, 1e300), {}, "holds inf in row 0, as torch.float32"),
        ("image", np.full((10, 10, 3), 256), {}, "holds 256 in row 0 and is outside its space: .* 0 to 255"),
        ("masked", {"x": np.zeros((2, 3)), "action_mask": np.ones(5, np.int8)}, {}, "number of rows"),
        ("tree", {"z": np.zeros((2, 2)), "a": (1000, [0, 1])}, {}, "observation.a.0 holds 1000 .* 0 to 999"),
        ("tree", {"z": np.zeros((2, 2)), "a": (1,)}, {}, "observation.a is a tuple of 1: expected a tuple of 2 parts"),
    ],
)
def test_what_does_not_fit_is_refused(
    runs: PolicyRuns, name: str, observation: Any, options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        echelon.load(runs[name]).act(observation, **options)


def test_floats_beyond_the_bounds_of_a_box_are_accepted(runs: PolicyRuns) -> None:
    policy = echelon.load(runs["ppo"])
    policy.act(np.full(4, 5.0))


def test_a_policy_shows_what_it_is(runs: PolicyRuns) -> None:
    for source in (runs["ppo"], runs["ppo"] / "weights.safetensors"):
        policy = echelon.load(source)
        for part in (str(policy.source), " steps: ", "Box", "Discrete(2)"):
            assert part in repr(policy)


def test_checkpoints_are_chosen_by_name_or_path(
    runs: PolicyRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["ppo"], run)
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert len(names) > 1
    told = f"has no checkpoint 'best', as no evaluation .* It has {', '.join(names)}, weights.safetensors"
    with pytest.raises(ConfigError, match=told):
        echelon.load(run, "best")
    shutil.copytree(run / "checkpoints" / names[0], run / "checkpoints" / "best")
    weights = {name: echelon.load(run, name).model.weights()["policy_head.weight"] for name in ("best", *names)}
    assert torch.equal(weights["best"], weights[names[0]]) and not torch.equal(weights["best"], weights[names[-1]])
    assert torch.equal(echelon.load(run).model.weights()["policy_head.weight"], weights[names[-1]])
    best = run / "checkpoints" / "best"
    assert echelon.load(best).source.name == "best"
    copy, link = run / "saved" / "mine", tmp_path / "champion"
    shutil.copytree(best, copy)
    link.symlink_to(best)
    monkeypatch.chdir(best.parent)
    for path in (copy, link, "best"):
        assert echelon.load(path).source.is_dir() and echelon.evaluate(path, episodes=1)["episodes"] == 1
    assert echelon.load(run, str(best)).source == best
    with pytest.raises(ConfigError, match="looked for in a run folder"):
        echelon.load(run / "weights.safetensors", "best")
    with pytest.raises(ConfigError, match="there is no run folder"):
        echelon.load(tmp_path / "absent")


def test_a_network_that_somebody_else_names_needs_trust(
    runs: PolicyRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, file = runs["custom"], tmp_path / "weights.safetensors"
    shutil.copy(run / "weights.safetensors", file)
    assert echelon.load(run).is_recurrent and echelon.load(file).is_recurrent
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # another user, with another key
    for path in (run, file):
        with pytest.raises(ConfigError, match=r"network.name='policy_runs:Averaging', code that .* Use --trust"):
            echelon.load(path)
        assert echelon.load(path, trust=True).is_recurrent


def test_folders_and_files_of_older_releases(runs: PolicyRuns, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["ppo"], run)
    record = json.loads((run / "config.json").read_text())
    del record["spaces"]
    (run / "config.json").write_text(json.dumps(record))
    observation, expected = np.zeros(4), echelon.load(runs["ppo"])
    assert echelon.load(run).act(observation).action == expected.act(observation).action  # asks the environment
    save_weights(run / "bare.safetensors", read_weights(run / "weights.safetensors"), {})
    assert echelon.load(run / "bare.safetensors").spaces == expected.spaces
    (run / "bare.safetensors").rename(tmp_path / "bare.safetensors")
    with pytest.raises(ConfigError, match=r"not the spaces and the configuration .* no config.json in"):
        echelon.load(tmp_path / "bare.safetensors")


@pytest.mark.parametrize("text", ["", "{", '{"format": 2}', '{"format": 1, "config": {}}', '{"format": []}'])
def test_damaged_metadata_is_reported(runs: PolicyRuns, tmp_path: Path, text: str) -> None:
    save_weights(tmp_path / "x.safetensors", read_weights(runs["ppo"] / "weights.safetensors"), {"policy": text})
    with pytest.raises(ConfigError, match="metadata"):
        echelon.load(tmp_path / "x.safetensors")
    (tmp_path / "y.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(
        ConfigError, match=r"cannot be read: it is not a safetensors file\. .*\.onnx and \.pt2 files are"
    ):
        echelon.load(tmp_path / "y.safetensors")


def test_loading_imports_no_environments_processes_or_plots(runs: PolicyRuns) -> None:
    command = [sys.executable, "-c", UNNEEDED, str(runs["gru"])]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert answer.stdout.strip() == "[]"


def exported(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, Any]:
    """Runs `echelon export`; returns what it prints as JSON."""
    assert main(["export", *map(str, words), "--json"]) == 0, capsys.readouterr().err
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_exported_for_torch_and_as_weights(
    runs: PolicyRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    policy = echelon.load(runs[name])
    rows = next(export.random_observations(policy, 7))
    done = exported(capsys, runs[name], "--format", "torch-export", "-o", tmp_path / "a.pt2")
    assert done["difference"] <= 1e-5 and done["outputs"][:2] == ["action", "params"]
    arguments = (rows, policy.model.network.initial_state(7, "cpu")) if policy.is_recurrent else (rows,)
    action = torch.export.load(tmp_path / "a.pt2").module()(*arguments)[0]
    np.testing.assert_allclose(action, policy.act(rows).action, atol=1e-5)
    assert exported(capsys, runs[name], "--format", "safetensors", "-o", tmp_path / "a.safetensors")["difference"] == 0
    assert np.array_equal(echelon.load(tmp_path / "a.safetensors").act(rows).action, policy.act(rows).action)


@pytest.mark.parametrize(
    "name", [name if name in GRAPHS else pytest.param(name, marks=pytest.mark.full) for name in RUNS]
)
def test_a_run_is_exported_as_onnx(
    runs: PolicyRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason=NO_ONNX)
    policy, file = echelon.load(runs[name]), tmp_path / "a.onnx"
    done = exported(capsys, runs[name], "--format", "onnx", "-o", file)
    assert done["difference"] <= 1e-5 and [path.name for path in tmp_path.iterdir()] == ["a.onnx"]
    session = onnxruntime.InferenceSession(file)
    assert all(entry.shape[0] == "batch" for entry in (*session.get_inputs(), *session.get_outputs()))
    rows = next(export.random_observations(policy, 7))
    leaves = [*export.flatten(policy.spaces.observation, rows), *policy.model.network.initial_state(7, "cpu")]
    feed = {name: leaf.numpy() for name, leaf in zip(done["inputs"], leaves, strict=True)}
    np.testing.assert_allclose(session.run(["action"], feed)[0], policy.act(rows).action, atol=1e-5)


def test_the_example_plays_an_exported_policy(
    runs: PolicyRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime", reason=NO_ONNX)
    exported(capsys, runs["gru"], "--format", "onnx", "-o", tmp_path / "a.onnx")
    command = [sys.executable, str(EXAMPLE), str(tmp_path / "a.onnx"), "CartPole-v1"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    policy, env = echelon.load(runs["gru"]), gym.make("CartPole-v1")
    (observation, _), state, ended, count = env.reset(seed=0), None, False, 0
    while not ended:
        action, state = policy.act(observation, state)
        observation, _, terminated, truncated, _ = env.step(action)
        ended, count = terminated or truncated, count + 1
    assert answer.stdout == f"return {count}.0 after {count} steps\n"


def test_a_file_that_differs_from_the_policy_is_not_left(
    runs: PolicyRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ActionScale.tensor_to_env
    monkeypatch.setattr(ActionScale, "tensor_to_env", lambda scale, action: right(scale, action) + 1e-4)
    for format in ("torch-export", "safetensors"):
        assert main(["export", str(runs["td3"]), "--format", format, "-o", str(tmp_path / "a")]) == 1
        assert "differs from the policy by 0.0001, more than 1e-05" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_network_that_cannot_be_traced_is_reported(
    runs: PolicyRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, plain = echelon.load(runs["custom"]), Averaging.forward

    def branching(self: Averaging, observation: Any, state: Any, first: Any) -> Any:
        return plain(self, observation * 2 if float(observation.sum()) > 0 else observation, state, first)

    monkeypatch.setattr(Averaging, "forward", branching)
    with pytest.raises(ExportError, match=r"must be traceable by torch\.export"):
        export.export_policy(policy, tmp_path / "a.pt2", "torch-export")
    assert not list(tmp_path.iterdir())


def test_wrong_options_of_export(
    runs: PolicyRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    for words, expected in (
        (["--format", "onnx"], 'needs onnx and onnxscript and onnxruntime: pip install "echelon\\[onnx]"'),
        (["--format", "pickle"], "invalid choice: 'pickle'"),
        ([], "--format is missing"),
        (["--format", "safetensors", "--checkpoint", "best"], "has no checkpoint 'best'"),
        (
            ["--format", "safetensors", "-o", "p.pt2"],
            "p.pt2 does not fit --format safetensors: .* end with .safetensors",
        ),
        (["--format", "safetensors", "-o", str(tmp_path / "absent" / "a")], "cannot be written"),
    ):
        assert main(["export", str(runs["ppo"]), *words]) == 2
        assert re.search(expected, capsys.readouterr().err), words
    assert main(["export", str(runs["ppo"]), "--format", "safetensors"]) == 0
    assert str(runs["ppo"] / "policy.safetensors") in capsys.readouterr().out
    assert echelon.load(runs["ppo"] / "policy.safetensors").act(np.zeros(4)).action in (0, 1)
    checkpoint = next((runs["ppo"] / "checkpoints").iterdir())
    assert main(["export", str(checkpoint), "--format", "safetensors"]) == 0
    assert f"{runs['ppo'] / 'policy.safetensors'}: {checkpoint.name} as" in capsys.readouterr().out
