"""One suite over every transport of a world: lines in shared memory, TCP on the loopback, TCP between two hosts."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from world_suite import PROGRAMS

import warm
from hosts import NEAR, made_hosts
from running import DEADLINE_S, MARK, TESTS, processes_marked, wait_until

SECRET = "a secret for the tests of the world"
MEMBER = TESTS / "distributed" / "world_member.py"
MEMORY_OF_ITS_OWN = ("sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh")

Words = tuple[str, ...]
Outcome = dict[int, dict[str, str]]  # rank -> program -> how it failed


def start(words: Words, ranks: str, size: int, address: str, secret: str | None) -> subprocess.Popen[str]:
    """Starts the members `ranks`, with `words` before their command."""
    environment = {key: value for key, value in os.environ.items() if key != "ECHELON_SECRET"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)]), "OMP_NUM_THREADS": "1"}
    environment |= {MARK: f"world-{os.getpid()}"} | ({"ECHELON_SECRET": secret} if secret else {})
    command = [*words, sys.executable, "-W", "error", str(MEMBER), ranks, str(size), address]
    return warm.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@contextmanager
def started(members: Sequence[subprocess.Popen[str]]) -> Iterator[None]:
    """Ends all of the members at the end of the block."""
    try:
        yield
    finally:
        for pid in processes_marked(f"world-{os.getpid()}"):  # a member, and the command that runs it on its host
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for member in members:
            member.communicate()
    wait_until(lambda: not processes_marked(f"world-{os.getpid()}"), "no process was left")


def outcome_of(hosts: dict[str, Words], address: str = "", secret: str | None = None) -> Outcome:
    """Runs the suite in a world with the ranks `0,1` on one host and so on; checks that nothing is left behind."""
    size = len(",".join(hosts).split(","))
    members = [start(words, ranks, size, address, secret) for ranks, words in hosts.items()]
    with started(members):
        told = [member.communicate(timeout=DEADLINE_S) for member in members]
        for member, (out, err) in zip(members, told, strict=True):
            assert member.returncode == 0 and err == "", (out, err)
    lines = [json.loads(line) for out, _ in told for line in out.splitlines()]
    for pid in [*(member.pid for member in members), *(pid for _, pid, _ in lines)]:
        assert not list(Path("/dev/shm").glob(f"echelon-{pid}-*"))
    return {rank: failures for rank, _, failures in lines}


def free_port() -> int:
    """Returns a port that is free, and that no socket gets which takes any free port: those are larger."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", random.randrange(20_000, 30_000)))
            return int(probe.getsockname()[1])


def over_lines() -> Outcome:
    return outcome_of({"0,1,2": ()})


def over_loopback() -> Outcome:
    """The third member shares no memory with the others."""
    if shutil.which("unshare") is None:
        pytest.skip("a process without the others' shared memory needs unshare")
    apart = ("unshare", "-rm", *MEMORY_OF_ITS_OWN)
    tried = subprocess.run([*apart, "true"], capture_output=True, text=True, timeout=DEADLINE_S)
    if tried.returncode != 0:
        pytest.skip(f"a process without the others' shared memory cannot be made here: {tried.stderr.strip()}")
    return outcome_of({"0,1": (), "2": apart}, f"tcp://127.0.0.1:{free_port()}", SECRET)


def over_two_hosts() -> Outcome:
    """Two members on one host, the third on another one."""
    with made_hosts() as (near, far):
        elsewhere = (*far, "unshare", "-m", *MEMORY_OF_ITS_OWN)
        return outcome_of({"0,1": near, "2": elsewhere}, f"tcp://{NEAR}:{free_port()}", SECRET)


def over_one_memory() -> Outcome:
    """The third member shares the memory of the others, but not their network, like containers of one host."""
    with made_hosts() as (near, far):
        return outcome_of({"0,1": near, "2": far}, f"tcp://{NEAR}:{free_port()}", SECRET)


TRANSPORTS: dict[str, Callable[[], Outcome]] = {
    "lines": over_lines,
    "loopback": over_loopback,
    "two-hosts": over_two_hosts,
    "one-memory": over_one_memory,
}


@pytest.fixture(scope="module", params=TRANSPORTS)
def outcome(request: pytest.FixtureRequest) -> Outcome:
    return TRANSPORTS[request.param]()


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_program_runs(outcome: Outcome, program: str) -> None:
    assert {rank: failures.get(program, "") for rank, failures in outcome.items()} == {0: "", 1: "", 2: ""}


def test_a_member_with_another_secret_or_none_is_refused_in_one_line() -> None:
    """The host waits; the others have a wrong secret and none."""
    with made_hosts() as (near, far):
        address = f"tcp://{NEAR}:{free_port()}"
        secrets = {"0": SECRET, "1": "quite another secret, as it happens", "2": None}
        members = {ranks: start(near if ranks == "0" else far, ranks, 3, address, secrets[ranks]) for ranks in secrets}
        with started(list(members.values())):
            for ranks, words in {
                "1": "errors.Refused: the world at {} does not admit 'm1'",
                "2": "errors.ConfigError: {} is not on the loopback",
            }.items():
                _, err = members[ranks].communicate(timeout=DEADLINE_S)
                said = err.splitlines()[-1]
                assert words.format(address) in said and "Set ECHELON_SECRET to the same value" in said, err
            assert members["0"].poll() is None
