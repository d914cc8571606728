"""The limiter: the band, who waits, who wakes, and which tolerances would deadlock."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import ConfigError
from echelon.replay.limiter import Limiter, LimiterRule
from echelon.transport.futex import Word
from running import wait_until


def rule(**changes: Any) -> LimiterRule:
    values: dict[str, Any] = {"samples_per_insert": 4.0, "min_size": 20, "capacity": 1000, "batch": 16, "chunk": 2}
    return LimiterRule(**(values | changes))


class TestBand:
    def test_nobody_draws_below_min_size_and_everybody_appends(self) -> None:
        limiter = Limiter(rule())
        for head in range(0, 20, 2):
            assert limiter.may_insert(2) and not limiter.may_sample(1)
            limiter.note_inserted(0, head + 2)
        assert limiter.may_sample(16) and limiter.inserted == 20 and limiter.balance == 0.0

    @settings(deadline=None, max_examples=25)
    @given(
        ratio=st.sampled_from([0.1, 1.0, 3.3, 256.0]),
        batch=st.integers(1, 300),
        chunk=st.integers(1, 64),
        is_tight=st.booleans(),
        seed=st.integers(0, 2**32 - 1),
    )
    def test_one_side_always_may_and_the_ratio_stays_in_the_band(
        self, ratio: float, batch: int, chunk: int, is_tight: bool, seed: int
    ) -> None:
        least = (batch + ratio * chunk) / 2
        band = rule(
            samples_per_insert=ratio, batch=batch, chunk=chunk, tolerance=least if is_tight else 0.0, capacity=10**6
        )
        limiter = Limiter(band)
        head = 0
        for prefers_insert in np.random.default_rng(seed).random(200) < 0.5:
            inserts, samples = limiter.may_insert(chunk), limiter.may_sample(batch)
            assert inserts or samples, "both would wait forever"
            if inserts and (prefers_insert or not samples):
                head += chunk
                limiter.note_inserted(0, head)
            else:
                limiter.note_sampled(0, batch)
            assert limiter.balance >= -band.room or limiter.inserted < 20
            assert limiter.balance <= max(band.room, ratio * chunk)  # the append that reaches min_size may exceed it

    def test_the_ratio_is_kept_over_a_run(self) -> None:
        limiter = Limiter(rule())
        head = 0
        for _ in range(20_000):
            if limiter.may_insert(2):
                head += 2
                limiter.note_inserted(0, head)
            else:
                limiter.note_sampled(0, 16)
        assert limiter.sampled / (limiter.inserted - 20) == pytest.approx(4.0, rel=0.01)

    def test_without_a_ratio_only_min_size_counts(self) -> None:
        limiter = Limiter(rule(samples_per_insert=0.0))
        limiter.note_inserted(0, 20)
        for _ in range(100):
            limiter.note_sampled(0, 16)
        assert limiter.may_sample(16) and limiter.may_insert(2)

    def test_counts_of_all_shards_and_learners_go_together(self, shm_dir: Path) -> None:
        band = rule(num_shards=2, num_learners=2, tolerance=40.0)
        limiter, peer = Limiter.at(shm_dir, band), Limiter.at(shm_dir, band)
        limiter.note_inserted(0, 12)
        peer.note_inserted(1, 12)
        peer.note_sampled(0, 16)
        limiter.note_sampled(1, 16)
        assert limiter.inserted == peer.inserted == 24 and limiter.sampled == 32 and peer.balance == -16.0
        assert peer.may_sample(16) and not peer.may_sample(25)
        other = Limiter(band)
        other.load(limiter.state())
        assert other.balance == -16.0
        limiter.write_off(1)
        alone = Limiter(rule(num_shards=2, tolerance=40.0))
        alone.load(limiter.state())
        assert alone.balance == limiter.balance and alone.sampled == 32, "of all learners, however many there were"
        other.load(alone.state())
        assert other.balance == limiter.balance
        with pytest.raises(ConfigError, match="has 2 shards, but this run has 1"):
            Limiter(rule()).load(limiter.state())


def start_waiting(limiter: Limiter, wait: Callable[[], bool]) -> threading.Thread:
    """Starts a thread in `wait`; returns once it sleeps in the kernel."""
    about_to_sleep = threading.Event()

    class Bell(Word):
        def wait(self, *arguments: Any) -> bool:
            about_to_sleep.set()
            return super().wait(*arguments)

    limiter._insert_bell.__class__ = limiter._sample_bell.__class__ = Bell
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert about_to_sleep.wait(60.0)
    status = Path(f"/proc/self/task/{thread.native_id}/stat")
    wait_until(lambda: status.read_text().rpartition(")")[2].split()[0] == "S", "the thread sleeps")
    return thread


def wait_to_sample(limiter: Limiter, timeout_s: float) -> bool:
    return limiter.wait_for_items(lambda: limiter.may_sample(16), timeout_s)


class TestLosses:
    def test_what_is_due_for_items_that_are_gone_is_written_off_so_that_others_may_come(self) -> None:
        limiter = Limiter(rule())
        limiter.note_inserted(0, 26)
        assert limiter.balance == 24.0 and not limiter.may_insert(2)
        limiter.write_off(0)
        assert limiter.balance == 0.0 and limiter.may_insert(2)
        assert limiter.sampled == 0 and limiter.written_off == 24, "nobody drew them"
        limiter.note_sampled(0, 8)
        limiter.write_off(0)
        assert limiter.balance == -8.0, "nothing is due"
        other = Limiter(rule())
        other.load(limiter.state())
        assert (other.balance, other.sampled, other.written_off) == (-8.0, 8, 24)


class TestWaiting:
    def test_a_learner_wakes_when_enough_was_inserted(self, shm_dir: Path) -> None:
        limiter = Limiter.at(shm_dir, rule())
        peer = Limiter.at(shm_dir, rule())
        learner = start_waiting(peer, lambda: peer.wait_for_items(lambda: peer.may_sample(2), 60.0))
        limiter.note_inserted(0, 18)
        assert learner.is_alive()
        limiter.note_inserted(0, 20)
        learner.join(30.0)
        assert not learner.is_alive()

    def test_an_actor_wakes_when_enough_was_drawn(self, shm_dir: Path) -> None:
        limiter = Limiter.at(shm_dir, rule())
        limiter.note_inserted(0, 26)  # the balance is 24, the room is 24
        peer = Limiter.at(shm_dir, rule())
        actor = start_waiting(peer, lambda: peer.wait_to_insert(60.0))
        limiter.note_sampled(0, 7)
        assert actor.is_alive()
        limiter.note_sampled(0, 1)
        actor.join(30.0)
        assert not actor.is_alive()

    def test_waiting_costs_no_processor_time(self) -> None:
        """Both sides wait for half a second each: a busy loop would use all of that processor time."""
        limiter = Limiter(rule())
        for wait in (lambda: wait_to_sample(limiter, 0.5), lambda: limiter.wait_to_insert(0.5)):
            start_s, spent_s = time.monotonic(), time.thread_time()
            assert not wait()
            assert time.monotonic() - start_s >= 0.5 and time.thread_time() - spent_s < 0.1
            limiter.note_inserted(0, 1000)

    def test_a_wait_ends_with_its_time(self) -> None:
        limiter = Limiter(rule())
        assert not wait_to_sample(limiter, 0.01) and limiter.wait_to_insert(0.0)
        limiter.note_inserted(0, 1000)
        assert not limiter.wait_to_insert(0.01) and wait_to_sample(limiter, 0.0)

    def test_samples_that_make_no_room_do_not_wake_actors(self, shm_dir: Path) -> None:
        limiter, peer, switches = Limiter.at(shm_dir, rule()), Limiter.at(shm_dir, rule()), list[int]()
        limiter.note_inserted(0, 76)  # 208 samples before the next append

        def wait() -> None:
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
            assert peer.wait_to_insert(60.0)
            switches.append(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before)

        actor = start_waiting(peer, wait)
        for _ in range(208):
            assert not limiter.may_insert(2)
            limiter.note_sampled(0, 1)
            time.sleep(2e-4)
        actor.join(30.0)
        assert switches[0] < 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tolerance": 11.9}, r"would deadlock: the band is 23.8 wide, .* by 16 .* by 8.*Set it to 12"),
        ({"min_size": 1001}, "min_size=1001.*wait forever"),
        ({"batch": 1001}, "batch=1001.*wait forever"),
        ({"chunk": 1001}, "appends of 1001"),
        ({"samples_per_insert": -1.0}, "samples_per_insert=-1.0"),
        ({"samples_per_insert": float("nan")}, "samples_per_insert=nan"),
        ({"batch": 0}, "batches of 0"),
    ],
)
def test_a_rule_that_cannot_work_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rule(**changes)
