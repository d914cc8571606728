"""The configuration of a user's own policy. It has no preset: `AsyncLearningNode` builds the configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from echelon.algorithm_config import AlgorithmConfig, RewardClip
from echelon.fields import doc


class UserPolicyConfig(AlgorithmConfig, frozen=True):
    """An algorithm that the user provides, as an object that acts and learns (`AsyncLearningNode`)."""

    experience = "replay"

    name: Annotated[Literal["own"], doc("the algorithm")] = "own"
    reward_clip: RewardClip = 0.0
