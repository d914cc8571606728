"""The actor: steps K environments with the newest policy and passes the steps to its `Experience`.

Waits for: a grant (the learner rings the actor's `free` doorbell), or with replay the limiter; with central acting also
for actions (the futex word `round` of its inference server on the act board). Wakes: the learner, by committing
experience; the inference server, by sending a request.

With central acting the environments form teams (`--acting.groups`): one team steps while the actions of another are
computed. A team starts a trajectory, and requests its first actions, only after the learner has granted it. This bounds
the lag.
"""

from __future__ import annotations

import collections
import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from echelon.algorithms.model import Mirror, Policy, WeightsReader
from echelon.algorithms.value_networks import acting_distribution
from echelon.envs.make import actor_start, env_seeds, make_group
from echelon.errors import DivergedError, EnvError
from echelon.roles.acting import ActReply, ActRequest, Exploring, Values
from echelon.roles.context import Context, Station
from echelon.roles.experience import SlotRows, Team
from echelon.roles.plan.layouts import num_groups
from echelon.roles.plan.parts import Plan
from echelon.roles.saved_episodes import SavedEpisodes
from echelon.schema import action_leaf, space_choices

Array = np.ndarray[Any, Any]
MAX_RESTORE_S = 600.0  # how long environments may take to continue their episodes, which may replay them


class LocalActing:
    """Acts with a local copy of the policy, which reads the weights board once per trajectory.

    All steps of a trajectory therefore use one version of the weights.
    """

    def __init__(
        self, policy: Policy, board: WeightsReader, num_envs: int, seed: int, exploring: Exploring | None = None
    ) -> None:
        self.policy, self.board, self.exploring = policy, board, exploring
        self.mirror, self.rng = Mirror(policy.model), torch.Generator().manual_seed(seed)
        self._state = self._before = policy.initial_state(num_envs)
        self._request: ActRequest

    def begin(self, group: int) -> bool:
        del group
        self.mirror.follow(self.board)
        return True

    def submit(self, group: int, request: ActRequest) -> None:
        del group  # local acting has a single group
        self._request = request

    def collect(self, group: int) -> ActReply:
        request, exploration = self._request, self.exploring.now(group) if self.exploring is not None else None
        self._before = self._state
        chosen = self.policy.act(request.observation, self._state, request.first_tensor, self.rng, exploration)
        self._state = chosen.state
        values = chosen.action_values and Values(*(tensor.numpy() for tensor in chosen.action_values))
        return ActReply(chosen.action.numpy(), chosen.log_prob.numpy(), self.mirror.version, values)

    def state_before(self, group: int) -> Sequence[Array]:
        del group
        return [leaf.numpy() for leaf in self._before]

    @property
    def asking(self) -> bool:
        return False  # `collect` never has to wait

    def wait(self, timeout_s: float) -> None:
        del timeout_s

    def close(self) -> None:
        pass


class Actor:
    """The actor role: each call of `step` steps the environments of one team once."""

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
        start = actor_start(context.generation, context.incarnation)
        seeds = env_seeds(config.seed, context.index, start, config.actor.envs_per_actor + 1)
        self.acting = plan.acting(self.distribution, seeds[-1])
        if not context.shares_process:  # forked with equal global generators, which environments may draw from
            random.seed(seeds[-1])
            np.random.seed(seeds[-1])
            torch.manual_seed(seeds[-1])
        self.teams = self._make_teams(seeds[:-1])
        self.is_stepping = False  # also if a step has failed: then the open episodes are not saved
        self.saved = SavedEpisodes(context, self.teams, lambda text: self.station.report("message", text))
        if context.generation and not context.incarnation:
            self._continue_episodes()
        self.turn = 0
        self.opened = self.experience.head  # number of trajectories that at least one team has entered
        self.begun = collections.deque[float]()  # the start of each trajectory that is not complete, for the timeline

    def _make_teams(self, seeds: list[int]) -> list[Team]:
        num_teams, head = num_groups(self.config), self.experience.head
        num_envs = len(seeds) // num_teams
        teams = []
        for index in range(num_teams):
            columns = slice(index * num_envs, (index + 1) * num_envs)
            group = self._guarded(make_group, self.config.env, seeds[columns])
            group.tick = self._tick
            team = Team(index, group, columns, self.experience.pages(index, columns), head)
            self._guarded(team.reset)
            self._check_choices(team, team.observation)
            teams.append(team)
        return teams

    def _continue_episodes(self) -> None:
        """Continues the episodes that were open when the run ended, or starts new ones if that is not possible.

        A replacement of an actor that died always starts new ones: the saved episodes may be the cause of the death.
        """
        try:
            with self.station.working(MAX_RESTORE_S):
                self.saved.restore()
            for team in self.teams:
                self._check_choices(team, team.observation)
        except Exception as error:  # of an environment, too, which may raise anything on a state that does not fit
            why = f"{type(error).__name__}: {error}"
            text = f"actor {self.index} starts new episodes: those in {self.saved.path} cannot be continued"
            self.station.report("message", f"{text} ({why:.300})")
            for team in self.teams:
                self._guarded(team.reset)
                self._check_choices(team, team.observation)

    @property
    def seeds(self) -> list[int]:
        """The current seeds of the environments."""
        return [seed for team in self.teams for seed in team.group.seeds]

    def _tick(self) -> None:
        self.station.progress += 1
        self.station.tick(time.perf_counter())

    def _check_choices(self, team: Team, observation: list[Array]) -> None:
        """Raises EnvError if a discrete observation is outside its space, before a network embeds it."""
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
        """Calls `function` and prefixes the message of an EnvError with the name of this actor."""
        try:
            return function(*args)
        except EnvError as error:
            raise EnvError(f"actor {self.index}: {error}") from error

    def step(self, timeout_s: float) -> bool:
        """Steps every environment of one team; starts and commits trajectories as needed."""
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
        """Starts the next trajectory of `team` if the experience admits it."""
        if not self.experience.admits(team.trajectory):
            return
        start = time.perf_counter()
        if not self.acting.begin(team.index):
            return
        if team.trajectory == self.opened:
            self.experience.open(team.trajectory)
            self.opened += 1
            if self.station.timeline is not None:
                self.begun.append(start)
        page = team.enter()
        self.acting.submit(team.index, page.rows[0].request)
        self.station.phases["transfer"] += time.perf_counter() - start

    def _advance(self, team: Team, page: SlotRows) -> bool:
        """Steps `team` once if its actions have arrived."""
        phases, row = self.station.phases, page.rows[team.t]
        start = time.perf_counter()
        reply = self.acting.collect(team.index)
        if reply is None:
            return False
        self.is_stepping = True
        row.action[...] = reply.action
        row.log_prob[...] = reply.log_prob
        if reply.version < row.version[0]:  # teams share the field: record the oldest version
            row.version[0] = reply.version
        if team.t == 0:
            # Of the acting state, only the recurrent state is stored, which is its beginning.
            for target, source in zip(page.state, self.acting.state_before(team.index), strict=False):
                target[...] = source
        if self.is_continuous and not np.isfinite(reply.action).all():
            raise self._diverged(team, reply)
        acted = time.perf_counter()
        self._guarded(team.group.step, self.distribution.to_env(reply.action), row.step)
        np.logical_not(row.step.valid, out=row.next_first)
        if self.choices:
            self._check_choices(team, row.step.observation)
        if team.group.failures:
            self._report_failures(team)
        stepped = time.perf_counter()
        team.t += 1
        if team.t < self.num_steps:
            self.acting.submit(team.index, page.rows[team.t].request)
        asked = time.perf_counter()
        self.experience.stepped(team, row, reply)
        now = time.perf_counter()
        phases["act"] += acted - start + asked - stepped
        phases["env"] += stepped - acted
        phases["transfer"] += now - asked
        self.station.progress += 1
        self.station.env_steps += len(reply.action)
        if team.t == self.num_steps:
            self._leave(team)
        self.is_stepping = False
        if now >= self.saved.due_at:
            self.saved.save()
        self.station.tick(now)
        return True

    def _diverged(self, team: Team, reply: ActReply) -> DivergedError:
        """Returns the error for a NaN or infinite action, which is the policy's fault and not the environment's."""
        bad = int(np.argwhere(~np.isfinite(reply.action))[0][0])
        return DivergedError(
            f"the policy of version {reply.version} chose the action {reply.action[bad].tolist()} for environment "
            f"{team.columns.start + bad} of actor {self.index}: its weights have diverged. Lower "
            f"--optimizer.learning-rate (now {self.config.optimizer.learning_rate:g}) or --optimizer.clip-norm, or "
            "scale observations and rewards."
        )

    def _leave(self, team: Team) -> None:
        """Ends the current trajectory of `team`."""
        start = time.perf_counter()
        team.leave()
        self.experience.left(team, self.teams)
        now = time.perf_counter()
        self.station.phases["transfer"] += now - start
        if self.station.timeline is not None and min(other.trajectory for other in self.teams) == team.trajectory:
            self.station.timeline.add(self.begun.popleft(), now)

    def _wait(self, timeout_s: float) -> None:
        """Sleeps until actions arrive for a team or, if no request is outstanding, until a team is admitted."""
        if self.acting.asking:
            start = time.perf_counter()
            self.acting.wait(timeout_s)
            self.station.waited(start)
            return
        self.experience.wait(self.teams, timeout_s)

    def _report_failures(self, team: Team) -> None:
        for failure in team.group.failures:
            env = team.columns.start + failure.index if failure.index >= 0 else failure.index
            text = f"actor {self.index}: environment {env} (seed {failure.seed}) raised "
            self.station.report("env_restarted", f"{text}{failure.place} and was restarted: {failure.error}")
            if not self.context.shares_process:
                print(failure.traceback, flush=True)  # into the actor's log
        team.group.failures.clear()

    def close(self) -> None:
        if not self.is_stepping:
            self.saved.save()
        for team in self.teams:
            team.group.close()
        self.acting.close()
        self.experience.close()
        self.station.close()


def actor(config: dict[str, Any]) -> Actor:
    """The entry point of an actor process."""
    return Actor(Context.from_config(config))
