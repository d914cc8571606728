"""A learner and its workers as processes: workers join, leave and die, and every episode counts once."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import warm
from echelon.runs.metrics import read_rows
from echelon.version import __version__
from hosts import NEAR, as_another_host, with_version
from running import DEADLINE_S, MARK, TESTS, Running, Runs, processes_marked, wait_until

FIELDS = {"network.hidden": 16, "replay.min-size": 50, "batch-size": 16, "buffer-size": 20_000, "update-steps": 4}
FIELDS |= {"eval-freq": 0.25, "run.checkpoint-interval-s": 0.2, "learner.threads": 1}


class Worker:
    """`echelon worker` in the background."""

    def __init__(
        self, output: Path, address: str, *arguments: str, before: tuple[str, ...] = (), **environment: str
    ) -> None:
        """`before` are words to put before the command."""
        path = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS), os.environ.get("PYTHONPATH", "")])
        self.output = output
        with output.open("w") as file:
            self.process = warm.Popen(
                [*before, sys.executable, "-m", "echelon.cli.main", "worker", "--learner", address, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
            )

    def text(self) -> str:
        return self.output.read_text()

    def code(self) -> int:
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the worker did not leave:\n{self.text()}") from None

    def episodes(self) -> int:
        """Ends a worker that waits for a stopped run to be resumed; returns the number of episodes it sent."""
        wait_until(lambda: "was stopped; retrying until it is resumed" in self.text(), "the worker waits")
        self.process.terminate()
        assert self.code() == 143, self.text()
        return self.num_sent("leaving")

    def lost_and_found(self) -> tuple[int, int]:
        """Returns how often it reported that the learner does not reply, and that it is back."""
        text = self.text()
        return text.count("Retrying"), text.count("is back")

    def num_sent(self, why: str) -> int:
        found = re.search(rf"{why}; (\d+) episodes sent", self.text())
        assert found, self.text()
        return int(found[1])


class Site:
    """Starts a learner and workers; ends all of them with the test."""

    def __init__(self, runs: Runs) -> None:
        self.runs, self.workers = runs, list[Worker]()

    def learner(
        self, preset: str = "dqn", *, before: tuple[str, ...] = (), flags: tuple[str, ...] = (), **options: Any
    ) -> Running:
        """Starts a learner on CartPole-v1; `before` are words to put before the command, `flags` after it."""
        options = {"address": "127.0.0.1:0", **FIELDS, **options}
        words = [*flags, *(f"--{name}={value}" for name, value in options.items())]
        folder, shm = self.runs.folder, self.runs.shm_dir
        places = [f"--run-dir={folder / 'run'}", f"--shm-dir={shm}"]
        run = Running(folder / "run", shm, "learner", preset, "CartPole-v1", *places, *words, before=before)
        self.runs.started.append(run)
        return run

    def address(self, run: Running) -> str:
        found = run.until(lambda: re.search(r"workers connect to (\S+)", run.text()), "the gateway listens")
        return found[1]

    def worker(self, address: str, *arguments: str, **options: Any) -> Worker:
        output = self.runs.folder / f"worker-{len(self.workers)}.txt"
        self.workers.append(Worker(output, address, *arguments, **options))
        return self.workers[-1]

    def close(self) -> None:
        for worker in self.workers:
            worker.process.kill()
            worker.process.wait()


@pytest.fixture
def site(runs: Runs) -> Iterator[Site]:
    site = Site(runs)
    yield site
    site.close()


def episodes_of(run: Running) -> int:
    rows = run.rows()
    return int(rows[-1]["learned_episodes"]) if rows else 0


def until_episodes(run: Running, more: int) -> None:
    goal = episodes_of(run) + more
    run.until(lambda: episodes_of(run) >= goal, f"{goal} episodes are learned from")


def finish(run: Running, since: int = 0) -> dict[str, Any]:
    """Ends a run as a user does, and checks its metrics from row `since` on."""
    run.process.send_signal(signal.SIGINT)
    assert run.code() == 130, run.text()
    run.assert_nothing_left()
    rows = run.rows()[since:]
    for name in ("env_steps", "episodes", "version"):
        values = [row[name] for row in rows]
        assert values == sorted(values), f"{name} never decreases"
    return run.summary()


def evaluations_of(run: Running) -> list[dict[str, Any]]:
    return [row for row in read_rows(run.run_dir) if row["kind"] == "evaluation"]


def check_counts(run: Running, summary: dict[str, Any], num_sent: int) -> None:
    """Nothing is lost and nothing counted twice."""
    workers = summary["workers"]
    assert workers["episodes"] == num_sent
    assert workers["evaluations"] <= int(0.25 * num_sent) <= workers["evaluations"] + 3, "except those in flight"
    rows = evaluations_of(run)
    assert len(rows) == workers["evaluations"]
    newest = [row["return_mean"] for row in rows[-10:]]
    assert summary["evaluation_return"] == pytest.approx(sum(newest) / len(newest))
    learned = workers["interactions"] - sum(row["length_mean"] for row in rows)
    assert workers["transitions"] == learned, "every step of an episode starts one"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_workers_come_and_go_and_one_is_killed(site: Site) -> None:
    """One worker waits for the learner to start, one sends three episodes, one dies in the middle. Then the whole run
    is killed, and the first worker sends its unsent steps to the resumed run. That is stopped, and resumed to its end.
    """
    port = free_port()
    early = site.worker(f"127.0.0.1:{port}", "--envs", "3")
    wait_until(lambda: "Retrying" in early.text(), "the early worker reports that there is no learner")
    run = site.learner(address=f"127.0.0.1:{port}", episodes=10**6)
    few = site.worker(f"127.0.0.1:{port}", "--episodes", "3")
    doomed = site.worker(f"127.0.0.1:{port}")
    assert few.code() == 0, few.text()
    assert few.num_sent("leaving") == 3
    wait_until(lambda: "CartPole-v1, dqn" in early.text(), "the early worker found the learner")
    assert "is back" in early.text()
    run.until(lambda: re.search(r"worker \w+ left", run.text()), "one has left")
    run.until(lambda: run.text().count(" joined (") >= 3, "all three joined")
    run.until(lambda: run.rows() and run.rows()[-1].get("workers.workers") == 2, "two are left")
    doomed.process.kill()
    until_episodes(run, 2)
    run.until(lambda: list((run.run_dir / "checkpoints").glob("step_*")), "there is a checkpoint")
    num_lost, _ = early.lost_and_found()
    run.process.kill()
    run.process.wait()
    wait_until(lambda: early.lost_and_found()[0] > num_lost, "the worker misses the learner")
    wait_until(lambda: not processes_marked(run.mark), "no other checkpoint is written")
    seen, scored = len(run.rows()), len(evaluations_of(run))
    restored = max(int(found.name.removeprefix("step_")) for found in (run.run_dir / "checkpoints").glob("step_*"))
    again = Running(run.run_dir, run.shm_dir, "resume", str(run.run_dir))
    site.runs.started.append(again)
    wait_until(lambda: len(set(early.lost_and_found())) == 1, "the worker found the learner")
    until_episodes(again, 3)
    summary = finish(again, since=seen)
    scores = evaluations_of(again)[scored:]
    wait_until(lambda: "was stopped; retrying until it is resumed" in early.text(), "the worker waits")
    last = Running(run.run_dir, run.shm_dir, "resume", str(run.run_dir), f"--episodes={episodes_of(again) + 3}")
    site.runs.started.append(last)
    assert last.code() == 0, last.text()
    assert early.code() == 0, early.text()
    assert early.num_sent("the run is over") >= summary["workers"]["episodes"] > 0
    steps = summary["workers"]["interactions"] - sum(row["length_mean"] for row in scores)
    assert restored < summary["env_steps"] <= restored + steps, "earlier episodes count, evaluations do not"


@pytest.mark.parametrize(("role", "preset"), [("gateway", "apex-dqn"), ("learner", "dqn")])
def test_nothing_is_lost_or_doubled_when_a_process_is_killed(site: Site, role: str, preset: str) -> None:
    run = site.learner(preset, episodes=10**6, **{"replay.n-step": 1})
    address = site.address(run)
    workers = [site.worker(address, "--envs", envs, "--buffer-size", "20") for envs in ("1", "2")]
    run.until(lambda: list((run.run_dir / "checkpoints").glob("step_*")), "there is a checkpoint")
    for _ in range(3):
        until_episodes(run, 3)
        pid = run.kill(role)
        assert run.pid(role, besides=pid)
    until_episodes(run, 3)
    summary = finish(run)
    assert summary["restarts"] == 3
    check_counts(run, summary, sum(worker.episodes() for worker in workers))


def test_strangers_are_refused_and_the_rest_goes_on(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another secret, none at all, other spaces, and another version."""
    monkeypatch.setenv("ECHELON_SECRET", secrets.token_hex(16))
    run = site.learner(episodes=10**6)
    address = site.address(run)
    wrong = site.worker(address, ECHELON_SECRET=secrets.token_hex(16))
    none = site.worker(address, ECHELON_SECRET="")
    other = site.worker(address, "--env", "Acrobot-v1")
    path = f"PYTHONPATH={with_version(site.runs.folder / 'older', '0.0.7')}"
    older = site.worker(address, before=("env", path))
    good = site.worker(address)
    for worker in (wrong, none):
        assert worker.code() == 1
        assert "refuses the handshake" in worker.text() and "Set ECHELON_SECRET to the same value" in worker.text()
    assert other.code() == 1
    text = other.text()
    assert "(6,)" in text and "Discrete(3)" in text and "(4,)" in text and "Discrete(2)" in text and "Give both" in text
    until_episodes(run, 2)
    reports = ("Give both", "Echelon 0.0.7", "a connection was refused")
    run.until(lambda: all(report in run.text() for report in reports), "all are reported")
    summary = finish(run)
    assert older.code() == 1, older.text()
    for text in (run.text(), older.text()):
        [line] = [line for line in text.splitlines() if "0.0.7" in line]
        assert f"the worker has Echelon 0.0.7 and the learner has {__version__}; install the same version" in line
    assert good.episodes() == summary["workers"]["episodes"] and summary["workers"]["refused"] >= 4


def run_own(site: Site, epochs: int, how: str) -> str:
    command = [sys.executable, str(TESTS / "distributed" / "own_policy.py")]
    arguments = [str(site.runs.folder / "own"), str(site.runs.shm_dir), str(epochs), how]
    path = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    mark = secrets.token_hex(8)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", MARK: mark}
    try:
        done = warm.run([*command, *arguments], env=environment, timeout=2 * DEADLINE_S)
    finally:
        for pid in processes_marked(mark):  # its worker, if the test failed
            os.kill(pid, signal.SIGKILL)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_policy_of_the_users_own_learns_is_saved_and_goes_on(site: Site) -> None:
    """Only its `act`, `update` and state are used; the spaces are those of the first worker."""
    text = run_own(site, 10, "new")
    assert "waiting at" in text and "result finished 40 40 saved 5:20 10:40" in text and "worker left with 0" in text
    text = run_own(site, 15, "resume")
    assert "result finished 60 60 saved 15:60" in text, "with the state of the checkpoint"
    assert "the caller's threads and generator are kept" in text
    rows = [row for row in read_rows(site.runs.folder / "own") if row["kind"] == "train"]
    assert rows[-1]["learned_episodes"] == 15 and rows[-1]["loss.total"] >= 0.0
    assert not list(site.runs.shm_dir.iterdir())


@pytest.mark.full
def test_a_worker_on_another_host_outlives_a_cut_cable(
    site: Site, two_hosts: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = two_hosts
    monkeypatch.setenv("ECHELON_SECRET", secrets.token_hex(16))
    run = site.learner(address=f"{NEAR}:0", before=near, episodes=10**6)
    worker = site.worker(site.address(run), before=far)
    until_episodes(run, 3)
    assert as_another_host(*near, "ip", "link", "set", "cable0", "down").returncode == 0
    wait_until(lambda: "Retrying" in worker.text(), "the worker misses the learner")
    assert as_another_host(*near, "ip", "link", "set", "cable0", "up").returncode == 0
    wait_until(lambda: "is back" in worker.text(), "the worker found the learner")
    until_episodes(run, 3)
    summary = finish(run)
    check_counts(run, summary, worker.episodes())


def test_probes_see_whether_a_worker_has_joined(site: Site) -> None:
    status = site.runs.folder / "status"
    worker = site.worker(f"127.0.0.1:{(port := free_port())}", "--status-file", str(status))
    wait_until(status.exists, "the worker runs")
    assert status.read_text() == "waiting\n"
    for _ in range(2):  # the second time it is the same worker, and --auto-resume has something to resume
        run = site.learner("dqn", address=f"127.0.0.1:{port}", episodes=10**6, flags=("--auto-resume",))
        wait_until(lambda: status.read_text() == "joined\n", "it has joined")
        until_episodes(run, 1)
        run.process.terminate()
        assert run.code() == 143, run.text()
        wait_until(lambda: status.read_text() == "waiting\n", "it has lost the learner")
    assert "resuming from" in run.text()
    worker.process.terminate()
    assert worker.code() == 143 and not status.exists()


def test_a_resume_whose_port_is_taken_keeps_the_run(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    run = site.learner(address=f"127.0.0.1:{port}", episodes=1000)
    site.address(run)
    assert run.stop()["env_steps"] == 0
    (tensors,) = run.run_dir.glob("checkpoints/*/tensors.safetensors")
    before = tensors.read_bytes()
    with socket.create_server(("127.0.0.1", port)):
        refused = site.runs.resume(1000)
        assert refused.code() == 2 and "cannot listen for workers" in refused.text(), refused.text()
        assert tensors.read_bytes() == before
        again = site.runs.resume(1000, "--address", "localhost:0")
        assert not site.address(again).endswith(f":{port}")
        again.stop()
    workers = json.loads((again.run_dir / "config.json").read_text())["config"]["workers"]
    assert workers["address"] == "tcp://localhost:0"
