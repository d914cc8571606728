"""Echelon trains reinforcement-learning policies with many processes, on PyTorch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from echelon.config import TrainConfig
from echelon.presets import preset
from echelon.training import RunResult, evaluate, resume, train

if TYPE_CHECKING:
    from echelon.asynchronous.learner import AsyncLearningNode
    from echelon.asynchronous.worker import AsyncWorker

__version__ = "0.1.0"
__all__ = [
    "AsyncLearningNode",
    "AsyncWorker",
    "RunResult",
    "TrainConfig",
    "__version__",
    "evaluate",
    "preset",
    "resume",
    "train",
]
LATE = {"AsyncLearningNode": "echelon.asynchronous.learner", "AsyncWorker": "echelon.asynchronous.worker"}


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is asked for: the fork server imports it while this process does."""
    if name in LATE:
        return getattr(import_module(LATE[name]), name)
    raise AttributeError(f"module 'echelon' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
