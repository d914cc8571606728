"""A rule of the user's: it has no preset, as its program makes the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from echelon.algorithm_config import AlgorithmConfig


@dataclass(frozen=True)
class OwnConfig(AlgorithmConfig):
    """A rule that the user brings, as an object that acts and learns by itself (`AsyncLearningNode`)."""

    experience = "replay"

    name: Literal["own"] = "own"
