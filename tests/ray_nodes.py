"""A Ray cluster of several hosts on one machine: each node in a network namespace, with token authentication."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hosts import FAR, NEAR, THIRD, Words, kill_host, made_hosts, processes_of
from running import TESTS, wait_until

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'echelon[ray]'")
ADDRESS = f"{NEAR}:6379"
START_S = 120.0  # a node needs 4 s on an idle machine
SMALL = ("--num-cpus=1", "--object-store-memory=80000000", "--disable-usage-stats", "--block")
OLD_DEFAULTS = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}  # of Ray 2.54


class RayNodes:
    """The nodes, by number; the first is Ray's head, and is where a test starts its run."""

    def __init__(self, hosts: list[Words], folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.only_near = folder / "near"  # a folder of the first node; others see an empty one
        self.only_near.mkdir()
        self.networks = [os.readlink(f"/proc/{words[2]}/ns/net") for words in hosts]
        self.started: list[subprocess.Popen[bytes]] = []
        self.token = secrets.token_hex(32)

    @property
    def environment(self) -> dict[str, str]:
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}

    def start(self, *numbers: int) -> None:
        """Starts nodes at the same time; returns when Ray says that they run."""
        for number in numbers:
            self._start(number)
        for number in numbers:
            wait_until(lambda n=number: "Ray runtime started" in self.text(n), f"{number} runs", START_S)  # type: ignore[misc]

    def _start(self, number: int) -> None:
        where = (f"--address={ADDRESS}",) if number else ("--head", "--port=6379", "--include-dashboard=false")
        path = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
        words = [
            *where,
            f"--node-ip-address={(NEAR, FAR, THIRD)[number]}",
            f"--temp-dir={self.folder}/{number}",
            *SMALL,
        ]
        hide = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(self.only_near))
        before = (*self.hosts[number], *(hide if number else ()))
        with (self.folder / f"{number}.txt").open("w") as file:
            process = subprocess.Popen(
                [*before, sys.executable, "-m", "ray.scripts.scripts", "start", *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                env={**os.environ, **self.environment, **OLD_DEFAULTS, "PYTHONPATH": path},
            )
        self.started.append(process)

    def text(self, number: int) -> str:
        return (self.folder / f"{number}.txt").read_text()

    def agents(self, number: int) -> list[int]:
        """The processes of Echelon's actor on a node. Ray overwrites environments, so they have no mark."""
        return [pid for pid in processes_of(self.hosts[number]) if _read(pid, "cmdline").startswith("ray::OnNode")]

    def started_by_echelon(self, number: int) -> list[int]:
        """The fork servers on a node, and what they started."""
        return [pid for pid in processes_of(self.hosts[number]) if "echelon" in _read(pid, "cmdline")]

    def close(self) -> None:
        for number in range(len(self.hosts)):
            kill_host(self.hosts[number])
        for process in self.started:
            process.wait()


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:  # it ended meanwhile
        return ""


@contextmanager
def made_cluster(num: int = 3) -> Iterator[RayNodes]:
    with made_hosts(num) as hosts:
        folder = Path(tempfile.mkdtemp(prefix="r-"))  # short: Ray makes sockets in it
        nodes = RayNodes(hosts, folder)
        try:
            nodes.start(*range(num))  # others wait for the head
            yield nodes
        finally:
            nodes.close()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def nodes(cluster: RayNodes, monkeypatch: pytest.MonkeyPatch) -> RayNodes:
    """The cluster of a module of tests, whose commands know its token."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    return cluster
