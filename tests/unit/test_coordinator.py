"""The coordinator's loop."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np

from echelon.config import replace
from echelon.engines.process import Exit, OneHost, ProcessSpec
from echelon.presets import preset
from echelon.roles.context import Context
from echelon.roles.coordinator import LOOP_S, Coordinator
from echelon.schema import Spaces

TURNS = 500


class BusyEngine(OneHost):
    """An engine to which a message comes all the time; after TURNS of them the learner has finished."""

    server_pid = None

    def __init__(self, world: Any) -> None:
        self.world, self.turns, self.looks = world, 0, 0

    def is_here(self, name: str) -> bool:
        return False

    def start(self, spec: ProcessSpec) -> None:
        pass

    def run(self, world: Any, timeout_s: float) -> None:
        self.turns += 1
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


def test_a_message_does_not_cost_a_look_at_every_role(tmp_path: Path) -> None:
    services: dict[str, Any] = {}
    world: Any = SimpleNamespace(
        services=services, serve=services.__setitem__, members={"learner"}, drain=lambda: None, post=lambda *_: None
    )
    config = preset("impala", "CartPole-v1")
    config = replace(config, evaluation=replace(config.evaluation, interval_s=0.0))
    spaces = Spaces(gym.spaces.Box(-1.0, 1.0, (4,), np.float32), gym.spaces.Discrete(2))
    context = Context(
        name="coordinator", index=0, incarnation=0, generation=0, train=config, spaces=spaces, state_shapes=(),
        session=tmp_path, address="", run_dir=tmp_path, started_at=time.monotonic(),
    )  # fmt: skip
    engine: Any = BusyEngine(world)
    console: Any = SimpleNamespace(message=lambda text: None, update=lambda status: None, is_unread=False)
    interrupts: Any = SimpleNamespace(came=False)
    began = time.monotonic()
    Coordinator(context, engine, world, console, SimpleNamespace(), interrupts).run()  # type: ignore[arg-type]
    most = (time.monotonic() - began) / LOOP_S + 2
    assert engine.turns == TURNS and 1 <= engine.looks <= most
