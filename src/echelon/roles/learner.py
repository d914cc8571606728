"""The learner: batches in, weights out, and the run's account of itself.

Waits for: a batch, as its source has it (actors wake it). Wakes: actors, by publishing and admitting, or by drawing.
If it dies, its successor starts from the newest checkpoint; the actors wait meanwhile, as nobody admits them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from echelon.errors import DivergedError
from echelon.roles.account import LossAccount, diverged
from echelon.roles.context import Context, Station
from echelon.roles.episode_source import EpisodeSource
from echelon.roles.gradient_slots import GradientSchema
from echelon.roles.gradient_source import GradientSource
from echelon.roles.plan import Plan
from echelon.roles.pupil import Pupil, make_pupil
from echelon.roles.queue_source import QueueSource
from echelon.roles.rate import EPISODES_WINDOW_S, WINDOW_S, Rate
from echelon.roles.replay_part import ReplayPart
from echelon.roles.replay_source import ReplaySource
from echelon.roles.source import Source
from echelon.roles.stopping import progress, stop_reason
from echelon.runs.checkpoint import (
    CheckpointWriter,
    find_weights,
    load_checkpoint,
    newest_intact,
    save_weights,
    weights_sha256,
)
from echelon.schema import Batch, GradientBatch, TransitionBatch

# A row of metrics comes after 2 % of the time so far, within these bounds: a run of seconds has a curve, one of days a
# file that can be read.
MIN_REPORT_S, MAX_REPORT_S = 0.1, 2.0


class Learner:
    """Learns from one batch a step."""

    def __init__(self, context: Context) -> None:
        torch.set_num_threads(1)  # the first weights must not depend on how many drew them
        config = context.train
        self.context, self.stop = context, config.stop
        self.station = Station(context)
        self.finished = False
        self.pupil, plan = make_pupil(context, self.station.world), Plan(context)
        self.board, self.source = plan.board(), make_source(plan, self.pupil)
        self.counters, self.fresh_lag = self.source.counters, self.source.fresh_lag
        self.checkpoints = context.run_dir / "checkpoints"
        self.writer = CheckpointWriter(self.checkpoints, config.run.keep_checkpoints, self._tick)
        self.rate = Rate(EPISODES_WINDOW_S if config.has_workers else WINDOW_S)
        self.account = LossAccount()
        self.born, self.next_report = time.perf_counter(), 0.0
        self.past_version = 0
        self._restore()
        self.next_checkpoint = time.monotonic() + config.run.checkpoint_interval_s
        self._publish()

    def _restore(self) -> None:
        """Goes on from the newest checkpoint, or starts from the weights that the user named."""
        found = newest_intact(self.checkpoints)
        if found is not None:
            path, message = found
            tree = load_checkpoint(path)
            self.pupil.load_state_dict(tree, str(path))
            self.counters.load_state_dict(tree["counters"])
            self.source.load_state_dict(tree.get("source", {}))
            self.past_version = int(tree["version"])
            if self.context.train.engine != "inline":  # there the generator belongs to the caller's process
                torch.set_rng_state(tree["rng"])  # a user's dropout draws from it
            if message and self.context.index == 0:
                self.station.report("message", message)
            self._tell_place(path.name)
            return
        if source := self.context.train.run.init_from:
            self.pupil.load_weights(find_weights(source), source)
        self._tell_place("")

    def _tell_place(self, checkpoint: str) -> None:
        """Says where a successor starts from, with `checkpoint` "" at the beginning."""
        if self.context.incarnation > 0 and self.context.index == 0:
            self.station.report("restored", checkpoint, self.counters.env_steps, self.counters.updates)

    def step(self, timeout_s: float) -> bool:
        """Learns from one batch and publishes; waits if there is none yet."""
        if self.station.stop_requested or self._stop_reason():
            self._finish()
            return True
        start, begun = time.perf_counter(), self._progress(self.counters.env_steps)
        batch = self.source.take(self.version)
        if batch is None:
            self.source.listen()
            batch = self.source.take(self.version)
        taken = time.perf_counter()
        self.station.phases["transfer"] += taken - start
        if batch is None:
            self._report_if_due()
            self.source.wait(self.station, timeout_s)
            return False
        self._work(batch, taken, begun)
        return True

    def _work(self, batch: Batch | TransitionBatch | GradientBatch, taken: float, begun: float) -> None:
        """Learns from a batch that was taken just then, and publishes; before it, the run was `begun` (0 to 1) done.

        So the first batch of a schedule is learned at the full rate, and the last one at a rate above 0.
        """
        phases = self.station.phases
        self.rate.note(taken, self.counters.env_steps)
        self.pupil.schedule(begun)
        self.source.schedule(self._progress(self.counters.env_steps))  # for the next batch: this one is drawn
        self._learn(batch)
        learned = time.perf_counter()
        if self._is_publishing:
            self._publish()
            self._save_epoch()
        published = time.perf_counter()
        phases["learn"] += learned - taken
        phases["transfer"] += published - learned
        self._report_if_due()
        if time.monotonic() >= self.next_checkpoint:
            self._checkpoint_if_possible()
        self.station.tick(published)

    def _learn(self, batch: Batch | TransitionBatch | GradientBatch) -> None:
        self.pupil.learn(batch, self.account, self._tick, self.source.acknowledge)
        self.counters.updates += 1
        self.account.close_batch(self.counters.updates)
        self.source.prefetch(self.version + self._is_publishing)
        # A GPU may still learn from it; but nothing that is lost is published.
        if lost := self.account.find_lost(keep=int(self.pupil.device.type == "cuda" and not self._is_publishing)):
            raise self._diverged(lost)

    @property
    def version(self) -> int:
        """Of the weights that were published last."""
        return self.board.version

    @property
    def _is_publishing(self) -> bool:
        """Whether the weights after the newest batch are to be published."""
        return self.counters.updates % self.source.publish_every == 0

    def _tick(self) -> None:
        self.station.progress += 1
        self.station.tick(time.perf_counter())

    def _publish(self) -> None:
        """The version goes up here only."""
        self.board.publish(self.pupil.parts(), max(self.board.version, self.past_version) + 1)
        self.source.admit()

    def _save_epoch(self) -> None:
        """Calls what the user gave to be called every so many epochs."""
        brought = self.context.brought
        if brought is not None and brought.save is not None and self._epochs % brought.save_every == 0:
            brought.save(epoch=self._epochs, policy=self.pupil.policy)

    def _diverged(self, what: str) -> DivergedError:
        return diverged(f"{what} ({self.counters.env_steps:,} steps)", self.pupil.learning_rate)

    def _progress(self, env_steps: int) -> float:
        return progress(self.stop, env_steps, self._elapsed_s, self._epochs)

    @property
    def _elapsed_s(self) -> float:
        return self.context.elapsed_s

    @property
    def _epochs(self) -> int:
        """Of a run with workers: episodes that were learned from as often as they are to be."""
        return self.counters.updates // self.context.train.workers.updates

    def _stop_reason(self) -> str:
        counters = self.counters
        return stop_reason(self.stop, counters.env_steps, counters.returns, self.context.elapsed_s, self._epochs)

    def _report_if_due(self) -> None:
        now = time.perf_counter()
        if now < self.next_report:
            return
        self.next_report = now + min(max(0.02 * (now - self.born), MIN_REPORT_S), MAX_REPORT_S)
        if self.context.train.has_workers:  # their steps come whether a batch is due or not
            self.rate.note(now, self.counters.env_steps)
        self.station.report("train", self._row())
        self._tell_news()

    def _tell_news(self) -> None:
        for text in self.source.news():
            self.station.report("message", text)

    def _row(self) -> dict[str, Any]:
        """Where the run stands: one row of the metrics."""
        counters, lags = self.counters, self.fresh_lag
        row: dict[str, Any] = {
            "env_steps": counters.env_steps,
            "episodes": counters.episodes,
            "updates": counters.updates,
            "version": self.version,
            "wall_s": self.context.elapsed_s,
            "env_steps_per_s": self.rate.recent(),
            "return_mean": counters.return_mean,
            "return_max": counters.return_max,
            "length_mean": sum(counters.lengths) / len(counters.lengths) if counters.lengths else None,
            "lag_mean": sum(mean for mean, _ in lags) / len(lags) if lags else counters.lag_mean,
            "lag_max": max(peak for _, peak in lags) if lags else counters.lag_max,
            "dropped": counters.dropped,
            "learning_rate": self.pupil.learning_rate,
            "progress": self._progress(counters.env_steps),
        }
        if self.context.train.has_workers:
            row["epoch"] = self._epochs
        if figures := self.source.figures():
            row["replay"] = figures
        row["loss"] = self.account.take()
        lags.clear()
        return row

    def checkpoint(self) -> Path:
        """Begins to write everything a successor needs; atomic, and never weights that are lost."""
        if not self.pupil.is_finite():
            raise self._diverged(f"the weights became NaN or infinite at update {self.counters.updates}")
        self.next_checkpoint = time.monotonic() + self.context.train.run.checkpoint_interval_s
        tree = {
            **self.pupil.state_dict(),
            "counters": self.counters.state_dict(),
            "source": self.source.state_dict(),
            "version": self.version,
            "rng": torch.get_rng_state(),
            "epoch": self.context.epoch,
            "wall_s": self.context.elapsed_s,
        }
        path = self.writer.save(tree, step=self.counters.env_steps)
        if self.context.train.engine == "inline":  # there nothing may depend on how fast a disk is
            self.writer.wait()
        self.source.save(path.name)
        return path

    def _checkpoint_if_possible(self) -> None:
        """A full disk does not end the training; the next checkpoint may find room again."""
        self._tell_failure(self.writer.wait)
        self._tell_failure(self.checkpoint)

    def _tell_failure(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            text = f"no checkpoint could be written to {self.checkpoints}: {error}. Training goes on; make room there."
            self.station.report("message", text)

    def _finish(self) -> None:
        """Leaves a final checkpoint and the summary's figures, and ends."""
        now, counters = time.perf_counter(), self.counters
        row = self._row()
        self.source.finish(self._tick)  # of an earlier checkpoint: the last one comes with what it is made of
        self._tell_failure(self.writer.wait)  # and is written whatever became of that
        checkpoint = self.checkpoint()
        self.writer.wait()
        self.source.finish(self._tick)
        self._tell_news()
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in self.pupil.weights().items()}
        told = {"env_steps": str(counters.env_steps)}
        self.writer.begin(save_weights, self.context.run_dir / "weights.safetensors", weights, told)
        self.writer.wait()
        self.station.report("train", row)
        self.station.report(
            "finished",
            {
                "reason": self._stop_reason() or "stopped",
                "env_steps": counters.env_steps,
                "episodes": counters.episodes,
                "updates": counters.updates,
                "env_steps_per_s": self.rate.steady_state(now, counters.env_steps),
                "return_mean": counters.return_mean,
                "return_max": counters.return_max,
                "lag_mean": counters.lag_mean,
                "lag_max": counters.lag_max,
                "dropped": counters.dropped,
                "weights_sha256": weights_sha256(weights),
                "checkpoint": str(checkpoint),
                "device": str(self.pupil.device),
                **({"replay": figures} if (figures := self.source.figures()) else {}),
            },
        )
        self.finished = True

    def close(self) -> None:
        self.station.tick(float("inf"))
        self.writer.close()
        self.source.close()
        self.station.close()


def make_source(plan: Plan, pupil: Pupil) -> Source:
    """Where the batches of a run come from."""
    config, device, learner = plan.context.train, pupil.device, plan.context.index
    if config.has_workers:
        return EpisodeSource(plan.replay, device)
    if config.experience == "replay":
        is_one = pupil.peers.size == 1
        return ReplaySource(plan.replay, device) if is_one else ReplayPart(plan.replay, device, pupil.peers)
    if config.experience == "gradients":
        return GradientSource(config, GradientSchema.of(config, plan.model), plan.ring(), device)
    return QueueSource(config, plan.schema, plan.ring(learner), device, learner)


def learner(config: dict[str, Any]) -> Learner:
    """The entry of a learner process."""
    return Learner(Context.from_config(config))
