"""A resumed run continues the episodes that were open, where the environment can save its state."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import echelon
import toy_envs as toy
from echelon.config import replace
from echelon.disk import MAX_JSON_BYTES
from echelon.presets import preset
from echelon.roles.actor import Actor
from echelon.roles.gauge import Gauge
from running import Runs, wait_until
from stage import Stage, foretold, joined

LENGTH = 600
SMALL = {
    "env.id": "toy_envs:KeptEnv",
    "env.kwargs": {"length": LENGTH},
    "actor.num_actors": 1,
    "actor.envs": 1,
    "actor.trajectory": 7,
    "network.hidden": (8,),
    "learner.threads": 1,
    "evaluation.episodes": 0,
}
REPLAYED = {"replay.min_size": 50, "replay.batch": 8, "replay.capacity": 2_000, "replay.n_step": 3}
REPLAYED |= {"replay.samples_per_insert": 0.5}  # few updates
TEAMS = {"acting.mode": "central", "acting.groups": 2, "actor.envs": 2}


@pytest.mark.parametrize(
    ("engine", "name", "changes"),
    [
        ("inline", "dqn", REPLAYED),
        ("inline", "a3c", {}),
        ("inline", "ppo", {"algorithm.minibatches": 1}),
        ("inline", "impala", {}),
        ("local", "dqn", REPLAYED),
        ("local", "impala", {}),
    ],
)
def test_a_resumed_run_continues_its_episode(
    tmp_path: Path, shm_dir: Path, engine: str, name: str, changes: dict[str, Any]
) -> None:
    """The part after the resume is too short for a whole episode."""
    base = {"run.dir": str(tmp_path / "run"), "shm_dir": str(shm_dir), "engine": engine, "stop.steps": 400}
    first = echelon.train(replace(preset(name, "CartPole-v1"), **{**SMALL, **base, **changes}), output=io.StringIO())
    assert first.summary["episodes"] == 0 and first.summary["env_steps"] >= 400
    done = first.summary["env_steps"]
    output = io.StringIO()
    resumed = echelon.resume(tmp_path / "run", steps=done + 300, output=output).summary
    assert resumed["episodes"] == 1, output.getvalue()
    assert resumed["return_max"] == 100 * LENGTH + LENGTH * (LENGTH + 1) / 2


KEPT = {"loop": toy.KeptEnv, "vector": toy.make_kept_vector}
END = 3


def resumed(stage: Stage) -> Actor:
    """The actor after a resume of the run."""
    stage.context = dataclasses.replace(stage.context, generation=stage.context.generation + 1)
    return stage.actor()


def end(stage: Stage, actor: Actor) -> None:
    actor.close()
    stage.roles.remove(actor)


@pytest.mark.parametrize("num_steps", range(10))
@pytest.mark.parametrize("kind", KEPT)
def test_nothing_tells_a_continued_episode_from_another(
    make_stage: Callable[..., Stage], kind: str, num_steps: int
) -> None:
    """Between episodes, at their ends and resets, and in the middle of a trajectory of four steps."""
    stage = make_stage(KEPT[kind], **{"env.kwargs": {"length": END}})
    actor = stage.actor()
    seeds = actor.seeds
    stage.collect(actor, num_steps // 4)
    if num_steps % 4:
        stage.ring.grant(0, 1)
        assert all(actor.step(0.0) for _ in range(num_steps % 4))
    end(stage, actor)
    rows = joined(stage.collect(resumed(stage), 3))
    for k, seed in enumerate(seeds):
        expected = foretold(lambda: toy.KeptEnv(END), seed, np.zeros(num_steps + len(rows["reward"])))
        for name, column in expected.items():
            np.testing.assert_array_equal(rows[name][:, k], column[num_steps:], err_msg=f"{name} of environment {k}")


def test_teams_continue_wherever_each_of_them_is(make_stage: Callable[..., Stage]) -> None:
    """One of two teams is a step ahead."""
    stage = make_stage(toy.KeptEnv, **{"env.kwargs": {"length": 9}, **TEAMS})
    actor, inference = stage.actor(), stage.inference()
    stage.collect(actor, 1, inference)
    stage.ring.grant(0, 1)
    while len({team.t for team in actor.teams}) == 1:
        assert actor.step(0.0) or inference.step(0.0)
    (ahead, behind), seeds = (team.t for team in actor.teams), actor.seeds
    end(stage, actor)
    inference.step(0.0)  # the requests of the actor that ended
    rows = joined(stage.collect(resumed(stage), 3, inference))
    for k, (seed, past) in enumerate(zip(seeds, (4 + ahead, 4 + behind), strict=True)):
        expected = foretold(lambda: toy.KeptEnv(9), seed, np.zeros(past + len(rows["reward"])))
        for name, column in expected.items():
            np.testing.assert_array_equal(rows[name][:, k], column[past:], err_msg=f"{name} of environment {k}")


def test_a_replacement_starts_new_episodes(make_stage: Callable[..., Stage]) -> None:
    """What was saved may be what the actor died of."""
    stage = make_stage(toy.KeptEnv, **{"env.kwargs": {"length": 99}})
    actor = stage.actor()
    stage.collect(actor, 1)
    end(stage, actor)
    stage.context = dataclasses.replace(stage.context, generation=1)
    (rows,) = stage.collect(stage.actor(incarnation=1), 1)
    assert rows["first"][0].all() and (rows["observation"][0, :, 1] == 0).all()


def other_env(saved: Any) -> Any:
    return {**saved, "env": {**saved["env"], "kwargs": {"length": 98}}}


def other_teams(**changes: Any) -> Callable[[Any], Any]:
    return lambda saved: {**saved, "teams": [{**saved["teams"][0], **changes}]}


@pytest.mark.parametrize(
    "change",
    [
        lambda saved: json.dumps(saved)[:-1],
        lambda saved: "[" * 100_000,
        lambda saved: " " * (MAX_JSON_BYTES + 1),
        lambda saved: [],
        lambda saved: {**saved, "teams": saved["teams"] * 2},
        other_env,
        other_teams(first=[True]),
        other_teams(returns=[0.0, "nan"]),
        other_teams(lengths=[-1, 1 << 70]),
        other_teams(group={}),
        other_teams(group={"ended": [False, False], "envs": [{}, {}]}),
        other_teams(group={"ended": [False], "envs": []}),
        other_teams(group={"ended": [False, False], "envs": [{"episode": 1, "t": 2, "draw": 3, "rng": "no"}] * 2}),
    ],
)
def test_a_file_that_does_not_fit_is_ignored_with_a_message(
    make_stage: Callable[..., Stage], change: Callable[[Any], Any]
) -> None:
    stage = make_stage(toy.KeptEnv, **{"env.kwargs": {"length": 99}})
    actor = stage.actor()
    stage.collect(actor, 1)
    end(stage, actor)
    (path,) = (stage.context.run_dir / "open_episodes").iterdir()
    changed = change(json.loads(path.read_text()))
    path.write_text(changed if isinstance(changed, str) else json.dumps(changed))
    (rows,) = stage.collect(resumed(stage), 1)
    assert rows["first"][0].all() and (rows["observation"][0, :, 1] == 0).all()
    stage.world.poll(0.0)
    (message,) = stage.messages
    assert "actor 0 starts new episodes" in message and str(path) in message and len(message) < 1_000


class Nameless(toy.KeptEnv):
    def get_state(self) -> Any:
        return {"draw": np.int64(self.draw)}


class Lost(toy.KeptEnv):
    def get_state(self) -> Any:
        raise RuntimeError("no state")


@pytest.mark.parametrize("env", [Nameless, Lost])
def test_a_state_that_cannot_be_saved_is_reported_once(make_stage: Callable[..., Stage], env: Any) -> None:
    stage = make_stage(env, **{"env.kwargs": {"length": 99}, "run.checkpoint_interval_s": 0.0})
    actor = stage.actor()
    stage.collect(actor, 3)
    end(stage, actor)
    stage.world.poll(0.0)
    (message,) = stage.messages
    assert "actor 0 cannot save the state" in message and "JSON" in message
    assert not (stage.context.run_dir / "open_episodes").exists()


@pytest.mark.parametrize(("env", "wrappers"), [(toy.CounterEnv, ()), (toy.KeptEnv, ("toy_envs:Doubled",))])
def test_an_environment_without_a_state_is_as_before(
    make_stage: Callable[..., Stage], env: Any, wrappers: tuple[str, ...]
) -> None:
    """A wrapper may have a state of its own, so it must have the methods itself."""
    stage = make_stage(env, **{"env.wrappers": wrappers, "run.checkpoint_interval_s": 0.0})
    actor = stage.actor()
    stage.collect(actor, 2)
    end(stage, actor)
    (rows,) = stage.collect(resumed(stage), 1)
    assert rows["first"][0].all()
    stage.world.poll(0.0)
    assert not stage.messages and not (stage.context.run_dir / "open_episodes").exists()


def test_a_folder_that_cannot_be_written_does_not_end_the_actor(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(toy.KeptEnv, **{"run.checkpoint_interval_s": 0.0})
    (stage.context.run_dir / "open_episodes").write_text("in the way")
    actor = stage.actor()
    stage.collect(actor, 3)
    end(stage, actor)
    assert not stage.messages


class SlowToContinue(toy.KeptEnv):
    """Continues when its actor has shown progress."""

    session = Path()

    def set_state(self, state: Any) -> Any:
        gauge = Gauge(self.session, "actor-0-0")
        before = gauge.progress(0)
        wait_until(lambda: gauge.progress(0) > before, "the actor counts as alive")
        return super().set_state(state)


def test_an_actor_that_takes_long_to_continue_is_not_hung(
    make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = make_stage(SlowToContinue, **{"env.kwargs": {"length": 99}})
    monkeypatch.setattr(SlowToContinue, "session", stage.context.session)
    actor = stage.actor()
    stage.collect(actor, 1)
    end(stage, actor)
    (rows,) = stage.collect(resumed(stage), 1)
    assert (rows["observation"][0, :, 1] == 4).all()


def test_a_killed_run_continues_from_what_was_saved(tmp_path: Path, runs: Runs) -> None:
    """The command and all of its processes die; later the episode ends, with the steps of both parts."""
    kwargs = json.dumps({"folder": str(tmp_path)})
    small = {"actor.num-actors": 1, "actor.envs": 1, "network.hidden": 8, "run.checkpoint-interval-s": 0.1}
    run = runs.train("impala", "toy_envs:OpenEndedEnv", **{"env-kwargs": kwargs, **small})
    path = run.run_dir / "open_episodes" / "actor-0.json"
    run.until(path.exists, "the episode is saved")
    run.until(lambda: list((run.run_dir / "checkpoints").glob("step_*")), "there is a checkpoint")
    run.until_learning()
    pid = run.pid("actor-0")
    run.process.kill()
    run.code()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the actor has ended")
    (run.run_dir / "processes.json").unlink()  # no process is left to do so
    (saved,) = json.loads(path.read_text())["teams"]
    (state,) = saved["group"]["envs"]
    assert saved["lengths"] == [state["t"]] and saved["returns"] == [state["t"] * (state["t"] + 1) / 2]
    again = runs.resume(10**9)
    again.until_learning()
    (tmp_path / "end").touch()
    again.until(lambda: again.rows()[-1]["return_max"], "the episode has ended")
    draw, length = map(int, (tmp_path / "ended").read_text().split())
    assert draw == state["draw"] and length > state["t"], "it is the saved episode"
    whole = np.float32(length * (length + 1) / 2)
    assert math.isclose(again.stop()["return_max"], whole, rel_tol=1e-6)


def test_saving_takes_a_small_share_of_the_time(make_stage: Callable[..., Stage]) -> None:
    """Whatever the interval."""
    stage = make_stage(SlowToSave, **{"env.kwargs": {"length": 99}, "run.checkpoint_interval_s": 0.0, "actor.envs": 1})
    SlowToSave.saved = 0
    actor = stage.actor()
    began = time.monotonic()
    stage.collect(actor, 5)
    assert SlowToSave.saved <= 1 + (time.monotonic() - began) / SlowToSave.TAKES_S * 0.02


class SlowToSave(toy.KeptEnv):
    TAKES_S = 0.02
    saved = 0

    def get_state(self) -> Any:
        type(self).saved += 1
        time.sleep(self.TAKES_S)
        return super().get_state()
