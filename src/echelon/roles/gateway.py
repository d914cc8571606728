"""The gateway: where workers bring their episodes and get the newest weights, in a process of its own.

Waits for: messages of workers. Wakes: the learner, by appending to its own replay shard. It answers every message at
once, whatever the learner is at, and the learner never waits for it. If it dies, its successor listens at the same
address and goes on with what lies in shared memory (`journal`); workers repeat what was not answered.
"""

from __future__ import annotations

import functools
import socket as sockets
import time
from typing import Any

import numpy as np

from echelon import config_io
from echelon.config import TrainConfig
from echelon.errors import ConfigError, Refused
from echelon.roles.context import Context, Station
from echelon.roles.handling import Handling
from echelon.roles.intake import Intake
from echelon.roles.journal import Entry, Evaluation, Journal
from echelon.roles.plan.parts import Plan
from echelon.roles.worker_registry import EVER, HEARD_S, HandshakeReport, WorkerRegistry
from echelon.schema import Spaces, space_choices, space_leaves
from echelon.transport.channel import NOTHING, Message
from echelon.transport.channel_server import Server
from echelon.transport.episode_wire import (
    EPISODES,
    PROTOCOL,
    TASK,
    Arrive,
    Ask,
    FromGateway,
    Leave,
    Next,
    Over,
    Piece,
    Score,
    Sign,
    Stopped,
    Stranger,
    Task,
    Wait,
    Welcome,
    from_worker,
    pack,
)
from echelon.transport.secret import secret_from_environment
from echelon.transport.shared_memory import WeightsBoard
from echelon.transport.sockets import announce

Array = np.ndarray[Any, Any]
REPORT_S = 1.0
QUEUED_MESSAGES = 4  # of a worker, which has one under way and may repeat it
GOODBYE_S = 2.0  # longer than a worker takes to connect again
BURST = 16  # messages between two looks at the rest of the world


class WeightsCache:
    """The newest weights as they are sent, read once a version."""

    def __init__(self, board: WeightsBoard, nbytes: int) -> None:
        self._board, self._nbytes = board, nbytes
        self._version, self._weights = 0, np.zeros(0, np.uint8)

    @property
    def version(self) -> int:
        """The newest; 0: there is none yet."""
        return self._board.version

    def newer_than(self, version: int) -> tuple[int, Array | None]:
        """The newest version, and its weights where it is another than `version`."""
        if self._board.version != self._version:
            # Memory of its own: that of the version before may still be on its way to somebody.
            weights = np.empty(self._nbytes, np.uint8)
            self._version, self._weights = self._board.read(weights), weights
        return self._version, self._weights if version != self._version else None


class Gateway:
    """Deals with one message after the other."""

    def __init__(self, context: Context) -> None:
        self.context, self.config = context, context.train
        self.station, self.finished, self.next_report = Station(context), False, 0.0
        plan = Plan(context)
        self.intake, self.tally = Intake(plan.replay), plan.replay.tally()
        self.weights_cache = WeightsCache(plan.board(), plan.weights_bytes)
        self.journal = Journal.at(context.session, self.tally, self.config.workers.evaluation)
        self.journal.recover(self.intake.writer.head)
        self.handling, self.is_over, self.num_logged = Handling(), False, 0
        self.intake.wake_learner()  # a predecessor may have died before it did
        self._log()
        report = functools.partial(self.station.report, "message")
        self.worker_registry, self.handshakes = WorkerRegistry(self.journal, report), HandshakeReport(report)
        self.station.world.serve("over", self._end)
        own = plan.user_layout.to_json() if self.config.algorithm.is_users else None
        self.task = Task(train=config_io.to_json(self.config), own=own)
        file = plan.workers_file
        address = file.read_text() if file.exists() else self.config.workers.address
        self.server = Server("workers", address, secret_from_environment(), self.intake.max_bytes, QUEUED_MESSAGES)
        self.server.serve(TASK, self._take_message)
        self.server.serve(EPISODES, self._take_message)
        announce(file, self.server.address)
        if context.incarnation == 0:
            report(f"workers come to {self.server.address.removeprefix('tcp://')} ({self._command()})")

    def _command(self) -> str:
        """What starts a worker; a gateway that is open to all hosts is named by its own."""
        host, _, port = self.server.address.removeprefix("tcp://").rpartition(":")
        own = " --env ENV --policy MODULE:NAME" if self.config.algorithm.is_users else ""
        return f"echelon worker --learner {sockets.gethostname() if host == '0.0.0.0' else host}:{port}{own}"

    def _end(self) -> None:
        """The run has reached its end; its roles are asked to stop next."""
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
        """Tells all workers that the run is over, or stopped; one that is just coming back from an accident is waited
        for, if it is not lost."""
        frames, deadline = pack(Over() if self.is_over else Stopped()), time.monotonic() + GOODBYE_S

        def say(message: Message) -> None:
            self.server.post(message.connection, EPISODES, *frames)

        self.server.serve(TASK, say)
        self.server.serve(EPISODES, say)
        unnotified, here = set(self.journal.sockets(EVER)), set(self.journal.sockets(HEARD_S))
        while True:
            unnotified = {
                name for name in unnotified if not (self._say_last(name) and self.server.post(name, EPISODES, *frames))
            }
            if not unnotified & here:
                return
            self.server.sleep(0.05)
            while time.monotonic() < deadline and self.server.take(BURST):
                pass
            if time.monotonic() >= deadline:
                return

    def _say_last(self, name: bytes) -> bool:
        """Answers the last message of a worker's once more: a predecessor may have died before it did, and then the
        worker would bring to the next run what is counted in this one."""
        row = self.journal.row_at(name)
        asked = Message(name, EPISODES, False, self.journal.last(row), NOTHING, [])
        return self.server.answer(asked, *pack(Next(self.journal.evaluates(row), 0, None, self.tally.env_steps)))

    def _take_message(self, asked: Message) -> None:
        """One message, from anybody at all."""
        start, is_episode = time.perf_counter(), False
        try:
            message = from_worker(asked)
            if isinstance(message, Sign | Leave):
                self._note(message)
            else:
                is_episode = isinstance(message, Piece)
                self.server.answer(asked, *pack(self._answer(message)), copy=False)
        except Refused as error:
            self.handling.refused += 1
            if self.handling.refused <= 5 or self.handling.refused % 100 == 0:
                self.station.report("message", f"a worker was refused: {error}")
            raise
        finally:
            self.handling.note(time.perf_counter() - start, is_episode=is_episode)

    def _note(self, message: Sign | Leave) -> None:
        """What has no answer."""
        if isinstance(message, Leave):
            if self.journal.leave(message.worker):
                self.worker_registry.left(message.worker)
        elif self.journal.row_of(message.worker) is not None:
            self.worker_registry.heard(message.worker)

    def _answer(self, message: Ask | Arrive | Piece | Score) -> FromGateway:
        if isinstance(message, Ask):
            check_protocol(message.protocol)
            return self.task
        if not (self.tally.is_open and self.weights_cache.version):
            return Wait()
        if isinstance(message, Arrive):
            check_protocol(message.protocol)
            self._check_arrival(message)
            is_new = self.journal.row_of(message.worker) is None
            row = self.journal.enter(message.worker)
            self.worker_registry.heard(message.worker, is_new=is_new)
            version, weights = self.weights_cache.newer_than(0)
            return Welcome(place=row, version=version, weights=weights, env_steps=self.tally.env_steps)
        found = self.journal.row_of(message.worker)
        if found is None:
            return Stranger()
        self.worker_registry.heard(message.worker)
        if message.number > self.journal.last(found):
            self._take(message, found)
        else:
            self.journal.repeated()
        return self._next(message, found)

    def _next(self, message: Piece | Score, row: int) -> Next:
        version, weights = self.weights_cache.newer_than(message.has_version)
        evaluates = self.journal.evaluates(row)
        return Next(evaluates, version, weights, self.tally.env_steps)

    def _check_arrival(self, arrival: Arrive) -> None:
        check_user_policy(arrival, self.config)
        mine, theirs = self.context.spaces, spaces_of(arrival)
        if not same_spaces(mine, theirs):
            raise Refused(
                f"the worker's environment observes {theirs.observation} and acts in {theirs.action}; the learner's "
                f"observes {mine.observation} and acts in {mine.action}. Give both the same environment and wrappers."
            )

    def _take(self, message: Piece | Score, row: int) -> None:
        """Takes in what a message brings; killed anywhere in it, a successor counts it once or gets it again."""
        value, length = message.episode_return, message.episode_length
        if not np.isfinite(value) or length < 1:
            raise Refused(f"an episode of {length} steps that returned {value} was refused.")
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
        """Tells of evaluations that we have not told of; those of a predecessor may come again."""
        for number, one in self.journal.evaluations(self.num_logged):
            value, length = one["value"], float(one["length"])
            score = {"version": one["version"], "episodes": 1, "return_mean": value, "return_std": 0.0}
            score |= {"return_min": value, "return_max": value, "length_mean": length, "worker": one["worker"]}
            self.station.report("worker_evaluation", number, score)
            self.num_logged = number

    def _report(self, now: float) -> None:
        """How workers are served, for the record."""
        self.next_report = now + REPORT_S
        self.worker_registry.look()
        self.handshakes.look(self.server.num_refused_handshakes)
        totals, seconds = self.journal.totals(), self.journal.seconds
        per_hour = 3600.0 * totals["interactions"] / seconds if seconds else 0.0
        figures = {"workers": self.worker_registry.num_here, **totals, "interactions_per_hour": per_hour}
        figures |= {"transitions": self.intake.writer.head, "refused": self.server.num_refused}
        figures |= self.handling.figures()
        self.station.gauge.show_figures("gateway", figures)

    def close(self) -> None:
        self._report(time.perf_counter())
        self.server.close()
        self.station.close()


def check_protocol(protocol: int) -> None:
    if protocol != PROTOCOL:
        raise Refused(
            f"the worker speaks protocol {protocol}, the learner {PROTOCOL}. Install the same version on both sides."
        )


def check_user_policy(arrival: Arrive, config: TrainConfig) -> None:
    """Raises Refused where only one of both has a policy of the user's own."""
    has_user_policy = config.algorithm.is_users
    if arrival.own and not has_user_policy:
        raise Refused(f"the learner trains {config.preset}, but the worker brings a policy of its own. Drop it.")
    if has_user_policy and not arrival.own:
        raise Refused("the learner trains a policy of its user's: give the worker that policy too (policy=...).")


def spaces_of(arrival: Arrive) -> Spaces:
    try:
        return Spaces.from_json(arrival.spaces)
    except (KeyError, TypeError, ValueError, AssertionError, AttributeError, ConfigError) as error:
        raise Refused(f"a worker's spaces cannot be read: {type(error).__name__}: {error}.") from None


def same_spaces(mine: Spaces, theirs: Spaces) -> bool:
    """Whether one replay, and one policy, can serve both; bounds of what is observed may differ."""
    try:
        leaves = [space_leaves(spaces.observation) for spaces in (mine, theirs)]
    except ConfigError:
        return False
    choices = [str(space_choices(spaces.observation)) for spaces in (mine, theirs)]
    return leaves[0] == leaves[1] and choices[0] == choices[1] and bool(mine.action == theirs.action)


def gateway(config: dict[str, Any]) -> Gateway:
    """The entry of a gateway process."""
    return Gateway(Context.from_config(config))
