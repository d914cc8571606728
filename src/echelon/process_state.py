"""Restores process-wide state after a run in the caller's process: torch's settings and the global generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_gpus: Any = torch.cuda  # partly untyped, like the backends
_backends: Any = torch.backends


@contextmanager
def preserve_settings() -> Iterator[None]:
    """Restores process-wide settings at the end: torch's threads, TF32, cudnn and the current GPU."""
    threads, benchmark = torch.get_num_threads(), _backends.cudnn.benchmark
    cuda, mkldnn = _backends.cuda.matmul, _backends.mkldnn.matmul
    precisions = cuda.fp32_precision, mkldnn.fp32_precision
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # the caller set the precision of a single backend, which this function cannot report
        precision = "highest"
    gpu = _gpus.current_device() if _gpus.is_initialized() else 0
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _backends.cudnn.benchmark = benchmark
        torch.set_float32_matmul_precision(precision)
        cuda.fp32_precision, mkldnn.fp32_precision = precisions
        if _gpus.is_initialized():
            _gpus.set_device(gpu)


@contextmanager
def preserve_state() -> Iterator[None]:
    """Restores the settings, and the global random generators of Python, numpy and torch."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    gpus = _gpus.get_rng_state_all() if _gpus.is_initialized() else []
    try:
        with preserve_settings():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if gpus:
            _gpus.set_rng_state_all(gpus)
