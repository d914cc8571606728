"""User errors with replay: each message has a remedy, and the buffer stays unchanged, bit by bit."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from test_bad_input import HERE as GIVING

from echelon.config import replace
from echelon.errors import ConfigError
from echelon.presets import preset
from echelon.replay.layout import ReplayError, item_layout
from echelon.replay.reader import ShardReader
from echelon.replay.sampled import Keys
from echelon.replay.shard import Shard, ShardWriter
from echelon.replay.sharded import Replay
from telling import Command, assert_told

Array = np.ndarray[Any, Any]
SMALL = [
    *("--engine", "inline", "--actors", "2", "--envs-per-actor", "2", "--network.hidden", "8"),
    *("--evaluation.episodes", "0", "--replay.min-size", "64", "--replay.batch", "32", "--replay.capacity", "500"),
]

# Invalid configurations.

VALUES: dict[str, tuple[str, list[str]]] = {
    "min_size above capacity": (
        "--replay.min-size 501",
        ["replay.min_size=501 exceeds replay.capacity=500", "the learner would wait forever", "raise capacity"],
    ),
    "min_size below batch": ("--replay.min-size 31", ["replay.min_size=31 is below replay.batch=32", "filled"]),
    "batch above capacity": (
        "--replay.batch 501 --replay.min-size 501 --replay.capacity 501",
        ["replay.capacity=501", "each of 2 shards", "a batch", "Raise it to 1002 or more"],
    ),
    "capacity below appends": (
        "--envs-per-actor 400 --replay.min-size 64",
        ["replay.capacity=500", "each of 2 shards", "at least 1200", "Raise it to 2400 or more"],
    ),
    "no batch": ("--replay.batch 0", ["replay.batch=0", "at least 1"]),
    "no steps": ("--replay.n-step 0", ["replay.n_step=0", "at least 1"]),
    "negative ratio": ("--replay.samples-per-insert -1", ["replay.samples_per_insert=-1", "at least 0"]),
    "no ratio": ("--replay.samples-per-insert nan", ["replay.samples_per_insert=nan", "finite"]),
    "infinite ratio": ("--replay.samples-per-insert inf", ["replay.samples_per_insert=inf", "finite"]),
    "alpha": ("--replay.alpha 1.5", ["replay.alpha=1.5", "between 0 and 1"]),
    "beta": ("--replay.beta-end -0.1", ["replay.beta_end=-0.1", "between 0 and 1"]),
    "publish": ("--replay.publish-every 0", ["replay.publish_every=0", "at least 1"]),
    "frames": ("--replay.frames stacked", ["replay.frames=stacked", "no observation is a stack", "whole"]),
    "memory": (
        "--replay.capacity 1000000000000",
        ["replay.capacity=1000000000000 needs", "GB", "are free. Lower replay.capacity"],
    ),
    "patience": (
        "--engine local --replay.transport tcp --replay.lost-after-s 29",
        ["replay.lost_after_s=29", "supervision.hang_timeout_s=30", "counts as hung"],
    ),
    "hosts": ("--replay.checkpoint true --replay.transport tcp", ["replay.checkpoint=true", "replay.transport=tcp"]),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_that_cannot_work_is_told_before_anything_is_made(name: str, command: Command) -> None:
    text, fragments = VALUES[name]
    told = command("train", "apex-dqn", "CartPole-v1", *SMALL, "--steps", "100", "--run-dir", "run", *text.split())
    assert_told(told, 2, *fragments)
    assert list(Path.cwd().iterdir()) == [], "no run folder"


def test_a_disk_without_room_for_the_checkpoints_is_told(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    full = shutil.disk_usage("/")._replace(free=50_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    arguments = ["train", "dqn", "CartPole-v1", *SMALL, "--steps", "100", "--run-dir", "run"]
    told = command(*arguments, "--replay.checkpoint", "true")
    assert_told(told, 2, "replay.checkpoint=true needs 0.1 MB in", "run/replay", "0.1 MB are free", "--run-dir")
    assert list(Path.cwd().iterdir()) == []
    assert command(*arguments).code == 0, "without it, nothing is needed"


# Invalid outputs of an environment.


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        *[(name, "target_tau", value) for name in ("sac", "ddpg") for value in (5.0, 0.0, math.nan)],
        *[("sac", "target_entropy", value) for value in (math.nan, math.inf)],
    ],
)
def test_targets_out_of_bounds_are_refused(name: str, field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.{field}={value} (must be|does not fit)"):
        replace(preset(name, "Pendulum-v1"), **{f"algorithm.{field}": value})


@pytest.mark.parametrize("engine", ["inline", "local"])
@pytest.mark.parametrize(
    ("kwargs", "what"),
    [({"reward": "nan"}, "reward is nan"), ({"reward": "inf"}, "reward is inf"), ({"observation": "-inf"}, "is -inf")],
)
def test_numbers_that_are_none_end_the_run_with_their_actor_named(
    engine: str, kwargs: dict[str, str], what: str, command: Command
) -> None:
    small = [*SMALL, "--engine", engine, "--acting", "local", "--steps", "10000", "--run-dir", "run"]
    told = command("train", "apex-dqn", f"{GIVING}:GivingEnv", *small, "--env-kwargs", json.dumps(kwargs))
    assert told.code == 2
    assert re.search(rf"{what} after a step of actor [01], environment [01] .*finite numbers", told.err), told.err
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["status"] == "failed" and what in summary["error"]


# Invalid arguments to a buffer.


class Buffer(NamedTuple):
    """Two shards that have wrapped around, and the learner's side."""

    writers: list[ShardWriter]
    replay: Replay

    def content(self) -> list[Array]:
        """Returns all of its memory."""
        found = [np.array([writer.shard.words[i] for i in range(3)]) for writer in self.writers]
        for writer, reader in zip(self.writers, self.replay.readers, strict=True):
            found += [writer.shard.items.records.copy(), writer.shard.initial.copy(), reader.column.priorities.copy()]
            found.append(np.array([reader.column.fed]))
        tree = self.replay._tree
        assert tree is not None
        return [*found, tree.get(np.arange(tree.capacity)), np.array([tree.total])]


@pytest.fixture
def buffer() -> Buffer:
    shards = [
        Shard(item_layout({"x": ((2,), np.float32), "n": ((), np.int64)}, 8), name=f"shard {i}") for i in range(2)
    ]
    writers = [ShardWriter(shard) for shard in shards]
    replay = Replay([ShardReader(shard) for shard in shards], 0.6)
    rng = np.random.default_rng(0)
    for _ in range(4):
        for writer in writers:
            writer.append(items(3), rng.random(3) + 0.1)
        replay.advance()
        drawn = replay.sample(4, 0.4, rng)
        replay.update(drawn.keys, rng.random(4))
    return Buffer(writers, replay)


def items(count: int, **changes: Any) -> dict[str, Array]:
    return {"x": np.ones((count, 2), np.float32), "n": np.arange(count), **changes}


def keys(shard: list[int], number: list[int]) -> Keys:
    return Keys(np.array(shard, np.int64), np.array(number, np.int64))


def drawn(buffer: Buffer, batch: int) -> None:
    buffer.replay.sample(batch, 0.4, np.random.default_rng(0))


BAD = [np.nan, np.inf, -np.inf, -1e-9, 1e31]
MISTAKES: dict[str, tuple[Callable[[Buffer], Any], str]] = {
    **{
        f"append {bad}": (
            lambda b, bad=bad: b.writers[1].append(items(2), np.array([1.0, bad])),
            "shard 1: priority 1 of 2 is .*Nothing was stored",
        )
        for bad in BAD
    },
    **{
        f"update {bad}": (
            lambda b, bad=bad: b.replay.update(keys([0, 1], [9, 9]), np.array([bad, 1.0])),
            "replay: priority 0 of 2 is .*NaN or an infinity in the TD errors",
        )
        for bad in BAD
    },
    "too many": (lambda b: b.writers[0].append(items(9), np.ones(9)), "9 items exceeds its capacity of 8"),
    "no field": (lambda b: b.writers[0].append({"x": items(1)["x"]}, np.ones(1)), "field n is missing"),
    "unknown field": (lambda b: b.writers[0].append(items(1, y=np.ones(1)), np.ones(1)), r"no field \['y'\]"),
    "shape": (lambda b: b.writers[0].append(items(1, x=np.ones((1, 3))), np.ones(1)), "Are the spaces those"),
    "type": (lambda b: b.writers[0].append(items(1, n=np.array([0.5])), np.ones(1)), "float64, expected .* of int64"),
    "fewer": (lambda b: b.writers[0].append(items(2), np.ones(1)), r"x is \(2, 2\) of float32, expected \(1, 2\)"),
    "matrix": (lambda b: b.writers[0].append(items(2), np.ones((2, 1))), r"have the shape \(2, 1\); .* one per item"),
    "new matrix": (lambda b: b.replay.update(keys([0], [9]), np.ones((1, 1))), r"have the shape \(1, 1\)"),
    "future": (lambda b: b.replay.update(keys([0], [12]), np.ones(1)), r"a key is outside .* \[12, 12\]"),
    "negative": (lambda b: b.replay.update(keys([0], [-1]), np.ones(1)), "a key is outside"),
    "no shard": (lambda b: b.replay.update(keys([2], [9]), np.ones(1)), "a key is outside the 2 shards"),
    "negative shard": (lambda b: b.replay.update(keys([-1], [9]), np.ones(1)), "a key is outside"),
    "one of two": (lambda b: b.replay.update(keys([0, 0], [9, 99]), np.ones(2)), "Nothing was changed"),
    "odd": (lambda b: b.replay.update(keys([0, 0], [9, 9]), np.ones(1)), "1 priorities for 2 keys"),
    "large batch": (lambda b: drawn(b, 17), "a batch of 17 cannot be sampled from 16 items.*lower the batch size"),
    "no batch": (lambda b: drawn(b, 0), "a batch of 0 cannot be sampled"),
    **{
        f"beta {beta}": (
            lambda b, beta=beta: b.replay.sample(4, beta, np.random.default_rng(0)),
            f"beta={beta} must be finite, and 0",
        )
        for beta in (np.nan, -0.1, np.inf)
    },
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_leaves_the_buffer_as_it_was(name: str, buffer: Buffer) -> None:
    mistake, message = MISTAKES[name]
    before = buffer.content()
    with pytest.raises(ReplayError, match=message):
        mistake(buffer)
    for was, now in zip(before, buffer.content(), strict=True):
        np.testing.assert_array_equal(was, now)
    assert len(buffer.replay.sample(16, 0.4, np.random.default_rng(0)).keys) == 16


def test_a_late_priority_for_an_overwritten_slot_changes_nothing(buffer: Buffer) -> None:
    before = buffer.content()
    assert buffer.replay.update(keys([0, 1, 1], [0, 3, 1]), np.full(3, 50.0)) == 0
    for was, now in zip(before, buffer.content(), strict=True):
        np.testing.assert_array_equal(was, now)


def test_the_oldest_make_way_first(buffer: Buffer) -> None:
    assert [buffer.replay.window(shard) for shard in range(2)] == [(4, 12), (4, 12)]
    buffer.writers[0].append(items(3), np.ones(3))
    assert buffer.replay.advance() == 3
    assert [buffer.replay.window(shard) for shard in range(2)] == [(7, 15), (4, 12)]
    found = buffer.replay.sample(16, 0.4, np.random.default_rng(0)).keys
    assert set(found.number[found.shard == 0]) <= set(range(7, 15))


def test_private_memory_beyond_the_machine_is_told_before_it_is_taken() -> None:
    with pytest.raises(ConfigError, match=r"of 10+ items needs [\d.]+ GB of memory, but only [\d.]+ GB are free"):
        Shard(item_layout({"x": ((1000,), np.float64)}, 10**12))
