"""Checkpoints written in the background: the learner does not wait for the disk, and failures are reported."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from echelon.runs.checkpoint import (
    CheckpointWriter,
    latest_checkpoint,
    load_checkpoint,
)
from running import wait_until
from stage import Stage


class TestWriter:
    """Checkpoints that are written in the background."""

    def test_nobody_waits_for_the_disk_and_what_is_written_is_as_of_the_call(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        writer, tensor, go_on, sync = CheckpointWriter(tmp_path, 2), torch.ones(3), threading.Event(), os.fsync

        def slow(descriptor: int) -> None:
            assert go_on.wait(60.0)
            sync(descriptor)

        monkeypatch.setattr(os, "fsync", slow)
        path = writer.save({"x": tensor}, step=1)
        tensor.zero_()
        assert not path.exists()
        go_on.set()
        writer.wait()
        assert torch.equal(load_checkpoint(path)["x"], torch.ones(3))
        for step in (2, 3):
            writer.save({"x": tensor}, step=step)
        writer.close()
        assert [path.name for path in sorted(tmp_path.iterdir())] == ["step_000000000002", "step_000000000003"]

    def test_a_learner_that_waits_for_a_slow_disk_makes_progress(
        self, make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Otherwise the supervisor would consider it hung and kill it during its last checkpoint."""
        stage = make_stage(**{"engine": "local", "stop.steps": 10**6})
        learner, sync, seen = stage.learner(), os.fsync, list[int]()

        def slow(descriptor: int) -> None:
            seen.append(learner.station.progress)
            wait_until(lambda: learner.station.progress > seen[-1] + 1, "the learner ticks", 20.0)
            sync(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", slow)
            learner.station.stop_requested = True
            learner.step(0.0)
        assert learner.finished and latest_checkpoint(learner.record.checkpoints) is not None and len(seen) > 3

    def test_what_went_wrong_is_raised_once_and_the_next_may_go_well(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_space(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        writer = CheckpointWriter(tmp_path, 1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", no_space)
            writer.save({}, step=1)
            with pytest.raises(OSError, match="No space"):
                writer.wait()
            writer.save({}, step=2)
            with pytest.raises(OSError, match="No space"):
                writer.save({}, step=3)
        path = writer.save({"x": 4}, step=4)
        writer.wait()
        assert list(tmp_path.iterdir()) == [path] and load_checkpoint(path) == {"x": 4}
        writer.close()

    def test_a_learner_tells_of_it_and_learns_on(
        self, make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_space(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        stage = make_stage(**{"run.checkpoint_interval_s": 0.0, "stop.steps": 10**6})
        learner, actor = stage.learner(), stage.actor()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", no_space)
            while learner.counters.updates < 3:
                actor.step(0.0)
                learner.step(0.0)
                stage.world.poll(0.0)
        (text,) = stage.messages  # reported once
        assert text.startswith("checkpoint: ") and "No space" in text
        assert latest_checkpoint(learner.record.checkpoints) is None
        while latest_checkpoint(learner.record.checkpoints) is None:
            actor.step(0.0)
            learner.step(0.0)
        stage.world.poll(0.0)
        assert stage.messages == [text, "checkpoint: written"]

    def test_the_last_one_is_written_whatever_became_of_the_one_before(
        self, make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_space(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        stage = make_stage(**{"engine": "local", "stop.steps": 10**6})
        learner = stage.learner()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", no_space)
            learner.record.checkpoint()
            under_way = learner.record.writer._under_way
            assert under_way is not None and isinstance(under_way.exception(), OSError)
        learner.station.stop_requested = True
        learner.step(0.0)
        stage.world.poll(0.0)
        assert learner.finished and latest_checkpoint(learner.record.checkpoints) is not None
        failed, written = stage.messages
        assert "No space" in failed and written == "checkpoint: written"
