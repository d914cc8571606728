"""The evaluator: plays greedy episodes with the newest weights at intervals, on its own seeds; never trained on.

Waits for: the time of its next match. Wakes nobody. If it dies, the supervisor starts a new one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from echelon.algorithms.exploration import Exploration
from echelon.algorithms.model import Action, Mirror, Model, Policy
from echelon.config import EnvConfig
from echelon.envs.make import env_seeds, make_group
from echelon.envs.vector import StepRows
from echelon.errors import EnvError
from echelon.roles.context import Context, Station
from echelon.roles.plan.parts import Plan
from echelon.schema import space_leaves, unflatten

EVALUATION_SEED = 1 << 20  # used as an actor index that no actor has, so evaluation shares no seed with training


@dataclass(frozen=True, slots=True)
class EvaluationScore:
    """Returns and lengths of the greedy episodes of one match."""

    returns: list[float]
    lengths: list[int]

    def summary(self) -> dict[str, Any]:
        return {
            "episodes": len(self.returns),
            "return_mean": float(np.mean(self.returns)),
            "return_std": float(np.std(self.returns)),
            "return_min": float(np.min(self.returns)),
            "return_max": float(np.max(self.returns)),
            "length_mean": float(np.mean(self.lengths)),
        }


class Match:
    """A fixed number of episodes, one per environment, stepped together until all have ended."""

    def __init__(
        self,
        config: EnvConfig,
        model: Model,
        episodes: int,
        seeds: list[int],
        *,
        greedy: bool = True,
        exploration: Exploration | None = None,
        with_values: bool = False,
    ) -> None:
        """`exploration` applies to actions that are not greedy; `with_values` adds values to `chosen`."""
        self.group = make_group(config, seeds[:episodes])
        self.policy = Policy(model, with_value=with_values, with_action_values=with_values)
        self.num_envs, self.greedy, self.exploration = episodes, greedy, exploration
        self.chosen: Action | None = None  # of the newest step
        leaves = space_leaves(self.group.spaces.observation)
        observation = [np.zeros((episodes, *leaf.shape), leaf.dtype) for leaf in leaves]
        flags = [np.zeros(episodes, np.bool_) for _ in range(3)]
        self.rows = StepRows(observation, np.zeros(episodes, np.float32), *flags)
        self.observation = unflatten(
            self.group.spaces.observation, iter([torch.from_numpy(leaf) for leaf in observation])
        )
        self.first = torch.zeros(episodes, dtype=torch.bool)

    def begin(self, seed: int) -> None:
        """Starts a new match. The environments are reset but not reseeded."""
        self.rng = torch.Generator().manual_seed(seed)
        self.state = self.policy.model.network.initial_state(self.num_envs, self.policy.model.device)
        self.returns, self.lengths = np.zeros(self.num_envs), np.zeros(self.num_envs, np.int64)
        self.playing, self.chosen = np.ones(self.num_envs, np.bool_), None
        self.group.reset(self.rows.observation)
        self.first.fill_(True)

    def step(self) -> EvaluationScore | None:
        """Steps every environment once. Returns the score when all episodes have ended, else None."""
        row = self.observation, self.state, self.first
        chosen = self.policy.act(*row, self.rng, self.exploration, greedy=self.greedy)
        self.state, self.chosen = chosen.state, chosen
        self.group.step(self.policy.model.distribution.to_env(chosen.action.numpy()), self.rows)
        self.first.copy_(torch.from_numpy(~self.rows.valid))
        self.returns += self.rows.reward * self.playing
        self.lengths += self.playing
        self.playing &= ~(self.rows.terminated | self.rows.truncated)
        if self.playing.any():
            return None
        return EvaluationScore(self.returns.tolist(), self.lengths.tolist())

    def play(self, seed: int) -> EvaluationScore:
        """Plays a whole match and returns its score."""
        self.begin(seed)
        while (score := self.step()) is None:
            pass
        return score

    def close(self) -> None:
        self.group.close()


class Evaluator:
    """The evaluator role: plays a match every `interval_s` seconds."""

    def __init__(self, context: Context) -> None:
        torch.set_num_threads(1)
        config = context.train
        self.config, self.station, self.finished = config.evaluation, Station(context), False
        plan = Plan(context)
        seeds = env_seeds(config.seed, EVALUATION_SEED, context.generation, self.config.episodes)
        self.mirror, self.board = Mirror(plan.model), plan.board()
        self.match = Match(config.env, plan.model, self.config.episodes, seeds)
        self.seed, self.playing = config.seed, False
        self.next_match = time.monotonic() + self.config.interval_s

    def step(self, timeout_s: float) -> bool:
        if self.station.stop_requested:
            self.finished = True
            return False
        now = time.monotonic()
        if not self.playing:
            if now < self.next_match:
                self.station.wait(min(timeout_s, self.next_match - now), [])
                return False
            self.next_match = now + self.config.interval_s
            self.mirror.follow(self.board)
            self.match.begin(self.seed)
            self.playing = True
        try:
            score = self.match.step()
        except EnvError as error:
            raise EnvError(f"evaluator: {error}") from error
        self.match.group.failures.clear()  # the actors report their own failures
        self.station.progress += 1
        if score is not None:
            self.station.report("evaluation", {"version": self.mirror.version, **score.summary()})
            self.playing = False
        self.station.tick(time.perf_counter())
        return True

    def close(self) -> None:
        self.match.close()
        self.station.close()


def evaluator(config: dict[str, Any]) -> Evaluator:
    """The entry point of an evaluator process."""
    return Evaluator(Context.from_config(config))
