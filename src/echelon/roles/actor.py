"""The actor: steps K environments with the newest policy and writes trajectories into its slots.

Waits for: admission (its `free` doorbell, rung by the learner). Wakes: the learner (`ready`), by committing a slot.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from echelon.envs.make import env_seeds, make_group
from echelon.envs.vector import StepRows
from echelon.errors import DivergedError, EnvError
from echelon.roles.acting import LocalActing
from echelon.roles.context import Context, Station
from echelon.roles.plan import Plan
from echelon.schema import TrajectorySchema, Tree, action_leaf, space_choices, unflatten

Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class Row:
    """One step of a slot, every view made beforehand: the hot path slices nothing."""

    observation: Tree  # tensors, what the policy sees
    first: torch.Tensor
    action: Array
    log_prob: Array
    step: StepRows
    next_first: Array


class Slot:
    """A trajectory slot seen as rows."""

    def __init__(self, schema: TrajectorySchema, views: dict[str, Array]) -> None:
        self.views = views
        names, space = schema.observation_names, schema.spaces.observation
        self.observations = [[views[name][t] for name in names] for t in range(schema.num_steps + 1)]
        self.rows = [
            Row(
                observation=unflatten(space, iter([torch.from_numpy(leaf) for leaf in self.observations[t]])),
                first=torch.from_numpy(views["first"][t]),
                action=views["action"][t],
                log_prob=views["log_prob"][t],
                step=StepRows(
                    observation=self.observations[t + 1],
                    reward=views["reward"][t],
                    terminated=views["terminated"][t],
                    truncated=views["truncated"][t],
                    valid=views["valid"][t],
                ),
                next_first=views["first"][t + 1],
            )
            for t in range(schema.num_steps)
        ]


class EpisodeLedger:
    """Return and length of the episode under way in every environment, written down where one ends."""

    def __init__(self, num_envs: int) -> None:
        self.returns = np.zeros(num_envs)
        self.lengths = np.zeros(num_envs, np.int64)

    def record(self, views: dict[str, Array]) -> None:
        """Fills `episode_return` and `episode_length` of a finished trajectory."""
        views["episode_return"].fill(0.0)
        views["episode_length"].fill(0)
        with np.errstate(over="ignore", invalid="ignore"):  # infinite rewards: the learner will tell whose they are
            self._record(views)

    def _record(self, views: dict[str, Array]) -> None:
        episode_return, episode_length = views["episode_return"], views["episode_length"]
        returns = self.returns + np.cumsum(views["reward"], 0, dtype=np.float64)
        lengths = self.lengths + np.cumsum(views["valid"], 0)
        past_return, past_length = np.zeros_like(self.returns), np.zeros_like(self.lengths)
        ended = views["terminated"] | views["truncated"]
        for t, k in np.argwhere(ended | ~views["valid"]).tolist():  # a restarted environment begins anew without an end
            if ended[t, k]:
                episode_return[t, k] = returns[t, k] - past_return[k]
                episode_length[t, k] = lengths[t, k] - past_length[k]
            past_return[k], past_length[k] = returns[t, k], lengths[t, k]
        self.returns, self.lengths = returns[-1] - past_return, lengths[-1] - past_length


class Actor:
    """Steps its group of environments, a step at a time."""

    def __init__(self, context: Context) -> None:
        torch.set_num_threads(1)
        config = context.train
        self.index, self.config = context.index, config
        self.station = Station(context)
        self.finished = False
        plan = Plan(context)
        self.schema, self.ring = plan.schema, plan.ring()
        self.slots = [Slot(self.schema, views) for views in self.ring.slots[self.index]]
        self.to_env = plan.model.distribution.to_env
        self.is_continuous = np.issubdtype(action_leaf(context.spaces.action).dtype, np.floating)
        life = (context.epoch << 16) + context.incarnation
        seeds = env_seeds(config.seed, context.index, life, config.actor.envs + 1)
        self.acting = LocalActing(plan.model, plan.board(), [config.actor.envs], seeds[-1:])
        if config.engine != "inline":  # forked alike: environments that draw from global generators must differ
            random.seed(seeds[-1])
            np.random.seed(seeds[-1])
            torch.manual_seed(seeds[-1])
        self.group = self._guarded(make_group, config.env, seeds[:-1])
        self.group.tick = self._tick
        self.choices = space_choices(context.spaces.observation)
        self.ledger = EpisodeLedger(config.actor.envs)
        self.slot: Slot | None = None
        self.t = 0
        # The first row of the next trajectory: the last of the one before.
        self.observation = [np.zeros_like(leaf) for leaf in self.slots[0].observations[0]]
        self.first = np.ones(config.actor.envs, np.bool_)
        self._guarded(self.group.reset, self.observation)
        self._check_choices(self.observation)

    def _tick(self) -> None:
        self.station.progress += 1
        self.station.tick(time.perf_counter())

    def _check_choices(self, observation: list[Array]) -> None:
        """Refuses choices that the space does not have, before a network looks them up."""
        for choices in self.choices:
            rows = observation[choices.leaf]
            bad = (rows < choices.low) | (rows > choices.high)
            if bad.any():
                env = int(np.argwhere(bad)[0][0])
                raise EnvError(
                    f"actor {self.index}: environment {env} (seed {self.group.seeds[env]}) observed {rows[env]}; its "
                    f"observation space is {choices.low} to {choices.high}. Correct the space or the environment."
                )

    def _guarded(self, function: Any, *args: Any) -> Any:
        """Calls into the environments, naming this actor in what they raise."""
        try:
            return function(*args)
        except EnvError as error:
            raise EnvError(f"actor {self.index}: {error}") from error

    def step(self, timeout_s: float) -> bool:
        """One step of every environment; starts and commits trajectories on the way."""
        if self.station.stop_requested:
            self.finished = True
            return False
        if self.slot is None and not self._begin(timeout_s):
            return False
        assert self.slot is not None
        phases, row = self.station.phases, self.slot.rows[self.t]
        start = time.perf_counter()
        sample = self.acting.collect(self.acting.submit(0, row.observation, row.first))
        action = sample.action.numpy()
        row.action[...] = action
        row.log_prob[...] = sample.log_prob.numpy()
        if self.is_continuous and not np.isfinite(action).all():
            raise self._diverged(action)
        acted = time.perf_counter()
        self._guarded(self.group.step, self.to_env(action), row.step)
        np.logical_not(row.step.valid, out=row.next_first)
        if self.choices:
            self._check_choices(row.step.observation)
        if self.group.failures:
            self._tell_failures()
        now = time.perf_counter()
        phases["act"] += acted - start
        phases["env"] += now - acted
        self.station.progress += 1
        self.t += 1
        if self.t == self.schema.num_steps:
            self._commit()
        self.station.tick(now)
        return True

    def _diverged(self, action: Array) -> DivergedError:
        """What to say of actions that no environment should be blamed for."""
        bad = int(np.argwhere(~np.isfinite(action))[0][0])
        return DivergedError(
            f"the policy of version {self.acting.mirror.version} chose the action {action[bad].tolist()} for "
            f"environment {bad} of actor {self.index}: its weights have diverged. Lower --optimizer.learning-rate (now "
            f"{self.config.optimizer.learning_rate:g}) or --optimizer.clip-norm, or scale observations and rewards."
        )

    def _begin(self, timeout_s: float) -> bool:
        """Starts a trajectory if the learner admits one; else waits."""
        doorbell = self.ring.free[self.index]
        if not self.ring.may_begin(self.index):
            doorbell.clear()
            if not self.ring.may_begin(self.index):
                self.station.wait(timeout_s, [doorbell.descriptor])
                return False
        start = time.perf_counter()
        version = self.acting.refresh()
        self.slot, self.t = self.slots[int(self.ring.head[self.index]) % self.ring.num_slots], 0
        views = self.slot.views
        views["version"].fill(version)
        views["first"][0] = self.first
        for target, source in zip(self.slot.observations[0], self.observation, strict=True):
            target[...] = source
        for i, leaf in enumerate(self.acting.state(0)):
            views[f"state.{i}"][...] = leaf.numpy()
        self.station.phases["transfer"] += time.perf_counter() - start
        return True

    def _commit(self) -> None:
        assert self.slot is not None
        start = time.perf_counter()
        self.ledger.record(self.slot.views)
        for target, source in zip(self.observation, self.slot.observations[-1], strict=True):
            target[...] = source
        self.first[...] = self.slot.views["first"][-1]
        self.ring.commit(self.index)
        self.slot = None
        self.station.phases["transfer"] += time.perf_counter() - start

    def _tell_failures(self) -> None:
        for failure in self.group.failures:
            text = f"actor {self.index}: environment {failure.index} (seed {failure.seed}) raised at its step "
            self.station.report("env_restarted", f"{text}{failure.step} and was restarted: {failure.error}")
            if self.config.engine != "inline":
                print(failure.traceback, flush=True)  # into the actor's log
        self.group.failures.clear()

    def close(self) -> None:
        self.group.close()
        self.ring.close()
        self.station.close()


def actor(config: dict[str, Any]) -> Actor:
    """The entry of an actor process."""
    return Actor(Context.from_config(config))
