"""The learner: batches in, weights out, and the run's account of itself.

Waits for: a batch, as its source has it (actors wake it). Wakes: actors, by publishing and admitting, or by drawing.
If it dies, its successor starts from the newest checkpoint; the actors wait meanwhile, as nobody admits them.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch

from echelon.algorithms import build_algorithm
from echelon.config import StopConfig
from echelon.errors import DivergedError
from echelon.roles.context import Context, Station
from echelon.roles.placement import learner_threads, pick_device
from echelon.roles.plan import Plan
from echelon.roles.queue_source import QueueSource
from echelon.roles.rate import Rate
from echelon.roles.replay_source import ReplaySource
from echelon.roles.source import RETURN_WINDOW, Source
from echelon.roles.update import LocalUpdate, learn_once
from echelon.runs.checkpoint import (
    find_weights,
    load_checkpoint,
    newest_intact,
    save_checkpoint,
    save_weights,
    weights_sha256,
)
from echelon.schema import Batch, TransitionBatch

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
        plan = Plan(context)
        device = pick_device(config.learner.device, plan.model.parameters.numel())
        if device != "cpu":
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.benchmark = True  # shapes stay the same from batch to batch
            plan = Plan(context, device=device)
        self.model = plan.model
        self.threads = learner_threads(config.learner.threads, self.model)
        self.algorithm = build_algorithm(config.algorithm, self.model, config.seed)
        self.update = LocalUpdate(config.optimizer, self.model, self.algorithm.groups)
        self.board, self.source = plan.board(), make_source(plan, self.model.device)
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
            self.source.load_state_dict(tree.get("source", {}))
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
            self.source.listen()
            batch = self.source.take(self.board.version)
        taken = time.perf_counter()
        phases["transfer"] += taken - start
        if batch is None:
            self._report_if_due()
            self.source.wait(self.station, timeout_s)
            return False
        self.rate.note(taken, self.counters.env_steps)
        self.update.schedule(self._progress())
        self.source.schedule(self._progress())
        self._learn(batch)
        learned = time.perf_counter()
        if self.counters.updates % self.source.publish_every == 0:
            self._publish()
        published = time.perf_counter()
        phases["learn"] += learned - taken
        phases["transfer"] += published - learned
        self._report_if_due()
        if time.monotonic() >= self.next_checkpoint:
            self.checkpoint()
        self.station.tick(published)
        return True

    def _learn(self, batch: Batch | TransitionBatch) -> None:
        count = len(self.losses)
        torch.set_num_threads(self.threads)
        learn_once(self.algorithm, batch, self.update, self.losses, self._tick, self.source.acknowledge)
        torch.set_num_threads(1)  # actors in this process (inline) compute as they do in their own
        self.counters.updates += 1
        self.source.prefetch(self.board.version + 1)
        self._check(self.losses[count:])

    def _tick(self) -> None:
        self.station.progress += 1
        self.station.tick(time.perf_counter())

    def _publish(self) -> None:
        """The version goes up here only."""
        self.board.publish(self.model.parts(), max(self.board.version, self.past_version) + 1)
        self.source.admit()

    def _check(self, losses: list[dict[str, torch.Tensor]]) -> None:
        newest = dict(next(iter(entry.items())) for entry in losses)  # of each kind; an entry begins with its loss
        for name, loss in newest.items():
            if not math.isfinite(float(loss)):
                raise self._diverged(f"the {name.replace('_', ' ')} became {float(loss)}")

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
        row: dict[str, Any] = {
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
        if figures := self.source.figures():
            row["replay"] = figures
        values: dict[str, list[torch.Tensor]] = {}
        for entry in self.losses:
            for name, value in entry.items():
                values.setdefault(name, []).append(value)
        row["loss"] = {name: float(torch.stack(found).mean()) for name, found in values.items()}
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
            "source": self.source.state_dict(),
            "version": self.board.version,
            "rng": torch.get_rng_state(),
            "epoch": self.context.epoch,
            "wall_s": time.time() - self.context.started_at,
        }
        path = save_checkpoint(self.checkpoints, tree, step=self.counters.env_steps, keep=config.keep_checkpoints)
        self.source.save(path.name)
        return path

    def _finish(self) -> None:
        """Leaves a final checkpoint and the summary's figures, and ends."""
        now, counters = time.perf_counter(), self.counters
        row = self._row()
        checkpoint = self.checkpoint()
        self.source.finish()
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
                **({"replay": figures} if (figures := self.source.figures()) else {}),
            },
        )
        self.finished = True

    def close(self) -> None:
        self.station.tick(float("inf"))
        self.source.close()
        self.station.close()


def make_source(plan: Plan, device: torch.device) -> Source:
    """Where the batches of a run come from."""
    config = plan.context.train
    if config.experience == "replay":
        return ReplaySource(plan.replay, device)
    return QueueSource(config, plan.schema, plan.ring(), device)


def stop_reason(stop: StopConfig, env_steps: int, returns: list[float], started_at: float) -> str:
    """Why the run is over, or "" while it is not."""
    if stop.steps and env_steps >= stop.steps:
        return "steps"
    if stop.minutes and time.time() - started_at >= 60 * stop.minutes:
        return "minutes"
    target = stop.until_return
    solved = target is not None and len(returns) >= RETURN_WINDOW and sum(returns) / len(returns) >= target
    return "return" if solved else ""


def learner(config: dict[str, Any]) -> Learner:
    """The entry of a learner process."""
    return Learner(Context.from_config(config))
