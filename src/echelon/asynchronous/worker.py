"""A worker: steps its environments with the newest policy, and sends their episodes to a learner.

It requests the task from the learner, creates the environments and the policy, and then sends one episode after the
other. Every reply contains newer weights, if there are any, and whether the next episode is an evaluation. The worker
waits for replies, which the gateway sends immediately, and for a learner that is down. If the worker dies, only the
steps that it has not sent are lost.
"""

from __future__ import annotations

import secrets
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, TextIO

import gymnasium as gym
import numpy as np

from echelon import config_io
from echelon.asynchronous.acting import ModelActing, UserActing, WorkerActing
from echelon.asynchronous.connection import LearnerConnection, RunOver, address_of
from echelon.asynchronous.open_episodes import EpisodePart, OpenEpisodes
from echelon.config import EnvConfig, replace
from echelon.envs.make import env_seeds, make_group
from echelon.envs.vector import StepRows
from echelon.errors import ConfigError, escaped_lines
from echelon.names import short_name
from echelon.process_state import preserve_settings
from echelon.roles.frame_stacks import stack_leaves
from echelon.roles.user_policy import StateLayout, check_policy
from echelon.schema import action_leaf, space_leaves
from echelon.status_file import StatusFile
from echelon.transport.episode_wire import (
    EpisodePiece,
    Heartbeat,
    Leave,
    Next,
    Register,
    Score,
    Task,
    TaskRequest,
    UnknownWorker,
    Welcome,
)
from echelon.trust import LEARNER, check_names
from echelon.version import __version__

Wrapper = Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]
SAME = ("preset", "env", "network", "algorithm", "replay", "workers")  # sections that define a worker's task
HEARTBEAT_S = 20.0  # time without a message after which a worker sends a heartbeat


class TaskChanged(Exception):
    """The learner at this address now trains a different task."""


class AsyncWorker:
    """Collects episodes for the learner at `learner_address`; call `work` to run it."""

    def __init__(
        self,
        learner_address: str | tuple[str, int],
        buffer_size: int = 5000,
        env_wrapper: Wrapper | None = None,
        *,
        env: str | Callable[..., Any] | EnvConfig | None = None,
        envs: int = 1,
        policy: Any = None,
        seed: int | None = None,
        patience_s: float = float("inf"),
        trust_learner: bool = False,
        status_file: str = "",
        output: TextIO | None = None,
    ) -> None:
        """Creates a worker; it connects in `work`.

        A message has at most `buffer_size` steps. `env` (an id, a factory or an EnvConfig) replaces the learner's
        environment; `env_wrapper` wraps each single environment; `envs` environments are stepped together. `policy` is
        the user's policy object, if the learner trains one. The worker gives up on a learner that is silent for
        `patience_s`. Only with `trust_learner` does it import a third-party environment, wrapper or network that the
        learner names. Health probes read from `status_file` whether the worker has joined (see `StatusFile`).
        """
        if buffer_size < 1 or envs < 1:
            raise ConfigError(f"buffer_size={buffer_size} and envs={envs} must each be at least 1.")
        if policy is not None:
            check_policy(policy, "act")
        self.buffer_size, self.env, self.env_wrapper, self.num_envs = buffer_size, env, env_wrapper, envs
        self.policy, self.name, self.trust_learner = policy, secrets.token_hex(8), trust_learner
        self.seed = secrets.randbits(31) if seed is None else seed
        self.num_episodes = 0  # acknowledged by the learner
        self._output = output or sys.stdout
        self._number = 0  # of the last message
        address, self.status = address_of(learner_address), StatusFile(status_file)
        self.connection = LearnerConnection(address, self.name, patience_s, self.report, self.status)

    def report(self, text: str) -> None:
        print(f"worker {self.name}: {escaped_lines(text)}", file=self._output, flush=True)

    def tell(self, text: str) -> None:
        """The old name of `report`."""
        warnings.warn("tell() is now report(); the next release drops the old name.", FutureWarning, stacklevel=2)
        self.report(text)

    @preserve_settings()
    def work(self, episodes: int = 0) -> int:
        """Works until the run is over or the learner has acknowledged `episodes` (0: no limit); returns the count."""
        why = "leaving"
        try:
            while True:
                task = self.connection.ask(TaskRequest(__version__), Task)
                runner = TaskRunner(self, task)
                try:
                    while not episodes or self.num_episodes < episodes:
                        runner.step()
                    return self.num_episodes
                except TaskChanged:
                    self.report("the learner now trains a different task; starting again")
                finally:
                    runner.close()
        except RunOver:
            why = "the run is over"
            return self.num_episodes
        finally:
            self.connection.post(Leave(self.name))
            self.report(f"{why}; {self.num_episodes} episodes sent")
            self.connection.close()
            self.status.remove()

    def next_number(self) -> int:
        self._number += 1
        return self._number


class TaskRunner:
    """A worker's environments and policy, for one task."""

    def __init__(self, worker: AsyncWorker, task: Task) -> None:
        self.worker, self.connection, self.task = worker, worker.connection, task
        self.config = config = config_io.from_json(task.train)
        self.env = self._find_env()
        if not worker.trust_learner:
            check_names(config, LEARNER, env=worker.env is None)
        self.group = make_group(self.env, env_seeds(worker.seed, 0, 0, worker.num_envs), worker.env_wrapper)
        try:
            spaces = self.group.spaces
            leaves, action = space_leaves(spaces.observation), action_leaf(spaces.action)
            stacks = [leaf.path for leaf in stack_leaves(config, spaces)]
            self.stacks = {i for i, leaf in enumerate(leaves) if leaf.path in stacks}
            num_envs, n_step = worker.num_envs, config.replay.n_step
            max_steps = min(worker.buffer_size, config.workers.max_steps)
            if max_steps < n_step:
                raise ConfigError(f"buffer_size={max_steps} is below replay.n_step={n_step} of the learner. Raise it.")
            self.episodes = OpenEpisodes(num_envs, max_steps, n_step, leaves, action)
            flags = [np.zeros(num_envs, np.bool_) for _ in range(3)]
            self.observation = [np.zeros((num_envs, *leaf.shape), leaf.dtype) for leaf in leaves]
            self.rows = StepRows(self.observation, np.zeros(num_envs, np.float32), *flags)
            self.env_steps = 0  # of the whole run, by the last reply
            self.acting = self._make_acting(self._register())
            worker.report(
                f"at {self.connection.address.removeprefix('tcp://')}, {short_name(self.env.id)}, {config.preset}"
            )
            self.group.reset(self.observation)
            self.episodes.begin(np.arange(num_envs), self.observation)
        except BaseException:
            self.close()
            raise

    def _find_env(self) -> EnvConfig:
        env, config = self.worker.env, self.config.env
        if isinstance(env, EnvConfig):
            return env
        if env is not None:
            return replace(config, id=env, kwargs={}, wrappers=())
        if not config.id:
            raise ConfigError("the learner names no environment: pass one to the worker (env=..., or --env).")
        return config

    def _register(self) -> Welcome:
        spaces, own = self.group.spaces.to_json(), self.worker.policy is not None
        welcome = self.connection.ask(Register(__version__, self.worker.name, spaces, own), Welcome)
        self.env_steps = welcome.env_steps
        return welcome

    def _make_acting(self, welcome: Welcome) -> WorkerActing:
        acting: WorkerActing
        spaces, worker = self.group.spaces, self.worker
        if self.task.own is not None:
            acting = UserActing(worker.policy, StateLayout.from_json(self.task.own), spaces)
        else:
            acting = ModelActing(self.config, spaces, welcome.place, worker.num_envs, worker.seed)
        acting.load(welcome.weights, welcome.version)
        return acting

    def step(self) -> None:
        """Steps every environment once; sends finished episodes and full pieces."""
        self.worker.status.report(joined=True)
        episodes, acting = self.episodes, self.acting
        action = acting.act(self.observation, episodes.evaluates, self.env_steps)
        self.group.step(acting.to_env(action), self.rows)
        self.env_steps += int((self.rows.valid & ~episodes.evaluates).sum())
        for stretch in episodes.step(action, acting.version, self.rows):
            evaluates = self._send(stretch)
            if stretch.ended:
                self.worker.num_episodes += 1
                episodes.end(stretch.env, evaluates=evaluates)
            else:
                episodes.continue_episode(stretch.env)
        if time.monotonic() - self.connection.last_sent > HEARTBEAT_S:
            self.connection.post(Heartbeat(self.worker.name))

    def _send(self, stretch: EpisodePart) -> bool:
        """Sends steps until the learner acknowledges them, which counts them once; returns whether to evaluate next."""
        number = self.worker.next_number()
        while True:
            answer = self.connection.ask(self._message(stretch, number), Next, UnknownWorker)
            if isinstance(answer, Next):
                break
            self._register_again()
        self.env_steps = answer.env_steps
        if answer.weights is not None:
            self.acting.load(answer.weights, answer.version)
        return answer.evaluates

    def _message(self, stretch: EpisodePart, number: int) -> EpisodePiece | Score:
        worker, has_version = self.worker.name, self.acting.version
        value, length = stretch.episode_return, stretch.episode_length
        if stretch.evaluates:
            return Score(worker, number, has_version, stretch.first_version, value, length)
        return EpisodePiece(
            worker=worker,
            number=number,
            has_version=has_version,
            observation=stretch.leaves(self.stacks),
            action=stretch.action,
            reward=stretch.reward,
            version=stretch.version,
            num_old=stretch.num_old,
            terminated=stretch.terminated,
            truncated=stretch.truncated,
            episode_return=value,
            episode_length=length,
        )

    def _register_again(self) -> None:
        """Registers with a restarted learner; raises TaskChanged if the learner trains a different task."""
        task = self.connection.ask(TaskRequest(__version__), Task)
        if task.own != self.task.own or any(task.train[part] != self.task.train[part] for part in SAME):
            raise TaskChanged
        welcome = self._register()
        self.acting.load(welcome.weights, welcome.version)

    def close(self) -> None:
        self.group.close()
