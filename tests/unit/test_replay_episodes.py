"""Whole episodes as items."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import ConfigError
from echelon.replay.episodes import EpisodeBuffer
from echelon.replay.layout import ReplayError, item_layout
from echelon.replay.reader import ShardReader
from echelon.replay.shard import Shard
from echelon.replay.sharded import Replay
from echelon.replay.snapshot import Snapshot

Array = np.ndarray[Any, Any]


def episode(number: int, length: int) -> dict[str, Array]:
    steps = number * 1000 + np.arange(length)
    return {"state": np.stack([steps, -steps], 1).astype(np.float64), "reward": steps.astype(np.float32)}


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=30),
    num_steps=st.integers(20, 60),
    num_episodes=st.integers(1, 10),
    alpha=st.sampled_from([0.0, 1.0]),
)
def test_the_last_episodes_that_fit_are_drawn_whole(
    lengths: list[int], num_steps: int, num_episodes: int, alpha: float
) -> None:
    buffer = EpisodeBuffer(num_steps, num_episodes, alpha)
    for number, length in enumerate(lengths):
        assert buffer.append(episode(number, length)) == number
    kept = 0
    while kept < min(num_episodes, len(lengths)) and sum(lengths[len(lengths) - kept - 1 :]) <= num_steps:
        kept += 1
    assert buffer.size == kept
    drawn = buffer.sample(kept, 0.4, np.random.default_rng(0))
    assert len(drawn) == kept and sorted(drawn.keys.number) == list(range(len(lengths) - kept, len(lengths)))
    for index, number in enumerate(drawn.keys.number.tolist()):
        for name, expected in episode(number, lengths[number]).items():
            np.testing.assert_array_equal(drawn[index][name], expected)
            assert drawn[index][name].dtype == expected.dtype


def test_lists_are_as_good_as_arrays() -> None:
    buffer = EpisodeBuffer(20, 10)
    buffer.append({"reward": [1.0, 2.0, 3.0], "action": [0, 1, 0]})
    drawn = buffer.sample(1, 0.4, np.random.default_rng(0))[0]
    assert drawn["reward"].tolist() == [1.0, 2.0, 3.0] and drawn["action"].tolist() == [0, 1, 0]


def test_priorities_choose() -> None:
    buffer = EpisodeBuffer(100, 10, alpha=1.0)
    for number in range(4):
        buffer.append(episode(number, 5), priority=0.0)
    rng = np.random.default_rng(0)
    buffer.append(episode(4, 3), priority=2.0)
    drawn = buffer.sample(3, 1.0, rng)
    assert set(drawn.keys.number.tolist()) == {4}
    assert buffer.update(drawn.keys, np.zeros(3)) == 3
    buffer.append(episode(5, 3))
    assert set(buffer.sample(3, 1.0, rng).keys.number.tolist()) == {5}


def test_bad_input_is_refused_and_the_buffer_unharmed() -> None:
    buffer = EpisodeBuffer(20, 10, alpha=1.0)
    rng = np.random.default_rng(0)
    with pytest.raises(ReplayError, match="before the first episode"):
        buffer.sample(1, 0.4, rng)
    assert buffer.size == 0
    for number in range(4):
        buffer.append(episode(number, 5))
    good = episode(4, 5)
    bad: list[tuple[dict[str, Any], float, str]] = [
        ({**good, "reward": 1.0}, 1.0, r"reward is 1\.0; it must be an array"),
        ({**good, "reward": [[1.0], [1.0, 2.0]]}, 1.0, "reward is not an array"),
        ({**good, "reward": ["a"] * 5}, 1.0, "an episode has"),
        (episode(4, 21), 1.0, r"have \[21\] steps; .* from 1 to 20"),
        (episode(4, 0), 1.0, r"have \[0\] steps"),
        ({}, 1.0, r"have \[\] steps"),
        ({**good, "reward": np.zeros(4, np.float32)}, 1.0, r"have \[4, 5\] steps"),
        ({**good, "reward": np.zeros(5)}, 1.0, "but the first episode had"),
        ({"state": good["state"]}, 1.0, "but the first episode had"),
        (good, float("nan"), "priority 0 of 1 is nan"),
        (good, -1.0, "is -1.0"),
    ]
    for fields, priority, message in bad:
        with pytest.raises(ReplayError, match=message):
            buffer.append(fields, priority)
    assert buffer.size == 4 and len(buffer.sample(4, 0.4, rng)) == 4
    with pytest.raises(ReplayError, match="numbers and booleans only"):
        EpisodeBuffer(20, 10).append({"name": np.array(["a"])})


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_a_saved_buffer_draws_the_same_and_goes_on_the_same(tmp_path: Path, alpha: float) -> None:
    buffer, again = EpisodeBuffer(40, 10, alpha), EpisodeBuffer(40, 10, alpha)
    with pytest.raises(ReplayError, match="before the first episode"):
        buffer.save(tmp_path / "one")
    for number in range(12):
        buffer.append(episode(number, 3 + number % 5), priority=0.5 + number)
    buffer.save(tmp_path / "one")
    again.load(tmp_path / "one")
    with pytest.raises(ReplayError, match=r"cannot load .* into a buffer that holds \d episodes"):
        again.load(tmp_path / "one")
    ours, theirs = np.random.default_rng(1), np.random.default_rng(1)
    for number in range(12, 20):
        one, same = buffer.sample(5, 0.4, ours), again.sample(5, 0.4, theirs)
        np.testing.assert_array_equal(one.keys.number, same.keys.number)
        np.testing.assert_array_equal(one.weights, same.weights)
        for name, value in one.fields.items():
            np.testing.assert_array_equal(value, same.fields[name])
        for either in (buffer, again):
            either.append(episode(number, 4))
        assert buffer.size == again.size


def test_what_is_no_such_buffer_is_not_loaded(tmp_path: Path) -> None:
    buffer = EpisodeBuffer(40, 10)
    buffer.append(episode(0, 5))
    buffer.save(tmp_path / "one")
    smaller = EpisodeBuffer(30, 10)
    with pytest.raises(ConfigError, match="rings of a shard"):
        smaller.load(tmp_path / "one")
    with pytest.raises(ConfigError, match="cannot be read"):
        smaller.load(tmp_path / "none")
    (tmp_path / "one" / "shard-0.ring-0").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"damaged: shard-0\.ring-0 has 0 bytes"):
        EpisodeBuffer(40, 10).load(tmp_path / "one")
    shard = Shard(item_layout({"x": ((), np.float32)}, 4))
    Snapshot(tmp_path / "other", Replay([ShardReader(shard)])).write()
    with pytest.raises(ConfigError, match="not a snapshot of an episode buffer"):
        smaller.load(tmp_path / "other")
    assert smaller.size == 0 and smaller.append(episode(0, 5)) == 0, "it is as good as new"
