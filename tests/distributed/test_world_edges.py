"""Plain processes that leave a world without `stop`, and the errors of a member that waits for them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import world_edges

import warm
from running import DEADLINE_S, MARK, TESTS

BROKE = "it ended with ValueError: it broke"
WORDS = {
    "exits in a block": (0, "WorldStopped", "'m0' called exit(0)"),
    "raises SystemExit in a block": (0, "WorldStopped", "'m1' called exit(0)"),
    "exits": (0, "PeerLost", "it left"),  # a plain process cannot distinguish that from the end of its script
    "ends the world": (0, "WorldStopped", "it is solved"),
    "raises": (1, "PeerLost", BROKE),
    "raises in a block": (1, "PeerLost", BROKE),
    "dies while it connects": (-signal.SIGKILL, "PeerLost", "'m1' is gone: its process"),
}


@pytest.mark.xdist_group("world_edges")  # processes of one parent and one script meet: one world at a time
@pytest.mark.parametrize("how", WORDS)
def test_who_waits_is_told_how_the_other_went(how: str) -> None:
    """This includes the host: if it fails, no member waits for the 60 s of its timeout."""
    path = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", MARK: "edges"}
    command = [sys.executable, "-W", "error", world_edges.__file__]
    members = [
        warm.Popen([*command, str(rank), how], env=environment, stdout=subprocess.PIPE, text=True) for rank in range(2)
    ]
    try:
        told = [member.communicate(timeout=DEADLINE_S)[0] for member in members]
    finally:
        for member in members:
            member.kill()
            member.wait()
    code, kind, words = WORDS[how]
    assert members[world_edges.WHO[how]].returncode == code
    error = json.loads(told[1 - world_edges.WHO[how]])
    assert error[0] == kind and words in error[1], error
