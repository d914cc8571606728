"""A run in the caller's process restores torch's settings and the global random generators."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import echelon
from echelon.config import replace
from echelon.errors import EnvError
from toy_envs import CounterEnv, Step


class MeddlingEnv(CounterEnv):
    """Draws from every global generator, and sets what a learner on a GPU sets; raises at a step if told so."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
        torch.set_num_threads(3)

    def step(self, action: Any) -> Step:
        random.random(), np.random.random(), torch.rand(1)
        if self.fails:
            raise ValueError("it fails")
        return super().step(action)


def state() -> list[Any]:
    """What the process has of it."""
    kind, keys, *rest = np.random.get_state()
    settings = [torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark]
    precision: Any = torch.backends
    backends = [precision.cuda.matmul.fp32_precision, precision.mkldnn.matmul.fp32_precision]
    generators = [random.getstate(), kind, keys.tolist(), *rest, torch.get_rng_state().tolist()]
    return [*settings, *backends, *generators]


@pytest.fixture
def before() -> Iterator[list[Any]]:
    """The state of a caller that has two threads; put back after the test, whatever that left."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(2)
    yield state()
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.benchmark = False


def config_of(folder: Path, **kwargs: Any) -> echelon.TrainConfig:
    small = {"actor.envs": 2, "actor.trajectory": 4, "network.hidden": (8,), "env.kwargs": kwargs}
    fields = {"run.dir": str(folder / "run"), "engine": "inline", "stop.steps": 100, **small}
    return replace(echelon.preset("impala", f"{__file__}:MeddlingEnv"), **fields)


def test_an_inline_run_and_an_evaluation_leave_the_caller_as_it_was(tmp_path: Path, before: list[Any]) -> None:
    echelon.train(config_of(tmp_path), output=io.StringIO())
    assert state() == before
    echelon.evaluate(tmp_path / "run", episodes=2)
    assert state() == before


def test_so_does_a_run_that_fails(tmp_path: Path, before: list[Any]) -> None:
    with pytest.raises(EnvError, match="it fails"):
        echelon.train(config_of(tmp_path, fails=True), output=io.StringIO())
    assert state() == before


def test_a_precision_that_the_caller_set_for_one_backend_stays(tmp_path: Path, before: list[Any]) -> None:
    backends: Any = torch.backends
    backends.cuda.matmul.fp32_precision = "tf32"  # torch's general question has no answer then
    before = [backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision]
    echelon.train(config_of(tmp_path), output=io.StringIO())
    assert [backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision] == before
