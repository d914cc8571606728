"""What the processes of one run share beside the act board: when to go, how far each is, and what each measured.

Everything has its fixed size from the setting. Every word has one writer: the coordinator `phase`, the agent its row,
every observer its own. Needs no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from echelon.bench.rpc.setting import Raw, Setting
from echelon.layout import Leaf, place, size_of, views_of
from echelon.transport.act_board import WORDS_PER_LINE, ActLayout
from echelon.transport.futex import Word
from echelon.transport.segments import create_segment, open_segment

Array = np.ndarray[Any, Any]
FILE = "results"
JOIN, WARM_UP, MEASURE = 1, 2, 3  # phases: observers take their seats, ask unmeasured, ask measured


def layout_of(setting: Setting) -> ActLayout:
    """The act board of a run: one state per observer, one agent."""
    state = Leaf("observation", (setting.num_inputs,), np.dtype(np.float32))
    return ActLayout((state,), Leaf("action", (), np.dtype(np.int64)), num_clients=setting.num_observers)


class Results:
    """The segment as every process sees it; the coordinator makes it, before it starts the others."""

    def __init__(self, folder: Path, setting: Setting, *, create: bool = False) -> None:
        num_rounds = setting.num_observers * setting.num_measured  # the most: every request by itself
        fields = place(
            (
                ("phase", (1,), np.int32),
                ("agent", (WORDS_PER_LINE,), np.int64),
                ("observers", (setting.num_observers, WORDS_PER_LINE), np.int64),
                ("observer_latency_ns", (setting.num_observers, setting.num_measured), np.int64),
                ("round_latency_ns", (num_rounds,), np.int64),
                ("round_size", (num_rounds,), np.int32),
            )
        )
        self.setting, path = setting, folder / FILE
        views = views_of(fields, create_segment(path, size_of(fields)) if create else open_segment(path))
        self.phase = Word(views["phase"])
        self.agent = views["agent"]  # [the phase it is ready for, port it listens on, rounds measured]
        self.num_answered, self.start_ns, self.end_ns = (views["observers"][:, i] for i in range(3))
        self.observer_latency_ns = views["observer_latency_ns"]
        self.round_latency_ns, self.round_size = views["round_latency_ns"], views["round_size"]

    def may_begin(self, phase: int) -> bool:
        """Whether the agent says that everybody is ready for `phase`."""
        return bool(self.agent[0] >= phase)

    def begin(self, phase: int) -> None:
        """Lets everybody go on to `phase`, together."""
        self.phase.value = phase
        self.phase.wake()

    def wait_for(self, phase: int, timeout_s: float) -> bool:
        """Sleeps until `phase` has begun, at most `timeout_s`; whether it has."""
        seen = self.phase.value
        if seen < phase:
            self.phase.wait(seen, timeout_s)
        return self.phase.value >= phase

    @property
    def all_warm(self) -> bool:
        """Whether every observer has all answers of the warm-up."""
        return bool(self.num_answered.min() >= self.setting.num_warm_up)

    @property
    def all_ended(self) -> bool:
        return bool(self.end_ns.all())

    def raw(self, **extra: Any) -> Raw:
        """What was measured, once every observer has ended."""
        num_rounds = int(self.agent[2])
        return Raw(
            agent_latency_s=self.round_latency_ns[:num_rounds] * 1e-9,
            agent_batch=self.round_size[:num_rounds].copy(),
            observer_latency_s=self.observer_latency_ns * 1e-9,
            elapsed_s=float(self.end_ns.max() - self.start_ns.min()) * 1e-9,
            extra=extra,
        )
