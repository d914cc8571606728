"""The spaces that a worker sends: their form and their limits, checked before anything of their size is allocated."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import numpy as np

from echelon.errors import ConfigError, Refused
from echelon.schema import Spaces

MAX_VALUES = 1 << 24  # numbers in one observation or action
MAX_CHOICES = 1 << 20  # of all discrete values together: networks have weights for each
MAX_LEAVES = 256
MAX_DEPTH = 8  # dicts and tuples inside each other
MAX_KEY = 64  # characters
MAX_RANK = 8

DType = Annotated[str, msgspec.Meta(pattern="^(bool|u?int(8|16|32|64)|float(16|32|64))$")]
Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_VALUES)]
Shape = Annotated[list[Size], msgspec.Meta(max_length=MAX_RANK)]
Choices = Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)]
Start = Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)]
Key = Annotated[str, msgspec.Meta(max_length=MAX_KEY)]


class _Space(msgspec.Struct, tag_field="kind", forbid_unknown_fields=True):
    """A space; its class determines its kind."""


class _Dict(_Space, tag="dict"):
    spaces: Annotated[dict[Key, AnySpace], msgspec.Meta(max_length=MAX_LEAVES)]


class _Tuple(_Space, tag="tuple"):
    spaces: Annotated[list[AnySpace], msgspec.Meta(max_length=MAX_LEAVES)]


class _Box(_Space, tag="box"):
    shape: Shape
    dtype: DType
    low: bool | int | float | list[Any]
    high: bool | int | float | list[Any]


class _Discrete(_Space, tag="discrete"):
    n: Choices
    start: Start


class _MultiDiscrete(_Space, tag="multi_discrete"):
    nvec: list[Any]
    start: list[Any]


class _MultiBinary(_Space, tag="multi_binary"):
    shape: Shape


AnySpace = _Dict | _Tuple | _Box | _Discrete | _MultiDiscrete | _MultiBinary


class _Spaces(msgspec.Struct, forbid_unknown_fields=True):
    observation: AnySpace
    action: AnySpace


def received_spaces(data: dict[str, Any], most_values: int = MAX_VALUES) -> Spaces:
    """Returns the spaces that a worker sent; raises Refused, with the limit, if they are malformed or too large.

    An observation or an action has at most `most_values` numbers.
    """
    try:
        form = msgspec.convert(data, _Spaces)
        for side, space in (("observation", form.observation), ("action", form.action)):
            _check_sizes(side, list(_leaves(space, 0)), most_values)
        spaces = Spaces.from_json(data)
    except (msgspec.ValidationError, KeyError, TypeError, ValueError, ArithmeticError, AssertionError) as error:
        raise Refused(f"the worker's spaces cannot be read: {error}. Check its environment, or wrap it") from None
    except ConfigError as error:
        raise Refused(f"the worker's spaces are not supported: {error}") from None
    return spaces


def _leaves(space: AnySpace, depth: int) -> Iterator[AnySpace]:
    if not isinstance(space, _Dict | _Tuple):
        yield space
        return
    if depth >= MAX_DEPTH:
        raise ValueError(f"they are nested more than {MAX_DEPTH} dicts and tuples deep")
    for inner in space.spaces.values() if isinstance(space, _Dict) else space.spaces:
        yield from _leaves(inner, depth + 1)


def _check_sizes(side: str, leaves: list[AnySpace], most_values: int) -> None:
    num_values = num_choices = 0
    for leaf in leaves:
        match leaf:
            case _Box(shape=shape) | _MultiBinary(shape=shape):
                num_values += math.prod(shape)
            case _Discrete(n=n):
                num_values, num_choices = num_values + 1, num_choices + n
            case _MultiDiscrete(nvec=nvec, start=start):
                counts = msgspec.convert(_flat(nvec), list[Choices])
                msgspec.convert(_flat(start), list[Start])
                num_values, num_choices = num_values + len(counts), num_choices + sum(counts)
    if not leaves:
        raise ValueError(f"the {side} is empty")
    for count, most, what in (
        (len(leaves), MAX_LEAVES, "parts"),
        (num_values, most_values, "numbers"),
        (num_choices, MAX_CHOICES, "discrete values"),
    ):
        if count > most:
            raise ValueError(f"the {side} has {count:,} {what}, {most:,} are allowed")


def _flat(nested: list[Any]) -> list[Any]:
    flat: list[Any] = np.asarray(nested).reshape(-1).tolist()
    return flat
