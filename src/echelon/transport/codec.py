"""The codec of every socket: a msgpack header with the object tree, followed by raw buffers; never pickle.

The header is the message as msgpack. Types that msgpack lacks are extensions; a message cannot contain an extension
object itself, so none can be forged. A list that starts with TUPLE is a tuple; BYTES, ARRAY and TENSOR stand for the
next raw frame, in order, each frame used once; SCALAR is a numpy scalar. Buffers are little-endian.

A tensor arrives on the CPU and without its graph, whatever its device was: the receiver may have another GPU or none,
and moves the tensor where it needs it. An OrderedDict (a `state_dict()`) arrives as a dict, and a torch.Size as a
tuple.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from echelon.errors import ConfigError, Refused
from echelon.transport.extensions import (
    ARRAY,
    ARRAY_DTYPES,
    BYTES,
    MAX_LAYOUT_BYTES,
    SCALAR,
    TENSOR,
    TUPLE,
    ArrayHeader,
    Ext,
    Unsayable,
    array_header,
    check_dtype,
    scalar_of,
    scalar_tag,
    tag_of,
)

if TYPE_CHECKING:
    import torch

Buffer = bytes | memoryview
INLINE_BYTES = 1024  # bytes objects up to this size stay in the header


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one message; the encoder raises ConfigError and the decoder Refused beyond them."""

    header_bytes: int = 1 << 20
    total_bytes: int = 256 << 20  # header and buffers together
    frames: int = 4096  # buffers in one message
    depth: int = 32  # containers inside containers


DEFAULT_LIMITS = Limits()
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode
_TUPLE, _BYTES = Ext(TUPLE, b""), Ext(BYTES, b"")
_LEAVES = frozenset((type(None), bool, int, float, str, bytes))
_tensors: ModuleType | None = None  # echelon.transport.tensors, imported when first needed


def encode(message: object, limits: Limits = DEFAULT_LIMITS) -> list[Buffer]:
    """Returns the frames of `message`; buffers are views of its arrays, so send them before the arrays change.

    Raises ConfigError, naming the place inside the message, for anything that the codec does not support.
    """
    writer = _Writer(limits)
    try:
        header = _pack(writer.plain(message, 0))
    except Unsayable as error:
        raise ConfigError(f"message{error.place} {error.problem}") from None
    if len(header) > limits.header_bytes:
        raise ConfigError(
            f"a message has a header of {len(header)} bytes, more than the limit of {limits.header_bytes}. "
            "Send numbers as arrays and long text as bytes."
        )
    total = len(header) + sum(map(len, writer.buffers))
    if total > limits.total_bytes or len(writer.buffers) > limits.frames:
        raise ConfigError(
            f"a message of {total} bytes in {len(writer.buffers)} buffers exceeds the limit of {limits.total_bytes} "
            f"bytes or {limits.frames} buffers. Send it in parts."
        )
    return [header, *writer.buffers]


def decode(frames: Sequence[Buffer], limits: Limits = DEFAULT_LIMITS, copy: bool = True) -> Any:
    """Returns the message in `frames`, its arrays writable copies; raises Refused, and only Refused, on hostile frames.

    Without `copy`, arrays and tensors are views of the frames, which they keep alive; frames that are read-only or
    misaligned for their dtype are copied nevertheless.
    """
    if not 1 <= len(frames) <= limits.frames + 1:
        raise Refused(f"a message of {len(frames)} frames was refused: 1 to {limits.frames + 1} are allowed.")
    if len(frames[0]) > limits.header_bytes:
        raise Refused(f"a header of {len(frames[0])} bytes was refused: {limits.header_bytes} are allowed.")
    total = sum(map(len, frames))
    if total > limits.total_bytes:
        raise Refused(f"a message of {total} bytes was refused: {limits.total_bytes} are allowed.")
    try:
        tree = _unpack(frames[0])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise Refused(f"a header of {len(frames[0])} bytes was refused: {error}.") from None
    reader = _Reader(iter(frames), limits, copy)
    next(reader.frames)
    message = reader.value(tree, 0)
    if next(reader.frames, None) is not None:
        raise Refused(f"a message of {len(frames)} frames was refused: its header does not use them all.")
    return message


class _Writer:
    """Converts a message into msgpack types, and collects the buffers on the way."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.buffers: list[Buffer] = []

    def plain(self, value: Any, depth: int) -> Any:
        kind = type(value)  # exact: a subclass (an enum, a named tuple) would arrive as something else
        if kind is str:
            return _check_text(value)
        if kind is int:
            return _check_int(value)
        if value is None or kind is bool or kind is float:
            return value
        if kind is tuple or kind is list or kind is dict:
            if depth >= self.limits.depth:
                raise Unsayable(f"is nested more than {self.limits.depth} containers deep; is it part of a cycle?")
            return self._dict(value, depth + 1) if kind is dict else self._items(value, depth + 1)
        if kind is bytes:
            return value if len(value) <= INLINE_BYTES else self._refer(_BYTES, value)
        if kind is np.ndarray:
            return self._array(value)
        tensors = _tensors or _find_tensors()
        if tensors is not None and isinstance(value, tensors.Tensor):
            return tensors.pack(value, self.buffers, self.limits.total_bytes)
        if isinstance(value, np.generic):
            return scalar_tag(value)
        if isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):
            return self._array(value)
        if kind is OrderedDict or (tensors is not None and kind is tensors.Size):
            return self.plain(dict(value) if kind is OrderedDict else tuple(value), depth)
        raise Unsayable(
            f"is a {kind.__module__}.{kind.__qualname__}, which cannot be sent. Use None, bool, int, "
            "float, str, bytes, list, tuple, dict, numpy arrays and scalars, or tensors."
        )

    def _items(self, value: list[Any] | tuple[Any, ...], depth: int) -> list[Any]:
        plain: list[Any] = [_TUPLE] if type(value) is tuple else []
        num_tags = len(plain)
        try:
            for item in value:
                plain.append(self.plain(item, depth))  # not a comprehension: the length locates an error
        except Unsayable as error:
            raise error.inside(f"[{len(plain) - num_tags}]") from None
        return plain

    def _dict(self, value: dict[Any, Any], depth: int) -> dict[Any, Any]:
        plain, key = {}, None
        try:
            for key, item in value.items():
                if type(key) is not str and type(key) is not int:
                    raise Unsayable(f"has a key of type {type(key).__name__}; keys must be str or int.")
                plain[self.plain(key, depth)] = self.plain(item, depth)
        except Unsayable as error:
            raise error.inside(f"[{key!r}]") from None
        return plain

    def _array(self, array: np.ndarray[Any, Any]) -> Ext:
        dtype = check_dtype(array.dtype.name, ARRAY_DTYPES)
        tag = tag_of(ARRAY, dtype, array.shape, array.itemsize, self.limits.total_bytes)
        if not (array.flags.c_contiguous and array.dtype.isnative):
            array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        return self._refer(tag, array.reshape(-1).view(np.uint8).data)

    def _refer(self, tag: Ext, buffer: Buffer) -> Ext:
        self.buffers.append(buffer)
        return tag


class _Reader:
    """Converts a decoded header back into the message, using the raw frames in order."""

    def __init__(self, frames: Iterator[Buffer], limits: Limits, copy: bool) -> None:
        self.frames, self.limits, self.copy = frames, limits, copy

    def value(self, tree: Any, depth: int) -> Any:
        kind = type(tree)
        if kind in _LEAVES:
            return tree
        if kind is list or kind is dict:
            if depth >= self.limits.depth:
                raise Refused(f"a message was refused: it is more than {self.limits.depth} containers deep.")
            return self._container(tree, depth + 1)
        if kind is Ext:
            return self._extension(tree)
        raise Refused(f"a message was refused: it contains a {kind.__name__}, which the encoder never writes.")

    def _container(self, tree: Any, depth: int) -> Any:
        if type(tree) is dict:
            for key in tree:
                if type(key) is not str and type(key) is not int:
                    raise Refused(f"a message was refused: a key is a {type(key).__name__}, not str or int.")
            return {key: self.value(item, depth) for key, item in tree.items()}
        if tree and type(tree[0]) is Ext and tree[0].code == TUPLE and not tree[0].data:
            del tree[0]
            return tuple([self.value(item, depth) for item in tree])
        return [self.value(item, depth) for item in tree]

    def _extension(self, tag: Ext) -> Any:
        code, data = tag.code, bytes(tag.data)
        try:
            if code in (ARRAY, TENSOR) and len(data) <= MAX_LAYOUT_BYTES:
                form = array_header(code, data, self.limits.total_bytes)
                return self._array(form) if code == ARRAY else self._tensor(form)
            if code == BYTES and not data:
                return bytes(self._next())
            if code == SCALAR:
                return scalar_of(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Refused(f"a message was refused: extension {code} is malformed, {error}.") from None
        raise Refused(f"a message was refused: it contains extension {code}, which the encoder never writes.")

    def _next(self) -> Buffer:
        frame = next(self.frames, None)
        if frame is None:
            raise Refused("a message was refused: its header refers to more frames than were received.")
        return frame

    def _array(self, form: ArrayHeader) -> np.ndarray[Any, Any]:
        array = np.frombuffer(self._sized(form), form.dtype)
        if not array.flags.aligned:
            array = array.copy()
        return array if len(form.shape) == 1 else array.reshape(form.shape)

    def _tensor(self, form: ArrayHeader) -> torch.Tensor:
        tensor: torch.Tensor = (_tensors or _load_tensors()).unpack(self._sized(form), form)
        return tensor

    def _sized(self, form: ArrayHeader) -> bytearray | memoryview:
        """Returns the next frame, or a copy of it: writable, and of exactly the size of `form`."""
        frame = self._next()
        if len(frame) != form.nbytes:
            raise Refused(f"a frame of {len(frame)} bytes was refused: {form.name} {form.shape} does not fit it.")
        if form.name == "bool" and np.frombuffer(frame, np.uint8).max(initial=0) > 1:
            raise Refused("a bool array was refused: one of its bytes is neither 0 nor 1.")
        return bytearray(frame) if self.copy or isinstance(frame, bytes) or frame.readonly else frame


def _find_tensors() -> ModuleType | None:
    """Returns the module that packs tensors, or None in a process that has not imported torch."""
    return _load_tensors() if "torch" in sys.modules else None


def _load_tensors() -> ModuleType:
    global _tensors
    from echelon.transport import tensors

    _tensors = tensors
    return tensors


def _check_int(value: int) -> int:
    if not -(1 << 63) <= value < 1 << 64:
        raise Unsayable(f"is an integer of {value.bit_length()} bits; at most 64 can be sent. Send it as text.")
    return value


def _check_text(value: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise Unsayable(f"is text that UTF-8 cannot encode ({error.reason}). Send it as bytes.") from None
    return value
