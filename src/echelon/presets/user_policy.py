"""A rule of the user's: it has no preset, as its program makes the configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from echelon.algorithm_config import AlgorithmConfig
from echelon.fields import doc


class UserPolicyConfig(AlgorithmConfig, frozen=True):
    """A rule that the user brings, as an object that acts and learns by itself (`AsyncLearningNode`)."""

    experience = "replay"

    name: Annotated[Literal["own"], doc("the learning rule")] = "own"
    reward_clip: Annotated[float, doc("largest size of a single reward; 0: any, 1: as usual on Atari", ge=0)] = 0.0
