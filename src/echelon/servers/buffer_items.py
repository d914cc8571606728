"""Conversion between the transitions that users write and the named arrays, or fields, that replay stores.

A transition is a dict: `state`, `action` and `next_state` are dicts of tensors with a leading dimension of 1, `reward`
is a number, and either `terminal` or `terminated` (optionally with `truncated`) is the end of the episode. All other
entries are custom attributes: numbers and tensors. A tensor `state["camera"]` is stored as the field `state/camera`. A
custom attribute may be None, then in all transitions; it is stored as the field `name/none` of zero bytes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from echelon.replay.layout import ReplayError, row_type

Array = np.ndarray[Any, Any]
Transition = Mapping[str, Any]

MAJOR = ("state", "action", "next_state")
MINOR = ("reward", "terminal", "terminated", "truncated")
ENDS = ("terminal", "terminated")  # synonyms: the episode ended in a terminal state
NONE = "/none"  # suffix of the field of an attribute that is None
DTYPES = {"reward": np.dtype(np.float32)} | {name: np.dtype(np.bool_) for name in MINOR[1:]}


def flatten(transition: Transition) -> dict[str, Array]:
    """Returns the fields of one transition, each (1, ...); raises a ReplayError that names an invalid attribute."""
    missing = [name for name in (*MAJOR, "reward") if name not in transition]
    if not any(name in transition for name in ENDS):
        missing.append("terminal")
    if missing:
        raise ReplayError(f"a transition lacks {missing}; it has {sorted(transition)}.")
    fields = {}
    for name in MAJOR:
        parts = transition[name]
        if not isinstance(parts, Mapping):
            raise ReplayError(f"{name} of a transition is a {type(parts).__name__}; pass a dict of tensors.")
        for key, value in parts.items():
            fields[f"{name}/{key}"] = _row(f"{name}[{key!r}]", value, None, is_number=False)
    for name in sorted(transition.keys() - set(MAJOR)):
        if "/" in name:
            raise ReplayError(f"attribute {name!r} of a transition has a slash in its name; rename it.")
        if transition[name] is None and name not in MINOR:
            fields[name + NONE] = _nothing(1)
        else:
            fields[name] = _row(name, transition[name], DTYPES.get(name), is_number=True)
    return fields


def _nothing(num_steps: int) -> Array:
    """Returns the field of an attribute that is None."""
    return np.zeros((num_steps, 0), np.bool_)


def flatten_packed(episode: Transition) -> dict[str, Array]:
    """Returns the fields of an episode given as one dict of attributes with a row for every step (T, ...)."""
    fields, absent = {}, [name for name, value in episode.items() if value is None and name not in (*MAJOR, *MINOR)]
    for name, value in episode.items():
        if name in absent:
            continue
        parts = {f"{name}/{key}": part for key, part in value.items()} if name in MAJOR else {name: value}
        for field, part in parts.items():
            rows = part.detach().cpu().numpy() if isinstance(part, torch.Tensor) else np.asarray(part)
            fields[field] = rows.astype(DTYPES[name], copy=False) if name in DTYPES else rows
    num_steps = max(map(len, fields.values()), default=0)
    return fields | {name + NONE: _nothing(num_steps) for name in absent}


def flatten_episode(episode: Sequence[Transition]) -> dict[str, Array]:
    """Returns the concatenated fields of an episode's transitions (T, ...)."""
    if not episode:
        raise ReplayError("an episode of 0 transitions cannot be stored.")
    steps = [flatten(transition) for transition in episode]
    for step, fields in enumerate(steps):
        if fields.keys() != steps[0].keys():
            odd = sorted({name.removesuffix(NONE) for name in fields.keys() ^ steps[0].keys()})
            raise ReplayError(f"transition {step} of an episode differs from its first one in the attributes {odd}.")
    try:
        return {name: np.concatenate([fields[name] for fields in steps]) for name in steps[0]}
    except ValueError as error:
        raise ReplayError(f"the transitions of an episode have different shapes: {error}.") from error


def _row(name: str, value: Any, dtype: np.dtype[Any] | None, is_number: bool) -> Array:
    """Returns a value as an array (1, ...)."""
    if isinstance(value, torch.Tensor):
        try:
            array = value.detach().cpu().numpy()
        except TypeError as error:  # bfloat16 and the like
            raise ReplayError(f"{name} of a transition is a tensor that numpy cannot hold: {error}.") from error
    elif isinstance(value, np.ndarray):
        array = value
    elif is_number and isinstance(value, (bool, int, float, np.generic)):
        array = np.array(value, dtype or (np.float32 if isinstance(value, float) else None))
    else:
        raise ReplayError(
            f"{name} of a transition is a {type(value).__name__}; pass a tensor"
            f"{', a number or a boolean' if is_number else ' with a leading dimension of 1'}."
        )
    if array.ndim == 0 and is_number:
        array = array[None]
    if array.ndim == 0 or array.shape[0] != 1:
        raise ReplayError(
            f"{name} of a transition has the shape {tuple(array.shape)}; its first dimension must be 1, as in "
            "`tensor.view(1, -1)`: one transition at a time."
        )
    return array if dtype is None else array.astype(dtype, copy=False)


class RowFormat:
    """The layout of items in the rows that are sent: one array for all fields is cheaper than one per field."""

    def __init__(self, spec: str) -> None:
        self.spec = spec  # JSON: name, shape and dtype of every field
        self.row = row_type({name: (tuple(shape), np.dtype(dtype)) for name, shape, dtype in json.loads(spec)})

    @staticmethod
    def of(fields: Mapping[str, Array]) -> RowFormat:
        """Returns the format of items with these fields (n, ...)."""
        return RowFormat(json.dumps([[name, value.shape[1:], value.dtype.str] for name, value in fields.items()]))

    def pack(self, records: Array) -> Array:
        """Returns a view of replay's items (n,) as rows of bytes (n, bytes of an item)."""
        assert records.dtype == self.row, f"items of {records.dtype} instead of {self.row}"
        return records.view(np.uint8).reshape(len(records), self.row.itemsize)

    def unpack(self, rows: Array) -> dict[str, Array]:
        """Returns views of the fields of items in rows of bytes."""
        records = rows.reshape(-1).view(self.row)
        return {name: records[name] for name in self.row.names or ()}

    def join(self, parts: Sequence[Array]) -> dict[str, Array]:
        """Returns a copy of the fields of items in several arrays of rows, concatenated."""
        unpacked = [self.unpack(rows) for rows in parts]
        return {name: np.concatenate([fields[name] for fields in unpacked]) for name in self.row.names or ()}


row_format = functools.lru_cache(maxsize=64)(RowFormat)


@dataclass(frozen=True, slots=True)
class BatchSelection:
    """The attributes of a batch that the user wants, and their format."""

    attrs: Sequence[str] | None = None  # None: all
    concatenate: bool = True
    concat_attrs: Collection[str] = ()  # custom attributes to concatenate too
    device: str | torch.device | None = None

    def of(self, fields: Mapping[str, Array]) -> tuple[Any, ...]:
        """Returns the attributes of the items in `fields` (n, ...), in the order of `attrs`."""
        if self.attrs is None:
            return tuple(self._attribute(name, fields) for name in names_of(fields))
        return tuple(self._rest(fields) if name == "*" else self._attribute(name, fields) for name in self.attrs)

    def _rest(self, fields: Mapping[str, Array]) -> dict[str, Any]:
        """Returns the custom attributes that `attrs` does not name."""
        named = {*MAJOR, *MINOR, *(self.attrs or ())}
        return {name: self._attribute(name, fields) for name in names_of(fields) if name not in named}

    def _attribute(self, name: str, fields: Mapping[str, Array]) -> Any:
        if name in MAJOR:
            start = f"{name}/"
            parts = {key.removeprefix(start): value for key, value in fields.items() if key.startswith(start)}
            return {key: self._values(value, self.concatenate, is_number=False) for key, value in parts.items()}
        if (absent := fields.get(name + NONE)) is not None:
            return [None] * len(absent)
        concatenate = self.concatenate and (name in MINOR or name in self.concat_attrs)
        return self._values(_minor(name, fields), concatenate, is_number=True)

    def _values(self, values: Array, concatenate: bool, is_number: bool) -> Any:
        """Returns a tensor (n, ...), numbers as (n, 1); or a list of tensors (1, ...) or of plain numbers."""
        is_number = is_number and values.ndim == 1
        if not concatenate and is_number:
            return values.tolist()
        tensor = torch.from_numpy(np.ascontiguousarray(values)).to(self.device)
        if is_number:
            tensor = tensor.unsqueeze(1)
        return tensor if concatenate else [tensor[i : i + 1] for i in range(len(tensor))]


def names_of(fields: Mapping[str, Array]) -> list[str]:
    """Returns the names of the attributes in `fields`: first the standard ones, then the custom ones, sorted."""
    found = [name for name in MAJOR if any(key.startswith(f"{name}/") for key in fields)]
    found += [name for name in MINOR if name in fields]
    own = (name.removesuffix(NONE) for name in fields if name.partition("/")[0] not in MAJOR)
    return found + sorted(name for name in own if name not in MINOR)


def _minor(name: str, fields: Mapping[str, Array]) -> Array:
    """Returns the field of an attribute that is not a dict; `terminal` and `terminated` are synonyms."""
    for other in (name, *(ENDS if name in ENDS else ())):
        if other in fields:
            return fields[other]
    if name == "truncated":  # optional: no episode was truncated
        return np.zeros(len(next(iter(fields.values()))), np.bool_)
    raise ReplayError(f"the transitions have no attribute {name!r}; they have {names_of(fields)}.")
