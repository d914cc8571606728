"""Shards that other processes write while this one learns from them; and processes that are killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from echelon.replay.limiter import Limiter
from replay_roles import BATCH, CAPACITY, CHUNK, NUM_SHARDS, RULE, first_priority, learn_once, learned_priority
from replay_roles import open_replay as open_here
from running import TESTS, wait_until


class Roles:
    """Writers and learners in processes of their own, over one folder."""

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


def test_a_killed_learner_is_followed_by_one_that_knows_its_priorities(roles: Roles) -> None:
    writers = [roles.start("write", index) for index in range(NUM_SHARDS)]
    for life in range(2):
        learner = roles.start("learn", life)
        goal = roles.limiter.sampled + 50 * BATCH
        wait_until(lambda goal=goal: roles.limiter.sampled >= goal, "the learner learned")  # type: ignore[misc]
        roles.kill(learner)
    roles.kill(*writers)
    replay = open_here(roles.folder)
    total, num_learned = 0.0, 0
    for shard, reader in enumerate(replay.readers):
        numbers = np.arange(*replay.window(shard))
        priorities = reader.column.priorities[numbers % CAPACITY]
        is_learned = priorities == learned_priority(numbers)
        np.testing.assert_array_equal(priorities[~is_learned], first_priority(numbers[~is_learned]))
        total += priorities.sum()
        num_learned += int(is_learned.sum())
        assert len(numbers) >= CAPACITY - CHUNK
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
