"""The coordinator's loop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np

from echelon.engines.process import Exit, OneHost, ProcessSpec
from echelon.presets import preset
from echelon.roles.context import Context
from echelon.roles.coordinator import LOOP_S, Coordinator
from echelon.schema import Spaces

TURNS = 500


class BusyEngine(OneHost):
    """An engine to which a message comes all the time; after TURNS of them the learner has finished.

    The first messages are `rows`, those after them have no effect.
    """

    server_pid = None

    def __init__(self, world: Any, rows: Sequence[dict[str, Any]] = ()) -> None:
        self.world, self.rows, self.turns, self.looks = world, list(rows), 0, 0

    def is_here(self, name: str) -> bool:
        return False

    def start(self, spec: ProcessSpec) -> None:
        pass

    def run(self, world: Any, timeout_s: float) -> None:
        self.turns += 1
        if self.rows:
            self.world.services["train"](self.rows.pop(0))
        if self.turns == TURNS:
            self.world.services["finished"]({"reason": "stopped"})

    def exits(self) -> list[Exit]:
        return []

    def pid(self, name: str) -> int:
        self.looks += name == "learner"
        return 7

    def signal(self, name: str, number: int) -> None:
        pass

    def close(self, timeout_s: float) -> None:
        pass


def make_coordinator(folder: Path, *rows: dict[str, Any]) -> Coordinator:
    """A coordinator whose learner reports `rows`, and of roles that never begin."""
    services: dict[str, Any] = {}
    world: Any = SimpleNamespace(
        services=services, serve=services.__setitem__, members={"learner"}, drain=lambda: None, post=lambda *_: None
    )
    config = preset("impala", "CartPole-v1")
    spaces = Spaces(gym.spaces.Box(-1.0, 1.0, (4,), np.float32), gym.spaces.Discrete(2))
    context = Context(
        name="coordinator", index=0, incarnation=0, generation=0, train=config, spaces=spaces, state_shapes=(),
        session=folder, address="", run_dir=folder, started_at=time.monotonic(),
    )  # fmt: skip
    engine: Any = BusyEngine(world, rows)
    console: Any = SimpleNamespace(message=lambda text: None, update=lambda status: None, is_unread=False)
    metrics: Any = SimpleNamespace(write=lambda row: None, error=None)
    interrupts: Any = SimpleNamespace(came=False)
    return Coordinator(context, engine, world, console, metrics, interrupts)


def test_a_message_does_not_cost_a_look_at_every_role(tmp_path: Path) -> None:
    coordinator = make_coordinator(tmp_path)
    engine: Any = coordinator.engine
    began = time.monotonic()
    coordinator.run()
    most = (time.monotonic() - began) / LOOP_S + 2
    assert engine.turns == TURNS and 1 <= engine.looks <= most


def test_a_first_update_before_every_role_has_begun_is_recorded_once(tmp_path: Path) -> None:
    rows = [{"env_steps": 100 * updates, "updates": updates} for updates in range(4)]
    coordinator = make_coordinator(tmp_path, *rows)
    coordinator.run()
    assert coordinator.supervisor.starting(), "no role has begun"
    assert list(coordinator.stages.seconds) == ["roles", "first update"]
