"""Callbacks: objects whose methods are called while a training runs, in the process that started it.

The coordinator calls them between two turns of its loop, one at a time, so no role waits for them. While one runs,
nothing that died is replaced and no message is read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from echelon.config import TrainConfig

Row = Mapping[str, Any]
NO_ROW: Row = MappingProxyType({})


class Training:
    """A training that runs, as its callbacks see it and change it."""

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        started_at: float,
        write: Callable[[dict[str, Any]], None],
        message: Callable[[str], None],
        send: Callable[[], None],
    ) -> None:
        self.config, self.folder = config, folder
        self.message = message  # shows a line in the console; `print` would disturb the live panel
        self.row = NO_ROW  # the newest row of metrics
        self.logged: dict[str, float] = {}  # the newest values that callbacks logged
        self.stop_reason = ""  # why a callback wants the run to end
        self.changes: dict[str, float | None] = {}  # what `set` changed
        self._started_at, self._write, self._send = started_at, write, send

    @property
    def steps(self) -> int:
        """Environment steps that were learned from; after a restart of the learner, fewer than before."""
        steps: int = self.row.get("env_steps", 0)
        return steps

    @property
    def episodes(self) -> int:
        episodes: int = self.row.get("episodes", 0)
        return episodes

    @property
    def updates(self) -> int:
        updates: int = self.row.get("updates", 0)
        return updates

    @property
    def return_mean(self) -> float | None:
        """The mean return of the last 100 training episodes; None before the first."""
        mean: float | None = self.row.get("return_mean")
        return mean

    @property
    def elapsed_s(self) -> float:
        """Seconds of the run, including those before a resume."""
        return time.monotonic() - self._started_at

    def stop(self, reason: str = "a callback stopped it") -> None:
        """Ends the run as a stop condition does: with a final checkpoint and an evaluation, status `finished`."""
        self.stop_reason = self.stop_reason or reason

    def log(self, values: Mapping[str, float]) -> None:
        """Writes numbers to metrics.jsonl and TensorBoard; the newest of each name are in the summary."""
        row = {str(name): _number(name, value) for name, value in values.items()}
        head = {"kind": "callback", "env_steps": self.steps, "wall_s": self.elapsed_s}
        if taken := head.keys() & row.keys():
            raise ValueError(f"log({dict(values)!r:.80}): the name {min(taken)!r} is taken. Choose another.")
        self._write({**head, **row})
        self.logged |= row

    def set(self, *, learning_rate: float | None) -> None:
        """Changes the learning rate of all learners, a fraction of a second later; None: as configured again.

        It replaces `optimizer.schedule`. Other rates, such as that of critics, change in proportion. It is kept when a
        learner is restarted, and in checkpoints for a resume.
        """
        if learning_rate is not None and not (math.isfinite(learning_rate) and learning_rate > 0):
            raise ValueError(f"set(learning_rate={learning_rate}): give a number above 0, or None.")
        if self.config.algorithm.name == "own":
            raise ValueError("set(learning_rate=...) has no effect on a user policy, which has its own optimizer.")
        self.changes["learning_rate"] = learning_rate
        self._send()


def _number(name: str, value: Any) -> float:
    try:
        return value if isinstance(value, int) else float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # the last of a tensor with several elements
        raise ValueError(f"log({{{name!r}: {value!r:.80}}}): give a number, or leave {name!r} out.") from error


class Callback:
    """Override what you need. An object of any class with some of these methods is a callback, too.

    A method that raises ends the run, which fails with the traceback.
    """

    def on_start(self, training: Training) -> None:
        """The run folder exists; no process of the run has started."""

    def on_update(self, training: Training, row: Row) -> None:
        """A row of metrics was written; there is one every 0.1 to 2 seconds, not for every optimizer step."""

    def on_episode(self, training: Training, row: Row) -> None:
        """A training episode has ended: `return`, `length`. Called for all of a row of metrics, before `on_update`."""

    def on_evaluation(self, training: Training, row: Row) -> None:
        """An evaluation has ended: `return_mean`, `return_std`, `episodes`, ... as in its row of metrics."""

    def on_checkpoint(self, training: Training, path: Path) -> None:
        """The checkpoint folder `path` is complete; later ones replace it (run.keep_checkpoints)."""

    def on_end(self, training: Training, summary: Row) -> None:
        """The run has ended, or failed: `summary["status"]`, with `summary["error"]`. Its processes have ended."""
