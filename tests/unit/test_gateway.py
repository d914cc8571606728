"""The gateway, stepped by the test: which messages it stores, which it refuses, and how it replies."""

from __future__ import annotations

import functools
import itertools
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import msgspec
import numpy as np
import pytest

import toy_envs as toy
from echelon.asynchronous.open_episodes import OpenEpisodes
from echelon.config import replace
from echelon.envs.make import make_group
from echelon.envs.vector import StepRows
from echelon.errors import Refused
from echelon.replay.pieces import fold
from echelon.roles.tally import UNKNOWN
from echelon.schema import Spaces, action_leaf, space_leaves
from echelon.transport.codec import encode
from echelon.transport.episode_wire import (
    TASK,
    EpisodePiece,
    Next,
    Register,
    Score,
    Task,
    TaskRequest,
    UnknownWorker,
    Wait,
    Welcome,
    from_gateway,
)
from echelon.version import __version__
from entrance import items_of, piece
from stage import Stage

Array = np.ndarray[Any, Any]


class StackEnv(toy.CounterEnv):
    """An environment with stacks of four small images as observations."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = gym.spaces.Box(0, 255, (4, 6, 6), np.uint8)

    def observation(self) -> Any:
        return np.full((4, 6, 6), self.t, np.uint8)


class BoundedEnv(toy.CounterEnv):
    """Declares bounds: like those of CartPole, of one side only, and none."""

    def __init__(self) -> None:
        super().__init__()
        low, high = np.array([-4.8, 0, -np.inf], np.float32), np.array([4.8, np.inf, np.inf], np.float32)
        self.observation_space = gym.spaces.Box(low, high, dtype=np.float32)


def test_an_episode_becomes_transitions_and_is_answered_with_new_weights(make_entrance: Any) -> None:
    entrance = make_entrance()
    task = entrance.ask(TaskRequest(__version__))
    assert isinstance(task, Task) and task.train["algorithm"]["name"] == "dqn" and task.own is None
    welcome = entrance.arrive()
    assert isinstance(welcome, Welcome) and (welcome.version, welcome.place, welcome.env_steps) == (1, 0, 0)
    first = entrance.ask(piece(5, 1))
    assert isinstance(first, Next) and first.weights is None and first.env_steps == 5
    model = entrance.stage.plan.model
    model.parameters += 1.0
    entrance.stage.board.publish(model.parts(), 2)
    second = entrance.ask(piece(5, 2, version=np.full(5, 99)))
    assert second.version == 2 and bytes(second.weights) == b"".join(part.tobytes() for part in model.parts())
    found = entrance.items()
    np.testing.assert_array_equal(found["observation"][:, 1], [0, 1, 2, 3, 4] * 2)
    np.testing.assert_array_equal(found["next_observation"][:, 1], [3, 4, 5, 5, 5] * 2)
    np.testing.assert_allclose(found["discount"], [0.125, 0.125, 0.0, 0.0, 0.0] * 2)
    assert found["reward"][0] == 101 + 102 / 2 + 103 / 4
    assert found["version"].tolist() == [1] * 5 + [2] * 5, "no version is above the newest"
    tally = entrance.stage.plan.replay.tally()
    assert (tally.env_steps, tally.episodes) == (10, 2) and tally.ended(0, 0).tolist() == [[10.0, 5.0, UNKNOWN]] * 2
    assert entrance.stage.plan.replay.limiter().inserted == 10


def test_what_comes_again_is_answered_and_not_taken_again(make_entrance: Any) -> None:
    entrance = make_entrance(**{"workers.evaluation": 0.5})
    entrance.arrive()
    assert not entrance.ask(piece(number=1)).evaluates
    for _ in range(3):
        assert entrance.ask(piece(number=2)).evaluates, "the same reply"
    assert entrance.head == 10 and entrance.gateway.journal.totals()["repeated"] == 2
    score = Score("w", 3, 1, 1, -3.5, 40)
    for _ in range(2):
        assert not entrance.ask(score).evaluates
    assert entrance.head == 10, "an evaluation is not training data"
    entrance.stage.world.poll(0.0)
    (number, told), *others = entrance.told["worker_evaluation"]
    assert (number, told["return_mean"], told["length_mean"], told["worker"]) == (1, -3.5, 40.0, "w") and not others
    totals = entrance.gateway.journal.totals()
    assert totals == {"episodes": 3, "evaluations": 1, "interactions": 50, "repeated": 3}


def test_a_successor_knows_the_workers_and_what_they_brought(make_entrance: Any) -> None:
    entrance = make_entrance()
    entrance.arrive()
    entrance.ask(piece(number=1))
    address = entrance.gateway.server.address
    entrance.gateway.close()
    entrance.gateway = entrance.make_gateway(incarnation=1)
    assert entrance.gateway.server.address == address
    assert isinstance(entrance.ask(piece(number=1)), Next) and entrance.head == 5
    assert isinstance(entrance.ask(piece(number=2)), Next) and entrance.head == 10


def test_a_successor_tells_again_of_the_evaluations_that_may_not_have_been_told(make_entrance: Any) -> None:
    entrance = make_entrance()
    entrance.arrive()
    scores = [Score("w", number, 1, 1, float(number), 40) for number in (1, 2)]
    for score in scores:
        entrance.ask(score)
    entrance.stage.world.poll(0.0)
    told = entrance.told["worker_evaluation"]
    assert [(number, score["return_mean"]) for number, score in told] == [(1, 1.0), (2, 2.0)]
    told.clear()
    entrance.gateway.close()
    entrance.gateway = entrance.make_gateway(incarnation=1)
    entrance.stage.world.poll(0.0)
    assert [(number, score["return_mean"]) for number, score in told] == [(1, 1.0), (2, 2.0)]


def test_strangers_arrive_first_and_nobody_before_the_learner(make_entrance: Any) -> None:
    entrance = make_entrance(is_open=False)
    assert isinstance(entrance.arrive(), Wait) and isinstance(entrance.ask(piece()), Wait)
    entrance.open()
    assert isinstance(entrance.ask(piece()), UnknownWorker) and entrance.head == 0
    assert isinstance(entrance.arrive(), Welcome) and isinstance(entrance.ask(piece()), Next)


SPACE = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (TaskRequest("0.0.7"), f"has Echelon 0.0.7 and the learner has {__version__}; install"),
        (
            Register(__version__, "w", Spaces(SPACE, gym.spaces.Discrete(2)).to_json(), False),
            r"\(4,\).*\(3,\).*Give both",
        ),
        (Register(__version__, "w", {"observation": {"kind": "dict"}, "action": {}}, False), "spaces cannot be read"),
        (Register(__version__, "w", {"observation": {"kind": "box", "shape": "x"}}, False), "spaces cannot be read"),
        (Register(__version__, "w" * 100, {}, False), "its name has 100 characters"),
        (Register(__version__, "w\n\x1b[2J", {}, False), "all of them printable"),
        (Register(__version__, "w", {}, True), "but the worker has a policy of its own"),
        (Score("w", 9, 1, 1, float("nan"), 5), "return nan"),
        (Score("w", 9, 1, 1, 1.0, 0), "an episode of 0 steps"),
        (Score("w", 9, 1, 1, 1.0, 1 << 62), "<= 1099511627776 - at `\\$.episode_length`"),
        (Score("w", 9, 1, 1 << 63, 1.0, 5), "at `\\$.version`"),
        (piece(65), "65 steps was refused: 1 to 64"),
        (piece(reward=np.zeros(0, np.float32)), "0 steps was refused"),
        (piece(reward=[1.0]), "0 steps was refused"),
        (piece(reward=np.full(5, 3e38, np.float32)), "overflows float32"),
        (piece(reward=np.array([1, 2, np.nan, 4, 5], np.float32)), "reward is nan at step 2"),
        (piece(observation=[np.full((6, 3), np.inf, np.float32)]), "observation is inf at step 0"),
        (piece(observation=[np.zeros((5, 3), np.float32)]), r"observation is \(5, 3\)"),
        (piece(observation=[np.zeros((6, 3))]), "of float64, expected"),
        (piece(observation=[]), "its observation has 0 leaves, not 1"),
        (piece(observation=[{"frames": 1}]), "observation is dict"),
        (piece(action=np.full(5, 2)), "action holds 2; its space is 0 to 1"),
        (piece(action=np.full(5, -1)), "action holds -1"),
        (piece(action=np.zeros(5, np.int32)), "action is .* of int32"),
        (piece(version=np.zeros(4, np.int64)), "version is"),
        (piece(num_old=3), "num_old=3, but 0 to"),
        (piece(num_old=-1), "num_old=-1"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(make_entrance: Any, message: Any, words: str) -> None:
    entrance = make_entrance()
    entrance.arrive()
    entrance.ask(piece(number=1))
    if isinstance(message, EpisodePiece | Score):
        message = msgspec.structs.replace(message, number=2)
    answer = entrance.ask(message)
    with pytest.raises(Refused, match=words):
        raise answer
    assert entrance.head == 5 and entrance.gateway.journal.totals()["episodes"] == 1
    assert entrance.ask(piece(number=3), 0.1) is None, "the connection is blocked"
    entrance.client.close()
    entrance.client = entrance.connect(b"")  # another connection of the same worker
    assert isinstance(entrance.ask(piece(number=3)), Next) and entrance.head == 10


@pytest.mark.parametrize(
    ("observation", "is_taken"),
    [
        ((4.8, 0, 1e6), True),
        ((4.8000007, -1e-6, 3e38), True),  # rounding; and no bounds at all
        ((-255.0, 3e38, 0), True),  # not normalized, as its space says
        ((1e38, 0, 0), False),
        ((-2e4, 0, 0), False),
        ((0, -1e38, 0), False),
    ],
)
def test_observations_far_outside_their_space_are_refused(make_entrance: Any, observation: Any, is_taken: bool) -> None:
    """Bounds of honest environments are inexact, so what is near them is taken, as in runs without workers."""
    entrance = make_entrance(BoundedEnv)
    entrance.arrive()
    rows = np.zeros((6, 3), np.float32)
    rows[4] = observation
    answer = entrance.ask(piece(observation=[rows]))
    if is_taken:
        assert isinstance(answer, Next) and entrance.head == 5
    else:
        assert entrance.head == 0
        with pytest.raises(Refused, match=r"observation of a piece holds .* beyond it.*Correct"):
            raise answer


TWO = {"kind": "discrete", "n": 2, "start": 0}
BOX = {"kind": "box", "shape": [3], "dtype": "float32", "low": 0, "high": 1}
HUGE = {
    "n": {**TWO, "n": 2**63},
    "start": {**TWO, "n": 2**20, "start": 2**63 - 1},
    "30 s": {**BOX, "shape": [2**28]},
    "64 GB": {**BOX, "shape": [2**34]},
    "product": {**BOX, "shape": [2**20, 2**20]},
    "far more than the learner's": {**BOX, "shape": [2**24]},
    "binary": {"kind": "multi_binary", "shape": [2**40]},
    "choices": {"kind": "multi_discrete", "nvec": [2**62], "start": [0]},
    "dtype": {**BOX, "dtype": "S999999999"},
    "bounds": {**BOX, "low": [[0, 1], [2]]},
    "keys": {"kind": "dict", "spaces": {"a": TWO, 1: TWO}},
    "parts": {"kind": "tuple", "spaces": 200 * [{"kind": "tuple", "spaces": 200 * [TWO]}]},
    "depth": functools.reduce(lambda inner, _: {"kind": "tuple", "spaces": [inner]}, range(12), TWO),
    "none": {"kind": "dict", "spaces": {}},
}


def test_sizes_are_checked_before_anything_is_allocated(make_entrance: Any) -> None:
    entrance, began = make_entrance(), time.monotonic()
    for side, (name, space) in itertools.product(("observation", "action"), HUGE.items()):
        entrance.client.close()
        entrance.client = entrance.connect(b"")
        answer = entrance.ask(Register(__version__, "w", {"observation": BOX, "action": TWO, side: space}, False))
        assert isinstance(answer, Refused), (side, name)
        assert "the worker's spaces cannot be read: " in str(answer) and "Check its environment" in str(answer), name
    assert time.monotonic() - began < 20.0
    entrance.stage.world.poll(0.0)
    told = [text for text in entrance.stage.messages if "one of the workers was refused" in text]
    assert len(told) == 5 and "only every 100th is reported" in told[-1]
    entrance.client.close()
    entrance.client = entrance.connect()
    assert isinstance(entrance.arrive(), Welcome)


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\xc1" * 40],
        [b"GET / HTTP/1.1\r\n\r\n"],
        encode({"kind": "piece"}),
        encode({"kind": "ask", "release": __version__, "more": 1}),
        encode([1, 2, 3]),
        [*encode(1), b"left over"],
    ],
    ids=["empty", "no msgpack", "http", "half", "too much", "a list", "frames"],
)
def test_hostile_frames_cost_the_connection(make_entrance: Any, frames: list[Any]) -> None:
    entrance = make_entrance()
    assert isinstance(entrance.finish(entrance.begin(TASK, frames)), Refused)
    assert entrance.ask(TaskRequest(__version__), 0.1) is None
    assert entrance.gateway.server.num_refused == 1 and entrance.head == 0


def test_stacked_images_lie_once(make_entrance: Any) -> None:
    entrance = make_entrance(StackEnv, **{"replay.frames": "stacked"})
    space = entrance.stage.context.spaces.observation
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 255, (9, *space.shape[1:]), np.uint8)
    size = space.shape[0]
    stacks = np.array([frames[t : t + size] for t in range(6)])
    folded = fold(stacks)
    sent = {"frames": folded.frames, "numbers": folded.numbers}
    entrance.arrive()
    actions = np.zeros(5, np.int64)
    assert isinstance(entrance.ask(piece(5, 1, observation=[sent], action=actions)), Next)
    found = entrance.items()
    np.testing.assert_array_equal(found["observation"], stacks[:5])
    np.testing.assert_array_equal(found["next_observation"], stacks[[3, 4, 5, 5, 5]])
    bad = {"frames": folded.frames, "numbers": folded.numbers + 1}
    answer = entrance.ask(piece(5, 2, observation=[bad], action=actions))
    assert isinstance(answer, Refused) and "numbers of observation holds" in str(answer)


def test_priorities_start_with_the_largest_so_far(make_entrance: Any) -> None:
    entrance = make_entrance(**{"replay.prioritized": True})
    entrance.arrive()
    entrance.ask(piece(number=1))
    entrance.gateway.tally.raise_top(7.5)
    entrance.ask(piece(number=2))
    assert entrance.items()["priority"].tolist() == [1.0] * 5 + [7.5] * 5


def test_the_door_brings_the_transitions_that_an_actor_would(make_entrance: Any, tmp_path: Path) -> None:
    """Episodes of the counter give the same transitions from an actor and from a worker that sends small pieces."""
    kwargs = {"env.kwargs": {"length": 11, "truncate": True}, "actor.envs": 2, "workers.max_steps": 5}
    entrance = make_entrance(**kwargs)
    config = replace(entrance.stage.context.train, **{"engine": "inline", "workers.address": "", "actor.trajectory": 1})
    (tmp_path / "actor").mkdir()
    stage = Stage(tmp_path / "actor", replace(config, **{"actor.num_actors": 1, "replay.samples_per_insert": 0.0}))
    stage.plan.replay.tally().open(0, 0)
    actor = stage.actor()
    entrance.arrive()
    group = make_group(config.env, list(actor.seeds))
    flags = [np.zeros(2, np.bool_) for _ in range(3)]
    rows = StepRows([np.zeros((2, 3), np.float32)], np.zeros(2, np.float32), *flags)
    leaf, action = space_leaves(group.spaces.observation), action_leaf(group.spaces.action)
    episodes, number = OpenEpisodes(2, 5, 3, leaf, action), 0
    group.reset(rows.observation)
    episodes.begin(np.arange(2), rows.observation)
    for _ in range(50):  # four episodes, and two steps of a fifth
        assert actor.step(0.0)
        group.step(np.zeros(2, np.int64), rows)
        for stretch in episodes.step(np.zeros(2, np.int64), 1, rows):
            number += 1
            names = ("action", "reward", "version", "num_old", "terminated", "truncated")
            fields = {name: getattr(stretch, name) for name in (*names, "episode_return", "episode_length")}
            answer = entrance.ask(piece(number=number, observation=stretch.leaves(set()), **fields))
            assert isinstance(answer, Next), answer
            if stretch.ended:
                episodes.end(stretch.env, evaluates=False)
            else:
                episodes.continue_episode(stretch.env)
    mine, theirs = entrance.items(), items_of(stage)
    stage.close()
    for name in ("observation", "next_observation", "reward", "discount", "version", "priority"):
        np.testing.assert_array_equal(mine[name][order(mine)], theirs[name][order(theirs)], err_msg=name)
    tally = stage.plan.replay.tally()
    assert entrance.gateway.tally.counts_of(0)[1] == tally.counts_of(0)[1] == 8
    np.testing.assert_array_equal(entrance.gateway.tally.ended(0, 0)[:, :2], tally.ended(0, 0)[:, :2])


def order(items: dict[str, Array]) -> Array:
    """Sorts the transitions of complete episodes by the episode's draw and the step at which they start."""
    seen = items["observation"]
    rows = np.flatnonzero(seen[:, 0] <= 4)
    return rows[np.lexsort(seen[rows].T)]


def test_refused_is_what_the_wire_says() -> None:
    with pytest.raises(Refused, match="kind"):
        from_gateway(encode({"kind": "piece"}))
