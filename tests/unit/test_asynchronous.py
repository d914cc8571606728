"""Learner and workers without processes: what they accept and refuse."""

from __future__ import annotations

import io
import socket
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

import echelon
from echelon import config_io
from echelon.algorithms.model import Model
from echelon.asynchronous.acting import NUM_RUNGS, ModelActing, UserActing, rungs
from echelon.asynchronous.connection import LearnerConnection, address_of
from echelon.asynchronous.learner import AsyncLearningNode
from echelon.asynchronous.worker import AsyncWorker
from echelon.cli.learner import OPTIONS, with_address
from echelon.cli.main import main
from echelon.cli.train import make_parser, parse_config
from echelon.config import TrainConfig, UserPolicyConfig, WorkersConfig, replace
from echelon.errors import ConfigError, EnvError, Refused, TransportTimeout
from echelon.presets import preset
from echelon.roles.episode_source import EpisodeSource
from echelon.roles.handling import Handling
from echelon.roles.learner import Rate
from echelon.roles.loss_account import LossAccount
from echelon.roles.plan.start import make_engine
from echelon.roles.user_policy import StateLayout, UserTrainable, check_policy, load_state, state_of
from echelon.runs.bottleneck import workers_bottleneck
from echelon.runs.checkpoint import save_weights
from echelon.runs.console import Status, final_summary, plain_line
from echelon.runs.folder import RunFolder
from echelon.schema import Spaces
from echelon.transport.episode_wire import Task, TaskRequest
from echelon.version import __version__

Array = np.ndarray[Any, Any]
CART_POLE = Spaces(gym.spaces.Box(-np.inf, np.inf, (4,), np.float32), gym.spaces.Discrete(2))


class Plain:
    """A policy without torch."""

    def __init__(self) -> None:
        self.weight, self.count = np.zeros((4, 2), np.float32), 3

    def act(self, observation: Any, *, explore: bool) -> Any:
        return 1 if explore else int((observation @ self.weight).argmax())

    def update(self, batch: Any) -> None: ...

    def state(self) -> dict[str, Any]:
        return {"weight": self.weight, "count": self.count}

    def load_state(self, state: Any) -> None:
        self.weight, self.count = state["weight"], int(state["count"])


# The configuration.


def test_workers_need_a_rule_that_replays_processes_and_their_own_actions() -> None:
    address = {"workers.address": "tcp://127.0.0.1:0"}
    with pytest.raises(ConfigError, match="does not work with impala: it is on-policy"):
        replace(preset("impala", "CartPole-v1"), **address)
    for changes, words in (
        ({"engine": "inline"}, "needs a gateway process"),
        ({"acting.mode": "central"}, "every worker chooses its own actions"),
        ({"workers.max_steps": 4, "replay.n_step": 5}, "so no transition fits"),
        ({"workers.evaluation": 1.0}, "some episodes must be learned from"),
        ({"workers.address": "127.0.0.1:4444"}, r"workers.address=127.0.0.1:4444 is not an address"),
        ({"workers.updates": 0}, "at least 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            replace(preset("dqn", "CartPole-v1"), **{**address, **changes})
    config = replace(preset("apex-dqn", "CartPole-v1"), **address)
    assert config.has_workers and config.num_shards == 1 and config.actor.num_actors == 2


@pytest.mark.parametrize(
    ("words", "address"),
    [
        ([], "tcp://127.0.0.1:4444"),
        (["--address", "0.0.0.0:1"], "tcp://0.0.0.0:1"),
        (["--address=host:7"], "tcp://host:7"),
        (["--workers.address", "tcp://h:9"], "tcp://h:9"),
    ],
)
def test_the_learner_command_has_an_address(words: list[str], address: str) -> None:
    arguments = ["sac", "Pendulum-v1", "--episodes", "7", "--update-steps=3", "--eval-freq", "0.5", *words]
    config = parse_config(make_parser("echelon learner", "", (), OPTIONS), with_address(arguments), OPTIONS)
    assert config.workers == WorkersConfig(address=address, updates=3, evaluation=0.5) and config.stop.episodes == 7


def test_commands_tell_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["learner", "sac", "Pendulum-v1"], "--episodes E"),
        (["learner", "ppo", "CartPole-v1", "--episodes", "1"], "does not work with ppo: it is on-policy"),
        (["worker"], "--learner"),
        (["worker", "--learner", "nowhere"], "'nowhere' is not the address of a learner. Write HOST:PORT"),
        (["worker", "--learner", "10.1.2.3:4444"], "no secret is set"),
        (["learner", "sac", "Pendulum-v1", "--episodes", "1", "--address", "0.0.0.0:0"], "no secret is set"),
        (["worker", "--learner", "127.0.0.1:1", "--policy", "math:pi"], "is 3.14159"),
        (["worker", "--learner", "127.0.0.1:1", "--envs", "0"], "must each be at least 1"),
        (["learner", "dqn", "CartPole-v1", "--actors", "3"], "--actors: a learner has no actors; workers send"),
        (["learner", "dqn", "CartPole-v1", "--actor.envs=3"], "a learner has no actors; workers send"),
        (
            ["learner", "dqn", "CartPole-v1", "--learner.num-learners", "2"],
            "only one learner can receive workers' episodes",
        ),
        (
            ["learner", "dqn", "CartPole-v1", "--learner.num_learners=2"],
            "only one learner can receive workers' episodes",
        ),
        (["learner", "dqn", "CartPole-v1", "--address", "4480"], "--address 4480 is not an address. Write HOST:PORT"),
        (["learner", "dqn", "CartPole-v1", "--address=host:x"], "--address host:x is not an address"),
        (["train", "dqn", "CartPole-v1", "--workers.address", "tcp://127.0.0.1:0"], "use `echelon learner`"),
        (["bench", "train", "dqn", "CartPole-v1", "--workers.address=tcp://127.0.0.1:0"], "use `echelon learner`"),
    ):
        assert main(arguments) == 2
        assert words in capsys.readouterr().err


def test_the_help_of_the_learner_shows_presets_that_replay(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["learner", "--help"])
    text = capsys.readouterr().out
    assert "dqn, apex-dqn, ddpg, td3, apex-ddpg, sac" in text and "`echelon learner PRESET [ENV] --help`" in text
    assert "ppo" not in text and "impala" not in text
    with pytest.raises(SystemExit):
        main(["worker", "--help"])
    assert "(default: never)" in " ".join(capsys.readouterr().out.split())


def test_a_run_without_an_environment_is_played_in_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = replace(preset("dqn", "CartPole-v1"), **{"env.id": "", "network.hidden": (8,)})
    RunFolder.create(tmp_path / "run").write_config(config_io.to_json(config))
    model = Model(config.network, CART_POLE, config.algorithm, seed=0)
    save_weights(tmp_path / "run" / "weights.safetensors", model.weights(), {})
    assert main(["eval", str(tmp_path / "run")]) == 2
    assert "names no environment, as its workers had their own: give one with --env" in capsys.readouterr().err
    assert main(["eval", str(tmp_path / "run"), "--env", "CartPole-v1", "--episodes", "2"]) == 0
    assert "over 2 episodes" in capsys.readouterr().out


# The node.


def make_node(policy: Any, **options: Any) -> AsyncLearningNode:
    node = AsyncLearningNode(policy, **{"server_address": ("127.0.0.1", 0), **options})
    node.close()
    return node


def test_a_node_of_a_preset_has_what_it_was_given() -> None:
    node = make_node(
        echelon.preset("sac", "Pendulum-v1"), update_steps=5, batch_size=2_000, epochs=9, buffer_size=9_999
    )
    config = node.config
    assert config.workers == WorkersConfig(node_address(node), updates=5, evaluation=0.08)
    assert (config.replay.capacity, config.replay.batch, config.replay.min_size) == (9_999, 2_000, 2_000)
    assert make_node(echelon.preset("sac", "Pendulum-v1"), min_size=777).config.replay.min_size == 777
    assert config.stop.episodes == 9 and config.algorithm.name == "sac" and config.env.id == "Pendulum-v1"


def node_address(node: AsyncLearningNode) -> str:
    host, port = node.address
    assert host == "127.0.0.1" and port > 0
    return f"tcp://{host}:{port}"


def test_a_node_of_an_own_policy_takes_spaces_from_its_first_worker() -> None:
    config = make_node(Plain(), discount=0.5, n_step=3).config
    assert (
        config.algorithm == UserPolicyConfig(discount=0.5)
        and config.replay.n_step == 3
        and not config.replay.prioritized
    )
    assert config.workers.spaces == "worker" and config.env.id == "" and config.replay.min_size == 128


def test_a_node_keeps_its_port() -> None:
    node = AsyncLearningNode(Plain(), server_address=("127.0.0.1", 0))
    with socket.socket() as other, pytest.raises(OSError):  # a listener of another process
        other.bind(node.address)
    with socket.socket() as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind(node.address)
        door.listen()
        with pytest.raises(ConfigError, match=r"server_address=.* cannot be used"):
            AsyncLearningNode(Plain(), server_address=node.address)
    node.close()


def test_a_node_refuses_what_cannot_be() -> None:
    for policy, options, words in (
        ("sac", {}, r'is a name; pass a configuration: echelon.preset\("sac", ENV\)'),
        (object(), {}, r"object lacks update\(\), state\(\) and load_state\(\): a user policy needs act"),
        (Plain(), {"save_freq": 3}, "save_freq=3"),
        (Plain(), {"save_func": print}, "save_freq=None"),
        (Plain(), {"save_func": print, "save_freq": 0}, "save_freq=0"),
        (Plain(), {"resume": True}, "name its folder with run_dir"),
        (Plain(), {"eval_freq": 1.5}, "workers.evaluation=1.5"),
        (Plain(), {"epochs": -1}, "stop.episodes=-1"),
        (Plain(), {"server_address": ("256.1.1.1", 0)}, "cannot be used"),
        (echelon.preset("impala", "CartPole-v1"), {}, "does not work with impala"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_node(policy, **options)


# User policies.


def test_figures_of_a_policy_need_columns_of_their_own() -> None:
    class Reports(Plain):
        def update(self, batch: Any) -> Any:
            return batch

    policy, account = Reports(), LossAccount()
    trainable = UserTrainable(policy, StateLayout.of(state_of(policy)))
    figures: Any = {"loss": 1.0, "actor_loss": 2.0, "norm": 3.0}
    trainable.learn(figures, account, lambda: None, None)
    assert account.take() == {"loss.total": 1.0, "loss.actor": 2.0, "norm": 3.0}
    with pytest.raises(ConfigError, match=r"(?s)'loss'.*'total_loss'.*loss\.total"):
        trainable.learn({**figures, "total_loss": 4.0}, account, lambda: None, None)


def test_the_state_of_a_policy_crosses_as_named_arrays() -> None:
    theirs, mine = Plain(), Plain()
    theirs.weight = np.arange(8, dtype=np.float32).reshape(4, 2)
    theirs.count = 11
    layout = StateLayout.from_json(StateLayout.of(state_of(theirs)).to_json())
    load_state(mine, layout.unpack(layout.pack(state_of(theirs))))
    np.testing.assert_array_equal(mine.weight, theirs.weight)
    assert mine.count == 11
    module, other = nn.Linear(3, 2), nn.Linear(3, 2)
    layout = StateLayout.of(state_of(module))
    load_state(other, layout.unpack(layout.pack(state_of(module))))
    assert torch.equal(other.weight, module.weight) and other.weight.data_ptr() != module.weight.data_ptr()
    state = state_of(module)
    with torch.no_grad():
        module.weight += 1.0
    assert not np.array_equal(state["weight"], module.weight.detach().numpy()), "a snapshot of the time of the request"


def test_states_that_cannot_travel_are_refused() -> None:
    layout = StateLayout.of({"w": np.zeros(3)})
    with pytest.raises(ConfigError, match=r"the policy's state is now .* but was"):
        layout.pack({"w": np.zeros(4)})
    with pytest.raises(ConfigError, match="state is empty"):
        StateLayout.of({})

    class Odd(Plain):
        told: Any = None

        def state(self) -> Any:
            return self.told

    for told, words in (
        ([1], "is a list; it must be a dict"),
        ({"name": "text"}, "name of a policy's state is 'text'"),
    ):
        odd = Odd()
        odd.told = told
        with pytest.raises(ConfigError, match=words):
            state_of(odd)
    with pytest.raises(ConfigError, match=r"Linear lacks act\(\)"):
        check_policy(nn.Linear(1, 1), "act")


def test_an_own_policy_acts_for_one_environment_at_a_time() -> None:
    policy = Plain()
    acting = UserActing(policy, StateLayout.of(state_of(policy)), CART_POLE)
    policy.weight[:, 0] = 1.0
    memory = acting.layout.pack(state_of(policy))
    policy.weight = np.zeros((4, 2), np.float32)
    acting.load(memory, 4)
    assert acting.version == 4 and policy.weight[0, 0] == 1.0
    observation = [np.ones((2, 4), np.float32)]
    assert acting.act(observation, np.array([True, False]), 0).tolist() == [0, 1]
    with pytest.raises(Refused, match="but its layout has"):
        acting.load(memory[:-1], 5)
    policy.act = lambda observation, *, explore: np.zeros(2)  # type: ignore[method-assign]
    with pytest.raises(EnvError, match=r"Plain.act returned \(2,\) of float64"):
        acting.act(observation, np.array([True, False]), 0)


def test_what_an_own_policy_does_is_what_is_learned_from() -> None:
    policy = Plain()
    spaces = Spaces(CART_POLE.observation, gym.spaces.Box(np.float32([-2, 0]), np.float32([2, 1])))
    policy.act = lambda observation, *, explore: np.array([5.0, -3.0])  # type: ignore[method-assign]
    acting = UserActing(policy, StateLayout.of(state_of(policy)), spaces)
    action = acting.act([np.ones((2, 4), np.float32)], np.zeros(2, np.bool_), 0)
    assert action.tolist() == acting.to_env(action).tolist() == [[2.0, 0.0]] * 2 and action.dtype == np.float32


# Workers.


def test_workers_spread_over_the_ladder_however_many_there_are() -> None:
    for num_workers in (2, 8, 32):
        places = sorted(rung for place in range(num_workers) for rung in rungs(place, 1))
        gaps = np.diff([*places, NUM_RUNGS])
        assert len(set(places)) == num_workers and gaps.max() == NUM_RUNGS // num_workers
    assert len({rung for place in range(4) for rung in rungs(place, 8)}) == 32


def test_a_worker_is_greedy_where_it_evaluates() -> None:
    config = preset("apex-dqn", "CartPole-v1")
    acting = ModelActing(config, CART_POLE, 0, 4, seed=0)
    model = acting.model
    memory = acting.mirror.memory.copy()
    model.network.get_parameter("advantage_head.bias").data[1] = 100.0
    strayed = np.zeros(4)
    evaluates = np.array([False, True, False, True])
    for _ in range(200):
        strayed += acting.act([np.zeros((4, 4), np.float32)], evaluates, 0) != 1
    assert strayed[0] > 10 and not strayed[evaluates].any(), "the first is at the top of the ladder"
    assert acting.act([np.zeros((4, 4), np.float32)], np.ones(4, np.bool_), 0).tolist() == [1] * 4
    acting.load(memory, 7)
    assert acting.version == 7 and float(model.network.get_parameter("advantage_head.bias").data[1]) == 0.0
    with pytest.raises(Refused, match="Install the same versions"):
        acting.load(memory[:-8], 8)


def test_a_worker_gives_a_silent_learner_up_after_its_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.asynchronous.connection.FIRST_REPEAT_S", 0.01)
    told: list[str] = []
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        connection = LearnerConnection(f"tcp://127.0.0.1:{nobody.getsockname()[1]}", "w", 0.05, told.append)
        with pytest.raises(TransportTimeout, match=r"was silent for \d+ s: nothing listens there"):
            connection.ask(TaskRequest(__version__), Task)
        connection.close()


def test_addresses_of_learners() -> None:
    assert address_of(("127.0.0.1", 4444)) == address_of("127.0.0.1:4444") == "tcp://127.0.0.1:4444"
    assert address_of("tcp://learner:1") == "tcp://learner:1"
    for bad in ("learner", "learner:", ":1", "learner:0", "learner:70000", "learner:x"):
        with pytest.raises(ConfigError, match="is not the address of a learner"):
            address_of(bad)


def test_a_worker_refuses_a_policy_that_cannot_act() -> None:
    with pytest.raises(ConfigError, match=r"Linear lacks act\(\)"):
        AsyncWorker("127.0.0.1:1", policy=nn.Linear(2, 2))


# Console output.


def test_three_figures_are_told() -> None:
    handling = Handling()
    assert handling.figures() == {}
    for ms in range(1, 101):
        handling.note(1e-3 * ms, is_episode=True)
    handling.note(9.0, is_episode=False)
    figures = handling.figures()
    assert figures["handling_mean_ms"] == pytest.approx(50.5) and figures["handling_p95_ms"] == pytest.approx(95.05)
    assert figures["handling_max_ms"] == pytest.approx(100.0)
    workers = {"workers": 3, "interactions_per_hour": 1_420_000.0, **figures}
    line = plain_line(Status(1, 1.0, 1.0, workers=workers, roles={"learner": {"wait": 0.58, "learn": 0.42}}))
    assert "workers 3 | 1,420,000 steps/h | learner 42% busy | handled in 50.5 ms (p95 95.0)" in line
    summary = io.StringIO()
    final_summary({"workers": workers, "time": {"learner": {"wait": 0.58}}}, summary)
    assert summary.getvalue().startswith("workers     3 | 1,420,000 steps/h")
    assert "the workers (the learner is busy 42%)" in workers_bottleneck({"wait": 0.58})
    assert "the learner (busy 95%)" in workers_bottleneck({"wait": 0.05})


def test_more_workers_are_not_recommended_while_the_learner_is_behind() -> None:
    """It has waited for the first worker, so it was not busy all the time."""
    behind = workers_bottleneck({"wait": 0.4}, num_behind=993, num_workers=1)
    assert "the learner (busy 60%); 993 episodes wait" in behind and "more workers" not in behind
    assert "the workers" in workers_bottleneck({"wait": 0.4}, num_behind=30, num_workers=16), "they have just arrived"


def test_the_rate_of_lumps_is_taken_over_many() -> None:
    rate, short = Rate(EpisodeSource.rate_window_s), Rate()
    for second in range(0, 60, 5):  # an episode of 500 steps, with 20 updates
        for batch in range(20):
            rate.note(second + 0.1 * batch, 500 * second // 5)
            short.note(second + 0.1 * batch, 500 * second // 5)
    assert short.recent(57.0) == 0.0 and rate.recent(57.0) == pytest.approx(100.0, rel=0.15)


def test_the_rate_falls_when_no_batch_comes() -> None:
    rate = Rate()
    for batch in range(11):
        rate.note(0.1 * batch, 100 * batch)
    assert rate.recent(1.5) == pytest.approx(1_000.0), "a report between two batches"
    assert rate.recent(10.0) == pytest.approx(100.0) and rate.recent(100.0) == pytest.approx(10.0)


def test_configurations_with_workers_rest_and_return() -> None:
    config = make_node(Plain()).config
    assert config_io.from_json(config_io.to_json(config)) == config
    assert isinstance(config, TrainConfig)


@pytest.mark.parametrize("spaces", ["learner", "worker"])
def test_the_caller_prepares_a_run_with_its_objects_unless_that_waits_for_a_worker(tmp_path: Path, spaces: str) -> None:
    """An environment may be registered in the caller's process alone."""
    config = replace(preset("dqn", "CartPole-v1"), **{"workers.address": "tcp://127.0.0.1:0", "workers.spaces": spaces})
    engine = make_engine(config, tmp_path, has_objects=True)
    assert engine.is_here("learner") and engine.is_here("preparation") == (spaces == "learner")
    engine.close(0.0)
