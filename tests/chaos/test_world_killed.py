"""A member of a world is killed or suspended while others wait for it in every way."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import world_victims

import warm
from running import DEADLINE_S, MARK, TESTS, processes_marked, wait_until

Told = list[dict[str, tuple[str, str, float]]]  # of each observer: scenario -> kind, text, seconds
SCENARIOS = {scenario.name: scenario for scenario in world_victims.SCENARIOS}


@contextmanager
def running(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Runs a script of this folder; checks that it leaves no process and nothing in shared memory."""
    mark = secrets.token_hex(8)
    path = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", MARK: mark}
    command = [sys.executable, "-W", "error", str(TESTS / "chaos" / script), *arguments]
    process = warm.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
        wait_until(lambda: not processes_marked(mark), "no process was left")
        assert not list(Path("/dev/shm").glob(f"echelon-{process.pid}-*"))
    finally:
        for left in processes_marked(mark):
            with suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(left, signal.SIGKILL)
        process.communicate()


@pytest.fixture(scope="module")
def told() -> Told:
    with running("world_victims.py") as process:
        out, err = process.communicate(timeout=3 * DEADLINE_S)
        assert process.returncode == 0 and err == "", err
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.parametrize("name", SCENARIOS)
def test_who_waits_is_told_whom_it_waited_for(told: Told, name: str) -> None:
    scenario = SCENARIOS[name]
    victim = f"victim-{2 + list(SCENARIOS).index(name)}"
    outcomes = [observer[name] for observer in told]
    assert len(outcomes) == 2
    if scenario.alone:
        outcomes = [outcome for outcome in outcomes if outcome[0] != "nothing"]
        assert len(outcomes) == 1
    for kind, text, waited_s in outcomes:
        assert (
            waited_s < world_victims.NOTICED_S
        )  # for operations that must notice a death; those that must time out have a shorter one
        if scenario.signal == signal.SIGSTOP:
            assert kind == "TransportTimeout" and victim in text
        elif name == "a call through another":
            assert kind == "RpcException" and "failed with PeerLost: " in text and f"'{victim}'" in text, text
        else:
            assert kind == "PeerLost" and f"'{victim}'" in text, text


def test_when_the_host_dies_everybody_who_waits_is_told() -> None:
    with running("world_ends.py", "host") as process:
        out, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0 and err == "", err
    told = sorted(json.loads(line) for line in out.splitlines())
    assert [name for name, _, _ in told] == ["m1", "m2", "m3"]
    for _, kind, text in told:
        assert kind == "PeerLost" and "'m0'" in text, text


@pytest.mark.parametrize(("how", "why"), [("killed", "has ended"), ("fails", "it ended with ValueError: it broke")])
def test_when_the_host_is_gone_buffers_and_servers_do_not_go_on_alone(how: str, why: str) -> None:
    """Live members do not declare each other lost."""
    with running("world_alone.py", how) as process:
        out, err = process.communicate(timeout=3 * DEADLINE_S)
        assert process.returncode == 0, err
    told = sorted(json.loads(line) for line in out.splitlines())
    assert [name for name, _, _ in told] == ["m1", "m2", "m3"]
    for _, errors, lost in told:
        for operation, (kind, text) in errors.items():
            assert kind == "PeerLost" and "'m0'" in text and why in text, (operation, text)
        assert set(lost) <= {"m0"}, lost


def test_nothing_is_left_of_a_launch_whose_launcher_is_killed() -> None:
    with running("world_ends.py", "launcher") as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(3)]
        assert len(set(pids)) == 3 and process.poll() is None
        process.kill()
