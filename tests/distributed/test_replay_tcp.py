"""Shards over TCP between two hosts, each with writer processes: items read are whole, whichever process dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import shard_peers
from shard_peers import ELSEWHERE, HERE

from hosts import FAR
from replay_roles import CAPACITY, CHUNK, RULE
from running import DEADLINE_S, TESTS, Runs

SECRET = "a secret of the tests"


class Peer:
    """A process on one of the hosts."""

    def __init__(self, host: tuple[str, ...], secret: str, program: str, *words: str) -> None:
        path = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
        self.process = subprocess.Popen(
            [*host, sys.executable, program, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "ECHELON_SECRET": secret},
        )

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it ended with {self.process.wait()} and said nothing"
        return dict(json.loads(line))

    def learn(self, batches: int) -> dict[str, Any]:
        """Makes a learner learn from a number of batches; returns its report."""
        assert self.process.stdin is not None
        print(json.dumps({"batches": batches}), file=self.process.stdin, flush=True)
        return self.hear()

    def learn_from_all(self, batches: int) -> dict[str, Any]:
        """Makes it learn from at least this many batches, until all shards were sampled: writers start in any order."""
        told = self.learn(batches)
        while min(told["drawn"]) == 0:
            told = self.learn(batches)
        return told

    def finish(self, num_refused: int = 0) -> dict[str, Any]:
        """Stops a server after it has refused a number of messages; returns its counts."""
        assert self.process.stdin is not None
        print(num_refused, file=self.process.stdin, flush=True)
        self.process.stdin.close()
        counted = self.hear()
        assert self.process.wait(DEADLINE_S) == 0
        return counted

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


class Cluster:
    """The learner's host with two writers, and another with two writers and a shard server."""

    def __init__(self, hosts: list[tuple[str, ...]], folder: Path) -> None:
        (self.near, self.far), self.peers = hosts, list[Peer]()
        self.here, self.there = folder / "here", folder / "there"
        for place in (self.here, self.there):
            place.mkdir()

    def open(self) -> None:
        self.writers = {index: self.write(index) for index in (*HERE, *ELSEWHERE)}
        self.server = self.serve()

    def start(self, host: tuple[str, ...], program: str, *words: str, secret: str = SECRET) -> Peer:
        self.peers.append(Peer(host, secret, program, *words))
        return self.peers[-1]

    def write(self, index: int) -> Peer:
        host, folder = (self.near, self.here) if index in HERE else (self.far, self.there)
        return self.start(host, str(TESTS / "replay_roles.py"), "write", str(folder), str(index), "0")

    def serve(self, address: str = f"tcp://{FAR}:0") -> Peer:
        options = {"folder": str(self.there), "address": address}
        server = self.start(self.far, shard_peers.__file__, "serve", json.dumps(options))
        self.address = server.hear()["address"]
        return server

    def learner(self, secret: str = SECRET, **options: Any) -> Peer:
        options = {"folder": str(self.here), "address": self.address} | options
        return self.start(self.near, shard_peers.__file__, "learn", json.dumps(options), secret=secret)

    def kill_far(self) -> None:
        for peer in (self.server, *(self.writers[index] for index in ELSEWHERE)):
            peer.kill()


@pytest.fixture
def cluster(two_hosts: list[tuple[str, ...]], shm_dir: Path) -> Iterator[Cluster]:
    cluster = Cluster(two_hosts, shm_dir)
    try:
        cluster.open()
        yield cluster
    finally:
        for peer in cluster.peers:
            peer.kill()


def test_four_writers_on_two_hosts_and_a_learner_that_reads_nothing_torn(cluster: Cluster) -> None:
    learner = cluster.learner()
    assert learner.hear() == {"torch": False}
    told = learner.learn_from_all(300)
    assert told["lost"] == []
    assert told["inserted"] > 4 * CAPACITY, "all shards were written over"
    balance = RULE.samples_per_insert * (told["inserted"] - RULE.min_size) - told["sampled"]
    room = RULE.room + RULE.num_shards * CHUNK * RULE.samples_per_insert
    assert abs(balance) <= 2 * room, "actors of both hosts keep to the band, but for what is under way"
    counted = cluster.server.finish()
    assert counted["num_items"] >= sum(told["drawn"][2:]) and (counted["num_refused"], counted["torch"]) == (0, False)


def test_the_shard_of_a_dead_actor_stays_and_that_of_a_lost_host_is_dropped(cluster: Cluster) -> None:
    learner = cluster.learner(lost_after_s=10.0)
    learner.hear()
    before = learner.learn_from_all(100)["sizes"][2]
    cluster.writers[2].kill()
    left = learner.learn(100)["sizes"][2]
    told = learner.learn(50)
    assert told["drawn"][2] > 0 and told["sizes"][2] == left >= before - CHUNK and told["lost"] == []
    cluster.kill_far()
    told = learner.learn(100)
    while not told["lost"]:
        told = learner.learn(20)
    assert sorted(text.partition(" with ")[0] for text in told["lost"]) == [
        f"replay shard {index} at {cluster.address} is lost" for index in ELSEWHERE
    ]
    assert "Training goes on with 2 shards." in told["lost"][-1] and told["sizes"][2:] == [0, 0]
    told = learner.learn(100)
    assert min(told["drawn"][:2]) > 0 and told["drawn"][2:] == [0, 0] and told["lost"] == []
    cluster.serve(cluster.address)  # the host is back, with its memory
    while not told["lost"]:
        told = learner.learn(20)
    assert all("is back with" in text for text in told["lost"]) and told["sizes"][2] == left


def test_a_killed_server_and_a_killed_learner_lose_nothing(cluster: Cluster) -> None:
    learner = cluster.learner(lost_after_s=60.0)
    learner.hear()
    told = learner.learn_from_all(50)
    for _ in range(2):
        cluster.server.kill()
        cluster.server = cluster.serve(cluster.address)
        later = learner.learn(50)
        while later["inserted"] == told["inserted"]:  # the stored items suffice until the writers go on
            later = learner.learn(5)
        assert later["lost"] == [] and later["inserted"] > told["inserted"]
        told = later
    learner.kill()
    successor = cluster.learner()
    successor.hear()
    later = successor.learn(50)
    assert later["sampled"] >= told["sampled"] + 50 and later["lost"] == [] and min(later["drawn"]) > 0, later
    # Except for items being overwritten: their eviction is reported before the items that replace them.
    while any(after < before - CHUNK for before, after in zip(told["sizes"], later["sizes"], strict=True)):
        later = successor.learn(5)


@pytest.mark.parametrize("secret", [SECRET + "!", ""])
def test_another_secret_is_refused(cluster: Cluster, secret: str) -> None:
    told = cluster.learner(secret=secret).hear()
    if not secret:
        assert told["error"] == "ConfigError" and f"{cluster.address} is not on the loopback" in told["text"]
    else:
        assert told["error"] == "Refused" and "Set ECHELON_SECRET to the same value" in told["text"]
        assert cluster.server.finish(num_refused=1)["num_refused"] > 0


def test_a_run_reads_its_shards_over_tcp_and_goes_on_when_their_server_is_killed(runs: Runs) -> None:
    fields = {"actor.num_actors": 2, "actor.envs": 4, "replay.min_size": 200, "replay.batch": 32}
    fields |= {"replay.samples_per_insert": 4, "replay.capacity": 20_000, "network.hidden": 16}
    fields |= {"replay.lost_after_s": 60, "supervision.hang_timeout_s": 90}
    run = runs.train("apex-dqn", **fields, **{"replay.transport": "tcp"})

    def learns() -> None:
        before = run.rows()[-1]["replay.sampled"] if run.rows() else 0
        run.until(lambda: run.rows() and run.rows()[-1]["replay.sampled"] > before + 320, "the learner learns")

    learns()
    for name in ("shards-0", "learner", "shards-0"):
        size = run.rows()[-1]["replay.size"]
        pid = run.kill(name)
        assert run.pid(name, besides=pid)
        learns()
        assert run.rows()[-1]["replay.size"] >= size, "no transition is lost"
    run.process.send_signal(signal.SIGINT)
    assert run.code() == 130, run.text()
    run.assert_nothing_left()
    summary = run.summary()
    assert summary["restarts"] == 3 and "is lost" not in run.text()
    balance = 4 * (summary["replay"]["inserted"] - 200) - summary["replay"]["sampled"]
    assert abs(balance) <= 4 * (32 + 4 * 2 * 12)
    assert set(summary["shards"]["shards-0"]) == {"answers", "items", "refused"}
