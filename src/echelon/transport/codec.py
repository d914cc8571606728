"""One codec for every socket: a msgpack header with the object tree, then raw buffers; never pickle.

The header is the message as msgpack. What msgpack cannot say is an extension, and since no extension object can be put
into a message, no message can forge one: a list that opens with TUPLE is a tuple; BYTES, ARRAY and TENSOR stand for the
next raw frame, in order, each frame used once; SCALAR is a numpy scalar. Buffers are little-endian.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from echelon.errors import ConfigError, Refused

Buffer = bytes | memoryview
Ext = msgspec.msgpack.Ext

TUPLE, BYTES, ARRAY, TENSOR, SCALAR = range(1, 6)  # extension codes
INLINE_BYTES = 1024  # bytes objects up to this size stay in the header
MAX_RANK = 32

ARRAY_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
}
TENSOR_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64"),
    )
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What one message may be at most; the encoder keeps to it and the decoder refuses what does not."""

    header_bytes: int = 1 << 20
    total_bytes: int = 256 << 20  # header and buffers together
    frames: int = 4096  # buffers in one message
    depth: int = 32  # containers inside containers


DEFAULT_LIMITS = Limits()


class _Layout(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """How a raw frame is an array or a tensor."""

    dtype: str
    shape: list[int]


class _Scalar(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A numpy scalar: its dtype and its bytes."""

    dtype: str
    raw: bytes


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode
_unpack_layout = msgspec.msgpack.Decoder(_Layout).decode
_unpack_scalar = msgspec.msgpack.Decoder(_Scalar).decode


def encode(message: object, limits: Limits = DEFAULT_LIMITS) -> list[Buffer]:
    """The frames of `message`; buffers are views of its arrays, so send them before the arrays change.

    Raises ConfigError, naming the place inside the message, on anything the wire does not carry.
    """
    writer = _Writer(limits)
    header = _pack(writer.plain(message, "message", 0))
    if len(header) > limits.header_bytes:
        raise ConfigError(
            f"a message has a header of {len(header)} bytes, more than the {limits.header_bytes} the wire carries. "
            "Send numbers as arrays and long text as bytes."
        )
    total = len(header) + sum(len(buffer) for buffer in writer.buffers)
    if total > limits.total_bytes or len(writer.buffers) > limits.frames:
        raise ConfigError(
            f"a message of {total} bytes in {len(writer.buffers)} buffers exceeds the {limits.total_bytes} bytes or "
            f"{limits.frames} buffers the wire carries. Send it in parts."
        )
    return [header, *writer.buffers]


def decode(frames: Sequence[Buffer], limits: Limits = DEFAULT_LIMITS) -> Any:
    """The message of `frames`, its arrays writable copies; raises Refused, and nothing else, on hostile frames."""
    if not 1 <= len(frames) <= limits.frames + 1:
        raise Refused(f"a message of {len(frames)} frames was refused: 1 to {limits.frames + 1} are allowed.")
    if len(frames[0]) > limits.header_bytes:
        raise Refused(f"a header of {len(frames[0])} bytes was refused: {limits.header_bytes} are allowed.")
    total = sum(len(frame) for frame in frames)
    if total > limits.total_bytes:
        raise Refused(f"a message of {total} bytes was refused: {limits.total_bytes} are allowed.")
    try:
        tree = _unpack(frames[0])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise Refused(f"a header of {len(frames[0])} bytes was refused: {error}.") from None
    reader = _Reader(iter(frames[1:]), limits)
    message = reader.value(tree, 0)
    if next(reader.frames, None) is not None:
        raise Refused(f"a message of {len(frames)} frames was refused: its header does not use them all.")
    return message


class _Writer:
    """Turns a message into what msgpack can say, and collects the buffers on the way."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.buffers: list[Buffer] = []

    def plain(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)  # exact: a subclass (an enum, a named tuple) would arrive as something else
        if value is None or kind is bool or kind is float:
            return value
        if kind is int:
            return _check_int(value, path)
        if kind is str:
            return _check_text(value, path)
        if kind in (list, tuple, dict):
            if depth >= self.limits.depth:
                raise ConfigError(f"{path} lies more than {self.limits.depth} containers deep; is it part of a cycle?")
            return self._container(value, path, depth + 1)
        if kind is bytes:
            return value if len(value) <= INLINE_BYTES else self._refer(BYTES, b"", value)
        if isinstance(value, np.generic):
            return Ext(SCALAR, _pack(_Scalar(_check_dtype(value.dtype.name, ARRAY_DTYPES, path), value.tobytes())))
        if isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):
            return self._array(value, path)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        raise ConfigError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which the wire does not carry. Use None, bool, int, "
            "float, str, bytes, list, tuple, dict, numpy arrays and scalars, or tensors."
        )

    def _container(self, value: Any, path: str, depth: int) -> Any:
        if isinstance(value, dict):
            for key in value:
                if type(key) is int:
                    _check_int(key, f"a key of {path}")
                elif type(key) is str:
                    _check_text(key, f"a key of {path}")
                else:
                    raise ConfigError(f"{path} has the key {key!r} of type {type(key).__name__}; keys are str or int.")
            return {key: self.plain(item, f"{path}[{key!r}]", depth) for key, item in value.items()}
        items = [self.plain(item, f"{path}[{i}]", depth) for i, item in enumerate(value)]
        return [Ext(TUPLE, b""), *items] if isinstance(value, tuple) else items

    def _array(self, array: np.ndarray[Any, Any], path: str) -> Ext:
        dtype = _check_dtype(array.dtype.name, ARRAY_DTYPES, path)
        shape = list(array.shape)
        if problem := _shape_problem(shape, array.itemsize, self.limits):
            raise ConfigError(f"{path} has the shape {array.shape}: {problem}.")
        flat = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(-1)
        return self._refer(ARRAY, _pack(_Layout(dtype, shape)), flat.view(np.uint8).data)

    def _tensor(self, tensor: torch.Tensor, path: str) -> Ext:
        dtype = _check_dtype(str(tensor.dtype).removeprefix("torch."), TENSOR_DTYPES, path)
        if tensor.layout != torch.strided or tensor.device.type == "meta":
            raise ConfigError(f"{path} is a {tensor.layout} tensor on {tensor.device}; send a dense one with data.")
        shape = list(tensor.shape)
        if problem := _shape_problem(shape, tensor.itemsize, self.limits):
            raise ConfigError(f"{path} has the shape {tuple(shape)}: {problem}.")
        flat = tensor.detach().cpu().resolve_neg().contiguous().reshape(-1)
        return self._refer(TENSOR, _pack(_Layout(dtype, shape)), flat.view(torch.uint8).numpy().data)

    def _refer(self, code: int, data: bytes, buffer: Buffer) -> Ext:
        self.buffers.append(buffer)
        return Ext(code, data)


class _Reader:
    """Turns a decoded header back into the message, taking the raw frames in order."""

    def __init__(self, frames: Iterator[Buffer], limits: Limits) -> None:
        self.frames = frames
        self.limits = limits

    def value(self, tree: Any, depth: int) -> Any:
        kind = type(tree)
        if kind is list or kind is dict:
            if depth >= self.limits.depth:
                raise Refused(f"a message was refused: it is more than {self.limits.depth} containers deep.")
            return self._container(tree, depth + 1)
        if kind is Ext:
            return self._extension(tree)
        if tree is None or kind in (bool, int, float, str, bytes):
            return tree
        raise Refused(f"a message was refused: it holds a {kind.__name__}, which no sender of ours writes.")

    def _container(self, tree: Any, depth: int) -> Any:
        if isinstance(tree, dict):
            for key in tree:
                if type(key) is not str and type(key) is not int:
                    raise Refused(f"a message was refused: a key is a {type(key).__name__}, not str or int.")
            return {key: self.value(item, depth) for key, item in tree.items()}
        if tree and type(tree[0]) is Ext and tree[0].code == TUPLE and not tree[0].data:
            return tuple([self.value(item, depth) for item in tree[1:]])
        return [self.value(item, depth) for item in tree]

    def _extension(self, tag: Ext) -> Any:
        try:
            if tag.code == BYTES and not tag.data:
                return bytes(self._next())
            if tag.code == ARRAY:
                return self._array(_unpack_layout(tag.data))
            if tag.code == TENSOR:
                return self._tensor(_unpack_layout(tag.data))
            if tag.code == SCALAR:
                return _scalar(_unpack_scalar(tag.data))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Refused(f"a message was refused: extension {tag.code} is malformed, {error}.") from None
        raise Refused(f"a message was refused: it holds extension {tag.code}, which no sender of ours writes.")

    def _next(self) -> Buffer:
        frame = next(self.frames, None)
        if frame is None:
            raise Refused("a message was refused: its header names more frames than came.")
        return frame

    def _array(self, layout: _Layout) -> np.ndarray[Any, Any]:
        dtype = ARRAY_DTYPES.get(layout.dtype)
        if dtype is None:
            raise Refused(f"an array was refused: dtype {layout.dtype[:40]!r} is not on the list.")
        return np.frombuffer(self._sized(layout, dtype.itemsize), dtype).reshape(layout.shape).copy()

    def _tensor(self, layout: _Layout) -> torch.Tensor:
        dtype = TENSOR_DTYPES.get(layout.dtype)
        if dtype is None:
            raise Refused(f"a tensor was refused: dtype {layout.dtype[:40]!r} is not on the list.")
        raw = np.frombuffer(self._sized(layout, dtype.itemsize), np.uint8)
        tensor = torch.empty(layout.shape, dtype=dtype)
        np.copyto(tensor.view(-1).view(torch.uint8).numpy(), raw)
        return tensor

    def _sized(self, layout: _Layout, itemsize: int) -> Buffer:
        """The next frame, which must be exactly as long as `layout` says."""
        if problem := _shape_problem(layout.shape, itemsize, self.limits):
            raise Refused(f"an array of shape {layout.shape[:MAX_RANK]} was refused: {problem}.")
        frame = self._next()
        if len(frame) != math.prod(layout.shape) * itemsize:
            raise Refused(f"a frame of {len(frame)} bytes was refused: {layout.dtype} {layout.shape} does not fit it.")
        if layout.dtype == "bool" and np.frombuffer(frame, np.uint8).max(initial=0) > 1:
            raise Refused("an array was refused: it is bool, but a byte of it is neither 0 nor 1.")
        return frame


def _scalar(scalar: _Scalar) -> Any:
    dtype = ARRAY_DTYPES.get(scalar.dtype)
    if dtype is None or len(scalar.raw) != dtype.itemsize:
        raise Refused(f"a scalar was refused: {len(scalar.raw)} bytes of dtype {scalar.dtype[:40]!r}.")
    return np.frombuffer(scalar.raw, dtype)[0]


def _shape_problem(shape: Sequence[int], itemsize: int, limits: Limits) -> str:
    """Why an array of `shape` cannot travel, or ""; a zero hides no huge dimension, which numpy would choke on."""
    if len(shape) > MAX_RANK:
        return f"{len(shape)} dimensions, {MAX_RANK} are allowed"
    if any(size < 0 for size in shape):
        return "a dimension is negative"
    nbytes = math.prod(size for size in shape if size) * itemsize
    return f"{nbytes} bytes, {limits.total_bytes} are allowed" if nbytes > limits.total_bytes else ""


def _check_dtype(name: str, known: dict[str, Any], path: str) -> str:
    if name not in known:
        raise ConfigError(f"{path} has the dtype {name}, which the wire does not carry. Use one of {', '.join(known)}.")
    return name


def _check_int(value: int, path: str) -> int:
    if not -(1 << 63) <= value < 1 << 64:
        raise ConfigError(f"{path} is an integer of {value.bit_length()} bits; the wire carries 64. Send it as text.")
    return value


def _check_text(value: str, path: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"{path} is text that UTF-8 cannot say ({error.reason}). Send it as bytes.") from None
    return value
