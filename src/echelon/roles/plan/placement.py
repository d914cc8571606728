"""Where a learner computes and with how many threads, by what it learns from."""

from __future__ import annotations

import os

import torch

from echelon.config import LearnerConfig, TrainConfig
from echelon.roles.placement import MIN_GPU_PARAMETERS, pick_device

MIN_REPLAY_PARAMETERS = 60_000  # of one that learns from replay, recorded: two layers of 256 gain ninefold
# Parameters times samples of a minibatch that a thread pays for: 20 to 80 ms. On 16 cores, with two layers of 512, four
# threads with 7e8 each are 2.6 times as fast as one, and four with 0.7e8 each are slower (docs/learners.md).
THREAD_WORK = 200_000_000


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


def have_own_gpus(config: LearnerConfig, device: torch.device) -> bool:
    """Whether each of several learners, one of which is on `device`, has a GPU to itself, as nccl needs."""
    is_spread = config.device in ("auto", "cuda")
    return device.type == "cuda" and is_spread and torch.cuda.device_count() >= config.num_learners


def learner_threads(config: TrainConfig, num_parameters: int, num_samples: int) -> int:
    """Torch threads of each learner: what was asked for, or what pays; chosen once, and recorded with the run.

    A large network keeps all cores busy, and actors wait for it more often than it for them. With a small one it is the
    batch that counts: a thread pays for itself from THREAD_WORK on, and there are as many as the actors leave cores.
    IMPALA's two towers of 64 units with 12 actors of 512 environments: 9,184 parameters x 122,880 samples are 1.1e9, so
    five threads would pay, and 16 cores leave four. Runs that repeat exactly (inline, max_lag=0) learn from a batch as
    they always did: a sum in other parts is another sum.
    """
    learner, cores = config.learner, len(os.sched_getaffinity(0))
    device = learner_device(config, num_parameters)  # refuses one that is not there, whatever was asked for
    if learner.threads or device != "cpu":
        return learner.threads  # a run that goes on without its GPU chooses then
    if num_parameters >= MIN_GPU_PARAMETERS:
        return max(1, cores // learner.num_learners)
    if config.engine == "inline" or learner.max_lag == 0:
        return 1
    work = num_parameters * num_samples // learner.num_learners
    return max(1, min(work // THREAD_WORK, (cores - config.actor.num_actors) // learner.num_learners))
