"""The world with real processes: calls, posts, deaths, former lives, hostile frames, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq

import echelon
from echelon.errors import ConfigError, PeerLost, Refused, TransportTimeout
from echelon.transport.codec import encode
from echelon.world.world import RemoteError, World

MEMBER = Path(__file__).with_name("world_member.py")
PATIENCE_S = 60.0  # a bound on what should take milliseconds, on a machine that may be busy

Start = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture(params=["ipc", "tcp"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    address = f"ipc://{tmp_path}/host" if request.param == "ipc" else "tcp://127.0.0.1:0"
    with World.host(address) as world:
        yield world


@pytest.fixture
def start(host: World) -> Iterator[Start]:
    """Starts a member in a process of its own and waits until it has joined."""
    children: list[subprocess.Popen[bytes]] = []
    source = str(Path(next(iter(echelon.__path__))).parent)

    def start_member(name: str) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            [sys.executable, str(MEMBER), host.address, name],
            env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        )
        children.append(child)
        wait_for(host, lambda: (seen := host.last_progress(name)) is not None and seen.pid == child.pid)
        return child

    yield start_member
    for child in children:
        child.kill()
        child.wait()


def wait_for(world: World, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        world.poll(0.05)


def ask(world: World, to: str, function: str, *args: Any) -> Any:
    return world.call(to, function, *args, timeout_s=PATIENCE_S)


def test_values_and_tensors_travel_both_ways(host: World, start: Start) -> None:
    start("a")
    weights = {"w": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "step": np.int64(3)}
    image = np.random.default_rng(0).integers(0, 255, (64, 84, 84), dtype=np.uint8)
    back_weights, back_image, rest = ask(host, "a", "echo", weights, image, (None, [1.5, "x"]))
    assert torch.equal(back_weights["w"], weights["w"]) and back_weights["step"] == 3
    assert np.array_equal(back_image, image) and rest == (None, [1.5, "x"])
    assert ask(host, "a", "members") == host.members == ["a", "coordinator"]


def test_ten_thousand_posts_arrive_in_order(host: World, start: Start) -> None:
    start("a")
    for i in range(10_000):
        host.post("a", "note", i)
    assert np.array_equal(ask(host, "a", "seen"), np.arange(10_000))
    assert host.dropped == 0


def test_posts_beyond_the_queue_are_dropped_and_counted(host: World, start: Start) -> None:
    child = start("a")
    child.send_signal(signal.SIGSTOP)
    block = np.zeros(10_000, np.uint8)
    for _ in range(60_000):
        host.post("a", "echo", block)
        if host.dropped:
            break
    assert host.dropped == 1
    child.send_signal(signal.SIGCONT)
    host.post("nobody", "note", 1)
    assert host.dropped == 2


def test_a_remote_error_carries_its_traceback(host: World, start: Start) -> None:
    start("a")
    with pytest.raises(RemoteError, match="it broke") as caught:
        ask(host, "a", "fail", "it broke")
    assert caught.value.kind == "ValueError" and "in fail" in caught.value.remote_traceback
    assert "fail() in 'a'" in str(caught.value)
    with pytest.raises(RemoteError, match="builtins.set"):
        ask(host, "a", "unsendable")
    with pytest.raises(Refused, match="serves no function 'nothing_like_it'; it serves .*echo"):
        ask(host, "a", "nothing_like_it")
    assert ask(host, "a", "echo", 1) == (1,)


def test_a_failed_post_reaches_on_error(host: World, start: Start) -> None:
    start("a")
    errors: list[str] = []
    host.on_error = errors.append
    host.serve("divide", lambda a, b: a / b)
    ask(host, "a", "relay", "coordinator", "divide", 1, 1)
    with World.join(host.address, "b", timeout_s=PATIENCE_S) if False else _none():
        pass
    assert errors == []
