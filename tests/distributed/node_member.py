"""A member process for the tests: joins, serves a few functions, polls until it is stopped or its starter is gone."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from echelon.world.node import Node


def main(address: str, name: str, starter: int) -> None:
    world = Node.join(address, name, timeout_s=60)
    seen: list[int] = []
    stop: list[bool] = []

    def fail(text: str) -> None:
        raise ValueError(text)

    def stop_with(to: str, word: str) -> None:
        world.post(to, "farewell", word)
        stop.append(True)

    lost: list[str] = []
    world.on_error = lost.append

    def relay(to: str, function: str, *args: Any) -> Any:
        return world.call(to, function, *args, timeout_s=60)

    world.serve("echo", lambda *args: args)
    world.serve("pid", os.getpid)
    world.serve("note", seen.append)
    world.serve("seen", lambda: np.array(seen))
    world.serve("dropped", lambda: world.dropped)
    world.serve("members", lambda: world.members)
    world.serve("lost", lambda: lost)
    world.serve("post", world.post)
    world.serve("fail", fail)
    world.serve("unsendable", lambda: {1, 2})
    world.serve("relay", relay)
    world.serve("stop", stop_with)
    while not stop and os.path.exists(f"/proc/{starter}"):
        world.poll(0.2)
    world.close()
