"""The coordinator: starts and supervises the roles, writes the metrics, and ends the run.

It waits for: messages of the roles, and exits that the engine reports. It alone decides about restarts (`Supervisor`).
If it dies, the fork server ends every role of this host, and agents end those of other hosts after a lease;
`echelon resume` continues from the newest checkpoint.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Sequence
from typing import Any

from echelon.callbacks.callback import Training
from echelon.callbacks.calls import CallbackList
from echelon.engines.inline import InlineEngine
from echelon.engines.local import LocalEngine
from echelon.engines.process import Exit
from echelon.errors import EchelonError
from echelon.interrupts import Interrupts
from echelon.roles.context import Context
from echelon.roles.outcome import CALLBACK
from echelon.roles.plan.stages import Stages
from echelon.roles.plan.start import (
    EVALUATOR,
    RoleSpec,
    is_evaluated_at_end,
    loses_steps,
    num_evaluations,
    num_first_steps,
    ranks_of,
    restored_text,
    roles_of,
    roles_of_host,
    roles_to_stop,
)
from echelon.roles.supervisor import Supervisor
from echelon.runs.console import Console, Status
from echelon.runs.episode_log import EpisodeLog
from echelon.runs.episodes import EPISODES
from echelon.runs.metrics import MetricsWriter, flat
from echelon.runs.outage import Outage
from echelon.world.exits import take_exits
from echelon.world.node import Node
from echelon.world.store_table import StoreTable

LOOP_S = 0.05
REPORTED_ENV_RESTARTS = 5
CONSOLE_INTERVAL_S = 0.25
STOP_TIMEOUT_S = 5.0
ANNOUNCED_S = 2.0  # an evaluation at the end that takes longer is announced
FINAL_GRACE_S = 5.0  # after the time limit of the evaluation at the end, for its report
FAILED_STOP_TIMEOUT_S = 0.5  # short after a failure: the error is reported only when all roles have exited


class Coordinator:
    """Runs one training: starts the roles, supervises them and stops them."""

    def __init__(
        self,
        context: Context,
        engine: LocalEngine | InlineEngine,
        world: Node,
        console: Console,
        metrics: MetricsWriter,
        interrupts: Interrupts,
        log: EpisodeLog | None = None,
        callbacks: CallbackList | None = None,
        stages: Stages | None = None,
    ) -> None:
        self.context, self.config, self.interrupts = context, context.train, interrupts
        self.engine, self.world, self.console, self.metrics = engine, world, console, metrics
        self.log, self.ranks = log, ranks_of(context.train)
        self.supervisor = Supervisor(context, engine, world, console.message)
        self.stages = stages or Stages(console.message)
        self.outage = Outage(context.run_dir, console.message)
        self.first = self.config.learner_names[0]  # the learner that reports
        self.callbacks = callbacks or CallbackList()
        self.training = Training(
            self.config, context.run_dir, context.started_at, self._write, console.message, self._send_changes
        )
        self.row: dict[str, Any] = {}
        self.summary: dict[str, Any] | None = None
        # Returns of the newest evaluations; a worker's evaluation is a single episode.
        self.evaluations = collections.deque[float](maxlen=num_evaluations(self.config))
        self.final: dict[str, Any] | None = None  # the evaluation of the final weights
        self.evaluating: int | None = None  # how many of its episodes have ended, while it lasts
        self.best: dict[str, Any] | None = None  # the evaluation of the best weights
        self.trained_s = 0.0  # seconds of the run until its last update
        self.env_restarts = 0
        self.stopping = self.is_learning = False
        self.next_console = self.next_look = 0.0
        self.newest_evaluation = 0  # number of the last worker evaluation that is in the metrics
        world.serve("train", self._on_train)
        world.serve("episodes", self._on_episodes)
        world.serve("checkpoint", self._on_checkpoint)
        world.serve("evaluation", self._on_evaluation)
        world.serve("evaluating", self._on_evaluating)
        world.serve("evaluated", self._on_evaluated)
        world.serve("best", self._on_best)
        world.serve("worker_evaluation", self._on_worker_evaluation)
        self.reported = {"message": self.console.message, "env_restarted": self._on_env_restarted}  # from hosts, too
        world.serve("message", self.console.message)
        world.serve("disk", self.outage.note)
        world.serve("restored", self._on_restored)
        world.serve("env_restarted", self._on_env_restarted)
        world.serve("finished", self._on_finished)
        store = StoreTable()  # through which several learners find each other
        world.serve("store", store)
        engine.share_store(store)

    # Reports of the roles.

    def _on_train(self, row: dict[str, Any]) -> None:
        if not self.is_learning and row.get("updates", 0) > self.row.get("updates", 0):
            self.is_learning = True
            self.stages.begin("first update")  # the last role may have begun since the supervisor looked
            self.stages.end()
        if self.log is not None and not self.row and self._filling(row):
            self.console.message(f"learning starts at {self.config.replay.min_size:,} transitions")
        # What the report lacks was not measured since: its last value stays.
        self.row = self.training.row = {**self.row, **row}
        if EVALUATOR.name in self.world.members:
            self.world.post(EVALUATOR.name, "progress", row["env_steps"])
        whole = {"kind": "train", **self.row, **flat({"time": self.shares(), **self.figures()})}
        self._write(whole)
        self.callbacks.note("on_update", whole)
        self._send_changes()  # with every row: a message to a learner that dies is lost
        if self.log is not None and (line := self.log.note(row)):
            self.console.message(line)

    def _on_episodes(self, episodes: dict[str, Any]) -> None:
        """Writes the episodes that a learner counted since its last report, given as columns (`runs.episodes`)."""
        writer, was_full = self.metrics.episodes, self.metrics.episodes.is_full
        writer.write(episodes, self.config.seed)
        if writer.is_full and not was_full:
            self.console.message(f"{writer.path} is full ({writer.file.size:,} bytes): no more episodes are written")
        self.outage.note("metrics", str(self.metrics.error or ""))
        if self.callbacks.wants("on_episode"):
            for values in zip(*(column.tolist() for column in episodes.values()), strict=True):
                row = {**dict(zip(episodes, values, strict=True)), "seed": self.config.seed}
                self.callbacks.note("on_episode", row)

    def _on_evaluation(self, score: dict[str, Any]) -> None:
        self.evaluations.append(score["return_mean"])
        steps = {"env_steps": self.row.get("env_steps", 0), "wall_s": self.row.get("wall_s", 0.0)}
        row = {"kind": "evaluation", **steps, **score}
        self._write(row)
        self.callbacks.note("on_evaluation", row)

    def _on_checkpoint(self, name: str) -> None:
        self.callbacks.note("on_checkpoint", self.context.run_dir / "checkpoints" / name)

    def _on_evaluating(self, num_ended: int) -> None:
        self.evaluating = num_ended

    def _on_evaluated(self, score: dict[str, Any]) -> None:
        self.final = score

    def _on_best(self, best: dict[str, Any]) -> None:
        self.best = best

    def _write(self, row: dict[str, Any]) -> None:
        self.metrics.write(row)
        self.outage.note("metrics", str(self.metrics.error or ""))

    def _on_worker_evaluation(self, number: int, score: dict[str, Any]) -> None:
        """Records an evaluation once: a restarted gateway repeats those that its predecessor may not have reported."""
        if number > self.newest_evaluation:
            self.newest_evaluation = number
            self._on_evaluation(score)

    def _on_restored(self, checkpoint: str, env_steps: int, updates: int) -> None:
        """Reports from where a restarted learner resumes, and how much was lost."""
        place = f"{checkpoint} ({env_steps:,} steps)" if checkpoint else "the beginning (no checkpoint yet)"
        if loses_steps(self.config):
            try:
                self.metrics.episodes.drop_after(env_steps)
            except OSError as error:  # the run does not end because of its record
                self.console.message(f"episodes after the checkpoint are in {EPISODES} twice: {error}")
        lost = self.row.get("updates", 0) - updates
        steps = self.row.get("env_steps", 0) - env_steps
        self.console.message(restored_text(self.config, place, steps, lost))
        self._send_changes()

    def _on_env_restarted(self, text: str) -> None:
        """Reports the first few restarts, then every hundredth: a broken environment may fail often."""
        self.env_restarts += 1
        if self.env_restarts <= REPORTED_ENV_RESTARTS or self.env_restarts % 100 == 0:
            is_last = self.env_restarts >= REPORTED_ENV_RESTARTS
            more = f" ({self.env_restarts} so far; the rest is in logs/)" if is_last else ""
            self.console.message(text + more)

    def _on_finished(self, summary: dict[str, Any]) -> None:
        if summary["reason"] == "stopped" and self.training.stop_reason and not self._is_interrupted:
            summary = {**summary, "reason": CALLBACK, "stop_reason": self.training.stop_reason}
        self.summary, self.trained_s = summary, self.context.elapsed_s

    def _send_changes(self) -> None:
        if self.training.changes and self.first in self.world.members:
            self.world.post(self.first, "change", self.training.changes)

    # The run.

    @property
    def _is_interrupted(self) -> bool:
        return self.interrupts.came or self.console.is_unread

    @property
    def evaluation_return(self) -> float | None:
        return sum(self.evaluations) / len(self.evaluations) if self.evaluations else None

    def evaluations_summary(self) -> dict[str, Any]:
        """Returns the figures of the final evaluation and of the best one, as far as there are any."""
        final, best = self.final or {}, self.best or {}
        names = {"return_mean": "return_mean", "return_std": "return_std", "episodes": "episodes"}
        found = {f"evaluation_{name}": final.get(key) for name, key in names.items()}
        return {**found, "best_return_mean": best.get("return_mean"), "best_steps": best.get("env_steps")}

    @property
    def restarts(self) -> int:
        return self.supervisor.restarts

    def run(self) -> dict[str, Any]:
        """Trains until the learner reports that it has finished; returns the summary."""
        timeout_s = 0.0  # after a second interrupt the user does not wait
        try:
            self.callbacks.start(self.training)
            self.stages.begin("roles")
            self._start(roles_of(self.config))
            self._loop()
            self._end_gateway()
            self._evaluate_final()
            self.callbacks.run()
            timeout_s = STOP_TIMEOUT_S
        except EchelonError:
            timeout_s = FAILED_STOP_TIMEOUT_S
            raise
        finally:
            self.supervisor.stop(timeout_s)
        assert self.summary is not None
        return self.summary

    def _end_gateway(self) -> None:
        """Tells the gateway that the run is over, so that workers exit; if it was stopped, they wait for a resume."""
        if self.summary is not None and self.summary["reason"] != "stopped" and "gateway" in self.world.members:
            self.world.post("gateway", "over")

    def _evaluate_final(self) -> None:
        """Has the final weights evaluated, unless the user wants to leave. The run is complete without it, too."""
        summary, limit_s, episodes = self.summary, self.config.evaluation.limit_s, self.config.evaluation.episodes
        assert summary is not None
        if not is_evaluated_at_end(self.config) or summary["reason"] == "stopped" or not summary["updates"]:
            return
        if summary["checkpoint"] is None or self._is_interrupted:  # None: the disk is full
            return
        start, is_announced = time.monotonic(), False
        self.evaluating, deadline = 0, start + limit_s
        try:
            self.supervisor.release(roles_to_stop(self.config))
            if EVALUATOR.name not in self.supervisor.members:
                self._start([EVALUATOR])
            while self.final is None and (left_s := deadline - time.monotonic()) > -FINAL_GRACE_S:
                if self._is_interrupted:
                    self.console.message("the evaluation of the final weights was skipped")
                    return
                if not is_announced and time.monotonic() - start > ANNOUNCED_S:
                    is_announced = True
                    self.console.message(f"evaluating the final weights: {episodes} episodes, at most {limit_s:g} s")
                if EVALUATOR.name in self.world.members:
                    task = summary["checkpoint"], summary["env_steps"], self.row["version"], max(left_s, 0.0)
                    self.world.post(EVALUATOR.name, "evaluate", *task)
                self._turn(lambda gone: gone.name == EVALUATOR.name)
        except EchelonError as error:
            self.console.message(f"the final weights could not be evaluated: {error}")
            return
        finally:
            self.evaluating = None
        ended = self.final["episodes"] if self.final else 0
        if ended < episodes:
            self.console.message(
                f"{ended} of {episodes} episodes of the final evaluation ended within {limit_s:g} s; the others do not "
                "count (--evaluation.limit-s)"
            )

    def _start(self, roles: Sequence[RoleSpec]) -> None:
        for role in roles:
            self.supervisor.start(role.name, role.kind, role.index, nice=role.nice)
            if role.name in self.ranks:
                self.console.message(f"Rank {self.ranks[role.name]} start")

    def _loop(self) -> None:
        while self.summary is None:
            for number in self.engine.joined():
                self._start(roles_of_host(self.config, number))
            self._turn(lambda gone: self.summary is None)  # otherwise the learner exited normally
            self.callbacks.run()
            if self._is_interrupted or self.training.stop_reason:
                self._ask_to_stop()
        self._show(force=True)

    def _turn(self, is_replaced: Callable[[Exit], bool]) -> None:
        """Lets the roles work, serves their messages, and replaces those that died if `is_replaced` says so."""
        self.engine.run(self.world, LOOP_S)
        for function, text in self.engine.reports():
            self.reported[function](text)
        for gone in take_exits(self.engine, self.world):
            if is_replaced(gone):
                self.supervisor.replace(gone)
        if (now := time.monotonic()) >= self.next_look:  # not after every message: it visits every role
            self.next_look = now + LOOP_S
            self.supervisor.look()
            if self.stages.name == "roles" and not self.supervisor.starting():
                self.stages.begin("first update")
        self._show()

    def _ask_to_stop(self) -> None:
        """Asks the learner to stop; called repeatedly, so that a learner that is being replaced receives it, too."""
        if not self.stopping:
            self.stopping = True
            unread = "nobody reads the output, so the run stops: writing the final checkpoint"
            asked = (
                "stopping: writing the final checkpoint, without an evaluation (interrupt again to exit immediately)"
            )
            text = unread if self.console.is_unread else asked
            self.console.message(text if self._is_interrupted else f"stopping: {self.training.stop_reason}")
        if self.first in self.world.members:
            self.world.post(self.first, "stop")

    # The console.

    def shares(self) -> dict[str, dict[str, float]]:
        return self.supervisor.shares()

    def figures(self) -> dict[str, dict[str, Any]]:
        """Returns the figures of each inference server and each shard server, and of the gateway."""
        figures = self.supervisor.figures
        return {"inference": figures("inference"), "shards": figures("shards"), "workers": self._workers}

    @property
    def _workers(self) -> dict[str, float]:
        return self.supervisor.figures("gateway").get("gateway", {})

    def _filling(self, row: dict[str, Any]) -> tuple[int, int] | None:
        """Returns the transitions in the replay and the required number, while learning has not begun; else None."""
        inserted, least = row.get("replay.inserted"), self.config.replay.min_size
        return (inserted, least) if inserted is not None and inserted < least else None

    def _doing(self) -> str:
        """Returns what the run does while it makes no updates, or ""."""
        if self.evaluating is not None:
            return f"evaluating the final weights: {self.evaluating} of {self.config.evaluation.episodes}"
        if self.is_learning:
            return ""
        if starting := self.supervisor.starting():
            return f"starting {starting}"
        if (filling := self._filling(self.row)) is not None:
            return f"filling the replay: {filling[0]:,} of {filling[1]:,} transitions"
        if not (needed := num_first_steps(self.config)):
            return ""
        num_steps = self.supervisor.num_steps()
        if num_steps < needed:
            return f"collecting {num_steps:,} of {needed:,} steps"
        return "learning from the first batch"

    def _show(self, *, force: bool = False) -> None:
        now = time.perf_counter()
        if now < self.next_console and not force:
            return
        self.next_console = now + CONSOLE_INTERVAL_S
        row, stop = self.row, self.config.stop
        wall_s = self.context.elapsed_s
        elapsed = wall_s / (60 * stop.minutes) if stop.minutes else 0.0
        has_end = stop.steps or stop.minutes or stop.episodes
        fraction = min(max(row.get("progress", 0.0), elapsed), 1.0) if has_end else None
        self.console.update(
            Status(
                fraction=fraction,
                env_steps=row.get("env_steps", 0),
                steps_per_s=row.get("env_steps_per_s", 0.0),
                episodes=row.get("episodes", 0),
                return_mean=row.get("return_mean"),
                evaluation_return=self.evaluation_return,
                lag_mean=None if "replay.inserted" in row else row.get("lag_mean"),
                lag_max=row.get("lag_max", 0),
                updates=row.get("updates", 0),
                wall_s=wall_s,
                dropped=row.get("dropped", 0),
                experience=self.config.algorithm.slots,
                roles=self.shares(),
                workers=self._workers,
                doing=self._doing(),
            )
        )
