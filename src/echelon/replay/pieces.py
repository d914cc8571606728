"""n-step transitions of a whole piece of an episode in one call; `NStep` makes the same transitions step by step.

Shapes: L steps of a piece, which has L + 1 observations; M transitions; S frames per stack, F frames per piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Spans:
    """Transitions, given by the indices of their first and last observations."""

    start: Array  # (M,) index of the first observation, which is also the index of the first step
    stop: Array  # (M,) index of the last observation
    reward: Array  # (M,) float32; infinite where the sum of finite rewards overflows
    discount: Array  # (M,) float32


def spans_of(reward: Array, num_steps: int, discount: float, *, terminated: bool, truncated: bool) -> Spans:
    """Returns the transitions of `num_steps` steps in a piece with rewards (L,), which may end its episode.

    If it does not end the episode, transitions that start in its last steps are incomplete: the next piece repeats
    these steps.
    """
    length, ended = len(reward), terminated or truncated
    count = length if ended else max(length - num_steps + 1, 0)
    start = np.arange(count)
    stop = np.minimum(start + num_steps, length)
    powers = discount ** np.arange(num_steps + 1)
    total = np.zeros(count)
    for ahead in range(min(num_steps, length)):  # in step order, so that sums are bit-identical to `NStep`
        have = min(count, length - ahead)
        total[:have] += powers[ahead] * reward[ahead : ahead + have]
    goes_on = powers[stop - start]
    if terminated:
        goes_on = np.where(stop == length, 0.0, goes_on)
    with np.errstate(over="ignore"):
        return Spans(start, stop, total.astype(np.float32), goes_on.astype(np.float32))


def overlap(num_steps: int, length: int) -> int:
    """Returns how many of the last steps of a piece of `length` the next piece of its episode repeats."""
    return min(num_steps - 1, length)


class Folded(NamedTuple):
    """Stacked images, with each frame stored once."""

    frames: Array  # (F, ...)
    numbers: Array  # (n, S) the frames of every stack


def fold(stacks: Array) -> Folded:
    """Folds the stacks (n, S, ...) of consecutive steps of one environment.

    A stack that continues its predecessor (its first S - 1 frames are the predecessor's last S - 1) adds one new frame.
    Any other stack adds those of its frames that differ from the frame before them in the stack.
    """
    n, size = stacks.shape[:2]
    flat = np.ascontiguousarray(stacks).reshape(n, size, -1).view(np.uint8)
    follows = np.zeros(n, np.bool_)
    follows[1:] = (flat[1:, :-1] == flat[:-1, 1:]).all((1, 2))
    is_new = np.zeros((n, size), np.bool_)
    is_new[:, -1] = True
    others = np.flatnonzero(~follows)
    is_new[others, 0] = True
    is_new[others, 1:] = (flat[others, 1:] != flat[others, :-1]).any(2)
    counted = np.cumsum(is_new).reshape(n, size) - 1
    # Frame s of stack t is frame s + 1 of stack t - 1, and so on back to the stack where it was new.
    step, place = np.arange(n)[:, None], np.arange(size)
    origin = np.maximum(np.maximum.accumulate(np.where(follows, 0, step[:, 0]))[:, None], step - (size - 1 - place))
    return Folded(stacks[is_new], counted[origin, place + step - origin])
