"""Exploration noise that is correlated in time: its process, the densities of actions, and every way to act."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch

import echelon
from echelon.algorithms.model import Model, Policy
from echelon.asynchronous.acting import ModelActing
from echelon.config import NetworkConfig, replace
from echelon.evaluation import play
from echelon.presets import preset
from echelon.presets.ddpg import DdpgConfig
from echelon.presets.ppo import PpoConfig
from echelon.presets.sac import SacConfig
from echelon.schema import Spaces
from stage import Stage

Array = np.ndarray[Any, Any]
RHO = 0.9
STILL = {"optimizer.learning_rate": 1e-9}  # the policy does not change
WITH_REPLAY = {
    "algorithm.random_steps": 0,
    "algorithm.critic_learning_rate": 1e-9,
    "replay.min_size": 300,
    "replay.samples_per_insert": 0.5,
    "replay.batch": 32,
}


class Recorder(gym.Env[Any, Any]):
    """Nothing changes in it; it records the actions that it receives."""

    actions: ClassVar[dict[int, list[Array]]] = {}  # by environment
    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, bounded: bool) -> None:
        bound = 1.0 if bounded else np.inf
        self.action_space = gym.spaces.Box(-bound, bound, (3,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.actions.setdefault(id(self), []).append(action.copy())
        return np.zeros(2, np.float32), 0.0, False, False, {}


def lagged(noise: Array, lag: int) -> float:
    """Returns the mean product of entries of `noise` (T, ...) that are `lag` steps apart, relative to the square."""
    return float((noise[lag:] * noise[:-lag]).mean() / (noise**2).mean())


def assert_correlated(noise: Array, rho: float = RHO) -> None:
    """Asserts that `noise` (T, N, ...) has unit variance and AR(1) correlations, independently for all of the N."""
    assert (noise**2).mean() == pytest.approx(1.0, abs=0.15)
    assert [lagged(noise, lag) for lag in (1, 3, 6)] == pytest.approx([rho, rho**3, rho**6], abs=0.1)
    series = noise.reshape(len(noise), -1)
    others = np.corrcoef(series.T)[~np.eye(series.shape[1], dtype=bool)]
    assert abs(others.mean()) < 0.1 and np.abs(others).max() < 0.6


@pytest.mark.parametrize("algorithm", [PpoConfig(), SacConfig()], ids=["ppo", "sac"])
def test_the_density_of_an_action_is_that_of_independent_noise(algorithm: Any) -> None:
    spaces = Spaces(gym.spaces.Box(-1.0, 1.0, (4,)), gym.spaces.Box(-1.0, 1.0, (2,)))
    model = Model(NetworkConfig(hidden=(8,)), spaces, algorithm, seed=1)
    policy, rng = Policy(model, noise_correlation=RHO), torch.Generator().manual_seed(0)
    first, observation = torch.zeros(20_000, dtype=torch.bool), torch.zeros(20_000, 4)
    params = model.params(observation).detach()
    state, steps = policy.initial_state(20_000), []
    for _ in range(3):
        chosen = policy.act(observation, state, first, rng)
        state = chosen.state
        torch.testing.assert_close(chosen.log_prob, model.distribution.log_prob(params, chosen.action))
        steps.append(state[-1])
    independent = model.distribution.sample(params, rng)
    for name in ("mean", "std"):  # at every step, the first included
        expected = getattr(independent.action, name)(0)
        for noise in steps:
            found = getattr(model.distribution.sample_at(params, noise).action, name)(0)
            torch.testing.assert_close(found, expected, atol=0.02, rtol=0.0)
    assert float((steps[0] * steps[1]).mean()) == pytest.approx(RHO, abs=0.02)
    assert float((steps[0] * steps[2]).mean()) == pytest.approx(RHO**2, abs=0.02)


def test_greedy_actions_and_discrete_actions_have_no_noise() -> None:
    box = gym.spaces.Box(-1.0, 1.0, (4,))
    rng, first, observation = torch.Generator().manual_seed(0), torch.zeros(5, dtype=torch.bool), torch.rand(5, 4)
    model = Model(NetworkConfig(hidden=(8,)), Spaces(box, gym.spaces.Box(-1.0, 1.0, (2,))), seed=1)
    policy = Policy(model, noise_correlation=RHO)
    state = policy.act(observation, policy.initial_state(5), first, rng).state
    greedy = policy.act(observation, state, first, rng, greedy=True)
    assert torch.equal(greedy.state[-1], state[-1]), "the noise goes on where it was"
    assert torch.equal(greedy.action, model.distribution.mode(model.params(observation)))
    discrete = Model(NetworkConfig(hidden=(8,)), Spaces(box, gym.spaces.Discrete(3)), seed=1)
    drawn = []
    for correlation in (0.0, RHO):
        rng.manual_seed(3)
        policy = Policy(discrete, noise_correlation=correlation)
        assert policy.initial_state(5) == ()
        drawn.append(policy.act(observation, (), first, rng).action)
    assert torch.equal(*drawn)


@pytest.mark.parametrize("core", ["none", "lstm"])
@pytest.mark.parametrize("mode", ["local", "central"])
def test_the_noise_of_an_actor(make_stage: Callable[..., Stage], mode: str, core: str) -> None:
    """Also with a server that is replaced, and over the ends of episodes; log-probabilities are those of a replay."""
    fields = {"acting.mode": mode, "actor.num_actors": 1, "actor.envs": 12, "actor.trajectory": 50}
    fields |= {"network.core": core, "network.core_size": 6, "algorithm.noise_correlation": RHO}
    stage = make_stage("Pendulum-v1", "ppo", **fields)
    actor, model, trajectories = stage.actor(), stage.plan.model, []
    for incarnation in range(2):
        server = stage.inference(incarnation) if mode == "central" else None
        trajectories += stage.collect(actor, 6, server)
    state, noises = model.network.initial_state(12, "cpu"), []
    with torch.no_grad():
        for trajectory in trajectories:
            assert sum("state" in name for name in trajectory) == len(state), "noise is not stored"
            for i, leaf in enumerate(state):
                np.testing.assert_allclose(trajectory[f"state.{i}"], leaf.numpy(), rtol=1e-4, atol=1e-5)
            observation, first = (torch.from_numpy(trajectory[name][:-1]) for name in ("observation", "first"))
            output = model.network(observation, state, first)
            action, state = torch.from_numpy(trajectory["action"]), output.state
            log_prob = model.distribution.log_prob(output.params, action)
            np.testing.assert_allclose(trajectory["log_prob"], log_prob.numpy(), rtol=1e-3, atol=1e-4)
            mean, log_std = output.params.split(1, -1)
            noises.append(((action - mean) / log_std.exp()).numpy())
    assert any(trajectory["first"][1:].any() for trajectory in trajectories), "episodes end on the way"
    assert_correlated(np.concatenate(noises))


@pytest.mark.parametrize(
    ("name", "mode"),
    [("impala", "central"), ("a3c", "local"), ("sac", "local"), ("ddpg", "local"), ("ddpg", "central")],
)
def test_the_actions_of_a_run(tmp_path: Path, shm_dir: Path, name: str, mode: str) -> None:
    Recorder.actions.clear()
    has_replay = name in ("sac", "ddpg")
    fields = {
        "env.id": Recorder,
        "env.kwargs": {"bounded": has_replay},
        "engine": "inline",
        "acting.mode": mode,
        "actor.num_actors": 2,
        "actor.envs": 4,
        "network.hidden": (8,),
        "stop.steps": 4_000,
        "evaluation.episodes": 0,
        "run.dir": str(tmp_path / "run"),
        "shm_dir": str(shm_dir),
        "algorithm.noise_correlation": RHO,
        **STILL,
        **(WITH_REPLAY if has_replay else {}),
        **({"algorithm.noise": 0.1} if name == "ddpg" else {}),
    }
    echelon.train(replace(preset(name, "Pendulum-v1"), **fields), output=io.StringIO())
    played = [actions for actions in Recorder.actions.values() if len(actions) > 100]
    assert len(played) == 8
    action = np.stack([actions[: min(map(len, played))] for actions in played], 1).astype(np.float64)
    before = np.arctanh(action) if name == "sac" else action
    noise = before - before.mean((0, 1))
    if name == "ddpg":
        noise /= 0.1
        assert np.abs(action).max() < 1.0, "no action is clipped"
    else:
        noise /= np.sqrt((noise**2).mean((0, 1)))
    assert_correlated(noise)


def test_the_noise_of_a_worker() -> None:
    spaces = Spaces(gym.spaces.Box(-1.0, 1.0, (2,)), gym.spaces.Box(-1.0, 1.0, (3,)))
    algorithm = DdpgConfig(noise_correlation=RHO, random_steps=0)
    for rule in (algorithm, SacConfig(noise_correlation=RHO, random_steps=0)):
        config = replace(preset("ddpg", "Pendulum-v1"), **{"algorithm": rule, "network.hidden": (8,)})
        acting, evaluates = ModelActing(config, spaces, 0, 8, seed=1), np.arange(8) == 7
        observation = [np.zeros((8, 2), np.float32)]
        action = np.stack([acting.act(observation, evaluates, 10_000) for _ in range(800)]).astype(np.float64)
        assert (action[:, 7] == action[0, 7]).all(), "an environment that evaluates is greedy"
        noise = np.arctanh(action[:, :7])
        noise -= noise.mean((0, 1))
        assert_correlated(noise / np.sqrt((noise**2).mean()))


def test_a_run_can_be_resumed_and_played(tmp_path: Path, shm_dir: Path) -> None:
    fields = {"engine": "inline", "stop.steps": 2_000, "evaluation.episodes": 0, "shm_dir": str(shm_dir)}
    fields |= {"algorithm.epochs": 1, "algorithm.noise_correlation": RHO, "run.dir": str(tmp_path / "run")}
    echelon.train(replace(preset("ppo", "Pendulum-v1"), **fields), output=io.StringIO())
    summary = echelon.resume(tmp_path / "run", steps=4_000, output=io.StringIO()).summary
    assert summary["env_steps"] >= 4_000
    assert np.isfinite(play(tmp_path / "run", greedy=False)["return_mean"])
