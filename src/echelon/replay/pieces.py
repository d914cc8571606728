"""n-step transitions of a whole piece of an episode, all at once; the same that `NStep` makes step by step.

Shapes: L steps of a piece, which has L + 1 observations; M transitions; S frames of a stack, F frames of a piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Spans:
    """Transitions, as the observations between which they lie."""

    start: Array  # (M,) the observation and step that each starts at
    stop: Array  # (M,) the observation that it ends with
    reward: Array  # (M,) float32; infinite where finite rewards have a sum beyond what it holds
    discount: Array  # (M,) float32


def spans_of(reward: Array, num_steps: int, discount: float, *, terminated: bool, truncated: bool) -> Spans:
    """The transitions of `num_steps` that lie in a piece with rewards (L,), which may end its episode.

    Where it does not, those that its last steps begin are not complete: the next piece starts with these steps again.
    """
    length, ended = len(reward), terminated or truncated
    count = length if ended else max(length - num_steps + 1, 0)
    start = np.arange(count)
    stop = np.minimum(start + num_steps, length)
    powers = discount ** np.arange(num_steps + 1)
    total = np.zeros(count)
    for ahead in range(min(num_steps, length)):  # in the order of the steps, so that sums are the same to the last bit
        have = min(count, length - ahead)
        total[:have] += powers[ahead] * reward[ahead : ahead + have]
    goes_on = powers[stop - start]
    if terminated:
        goes_on = np.where(stop == length, 0.0, goes_on)
    with np.errstate(over="ignore"):
        return Spans(start, stop, total.astype(np.float32), goes_on.astype(np.float32))


def overlap(num_steps: int, length: int) -> int:
    """The last steps of a piece of `length` that the next piece of its episode starts with."""
    return min(num_steps - 1, length)


class Folded(NamedTuple):
    """Stacked images, each of their frames once."""

    frames: Array  # (F, ...)
    numbers: Array  # (n, S) which frames every stack is made of


def fold(stacks: Array) -> Folded:
    """The stacks (n, S, ...) of one environment, one step after the other.

    One that continues the one before it (its frames but the last are those but the first) brings one new frame; any
    other brings those of its frames that differ from their neighbour.
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
    # Frame s of stack t is frame s + 1 of the stack before, and so on back to where it was new.
    step, place = np.arange(n)[:, None], np.arange(size)
    origin = np.maximum(np.maximum.accumulate(np.where(follows, 0, step[:, 0]))[:, None], step - (size - 1 - place))
    return Folded(stacks[is_new], counted[origin, place + step - origin])
