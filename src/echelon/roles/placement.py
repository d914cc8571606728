"""Where a network is computed: the device and the threads that pay for it."""

from __future__ import annotations

import ctypes
import os
import re

import torch

from echelon.algorithms.model import Model
from echelon.config import TrainConfig
from echelon.errors import ConfigError

MIN_GPU_PARAMETERS = 200_000  # of a large network: worth a GPU, or every core
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def pick_device(name: str, num_parameters: int, option: str = "--device", *, least: int = MIN_GPU_PARAMETERS) -> str:
    """The device that `name`, the value of `option`, stands for; ConfigError if it is not there.

    `auto` takes a GPU for networks of `least` parameters: small ones are faster where their data already is.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() and num_parameters >= least else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={name}, but torch {torch.__version__} sees no GPU here. Use {option} cpu or auto.")
    if re.fullmatch(r"cpu|cuda(:\d+)?", name) is None:
        raise ConfigError(f"device={name} is not a device: use auto, cpu, cuda or cuda:N.")
    _, _, index = name.partition(":")
    if index and int(index) >= torch.cuda.device_count():
        raise ConfigError(f"device={name}, but there are {torch.cuda.device_count()} GPUs here, counted from cuda:0.")
    return name


def keep_freed_memory() -> None:
    """Has malloc keep what this process frees, for its next batch.

    glibc asks the kernel for every block above 32 MB and gives it back, so each large activation is zeroed page by page
    whenever it is made: three tenths of the processor time of a batch of 122,880 samples with 64 units. The
    process then stays as large as it ever was. Without glibc nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def server_threads(config: TrainConfig, model: Model) -> int:
    """Torch threads of an inference server: of a large network, its share of the cores that are not spoken for.

    A pass on several cores takes more of their time altogether, so it pays where actors and learner leave some idle.
    Measured with 8 to 64 rows of a network for Atari on two threads: 5 to 45 % more.
    """
    spare = len(os.sched_getaffinity(0)) - config.actor.num_actors - 1
    return max(1, spare // config.acting.servers) if _is_shared(model) else 1


def _is_shared(model: Model) -> bool:
    return model.parameters.numel() >= MIN_GPU_PARAMETERS and model.device.type == "cpu"
