"""Where a learner computes, by what it learns from."""

from __future__ import annotations

import torch

from echelon.config import TrainConfig
from echelon.roles.placement import MIN_GPU_PARAMETERS, pick_device

MIN_REPLAY_PARAMETERS = 60_000  # of one that learns from replay, recorded: two layers of 256 gain ninefold


def learner_device(config: TrainConfig, num_parameters: int, index: int = 0) -> str:
    """Where a network of that size learns; gradients that actors bring are added up where they lie.

    Several learners take the GPUs in turns; `index` says which learner it is.
    """
    if config.algorithm.slots == "gradients" and config.learner.device == "auto":
        return "cpu"
    least = MIN_REPLAY_PARAMETERS if config.algorithm.experience == "replay" else MIN_GPU_PARAMETERS
    device = pick_device(config.learner.device, num_parameters, least=least)
    if config.learner.num_learners == 1 or device != "cuda":
        return device
    return f"cuda:{index % torch.cuda.device_count()}"
