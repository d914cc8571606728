"""The encoding of tensors. The codec imports it with the first tensor: a process without tensors needs no torch."""

from __future__ import annotations

import numpy as np
import torch

from echelon.transport.extensions import TENSOR, ArrayHeader, Ext, Unsayable, check_dtype, tag_of

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64"),
    )
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

Tensor, Size = torch.Tensor, torch.Size


def pack(tensor: torch.Tensor, buffers: list[bytes | memoryview], most_bytes: int) -> Ext:
    """Returns the header extension of `tensor`, and appends its bytes to `buffers`."""
    if (dtype := NAMES.get(tensor.dtype)) is None:
        dtype = check_dtype(str(tensor.dtype).removeprefix("torch."), DTYPES)
    if tensor.layout != torch.strided or tensor.is_meta:
        raise Unsayable(f"is a {tensor.layout} tensor on {tensor.device}; send a dense tensor with data.")
    tag = tag_of(TENSOR, dtype, tuple(tensor.shape), tensor.itemsize, most_bytes)
    if tensor.requires_grad or not tensor.is_cpu or tensor.is_neg() or not tensor.is_contiguous():
        tensor = tensor.detach().cpu().resolve_neg().contiguous()
    if dtype == "bfloat16":
        tensor = tensor.view(torch.int16)  # numpy has no bfloat16
    buffers.append(tensor.numpy().reshape(-1).view(np.uint8).data)
    return tag


def unpack(frame: bytearray | memoryview, form: ArrayHeader) -> torch.Tensor:
    """Returns the tensor whose bytes are in `frame`, which has the size given by `form`."""
    if not form.nbytes:
        return torch.empty(form.shape, dtype=form.dtype)
    tensor = torch.frombuffer(frame, dtype=form.dtype)
    if tensor.data_ptr() % form.itemsize:
        tensor = tensor.clone()
    return tensor if len(form.shape) == 1 else tensor.view(form.shape)
