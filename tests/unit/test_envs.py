"""Groups of environments: the rows they write, their seeds, and their behaviour when an environment raises."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import toy_envs as toy
from echelon.config import EnvConfig
from echelon.envs.loop import LoopGroup
from echelon.envs.make import describe_callable, env_seeds, make_group, probe_spaces, resolve, with_rendering
from echelon.envs.vector import EnvFailed, EnvGroup, StepRows, VectorGroup
from echelon.errors import ConfigError, EnvError
from echelon.schema import space_leaves

TOYS = Path(__file__).parents[1] / "toy_envs.py"


def empty_rows(group: EnvGroup) -> StepRows:
    """Rows full of what no environment writes, so that a row left out shows."""
    K = group.num_envs
    leaves = [np.full((K, *leaf.shape), 77, leaf.dtype) for leaf in space_leaves(group.spaces.observation)]
    return StepRows(leaves, np.full(K, np.nan, np.float32), *(np.ones(K, np.bool_) for _ in range(3)))


def rollout(group: EnvGroup, actions: Any) -> dict[str, Any]:
    """Every row of a reset and `len(actions)` steps, stacked over time; closes the group."""
    rows = empty_rows(group)
    group.reset(rows.observation)
    stream: dict[str, list[Any]] = {f"observation.{i}": [leaf.copy()] for i, leaf in enumerate(rows.observation)}
    for name in ("reward", "terminated", "truncated", "valid"):
        stream[name] = []
    for action in actions:
        rows = empty_rows(group)
        group.step(action, rows)
        for i, leaf in enumerate(rows.observation):
            stream[f"observation.{i}"].append(leaf)
        for name in ("reward", "terminated", "truncated", "valid"):
            stream[name].append(getattr(rows, name))
    group.close()
    return {name: np.stack(values) for name, values in stream.items()}


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


@pytest.mark.parametrize("id", [toy.CounterEnv, toy.make_vector], ids=["loop", "vector"])
def test_an_episode_ends_in_its_final_observation_and_the_reset_step_is_not_valid(id: Any) -> None:
    stream = rollout(make_group(EnvConfig(id=id), [1, 2]), np.zeros((9, 2), np.int64))
    episodes, times = stream["observation.0"][:, 0, 0], stream["observation.0"][:, 0, 1]
    assert list(zip(episodes, times, strict=True)) == [
        *[(1, 0), (1, 1), (1, 2), (1, 3)],
        *[(2, 0), (2, 1), (2, 2), (2, 3)],
        *[(3, 0), (3, 1)],
    ]
    assert stream["reward"][:, 0].tolist() == [101, 102, 103, 0, 201, 202, 203, 0, 301]
    assert stream["terminated"][:, 0].nonzero()[0].tolist() == [2, 6]
    assert not stream["truncated"].any()
    assert (~stream["valid"][:, 0]).nonzero()[0].tolist() == [3, 7]


def test_a_truncated_episode_is_truncated_and_not_terminated() -> None:
    config = EnvConfig(id=toy.make_counter, kwargs={"length": 2, "truncate": True})
    stream = rollout(make_group(config, [1]), np.zeros((5, 1), np.int64))
    assert stream["truncated"][:, 0].tolist() == [False, True, False, False, True]
    assert not stream["terminated"].any()
    assert stream["valid"][:, 0].tolist() == [True, True, False, True, True]


def test_environments_of_a_group_end_at_their_own_times() -> None:
    lengths = iter([2, 3])
    group = LoopGroup(lambda: toy.CounterEnv(next(lengths)), [1, 2])
    stream = rollout(group, np.zeros((6, 2), np.int64))
    assert stream["valid"].T.tolist() == [[True, True, False, True, True, False], [True, True, True, False, True, True]]


def test_the_loop_writes_the_same_stream_as_gymnasium() -> None:
    seeds = env_seeds(3, 0, 0, 8)
    actions = np.random.default_rng(0).integers(0, 2, (300, 8))
    config = EnvConfig(id="CartPole-v1", kwargs={"max_episode_steps": 30})
    ours = rollout(make_group(config, seeds), actions)
    theirs = SyncVectorEnv(
        [lambda: gym.make("CartPole-v1", max_episode_steps=30)] * 8, autoreset_mode=AutoresetMode.NEXT_STEP
    )
    observation, _ = theirs.reset(seed=list(seeds))
    np.testing.assert_array_equal(ours["observation.0"][0], observation)
    ended = np.zeros(8, np.bool_)
    for t, action in enumerate(actions):
        observation, reward, terminated, truncated, _ = theirs.step(action)
        np.testing.assert_array_equal(ours["observation.0"][t + 1], observation)
        np.testing.assert_array_equal(ours["reward"][t], reward)
        np.testing.assert_array_equal(ours["terminated"][t], terminated)
        np.testing.assert_array_equal(ours["truncated"][t], truncated)
        np.testing.assert_array_equal(ours["valid"][t], ~ended)
        ended = terminated | truncated
    theirs.close()
    assert ours["terminated"].any() and ours["truncated"].any()


def test_dicts_tuples_and_shifted_actions_arrive_leaf_by_leaf() -> None:
    actions = np.random.default_rng(0).integers(5, 8, (9, 2))
    stream = rollout(make_group(EnvConfig(id=toy.TreeEnv), [1, 2]), actions)
    discrete, binary, box = (stream[f"observation.{i}"] for i in range(3))  # "a" before "z"
    assert box.dtype == np.float32 and box.shape == (10, 2, 2, 2)
    assert box[:5, 0, 1, 1].tolist() == [0.5, 1.5, 2.5, 3.5, 0.5]
    assert binary[:4, 1].tolist() == [[0, 1], [1, 1], [0, 1], [1, 1]]
    np.testing.assert_array_equal(discrete[1:4], actions[:3])
    np.testing.assert_array_equal(discrete[4], actions[2])  # the reset step ignores its action
    assert_same(stream, rollout(make_group(EnvConfig(id=toy.make_tree_vector), [1, 2]), actions))


def test_a_discrete_action_arrives_as_gymnasium_samples_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy.CastEnv, "actions", [])
    rollout(make_group(EnvConfig(id=toy.CastEnv), [1, 2]), np.array([[0, 1]]))
    assert [(type(action), action.item()) for action in toy.CastEnv.actions] == [(np.int64, 0), (np.int64, 1)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_environment_may_change_its_action_without_changing_ours(dtype: str) -> None:
    action = np.array([[0.5], [-1.5]], np.float32)
    stream = rollout(make_group(EnvConfig(id=toy.ForceEnv, kwargs={"dtype": dtype}), [1, 2]), [action])
    assert stream["reward"][0].tolist() == [0.5, -1.5]
    assert action.tolist() == [[0.5], [-1.5]]


@pytest.mark.parametrize("vector", ["loop", "vector_entry_point"])
def test_a_balanced_cart_pole_is_truncated_after_500_steps(vector: Any) -> None:
    group = make_group(EnvConfig(id="CartPole-v1", vector=vector), [1, 2])
    assert isinstance(group, VectorGroup if vector == "vector_entry_point" else LoopGroup)
    rows = empty_rows(group)
    group.reset(rows.observation)
    truncated, invalid = [], []
    gains = np.array([0.1, 0.3, 3.0, 1.0], np.float32)
    for t in range(1, 1003):
        before = rows.observation[0].copy()
        group.step((before @ gains > 0).astype(np.int64), rows)
        assert not rows.terminated.any()
        if rows.truncated.all():
            truncated.append(t)
            assert np.abs(rows.observation[0][:, 0] - before[:, 0] - 0.02 * before[:, 1]).max() < 1e-5  # moved on
        if not rows.valid.any():
            invalid.append(t)
            assert np.abs(rows.observation[0]).max() <= 0.05 and not rows.reward.any()  # begins anew
    group.close()
    assert truncated == [500, 1001] and invalid == [501, 1002]


def test_the_vectorised_cart_pole_keeps_its_final_observation() -> None:
    group = make_group(EnvConfig(id="CartPole-v1", vector="vector_entry_point"), env_seeds(0, 0, 0, 16))
    stream = rollout(group, np.ones((40, 16), np.int64))
    ends = stream["terminated"]
    assert ends.sum() >= 32
    angle, place = np.abs(stream["observation.0"][1:, :, 2]), np.abs(stream["observation.0"][1:, :, 0])
    np.testing.assert_array_equal((angle > 12 * 2 * np.pi / 360) | (place > 2.4), ends)
    np.testing.assert_array_equal(~stream["valid"][1:], ends[:-1])
    assert not stream["reward"][~stream["valid"]].any() and (stream["reward"][stream["valid"]] == 1).all()


def test_seeds_are_distinct_and_repeatable() -> None:
    many = [env_seeds(0, actor, incarnation, 64) for actor in range(8) for incarnation in range(4)]
    flat = [seed for seeds in many for seed in seeds]
    assert len(set(flat)) == len(flat) == 8 * 4 * 64
    assert all(0 <= seed < 2**31 for seed in flat)
    assert env_seeds(0, 3, 1, 64) == many[3 * 4 + 1]
    assert env_seeds(0, 3, 1, 8) != env_seeds(1, 3, 1, 8)


@pytest.mark.parametrize("id", [toy.CounterEnv, toy.make_vector], ids=["loop", "vector"])
def test_a_seed_fixes_every_episode_and_no_two_environments_agree(id: Any) -> None:
    actions = np.zeros((20, 4), np.int64)
    first = rollout(make_group(EnvConfig(id=id), env_seeds(0, 0, 0, 4)), actions)
    assert_same(first, rollout(make_group(EnvConfig(id=id), env_seeds(0, 0, 0, 4)), actions))
    draws = first["observation.0"][::4, :, 2]  # 6 episodes of 4 environments
    assert len(np.unique(draws)) == draws.size


def test_a_second_reset_goes_on_instead_of_repeating() -> None:
    group = make_group(EnvConfig(id=toy.CounterEnv), [5])
    first, second = empty_rows(group).observation, empty_rows(group).observation
    group.reset(first)
    group.reset(second)
    assert first[0][0, 2] != second[0][0, 2]


def test_pong_is_preprocessed_seeded_and_truncated_in_next_step_mode() -> None:
    config = EnvConfig(id="ALE/Pong-v5", kwargs={"max_num_frames_per_episode": 200})
    spaces = probe_spaces(config)
    assert spaces.observation == gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    assert spaces.action == gym.spaces.Discrete(6)
    actions = np.repeat(np.random.default_rng(0).integers(0, 6, (110, 1)), 3, axis=1)
    stream = rollout(make_group(config, [11, 900, 5]), actions)
    assert_same(stream, rollout(make_group(config, [11, 900, 5]), actions))
    lanes = [stream["observation.0"][:, i].tobytes() for i in range(3)]
    assert len(set(lanes)) == 3  # equal actions, other seeds
    alone = rollout(make_group(config, [900]), actions[:, :1])
    assert alone["observation.0"].tobytes() == lanes[1]  # an environment's seed is its own, wherever it sits
    assert stream["truncated"][:, 0].nonzero()[0].tolist() == [49, 100]  # 50 steps of 4 frames, and the reset step
    assert (~stream["valid"][:, 0]).nonzero()[0].tolist() == [50, 101]


def test_atari_renders_the_game_that_it_plays_in_colour() -> None:
    config = EnvConfig(id="ALE/Breakout-v5", kwargs={"max_num_frames_per_episode": 100})
    rendering = with_rendering(config)
    actions = np.random.default_rng(1).integers(4, size=(40, 1))
    assert_same(rollout(make_group(rendering, [3]), actions), rollout(make_group(config, [3]), actions))
    group = make_group(rendering, [3])
    rows = empty_rows(group)
    group.reset(rows.observation)
    for action in actions:  # two episodes
        group.step(action, rows)
        picture = group.render()
        assert picture.shape == (210, 160, 3)
        assert abs(picture.mean() - rows.observation[0][0, -1].mean()) < 4.0, "the newest observation is its grey image"
    assert group.metadata["render_fps"] == 15 and group.metadata["action_names"][1] == "FIRE"
    group.close()


@pytest.mark.parametrize(
    ("id", "vector", "renders"),
    [
        ("CartPole-v1", "loop", True),
        ("CartPole-v1", "vector_entry_point", True),
        ("toy_envs:PaintedEnv", "auto", True),
        (toy.make_painted_vector, "auto", True),
        ("toy_envs:CounterEnv", "auto", False),
        (toy.make_vector, "auto", False),
    ],
)
def test_groups_render_where_their_environments_do(id: Any, vector: Any, renders: bool) -> None:
    config = EnvConfig(id=id, vector=vector)
    group = make_group(with_rendering(config), [1, 2])
    rows = empty_rows(group)
    group.reset(rows.observation)
    group.step(np.full(2, group.spaces.action.start), rows)
    picture = group.render()
    assert picture.shape[2] == 3 if renders else picture is None
    if "ainted" in str(id):
        assert group.info["score"] == 100 and group.info["flag_get"] == 0
    group.close()


def test_pong_runs_as_single_environments_too() -> None:
    config = EnvConfig(id="ALE/Pong-v5", vector="loop", wrappers=(f"{TOYS}:Doubled",))
    assert probe_spaces(config).observation.shape == (210, 160, 3)


STICKY, EXACT = ({"repeat_action_probability": probability} for probability in (0.25, 0.0))


@pytest.mark.parametrize(
    ("id", "same", "other"),
    [
        ("ALE/Pong-v5", STICKY, EXACT),
        ("ale_py:ALE/Pong-v5", STICKY, EXACT),
        ("PongNoFrameskip-v0", STICKY, EXACT),
        ("PongNoFrameskip-v4", EXACT, STICKY),
        ("PongDeterministic-v4", EXACT, STICKY),
        ("Pong-v4", EXACT, STICKY),
    ],
)
def test_every_spelling_of_an_atari_game_is_preprocessed_and_as_sticky_as_it_is_registered(
    id: str, same: dict[str, float], other: dict[str, float]
) -> None:
    actions = np.random.default_rng(0).integers(0, 6, (60, 1))
    found = rollout(make_group(EnvConfig(id=id), [1]), actions)
    assert found["observation.0"].shape[2:] == (4, 84, 84)
    assert_same(found, rollout(make_group(EnvConfig(id="ALE/Pong-v5", kwargs=same), [1]), actions))
    differing = rollout(make_group(EnvConfig(id=id, kwargs=other), [1]), actions)
    assert found["observation.0"].tobytes() != differing["observation.0"].tobytes(), "env.kwargs overrides it"


def test_an_atari_game_has_all_actions_of_the_console_if_asked() -> None:
    config = EnvConfig(id="PongDeterministic-v4", kwargs={"full_action_space": True})
    assert probe_spaces(config).action == gym.spaces.Discrete(18)
    assert probe_spaces(EnvConfig(id="PongDeterministic-v4", vector="loop")).observation.shape == (210, 160, 3)


def test_atari_refuses_to_step_a_part_of_its_group() -> None:
    with pytest.raises(ConfigError, match="batch_size=2"):
        make_group(EnvConfig(id="ALE/Pong-v5", kwargs={"batch_size": 2}), [1, 2, 3])


@pytest.mark.parametrize("id", [f"{TOYS}:make_counter", "toy_envs:make_counter", toy.make_counter])
def test_factories_are_found_in_files_and_modules_and_get_their_kwargs(id: Any) -> None:
    config = EnvConfig(id=id, kwargs={"length": 1}, wrappers=("toy_envs:Doubled",))
    stream = rollout(make_group(config, [1]), np.zeros((3, 1), np.int64))
    assert stream["reward"][:, 0].tolist() == [202, 0, 402]


@pytest.mark.parametrize("name", ["Tetris-v0", "Othello-v4"])
def test_an_own_environment_may_have_the_name_of_an_atari_game(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = "gymnasium.envs.classic_control:CartPoleEnv"
    (tmp_path / f"my_{name[:6]}.py").write_text(f"import gymnasium\ngymnasium.register({name!r}, {entry!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "ale_py", None)
    assert probe_spaces(EnvConfig(id=f"my_{name[:6]}:{name}")).action == gym.spaces.Discrete(2)
    assert probe_spaces(EnvConfig(id=name)).action == gym.spaces.Discrete(2)


def test_an_id_may_name_the_module_that_registers_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy_registration.py").write_text(
        'import gymnasium\n\ngymnasium.register("Toys/Counter-v3", entry_point="toy_envs:CounterEnv")\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert probe_spaces(EnvConfig(id="toy_registration:Toys/Counter-v3")).observation.shape == (3,)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EnvConfig(id="CartPoel-v1"), "Did you mean .*CartPole-v1"),
        (EnvConfig(id="CartPole"), "CartPole-v1"),
        (EnvConfig(id="ALE/Pogn-v5"), "ALE/Pong-v5"),
        (EnvConfig(id="no_such_module:Thing-v0"), 'cannot import "no_such_module"'),
        (EnvConfig(id="no_such_module:make"), "cannot import no_such_module"),
        (EnvConfig(id="toy_envs:make_countre"), "Did you mean make_counter"),
        (EnvConfig(id="no/such/file.py:make"), "there is no file"),
        (EnvConfig(id="toy_envs:__file__"), "must be callable"),
        (EnvConfig(id=toy.make_nothing), "returned a NoneType"),
        (EnvConfig(id=toy.make_vector_without_count), "parameter num_envs"),
        (EnvConfig(id=toy.make_single_with_count), "returned a CounterEnv"),
        (EnvConfig(id=toy.make_one_too_many), "has 2 environments instead of 1"),
        (EnvConfig(id=toy.make_same_step), "SAME_STEP.*NEXT_STEP"),
        (EnvConfig(id=toy.make_vector, kwargs={"autoreset_mode": AutoresetMode.DISABLED}), "DISABLED"),
        (EnvConfig(id=toy.make_vector, vector="loop"), 'env.vector="loop"'),
        (EnvConfig(id=toy.make_vector, wrappers=("toy_envs:Doubled",)), "env.wrappers"),
        (EnvConfig(id=toy.make_counter, wrappers=("toy_envs:lose",)), "returned a NoneType"),
        (EnvConfig(id=toy.make_counter, wrappers=("toy_envs:__name__",)), "not callable"),
        (EnvConfig(id=toy.make_counter, vector="vector_entry_point"), "no parameter num_envs"),
        (EnvConfig(id="Acrobot-v1", vector="vector_entry_point"), "registers no vector entry point"),
        (EnvConfig(id="CartPole-v1", vector="vector_entry_point", wrappers=("toy_envs:Doubled",)), "env.wrappers"),
    ],
)
def test_what_cannot_be_made_says_why(config: EnvConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        probe_spaces(config)


@pytest.mark.parametrize(
    ("id", "module", "remedy"),
    [
        ("ALE/Pong-v5", "ale_py", r'pip install "echelon\[atari\]"'),
        ("envpool:Pong-v5", "envpool", r'pip install "echelon\[envpool\]"'),
        ("phys2d/CartPole-v1", "jax", r'pip install "gymnasium\[jax\]"'),
        ("LunarLander-v3", "Box2D", r'pip install "echelon\[box2d\]"'),
        ("Humanoid-v5", "mujoco", r'pip install "echelon\[mujoco\]"'),
        (
            "pybullet_envs_gymnasium:HumanoidBulletEnv-v0",
            "pybullet_envs_gymnasium",
            r'pip install "echelon\[pybullet\]"',
        ),
        ("HumanoidBulletEnv-v0", "pybullet_envs_gymnasium", 'write "pybullet_envs_gymnasium:HumanoidBulletEnv-v0"'),
    ],
)
def test_a_missing_package_is_named(id: str, module: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # importing it now raises ModuleNotFoundError
    loaded = tuple(f"gymnasium.envs.{family}" for family in ("phys2d", "box2d", "mujoco"))
    for name in [name for name in sys.modules if name.startswith(loaded)]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=remedy):
        probe_spaces(EnvConfig(id=id))


class FakePool:
    """The part of an EnvPool that is used: single spaces, seeds fixed at the start, reset on the step after the end."""

    def __init__(self, num_envs: int, seed: int) -> None:
        self.vector = toy.make_vector(num_envs, AutoresetMode.NEXT_STEP)
        self.observation_space = self.vector.single_observation_space
        self.action_space = gym.spaces.Discrete(2, dtype=np.int32)
        self.seed, self.closed = seed, False

    def reset(self) -> tuple[Any, dict[str, Any]]:
        return self.vector.reset(seed=self.seed)

    def step(self, action: Any) -> Any:
        assert action.dtype == np.int32
        observation, reward, terminated, truncated, info = self.vector.step(action)
        return observation, np.where(reward == 0.0, 9.0, reward), terminated, truncated, info  # rewards a reset step

    def close(self) -> None:
        self.closed = True


def test_envpool_is_a_group_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[FakePool] = []

    def make_gymnasium(task: str, *, num_envs: int, seed: int, num_threads: int) -> FakePool:
        assert (task, num_threads) == ("Counter-v0", 2)
        pools.append(FakePool(num_envs, seed))
        return pools[-1]

    fake = SimpleNamespace(make_gymnasium=make_gymnasium, list_all_envs=lambda: ["Counter-v0"])
    monkeypatch.setitem(sys.modules, "envpool", fake)
    config = EnvConfig(id="envpool:Counter-v0", kwargs={"num_threads": 2})
    stream = rollout(make_group(config, [40, 41]), np.zeros((9, 2), np.int64))
    assert_same(stream, rollout(make_group(EnvConfig(id=toy.CounterEnv), [40, 41]), np.zeros((9, 2), np.int64)))
    assert [pool.closed for pool in pools] == [True]
    with pytest.raises(ConfigError, match='no task "Contuer-v0"'):
        make_group(EnvConfig(id="envpool:Contuer-v0"), [1])


def test_an_environment_that_raises_stops_the_group_and_is_named() -> None:
    config = EnvConfig(id=toy.FragileEnv, kwargs={"log": {"failures": 1}, "fail_at": 6})
    group = make_group(config, [70, 71])
    rows = empty_rows(group)
    group.reset(rows.observation)
    for _ in range(7):  # 4 steps, a reset, 2 steps
        group.step(np.zeros(2, np.int64), rows)
    with pytest.raises(EnvFailed, match="the simulator burnt down") as caught:
        group.step(np.zeros(2, np.int64), rows)
    failure = caught.value.failure
    assert (failure.index, failure.seed, failure.step) == (0, 70, 6)
    assert failure.error == "RuntimeError: the simulator burnt down" and "in _fail" in failure.traceback
    assert "environment 0 (seed 70)" in str(caught.value) and 'env.on_error="restart"' in str(caught.value)
    assert "at its step 7" in str(caught.value), "steps count from 1, as in `echelon check`; resets do not count"
    assert isinstance(caught.value, EnvError)
    group.close()


@pytest.mark.parametrize("where", ["make", "reset"])
def test_an_environment_that_cannot_begin_is_named(where: str) -> None:
    config = EnvConfig(id=toy.FragileEnv, kwargs={"log": {"failures": 9}, "where": where})
    with pytest.raises(EnvFailed, match="before its first step"):
        group = make_group(config, [7])
        group.reset(empty_rows(group).observation)


def test_a_group_that_cannot_be_made_closes_what_it_made() -> None:
    log: dict[str, Any] = {"failures": 0}

    def make() -> toy.FragileEnv:
        log["failures"] = int(log.get("made", 0) == 2)
        return toy.FragileEnv(log, where="make")

    with pytest.raises(EnvFailed) as caught:
        LoopGroup(make, [1, 2, 3, 4])
    assert caught.value.failure.index == 2 and log["closed"] == 2


def test_restart_replaces_only_the_environment_that_raised() -> None:
    log: dict[str, Any] = {"failures": 1}
    config = EnvConfig(id=toy.FragileEnv, kwargs={"log": log, "fail_at": 1}, on_error="restart")
    group = make_group(config, [70, 71])
    stream = rollout(group, np.zeros((6, 2), np.int64))
    assert stream["valid"].T.tolist() == [[True, False, True, True, True, True], [True, True, True, True, False, True]]
    assert stream["reward"].T.tolist() == [[101, 0, 101, 102, 103, 104], [101, 102, 103, 104, 0, 201]]
    assert stream["terminated"].T.tolist() == [[False] * 5 + [True], [False] * 3 + [True] + [False] * 2]
    assert stream["observation.0"][2, 0, :2].tolist() == [1, 0]  # the first observation of the new one
    assert [(f.index, f.seed, f.step) for f in group.failures] == [(0, 70, 1)]
    assert group.seeds[0] != 70 and group.seeds[1] == 71
    assert log["seeds"] == [70, 71, group.seeds[0], None] and log["closed"] == 3


def test_a_restart_that_fails_is_tried_three_times() -> None:
    def run(failures: int) -> EnvGroup:
        kwargs = {"log": {"failures": failures}, "fail_at": 1, "where": "remake"}
        group = make_group(EnvConfig(id=toy.FragileEnv, kwargs=kwargs, on_error="restart"), [70])
        rollout(group, np.zeros((4, 1), np.int64))
        return group

    assert [failure.step for failure in run(3).failures] == [1, 0, 0]
    with pytest.raises(EnvFailed, match="3 times in a row"):
        run(4)


def test_an_environment_that_never_makes_a_step_is_given_up() -> None:
    config = EnvConfig(id=toy.FragileEnv, kwargs={"log": {"failures": 99}, "fail_at": 0}, on_error="restart")
    group = make_group(config, [70])
    rows = empty_rows(group)
    group.reset(rows.observation)
    for _ in range(2):
        group.step(np.zeros(1, np.int64), rows)
        assert not rows.valid.any()
    with pytest.raises(EnvFailed, match="3 times in a row"):
        group.step(np.zeros(1, np.int64), rows)


def test_restarts_do_not_add_up_over_environments_that_work() -> None:
    config = EnvConfig(id=toy.FragileEnv, kwargs={"log": {"failures": 5}, "fail_at": 1}, on_error="restart")
    group = make_group(config, [70])
    stream = rollout(group, np.zeros((12, 1), np.int64))
    assert len(group.failures) == 5 and len(set(group.seeds + [f.seed for f in group.failures])) == 6
    assert stream["valid"][:, 0].tolist() == [True, False] * 5 + [True, True]


def test_a_vector_environment_that_raises_is_named_or_made_anew_whole() -> None:
    def config(on_error: Any) -> EnvConfig:
        return EnvConfig(id=toy.make_fragile_vector, kwargs={"log": {"failures": 1}, "fail_at": 2}, on_error=on_error)

    with pytest.raises(EnvFailed, match=r"one of 2 vectorised environments \(seed 70\).* at its step 3") as caught:
        rollout(make_group(config("stop"), [70, 71]), np.zeros((4, 2), np.int64))
    assert caught.value.failure.index == -1
    group = make_group(config("restart"), [70, 71])
    stream = rollout(group, np.zeros((6, 2), np.int64))
    assert stream["valid"].tolist() == [[True] * 2, [True] * 2, [False] * 2, *[[True] * 2] * 3]
    assert stream["reward"][:, 0].tolist() == [101, 102, 0, 101, 102, 103]
    assert [failure.step for failure in group.failures] == [2] and not {70, 71} & set(group.seeds)


@pytest.mark.parametrize(
    ("what", "message"), [("shape", r"shape \(7,\).*\(3,\)"), ("reward", r"the reward array\(\[1., 2.\]\)")]
)
def test_an_environment_that_breaks_its_space_is_named(what: str, message: str) -> None:
    group = make_group(EnvConfig(id=toy.LiarEnv, kwargs={"what": what}), [70, 71])
    with pytest.raises(EnvError, match=rf"environment 0 \(seed 70\) at its step 2 returned.*{message}"):
        rollout(group, np.zeros((3, 2), np.int64))


@pytest.mark.parametrize("value", [0.5, 256.0, -1.0, np.nan])
@pytest.mark.parametrize("kind", ["alone", "dict", "vector"])
def test_a_float_that_an_integer_space_cannot_hold_is_refused_at_any_step(kind: str, value: float) -> None:
    kwargs = {"value": value, **({"is_dict": True} if kind == "dict" else {})}
    config = EnvConfig(id=toy.make_cast_vector if kind == "vector" else toy.CastEnv, kwargs=kwargs)
    group = make_group(config, [70, 71])
    rows = empty_rows(group)
    group.reset(rows.observation)
    for _ in range(30):
        group.step(np.zeros(2, np.int64), rows)
    assert rows.observation[-1].tolist() == [[0, 1]] * 2, "whole numbers are converted"
    who = "SyncVectorEnv" if kind == "vector" else r"environment 0 \(seed 70\) at its step 31"
    place = {"alone": r"observation\[1\]", "dict": r"observation\.y\[1\]", "vector": r"observation\[0, 1\]"}[kind]
    with pytest.raises(EnvError, match=f"{who}.* {place} is {value}, which does not fit the uint8"):
        group.step(np.zeros(2, np.int64), rows)
    group.close()


def test_a_vector_environment_that_ends_on_its_reset_step_is_refused() -> None:
    with pytest.raises(EnvError, match=r"environments \[0, 1\] .*ended twice in a row"):
        rollout(make_group(EnvConfig(id=toy.StutteringVectorEnv), [1, 2]), np.zeros((2, 2), np.int64))


def test_environments_of_one_group_must_be_of_one_kind() -> None:
    kinds = iter([toy.CounterEnv, toy.TreeEnv])
    with pytest.raises(ConfigError, match="environment 1 has the spaces"):
        LoopGroup(lambda: next(kinds)(), [1, 2])


def test_a_callable_is_described_by_a_name_that_resolves_to_it() -> None:
    assert describe_callable(toy.make_counter) == "toy_envs:make_counter"
    assert resolve("toy_envs:CounterEnv.observation") is toy.CounterEnv.observation
    loaded = resolve(f"{TOYS}:make_counter")
    assert loaded is not toy.make_counter  # a file is a module of its own ...
    assert loaded is resolve(f"{TOYS}:make_counter")  # ... loaded once
    assert describe_callable(loaded) == f"{TOYS}:make_counter"  # type: ignore[arg-type]


def test_a_file_imports_its_neighbours_like_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_of_toys.py").write_text("ANSWER = 42\n")
    (tmp_path / "script.py").write_text("from neighbour_of_toys import ANSWER\n\n\ndef make():\n    return ANSWER\n")
    assert resolve(f"{tmp_path}/script.py:make")() == 42  # type: ignore[operator]
    (tmp_path / "broken.py").write_text("1 / 0\n")
    for _ in range(2):  # a failed load leaves nothing that a second try would find
        with pytest.raises(ConfigError, match="ZeroDivisionError"):
            resolve(f"{tmp_path}/broken.py:make")


def test_functions_of_the_main_script_are_named_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    main = SimpleNamespace(__file__=str(script), __spec__=None)

    def make() -> None: ...

    make.__module__, make.__qualname__ = "__main__", "make"
    main.make = make
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert describe_callable(make) == f"{script}:make"
    assert resolve(f"{script}:make") is make  # this process is that script: it is not run a second time
    main.__file__ = None
    with pytest.raises(ConfigError, match=r'notebook.*engine="inline" only'):
        describe_callable(make)


def test_callables_without_an_importable_name_are_refused() -> None:
    def local() -> None: ...

    for function, why in [(lambda: None, "is a lambda"), (local, "inside another function"), (FakeCall(), "object")]:
        with pytest.raises(ConfigError, match=rf'{why}.*engine="inline" only'):
            describe_callable(function)


class FakeCall:
    def __call__(self) -> None: ...


@pytest.mark.parametrize("name", ["make", ":make", "module:"])
def test_a_name_has_two_parts(name: str) -> None:
    with pytest.raises(ConfigError, match="module:name"):
        resolve(name)


def test_an_observation_of_another_shape_is_not_stretched_over_its_row() -> None:
    class Shrinking(toy.CounterEnv):
        def step(self, action: Any) -> Any:
            observation, *rest = super().step(action)
            return (observation[:1], *rest)

    group = LoopGroup(Shrinking, [1, 2])
    rows = empty_rows(group)
    group.reset(rows.observation)
    with pytest.raises(
        EnvError, match=r"environment 0 \(seed 1\) at its step \d+ returned observation of shape \(1,\)"
    ):
        group.step(np.zeros(2, np.int64), rows)
