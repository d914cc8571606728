"""The reports and files of a learner: rows of metrics, checkpoints, the final weights and the summary."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from echelon.roles.stopping import is_goal_reached
from echelon.runs.checkpoint import FINAL, CheckpointWriter, save_weights, weights_sha256
from echelon.runs.policy_spec import PolicySpec

if TYPE_CHECKING:
    from echelon.roles.learner import Learner

Array = np.ndarray[Any, Any]
# The interval between rows of metrics is 2 % of the time so far, within these bounds: a run of seconds has a curve, and
# a run of days has a file of reasonable size.
MIN_REPORT_S, MAX_REPORT_S = 0.1, 2.0
TOTALS = ("env_steps", "episodes", "updates", "dropped", "progress")  # a row with equal ones says nothing new
FINAL_RETRY_S = 3.0  # how long the final checkpoint is tried in the run folder before it is written elsewhere


class LearnerRecord:
    """Reports and saves for one learner. Of several learners only the first reports its progress and saves."""

    def __init__(self, learner: Learner) -> None:
        self.learner, self.context, self.station = learner, learner.context, learner.station
        run = self.context.train.run
        self.checkpoints = self.context.run_dir / "checkpoints"
        self.writer = CheckpointWriter(self.checkpoints, run.keep_checkpoints, learner.tick)
        self.born, self.past_steps, self.next_report = time.perf_counter(), 0, 0.0
        self.log_interval, self.num_logged = run.log_interval, -1  # the newest line of the log that was reported
        self.interval_s = run.checkpoint_interval_s
        self.next_checkpoint = time.monotonic() + self.interval_s
        self.writing = ""  # the checkpoint that is being written
        self.reported: dict[str, Any] = {}  # the totals of the newest row
        self.episodes: list[dict[str, Array]] = []  # columns of ended episodes that are not reported yet
        self.noted: dict[str, str] = {}  # by part of the run folder: the last reported error, or ""

    def report_place(self, checkpoint: str) -> None:
        """Reports the checkpoint from which a restarted learner continues; "" if it starts from the beginning."""
        counters = self.learner.counters
        if self.context.incarnation > 0 and self.learner.is_first:
            self.station.report("restored", checkpoint, counters.env_steps, counters.updates)

    def begin(self) -> None:
        """Called when the learner is restored: the rate of steps is measured from here on."""
        self.born, self.past_steps = time.perf_counter(), self.learner.counters.env_steps

    @property
    def mean_rate(self) -> float:
        """Environment steps per second since the start, also before the first update."""
        return (self.learner.counters.env_steps - self.past_steps) / max(time.perf_counter() - self.born, 1e-9)

    def is_report_due(self, now: float) -> bool:
        """Whether a row of metrics is due: after some time, and when the log gets a line."""
        return now >= self.next_report or (self.log_interval > 0 and self._line != self.num_logged)

    @property
    def _line(self) -> int:
        """The number of the newest line of the log that is due; the first is that of the first episode."""
        return (self.learner.counters.episodes - 1) // self.log_interval

    def report(self, now: float) -> None:
        if self.learner.is_first:
            self._refresh()
        self.next_report = now + min(max(0.02 * (now - self.born), MIN_REPORT_S), MAX_REPORT_S)
        if self.log_interval:
            self.num_logged = self._line
        if self.learner.is_first:
            if self.learner.source.counts_episodes:  # workers send steps even when no batch is due
                self.learner.rate.note(now, self.learner.counters.env_steps)
            self.report_episodes()
            self._report_row(self.row())
        self.report_news()

    def _report_row(self, row: dict[str, Any]) -> None:
        self.reported = {name: row[name] for name in TOTALS}
        self.station.report("train", row)

    def _refresh(self) -> None:
        """Has a source that keeps its content read what actors have added."""
        if self.learner.source.content is not None:
            self.learner.source.content.refresh()
            self.note_episodes()

    def note_episodes(self) -> None:
        """Stamps the episodes that the source has counted with the steps and the time of the run."""
        if ended := self.learner.source.ended:
            steps, now_s = self.learner.counters.env_steps, self.context.elapsed_s
            self.episodes += [{"env_steps": one.full(steps), "wall_s": one.full(now_s), **one.columns} for one in ended]
            ended.clear()

    def report_episodes(self) -> None:
        if self.episodes:
            columns = {name: np.concatenate([part[name] for part in self.episodes]) for name in self.episodes[0]}
            self.station.report("episodes", columns)
            self.episodes.clear()

    def report_news(self) -> None:
        """Reports ended episodes, the messages of the source to the user, and whether what it writes is written."""
        self.report_episodes()
        content = self.learner.source.content
        if self.writer.has_ended:
            self._end_write()
        if content is not None:
            for text in content.news():
                self.station.report("message", text)
            if (error := content.disk_error()) is not None:
                self._note("replay", error)

    def _note(self, part: str, error: str) -> None:
        """Reports a change in whether `part` of the run folder can be written."""
        if self.noted.get(part) != error:
            self.noted[part] = error
            self.station.report("disk", part, error)

    def _end_write(self) -> None:
        """Waits for the checkpoint that is being written, and reports whether it could be."""
        try:
            if self.writer.wait():
                self._note("checkpoint", "")
                self.station.report("checkpoint", self.writing)
        except OSError as error:
            self._note("checkpoint", str(error))

    def row(self) -> dict[str, Any]:
        """Returns one row of metrics with the current state of the run."""
        learner, counters, lags = self.learner, self.learner.counters, self.learner.fresh_lag
        row: dict[str, Any] = {
            "env_steps": counters.env_steps,
            "episodes": counters.episodes,
            "updates": counters.updates,
            "version": learner.version,
            "wall_s": self.context.elapsed_s,
            "env_steps_per_s": learner.rate.recent(time.perf_counter()) if counters.updates > 1 else self.mean_rate,
            "return_mean": counters.return_mean,
            "return_max": counters.return_max,
            "length_mean": sum(counters.lengths) / len(counters.lengths) if counters.lengths else None,
            "lag_mean": sum(mean for mean, _ in lags) / len(lags) if lags else counters.lag_mean,
            "lag_max": max(peak for _, peak in lags) if lags else counters.lag_max,
            "dropped": counters.dropped,
            "learning_rate": learner.trainable.learning_rate,
            "progress": learner.progress(counters.env_steps),
        }
        if learner.source.counts_episodes:
            row["learned_episodes"] = row["epoch"] = learner.num_episodes  # epoch: the old key, for one release
        if learner.source.content is not None:
            row |= {f"replay.{name}": value for name, value in learner.source.content.figures().items()}
        if (epsilon := self.context.train.algorithm.epsilon(counters.env_steps)) is not None:
            row["epsilon"] = epsilon
        lags.clear()
        return row | learner.account.take() | row  # figures of a user's policy may have any name

    def checkpoint(self, *, wait: bool = False) -> None:
        """Starts to write a checkpoint, which is atomic. A full disk is reported but does not end the training."""
        self._end_write()
        content = self.learner.source.content
        self._refresh()
        self.report_episodes()
        path = self.writer.save(self.tree(), step=self.learner.counters.env_steps)
        self.writing = path.name
        if wait or self.context.shares_process:  # a run in one process must not depend on the speed of the disk
            self._end_write()
        if content is not None:
            content.save(path.name)

    def tree(self) -> dict[str, Any]:
        """Returns the content of a checkpoint. Raises DivergedError if a weight is NaN or infinite."""
        learner, content = self.learner, self.learner.source.content
        if not learner.trainable.is_finite():
            raise learner.diverged(f"the weights became NaN or infinite at update {learner.counters.updates}")
        self.next_checkpoint = time.monotonic() + self.interval_s
        return {
            **learner.trainable.state_dict(),
            "counters": learner.counters.state_dict(),
            "source": content.state_dict() if content is not None else {},
            "version": learner.version,
            "rng": torch.get_rng_state(),
            "generation": self.context.generation,
            "wall_s": self.context.elapsed_s,
            "learning_rate": learner.asked_rate,
        }

    def finish(self) -> None:
        """Writes the final checkpoint and the weights, and reports the summary."""
        now, learner, counters = time.perf_counter(), self.learner, self.learner.counters
        content = self.learner.source.content
        has_goal = learner.stop.until_return is not None
        if content is not None:
            content.finish(learner.tick)  # finish the earlier snapshot, so that the final one is not skipped
        self._refresh()
        row = self.row()
        self._end_write()
        tree, fallback = self.tree(), self.context.fallback
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in learner.trainable.weights().items()}
        spec = PolicySpec.of(self.context.train, self.context.spaces)

        def write(folder: Path) -> Path:
            keep, metadata = self.writer.keep, {"env_steps": str(counters.env_steps), **spec.metadata()}
            with contextlib.closing(CheckpointWriter(folder / "checkpoints", keep, learner.tick)) as writer:
                path = writer.save(tree, step=counters.env_steps)
                writer.begin(save_weights, folder / FINAL, weights, metadata)
                writer.wait()
            return path

        checkpoint = fallback.write(write, FINAL_RETRY_S, learner.tick)
        if checkpoint is not None and not fallback.error:
            self._note("checkpoint", "")
            self.station.report("checkpoint", checkpoint.name)
            if content is not None:
                content.save(checkpoint.name)
                content.finish(learner.tick)
        self.report_news()
        if any(self.reported.get(name) != row[name] for name in TOTALS):  # else the newest row is the last one already
            self._report_row(row)
        self.station.report(
            "finished",
            {
                "reason": learner.stop_reason() or "stopped",
                **({"goal_reached": is_goal_reached(learner.stop, counters.returns)} if has_goal else {}),
                "env_steps": counters.env_steps,
                "episodes": counters.episodes,
                "updates": counters.updates,
                "env_steps_per_s": learner.rate.steady_state(now, counters.env_steps) or self.mean_rate,
                "return_mean": counters.return_mean,
                "return_max": counters.return_max,
                "lag_mean": counters.lag_mean,
                "lag_max": counters.lag_max,
                "dropped": counters.dropped,
                "weights_sha256": weights_sha256(weights),
                "checkpoint": checkpoint and str(checkpoint),
                **({"disk_error": fallback.sentence("the final checkpoint")} if fallback.error else {}),
                "device": str(learner.trainable.device),
                **({"replay": content.figures()} if content is not None else {}),
            },
        )

    def close(self) -> None:
        self.writer.close()
