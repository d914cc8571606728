"""Shards that other processes write while this one samples from them, and processes that are killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from echelon.replay.layout import item_layout
from echelon.replay.limiter import Limiter
from echelon.replay.reader import ShardReader
from echelon.replay.shard import Shard, ShardWriter
from echelon.replay.sharded import Replay
from replay_roles import BATCH, CAPACITY, CHUNK, FIELDS, NUM_SHARDS, RULE, first_priority, learn_once, learned_priority
from replay_roles import open_replay as open_here
from running import DEADLINE_S, TESTS, wait_until


class Roles:
    """Writers and learners in separate processes, over one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, list[subprocess.Popen[bytes]]()
        self.replay, self.limiter = open_here(folder), Limiter.at(folder, RULE)

    def start(self, what: Literal["write", "learn"], index: int, head: int = 0) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": str(TESTS.parent / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(TESTS / "replay_roles.py"), what, str(self.folder), str(index), str(head)]
        self.started.append(subprocess.Popen(command, env=environment))
        return self.started[-1]

    def kill(self, *processes: subprocess.Popen[bytes]) -> None:
        for process in processes:
            assert process.poll() is None, f"it ended by itself: {process.returncode}"
            process.kill()
            process.wait()


@pytest.fixture
def roles(shm_dir: Path) -> Iterator[Roles]:
    roles = Roles(shm_dir)
    yield roles
    for process in roles.started:
        process.kill()
        process.wait()


def test_four_writers_and_a_learner_that_reads_nothing_torn(roles: Roles) -> None:
    writers = [roles.start("write", index, head=8 * CAPACITY) for index in range(NUM_SHARDS)]
    replay, limiter, rng = roles.replay, roles.limiter, np.random.default_rng(0)
    while any(process.poll() is None for process in writers):
        learn_once(limiter, replay, rng)
    assert [process.returncode for process in writers] == [0] * NUM_SHARDS
    replay.advance()
    assert replay.sizes == [CAPACITY] * NUM_SHARDS and limiter.inserted >= NUM_SHARDS * 8 * CAPACITY
    assert abs(limiter.balance) <= RULE.room + NUM_SHARDS * CHUNK * RULE.samples_per_insert
    rng = np.random.default_rng(1)  # the other generator's state depends on how long the writers took
    counts = np.zeros(10)  # priorities repeat with the numbers: ten kinds of items, drawn by their mass
    for _ in range(200):
        counts += np.bincount(replay.sample(BATCH, 0.4, rng).keys.number % 10, minlength=10)
    kinds = np.concatenate([np.arange(*replay.window(shard)) % 10 for shard in range(NUM_SHARDS)])
    mass = np.bincount(kinds, first_priority(kinds), minlength=10)
    expected = counts.sum() * mass / mass.sum()
    assert (((counts - expected) ** 2 / expected).sum() - 9) / np.sqrt(18) < 4.0


def test_a_killed_writer_is_followed_by_another_and_its_items_stay(roles: Roles) -> None:
    replay, rng = roles.replay, np.random.default_rng(0)
    for _ in range(2):
        writer = roles.start("write", 0)
        goal = replay.readers[0].window()[1] + 1500

        def reached(goal: int = goal) -> bool:
            learn_once(roles.limiter, replay, rng)
            return replay.readers[0].window()[1] >= goal

        wait_until(reached, "the writer wrote on")
        roles.kill(writer)
        replay.advance()
        assert CAPACITY - CHUNK <= replay.size <= CAPACITY
        drawn = replay.sample(BATCH, 0.4, rng)
        np.testing.assert_array_equal(drawn.fields["number"], drawn.keys.number)


def test_weights_over_shards_of_other_processes_are_those_of_one_buffer(roles: Roles) -> None:
    writers = [roles.start("write", index, head=2 * CAPACITY) for index in range(NUM_SHARDS)]
    rng = np.random.default_rng(0)
    while any(process.poll() is None for process in writers):
        learn_once(roles.limiter, roles.replay, rng)
    assert [process.returncode for process in writers] == [0] * NUM_SHARDS
    sharded = Replay(roles.replay.readers, alpha=0.6)
    single = ShardWriter(Shard(item_layout(FIELDS, NUM_SHARDS * CAPACITY)))
    for reader in roles.replay.readers:  # slot by slot, as in the tree
        assert isinstance(reader, ShardReader)
        single.append(reader.shard.items.columns, reader.column.priorities)
    reference = Replay([ShardReader(single.shard)], alpha=0.6)
    assert sharded.size == reference.size == NUM_SHARDS * CAPACITY
    assert sharded.mass.total == pytest.approx(reference.mass.total, rel=1e-12)
    for seed in range(50):
        found, expected = (r.sample(BATCH, 0.4, np.random.default_rng(seed)) for r in (sharded, reference))
        np.testing.assert_array_equal(found.fields["checksum"], expected.fields["checksum"])  # the same items
        np.testing.assert_allclose(found.weights, expected.weights, rtol=1e-9)


def test_a_killed_learner_is_followed_by_one_that_knows_its_priorities(roles: Roles) -> None:
    writers = [roles.start("write", index, head=4 * CAPACITY) for index in range(NUM_SHARDS)]
    first = roles.start("learn", 0)
    wait_until(lambda: roles.limiter.sampled >= 50 * BATCH, "the first learner learned")
    roles.kill(first)
    second = roles.start("learn", 1)  # without it the writers would wait at the end of their band
    assert [process.wait(DEADLINE_S) for process in writers] == [0] * NUM_SHARDS
    wait_until(lambda: not roles.limiter.may_sample(BATCH), "the second learner came to the end of its band")
    roles.kill(second)
    replay = open_here(roles.folder)
    total, num_learned = 0.0, 0
    for shard, reader in enumerate(replay.readers):
        numbers = np.arange(*replay.window(shard))
        priorities = reader.column.priorities[numbers % CAPACITY]
        is_learned = priorities == learned_priority(numbers)
        np.testing.assert_array_equal(priorities[~is_learned], first_priority(numbers[~is_learned]))
        total += priorities.sum()
        num_learned += int(is_learned.sum())
        assert len(numbers) == CAPACITY
    assert replay.mass.total == pytest.approx(total, rel=1e-12) and num_learned > 100
    drawn = replay.sample(BATCH, 0.4, np.random.default_rng(0))
    np.testing.assert_array_equal(drawn.fields["number"], drawn.keys.number)


def test_a_writer_at_the_end_of_the_band_sleeps_until_something_is_drawn(roles: Roles) -> None:
    writer = roles.start("write", 0)
    wait_until(lambda: not roles.limiter.may_insert(CHUNK), "the band is full")

    status = Path(f"/proc/{writer.pid}/stat")
    wait_until(lambda: status.read_text().rpartition(")")[2].split()[0] == "S", "the writer sleeps")
    before = roles.limiter.inserted
    for _ in range(20):
        roles.limiter.note_sampled(0, BATCH)
    wait_until(lambda: roles.limiter.inserted > before, "the writer woke")


def test_replay_needs_neither_torch_nor_sockets() -> None:
    """Replay needs no other package: every import of one is refused."""
    ended = subprocess.run(
        [sys.executable, str(TESTS / "replay_alone.py")],
        env={**os.environ, "PYTHONPATH": str(TESTS.parent / "src")},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 0 and ended.stdout == "drawn 32\n", ended.stderr
