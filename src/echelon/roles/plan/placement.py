"""Chooses the device and the number of threads of a learner, by its experience and its network."""

from __future__ import annotations

import os

import torch

from echelon.config import LearnerConfig, TrainConfig
from echelon.roles.placement import MIN_GPU_PARAMETERS, pick_device

# With replay, where the GPU runs a recorded CUDA graph, a smaller network is worth a GPU: two layers of 256 units are
# nine times as fast.
MIN_REPLAY_PARAMETERS = 60_000
# Parameters times samples of a minibatch above which a thread pays off: 20 to 80 ms of work. On 16 cores, with two
# layers of 512, four threads with 7e8 each are 2.6 times as fast as one, and four with 0.7e8 each are slower
# (docs/learners.md).
THREAD_WORK = 200_000_000


def learner_device(config: TrainConfig, num_parameters: int, index: int = 0) -> str:
    """Returns the device of learner `index` for a network of `num_parameters` parameters.

    With `auto`, gradients that actors computed are summed on the CPU, where they are stored. Several learners are
    assigned to the GPUs round robin.
    """
    if config.algorithm.slots == "gradients" and config.learner.device == "auto":
        return "cpu"
    least = MIN_REPLAY_PARAMETERS if config.algorithm.experience == "replay" else MIN_GPU_PARAMETERS
    device = pick_device(config.learner.device, num_parameters, least=least)
    if config.learner.num_learners == 1 or device != "cuda":
        return device
    return f"cuda:{index % torch.cuda.device_count()}"


def have_own_gpus(config: LearnerConfig, device: torch.device) -> bool:
    """Returns whether each of several learners, one of which is on `device`, has its own GPU, as NCCL requires."""
    is_spread = config.device in ("auto", "cuda")
    return device.type == "cuda" and is_spread and torch.cuda.device_count() >= config.num_learners


def learner_threads(config: TrainConfig, num_parameters: int, num_samples: int) -> int:
    """Returns the torch threads of each learner: `learner.threads`, or the number that pays off.

    It is chosen once and recorded with the run. A large network uses all cores, as actors wait for it more often than
    it waits for them. With a small network the batch decides: each thread needs at least THREAD_WORK, and there are at
    most as many threads as cores that the actors leave free. Example: IMPALA with two towers of 64 units and 12 actors
    of 512 environments has 9,184 parameters x 122,880 samples = 1.1e9, so five threads would pay off, and 16 cores
    leave four. Reproducible runs (inline, max_lag=0) always use one thread, because the order of summation changes the
    result.
    """
    learner, cores = config.learner, len(os.sched_getaffinity(0))
    device = learner_device(config, num_parameters)  # raises ConfigError if the device does not exist
    if learner.threads or device != "cpu":
        return learner.threads  # 0 on a GPU: a run that is resumed without its GPU chooses then
    if num_parameters >= MIN_GPU_PARAMETERS:
        return max(1, cores // learner.num_learners)
    if config.engine == "inline" or learner.max_lag == 0:
        return 1
    work = num_parameters * num_samples // learner.num_learners
    return max(1, min(work // THREAD_WORK, (cores - config.actor.num_actors) // learner.num_learners))
