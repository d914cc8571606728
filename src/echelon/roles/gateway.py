"""The gateway: a process that receives the workers' episodes and sends them the newest weights.

Waits for: messages from workers. Wakes: the learner, by appending to the gateway's replay shard. It replies to every
message immediately, whatever the learner is doing. The learner waits only while no update is due. If it dies, its
successor listens at the same address and continues from the `journal` in shared memory; workers resend unacknowledged
messages.
"""

from __future__ import annotations

import functools
import socket as sockets
import time
from typing import Any

import numpy as np

from echelon import config_io
from echelon.config import TrainConfig
from echelon.errors import Refused
from echelon.roles.context import Context, Station
from echelon.roles.handling import Handling
from echelon.roles.intake import Intake
from echelon.roles.journal import Entry, Evaluation, Journal
from echelon.roles.plan.parts import Plan
from echelon.roles.worker_registry import ACTIVE_S, EVER, HandshakeReport, WorkerRegistry
from echelon.schema import same_layout
from echelon.transport.channel import NOTHING, Message
from echelon.transport.channel_server import Server
from echelon.transport.episode_wire import (
    EPISODES,
    TASK,
    EpisodePiece,
    FromGateway,
    Heartbeat,
    Leave,
    Next,
    Register,
    RunEnded,
    Score,
    Stopped,
    Task,
    TaskRequest,
    UnknownWorker,
    Wait,
    Welcome,
    from_worker,
    pack,
)
from echelon.transport.shared_memory import WeightsBoard
from echelon.transport.sockets import announce
from echelon.transport.space_wire import received_spaces
from echelon.version import __version__

Array = np.ndarray[Any, Any]
REPORT_S = 1.0
QUEUED_MESSAGES = 4  # per worker, which has one message in flight and may resend it
GOODBYE_S = 2.0  # longer than a worker takes to reconnect
FEW_VALUES = 1 << 16  # numbers in a space that takes no time to build and to show, even if it is not the learner's
BURST = 16  # most messages handled in one step


class WeightsCache:
    """The newest weights as bytes to send, read from the board once per version."""

    def __init__(self, board: WeightsBoard, nbytes: int) -> None:
        self._board, self._nbytes = board, nbytes
        self._version, self._weights = 0, np.zeros(0, np.uint8)

    @property
    def version(self) -> int:
        """The newest version, or 0 if no weights are published yet."""
        return self._board.version

    def newer_than(self, version: int) -> tuple[int, Array | None]:
        """Returns the newest version, and its weights unless it equals `version`."""
        if self._board.version != self._version:
            # Allocate new memory: the previous version may still be being sent to a worker.
            weights = np.empty(self._nbytes, np.uint8)
            self._version, self._weights = self._board.read(weights), weights
        return self._version, self._weights if version != self._version else None


class Gateway:
    """The gateway role: handles up to BURST messages per step."""

    def __init__(self, context: Context) -> None:
        self.context, self.config = context, context.train
        self.station, self.finished, self.next_report = Station(context), False, 0.0
        plan = Plan(context)
        self.intake, self.tally = Intake(plan.replay), plan.replay.tally()
        self.weights_cache = WeightsCache(plan.board(), plan.weights_bytes)
        self.journal = Journal.at(context.session, self.tally, self.config.workers.evaluation)
        self.journal.recover(self.intake.writer.head)
        self.handling, self.is_over, self.num_logged = Handling(), False, 0
        self.intake.wake_learner()  # a predecessor may have died between the append and the wake-up
        self._log()
        report = functools.partial(self.station.report, "message")
        self.worker_registry, self.handshakes = WorkerRegistry(self.journal, report), HandshakeReport(report)
        self.station.world.serve("over", self._end)
        own = plan.user_layout.to_json() if self.config.algorithm.is_users else None
        self.task = Task(train=config_io.to_json(self.config), own=own)
        file = plan.workers_file
        address = file.read_text() if file.exists() else self.config.workers.address
        self.server = Server("workers", address, self.intake.max_bytes, QUEUED_MESSAGES, report)
        self.server.serve(TASK, self._take_message)
        self.server.serve(EPISODES, self._take_message)
        announce(file, self.server.address)
        if context.incarnation == 0:
            report(f"workers connect to {self.server.address.removeprefix('tcp://')} ({self._command()})")

    def _command(self) -> str:
        """Returns the command that starts a worker, with the host name in place of 0.0.0.0."""
        host, _, port = self.server.address.removeprefix("tcp://").rpartition(":")
        own = " --env ENV --policy MODULE:NAME" if self.config.algorithm.is_users else ""
        return f"echelon worker --learner {sockets.gethostname() if host == '0.0.0.0' else host}:{port}{own}"

    def _end(self) -> None:
        """Notes that the run has reached its end. The coordinator asks the roles to stop next."""
        self.is_over = True

    def step(self, timeout_s: float) -> bool:
        if self.station.stop_requested:
            self._say_goodbye()
            self.finished = True
            return False
        worked = self.server.take(BURST)
        now = time.perf_counter()
        if now >= self.next_report:
            self._report(now)
        if not worked:
            self.server.sleep(timeout_s)
            self.station.waited(now)
            return False
        self.station.phases["transfer"] = self.handling.seconds
        self.station.progress += 1
        self.station.tick(now)
        return True

    def _say_goodbye(self) -> None:
        """Notifies all workers that the run is over or stopped.

        Waits up to GOODBYE_S for active workers that are reconnecting; silent workers are not waited for.
        """
        frames, deadline = pack(RunEnded() if self.is_over else Stopped()), time.monotonic() + GOODBYE_S

        def say(message: Message) -> None:
            self.server.post(message.connection, EPISODES, *frames)

        self.server.serve(TASK, say)
        self.server.serve(EPISODES, say)
        unnotified, active = set(self.journal.sockets(EVER)), set(self.journal.sockets(ACTIVE_S))
        while True:
            unnotified = {
                name
                for name in unnotified
                if not (self._repeat_last(name) and self.server.post(name, EPISODES, *frames))
            }
            if not unnotified & active:
                return
            self.server.sleep(0.05)
            while time.monotonic() < deadline and self.server.take(BURST):
                pass
            if time.monotonic() >= deadline:
                return

    def _repeat_last(self, name: bytes) -> bool:
        """Repeats the reply to a worker's last message.

        A predecessor may have died before it replied. Without a reply, the worker would resend the message to the next
        run at this address, although this run has counted it.
        """
        row = self.journal.row_at(name)
        asked = Message(name, EPISODES, False, self.journal.last(row), NOTHING, [])
        return self.server.answer(asked, *pack(Next(self.journal.evaluates(row), 0, None, self.tally.env_steps)))

    def _take_message(self, asked: Message) -> None:
        """Handles one message. Its sender and its content are not trusted."""
        start, is_episode = time.perf_counter(), False
        try:
            message = from_worker(asked)
            if isinstance(message, Heartbeat | Leave):
                self._note(message)
            else:
                is_episode = isinstance(message, EpisodePiece)
                self.server.answer(asked, *pack(self._answer(message)), copy=False)
        finally:
            self.handling.note(time.perf_counter() - start, is_episode=is_episode)

    def _note(self, message: Heartbeat | Leave) -> None:
        """Handles a message that gets no reply."""
        if isinstance(message, Leave):
            if self.journal.leave(message.worker):
                self.worker_registry.left(message.worker)
        elif self.journal.row_of(message.worker) is not None:
            self.worker_registry.seen(message.worker)

    def _answer(self, message: TaskRequest | Register | EpisodePiece | Score) -> FromGateway:
        if isinstance(message, TaskRequest):
            check_release(message.release)
            return self.task
        if not (self.tally.is_open and self.weights_cache.version):
            return Wait()
        if isinstance(message, Register):
            check_release(message.release)
            self._check_arrival(message)
            is_new = self.journal.row_of(message.worker) is None
            row = self.journal.enter(message.worker)
            self.worker_registry.seen(message.worker, is_new=is_new)
            version, weights = self.weights_cache.newer_than(0)
            return Welcome(place=row, version=version, weights=weights, env_steps=self.tally.env_steps)
        found = self.journal.row_of(message.worker)
        if found is None:
            return UnknownWorker()
        self.worker_registry.seen(message.worker)
        if message.number > self.journal.last(found):
            self._take(message, found)
        else:
            self.journal.repeated()
        return self._next(message, found)

    def _next(self, message: EpisodePiece | Score, row: int) -> Next:
        version, weights = self.weights_cache.newer_than(message.has_version)
        evaluates = self.journal.evaluates(row)
        return Next(evaluates, version, weights, self.tally.env_steps)

    def _check_arrival(self, arrival: Register) -> None:
        check_user_policy(arrival, self.config)
        theirs = received_spaces(arrival.spaces, max(self.intake.num_values, FEW_VALUES))
        mine = self.context.spaces
        if mine.action != theirs.action or not same_layout(mine.observation, theirs.observation):
            raise Refused(
                f"the worker's environment observes {theirs.observation} and acts in {theirs.action}; the learner's "
                f"observes {mine.observation} and acts in {mine.action}. Give both the same environment and wrappers."
            )

    def _take(self, message: EpisodePiece | Score, row: int) -> None:
        """Stores the content of a message exactly once.

        If the gateway is killed at any point, its successor either finishes this or receives the message again.
        """
        self.journal.recover(self.intake.writer.head)  # an exception may have interrupted an earlier message
        value, length = message.episode_return, message.episode_length
        if not np.isfinite(value) or length < 1:
            raise Refused(
                f"an episode of {length} steps with return {value} was refused: it must have at least 1 step and a "
                "finite return."
            )
        head = self.intake.writer.head
        if isinstance(message, Score):
            evaluation = Evaluation(message.worker, message.version)
            self.journal.begin(Entry(row, message.number, head, length, (value, length), evaluation))
            self.journal.finish()
            self._log()
            return
        self.intake.check(message)
        spans = self.intake.spans(message)
        ended = (value, length) if message.terminated or message.truncated else None
        num_steps = len(message.reward) - message.num_old
        self.journal.begin(Entry(row, message.number, head + len(spans.start), num_steps, ended))
        self.intake.append(message, spans, self.weights_cache.version)
        self.journal.finish()
        self.intake.wake_learner()

    def _log(self) -> None:
        """Reports new evaluations to the coordinator. Those that a predecessor reported may be reported again."""
        for number, one in self.journal.evaluations(self.num_logged):
            value, length = one["value"], float(one["length"])
            score = {"version": one["version"], "episodes": 1, "return_mean": value, "return_std": 0.0}
            score |= {"return_min": value, "return_max": value, "length_mean": length, "worker": one["worker"]}
            self.station.report("worker_evaluation", number, score)
            self.num_logged = number

    def _report(self, now: float) -> None:
        """Reports workers that came, left or fell silent, and publishes the figures of the gateway."""
        self.next_report = now + REPORT_S
        self.worker_registry.look()
        self.handshakes.look(self.server.num_refused_handshakes)
        totals, seconds = self.journal.totals(), self.journal.seconds
        per_hour = 3600.0 * totals["interactions"] / seconds if seconds else 0.0
        figures = {"workers": self.worker_registry.num_active, **totals, "interactions_per_hour": per_hour}
        figures |= {"transitions": self.intake.writer.head, "refused": self.server.num_refused}
        figures |= self.handling.figures()
        self.station.gauge.show_figures("gateway", figures)

    def close(self) -> None:
        self._report(time.perf_counter())
        self.server.close()
        self.station.close()


def check_release(release: str) -> None:
    """Raises Refused if a worker has another version of Echelon."""
    if release != __version__:
        raise Refused(f"the worker has Echelon {release} and the learner has {__version__}; install the same version")


def check_user_policy(arrival: Register, config: TrainConfig) -> None:
    """Raises Refused if only one of worker and learner has a user policy."""
    has_user_policy = config.algorithm.is_users
    if arrival.own and not has_user_policy:
        raise Refused(
            f"the learner trains {config.preset}, but the worker has a policy of its own. Start it without policy=."
        )
    if has_user_policy and not arrival.own:
        raise Refused("the learner trains a user policy, but the worker has none. Pass the same policy (policy=...).")


def gateway(config: dict[str, Any]) -> Gateway:
    """The entry point of a gateway process."""
    return Gateway(Context.from_config(config))
