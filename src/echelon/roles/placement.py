"""Where the learner computes: the device and the threads that pay for its network."""

from __future__ import annotations

import os
import re

import torch

from echelon.algorithms.model import Model
from echelon.config import LearnerConfig
from echelon.errors import ConfigError

MIN_GPU_PARAMETERS = 200_000  # of a large network: worth a GPU, or every core


def pick_device(name: str, num_parameters: int) -> str:
    """The device that `name` stands for; ConfigError if it is not there.

    `auto` takes a GPU for networks that are large enough: small ones learn faster where their data already is.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() and num_parameters >= MIN_GPU_PARAMETERS else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={name}, but torch {torch.__version__} sees no GPU here. Use --device cpu or auto.")
    if re.fullmatch(r"cpu|cuda(:\d+)?", name) is None:
        raise ConfigError(f"device={name} is not a device: use auto, cpu, cuda or cuda:N.")
    _, _, index = name.partition(":")
    if index and int(index) >= torch.cuda.device_count():
        raise ConfigError(f"device={name}, but there are {torch.cuda.device_count()} GPUs here, counted from cuda:0.")
    return name


def pick_threads(config: LearnerConfig, model: Model) -> int:
    """Torch threads of the learner: what was asked for, or what pays.

    A large network keeps all cores busy, and actors wait for it more often than it for them; the operations of a small
    one are too short to share.
    """
    cores = len(os.sched_getaffinity(0))
    large = model.parameters.numel() >= MIN_GPU_PARAMETERS and model.device.type == "cpu"
    return config.threads or (cores if large else 1)
