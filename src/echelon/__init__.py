"""Echelon trains reinforcement-learning policies with many processes, on PyTorch."""

from __future__ import annotations

from echelon.config import TrainConfig
from echelon.training import RunResult, evaluate, resume, train

__version__ = "0.1.0"
__all__ = ["RunResult", "TrainConfig", "__version__", "evaluate", "resume", "train"]
