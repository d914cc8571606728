"""Chooses the device and the number of threads that compute a network."""

from __future__ import annotations

import ctypes

import torch

from echelon.algorithms.model import Model
from echelon.config import TrainConfig
from echelon.control_groups import num_cores
from echelon.errors import ConfigError
from echelon.fields import require_device

MIN_GPU_PARAMETERS = 200_000  # a network of at least this size is worth a GPU, or all cores
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # from glibc's malloc.h


def has_gpu() -> bool:
    """Returns whether torch can use a GPU of this host.

    Roles ask NVML (`engines.local`), which also counts GPUs whose driver is too old for torch, or is not visible in a
    container. To ask CUDA itself takes seconds. The version of its driver is known without them.
    """
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return torch.cuda.is_available()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    return version.value // 1000 >= int(torch.version.cuda.partition(".")[0])


def pick_device(name: str, num_parameters: int, option: str = "--device", *, least: int = MIN_GPU_PARAMETERS) -> str:
    """Returns the device for `name`, the value of `option`. Raises ConfigError if it does not exist.

    `auto` chooses a GPU for networks of at least `least` parameters: smaller networks are faster on the CPU, where
    their data is.
    """
    require_device(name, "device")
    if name == "auto":
        return "cuda" if num_parameters >= least and has_gpu() else "cpu"
    if name.startswith("cuda") and not has_gpu():
        raise ConfigError(
            f"device={name}, but torch {torch.__version__} finds no GPU that it can use. Use {option} cpu or auto."
        )
    _, _, index = name.partition(":")
    if index and int(index) >= torch.cuda.device_count():
        raise ConfigError(f"device={name}, but this host has {torch.cuda.device_count()} GPUs, counted from cuda:0.")
    return name


def keep_freed_memory() -> None:
    """Makes malloc keep freed memory for the next batch.

    By default glibc gets every block above 32 MB from the kernel and returns it when it is freed. The kernel then
    zeroes the pages of each large activation whenever it is allocated, which takes 30 % of the CPU time of a batch of
    122,880 samples with 64 units. With this setting the process never shrinks. Has no effect without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def server_threads(config: TrainConfig, model: Model) -> int:
    """Returns the torch threads of an inference server: for a large network, its share of the otherwise unused cores.

    A forward pass on several cores takes more CPU time in total, so it pays off only on cores that actors and learner
    leave idle. Measured with 8 to 64 rows of an Atari network on two threads: 5 to 45 % more CPU time.
    """
    spare = num_cores() - config.actors_per_host - 1
    return max(1, spare // config.acting.servers) if _is_shared(model) else 1


def _is_shared(model: Model) -> bool:
    return model.parameters.numel() >= MIN_GPU_PARAMETERS and model.device.type == "cpu"
