"""An actor with replay: the transitions in its shard are those of its environments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import toy_envs as toy
from echelon.config import replace
from echelon.envs import racing
from echelon.envs.make import probe_spaces
from echelon.errors import ConfigError, DivergedError
from echelon.objectives.values import PRIORITY_FLOOR
from echelon.presets import preset
from echelon.replay.layout import ShardLayout
from echelon.replay.reader import ShardReader
from echelon.replay.shard import RINGS
from echelon.roles.actor import Actor
from echelon.roles.frame_stacks import stack_leaves
from echelon.roles.inference import Inference
from echelon.roles.plan.replay import transition_layout
from echelon.roles.tally import NUM_KEPT, Tally
from echelon.schema import Spaces
from stage import Stage

Array = np.ndarray[Any, Any]
MakeStage = Callable[..., Stage]
GAMMA = 0.5
FREE = {"replay.samples_per_insert": 0.0, "replay.capacity": 4096, "replay.min_size": 8, "replay.batch": 8}


def make_open(make_stage: MakeStage, env: Any = toy.CounterEnv, name: str = "dqn", **fields: Any) -> Stage:
    """A stage whose learner has opened the run and does not limit the actors."""
    base = {"actor.num_actors": 1, "actor.trajectory": 1, "algorithm.discount": GAMMA}
    stage = make_stage(env, name, **{**base, **FREE, **fields})
    stage.plan.replay.tally().open(0, 0)
    return stage


def play(actor: Actor, steps: int, inference: Inference | None = None) -> None:
    for _ in range(steps):
        while not actor.step(0.0):
            assert inference is not None and inference.step(0.0)


def items(stage: Stage, shard: int = 0) -> dict[str, Array]:
    """Returns every item in a shard, with the actor's priorities."""
    reader: ShardReader = stage.plan.replay.readers()[shard]
    start, head = reader.window()
    block = reader.layout.block(head - start)
    assert reader.read(np.arange(start, head), block).all()
    return {**block.fields, "priority": reader.initial(start, head)}


def check(found: dict[str, Array], length: int, n_step: int, truncate: bool) -> None:
    """Compares transitions of the counter environment with the expected ones."""
    episode, t = found["observation"][:, 0], found["observation"][:, 1]
    spanned = np.minimum(n_step, length - t).astype(int)
    for name in ("episode", "draw"):
        column = {"episode": 0, "draw": 2}[name]
        np.testing.assert_array_equal(found["next_observation"][:, column], found["observation"][:, column])
    np.testing.assert_array_equal(found["next_observation"][:, 1], t + spanned)
    steps = np.arange(n_step)
    rewards = (steps < spanned[:, None]) * GAMMA**steps * ((100 * episode + t + 1)[:, None] + steps)
    np.testing.assert_allclose(found["reward"], rewards.sum(1), rtol=1e-6)
    ends = t + spanned == length
    assert ends.any()
    np.testing.assert_allclose(found["discount"], np.where(ends & (not truncate), 0.0, GAMMA**spanned))
    assert (found["version"] == 1).all() and (found["priority"] == 1.0).all()
    per_episode = np.unique(found["observation"][episode <= 3][:, [0, 2]], axis=0, return_counts=True)[1]
    assert per_episode.tolist() == [length] * len(per_episode), "every step of an episode starts one"
    assert len(per_episode) >= 9


@pytest.mark.parametrize("truncate", [False, True], ids=["terminating", "truncating"])
@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("trajectory", [1, 4])
def test_transitions_are_what_the_environments_did(
    make_stage: MakeStage, trajectory: int, n_step: int, truncate: bool
) -> None:
    length, fields = 5, {"actor.envs": 3, "actor.trajectory": trajectory, "replay.n_step": n_step}
    stage = make_open(make_stage, **{**fields, "env.kwargs": {"length": length, "truncate": truncate}})
    play(stage.actor(), 24)  # three episodes of five steps and one that resets, and five steps of the next
    check(items(stage), length, n_step, truncate)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", ["dqn", "apex-dqn"])
def test_central_acting_brings_the_same_transitions(make_stage: MakeStage, name: str, groups: int) -> None:
    fields = {"acting.mode": "central", "acting.groups": groups, "actor.envs": 4, "replay.n_step": 3}
    fields |= {"algorithm.epsilon_steps": 0}  # requests for random actions alone are not sent
    stage = make_open(make_stage, name=name, **fields, **{"env.kwargs": {"length": 5, "truncate": True}})
    play(stage.actor(), 24 * groups, stage.inference())
    check(items(stage), 5, 3, truncate=True)


def test_central_acting_strays_row_by_row(make_stage: MakeStage) -> None:
    """Of four environments on the epsilon ladder, the first often takes a random action and the last hardly ever."""
    fields = {"acting.mode": "central", "actor.envs": 4, "env.kwargs": {"length": 10_000}, "replay.n_step": 1}
    stage = make_open(make_stage, name="apex-dqn", **fields, **{"algorithm.epsilon_steps": 0})
    model = stage.plan.model
    model.network.get_parameter("advantage_head.bias").data[1] = 100.0  # the policy always chooses action 1
    stage.board.publish(model.parts(), 2)
    play(stage.actor(), 2 * 300, stage.inference())
    found = items(stage)
    draws = found["observation"][:, 2]
    order = draws[:4]  # the first step of each environment, group by group
    others = [float((found["action"][draws == draw] == 0).mean()) for draw in order]
    assert 0.1 < others[0] < 0.3 and others[2] < 0.05 and others[3] < 0.02, "0.4^(1 + 7i/3), and half of them stay"


def test_central_acting_adds_noise_and_starts_at_random(make_stage: MakeStage) -> None:
    fields = {"acting.mode": "central", "actor.envs": 2, "env.kwargs": {"dtype": "float32"}, "replay.n_step": 1}
    stage = make_open(make_stage, toy.ForceEnv, "td3", **fields, **{"algorithm.random_steps": 400})
    model = stage.plan.model
    model.network.get_parameter("head.weight").data.zero_()  # the policy always chooses action 0
    stage.board.publish(model.parts(), 2)
    play(stage.actor(), 2 * 400, stage.inference())
    action = items(stage)["action"][:, 0]
    assert np.abs(action[:380]).max() > 0.9 and abs(action[:380].mean()) < 0.15, "uniform at first"
    later = action[420:]
    assert len(later) > 300 and 0.08 < later.std() < 0.12 and abs(later.mean()) < 0.03, "then noise of 0.1"


def test_actions_and_trees_are_stored_as_they_were(make_stage: MakeStage) -> None:
    stage = make_open(make_stage, toy.TreeEnv, **{"replay.n_step": 1})
    play(stage.actor(), 20)
    found = items(stage)
    assert set(found["action"].tolist()) == {0, 1, 2}, "the first steps are random"
    np.testing.assert_array_equal(found["next_observation.a.0"], found["action"] + 5)
    np.testing.assert_array_equal(found["next_observation.z"], found["observation.z"] + 1.0)


def test_first_priorities_are_the_td_errors_of_the_acting_policy(make_stage: MakeStage) -> None:
    fields = {"replay.n_step": 2, "env.kwargs": {"length": 4}, "algorithm.reward_clip": 1.0}
    stage = make_open(make_stage, name="apex-dqn", **fields)
    play(stage.actor(), 30)
    found = items(stage)
    with torch.no_grad():
        values, after = (
            stage.plan.model.params(torch.from_numpy(found[name].copy()))
            for name in ("observation", "next_observation")
        )
    chosen = values.numpy()[np.arange(len(found["action"])), found["action"]]
    errors = found["reward"] + found["discount"] * after.numpy().max(-1) - chosen
    assert np.ptp(errors) > 0.1
    np.testing.assert_allclose(found["priority"], np.abs(errors) + PRIORITY_FLOOR, rtol=1e-4, atol=1e-5)


def test_rewards_are_clipped_before_they_are_summed(make_stage: MakeStage) -> None:
    stage = make_open(make_stage, **{"replay.n_step": 3, "algorithm.reward_clip": 1.0, "env.kwargs": {"length": 50}})
    play(stage.actor(), 10)
    np.testing.assert_allclose(items(stage)["reward"], 1.0 + GAMMA + GAMMA**2)


def test_without_values_new_transitions_get_the_largest_priority_so_far(make_stage: MakeStage) -> None:
    fields = {"replay.prioritized": True, "env.kwargs": {"dtype": "float32"}}
    stage = make_open(make_stage, toy.ForceEnv, "sac", **fields)
    actor = stage.actor()
    play(actor, 3)
    stage.plan.replay.tally().raise_top(7.5)
    play(actor, 2)
    assert items(stage)["priority"].tolist() == [1.0] * 4 + [7.5] * 4


def test_nobody_acts_before_the_learner_has_opened_the_run(make_stage: MakeStage) -> None:
    stage = make_stage(name="dqn", **{"actor.num_actors": 1, **FREE})
    actor = stage.actor()
    assert not actor.step(0.0)
    stage.plan.replay.tally().open(500, 0)
    assert actor.step(0.0)
    assert actor.acting.exploring.env_steps() == 500  # type: ignore[attr-defined]


def test_the_limiter_holds_an_actor_and_lets_it_go_on(make_stage: MakeStage) -> None:
    stage = make_open(make_stage, **{"replay.samples_per_insert": 2.0, "replay.n_step": 1})
    actor, limiter = stage.actor(), stage.plan.replay.limiter()
    steps = 0
    while actor.step(0.0):
        steps += 1
    held = limiter.inserted
    assert 0 < steps < 30 and limiter.balance + 2.0 * 2 > limiter.rule.room
    assert not actor.step(0.0) and limiter.inserted == held
    limiter.note_sampled(0, 8)
    assert actor.step(0.0) and actor.step(0.0) and limiter.inserted == held + 4


def test_a_successor_goes_on_at_the_head_of_the_shard(make_stage: MakeStage) -> None:
    stage = make_open(make_stage, **{"replay.n_step": 3, "env.kwargs": {"length": 50}})
    play(stage.actor(), 10)
    before, steps = items(stage), stage.plan.replay.tally().env_steps
    play(stage.actor(incarnation=1), 10)
    after = items(stage)
    count = len(before["reward"])
    assert count == 2 * (10 - 3) and len(after["reward"]) == 2 * count, "open transitions are lost, and nothing else"
    for name, column in before.items():
        np.testing.assert_array_equal(after[name][:count], column)
    assert stage.plan.replay.limiter().inserted == 2 * count and stage.plan.replay.tally().env_steps == 2 * steps


def test_steps_and_episodes_are_counted(make_stage: MakeStage) -> None:
    stage = make_open(make_stage, **{"env.kwargs": {"length": 3}, "actor.trajectory": 2})
    play(stage.actor(), 10)
    tally = stage.plan.replay.tally()
    assert tally.env_steps == 2 * 8, "the steps that only reset do not count"
    assert tally.episodes == tally.episodes_of(0) == 4
    assert tally.ended(0, 0).tolist() == [[306.0, 3.0, 0.0], [306.0, 3.0, 1.0], [606.0, 3.0, 0.0], [606.0, 3.0, 1.0]]
    assert tally.ended(0, 3).tolist() == [[606.0, 3.0, 1.0]]


@pytest.mark.parametrize(("what", "where"), [("reward", "reward is nan"), ("observation", r"observation\[1\] is inf")])
def test_what_is_not_finite_is_refused_with_its_environment(make_stage: MakeStage, what: str, where: str) -> None:
    class Broken(toy.CounterEnv):
        def step(self, action: Any) -> toy.Step:
            observation, reward, *rest = super().step(action)
            if self.episode == 2:
                reward = np.nan if what == "reward" else reward
                observation[1] = np.inf if what == "observation" else observation[1]
            return observation, reward, *rest  # type: ignore[return-value]

    stage = make_open(make_stage, Broken)
    with pytest.raises(DivergedError, match=f"{where} after a step of actor 0, environment 0"):
        play(stage.actor(), 10)


def test_rewards_whose_sum_cannot_be_stored_are_refused(make_stage: MakeStage) -> None:
    class Rich(toy.CounterEnv):
        def step(self, action: Any) -> toy.Step:
            observation, _, *rest = super().step(action)
            return observation, 3e38, *rest  # type: ignore[return-value]

    stage = make_open(make_stage, Rich, **{"replay.n_step": 3, "env.kwargs": {"length": 50}})
    with pytest.raises(DivergedError, match=r"rewards over 3 steps is inf after a step of actor 0, environment 0"):
        play(stage.actor(), 10)


def test_a_batch_that_is_fetched_ahead_is_counted_with_the_version_it_is_learned_at(make_stage: MakeStage) -> None:
    stage = make_stage(name="dqn", **{"actor.num_actors": 1, **FREE, "replay.publish_every": 3})
    learner, actor = stage.learner(), stage.actor()
    source, ahead, at = learner.source, list[int](), list[int]()
    take = source.take
    source.prefetch = ahead.append  # type: ignore[method-assign]
    source.take = lambda version: at.append(version) or take(version)  # type: ignore[func-returns-value, method-assign]
    play(actor, 20)
    for _ in range(7):
        assert learner.step(0.0)
    assert ahead[:-1] == at[1:] and len(set(at)) == 3


def test_stacked_frames_are_stored_once(make_stage: MakeStage) -> None:
    fields = {"replay.frames": "stacked", "replay.n_step": 2, "network.hidden": (), "actor.envs": 1}
    stage = make_open(make_stage, toy.Film, **fields)
    play(stage.actor(), 60)
    found = items(stage)
    newest, later = (found[name][:, -1, 0, 0].astype(int) for name in ("observation", "next_observation"))
    spanned = later - newest
    assert set(spanned.tolist()) == {1, 2} and len(newest) > 50
    np.testing.assert_allclose(found["reward"], newest + 1 + np.where(spanned == 2, GAMMA * (newest + 2), 0.0))
    for name in ("observation", "next_observation"):
        stack = found[name][:, :, 0, 0].astype(int)
        assert ((np.diff(stack) == 1) | (np.diff(stack) == 0)).all() and (stack[:, -1] >= stack[:, 0]).all()
    stored = stage.plan.replay.shard(0).words[RINGS]
    assert stored == 60, "one frame for every observation"


def shaped(**fields: Any) -> ShardLayout:
    config = replace(preset("dqn", "CartPole-v1"), **{**FREE, **fields})
    return transition_layout(config, probe_spaces(config.env))


def test_a_layout_that_cannot_be_is_refused() -> None:
    assert shaped().capacity == 4096 and not shaped().rings
    with pytest.raises(ConfigError, match=r"replay\.frames=stacked, but no observation is a stack.*observation \(4,\)"):
        shaped(**{"replay.frames": "stacked"})
    fields = {"replay.capacity": 100, "replay.min_size": 80, "replay.batch": 40, "actor.num_actors": 4}
    with pytest.raises(
        ConfigError, match=r"replay\.capacity=100 gives each of 4 shards 25 transitions.*Raise it to 160"
    ):
        shaped(**fields)


def spaces_of(*shape: int) -> Spaces:
    return Spaces(gym.spaces.Box(0, 255, shape, np.uint8), gym.spaces.Discrete(2))


def found_stacks(id: Any, spaces: Spaces, frames: str = "auto", **kwargs: Any) -> bool:
    config = replace(preset("dqn", "CartPole-v1"), **{"env.id": id, "env.kwargs": kwargs, "replay.frames": frames})
    return bool(stack_leaves(config, spaces))


def test_stacks_are_found_where_they_are_known_to_be() -> None:
    stack, image = spaces_of(4, 84, 84), spaces_of(210, 160, 3)
    known = ["ALE/Pong-v5", "envpool:Pong-v5", "echelon.envs.racing:PixelPool", racing.Pixels]
    for id in [*known, "SuperMarioBros-1-1", "SuperMarioBros", "echelon.envs.mario:MarioPool"]:
        assert found_stacks(id, stack) and not found_stacks(id, image) and not found_stacks(id, stack, "whole"), id
    assert found_stacks("echelon.envs.racing:Pixels", spaces_of(2, 84, 84), stack=2)
    assert not found_stacks("envpool:Pong-v5", spaces_of(12, 84, 84), gray_scale=False), "colours, not frames"
    assert not found_stacks("envpool:CoinrunEasy-v0", spaces_of(3, 64, 64)) and not found_stacks(toy.Film, stack)
    assert found_stacks("ALE/Pong-v5", spaces_of(4, 84, 84, 3), grayscale=False)


@pytest.mark.parametrize("shape", [(48, 48, 3), (84, 84, 4), (210, 160, 1)])
def test_an_image_with_its_colours_last_is_no_stack(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"replay\.frames=stacked, but no observation is a stack"):
        found_stacks(toy.Film, spaces_of(*shape), "stacked")
    for stack in (spaces_of(4, *shape), spaces_of(4, 84, 84)):
        assert found_stacks(toy.Film, stack, "stacked")


def test_frames_of_too_few_transitions_are_refused() -> None:
    fields = {"replay.frames": "stacked", "replay.capacity": 400, "replay.min_size": 400, "replay.batch": 8}
    fields |= {"actor.num_actors": 2, "actor.trajectory": 1, "replay.n_step": 3, "actor.envs": 4}
    config = replace(preset("dqn", "CartPole-v1"), **fields)
    assert transition_layout(config, spaces_of(4, 8, 8)).rings
    with pytest.raises(ConfigError, match=r"at most 194 transitions.*4 environments, stacks of 20 frames, 3 steps"):
        transition_layout(replace(config, **{"replay.capacity": 200, "replay.min_size": 200}), spaces_of(20, 8, 8))


def test_values_that_are_lost_are_a_divergence(make_stage: MakeStage) -> None:
    stage = make_open(make_stage, name="apex-dqn", **{"replay.n_step": 1, "optimizer.learning_rate": 0.125})
    actor = stage.actor()
    play(actor, 3)
    stage.plan.model.network.get_parameter("advantage_head.bias").data[:] = torch.inf
    stage.board.publish(stage.plan.model.parts(), 2)
    with pytest.raises(DivergedError, match=r"the policy of version 2 values.*learning-rate \(now 0\.125\)"):
        play(actor, 3)


def test_more_episodes_than_are_kept_are_counted_all_the_same() -> None:
    tally = Tally(2)
    tally.open(100, 7)
    tally.open(999, 999)  # a restarted learner
    count = NUM_KEPT + 50
    for number in range(count):
        tally.note(1, 3, np.array([[float(number), 3, 0]]))
    assert (tally.env_steps, tally.episodes) == (100 + 3 * count, 7 + count)
    kept = tally.ended(1, 0)[:, 0].tolist()
    assert kept == list(range(count - len(kept), count)) and len(kept) >= NUM_KEPT - 1
    assert tally.ended(1, count - 2)[:, 0].tolist() == [count - 2, count - 1] and len(tally.ended(0, 0)) == 0


@pytest.mark.parametrize(("epsilon", "asks"), [(1.0, False), (0.5, True), (0.0, True)])
def test_an_inference_server_is_asked_only_for_what_the_policy_chooses(
    make_stage: MakeStage, epsilon: float, asks: bool
) -> None:
    fields = {"algorithm.epsilon_start": epsilon, "algorithm.epsilon_end": epsilon, "acting.mode": "central"}
    stage = make_open(make_stage, **fields, **{"actor.envs": 4, "acting.groups": 4})  # groups of one environment
    actor, inference = stage.actor(), stage.inference()
    steps = without = 0
    for _ in range(400):
        if actor.step(0.0):
            steps += 1
        else:
            inference.step(0.0)
    requests = inference.server.num_requests
    assert steps > 50 and (requests > 0) == asks and (epsilon == 0.0 or requests < 0.8 * steps), (steps, requests)
    while without < 50 and actor.step(0.0):
        without += 1
    assert (without == 50) == (not asks), "without an inference server"
