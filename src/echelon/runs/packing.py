"""Converts a tree of state to JSON and named tensors, the two files of a checkpoint.

Plain JSON values are kept. Values that JSON cannot represent become a dict with one reserved key: $tuple, $items (a
dict whose keys are not all plain strings), $float (nan, inf), $tensor and $array (the name in the tensor file).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


NUMBERS = "biufc"  # the kinds of arrays that a checkpoint holds


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed tree: `structure` is JSON, `tensors` are copies on the CPU."""

    structure: Any
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def pack(tree: Any) -> Packed:
    """Packs dicts, lists, tuples, numbers, strings, None, tensors and numpy arrays; raises TypeError on other types."""
    tensors: dict[str, torch.Tensor] = {}
    return Packed(_pack(tree, "state", tensors), tensors)


def unpack(packed: Packed) -> Any:
    """Returns the tree that `pack` packed, with the same types, keys, order and bits."""
    return _unpack(packed.structure, packed.tensors)


def encode(tree: Any) -> bytes:
    """Returns `tree` as one message: the length of its structure, the structure, and the tensors."""
    import safetensors.torch

    packed = pack(tree)
    structure = json.dumps(packed.structure).encode()
    return len(structure).to_bytes(8, "little") + structure + safetensors.torch.save(packed.tensors)


def decode(raw: bytes) -> Any:
    """Returns the tree in a message of `encode`, with tensors on the CPU."""
    import safetensors.torch

    size = 8 + int.from_bytes(raw[:8], "little")
    return unpack(Packed(json.loads(raw[8:size]), safetensors.torch.load(raw[size:])))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of `tensor` in row-major order, as a flat uint8 tensor on the CPU."""
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _pack(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    import torch

    match value:
        case torch.Tensor():  # copied: tensors can share memory, and training continues
            return {"$tensor": _keep(tensors, path, value.detach().to("cpu", copy=True).contiguous())}
        case np.ndarray() | np.generic() if value.dtype.kind in NUMBERS:  # before `float`: np.float64 is one
            raw = np.frombuffer(bytearray(np.ascontiguousarray(value).tobytes()), np.uint8)
            name = _keep(tensors, path, torch.from_numpy(raw.copy()))
            shape = list(value.shape) if isinstance(value, np.ndarray) else None
            return {"$array": name, "dtype": value.dtype.str, "shape": shape}
        case float() if not math.isfinite(value):
            return {"$float": str(value)}
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [_pack(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]
        case tuple():
            return {"$tuple": [_pack(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]}
        case dict() if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _pack(item, f"{path}.{key}", tensors) for key, item in value.items()}
        case dict():
            items = value.items()
            return {"$items": [[_pack(k, path, tensors), _pack(v, f"{path}.{k}", tensors)] for k, v in items]}
    raise TypeError(
        f"{path} is {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot store. Convert it "
        "to tensors, numeric arrays, numbers, strings, lists, tuples or dicts."
    )


def _unpack(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    match value:
        case list():
            return [_unpack(item, tensors) for item in value]
        case {"$tuple": items}:
            return tuple(_unpack(item, tensors) for item in items)
        case {"$items": items}:
            return {_unpack(key, tensors): _unpack(item, tensors) for key, item in items}
        case {"$float": text}:
            return float(text)
        case {"$tensor": name}:
            return tensors[name]
        case {"$array": name, "dtype": dtype, "shape": shape}:
            kind = np.dtype(dtype)
            if kind.kind not in NUMBERS:
                raise TypeError(f"an array of {kind}")
            array = tensors[name].numpy().copy().view(kind)
            return array[0] if shape is None else array.reshape(shape)
        case dict():
            return {key: _unpack(item, tensors) for key, item in value.items()}
    return value


def _keep(tensors: dict[str, torch.Tensor], path: str, tensor: torch.Tensor) -> str:
    """Stores `tensor` under `path`, or under the next free name if a dotted key has the same path."""
    name, count = path, 1
    while name in tensors:
        count += 1
        name = f"{path}#{count}"
    tensors[name] = tensor
    return name
