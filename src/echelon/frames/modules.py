"""Functions on the user's models: calls by argument name, wrappers, target networks, losses.

A state or action is a dict whose keys are names of arguments of `forward`. Keys that a model does not take are ignored:
actor and critic may use different parts of a state. A missing argument without a default raises ConfigError. If
`forward` has one argument and the dicts have one key, they are matched whatever their names are.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from echelon.errors import ConfigError
from echelon.world.collective_group import explaining

Inputs = Mapping[str, Any]
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def bare(model: nn.Module) -> nn.Module:
    """Returns the user's module, without its wrapper."""
    return model.module if isinstance(model, DataParallel | DistributedDataParallel) else model


def is_wrapped(model: nn.Module) -> bool:
    """Whether a wrapper distributes the model over devices or processes: such a model belongs to a learner."""
    return bare(model) is not model


def publishes(model: nn.Module) -> bool:
    """Whether this process pushes the weights: of learners with equal weights, the first does."""
    return not isinstance(model, DistributedDataParallel) or int(model.process_group.rank()) == 0


def among_learners(model: nn.Module) -> AbstractContextManager[None]:
    """Returns a context for operations among learners, in which the error names a lost learner or the world's end."""
    return explaining(model.process_group, "update()") if isinstance(model, DistributedDataParallel) else nullcontext()


@functools.lru_cache(maxsize=256)
def _arguments(forward: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    return tuple(inspect.signature(forward).parameters.values())[1:]  # without self


def call(model: nn.Module, *inputs: Inputs) -> Any:
    """Calls `model` with the values of `inputs`, moved to the device of its parameters."""
    for part in inputs:
        if not isinstance(part, Mapping):
            raise ConfigError(
                f"{type(bare(model)).__name__} received a {type(part).__name__} as state or action. Pass a dict whose "
                "keys are the arguments of forward, such as {'state': tensor}."
            )
    values = {key: value for part in inputs for key, value in part.items()}
    named = _name(bare(model), values)
    parameter = next(model.parameters(), None)
    if parameter is not None:
        named = {key: _moved(x, parameter.device) for key, x in named.items()}
    with among_learners(model):
        return model(**named)


def _moved(x: Any, device: torch.device) -> Any:
    """Moves a tensor, or the tensors of a list, to `device`; returns anything else unchanged."""
    if isinstance(x, list):
        return [_moved(part, device) for part in x]
    return x.to(device) if isinstance(x, Tensor) and x.device != device else x


def samples(named: Mapping[str, Tensor], concatenate: bool) -> dict[str, Any]:
    """Returns tensors (N, ...) unchanged, or without `concatenate` as lists of N tensors (1, ...)."""
    return {key: x if concatenate else list(torch.split(x, 1)) for key, x in named.items()}


def _name(model: nn.Module, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of `values` that `model` takes, by the names of its arguments."""
    arguments = _arguments(type(model).forward)
    kinds = {argument.kind for argument in arguments}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return values
    if len(arguments) == len(values) == 1 and arguments[0].kind in POSITIONAL:
        return {arguments[0].name: next(iter(values.values()))}
    missing = [x.name for x in arguments if x.default is x.empty and x.kind in POSITIONAL and x.name not in values]
    if missing:
        raise ConfigError(
            f"{type(model).__name__}.forward takes {', '.join(x.name for x in arguments)}, but there is no value for "
            f"{', '.join(missing)}: the state and action dicts have the keys {', '.join(sorted(values)) or '(none)'}. "
            "Name the keys as the arguments of forward."
        )
    return {x.name: values[x.name] for x in arguments if x.name in values}


def first(output: Any) -> Tensor:
    """Returns the output of a model if it is a tensor, else its first item."""
    tensor: Tensor = output[0] if isinstance(output, tuple | list) else output
    return tensor


@contextmanager
def frozen(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the bare model with frozen parameters: gradients flow to its inputs only."""
    module = bare(model)
    learned = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in learned:
        parameter.requires_grad_(False)
    try:
        yield module
    finally:
        for parameter in learned:
            parameter.requires_grad_(True)


@torch.no_grad()
def soft_update(target: nn.Module, source: nn.Module, rate: float) -> None:
    """Moves the parameters of `target` by the fraction `rate` towards those of `source`; copies the buffers."""
    mine, other = bare(target), bare(source)
    for old, new in zip(mine.parameters(), other.parameters(), strict=True):
        old.lerp_(new.to(old.device), rate)
    for old_buffer, new_buffer in zip(mine.buffers(), other.buffers(), strict=True):
        old_buffer.copy_(new_buffer)


def per_item(criterion: Callable[..., Any]) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns `criterion` without its reduction, so that every error can be weighted; does not change the user's."""
    unreduced = _unreduced(criterion)

    def checked(value: Tensor, target: Tensor) -> Tensor:
        errors = unreduced(value, target)
        if not isinstance(errors, Tensor) or errors.shape != value.shape:
            given = tuple(errors.shape) if isinstance(errors, Tensor) else type(errors).__name__
            raise ConfigError(
                f"the criterion {criterion!r:.80} returns {given} for values {tuple(value.shape)}, but every error has "
                "its own weight. Pass one with `reduction`, such as nn.MSELoss(), or one that returns an error per "
                "value."
            )
        return errors

    return checked


def _unreduced(criterion: Callable[..., Any]) -> Callable[..., Any]:
    if isinstance(criterion, nn.Module):
        if not hasattr(criterion, "reduction"):
            return criterion
        copied = copy.copy(criterion)
        copied.__dict__["reduction"] = "none"
        return copied
    try:
        takes = "reduction" in inspect.signature(criterion).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        takes = False
    return functools.partial(criterion, reduction="none") if takes else criterion
