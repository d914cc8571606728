"""Echelon: distributed reinforcement learning on PyTorch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from echelon.version import __version__

if TYPE_CHECKING:
    from echelon.asynchronous.learner import AsyncLearningNode
    from echelon.asynchronous.worker import AsyncWorker
    from echelon.config import TrainConfig, replace
    from echelon.evaluation import evaluate, play
    from echelon.policy import load
    from echelon.presets import preset
    from echelon.runs.columns import read_episodes, read_metrics
    from echelon.training import RunResult, resume, train

__all__ = [
    "AsyncLearningNode",
    "AsyncWorker",
    "RunResult",
    "TrainConfig",
    "__version__",
    "evaluate",
    "load",
    "play",
    "preset",
    "read_episodes",
    "read_metrics",
    "replace",
    "resume",
    "train",
]
HOMES = {
    "AsyncLearningNode": "echelon.asynchronous.learner",
    "AsyncWorker": "echelon.asynchronous.worker",
    "RunResult": "echelon.training",
    "TrainConfig": "echelon.config",
    "evaluate": "echelon.evaluation",
    "load": "echelon.policy",
    "play": "echelon.evaluation",
    "preset": "echelon.presets",
    "read_episodes": "echelon.runs.columns",
    "read_metrics": "echelon.runs.columns",
    "replace": "echelon.config",
    "resume": "echelon.training",
    "train": "echelon.training",
}


def __getattr__(name: str) -> Any:
    """Imports a name on first use, so that parts such as `echelon.replay` can be used without the rest."""
    if name in HOMES:
        return getattr(import_module(HOMES[name]), name)
    raise AttributeError(f"module 'echelon' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
