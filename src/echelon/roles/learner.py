"""The learner: batches in, weights out, and the run's account of itself.

Waits for: a batch (the ring's `ready` doorbell, rung by actors). Wakes: actors, by publishing and admitting.
If it dies, its successor starts from the newest checkpoint; the actors wait meanwhile, as nobody admits them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from echelon.algorithms import Algorithm, build_algorithm
from echelon.config import StopConfig
from echelon.errors import ConfigError, DivergedError
from echelon.roles.context import Context, Station
from echelon.roles.placement import learner_threads, pick_device
from echelon.roles.plan import Plan
from echelon.roles.rate import Rate
from echelon.roles.source import RETURN_WINDOW, QueueSource
from echelon.roles.update import LocalUpdate
from echelon.runs.checkpoint import (
    load_checkpoint,
    load_weights,
    newest_intact,
    save_checkpoint,
    save_weights,
    weights_sha256,
)
from echelon.schema import Batch

# A row of metrics comes after 2 % of the time so far, within these bounds: a run of seconds has a curve, one of days a
# file that can be read.
MIN_REPORT_S, MAX_REPORT_S = 0.1, 2.0


def learn_once(
    algorithm: Algorithm,
    batch: Batch,
    update: LocalUpdate,
    losses: list[dict[str, torch.Tensor]],
    tick: Callable[[], None] = lambda: None,
) -> None:
    """One batch, the same for every learning rule: minibatches, their losses in order, an update each.

    `tick` is called after each, so that a learner with much to do is seen to move.
    """
    for minibatch in algorithm.minibatches(batch):
        for loss in algorithm.losses(minibatch):
            update(loss)
            tick()
            losses.append({"loss": loss.value.detach(), **{k: v.detach() for k, v in loss.metrics.items()}})
    algorithm.finish(batch)


class Learner:
    """Learns from one batch a step."""

    def __init__(self, context: Context) -> None:
        torch.set_num_threads(1)  # the first weights must not depend on how many drew them
        config = context.train
        self.context, self.stop = context, config.stop
        self.station = Station(context)
        self.finished = False
        plan = Plan(context)
        device = pick_device(config.learner.device, plan.model.parameters.numel())
        if device != "cpu":
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.benchmark = True  # shapes stay the same from batch to batch
            plan = Plan(context, device=device)
        self.model = plan.model
        self.threads = learner_threads(config.learner.threads, self.model)
        self.algorithm = build_algorithm(config.algorithm, self.model, config.seed)
        self.update = LocalUpdate(config.optimizer, self.model)
        self.ring, self.board = plan.ring(), plan.board()
        self.source = QueueSource(config, plan.schema, self.ring, self.model.device)
        self.counters = self.source.counters
        self.checkpoints = context.run_dir / "checkpoints"
        self.rate = Rate()
        self.losses: list[dict[str, torch.Tensor]] = []
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
            self.model.load_weights(tree["model"], str(path))
            self.update.load_state_dict(tree["optimizer"])
            self.algorithm.load_state_dict(tree["algorithm"])
            self.counters.load_state_dict(tree["counters"])
            self.past_version = int(tree["version"])
            if self.context.train.engine != "inline":  # there the generator belongs to the caller's process
                torch.set_rng_state(tree["rng"])  # a user's dropout draws from it
            if message:
                self.station.report("message", message)
            if self.context.incarnation > 0:
                self.station.report(
                    "message", f"the learner goes on from {path.name} ({self.counters.env_steps:,} steps)"
                )
        elif self.context.train.run.init_from:
            source = self.context.train.run.init_from
            self.model.load_weights(find_weights(source), source)

    def step(self, timeout_s: float) -> bool:
        """Learns from one batch and publishes; waits if there is none yet."""
        if self.station.stop_requested or self._stop_reason():
            self._finish()
            return True
        phases, start = self.station.phases, time.perf_counter()
        batch = self.source.take(self.board.version)
        if batch is None:
            self.ring.ready.clear()
            batch = self.source.take(self.board.version)
        taken = time.perf_counter()
        phases["transfer"] += taken - start
        if batch is None:
            self._report_if_due()
            self.station.wait(timeout_s, [self.ring.ready.descriptor])
            return False
        self.rate.note(taken, self.counters.env_steps)
        self.update.schedule(self._progress())
        torch.set_num_threads(self.threads)
        learn_once(self.algorithm, batch, self.update, self.losses, self._tick)
        torch.set_num_threads(1)  # actors in this process (inline) compute as they do in their own
        self.counters.updates += 1
        self.source.prefetch(self.board.version + 1)
        self._check_loss()
        learned = time.perf_counter()
        self._publish()
        published = time.perf_counter()
        phases["learn"] += learned - taken
        phases["transfer"] += published - learned
        self._report_if_due()
        if time.monotonic() >= self.next_checkpoint:
            self.checkpoint()
        self.station.tick(published)
        return True

    def _tick(self) -> None:
        self.station.progress += 1
        self.station.tick(time.perf_counter())

    def _publish(self) -> None:
        """The version goes up here only."""
        self.board.publish(self.model.parts(), max(self.board.version, self.past_version) + 1)
        self.source.admit()

    def _check_loss(self) -> None:
        loss = float(self.losses[-1]["loss"])
        if not math.isfinite(loss):
            raise self._diverged(f"the loss became {loss}")

    def _diverged(self, what: str) -> DivergedError:
        rate = self.update.optimizer.param_groups[0]["lr"]
        return DivergedError(
            f"{what} at update {self.counters.updates} ({self.counters.env_steps:,} steps). Lower "
            f"--optimizer.learning-rate (now {rate:g}) or --optimizer.clip-norm, or scale the rewards."
        )

    def _progress(self) -> float:
        stop, fractions = self.stop, [0.0]
        if stop.steps:
            fractions.append(self.counters.env_steps / stop.steps)
        if stop.minutes:
            fractions.append((time.time() - self.context.started_at) / (60 * stop.minutes))
        return min(max(fractions), 1.0)

    def _stop_reason(self) -> str:
        return stop_reason(self.stop, self.counters.env_steps, list(self.counters.returns), self.context.started_at)

    def _report_if_due(self) -> None:
        now = time.perf_counter()
        if now < self.next_report:
            return
        self.next_report = now + min(max(0.02 * (now - self.born), MIN_REPORT_S), MAX_REPORT_S)
        self.station.report("train", self._row())

    def _row(self) -> dict[str, Any]:
        """Where the run stands: one row of the metrics."""
        counters, lags = self.counters, self.source.fresh_lag
        row = {
            "env_steps": counters.env_steps,
            "episodes": counters.episodes,
            "updates": counters.updates,
            "version": self.board.version,
            "wall_s": time.time() - self.context.started_at,
            "env_steps_per_s": self.rate.recent(),
            "return_mean": counters.return_mean,
            "return_max": counters.return_max,
            "length_mean": sum(counters.lengths) / len(counters.lengths) if counters.lengths else None,
            "lag_mean": sum(mean for mean, _ in lags) / len(lags) if lags else counters.lag_mean,
            "lag_max": max(peak for _, peak in lags) if lags else counters.lag_max,
            "dropped": counters.dropped,
            "learning_rate": self.update.optimizer.param_groups[0]["lr"],
            "progress": self._progress(),
        }
        names = self.losses[0] if self.losses else ()
        row["loss"] = {name: float(torch.stack([entry[name] for entry in self.losses]).mean()) for name in names}
        self.losses.clear()
        lags.clear()
        return row

    def checkpoint(self) -> Path:
        """Writes everything a successor needs; atomic, and never weights that are lost."""
        if not torch.isfinite(self.model.parameters).all():
            raise self._diverged("the weights became NaN or infinite")
        config = self.context.train.run
        self.next_checkpoint = time.monotonic() + config.checkpoint_interval_s
        tree = {
            "model": self.model.weights(),
            "optimizer": self.update.state_dict(),
            "algorithm": self.algorithm.state_dict(),
            "counters": self.counters.state_dict(),
            "version": self.board.version,
            "rng": torch.get_rng_state(),
            "epoch": self.context.epoch,
            "wall_s": time.time() - self.context.started_at,
        }
        return save_checkpoint(self.checkpoints, tree, step=self.counters.env_steps, keep=config.keep_checkpoints)

    def _finish(self) -> None:
        """Leaves a final checkpoint and the summary's figures, and ends."""
        now, counters = time.perf_counter(), self.counters
        row = self._row()
        checkpoint = self.checkpoint()
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in self.model.weights().items()}
        save_weights(self.context.run_dir / "weights.safetensors", weights, {"env_steps": str(counters.env_steps)})
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
                "device": str(self.model.device),
            },
        )
        self.finished = True

    def close(self) -> None:
        self.station.tick(float("inf"))
        self.ring.close()
        self.station.close()


def stop_reason(stop: StopConfig, env_steps: int, returns: list[float], started_at: float) -> str:
    """Why the run is over, or "" while it is not."""
    if stop.steps and env_steps >= stop.steps:
        return "steps"
    if stop.minutes and time.time() - started_at >= 60 * stop.minutes:
        return "minutes"
    target = stop.until_return
    solved = target is not None and len(returns) >= RETURN_WINDOW and sum(returns) / len(returns) >= target
    return "return" if solved else ""


def find_weights(path: str) -> dict[str, torch.Tensor]:
    """The weights in a file, or those of a run folder: its newest checkpoint's, or what it ended with."""
    where = Path(path)
    if where.is_file():
        return load_weights(where)
    found = newest_intact(where / "checkpoints")
    if found is not None:
        return dict(load_checkpoint(found[0])["model"])
    if (where / "weights.safetensors").is_file():
        return load_weights(where / "weights.safetensors")
    raise ConfigError(f"{path} is neither a weights file nor a run folder with a checkpoint. Name one that is.")


def learner(config: dict[str, Any]) -> Learner:
    """The entry of a learner process."""
    return Learner(Context.from_config(config))
