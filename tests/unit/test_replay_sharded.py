"""Sharded replay: sampling, weights, late priorities, lost shards, and a restarted learner."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import PeerLost
from echelon.replay.layout import ReplayError, item_layout
from echelon.replay.reader import ShardReader
from echelon.replay.sampled import Keys, Mass, apportion
from echelon.replay.shard import RESERVE, Shard, ShardWriter
from echelon.replay.sharded import MAX_REDRAWS, Replay

Array = np.ndarray[Any, Any]
FIELDS: dict[str, Any] = {"shard": ((), np.int64), "number": ((), np.int64)}
ALPHA = 0.6


class Shards:
    """Shards in private memory, with writers; every item contains its shard and number."""

    def __init__(self, num_shards: int, capacity: int) -> None:
        self.shards = [Shard(item_layout(FIELDS, capacity), name=f"replay shard {i}") for i in range(num_shards)]
        self.writers = [ShardWriter(shard) for shard in self.shards]
        self.readers = [ShardReader(shard) for shard in self.shards]

    def append(self, shard: int, priorities: Any) -> None:
        priorities = np.asarray(priorities, np.float64)
        numbers = self.writers[shard].head + np.arange(len(priorities))
        self.writers[shard].append({"shard": np.full(len(numbers), shard), "number": numbers}, priorities)


def keys(shard: Any, number: Any) -> Keys:
    return Keys(np.asarray(shard), np.asarray(number))


def chi_square(counts: Array, shares: Array) -> float:
    """Returns the chi-square statistic of the counts, in standard deviations from its mean."""
    expected = counts.sum() * shares
    assert (expected >= 5).all()
    freedom = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


class TestDrawing:
    @pytest.mark.parametrize("alpha", [0.0, ALPHA, 1.0])
    def test_frequencies_match_the_priorities_over_all_shards(self, alpha: float) -> None:
        rng = np.random.default_rng(0)
        shards = Shards(3, 64)
        for shard, count in enumerate((100, 64, 10)):  # one has wrapped
            for priority in rng.random(count) + 0.1:
                shards.append(shard, [priority])
        replay = Replay(shards.readers, alpha)
        counts = np.zeros((3, 100))
        for _ in range(2000):
            drawn = replay.sample(32, 0.4, rng)
            np.testing.assert_array_equal(drawn.fields["shard"], drawn.keys.shard)
            np.testing.assert_array_equal(drawn.fields["number"], drawn.keys.number)
            np.add.at(counts, (drawn.keys.shard, drawn.keys.number), 1)
        there = [(s, n) for s in range(3) for n in range(*replay.window(s))]
        mass = np.array([shards.shards[s].initial[n % 64] ** alpha for s, n in there])
        assert replay.sizes == [64, 64, 10] and counts.sum() == sum(counts[s, n] for s, n in there)
        # Stratified draws vary less than independent draws, so only an upper bound is checked.
        assert chi_square(np.array([counts[s, n] for s, n in there]), mass / mass.sum()) < 4.0

    @settings(deadline=None, max_examples=30)
    @given(seed=st.integers(0, 2**32 - 1), beta=st.sampled_from([0.0, 0.4, 1.0]))
    def test_weights_are_those_of_one_buffer(self, seed: int, beta: float) -> None:
        rng = np.random.default_rng(seed)
        shards = Shards(4, 50)
        for shard in range(4):
            for _ in range(3):
                shards.append(shard, rng.random(int(rng.integers(10, 40))) * 10.0 ** rng.integers(-3, 3) + 1e-6)
        first, second = Replay(shards.readers[:1], ALPHA), Replay(shards.readers[1:], ALPHA)
        whole = [shards.shards[s].initial[n % 50] for r, o in ((first, 0), (second, 1)) for s, n in
                 ((i + o, n) for i in range(len(r.readers)) for n in range(*r.window(i)))]  # fmt: skip
        total, count = sum(p**ALPHA for p in whole), len(whole)
        batches = [
            first.sample(20, beta, rng, others=second.mass),
            second.sample(40, beta, rng, others=first.mass),
        ]
        largest = max(batch.max_weight for batch in batches)
        found = np.concatenate([batch.weights * (batch.max_weight / largest) for batch in batches])
        drawn = [(s, n) for batch, o in zip(batches, (0, 1), strict=True) for s, n in
                 zip(batch.keys.shard + o, batch.keys.number, strict=True)]  # fmt: skip
        shares = np.array([shards.shards[s].initial[n % 50] ** ALPHA / total for s, n in drawn])
        expected = (count * shares) ** -beta
        np.testing.assert_allclose(found, expected / expected.max(), rtol=1e-9)
        assert all(batch.weights.max() == 1.0 for batch in batches)

    def test_uniform_draws_weigh_the_same(self) -> None:
        shards = Shards(2, 10)
        shards.append(0, np.zeros(4))
        shards.append(1, np.arange(8.0))
        replay = Replay(shards.readers, 0.0)
        drawn = replay.sample(12, 0.4, np.random.default_rng(0))
        assert sorted(zip(drawn.keys.shard.tolist(), drawn.keys.number.tolist(), strict=True)) == [
            *((0, n) for n in range(4)),
            *((1, n) for n in range(8)),
        ]
        assert drawn.weights.tolist() == [1.0] * 12 and replay.mass == Mass(12.0, 12)

    def test_memory_can_be_used_again(self) -> None:
        shards = Shards(1, 10)
        shards.append(0, np.ones(10))
        replay = Replay(shards.readers, ALPHA)
        block = replay.layout.block(5)
        drawn = replay.sample(5, 0.4, np.random.default_rng(0), block=block)
        assert np.shares_memory(drawn.fields["number"], block.rows)

    def test_what_tears_is_drawn_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        shards = Shards(1, 10)
        shards.append(0, np.ones(10))
        replay = Replay(shards.readers, ALPHA)
        read, torn = ShardReader.read, list[int]()

        def overwritten(reader: ShardReader, numbers: Array, block: Any) -> Array:
            if not torn:  # the actor overwrites three items while they are read
                shards.append(0, np.ones(3))
                torn.extend(numbers[numbers < 3].tolist())
            return read(reader, numbers, block)

        monkeypatch.setattr(ShardReader, "read", overwritten)
        drawn = replay.sample(10, 0.4, np.random.default_rng(0))
        assert len(torn) == 3 and (drawn.keys.number >= 3).all()
        np.testing.assert_array_equal(drawn.fields["number"], drawn.keys.number)

    def test_a_shard_that_is_overrun_while_it_is_taken_in_is_full_and_not_empty(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The learner does not run for as long as its actor needs to fill the shard."""
        shards = Shards(1, 10)
        replay, initial = Replay(shards.readers, ALPHA), ShardReader.initial
        shards.append(0, np.ones(10))

        def overrun(reader: ShardReader, start: int, stop: int) -> Array:
            priorities = initial(reader, start, stop)
            if stop == 10:
                shards.append(0, np.full(10, 2.0))
                shards.append(0, np.full(2, 3.0))
            return priorities

        monkeypatch.setattr(ShardReader, "initial", overrun)
        assert replay.advance() == 10 and replay.window(0) == (12, 22)
        assert replay.mass == Mass(pytest.approx(8 * 2.0**ALPHA + 2 * 3.0**ALPHA), 10)
        assert replay.sample(10, 0.4, np.random.default_rng(0)).fields["number"].min() >= 12

    def test_a_shard_that_is_always_torn_is_not_waited_for_forever(self, monkeypatch: pytest.MonkeyPatch) -> None:
        shards = Shards(1, 10)
        shards.append(0, np.ones(10))
        replay = Replay(shards.readers, ALPHA)
        monkeypatch.setattr(ShardReader, "read", lambda reader, numbers, block: np.zeros(len(numbers), np.bool_))
        with pytest.raises(ReplayError, match=rf"{MAX_REDRAWS} times in a row.*Raise replay.capacity"):
            replay.sample(5, 0.4, np.random.default_rng(0))


class TestPriorities:
    def test_new_priorities_count_and_the_last_of_two_wins(self) -> None:
        shards = Shards(2, 10)
        shards.append(0, np.zeros(5))
        shards.append(1, np.zeros(5))
        replay = Replay(shards.readers, ALPHA)
        updated = keys([1, 0, 1], [3, 2, 3])
        assert replay.update(updated, np.array([9.0, 4.0, 2.0], np.float32)) == 3
        assert replay.mass.total == pytest.approx(4.0**ALPHA + 2.0**ALPHA, rel=1e-12)
        for either in (replay, Replay(shards.readers, ALPHA)):  # itself, and one rebuilt from the columns
            drawn = either.sample(10, 0.4, np.random.default_rng(0))
            assert set(zip(drawn.keys.shard.tolist(), drawn.keys.number.tolist(), strict=True)) == {(0, 2), (1, 3)}
        assert replay.update(keys([], []), np.array([])) == 0

    @pytest.mark.parametrize("alpha", [0.0, 1.0])
    def test_a_late_priority_for_an_overwritten_slot_changes_nothing(self, alpha: float) -> None:
        shards = Shards(1, 4)
        shards.append(0, np.ones(4))
        replay = Replay(shards.readers, alpha)
        old = keys([0, 0], [0, 3])
        shards.append(0, [1.0])  # item 4 overwrites item 0
        replay.advance()
        assert replay.update(old, np.array([100.0, 1.0])) == 1
        assert replay.mass == Mass(4.0, 4)

    def test_a_priority_for_an_item_that_is_overwritten_unseen_does_not_reach_its_successor(self) -> None:
        shards = Shards(1, 4)
        shards.append(0, np.ones(4))
        replay = Replay(shards.readers, 1.0)
        shards.append(0, [2.0])  # the learner has not advanced
        replay.update(keys([0], [0]), np.array([100.0]))
        replay.advance()
        assert replay.mass == Mass(5.0, 4)

    def test_bad_input_is_refused_and_the_buffer_unharmed(self) -> None:
        shards = Shards(2, 10)
        shards.append(0, np.ones(5))
        replay = Replay(shards.readers, 1.0)
        rng = np.random.default_rng(0)
        bad: list[tuple[Keys, Array, str]] = [
            (keys([0], [0]), np.array([np.nan]), "priority 0 of 1 is nan"),
            (keys([0], [0]), np.array([np.inf]), "is inf"),
            (keys([0], [0]), np.array([-1.0]), "is -1.0"),
            (keys([0, 0], [1, 5]), np.ones(2), "a key is outside"),
            (keys([0], [-1]), np.ones(1), "a key is outside"),
            (keys([2], [0]), np.ones(1), "a key is outside the 2 shards"),
            (keys([-1], [0]), np.ones(1), "a key is outside"),
            (keys([1], [0]), np.ones(1), r"with \[5, 0\] items appended"),
            (keys([0, 0], [0, 1]), np.ones(1), "1 priorities for 2 keys"),
        ]
        for which, priorities, message in bad:
            with pytest.raises(ReplayError, match=message):
                replay.update(which, priorities)
        for batch in (6, 0, -1):
            with pytest.raises(ReplayError, match=f"a batch of {batch} cannot be sampled from 5 items"):
                replay.sample(batch, 0.4, rng)
        assert replay.mass == Mass(5.0, 5) and len(replay.sample(5, 0.4, rng).keys) == 5

    def test_what_no_replay_can_be_is_refused(self) -> None:
        with pytest.raises(ReplayError, match="at least one shard"):
            Replay([])
        with pytest.raises(ReplayError, match=r"alpha=1\.5"):
            Replay(Shards(1, 4).readers, 1.5)
        with pytest.raises(ReplayError, match="different layouts"):
            Replay([*Shards(1, 4).readers, *Shards(1, 5).readers])


class TestLosses:
    @pytest.mark.parametrize("alpha", [0.0, ALPHA])
    def test_a_lost_shard_is_dropped_with_a_message(self, alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
        shards = Shards(2, 10)
        shards.append(0, np.ones(5))
        shards.append(1, np.ones(7))
        replay = Replay(shards.readers, alpha)
        drawn = replay.sample(12, 0.4, np.random.default_rng(0))

        def lost(*_: Any) -> Any:
            raise PeerLost("host-b does not answer")

        monkeypatch.setattr(shards.readers[1], "read", lost)
        monkeypatch.setattr(shards.readers[1], "window", lost)
        drawn = replay.sample(12, 0.4, np.random.default_rng(0))
        assert (drawn.keys.shard == 0).all()
        assert replay.lost == [
            "replay shard 1 is lost with 7 items (host-b does not answer). Training goes on with 1 shards."
        ]
        assert replay.sizes == [5, 0] and replay.mass == Mass(5.0, 5)
        assert replay.update(keys([1, 0], [3, 3]), np.ones(2)) == 1  # of those drawn before it was lost
        shards.append(1, np.ones(1))
        assert replay.advance() == 0 and len(replay.lost) == 1

    def test_nothing_left_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        shards = Shards(1, 10)
        shards.append(0, np.ones(5))
        replay = Replay(shards.readers, ALPHA)

        def lost(*_: Any) -> Any:
            raise PeerLost("gone")

        monkeypatch.setattr(shards.readers[0], "read", lost)
        monkeypatch.setattr(shards.readers[0], "window", lost)
        with pytest.raises(ReplayError, match="all 1 shards are empty or lost"):
            replay.sample(5, 0.4, np.random.default_rng(0))

    @settings(deadline=None, max_examples=40)
    @given(seed=st.integers(0, 2**32 - 1), alpha=st.sampled_from([0.0, ALPHA]))
    def test_a_learner_made_anew_draws_what_the_old_one_would_have(self, seed: int, alpha: float) -> None:
        rng = np.random.default_rng(seed)
        shards = Shards(2, 30)
        old = Replay(shards.readers, alpha)
        for _ in range(6):
            for shard in range(2):
                shards.append(shard, rng.random(int(rng.integers(1, 20))) + 0.01)
            old.advance()
            drawn = old.sample(2, 0.4, rng)
            old.update(drawn.keys, rng.random(2).astype(np.float32))
        shards.append(0, rng.random(5) + 0.01)  # not yet added when the old learner dies
        new = Replay(shards.readers, alpha)
        old.advance()
        assert new.mass == old.mass and new.sizes == old.sizes
        ours, theirs = (replay.sample(20, 0.4, np.random.default_rng(seed)) for replay in (new, old))
        np.testing.assert_array_equal(ours.keys.number, theirs.keys.number)
        np.testing.assert_array_equal(ours.weights, theirs.weights)

    def test_a_learner_that_died_while_taking_in_is_made_anew_whole(self) -> None:
        shards = Shards(1, 10)
        shards.append(0, np.ones(8))
        replay = Replay(shards.readers, 1.0)
        replay.update(keys([0], [5]), np.array([7.0]))
        shards.append(0, np.full(4, 3.0))
        column = shards.readers[0].column
        column.priorities[8:10], column.priorities[0:1] = 3.0, 99.0  # written, but `fed` has not moved
        assert Replay(shards.readers, 1.0).mass == Mass(4 * 3.0 + 5 + 7.0, 10)

    def test_a_learner_that_was_away_takes_in_the_last_items(self) -> None:
        shards = Shards(1, 10)
        shards.append(0, np.full(8, 50.0))
        replay = Replay(shards.readers, 1.0)
        for _ in range(5):
            shards.append(0, np.arange(1.0, 8.0))
        assert replay.advance() == 10 and replay.window(0) == (33, 43)
        assert replay.mass == Mass(28.0 + 18.0, 10)
        shards.shards[0].words[RESERVE] = 46  # three are being overwritten
        replay.advance()
        assert replay.window(0) == (36, 43) and replay.mass == Mass(28.0, 7)

    def test_priorities_that_are_overwritten_while_they_are_copied_are_those_of_the_new_items(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shards = Shards(1, 10)
        replay = Replay(shards.readers, 1.0)
        shards.append(0, np.ones(10))
        initial = shards.readers[0].initial

        def overwritten(start: int, stop: int) -> Array:
            monkeypatch.undo()
            shards.append(0, np.full(3, 5.0))
            return initial(start, stop)

        monkeypatch.setattr(shards.readers[0], "initial", overwritten)
        assert replay.advance() == 7 + 3 and replay.window(0) == (3, 13) and replay.mass == Mass(22.0, 10)


@given(
    batch=st.integers(1, 600),
    share=st.floats(0, 1, exclude_max=True),
    totals=st.lists(st.floats(0.01, 100), min_size=1, max_size=5),
)
def test_a_batch_is_apportioned_by_mass(batch: int, share: float, totals: list[float]) -> None:
    counts = apportion(batch, [Mass(total, 10) for total in totals], share)
    assert sum(counts) == batch
    for count, total in zip(counts, totals, strict=True):
        assert abs(count - batch * total / sum(totals)) < 1.0 + 1e-6


def test_a_batch_of_nothing_cannot_be_apportioned() -> None:
    with pytest.raises(ReplayError, match="total mass of 0"):
        apportion(5, [Mass(), Mass()], 0.5)
