"""The evaluator: plays greedy episodes with the newest weights at intervals, on its own seeds; never trained on.

At the end of the run the coordinator asks it to evaluate the final weights (`evaluate`). It keeps the weights of the
best evaluation so far as `checkpoints/best`.

Waits for: the time of its next match, or the request of the coordinator. Wakes nobody. If it dies, the supervisor
starts a new one, which is asked again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from echelon.algorithms.exploration import Exploration
from echelon.algorithms.model import Action, Mirror, Model, Policy
from echelon.config import EnvConfig
from echelon.envs.make import env_seeds, make_group
from echelon.envs.vector import StepRows
from echelon.errors import ConfigError, EnvError
from echelon.roles.context import Context, Station
from echelon.roles.plan.parts import Plan
from echelon.runs.best import Best, is_better, read_best, save_best
from echelon.runs.weights import read_weights
from echelon.schema import space_leaves, unflatten

SAVE_S = 60.0  # how long saving the best weights counts as progress
PROGRESS_INTERVAL_S = 1.0  # between two reports about the evaluation at the end
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
        return None if self.playing.any() else self.ended()

    def ended(self) -> EvaluationScore:
        """Returns the score of the episodes that have ended so far."""
        over = ~self.playing
        return EvaluationScore(self.returns[over].tolist(), self.lengths[over].tolist())

    def play(self, seed: int, max_steps: int, progress: Callable[[int, int], None]) -> EvaluationScore:
        """Plays a whole match and returns its score; episodes are cut after `max_steps`, unless that is 0.

        `progress` is called with the numbers of ended episodes and of steps so far.
        """
        self.begin(seed)
        while (score := self.step()) is None:
            progress(int((~self.playing).sum()), int(self.lengths.sum()))
            if self.lengths.max() == (max_steps or -1):  # of all that still play
                self.playing[:] = False
                return self.ended()
        return score

    def close(self) -> None:
        self.group.close()


@dataclass(frozen=True, slots=True)
class FinalTask:
    """The evaluation of the final weights, which are in `checkpoint`."""

    checkpoint: str
    env_steps: int
    version: int
    deadline: float  # monotonic clock


class Evaluator:
    """The evaluator role: plays a match every `interval_s` seconds, and one with the final weights on request."""

    def __init__(self, context: Context) -> None:
        torch.set_num_threads(1)
        config = context.train
        self.config, self.station, self.finished = config.evaluation, Station(context), False
        plan = Plan(context)
        seeds = env_seeds(config.seed, EVALUATION_SEED, context.generation, self.config.episodes)
        self.model, self.mirror, self.board = plan.model, Mirror(plan.model), plan.board()
        self.match = Match(config.env, plan.model, self.config.episodes, seeds)
        self.seed, self.playing = config.seed, False
        self.next_match = time.monotonic() + (self.config.interval_s or math.inf)
        self.newest_steps = self.match_steps = 0  # environment steps: of the newest weights, of those that play
        self.match_version = 0  # of the weights that play
        self.final: FinalTask | None = None
        self.has_begun_final, self.next_report = False, 0.0
        self.checkpoints = context.run_dir / "checkpoints"
        self.best = self._read_best()
        self.station.world.serve("progress", self._note_progress)
        self.station.world.serve("evaluate", self._note_final)

    def _read_best(self) -> Best | None:
        try:
            best = read_best(self.checkpoints)
        except ConfigError as error:
            self.station.report("message", f"{error} The next evaluation replaces it.")
            return None
        if best is not None:
            self.station.report("best", asdict(best))
        return best

    def _note_progress(self, env_steps: int) -> None:
        self.newest_steps = env_steps

    def _note_final(self, checkpoint: str, env_steps: int, version: int, limit_s: float) -> None:
        """Ends the current match and begins the final one; called repeatedly, so that a successor is asked, too."""
        if self.final is None:
            self.final = FinalTask(checkpoint, env_steps, version, time.monotonic() + limit_s)
            self.playing = False

    def step(self, timeout_s: float) -> bool:
        if self.station.stop_requested:
            self.finished = True
            return False
        if not self.playing and not self._begin(timeout_s):
            return False
        try:
            score = self.match.step()
        except EnvError as error:
            raise EnvError(f"evaluator: {error}") from error
        self.match.group.failures.clear()  # the actors report their own failures
        self.station.progress += 1
        if score is not None:
            self._end(score)
        elif self.final is not None:
            self._watch(self.final)
        self.station.tick(time.perf_counter())
        return True

    def _begin(self, timeout_s: float) -> bool:
        """Begins the match that is due; returns False after waiting for it if there is none."""
        now = time.monotonic()
        if self.final is None and now >= self.next_match and self.newest_steps:
            self.next_match = now + self.config.interval_s
            self.match_version, self.match_steps = self.mirror.follow(self.board), self.newest_steps
        elif self.final is not None and not self.has_begun_final:
            self.model.load_weights(read_weights(Path(self.final.checkpoint)), self.final.checkpoint)
            self.match_version, self.match_steps = self.final.version, self.final.env_steps
            self.has_begun_final = True
        else:
            wait_s = min(timeout_s, self.next_match - now) if self.next_match > now else timeout_s
            self.station.wait(wait_s, [])
            return False
        self.match.begin(self.seed)
        self.playing = True
        return True

    def _watch(self, final: FinalTask) -> None:
        """Reports the progress of the final match, and ends it at its deadline."""
        now = time.monotonic()
        if now >= final.deadline:
            self._end(self.match.ended())
        elif now >= self.next_report:
            self.next_report = now + PROGRESS_INTERVAL_S
            self.station.report("evaluating", len(self.match.ended().returns))

    def _end(self, score: EvaluationScore) -> None:
        """Reports a match. Keeps its weights if they are the best, by all of its episodes: short ones end first."""
        self.playing = False
        if len(score.returns) == self.config.episodes:
            self._keep(Best(float(np.mean(score.returns)), self.match_steps, len(score.returns)))
        if score.returns:
            row = {"version": self.match_version, "env_steps": self.match_steps, **score.summary()}
            self.station.report("evaluation", row)
        if self.final is not None:
            self.station.report("evaluated", score.summary() if score.returns else {"episodes": 0})

    def _keep(self, best: Best) -> None:
        if not is_better(best, self.best):
            return
        try:
            with self.station.working(SAVE_S):
                save_best(self.checkpoints, self.model.weights(), best)
        except OSError as error:
            self.station.report("disk", "best", str(error))
            return
        self.best = best
        self.station.report("disk", "best", "")
        self.station.report("best", asdict(best))

    def close(self) -> None:
        self.match.close()
        self.station.close()


def evaluator(config: dict[str, Any]) -> Evaluator:
    """The entry point of an evaluator process."""
    return Evaluator(Context.from_config(config))
