"""A learner with workers, from Python: one process learns and keeps the replay, workers anywhere bring episodes."""

from __future__ import annotations

import socket as sockets
from pathlib import Path
from typing import Any, TextIO

import gymnasium as gym

from echelon.config import EnvConfig, OwnConfig, ReplayConfig, StopConfig, TrainConfig, WorkersConfig, replace
from echelon.errors import ConfigError
from echelon.roles.brought import Brought, SaveFunction
from echelon.roles.own import check_policy
from echelon.schema import Spaces
from echelon.training import RunResult, resume, run
from echelon.transport.secret import numeric


class Reservation:
    """A port that is kept for a listener of this host: bound, and open to whoever listens there next with it."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = sockets.socket(sockets.AF_INET, sockets.SOCK_STREAM)
        self._socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)  # as the listener does: both may bind
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise ConfigError(f"server_address=({host!r}, {port}) cannot be used: {error}. Choose another.") from error
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


class AsyncLearningNode:
    """Learns from the episodes that workers bring to `server_address`; `learn` does it."""

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
        run_dir: str | Path = "",
        resume: bool = False,
        output: TextIO | None = None,
    ) -> None:
        """`policy` is a configuration (`echelon.preset("sac", "Pendulum-v1")`), or an object of the user's own with
        `act`, `update` and a state (see docs/workers.md). One epoch is an episode that is learned from: `update_steps`
        updates of `batch_size` transitions, then new weights. A part `eval_freq` of all episodes is an evaluation.
        `save_func(epoch=, policy=)` is called every `save_freq` epochs. `spaces` of the first worker are taken where
        neither these nor an environment says more. `discount` and `n_step` are for a policy of one's own; a preset has
        them. `resume` goes on with the run in `run_dir`.
        """
        if (save_func is None) != (save_freq is None) or (save_freq is not None and save_freq < 1):
            raise ConfigError(
                f"save_freq={save_freq} counts epochs from one save_func to the next: give both, from 1 up."
            )
        if resume and not run_dir:
            raise ConfigError("resume=True goes on with a run: name its folder with run_dir.")
        self._reserved = Reservation(numeric(f"tcp://{server_address[0]}:0")[6:-2], server_address[1])
        self.address = (server_address[0], self._reserved.port)
        if isinstance(policy, TrainConfig):
            self.config, own = policy, None
        else:
            check_policy(policy, "update")
            self.config, own = _own_config(discount, n_step), policy
        given = Spaces(*spaces) if isinstance(spaces, tuple) else spaces
        self._brought = Brought(own, save_func, save_freq or 0, given, f"tcp://{server_address[0]}:{self.address[1]}")
        self._resume, self._output = resume, output
        self.config = self._configured(
            update_steps=update_steps,
            batch_size=batch_size,
            epochs=epochs,
            buffer_size=buffer_size,
            eval_freq=eval_freq,
            run_dir=str(run_dir),
        )

    def _configured(
        self, *, update_steps: int, batch_size: int, epochs: int, buffer_size: int, eval_freq: float, run_dir: str
    ) -> TrainConfig:
        config = self.config
        workers = WorkersConfig(
            address=self._brought.address,
            updates=update_steps,
            evaluation=eval_freq,
            max_steps=min(config.workers.max_steps, buffer_size),
            spaces=config.workers.spaces,
        )
        replay = {"capacity": buffer_size, "batch": batch_size}
        min_size = max(batch_size, min(config.replay.min_size, buffer_size))
        return replace(
            config,
            workers=workers,
            stop=StopConfig(epochs=epochs),
            **{f"replay.{name}": value for name, value in replay.items()},
            **{"replay.min_size": min_size, "run.dir": run_dir or config.run.dir},
        )

    def learn(self) -> RunResult:
        """Learns for as many epochs as it was told, or until it is interrupted."""
        try:
            if self._resume:
                folder, epochs = self.config.run.dir, self.config.stop.epochs
                return resume(folder, epochs=epochs, output=self._output, brought=self._brought)
            return run(self.config, output=self._output, brought=self._brought)
        finally:
            self._reserved.close()


def _own_config(discount: float, n_step: int) -> TrainConfig:
    return TrainConfig(
        preset="own",
        env=EnvConfig(id=""),
        algorithm=OwnConfig(discount=discount),
        replay=ReplayConfig(min_size=1, batch=1, n_step=n_step),
        workers=WorkersConfig(spaces="worker"),
    )
