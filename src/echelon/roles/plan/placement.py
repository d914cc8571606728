"""Chooses the devices of learners and inference servers, and the number of threads of a learner."""

from __future__ import annotations

import torch

from echelon.config import LearnerConfig, TrainConfig
from echelon.control_groups import num_cores
from echelon.errors import ConfigError
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
    assigned to the GPUs round robin; with `auto`, all of them use the CPU if they are too many for the GPUs.
    """
    if config.algorithm.slots == "gradients" and config.learner.device == "auto":
        return "cpu"
    least = MIN_REPLAY_PARAMETERS if config.algorithm.experience == "replay" else MIN_GPU_PARAMETERS
    device = pick_device(config.learner.device, num_parameters, least=least)
    if config.learners_per_host == 1 or device != "cuda":
        return device
    found = [_gpu_of(place, config.learner.device, config) for place in range(config.learner.num_learners)]
    return found[index] if "cpu" not in found else "cpu"


def server_device(config: TrainConfig, num_parameters: int, index: int) -> str:
    """Returns the device of inference server `index` for a network of `num_parameters` parameters.

    The learners and servers of a host are assigned to its GPUs round robin, the learners first.
    """
    acting = config.acting
    device = pick_device(acting.device, num_parameters, "--acting.device")
    if device != "cuda":
        return device
    is_learning = config.is_spread or index < acting.servers  # this host has learners, as the head has
    on_gpu = is_learning and learner_device(config, num_parameters).startswith("cuda")
    place = index % acting.servers + on_gpu * config.learners_per_host
    return _gpu_of(place, acting.device, config)


def _gpu_of(place: int, device: str, config: TrainConfig) -> str:
    """Returns the GPU of the learner or server number `place` of a host; if it is one too many, the CPU for `auto`.

    Raises ConfigError for a configured `device` that would have more than `acting.workers_per_gpu` of them.
    """
    num_gpus, most = torch.cuda.device_count(), config.acting.workers_per_gpu
    if place < num_gpus * most:
        return f"cuda:{place % num_gpus}"
    if device == "auto":
        return "cpu"
    raise ConfigError(
        f"device={device} for at least {place + 1} learners and inference servers, but this host has {num_gpus} GPUs "
        f"and acting.workers_per_gpu={most}, so {num_gpus * most} of them fit. Use fewer (--learners, "
        "--acting.servers), another device (--device, --acting.device), or raise --acting.workers-per-gpu."
    )


def have_own_gpus(config: LearnerConfig, device: torch.device) -> bool:
    """Returns whether each of several learners of this host, one of which is on `device`, has its own GPU.

    NCCL requires it.
    """
    is_spread = config.device in ("auto", "cuda")
    return device.type == "cuda" and is_spread and torch.cuda.device_count() >= config.num_learners


def learner_threads(config: TrainConfig, num_parameters: int, num_samples: int) -> int:
    """Returns the torch threads of each learner: `learner.threads`, or the number that pays off.

    It is chosen once and recorded with the run. A large network uses all cores, as actors wait for it more often than
    it waits for them. With a small network the batch decides: each thread needs at least THREAD_WORK, and there are at
    most as many threads as cores that the actors leave free. Example: IMPALA with two towers of 64 units and 12 actors
    of 512 environments has 9,184 parameters x 122,880 samples = 1.1e9, so five threads would pay off, and 16 cores
    leave four. A run in one process uses one thread, and so does a small network with max_lag=0: the order of summation
    changes the result, and such runs are reproducible.
    """
    learner, cores = config.learner, num_cores()
    device = learner_device(config, num_parameters)  # raises ConfigError if the device does not exist
    if learner.threads or device != "cpu":
        return learner.threads  # 0 on a GPU: a run that is resumed without its GPU chooses then
    if config.engine == "inline":
        return 1
    if num_parameters >= MIN_GPU_PARAMETERS:
        return max(1, cores // config.learners_per_host)
    if learner.max_lag == 0:
        return 1
    work = num_parameters * num_samples // (learner.num_learners * learner.microbatches)
    return max(1, min(work // THREAD_WORK, (cores - config.actors_per_host) // config.learners_per_host))
