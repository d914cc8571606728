"""The learner: takes batches from its source and publishes weights. Several learners share every batch.

Waits for: a batch from its source (actors wake it). One of several learners also waits for the others, before every
batch (`Meeting`) and at every optimizer step (`Peers`). Wakes: actors, by granting slots, or with replay by sampling.
The first learner publishes, saves and reports; the others compute the same weights and finish with it. If a learner
dies or hangs, the supervisor restarts all learners from the newest checkpoint; the actors wait until they are admitted
again.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch

from echelon.errors import DivergedError, PeerLost, TransportError, diverged
from echelon.roles.context import Context, Station
from echelon.roles.learner_record import LearnerRecord
from echelon.roles.loss_account import LossAccount
from echelon.roles.meeting import Meeting
from echelon.roles.plan.parts import Plan
from echelon.roles.plan.start import num_episodes
from echelon.roles.source import Counters, Offer, SharedSource
from echelon.roles.stopping import progress, stop_reason
from echelon.roles.update import AnyBatch
from echelon.runs.checkpoint import UNDECODABLE, load_checkpoint, newest_intact
from echelon.runs.packing import decode, encode
from echelon.runs.progress import Progress, misfit
from echelon.runs.weights import find_weights

AT_COUNTS = ("steps", "episodes")  # the stop conditions at which actors stop, too, if the replay is exact
WARM_UP_S = 2.0  # after the first batch; excluded from the steady-state rate


class Rate:
    """Environment steps per second, recently and in the steady state."""

    def __init__(self, window_s: float = 1.0) -> None:
        self.window_s = window_s
        self.first: tuple[float, int] | None = None
        self.steady: tuple[float, int] | None = None
        self.recent_batches: collections.deque[tuple[float, int]] = collections.deque()

    def note(self, now: float, env_steps: int) -> None:
        """Notes that a batch was taken, after which the step count is `env_steps`."""
        self.first = self.first or (now, env_steps)
        if self.steady is None and now - self.first[0] >= WARM_UP_S:
            self.steady = (now, env_steps)
        batches = self.recent_batches
        batches.append((now, env_steps))
        while len(batches) > 2 and now - batches[1][0] >= self.window_s:
            batches.popleft()

    def recent(self, now: float) -> float:
        """Returns the rate over the newest batches.

        It is measured from batch to batch, so that it does not drop between two batches; if batches have stopped, it is
        measured up to `now`.
        """
        if len(self.recent_batches) < 2:
            return 0.0
        (then, before), (last, after) = self.recent_batches[0], self.recent_batches[-1]
        has_stopped = now - last > max(2 * self.window_s, last - then)
        return (after - before) / max((now if has_stopped else last) - then, 1e-9)

    def steady_state(self, now: float, env_steps: int) -> float:
        """Returns the rate since the end of the warm-up, or since the first batch if the run is too short for one."""
        start = self.steady if self.steady and now - self.steady[0] >= WARM_UP_S else self.first
        return (env_steps - start[1]) / max(now - start[0], 1e-9) if start else 0.0


class Learner:
    """The learner role: learns from one batch, or its part of a batch, per step."""

    def __init__(self, context: Context) -> None:
        torch.set_num_threads(1)  # the initial weights must not depend on the number of threads
        self.context, self.stop = context, context.train.stop
        self.station = Station(context)
        self.finished = False
        plan = Plan(context)
        self.trainable = plan.trainable(self.station.world)
        self.board, self.source = plan.board(), plan.source(self.trainable.device, self.trainable.peers)
        self.peers, self.is_first = self.trainable.peers, context.index == 0
        self.counters = self.source.counters if self.peers.size == 1 else Counters()  # of all learners
        self.rate, self.account = Rate(self.source.rate_window_s), LossAccount()
        self.version, self.past_version = 0, 0  # of the last published weights; of the restored checkpoint
        self.elapsed_s = context.elapsed_s  # of the first learner, so that time-based schedules are the same for all
        self.asked_rate: float | None = None  # the learning rate that a callback has set at this learner
        self.learning_rate: float | None = None  # the one in effect: that of the first learner, at the newest batch
        self.record = LearnerRecord(self)
        self.station.world.serve("change", self._on_change)
        try:
            self._restore()
            if context.train.is_spread:
                self._adopt_first()
        except BaseException:  # with the inline engine, nothing else would close the sockets
            self.close()
            raise
        self.record.begin()
        self.meeting = self._make_meeting() if self.peers.size > 1 else None
        self.fresh_lag = self.source.fresh_lag if self.meeting is None else self.meeting.fresh_lag
        self._publish()

    def _restore(self) -> None:
        """Restores the newest checkpoint. If there is none, starts from the weights in `run.init_from`, if set."""
        found = newest_intact(self.record.checkpoints) if self.is_first or not self.context.train.is_spread else None
        if found is None:
            if (source := self.context.train.run.init_from) and self.context.is_at_head:
                self.trainable.load_weights(find_weights(source), source)
            self._repeat_updates()
            self.record.report_place("")
            return
        path, message = found
        self._load(load_checkpoint(path), path)
        self._repeat_updates()
        if message and self.is_first:
            self.station.report("message", message)
        self.record.report_place(path.name)

    def _load(self, tree: Any, path: Path) -> None:
        """Loads the state in the checkpoint `path`."""
        past = Progress.read(tree, path)
        try:
            self.trainable.load_state_dict(tree, str(path))
            if self.source.content is not None:
                self.source.content.load_state_dict(tree.get("source", {}))
            if not self.context.shares_process:  # otherwise the generator belongs to the caller
                torch.set_rng_state(tree["rng"])  # dropout of a user's network draws from it
        except (torch.OutOfMemoryError, torch.AcceleratorError):  # not the fault of the checkpoint: start again
            raise
        except UNDECODABLE as error:
            raise misfit(path, f"{type(error).__name__}: {error}") from error
        self.counters.load_state_dict(msgspec.structs.asdict(past.counters))
        self.past_version, self.asked_rate = past.version, past.learning_rate
        self.trainable.schedule(self.progress(self.counters.env_steps), self.asked_rate)  # for rows before a batch

    def _on_change(self, changes: dict[str, float | None]) -> None:
        self.asked_rate = changes["learning_rate"]

    def _adopt_first(self) -> None:
        """Loads the state of the first learner: those of other hosts have no run folder."""
        raw = encode(self.record.tree()) if self.is_first else b""
        size = torch.tensor([len(raw)])
        self.peers.take_first(size)
        content = torch.zeros(int(size), dtype=torch.uint8)
        if raw:
            content.numpy()[:] = np.frombuffer(raw, np.uint8)
        self.peers.take_first(content)
        if not self.is_first:
            self._load(decode(content.numpy().tobytes()), Path("of the first learner"))

    def _repeat_updates(self) -> None:
        """Makes the updates due again that were lost since the checkpoint, where their number must be exact."""
        if self.is_first:
            self.source.repeat_from(self.counters.updates)

    def _make_meeting(self) -> Meeting:
        """Returns the meeting of the learners. The counts from before a resume are assigned to the first learner."""
        if self.is_first:
            own = self.source.counters
            own.env_steps, own.episodes = self.counters.env_steps, self.counters.episodes
        return Meeting(self.peers, cast(SharedSource, self.source), self.counters)

    def step(self, timeout_s: float) -> bool:
        """Learns from one batch and publishes; waits up to `timeout_s` if no batch is ready.

        If another learner is lost, perhaps with its host, the first one saves a checkpoint, and all restart from it.
        """
        if self.meeting is None or not self.is_first:
            return self._step(timeout_s)
        before = self.counters.state_dict()
        try:
            return self._step(timeout_s)
        except PeerLost:
            self.counters.load_state_dict(before)  # the trajectories of an unfinished batch are learned from again
            self.record.checkpoint(wait=True)
            raise

    def _step(self, timeout_s: float) -> bool:
        start, env_steps = time.perf_counter(), self.counters.env_steps
        is_over = self.station.stop_requested or (self.is_first and self._is_done())
        self.elapsed_s, self.learning_rate, offers = self.context.elapsed_s, self.asked_rate, None
        if self.meeting is not None:
            offers = self._meet(self.meeting, is_over, timeout_s)
            is_over = self.meeting.is_over
        if is_over:
            self._finish()
            return True
        begun, met = self.progress(env_steps), time.perf_counter()
        batch = self._take(offers)
        taken = time.perf_counter()
        self.station.phases["transfer"] += taken - (start if offers is None else met)
        if batch is None:
            self._report_if_due(taken)
            if offers is None:
                self.source.wait(self.station, timeout_s)
            return False
        self._work(batch, taken, begun)
        return True

    def _meet(self, meeting: Meeting, is_over: bool, timeout_s: float) -> list[Offer]:
        """Exchanges offers for the next batch with the other learners; waits up to `timeout_s` for its own part."""
        offer = Offer(is_ready=False) if is_over else self._find(meeting.source, timeout_s)
        start = time.perf_counter()
        offers = meeting.hold(offer, is_over, self.elapsed_s, self.learning_rate)
        self.elapsed_s, self.learning_rate = meeting.elapsed_s, meeting.learning_rate
        self.station.waited(start)
        return offers

    def _find(self, source: SharedSource, timeout_s: float) -> Offer:
        """Returns the source's offer for the next batch; waits up to `timeout_s` if it is not ready."""
        start = time.perf_counter()
        offer = source.offer(self.version)
        if not offer.is_ready:
            source.listen()
            offer = source.offer(self.version)
        self.station.phases["transfer"] += time.perf_counter() - start
        if not offer.is_ready:
            source.wait(self.station, timeout_s)
            offer = source.offer(self.version)
        return offer

    def _take(self, offers: Sequence[Offer] | None) -> AnyBatch | None:
        """Returns the next batch, or with `offers` of several learners this learner's part of it."""
        source = self.source
        if offers is not None:
            part: AnyBatch | None = cast(SharedSource, source).take_part(self.version, offers)
            return part
        batch: AnyBatch | None = source.take(self.version)
        if batch is None:
            source.listen()
            batch = source.take(self.version)
        return batch

    def _work(self, batch: AnyBatch, taken: float, begun: float) -> None:
        """Learns from a batch that was taken at time `taken`, and publishes.

        `begun` is the progress (0 to 1) of the run before this batch. Schedules use it so that the first batch has the
        full learning rate and the last one a rate above 0.
        """
        phases = self.station.phases
        self.rate.note(taken, self.counters.env_steps)
        self.record.note_episodes()
        self.trainable.schedule(begun, self.learning_rate)
        self.source.progress = self.progress(self.counters.env_steps)  # used when the next batch is drawn
        self._learn(batch)
        learned = time.perf_counter()
        if self._is_publishing:
            self._publish()
            self._save_user_state()
        published = time.perf_counter()
        phases["learn"] += learned - taken
        phases["transfer"] += published - learned
        if self.station.timeline is not None:
            self.station.timeline.add(taken, published)
        self._report_if_due(published)
        if self.is_first and time.monotonic() >= self.record.next_checkpoint:
            self.record.checkpoint()
        self.station.tick(published)

    def _report_if_due(self, now: float) -> None:
        if self.record.is_report_due(now):
            self.record.report(now)

    def _learn(self, batch: AnyBatch) -> None:
        spent_s = self.peers.spent_s
        self.trainable.learn(batch, self.account, self.tick, self.source.acknowledge)
        self.counters.updates += 1
        self.account.close_batch(self.counters.updates)
        self.source.prefetch(self.version + self._is_publishing)
        self._count_exchange("learn", spent_s)
        # Do not wait for the GPU to finish this batch, except before publishing: NaN weights must not be published.
        if lost := self.account.find_non_finite(
            keep=int(self.trainable.device.type == "cuda" and not self._is_publishing)
        ):
            raise self.diverged(lost)

    @property
    def _is_publishing(self) -> bool:
        """Whether the weights are published after the newest batch."""
        return self.counters.updates % self.source.publish_every == 0

    def tick(self) -> None:
        self.station.progress += 1
        self.station.tick(time.perf_counter())

    def _publish(self) -> None:
        """Publishes the weights and grants slots to the actors. This is the only place where the version increases.

        Several learners admit actors only after the first one has published. On another host than the head, the learner
        publishes its weights, which are the same, for that host.
        """
        is_new, spent_s = self.version == 0, self.peers.spent_s
        self.version += 1
        if is_new:
            self.version = max(self.board.version, self.past_version) + 1
            if self.peers.size > 1:
                self._agree()
        if self.is_first or not self.context.is_at_head:
            self.board.publish(self.trainable.parts(), self.version)
        if self.peers.size > 1 and (is_new or self.context.train.learner.max_lag is not None):
            self.peers.gather(torch.zeros(1))
            self._count_exchange("transfer", spent_s)
        self.source.admit()

    def _agree(self) -> None:
        """Adopts the highest version of all learners, and checks that all learners start from the same weights."""
        weights = sum(float(tensor.double().sum()) for tensor in self.trainable.weights().values())
        each = self.peers.gather(torch.tensor([self.version, self.counters.updates, weights], dtype=torch.float64))
        if not torch.equal(each[:, 1:], each[:1, 1:].expand(len(each), 2)):
            raise TransportError(
                f"the learners {', '.join(self.context.train.learner_names)} start from different weights (updates and "
                f"sums of weights: {each[:, 1:].tolist()}). Check that all of them read {self.record.checkpoints}."
            )
        self.version = int(each[:, 0].max())

    def _count_exchange(self, phase: str, before_s: float) -> None:
        """Moves the time spent in `peers` since `peers.spent_s` was `before_s` from `phase` to `exchange`."""
        spent_s = self.peers.spent_s - before_s
        self.station.phases[phase] -= spent_s
        self.station.phases["exchange"] += spent_s

    def _save_user_state(self) -> None:
        """Calls the user's save function every `save_every` episodes."""
        objects = self.context.user_objects
        if objects is not None and objects.save is not None and self.num_episodes % objects.save_every == 0:
            objects.save(epoch=self.num_episodes, policy=self.trainable.policy)

    def diverged(self, what: str) -> DivergedError:
        return diverged(f"{what} ({self.counters.env_steps:,} steps)", self.trainable.learning_rate)

    def progress(self, env_steps: int) -> float:
        return progress(self.stop, env_steps, self.elapsed_s, self.num_episodes)

    @property
    def num_episodes(self) -> int:
        """The number of episodes by which the run may be stopped."""
        return num_episodes(self.context.train, self.counters.episodes, self.counters.updates)

    def stop_reason(self) -> str:
        counters = self.counters
        return stop_reason(self.stop, counters.env_steps, counters.returns, self.context.elapsed_s, self.num_episodes)

    def _is_done(self) -> bool:
        """Whether a stop condition is met, and with it everything that is due."""
        reason = self.stop_reason()
        return bool(reason) and not (reason in AT_COUNTS and self.source.has_due_batch())

    def _finish(self) -> None:
        if self.is_first:
            self.record.finish()
        else:
            self.record.report_news()
        self.finished = True

    def close(self) -> None:
        self.station.tick(float("inf"))
        self.record.close()
        self.source.close()
        self.station.close()


def learner(config: dict[str, Any]) -> Learner:
    """The entry point of a learner process."""
    return Learner(Context.from_config(config))
