"""A learner with workers, from Python: one process learns and has the replay, workers on any host send episodes."""

from __future__ import annotations

import socket as sockets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import gymnasium as gym

from echelon.config import EnvConfig, ReplayConfig, StopConfig, TrainConfig, UserPolicyConfig, WorkersConfig, replace
from echelon.errors import ConfigError
from echelon.roles.user_objects import SaveFunction, UserObjects
from echelon.roles.user_policy import check_policy
from echelon.schema import Spaces
from echelon.training import RunResult, resume, run
from echelon.transport.secret import numeric


class Reservation:
    """Reserves a port for a listener of this host: it is bound with SO_REUSEADDR, so the listener can bind it too."""

    def __init__(self, host: str, port: int) -> None:
        host = numeric(f"tcp://{host}:0").removeprefix("tcp://").removesuffix(":0")
        self._socket = sockets.socket(sockets.AF_INET, sockets.SOCK_STREAM)
        self._socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)  # the listener sets it too
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise ConfigError(f"server_address=({host!r}, {port}) cannot be used: {error}. Choose another.") from error
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


class AsyncLearningNode:
    """Learns from the episodes that workers send to `server_address`; call `learn` to run it."""

    def __init__(
        self,
        policy: Any,
        update_steps: int = 64,
        batch_size: int = 128,
        epochs: int = 500,
        buffer_size: int = 1_000_000,
        server_address: tuple[str, int] = ("127.0.0.1", 4444),
        eval_freq: float = 0.08,
        save_func: SaveFunction | None = None,
        save_freq: int | None = None,
        *,
        spaces: Spaces | tuple[gym.Space[Any], gym.Space[Any]] | None = None,
        discount: float = 0.99,
        n_step: int = 1,
        min_size: int | None = None,
        run_dir: str | Path = "",
        resume: bool = False,
        trust: bool = False,
        output: TextIO | None = None,
    ) -> None:
        """Reserves `server_address`; learning starts in `learn`.

        `policy` is a configuration (`echelon.preset("sac", "Pendulum-v1")`), or a user policy: an object with `act`,
        `update` and a state (see docs/workers.md). One epoch is one training episode: `update_steps` updates of
        `batch_size` transitions, then new weights are published. A fraction `eval_freq` of all episodes are
        evaluations. `save_func(epoch=, policy=)` is called every `save_freq` epochs. Without `spaces` and without an
        environment, those of the first worker are used. `discount` and `n_step` are for a user policy; a preset has its
        own. Learning starts with `min_size` transitions (None: the preset's; for a user policy, one batch). `resume`
        resumes the run in `run_dir`; `trust` accepts code that its configuration names though somebody else wrote it.
        """
        if (save_func is None) != (save_freq is None) or (save_freq is not None and save_freq < 1):
            raise ConfigError(
                f"save_freq={save_freq} is the number of epochs between calls of save_func: set both, save_freq at "
                "least 1."
            )
        if resume and not run_dir:
            raise ConfigError("resume=True resumes a run: name its folder with run_dir.")
        own = None if isinstance(policy, TrainConfig) else policy
        if isinstance(policy, str):
            raise ConfigError(f'policy={policy!r} is a name; pass a configuration: echelon.preset("{policy}", ENV).')
        if own is not None:
            check_policy(own, "update")
        base = policy if isinstance(policy, TrainConfig) else _own_config(discount, n_step)
        changes = {
            "workers.updates": update_steps,
            "workers.evaluation": eval_freq,
            "workers.max_steps": min(base.workers.max_steps, buffer_size),
            "replay.capacity": buffer_size,
            "replay.batch": batch_size,
            "replay.min_size": max(batch_size, min(base.replay.min_size, buffer_size))
            if min_size is None
            else min_size,
            "run.dir": str(run_dir) or base.run.dir,
            "stop": StopConfig(episodes=epochs),
        }
        self._reserved = Reservation(*server_address)
        self.address = (server_address[0], self._reserved.port)
        address = f"tcp://{self.address[0]}:{self.address[1]}"
        given = Spaces(*spaces) if isinstance(spaces, tuple) else spaces
        self._user_objects = UserObjects(own, save_func, save_freq or 0, given, address)
        self._resume, self._trust, self._output = resume, trust, output
        try:
            self.config = replace(base, **changes, **{"workers.address": address})
        except ConfigError:
            self.close()
            raise

    def learn(self, *, callbacks: Sequence[object] = ()) -> RunResult:
        """Learns for `epochs` epochs, or until it is interrupted; `callbacks` as in `train`."""
        try:
            if self._resume:
                folder, episodes = self.config.run.dir, self.config.stop.episodes
                return resume(
                    folder,
                    episodes=episodes,
                    output=self._output,
                    user_objects=self._user_objects,
                    trust=self._trust,
                    callbacks=callbacks,
                )
            return run(self.config, output=self._output, user_objects=self._user_objects, callbacks=callbacks)
        finally:
            self.close()

    def close(self) -> None:
        """Releases the port; `learn` calls this at its end."""
        self._reserved.close()


def _own_config(discount: float, n_step: int) -> TrainConfig:
    return TrainConfig(
        preset="own",
        env=EnvConfig(id=""),
        algorithm=UserPolicyConfig(discount=discount),
        replay=ReplayConfig(min_size=1, batch=1, n_step=n_step),
        workers=WorkersConfig(spaces="worker"),
    )
