"""One process, one group of environments, one numpy buffer: the value algorithms without roles.

As a script it trains a preset: python tests/learning/value_loop.py sac Pendulum-v1 --steps 20000 --target -180
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from echelon.algorithms import Model, build_algorithm
from echelon.algorithms.exploration import Explorer
from echelon.algorithms.model import Policy
from echelon.config import TrainConfig
from echelon.config_io import set_fields
from echelon.envs.make import env_seeds, make_group
from echelon.envs.vector import StepRows
from echelon.presets import REPLAY_PRESETS
from echelon.roles.evaluator import EVALUATION_SEED, Match
from echelon.roles.update import LocalUpdate
from echelon.schema import Spaces, TransitionBatch, action_leaf, space_leaves, unflatten

Array = np.ndarray[Any, Any]


class Rows:
    """The last rows of K environments as they were stepped; n-step transitions are put together when drawn."""

    def __init__(self, spaces: Spaces, num_rows: int, num_envs: int) -> None:
        shape, self.space, self.num_rows = (num_rows, num_envs), spaces.observation, num_rows
        self.observation = [np.zeros((*shape, *leaf.shape), leaf.dtype) for leaf in space_leaves(spaces.observation)]
        action = action_leaf(spaces.action)
        self.action = np.zeros((*shape, *action.shape), action.dtype)
        self.reward = np.zeros(shape, np.float32)
        self.terminated, self.ended, self.valid = (np.zeros(shape, np.bool_) for _ in range(3))
        self.head = 0  # rows written so far; row `head` holds an observation, but no step yet

    def append(self, action: Array, rows: StepRows) -> None:
        """A step from the newest observation, and the observation after it."""
        t, after = self.head % self.num_rows, (self.head + 1) % self.num_rows
        self.action[t], self.reward[t] = action, rows.reward
        self.terminated[t], self.valid[t] = rows.terminated, rows.valid
        self.ended[t] = rows.terminated | rows.truncated
        for mine, leaf in zip(self.observation, rows.observation, strict=True):
            mine[after] = leaf
        self.head += 1

    def sample(self, batch: int, n_step: int, discount: float, rng: np.random.Generator) -> TransitionBatch:
        oldest, newest = max(self.head - self.num_rows + 1, 0), self.head - n_step + 1
        t, k = rng.integers(oldest, newest, 4 * batch), rng.integers(0, self.valid.shape[1], 4 * batch)
        usable = np.flatnonzero(self.valid[t % self.num_rows, k])[:batch]
        t, k = t[usable], k[usable]
        first, after = t % self.num_rows, t
        total, factor = np.zeros(len(t), np.float32), np.ones(len(t), np.float32)
        going = np.ones(len(t), np.bool_)
        for _ in range(n_step):
            row = after % self.num_rows
            total += np.where(going, factor * self.reward[row, k], 0.0)
            factor *= np.where(going, discount * ~self.terminated[row, k], 1.0)
            after = after + going
            going &= ~self.ended[row, k]
        return TransitionBatch(
            observation=self._tree(first, k),
            action=torch.from_numpy(self.action[first, k]),
            reward=torch.from_numpy(total),
            discount=torch.from_numpy(factor),
            next_observation=self._tree(after % self.num_rows, k),
            weight=torch.ones(len(t)),
            keys=(t, k),
        )

    def _tree(self, t: Array, k: Array) -> Any:
        return unflatten(self.space, iter([torch.from_numpy(leaf[t, k]) for leaf in self.observation]))


@dataclass(frozen=True, slots=True)
class Point:
    """Where the training stands."""

    env_steps: int
    updates: int
    greedy: float  # mean return of greedy episodes
    wall_s: float


class Training:
    """A preset's values on one group of environments."""

    def __init__(self, config: TrainConfig, *, num_envs: int, episodes: int = 10) -> None:
        self.config, self.replay = config, config.replay
        self.group = make_group(config.env, env_seeds(config.seed, 0, 0, num_envs))
        self.model = Model(config.network, self.group.spaces, config.algorithm, seed=config.seed)
        self.algorithm = build_algorithm(config.algorithm, self.model, config.seed)
        self.update = LocalUpdate(config.optimizer, self.model, self.algorithm.groups)
        self.policy, self.generator = Policy(self.model), torch.Generator().manual_seed(config.seed)
        self.first = torch.zeros(num_envs, dtype=torch.bool)
        self.explorer = Explorer(config.algorithm, range(num_envs), num_envs)
        self.rows = Rows(self.group.spaces, max(self.replay.capacity // num_envs, 8) + 1, num_envs)
        self.match = Match(config.env, self.model, episodes, env_seeds(config.seed, EVALUATION_SEED, 0, episodes))
        self.rng = np.random.default_rng(config.seed)
        self.env_steps = self.updates = 0
        self.losses: dict[str, float] = {}

    def step(self) -> None:
        """One step of every environment, then as many updates as `samples_per_insert` asks for."""
        step = StepRows(
            [np.zeros_like(leaf[0]) for leaf in self.rows.observation],
            np.zeros_like(self.rows.reward[0]),
            *(np.zeros_like(self.rows.valid[0]) for _ in range(3)),
        )
        now = self.rows.head % self.rows.num_rows
        leaves = iter([torch.from_numpy(leaf[now]) for leaf in self.rows.observation])
        observation = unflatten(self.group.spaces.observation, leaves)
        exploration = self.explorer.at(self.env_steps)
        action = self.policy.act(observation, (), self.first, self.generator, exploration).action.numpy()
        self.group.step(self.model.distribution.to_env(action), step)
        self.rows.append(action, step)
        self.env_steps += int(step.valid.sum())
        due = (self.env_steps - self.replay.min_size) * self.replay.samples_per_insert / self.replay.batch
        while self.updates < due:
            self.learn()

    def learn(self) -> None:
        batch = self.rows.sample(self.replay.batch, self.replay.n_step, self.config.algorithm.discount, self.rng)
        for minibatch in self.algorithm.minibatches(batch):
            for loss in self.algorithm.losses(minibatch):
                self.update(loss)
        self.algorithm.finish(batch)
        self.updates += 1

    def run(self, steps: int, every: int, target: float = float("inf")) -> Iterator[Point]:
        """Trains for `steps`, or until greedy play returns `target`; a point after every `every` steps."""
        self.group.reset([leaf[0] for leaf in self.rows.observation])
        start, due = time.perf_counter(), every
        while self.env_steps < steps:
            self.step()
            if self.env_steps >= due:
                due += every
                greedy = float(np.mean(self.match.play(0, 0, lambda *_: None).returns))
                yield Point(self.env_steps, self.updates, greedy, time.perf_counter() - start)
                if greedy >= target:
                    break

    def close(self) -> None:
        self.group.close()
        self.match.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("preset", choices=REPLAY_PRESETS)
    parser.add_argument("env")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=1_000)
    parser.add_argument("--target", type=float, default=float("inf"))
    parser.add_argument("--envs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE")
    known = parser.parse_args()
    torch.set_num_threads(1)
    texts = dict(text.split("=", 1) for text in [*known.set, f"seed={known.seed}"])
    training = Training(set_fields(REPLAY_PRESETS[known.preset](known.env), texts), num_envs=known.envs)
    for point in training.run(known.steps, known.every, known.target):
        print(
            f"{point.env_steps:8,} steps {point.updates:8,} updates {point.greedy:9.1f} {point.wall_s:7.1f} s",
            flush=True,
        )
    training.close()


if __name__ == "__main__":
    main()
