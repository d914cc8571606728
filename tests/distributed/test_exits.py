"""Exits of processes: reported after what each process sent last, and then nobody waits for it."""

from __future__ import annotations

import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from echelon.engines.local import LocalEngine
from echelon.engines.process import Exit, ProcessSpec
from echelon.errors import PeerLost
from echelon.world.exits import take_exits
from echelon.world.node import Node
from running import DEADLINE_S

NAMES = ["0", "1", "2", "3"]
NUM_WORDS = 100


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Node]:
    with Node.host(f"ipc://{tmp_path}/host") as host:
        yield host


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[LocalEngine]:
    engine = LocalEngine(str(tmp_path / "session"), preload=["echelon.world.node"])
    yield engine
    engine.close(0.0)


def start(engine: LocalEngine, host: Node, *names: str) -> None:
    """Starts processes, and waits until they have joined."""
    for name in names:
        config = {"address": host.address, "name": name, "num_words": NUM_WORDS}
        engine.start(ProcessSpec(name, "engine_roles:Speaking", config))
    while len(host.members) < 1 + len(names):
        host.poll(DEADLINE_S)


def next_exits(engine: LocalEngine, host: Node) -> list[Exit]:
    """The exits that are reported next; meanwhile the host serves nothing."""
    exits: list[Exit] = []
    while not exits:
        assert select.select(engine.descriptors, [], [], DEADLINE_S)[0]
        exits = take_exits(engine, host)
    return exits


def test_what_a_process_sent_last_is_served_before_its_exit_is_reported(host: Node, engine: LocalEngine) -> None:
    heard: dict[str, list[int]] = {name: [] for name in NAMES}
    host.serve("note", lambda name, number, _: heard[name].append(number))
    start(engine, host, *NAMES)
    for name in NAMES:
        host.post(name, "speak")
    left: list[str] = []
    while len(left) < len(NAMES):
        for gone in next_exits(engine, host):
            left.append(gone.name)
            assert heard[gone.name] == list(range(NUM_WORDS))
            assert gone.name not in host.members
    assert sorted(left) == NAMES


def test_nobody_waits_for_a_process_that_was_killed(host: Node, engine: LocalEngine) -> None:
    start(engine, host, "victim")
    engine.signal("victim", signal.SIGKILL)
    assert [gone.name for gone in next_exits(engine, host)] == ["victim"]
    with pytest.raises(PeerLost, match="'victim', which is gone: was ended by SIGKILL"):
        host.call("victim", "speak")
