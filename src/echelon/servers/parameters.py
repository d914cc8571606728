"""Models in messages: their weights as a dict of tensors, their gradients as one flat vector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from echelon.errors import DivergedError, EchelonError

State = dict[str, Tensor]
Shapes = dict[str, list[int]]


class ModelError(EchelonError, RuntimeError):
    """The model cannot be pushed or pulled; the message names the parameter."""


def bare(model: nn.Module) -> nn.Module:
    """Returns the model inside DistributedDataParallel or DataParallel, or the model itself."""
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        inner: nn.Module = model.module
        return inner
    return model


def state_of(model: nn.Module, where: str) -> State:
    """Returns a copy of the model's state dict on the CPU."""
    state = {}
    for name, value in bare(model).state_dict().items():
        if not isinstance(value, Tensor):
            raise ModelError(f"{where}: {name} of the model is a {type(value).__name__}; only tensors can be sent.")
        state[name] = value.detach().to("cpu", copy=True)
    return state


@torch.no_grad()
def load(model: nn.Module, state: Mapping[str, Tensor], where: str, with_buffers: bool = True) -> None:
    """Copies `state`, or only its parameters, into the model; on a mismatch, raises ModelError and changes nothing."""
    own = bare(model).state_dict()
    if state.keys() != own.keys():
        odd = sorted(state.keys() ^ own.keys())
        raise ModelError(f"{where}: {', '.join(odd)} is only in the model or only in the weights of the server.")
    for name, value in own.items():
        if value.shape != state[name].shape:
            raise ModelError(
                f"{where}: {name} has the shape {list(value.shape)} here and {list(state[name].shape)} at the server. "
                "All members must create the same model."
            )
    learned = own if with_buffers else dict(bare(model).named_parameters(remove_duplicate=False))
    for name, value in own.items():
        if name in learned:
            value.copy_(state[name])


def shapes_of(model: nn.Module) -> Shapes:
    """Returns the shapes of the model's parameters, in the order of a gradient."""
    return {name: list(value.shape) for name, value in bare(model).named_parameters()}


def check_shapes(model: nn.Module, expected: Mapping[str, Any], where: str) -> None:
    """Raises a ModelError that names the first parameter whose shape differs."""
    own = shapes_of(model)
    for name in [*expected, *own]:
        if own.get(name) != expected.get(name):
            raise ModelError(
                f"{where}: parameter {name} has the shape {own.get(name)} here and {expected.get(name)} in the managed "
                "model. All members must create the same model."
            )


def gradient_of(model: nn.Module, where: str) -> Tensor:
    """Returns the concatenated gradients of all parameters as one new vector on the CPU."""
    gradients = []
    for name, parameter in bare(model).named_parameters():
        if parameter.grad is None:
            raise ModelError(f"{where}: parameter {name} has no gradient to push. Call backward() before push().")
        gradients.append(parameter.grad.detach().reshape(-1))
    flat = torch.cat(gradients).cpu()
    if not bool(flat.sum().isfinite()) and not bool(flat.isfinite().all()):
        for (name, _), gradient in zip(bare(model).named_parameters(), gradients, strict=True):
            if not bool(gradient.isfinite().all()):
                raise DivergedError(f"{where}: the gradient of {name} has a NaN or infinity. Nothing was pushed.")
    return flat


def set_gradient(model: nn.Module, flat: Tensor) -> None:
    """Sets the gradients of the model's parameters from the vector `flat`."""
    begin = 0
    for parameter in bare(model).parameters():
        end = begin + parameter.numel()
        parameter.grad = flat[begin:end].view_as(parameter).to(parameter)
        begin = end
    assert begin == flat.numel(), f"a gradient of {flat.numel()} numbers for {begin} parameters"
