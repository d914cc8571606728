"""User errors: each ends with one clear message and the right exit code, and leaves no incomplete files."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from echelon.cli.main import main
from echelon.envs.check import QUICK_STEPS
from echelon.errors import ConfigError
from echelon.presets import ppo as preset_ppo
from echelon.runs.checkpoint import save_weights
from echelon.runs.folder import RunFolder
from echelon.training import resume
from telling import Command, assert_told
from toy_envs import CounterEnv, Step

HERE = str(Path(__file__).resolve())
SMALL = [
    *("--engine", "inline", "--actors", "1", "--envs-per-actor", "2", "--actor.trajectory", "8"),
    *("--evaluation.episodes", "0"),
]


class MatrixActionEnv(CounterEnv):
    def __init__(self) -> None:
        super().__init__()
        self.action_space = gym.spaces.Box(-1.0, 1.0, (2, 2))


class NoSpacesEnv(CounterEnv):
    def __init__(self) -> None:
        super().__init__()
        del self.action_space


class NoneEnv(CounterEnv):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = None  # type: ignore[assignment]


class TextEnv(CounterEnv):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = gym.spaces.Text(5)


class GivingEnv(CounterEnv):
    """Gives `reward` and `observation` from its `after`th step on, which the check before the run does not reach."""

    def __init__(self, reward: float | str = 1.0, observation: float | str = 0.5, after: int = QUICK_STEPS + 6) -> None:
        super().__init__(length=1000)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.gift, self.after = (np.array([float(observation)], np.float32), float(reward)), after

    def observation(self) -> Any:
        return self.gift[0].copy() if self.t >= self.after else np.zeros(1, np.float32)

    def step(self, action: Any) -> Step:
        observation, _, terminated, truncated, info = super().step(action)
        return observation, self.gift[1] if self.t >= self.after else 1.0, terminated, truncated, info


class SteeredEnv(GivingEnv):
    """Continuous: it observes what it was last told to do."""

    def __init__(self) -> None:
        super().__init__(after=0)
        self.action_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.told = np.zeros(1, np.float32)

    def observation(self) -> Any:
        return self.told.copy()

    def step(self, action: Any) -> Step:
        self.told = action
        return super().step(action)


class RaisingEnv(CounterEnv):
    """Raises after more steps than the check before the run takes."""

    def __init__(self) -> None:
        super().__init__(length=1000)

    def step(self, action: Any) -> Step:
        if self.t > QUICK_STEPS:
            raise ValueError("the wheel came off")
        return super().step(action)


class OldEnv(CounterEnv):
    """Returns what gym did, after more steps than the check before the run takes."""

    def __init__(self) -> None:
        super().__init__(length=1000)

    def step(self, action: Any) -> Any:
        step = super().step(action)
        return step if self.t <= QUICK_STEPS else (*step[:3], step[4])


def make_unmakable() -> gym.Env[Any, Any]:
    raise ValueError("no wheels in stock")


def raising_network(spaces: Any, num_params: int) -> nn.Module:
    raise ValueError("no neurons in stock")


def misfit_network(spaces: Any, num_params: int) -> nn.Module:
    return nn.Linear(4, num_params)  # no value


class FailingNetwork(nn.Module):
    def forward(self, observation: Any) -> Any:
        return self.missing


def make_failing(spaces: Any, num_params: int) -> nn.Module:
    return FailingNetwork()


def not_a_network(spaces: Any, num_params: int) -> str:
    return "a network"


MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "preset": (["train", "imppala", "CartPole-v1"], ["'imppala'", "Did you mean impala?"]),
    "environment": (["train", "ppo", "CartPol-v1"], ['"CartPol-v1"', "Did you mean CartPole-v1"]),
    "module": (["train", "ppo", "no_such_module:make"], ["no_such_module", "install its package"]),
    "file": (["train", "ppo", "no_such.py:make"], ["there is no file", "no_such.py"]),
    "factory": (["train", "ppo", "toy_envs:make_countr"], ["make_countr", "Did you mean make_counter"]),
    "no factory": (["train", "ppo", "toy_envs:np"], ["toy_envs:np", "must be callable"]),
    "missing environment": (["train", "ppo"], ["ENV", "--help"]),
    "one too many": (["train", "ppo", "CartPole-v1", "MountainCar-v0"], ["MountainCar-v0", "--help"]),
}
VALUES: dict[str, tuple[str, list[str]]] = {
    "field": ("--actor.evns 8", ["actor.evns", "Did you mean actor.envs?"]),
    "option": ("--actrs 8", ["actrs", "Did you mean actor.num_actors or "]),
    "option elsewhere": ("--lr 1e-3", ["Did you mean optimizer.learning_rate?"]),
    "far option": ("--foo 8", ["no field foo", "The nearest are", "`echelon train PRESET --help`"]),
    "many options": ("--batch 8", ["Did you mean acting.batch or learner.batch or replay.batch?"]),
    "section": ("--actor 8", ["names a section", "actor.envs"]),
    "no value": ("--actor.envs", ["--actor.envs needs a value"]),
    "no short value": ("--actors", ["--actors", "expected one argument"]),
    "word": ("--actors many", ["actor.num_actors='many'", "int"]),
    "fraction": ("--actors 1.5", ["actor.num_actors=1.5", "int"]),
    "zero": ("--actors 0", ["actor.num_actors=0", "at least 1"]),
    "engine": ("--engine inlin", ["engine='inlin'", "inline or local", "Did you mean inline?"]),
    "precision": ("--learner.precision float16", ["float16", "float32 or bfloat16"]),
    "nan": ("--optimizer.learning-rate nan", ["optimizer.learning_rate=nan", "finite"]),
    "no rate": ("--optimizer.learning-rate 0", ["optimizer.learning_rate=0", "above 0"]),
    "epsilon": ("--optimizer.epsilon -1", ["optimizer.epsilon=-1", "at least 0"]),
    "seed": ("--seed -1", ["seed=-1", "between 0"]),
    "steps": ("--steps -5", ["stop.steps=-5", "at least 0"]),
    "twice": ("--actors 1 --actor.num-actors 2", ["actor.num_actors is set twice"]),
    "another preset": ("--preset dqn", ["the preset ppo", "`echelon train dqn CartPole-v1`"]),
    "another rule": ("--algorithm.name dqn", ["the preset ppo", "`echelon train dqn CartPole-v1`"]),
    "lag": ("--learner.max-lag -1", ["learner.max_lag=-1"]),
    "layer": ("--network.hidden 64,0", ["network.hidden=(64, 0)"]),
    "layers": ("--network.hidden 64,x", ["network.hidden", "'x'"]),
    "core": ("--network.core-size 0", ["network.core_size=0"]),
    "epochs": ("--algorithm.epochs 0", ["algorithm.epochs=0", "at least 1"]),
    "minibatches": ("--algorithm.minibatches 0", ["algorithm.minibatches=0", "at least 1"]),
    "too many minibatches": (
        "--algorithm.minibatches 17",
        ["algorithm.minibatches=17", "16 steps", "Lower it"],
    ),
    "discount": ("--algorithm.discount 1.5", ["algorithm.discount=1.5", "between 0 and 1"]),
    "other rule": ("--algorithm.rho-clip 1", ["algorithm.rho_clip"]),
    "checkpoints": ("--run.keep-checkpoints 0", ["run.keep_checkpoints=0", "at least 1"]),
    "episodes": ("--evaluation.interval-s -1", ["evaluation.interval_s=-1", "at least 0"]),
    "kwargs": ("--env-kwargs {", ["env.kwargs='{'", "not JSON"]),
    "kwargs list": ("--env-kwargs [1]", ["env.kwargs=[1]", "JSON object"]),
    "wrapper": ("--env.wrappers toy_envs:lost", ["toy_envs:lost", "lose"]),
    "losing wrapper": ("--env.wrappers toy_envs:lose", ["toy_envs:lose", "NoneType"]),
    "vector": ("--env.vector vector_entry_points", ["env.vector", "Did you mean vector_entry_point?"]),
    "no device": ("--device tpu", ["device=tpu", "auto, cpu, cuda"]),
    "other device": ("--device meta", ["device=meta", "auto, cpu, cuda"]),
    "share": ("--actors 2 --learner.batch 3", ["learner.batch=3", "2 actors", "learner.max_lag=0"]),
    "shm_dir": ("--shm-dir /no/such/folder", ["shm_dir=/no/such/folder", "--shm-dir"]),
    "init_from": ("--init-from no_such_run", ["no_such_run", "neither a weights file nor a run folder"]),
    "init_from text": (f"--init-from {HERE}", [HERE, "cannot be read", ".safetensors"]),
    "network": ("--network.name nothing", ['network.name="nothing"', "module:name"]),
    "network module": ("--network.name no_such_module:make", ["no_such_module", "install its package, or name a file"]),
    "network factory": ("--network.name toy_envs:nothing", ['toy_envs has no "nothing"']),
    "network raises": (
        "--network.name test_bad_input:raising_network",
        ["no neurons in stock", HERE, "num_params=2"],
    ),
    "network line": ("--network.name test_bad_input:make_failing", [HERE, "in forward: return self.missing"]),
    "network misfit": ("--network.name test_bad_input:misfit_network", ["misfit_network", "(params, value)"]),
    "network type": ("--network.name test_bad_input:not_a_network", ["returned a str", "torch.nn.Module"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_before_anything_is_made(name: str, command: Command) -> None:
    arguments, fragments = MISTAKES[name]
    assert_told(command(*arguments, "--steps", "100"), 2, *fragments)
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("name", VALUES)
def test_a_value_that_cannot_work_is_told_with_the_remedy(name: str, command: Command) -> None:
    text, fragments = VALUES[name]
    arguments = ["train", "ppo", "CartPole-v1", *SMALL]
    if name not in ("no value", "no short value"):
        told = command(*arguments, *([] if name == "steps" else ["--steps", "100"]), "--run-dir", "run", *text.split())
    else:
        told = command(*arguments, "--steps", "100", text)
    assert_told(told, 2, *fragments)
    assert list(Path.cwd().iterdir()) == [] and " -> " not in told.out, "no run folder, nor the name of one"


@pytest.mark.parametrize("content", ["1 / 0", "import no_such_module", "def"])
def test_a_module_that_cannot_be_imported_is_told(
    content: str, command: Command, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("modules")
    (folder / "broken_module.py").write_text(content)
    monkeypatch.syspath_prepend(folder)
    common = ["--steps", "100", *SMALL]
    assert_told(command("train", "ppo", "broken_module:make", *common), 2, "broken_module")
    told = command("train", "ppo", "CartPole-v1", *common, "--network.name", "broken_module:make")
    assert_told(told, 2, 'network.name="broken_module:make"', "broken_module")
    assert_told(command("train", "ppo", f"{folder}/broken_module.py:make", *common), 2, "broken_module.py")
    assert list(Path.cwd().iterdir()) == []


def test_a_file_without_a_name_is_told_with_the_names_in_it(command: Command, tmp_path: Path) -> None:
    (tmp_path / "grid.py").write_text("1 / 0\nclass Maze: ...\ndef make(): ...\ndef _hidden(): ...\n")
    told = command("train", "ppo", f"{tmp_path}/grid.py", "--steps", "100", *SMALL)
    assert_told(told, 2, f"write {tmp_path}/grid.py:NAME", "(Maze, make)")


@pytest.mark.parametrize("words", [("CartPole-v1", "ppo"), ("CartPole-v1",)])
def test_a_command_whose_preset_does_not_come_first_is_told(words: tuple[str, ...], command: Command) -> None:
    assert_told(command("train", *words, "--steps", "100"), 2, "`echelon train ppo CartPole-v1`")


def test_a_preset_in_python_refuses_fields() -> None:
    make: Any = preset_ppo
    with pytest.raises(ConfigError, match=r"steps.*replace\(ppo\(\.\.\.\), "):
        make("CartPole-v1", steps=4)


def test_an_unknown_command_is_told_with_the_nearest(command: Command) -> None:
    assert_told(command("trian"), 2, "'trian'", "Did you mean train?")


def test_a_run_without_an_end_is_refused(command: Command) -> None:
    assert_told(command("train", "ppo", "CartPole-v1"), 2, "--steps", "--minutes", "--until-return")


def test_a_gpu_that_is_not_there_is_told(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", "cuda:3"):
        told = command("train", "ppo", "CartPole-v1", "--steps", "100", "--device", device)
        assert_told(told, 2, f"device={device}", "--device cpu")


@pytest.mark.parametrize(
    ("env", "fragments"),
    [
        ("MatrixActionEnv", ["action space Box", "one-dimensional"]),
        ("NoSpacesEnv", ["has no action_space", "gymnasium.spaces"]),
        ("NoneEnv", ["has no observation_space", "self.observation_space and self.action_space"]),
        ("TextEnv", ["observation has the space Text", "Box"]),
    ],
)
def test_spaces_that_do_not_fit_are_told(env: str, fragments: list[str], command: Command) -> None:
    assert_told(command("train", "ppo", f"{HERE}:{env}", "--steps", "100"), 2, *fragments)
    assert list(Path.cwd().iterdir()) == []


def test_other_mistakes_are_told_before_a_missing_end(command: Command) -> None:
    assert_told(command("train", "ppo", "CartPol-v1"), 2, "CartPol-v1", "CartPole-v1")
    assert_told(command("train", "ppo", "no_such.py:make"), 2, "there is no file", "no_such.py")
    for words in ("--device gpu", "--init-from no_such_run", "--network.name no_such.py:make"):
        assert_told(command("train", "ppo", "CartPole-v1", *words.split()), 2, words.split()[1])
    assert_told(command("train", "ppo", "CartPole-v1"), 2, "never end", "--steps", "stop.steps")


@pytest.mark.parametrize("engine", ["inline", "local"])
def test_a_folder_that_holds_something_is_not_touched(engine: str, command: Command) -> None:
    Path("run").mkdir()
    Path("run/thesis.txt").write_text("three years")
    told = command("train", "ppo", "CartPole-v1", *SMALL, "--engine", engine, "--steps", "100", "--run-dir", "run")
    assert_told(told, 2, "run", "is not empty", "echelon resume", "--run-dir")
    assert [path.name for path in Path("run").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("was_there", [False, True])
def test_a_new_run_that_cannot_begin_removes_what_it_made_and_no_more(was_there: bool, command: Command) -> None:
    if was_there:
        Path("run").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        over = ["--engine", "local", "--replay.transport", "tcp", "--replay.address", address]
        told = command("train", "apex-dqn", "CartPole-v1", *SMALL, *over, "--steps", "1000", "--run-dir", "run")
    assert_told(told, 2, "cannot listen for learners", address)
    assert [path.name for path in Path.cwd().rglob("*")] == (["run"] if was_there else [])


@pytest.mark.parametrize("engine", ["inline", "local"])
@pytest.mark.parametrize(
    ("kwargs", "what"),
    [({"reward": "nan"}, "reward is nan"), ({"observation": "inf"}, "observation[0] is inf")],
)
def test_numbers_that_are_none_end_the_run(engine: str, kwargs: dict[str, str], what: str, command: Command) -> None:
    small = [*SMALL, "--engine", engine, "--steps", "10000", "--run-dir", "run", "--env-kwargs", json.dumps(kwargs)]
    told = command("train", "impala", f"{HERE}:GivingEnv", *small)
    assert_told(told, 2, what, "actor 0, environment 0", "step", "finite")
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["status"] == "failed" and what in summary["error"]


@pytest.mark.parametrize("preset", ["impala", "ppo"])
@pytest.mark.parametrize("env", ["CartPole-v1", f"{HERE}:SteeredEnv"], ids=["discrete", "continuous"])
def test_weights_that_explode_end_the_run_with_the_learning_rate_named(env: str, preset: str, command: Command) -> None:
    small = [*SMALL, "--steps", "10000", "--run-dir", "run", "--optimizer.learning-rate", "1e30"]
    told = command("train", preset, env, *small, "--optimizer.schedule", "constant")
    assert_told(told, 2, "--optimizer.learning-rate (now 1e+30)")
    assert json.loads(Path("run/summary.json").read_text())["status"] == "failed"


@pytest.mark.parametrize("reward", [1e30, 1e300])
def test_rewards_too_large_to_learn_from_are_told(reward: float, command: Command) -> None:
    small = [*SMALL, "--steps", "100000", "--run-dir", "run", "--env-kwargs", json.dumps({"reward": reward})]
    told = command("train", "impala", f"{HERE}:GivingEnv", *small, "--algorithm.normalize-reward", "false")
    assert_told(told, 2, "loss became" if reward == 1e30 else "reward is inf", "reward")


def test_an_environment_that_raises_ends_the_run_with_its_traceback(command: Command) -> None:
    for engine in ("inline", "local"):
        small = [*SMALL, "--engine", engine, "--steps", "1000", "--run-dir", engine]
        told = command("train", "ppo", f"{HERE}:RaisingEnv", *small)
        assert_told(told, 1, "actor 0: environment 0 (seed", "ValueError: the wheel came off", 'env.on_error="restart"')


def test_a_step_of_four_values_is_told_as_by_the_check(command: Command) -> None:
    told = command("train", "ppo", f"{HERE}:OldEnv", *SMALL, "--steps", "1000", "--env.on-error", "restart")
    assert_told(told, 1, "environment 0 (seed", "at its step ", ": step returned 4 values (", "Split the old `done`")
    assert "Traceback" not in told.err


def test_an_environment_that_cannot_be_made_is_told(command: Command) -> None:
    told = command("train", "ppo", f"{HERE}:make_unmakable", "--steps", "10")
    assert_told(told, 2, "no wheels in stock", "env.kwargs")
    told = command("train", "ppo", "CartPole-v1", "--steps", "10", "--env-kwargs", '{"x": 1}')
    assert_told(told, 2, "'x'", "env.kwargs")
    assert list(Path.cwd().iterdir()) == []


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run that reached its end."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    small = [*SMALL, "--network.hidden", "8", "--algorithm.epochs", "1", "--steps", "100", "--run-dir", str(folder)]
    assert main(["train", "ppo", "CartPole-v1", *small]) == 0
    return folder


@pytest.fixture
def run(finished: Path, command: Command) -> Path:
    """A copy of it in the folder of the test."""
    shutil.copytree(finished, "run")
    return Path("run")


def test_commands_want_a_run(command: Command) -> None:
    Path("empty").mkdir()
    for name in ("resume", "eval", "play"):
        assert_told(command(name, "nowhere"), 2, "there is no run folder nowhere")
        assert_told(command(name, "empty"), 2, "empty is not a run folder", "config.json")
        assert_told(command(name), 2, "RUN", "--help")
        assert_told(command(name, "empty", "--stepps", "3"), 2, "--stepps")


def test_a_run_that_reached_its_end_is_not_resumed_without_a_new_one(run: Path, command: Command) -> None:
    before = (run / "summary.json").read_bytes()
    assert_told(command("resume", "run"), 2, "has reached its end", "--steps 100", "--steps")
    assert_told(command("resume", "run", "--steps", "50"), 2, "has reached its end", "--steps 50")
    assert_told(command("resume", "run", "--minutes", "1e-9"), 2, "has reached its end", "--minutes")
    assert_told(command("resume", "run", "--steps", "-3"), 2, "stop.steps=-3")
    assert_told(command("resume", "run", "--steps", "many"), 2, "'many'")
    assert_told(
        command("resume", "run", "--optimizer.learning-rate", "1e-4"), 2, "keeps its configuration", "init-from"
    )
    assert_told(
        command("resume", "run", "--steps", "200", "--learners", "0"), 2, "learner.num_learners=0", "--learners 1"
    )
    assert_told(command("eval", "run", "--episodes", "0"), 2, "episodes=0")
    for name in ("eval", "play"):
        assert_told(command(name, "run", "--env-kwargs", "{"), 2, "env.kwargs='{'", "not JSON")
        assert_told(command(name, "run", "--env-kwargs", "[1]"), 2, "env.kwargs=[1]", "JSON object")
        assert_told(command(name, "run", "--env-kwargs", '{"x": 1}'), 2, "'x': 1", "--env-kwargs")
    assert (run / "summary.json").read_bytes() == before


@pytest.mark.parametrize("address", ["127.0.0.1:0", "nowhere", "host:99999"])
def test_an_address_is_refused_where_no_workers_are_or_none_is_meant(run: Path, address: str, command: Command) -> None:
    told = command("resume", str(run), "--steps", "100000", "--address", address)
    assert told.code == 2 and "--address has no effect" in told.err


def test_resume_accepts_the_old_name_of_the_episodes_and_warns(run: Path) -> None:
    with (
        pytest.warns(FutureWarning, match="epochs= is now episodes="),
        pytest.raises(ConfigError, match=r"reached its end \(--episodes 1;"),
    ):
        resume(run, epochs=1)


@pytest.mark.parametrize("name", ["resume", "eval"])
@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        (lambda record: "{", ["config.json is damaged"]),
        (lambda record: json.dumps([record]), ["config.json is damaged", "not an object"]),
        (lambda record: json.dumps({**record, "format": 9}), ["format 9", "reads format 1"]),
        (lambda record: json.dumps({**record, "config": {"actr": {}}}), ["config.json", "actr", "Did you mean actor"]),
        (lambda record: json.dumps({**record, "config": {"seed": "x"}}), ["config.json", "seed='x'"]),
        (lambda record: json.dumps({**record, "config": {**record["config"], "env": {"id": "Gone-v0"}}}), ["Gone-v0"]),
    ],
    ids=["torn", "list", "format", "field", "value", "environment"],
)
def test_a_damaged_configuration_is_told(
    name: str, change: Callable[[Any], str], fragments: list[str], run: Path, command: Command
) -> None:
    record = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(change(record))
    more = ["--steps", "200"] if name == "resume" else []
    assert_told(command(name, "run", *more), 2, *fragments)
    assert "seed" in (run / "summary.json").read_text(), "the record of the past stays"


@pytest.mark.parametrize("name", ["resume", "eval", "init-from"])
@pytest.mark.parametrize(
    ("file", "content", "fragments"),
    [
        ("tensors.safetensors", b"", ["is damaged", "SHA-256", "start a new run"]),
        ("state.json", b"{", ["is damaged", "start a new run"]),
        ("state.json", b'{"format": 2, "structure": {}}', ["format 2", "reads format 1"]),
    ],
)
def test_a_damaged_checkpoint_is_told(
    name: str, file: str, content: bytes, fragments: list[str], run: Path, command: Command
) -> None:
    (checkpoint,) = (run / "checkpoints").iterdir()
    (checkpoint / file).write_bytes(content)
    told = {
        "resume": lambda: command("resume", "run", "--steps", "200"),
        "eval": lambda: command("eval", "run"),
        "init-from": lambda: command("train", "ppo", "CartPole-v1", *SMALL, "--steps", "9", "--init-from", "run"),
    }[name]()
    assert_told(told, 2, str(checkpoint), *fragments)
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["run"]


def test_a_run_without_a_checkpoint_is_told(run: Path, command: Command) -> None:
    shutil.rmtree(run / "checkpoints")
    with RunFolder(run).held():
        told = command("resume", "run", "--steps", "200")
    assert_told(told, 2, "run belongs to a run that is still running")
    assert not told.out, "nothing has been started"
    assert_told(command("resume", "run", "--steps", "200"), 2, "run has no checkpoint to resume from")
    (run / "weights.safetensors").unlink()
    assert_told(command("eval", "run"), 2, "run has no checkpoint: ", "Wait for it if the run still trains")


def test_weights_of_another_network_are_told(run: Path, command: Command) -> None:
    wider = [*SMALL, "--network.hidden", "9", "--steps", "100", "--run-dir", "new", "--init-from"]
    for source in ("run", "run/weights.safetensors"):
        told = command("train", "ppo", "CartPole-v1", *wider, source)
        assert_told(told, 2, "weights do not fit", "(8, 4)", "(9, 4)", source)
    save_weights(Path("odd.safetensors"), {"x": torch.zeros(1)}, {})
    told = command("train", "ppo", "CartPole-v1", *SMALL, "--steps", "100", "--init-from", "odd.safetensors")
    assert_told(told, 2, "weights do not fit", "odd.safetensors")
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["odd.safetensors", "run"]
