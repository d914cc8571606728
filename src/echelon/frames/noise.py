"""Noise on the actions of deterministic policies, for `act_with_noise`.

`param` has, for each action component or once for all: the bounds of "uniform"; mean and standard deviation of
"normal"; mean, standard deviation and bounds of "clipped_normal". "ou" is an Ornstein-Uhlenbeck process, whose `param`
is a dict with any of mu, theta, sigma, dt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from echelon.errors import ConfigError

NUMBERS = {"uniform": 2, "normal": 2, "clipped_normal": 4}
OU = {"mu": 0.0, "theta": 0.15, "sigma": 0.2, "dt": 0.01}


class Noise:
    """Draws noise; keeps the state of the Ornstein-Uhlenbeck process."""

    def __init__(self) -> None:
        self._state: Tensor | None = None

    def add(self, action: Tensor, param: Any, ratio: float, mode: str) -> Tensor:
        """Returns `action` (B, A) plus `ratio` times noise, independent for every entry."""
        if mode == "ou":
            return action + ratio * self._walk(action, param)
        if mode not in NUMBERS:
            raise ConfigError(f"noise mode {mode!r} is not one of {', '.join(NUMBERS)}, ou.")
        columns = _columns(param, NUMBERS[mode], mode, action)
        if mode == "uniform":
            low, high = columns
            return action + ratio * (low + (high - low) * torch.rand_like(action))
        noise = columns[0] + columns[1] * torch.randn_like(action)
        if mode == "clipped_normal":
            noise = noise.clamp(columns[2], columns[3])
        return action + ratio * noise

    def _walk(self, action: Tensor, param: Any) -> Tensor:
        given = dict(param) if isinstance(param, Mapping) else {}
        if not isinstance(param, Mapping) or given.keys() - OU.keys():
            raise ConfigError(f"noise_param={param!r:.80} of mode 'ou': pass a dict with any of {', '.join(OU)}.")
        mu, theta, sigma, dt = (float(value) for value in (OU | given).values())
        state = self._state
        if state is None or state.shape != action.shape:
            state = torch.zeros_like(action)
        self._state = state + theta * (mu - state) * dt + sigma * math.sqrt(dt) * torch.randn_like(action)
        return self._state


def _columns(param: Any, count: int, mode: str, action: Tensor) -> list[Tensor]:
    """Returns the numbers of `param`, each (A,) or ()."""
    rows = [param] if _is_numbers(param, count) else list(param) if isinstance(param, Sequence) else []
    if not rows or not all(_is_numbers(row, count) for row in rows) or len(rows) not in (1, action.shape[-1]):
        raise ConfigError(
            f"noise_param={param!r:.80} of mode {mode!r}: pass {count} numbers, or {count} for each of the "
            f"{action.shape[-1]} action components."
        )
    return list(torch.tensor(rows, dtype=action.dtype, device=action.device).unbind(-1))


def _is_numbers(row: Any, count: int) -> bool:
    return isinstance(row, Sequence) and len(row) == count and all(isinstance(x, (int, float)) for x in row)
