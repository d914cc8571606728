"""Where a network is computed: the device and the threads that pay for it."""

from __future__ import annotations

import os
import re

import torch

from echelon.algorithms.model import Model
from echelon.errors import ConfigError

MIN_GPU_PARAMETERS = 200_000  # of a large network: worth a GPU, or every core


def pick_device(name: str, num_parameters: int, option: str = "--device") -> str:
    """The device that `name`, the value of `option`, stands for; ConfigError if it is not there.

    `auto` takes a GPU for networks that are large enough: small ones are faster where their data already is.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() and num_parameters >= MIN_GPU_PARAMETERS else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={name}, but torch {torch.__version__} sees no GPU here. Use {option} cpu or auto.")
    if re.fullmatch(r"cpu|cuda(:\d+)?", name) is None:
        raise ConfigError(f"device={name} is not a device: use auto, cpu, cuda or cuda:N.")
    _, _, index = name.partition(":")
    if index and int(index) >= torch.cuda.device_count():
        raise ConfigError(f"device={name}, but there are {torch.cuda.device_count()} GPUs here, counted from cuda:0.")
    return name


def pick_threads(asked: int, model: Model) -> int:
    """Torch threads of a learner or an inference server: what was asked for (0: nothing), or what pays.

    A large network keeps all cores busy, and actors wait for it more often than it for them; the operations of a small
    one are too short to share.
    """
    cores = len(os.sched_getaffinity(0))
    large = model.parameters.numel() >= MIN_GPU_PARAMETERS and model.device.type == "cpu"
    return asked or (cores if large else 1)
