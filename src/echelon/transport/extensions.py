"""The msgpack extensions of the codec: tuples, numpy scalars, and raw frames as bytes, arrays and tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from echelon.errors import Refused

Ext = msgspec.msgpack.Ext

TUPLE, BYTES, ARRAY, TENSOR, SCALAR = range(1, 6)  # extension codes
MAX_RANK = 32
ARRAY_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
}
MAX_LAYOUT_BYTES = 16 + 10 * MAX_RANK  # the largest packed dtype and shape


class Unsayable(Exception):
    """A part of a message cannot be encoded; `place` is its path in the message, extended on the way up."""

    def __init__(self, problem: str) -> None:
        self.problem, self.place = problem, ""

    def inside(self, place: str) -> Unsayable:
        self.place = place + self.place
        return self


class _Layout(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The dtype and shape of a raw frame."""

    dtype: str
    shape: list[int]


class _Scalar(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A numpy scalar: its dtype and its bytes."""

    dtype: str
    raw: bytes


_pack = msgspec.msgpack.Encoder().encode
_unpack_layout = msgspec.msgpack.Decoder(_Layout).decode
_unpack_scalar = msgspec.msgpack.Decoder(_Scalar).decode


@dataclass(frozen=True, slots=True)
class ArrayHeader:
    """The checked dtype, shape and size of a frame."""

    name: str
    dtype: Any  # numpy's or torch's
    shape: tuple[int, ...]
    itemsize: int
    nbytes: int


@functools.lru_cache(maxsize=1024)
def array_header(code: int, data: bytes, most_bytes: int) -> ArrayHeader:
    """Parses and checks the description `data` of a received frame."""
    layout = _unpack_layout(data)
    what = "an array" if code == ARRAY else "a tensor"
    dtype: Any = (ARRAY_DTYPES if code == ARRAY else _tensor_dtypes()).get(layout.dtype)
    if dtype is None:
        raise Refused(f"{what} was refused: dtype {layout.dtype[:40]!r} is not supported.")
    if problem := _shape_problem(layout.shape, dtype.itemsize, most_bytes):
        raise Refused(f"{what} of shape {layout.shape[:MAX_RANK]} was refused: {problem}.")
    nbytes = math.prod(layout.shape) * dtype.itemsize
    return ArrayHeader(layout.dtype, dtype, tuple(layout.shape), dtype.itemsize, nbytes)


def _tensor_dtypes() -> Mapping[str, Any]:
    from echelon.transport.tensors import DTYPES

    return DTYPES


@functools.lru_cache(maxsize=1024)
def tag_of(code: int, dtype: str, shape: tuple[int, ...], itemsize: int, most_bytes: int) -> Ext:
    """Returns the header extension that describes a frame to send."""
    if problem := _shape_problem(shape, itemsize, most_bytes):
        raise Unsayable(f"has the shape {shape}: {problem}.")
    return Ext(code, _pack(_Layout(dtype, list(shape))))


def scalar_tag(scalar: np.generic) -> Ext:
    """Returns the header extension of a numpy scalar."""
    return Ext(SCALAR, _pack(_Scalar(check_dtype(scalar.dtype.name, ARRAY_DTYPES), scalar.tobytes())))


def scalar_of(data: bytes) -> Any:
    """Returns the numpy scalar in the received `data`."""
    scalar = _unpack_scalar(data)
    dtype = ARRAY_DTYPES.get(scalar.dtype)
    if dtype is None or len(scalar.raw) != dtype.itemsize:
        raise Refused(f"a scalar was refused: {len(scalar.raw)} bytes of dtype {scalar.dtype[:40]!r}.")
    return np.frombuffer(scalar.raw, dtype)[0]


def check_dtype(name: str, known: dict[str, Any]) -> str:
    if name not in known:
        raise Unsayable(f"has the dtype {name}, which cannot be sent. Use one of {', '.join(known)}.")
    return name


def _shape_problem(shape: Sequence[int], itemsize: int, most_bytes: int) -> str:
    """Returns why an array of `shape` cannot be sent, or "". Zeros are skipped, so they hide no huge dimension."""
    if len(shape) > MAX_RANK:
        return f"{len(shape)} dimensions, {MAX_RANK} are allowed"
    if any(size < 0 for size in shape):
        return "a dimension is negative"
    nbytes = math.prod(size for size in shape if size) * itemsize
    return f"{nbytes} bytes, {most_bytes} are allowed" if nbytes > most_bytes else ""
