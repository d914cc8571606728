"""Compares a run on two hosts with the same run on one, on the same cores: steps/s, processor time, bytes on the link.

    python benchmarks/hosts.py [PRESET ENV] [--pairs 4] [--seconds 15] [--loopback] [--mbit 1000]
        [-- --actors 2 --envs-per-actor 32]
    python benchmarks/hosts.py --acting [PRESET ENV] ...       # central with local acting, both on two hosts

The two hosts are network namespaces connected by a veth pair, limited to `--mbit` in each direction. Each run is
measured while it trains, and the compared runs alternate (A-B-B-A). This needs unshare, nsenter and ip, and a kernel
that allows users to create namespaces. With --loopback both hosts are this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEAD, OTHER = "10.9.8.1", "10.9.8.2"
SECRET = "a secret for two hosts of one benchmark"
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
WARM_UP_S, PATIENCE_S = 4.0, 120.0
Words = tuple[str, ...]


@dataclass(frozen=True)
class Reading:
    """A sample of a run."""

    at: float
    env_steps: int
    used_s: dict[str, float]  # processor time by role
    link_bytes: int


@dataclass(frozen=True)
class Case:
    """One of the two kinds of runs that are compared."""

    name: str
    acting: str
    num_hosts: int


@contextmanager
def two_hosts(mbit: int = 0) -> Iterator[tuple[Words, Words]]:
    """Yields the command prefixes that run a command on either host; `mbit` limits their link, 0 does not."""
    holders = [subprocess.Popen(["unshare", "-rn", "sleep", "3600"])]
    try:
        head = _entered(holders[0])
        _run(*head, "ip", "link", "add", "cable0", "type", "veth", "peer", "name", "cable1")
        holders.append(subprocess.Popen([*head, "unshare", "-n", "sleep", "3600"]))
        other = _entered(holders[1])
        _run(*head, "ip", "link", "set", "cable1", "netns", str(holders[1].pid))
        for words, address, device in ((head, HEAD, "cable0"), (other, OTHER, "cable1")):
            _run(*words, "ip", "addr", "add", f"{address}/24", "dev", device)
            _run(*words, "ip", "link", "set", device, "up")
            _run(*words, "ip", "link", "set", "lo", "up")
            if mbit:
                limit = ("rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms")
                _run(*words, "tc", "qdisc", "add", "dev", device, "root", "tbf", *limit)
        yield head, other
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def _entered(holder: subprocess.Popen[bytes]) -> Words:
    deadline = time.monotonic() + 10.0
    while Path(f"/proc/{holder.pid}/comm").read_text().strip() != "sleep":
        if time.monotonic() > deadline:
            raise SystemExit("namespaces cannot be created on this machine; use --loopback")
        time.sleep(0.01)
    return ("nsenter", "-t", str(holder.pid), "-U", "--preserve-credentials", "-n")


def _run(*words: str) -> None:
    subprocess.run(words, check=True, timeout=10.0)


@contextmanager
def loopback() -> Iterator[tuple[Words, Words]]:
    """Yields empty prefixes: both hosts are this machine."""
    yield (), ()


def measure(options: Sequence[str], hosts: tuple[Words, Words] | None, seconds: float) -> tuple[Reading, Reading]:
    """Returns two samples of a run, `seconds` apart."""
    folder = Path(tempfile.mkdtemp(prefix="echelon-hosts-"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ECHELON_SECRET": SECRET}
    echelon = (sys.executable, "-m", "echelon.cli.main")
    words: list[str] = [*(hosts[0] if hosts else ()), *echelon, "train", *options, f"--run-dir={folder}/run"]
    head = HEAD if hosts and hosts[0] else "127.0.0.1"
    if hosts:
        words += ["--engine=hosts", "--hosts=2", f"--hosts.address=tcp://{head}:7000"]
    started: dict[str, subprocess.Popen[str]] = {}
    with (folder / "output").open("w") as output:
        try:
            started["coordinator"] = subprocess.Popen(words, stdout=output, stderr=output, env=environment, text=True)
            if hosts:
                join = [*hosts[1], *echelon, "host", f"--join={head}:7000", "--name=other"]
                started["agent"] = subprocess.Popen(join, stdout=output, stderr=output, env=environment, text=True)
            deadline = time.monotonic() + PATIENCE_S
            while not _is_whole(folder):
                if time.monotonic() > deadline or started["coordinator"].poll() is not None:
                    raise SystemExit((folder / "output").read_text())
                time.sleep(0.1)
            time.sleep(WARM_UP_S)
            first = _read(folder, started, hosts)
            time.sleep(seconds)
            return first, _read(folder, started, hosts)
        finally:
            for process in started.values():
                process.send_signal(signal.SIGINT)
            for process in started.values():
                process.wait(PATIENCE_S)


def _is_whole(folder: Path) -> bool:
    """Returns whether every actor is running."""
    rows = _rows(folder)
    if not rows:
        return False
    config = json.loads((folder / "run" / "config.json").read_text())["config"]
    num_actors: int = config["actor"]["num_actors"]
    return len({name.split(".")[1] for name in rows[-1] if name.startswith("time.actor-")}) == num_actors


def _rows(folder: Path) -> list[dict[str, Any]]:
    try:
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if '"train"' in line]


def _read(folder: Path, started: dict[str, subprocess.Popen[str]], hosts: tuple[Words, Words] | None) -> Reading:
    used: dict[str, float] = defaultdict(float)
    for name, process in started.items():
        for pid in _family(process.pid):
            try:
                text = Path(f"/proc/{pid}/stat").read_text()
            except OSError:
                continue
            role = name if pid == process.pid else text.partition("(")[2].rpartition(")")[0].partition("-")[0]
            used[role] += sum(map(int, text.rpartition(")")[2].split()[11:13])) * TICK_S
    count = 0
    if hosts:
        device = "cable0" if hosts[0] else "lo"
        shown = subprocess.run([*hosts[0], "cat", "/proc/net/dev"], capture_output=True, text=True, timeout=10.0)
        counts = next(line for line in shown.stdout.splitlines() if line.strip().startswith(f"{device}:")).split()
        count = int(counts[1]) + (int(counts[9]) if hosts[0] else 0)  # the loopback counts each byte in both directions
    return Reading(time.monotonic(), _rows(folder)[-1]["env_steps"], dict(used), count)


def _family(pid: int) -> list[int]:
    """Returns a process and its descendants."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []
    return [pid, *(one for child in children for one in _family(child))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="*", default=["impala", "CartPole-v1"], metavar="PRESET ENV")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--loopback", action="store_true")
    parser.add_argument("--mbit", type=int, default=0, help="rate of the link in Mbit/s (default: not limited)")
    parser.add_argument("--acting", action="store_true", help="compare central with local acting, on two hosts")
    given = sys.argv[1:]
    own, more = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    arguments = parser.parse_args(own)
    more = more or ["--actors=2", "--envs-per-actor=32"]
    options = [*arguments.task, "--minutes=10", "--evaluation.episodes=0"]
    if arguments.acting:
        before, after = Case("local acting", "local", 2), Case("central acting", "central", 2)
    else:
        before, after = Case("1 host", "local", 1), Case("2 hosts", "local", 2)
    rates: dict[Case, list[float]] = {before: [], after: []}
    costs: dict[Case, list[float]] = {before: [], after: []}
    with loopback() if arguments.loopback else two_hosts(arguments.mbit) as hosts:
        for pair in range(arguments.pairs):
            for case in (before, after) if pair % 2 == 0 else (after, before):
                words = [*options, f"--acting={case.acting}", *more]
                first, last = measure(words, hosts if case.num_hosts == 2 else None, arguments.seconds)
                steps, wall_s = last.env_steps - first.env_steps, last.at - first.at
                used = {role: last.used_s[role] - first.used_s.get(role, 0.0) for role in last.used_s}
                rates[case].append(steps / wall_s)
                costs[case].append(1e6 * sum(used.values()) / steps)
                shares = ", ".join(f"{r} {1e6 * s / steps:.2f}" for r, s in sorted(used.items()) if s > 0)
                link = (last.link_bytes - first.link_bytes) / wall_s / 1e6
                print(
                    f"{case.name}: {rates[case][-1]:>9,.0f} steps/s, {costs[case][-1]:.2f} us of processor time per "
                    f"step ({shares})" + (f", {link:.1f} MB/s on the link" if case.num_hosts > 1 else ""),
                    flush=True,
                )
    paired = [two / one for one, two in zip(rates[before], rates[after], strict=True)]
    paid = [one / two for one, two in zip(costs[before], costs[after], strict=True)]
    for what, ratios in (
        (f"steps/s, {after.name} / {before.name}", paired),
        (f"processor time, {before.name} / {after.name}", paid),
    ):
        print(f"{what}: median {statistics.median(ratios):.3f} of {[round(ratio, 3) for ratio in ratios]}")


if __name__ == "__main__":
    main()
