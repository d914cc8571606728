"""The context that every role is started with, and the `Station` that connects a role to the coordinator."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import zmq

from echelon import config_io
from echelon.config import TrainConfig
from echelon.roles.gauge import PHASES, Gauge
from echelon.roles.user_objects import UserObjects
from echelon.runs.outage import Fallback
from echelon.runs.timeline import Timeline
from echelon.schema import Spaces
from echelon.world.node import Node

COORDINATOR = "coordinator"
TICK_S = 0.25
JOIN_S = 10.0  # between two attempts to join


@dataclass(frozen=True, slots=True)
class Context:
    """Everything that a role is built from: plain values, so that it can be sent to any process."""

    name: str
    index: int
    incarnation: int
    generation: int  # how often the run was resumed; part of every seed, so that a resumed run draws new numbers
    train: TrainConfig
    spaces: Spaces
    state_shapes: tuple[tuple[int, ...], ...]
    session: Path
    address: str
    run_dir: Path
    started_at: float  # monotonic clock, shared by all processes of a host; minus the past seconds of a resumed run
    shares_process: bool = False  # all roles run in one process and share its threads and random generators
    hostname: str = "127.0.0.1"  # the address of this host at which learners of other hosts reach it
    is_at_head: bool = True  # False on another host than that of the coordinator
    user_objects: UserObjects | None = None  # objects of the caller's program; only for roles in the caller's process

    def in_folder(self, run_dir: Path) -> Context:
        """Returns this context with another run folder: a default name may be taken by the time it is created."""
        return replace(self, run_dir=run_dir)

    def to_config(self, *, keep_objects: bool) -> dict[str, Any]:
        """Returns the dict for a process specification.

        `keep_objects` keeps the train config and the user's objects as Python objects, for roles that run in the
        caller's process.
        """
        return {
            "name": self.name,
            "index": self.index,
            "incarnation": self.incarnation,
            "generation": self.generation,
            "train": self.train if keep_objects else config_io.to_json(self.train),
            "spaces": self.spaces.to_json(),
            "state_shapes": [list(shape) for shape in self.state_shapes],
            "session": str(self.session),
            "address": self.address,
            "run_dir": str(self.run_dir),
            "started_at": self.started_at,
            "shares_process": self.shares_process,
            "hostname": self.hostname,
            "is_at_head": self.is_at_head,
            **({"user_objects": self.user_objects} if keep_objects else {}),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Context:
        train = config["train"]
        return cls(
            name=config["name"],
            index=config["index"],
            incarnation=config["incarnation"],
            generation=config["generation"],
            train=train if isinstance(train, TrainConfig) else config_io.from_json(train),
            spaces=Spaces.from_json(config["spaces"]),
            state_shapes=tuple(tuple(shape) for shape in config["state_shapes"]),
            session=Path(config["session"]),
            address=config["address"],
            run_dir=Path(config["run_dir"]),
            started_at=config["started_at"],
            shares_process=config["shares_process"],
            hostname=config["hostname"],
            is_at_head=config["is_at_head"],
            user_objects=config.get("user_objects"),
        )

    @property
    def elapsed_s(self) -> float:
        """Seconds of the run so far, including those before a resume; changes of the system clock have no effect."""
        return time.monotonic() - self.started_at

    @property
    def fallback(self) -> Fallback:
        """Writes to the run folder at the end of the run, or to another place if that is not possible."""
        return Fallback(self.run_dir, self.train.run.fallback_dir, self.session.name[-8:])


class Station:
    """A role's connection to the coordinator: receives `stop` and publishes progress and time per phase."""

    def __init__(self, context: Context) -> None:
        # Retry forever: if the coordinator has died, the fork server kills this process; if suspended, it will resume.
        self.world = Node.join(context.address, context.name, on_silence=lambda error: JOIN_S)
        self.stop_requested = False
        self.progress = self.env_steps = 0
        self.phases = dict.fromkeys(PHASES, 0.0)
        self.gauge = Gauge(context.session, context.name)
        self.gauge.begin(context.incarnation)
        records = context.train.run.timeline and context.is_at_head
        self.timeline = Timeline(context.run_dir, context.name, context.started_at) if records else None
        self._next_tick, self._has_begun = 0.0, False
        self.world.serve("stop", self._stop)
        self.gauge.show(0, self.phases, 0)  # calls are handled from the first tick on, when the role serves its own

    def _stop(self) -> None:
        self.stop_requested = True

    def tick(self, now: float) -> None:
        """Publishes progress and handles incoming calls, every TICK_S; returns quickly in between."""
        if now >= self._next_tick or (self.progress and not self._has_begun):  # publish the first progress immediately
            self._next_tick, self._has_begun = now + TICK_S, self.progress > 0
            self.gauge.show(self.progress, self.phases, self.env_steps)
            self.world.poll(0.0)

    def wait(self, timeout_s: float, descriptors: Sequence[int]) -> None:
        """Sleeps until a descriptor is readable, a call arrives, or `timeout_s` passes; counted as waiting.

        A role that waits for others is not hung, so waiting counts as progress.
        """
        start = time.perf_counter()
        watched = [*self.world.watched, *((descriptor, zmq.POLLIN) for descriptor in descriptors)]
        ready = zmq.zmq_poll(watched, math.ceil(1000 * timeout_s))
        if any(item not in descriptors for item, _ in ready):
            self.world.poll()
        self.waited(start)

    def waited(self, start: float) -> None:
        """Counts the time since `start` as waiting. For sleeps on anything other than a descriptor (see `wait`)."""
        now = time.perf_counter()
        self.phases["wait"] += now - start
        self.progress += 1
        self.tick(now)

    @contextlib.contextmanager
    def working(self, limit_s: float) -> Iterator[None]:
        """Counts a call that takes long as progress, for at most `limit_s`."""
        is_over = threading.Event()

        def show_progress() -> None:
            deadline = time.monotonic() + limit_s
            while not is_over.wait(TICK_S) and time.monotonic() < deadline:
                self.progress += 1
                self.gauge.show(self.progress, self.phases, self.env_steps)

        thread = threading.Thread(target=show_progress, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def report(self, function: str, *args: Any) -> None:
        self.world.post(COORDINATOR, function, *args)

    def close(self) -> None:
        """Publishes the final values and leaves: a short run may end before the first tick was due."""
        self.gauge.show(self.progress, self.phases, self.env_steps)
        if self.timeline is not None:
            self.timeline.close()
        self.world.close()
