"""The actor: steps K environments with the newest policy and hands over what happened, as its `Experience` has it.

Waits for: admission (by the learner, which rings its `free` doorbell, or by the replay's limiter), and with central
acting for actions (the inference server's `round` word). Wakes: the learner, by handing over; the inference server, by
asking.

With central acting its environments form teams: one steps while the actions of another are chosen. A team enters a
trajectory, and asks for its first actions, only after the learner has admitted it: that is what bounds the lag.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from echelon.algorithms.model import Mirror, Policy
from echelon.algorithms.value_networks import acting_distribution
from echelon.envs.make import env_seeds, make_group
from echelon.errors import DivergedError, EnvError
from echelon.roles.acting import ActReply, ActRequest, Exploring, Values
from echelon.roles.context import Context, Station
from echelon.roles.experience import SlotRows, Team
from echelon.roles.plan.layouts import num_groups
from echelon.roles.plan.parts import Plan
from echelon.schema import action_leaf, space_choices
from echelon.transport.shared_memory import WeightsBoard

Array = np.ndarray[Any, Any]


class LocalActing:
    """Answers with a copy of the policy that follows the weights board; one version for a whole trajectory."""

    def __init__(
        self, policy: Policy, board: WeightsBoard, num_envs: int, seed: int, exploring: Exploring | None = None
    ) -> None:
        self.policy, self.board, self.exploring = policy, board, exploring
        self.mirror, self.rng = Mirror(policy.model), torch.Generator().manual_seed(seed)
        self._state = self._before = policy.model.network.initial_state(num_envs, policy.model.device)
        self._question: ActRequest

    def begin(self, group: int) -> bool:
        del group
        self.mirror.follow(self.board)
        return True

    def submit(self, group: int, question: ActRequest) -> None:
        del group  # there is one
        self._question = question

    def collect(self, group: int) -> ActReply:
        question, exploration = self._question, self.exploring.now(group) if self.exploring is not None else None
        self._before = self._state
        chosen = self.policy.act(question.observation, self._state, question.first_tensor, self.rng, exploration)
        self._state = chosen.state
        values = chosen.action_values and Values(*(tensor.numpy() for tensor in chosen.action_values))
        return ActReply(chosen.action.numpy(), chosen.log_prob.numpy(), self.mirror.version, values)

    def state_before(self, group: int) -> Sequence[Array]:
        del group
        return [leaf.numpy() for leaf in self._before]

    @property
    def asking(self) -> bool:
        return False  # `collect` answers at once

    def wait(self, timeout_s: float) -> None:
        del timeout_s

    def close(self) -> None:
        pass


class Actor:
    """Steps its environments, a team and a step at a time."""

    def __init__(self, context: Context) -> None:
        torch.set_num_threads(1)
        config = context.train
        self.index, self.config, self.context = context.index, config, context
        self.station = Station(context)
        self.finished = False
        plan = Plan(context)
        self.num_steps = plan.schema.num_steps
        self.experience = plan.experience(self.station)
        self.distribution = acting_distribution(config.algorithm, context.spaces.action)
        self.is_continuous = np.issubdtype(action_leaf(context.spaces.action).dtype, np.floating)
        self.choices = space_choices(context.spaces.observation)
        life = (context.generation << 16) + context.incarnation
        seeds = env_seeds(config.seed, context.index, life, config.actor.envs + 1)
        self.acting = plan.acting(self.distribution, seeds[-1])
        if not context.shares_process:  # forked alike: environments that draw from global generators must differ
            random.seed(seeds[-1])
            np.random.seed(seeds[-1])
            torch.manual_seed(seeds[-1])
        self.teams = self._make_teams(seeds[:-1])
        self.turn = 0
        self.opened = self.experience.head  # trajectories that a team has entered

    def _make_teams(self, seeds: list[int]) -> list[Team]:
        num_teams, head = num_groups(self.config), self.experience.head
        num_envs = len(seeds) // num_teams
        teams = []
        for index in range(num_teams):
            columns = slice(index * num_envs, (index + 1) * num_envs)
            group = self._guarded(make_group, self.config.env, seeds[columns])
            group.tick = self._tick
            team = Team(index, group, columns, self.experience.pages(index, columns), head)
            self._guarded(group.reset, team.observation)
            self._check_choices(team, team.observation)
            teams.append(team)
        return teams

    @property
    def seeds(self) -> list[int]:
        """The seeds of its environments as they are now."""
        return [seed for team in self.teams for seed in team.group.seeds]

    def _tick(self) -> None:
        self.station.progress += 1
        self.station.tick(time.perf_counter())

    def _check_choices(self, team: Team, observation: list[Array]) -> None:
        """Refuses choices that the space does not have, before a network looks them up."""
        for choices in self.choices:
            rows = observation[choices.leaf]
            bad = (rows < choices.low) | (rows > choices.high)
            if bad.any():
                env = int(np.argwhere(bad)[0][0])
                raise EnvError(
                    f"actor {self.index}: environment {team.columns.start + env} (seed {team.group.seeds[env]}) "
                    f"observed {rows[env]}; its observation space is {choices.low} to {choices.high}. Correct the "
                    "space or the environment."
                )

    def _guarded(self, function: Any, *args: Any) -> Any:
        """Calls into the environments, naming this actor in what they raise."""
        try:
            return function(*args)
        except EnvError as error:
            raise EnvError(f"actor {self.index}: {error}") from error

    def step(self, timeout_s: float) -> bool:
        """One step of every environment of a team; starts and commits trajectories on the way."""
        if self.station.stop_requested:
            self.finished = True
            return False
        for team in self.teams:
            if team.page is None:
                self._enter(team)
        for _ in self.teams:
            team = self.teams[self.turn]
            self.turn = (self.turn + 1) % len(self.teams)
            if team.page is not None and self._advance(team, team.page):
                return True
        self._wait(timeout_s)
        return False

    def _enter(self, team: Team) -> None:
        """Starts a trajectory of `team` if it is admitted."""
        if not self.experience.admits(team.trajectory):
            return
        start = time.perf_counter()
        if not self.acting.begin(team.index):
            return
        if team.trajectory == self.opened:
            self.experience.open(team.trajectory)
            self.opened += 1
        page = team.enter()
        self.acting.submit(team.index, page.rows[0].question)
        self.station.phases["transfer"] += time.perf_counter() - start

    def _advance(self, team: Team, page: SlotRows) -> bool:
        """One step of `team`, if its actions are there."""
        phases, row = self.station.phases, page.rows[team.t]
        start = time.perf_counter()
        answer = self.acting.collect(team.index)
        if answer is None:
            return False
        row.action[...] = answer.action
        row.log_prob[...] = answer.log_prob
        if answer.version < row.version[0]:  # of teams that differ, the older
            row.version[0] = answer.version
        if team.t == 0:
            for target, source in zip(page.state, self.acting.state_before(team.index), strict=True):
                target[...] = source
        if self.is_continuous and not np.isfinite(answer.action).all():
            raise self._diverged(team, answer)
        acted = time.perf_counter()
        self._guarded(team.group.step, self.distribution.to_env(answer.action), row.step)
        np.logical_not(row.step.valid, out=row.next_first)
        if self.choices:
            self._check_choices(team, row.step.observation)
        if team.group.failures:
            self._report_failures(team)
        stepped = time.perf_counter()
        team.t += 1
        if team.t < self.num_steps:
            self.acting.submit(team.index, page.rows[team.t].question)
        asked = time.perf_counter()
        self.experience.stepped(team, row, answer)
        now = time.perf_counter()
        phases["act"] += acted - start + asked - stepped
        phases["env"] += stepped - acted
        phases["transfer"] += now - asked
        self.station.progress += 1
        if team.t == self.num_steps:
            self._leave(team)
        self.station.tick(now)
        return True

    def _diverged(self, team: Team, answer: ActReply) -> DivergedError:
        """What to say of actions that no environment should be blamed for."""
        bad = int(np.argwhere(~np.isfinite(answer.action))[0][0])
        return DivergedError(
            f"the policy of version {answer.version} chose the action {answer.action[bad].tolist()} for environment "
            f"{team.columns.start + bad} of actor {self.index}: its weights have diverged. Lower "
            f"--optimizer.learning-rate (now {self.config.optimizer.learning_rate:g}) or --optimizer.clip-norm, or "
            "scale observations and rewards."
        )

    def _leave(self, team: Team) -> None:
        """Ends a trajectory of `team`."""
        start = time.perf_counter()
        team.leave()
        self.experience.left(team, self.teams)
        self.station.phases["transfer"] += time.perf_counter() - start

    def _wait(self, timeout_s: float) -> None:
        """Sleeps until there are actions for a team or, if none was asked for, until one is admitted."""
        if self.acting.asking:
            start = time.perf_counter()
            self.acting.wait(timeout_s)
            self.station.waited(start)
            return
        self.experience.wait(self.teams, timeout_s)

    def _report_failures(self, team: Team) -> None:
        for failure in team.group.failures:
            env = team.columns.start + failure.index if failure.index >= 0 else failure.index
            text = f"actor {self.index}: environment {env} (seed {failure.seed}) raised at its step "
            self.station.report("env_restarted", f"{text}{failure.step} and was restarted: {failure.error}")
            if not self.context.shares_process:
                print(failure.traceback, flush=True)  # into the actor's log
        team.group.failures.clear()

    def close(self) -> None:
        for team in self.teams:
            team.group.close()
        self.acting.close()
        self.experience.close()
        self.station.close()


def actor(config: dict[str, Any]) -> Actor:
    """The entry of an actor process."""
    return Actor(Context.from_config(config))
