"""The models that users bring: called by the names of their arguments, wrapped or not.

A state or action is a dict whose keys are names of arguments of `forward`. Keys that a model does not take are left out
(actor and critic may look at different parts of a state); an argument without a default that no key names is refused.
Where `forward` takes one argument and the dicts hold one key, they belong together whatever they are called.
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
    """The user's own module, without what it is wrapped in."""
    return model.module if isinstance(model, DataParallel | DistributedDataParallel) else model


def is_wrapped(model: nn.Module) -> bool:
    """Whether a wrapper spreads the model over devices or processes: such a model learns and pulls nothing."""
    return bare(model) is not model


def publishes(model: nn.Module) -> bool:
    """Whether this process is the one that pushes the weights: of learners with equal weights, the first."""
    return not isinstance(model, DistributedDataParallel) or int(model.process_group.rank()) == 0


def among_learners(model: nn.Module) -> AbstractContextManager[None]:
    """Around what a wrapped model does with other learners: if one is gone, the error names it, or the world's end."""
    return explaining(model.process_group, "update()") if isinstance(model, DistributedDataParallel) else nullcontext()


@functools.lru_cache(maxsize=256)
def _arguments(forward: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    return tuple(inspect.signature(forward).parameters.values())[1:]  # without self


def call(model: nn.Module, *inputs: Inputs) -> Any:
    """What `model` says to the values of `inputs`, which are moved to where its parameters are."""
    for part in inputs:
        if not isinstance(part, Mapping):
            raise ConfigError(
                f"{type(bare(model)).__name__} was given {type(part).__name__} for a state or an action. Give a dict "
                "whose keys are the arguments of forward, such as {'state': tensor}."
            )
    values = {key: value for part in inputs for key, value in part.items()}
    named = _name(bare(model), values)
    parameter = next(model.parameters(), None)
    if parameter is not None:
        named = {key: _moved(x, parameter.device) for key, x in named.items()}
    with among_learners(model):
        return model(**named)


def _moved(x: Any, device: torch.device) -> Any:
    """A tensor, or the tensors of a list, on `device`; anything else as it is."""
    if isinstance(x, list):
        return [_moved(part, device) for part in x]
    return x.to(device) if isinstance(x, Tensor) and x.device != device else x


def samples(named: Mapping[str, Tensor], concatenate: bool) -> dict[str, Any]:
    """Tensors (N, ...) as models get them: as they are, or as lists of N tensors (1, ...)."""
    return {key: x if concatenate else list(torch.split(x, 1)) for key, x in named.items()}


def _name(model: nn.Module, values: dict[str, Any]) -> dict[str, Any]:
    """The part of `values` that `model` takes, by the names it takes them under."""
    arguments = _arguments(type(model).forward)
    kinds = {argument.kind for argument in arguments}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return values
    if len(arguments) == len(values) == 1 and arguments[0].kind in POSITIONAL:
        return {arguments[0].name: next(iter(values.values()))}
    missing = [x.name for x in arguments if x.default is x.empty and x.kind in POSITIONAL and x.name not in values]
    if missing:
        raise ConfigError(
            f"{type(model).__name__}.forward takes {', '.join(x.name for x in arguments)}, and nothing is given for "
            f"{', '.join(missing)}: the state and action dicts have the keys {', '.join(sorted(values)) or '(none)'}. "
            "Name the keys as the arguments of forward."
        )
    return {x.name: values[x.name] for x in arguments if x.name in values}


def first(output: Any) -> Tensor:
    """The tensor that a model returned, or the first one of several."""
    tensor: Tensor = output[0] if isinstance(output, tuple | list) else output
    return tensor


@contextmanager
def frozen(model: nn.Module) -> Iterator[nn.Module]:
    """The bare model, through which gradients flow to its inputs and none into it."""
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
def follow(target: nn.Module, source: nn.Module, rate: float) -> None:
    """Moves `target` the part `rate` of the way to `source`; what is counted rather than learned is copied."""
    mine, other = bare(target), bare(source)
    for old, new in zip(mine.parameters(), other.parameters(), strict=True):
        old.lerp_(new.to(old.device), rate)
    for counted, newer in zip(mine.buffers(), other.buffers(), strict=True):
        counted.copy_(newer)


def per_item(criterion: Callable[..., Any]) -> Callable[[Tensor, Tensor], Tensor]:
    """`criterion` without its own mean or sum, so that every error can have a weight; the user's own stays as it is."""
    judge = _unreduced(criterion)

    def judged(value: Tensor, target: Tensor) -> Tensor:
        errors = judge(value, target)
        if not isinstance(errors, Tensor) or errors.shape != value.shape:
            given = tuple(errors.shape) if isinstance(errors, Tensor) else type(errors).__name__
            raise ConfigError(
                f"the criterion {criterion!r:.80} gives {given} for values {tuple(value.shape)}: errors are weighted "
                "one by one. Pass one that has `reduction`, such as nn.MSELoss(), or one that gives an error per value."
            )
        return errors

    return judged


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
