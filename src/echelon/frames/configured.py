"""Frames from a configuration: a dict that names models, optimizer and criterion, in the format of Machin.

    {"frame": "DQNApex", "frame_config": {"models": ["QNet", "QNet"], "model_args": [[4, 2], [4, 2]], ...}}

A class is given as the class itself, as "module.Class", or as a bare name. Bare names are looked up in the module that
entered the world, in the script, and in torch. The first `learner_process_number` ranks are learners, the others are
samplers.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from echelon.errors import ConfigError
from echelon.names import resolve
from echelon.servers.starting import grad_server_helper, model_server_helper
from echelon.world.world import World, world_here

if TYPE_CHECKING:
    from echelon.frames.frame import Frame

Config = Mapping[str, Any]
LEARNERS = "learner_process_number"
UNUSED = {"visualize": False, "visualize_dir": "", "replay_buffer": None}  # Machin's keys, with the only valid value


@dataclass(frozen=True, slots=True)
class ConfigTemplate:
    """The keys of a frame's configuration besides the keyword arguments of the frame."""

    models: tuple[str, ...]  # the class names in a generated configuration
    prefix: str  # of the names of its groups
    group: str = ""  # the frame's name for its group of workers and learners; "": it uses gradient servers
    further: Config = field(default_factory=dict)
    unused: Config = field(default_factory=dict)  # as UNUSED, for this frame only

    @property
    def servers(self) -> str:
        return "model_server" if self.group else "grad_server"

    def defaults(self, frame: type[Frame]) -> dict[str, Any]:
        """Returns a complete `frame_config`; the frame's keyword arguments have the defaults of its constructor."""
        keywords = inspect.signature(frame.__init__).parameters.values()
        own = {each.name: each.default for each in keywords if each.kind is each.KEYWORD_ONLY}
        groups: dict[str, Any] = {f"{self.servers}_group_name": f"{self.prefix}_{self.servers}"}
        groups[f"{self.servers}_members"] = "all"
        if self.group:
            groups |= {LEARNERS: 1, f"{self.group}_group_name": self.prefix, f"{self.group}_members": "all"}
        models = {"models": list(self.models), "model_args": [[] for _ in self.models]}
        models["model_kwargs"] = [{} for _ in self.models]
        made = {"optimizer": "Adam", "criterion": "MSELoss", "criterion_args": [], "criterion_kwargs": {}}
        return groups | models | made | dict(self.further) | own


def generate(frame: type[Frame], form: ConfigTemplate, config: Config | None) -> dict[str, Any]:
    """Returns `config` completed with the defaults of all missing keys."""
    made = copy.deepcopy(dict(config or {}))
    made["frame"] = frame.__name__
    if form.group:
        made.setdefault("batch_num", {"sampler": 10, "learner": 1})
    made["frame_config"] = form.defaults(frame) | dict(made.get("frame_config", {}))
    return made


def build(frame: Any, form: ConfigTemplate, config: Config, device: str | torch.device) -> Any:
    """Creates the frame (of the class `frame`) that `config` describes; all members of the world call this."""
    world = world_here(f"{frame.__name__}.init_from_config")
    given = _checked(frame, form, config)
    models, args, kwargs = (given.pop(name) for name in ("models", "model_args", "model_kwargs"))
    if not len(models) == len(args) == len(kwargs) == len(form.models):
        raise ConfigError(
            f"{frame.__name__}: models, model_args and model_kwargs have {len(models)}, {len(args)} and {len(kwargs)} "
            f"entries; it needs {len(form.models)} of each, for {', '.join(form.models)}."
        )
    makes = [
        functools.partial(_named(name, nn.Module, world, nn), *each, **named)
        for name, each, named in zip(models, args, kwargs, strict=True)
    ]
    optimizer = _named(given.pop("optimizer"), torch.optim.Optimizer, world, torch.optim)
    criterion = _criterion(given.pop("criterion"), given.pop("criterion_args"), given.pop("criterion_kwargs"), world)
    if given["lr_scheduler"] is not None:
        kind = torch.optim.lr_scheduler.LRScheduler
        given["lr_scheduler"] = _named(given["lr_scheduler"], kind, world, torch.optim.lr_scheduler)
    group_name, members = (given.pop(f"{form.servers}_{what}") for what in ("group_name", "members"))
    made = [make().to(device) for make in makes]
    if not form.group:
        schedule = {name: given.pop(name) for name in ("lr_scheduler", "lr_scheduler_args", "lr_scheduler_kwargs")}
        rates = [given.pop("actor_learning_rate"), given.pop("critic_learning_rate")]
        servers = grad_server_helper(makes, group_name, members, optimizer, rates, **schedule)
        return frame(*made, criterion, servers, **given)
    num_learners, name = given.pop(LEARNERS), given.pop(f"{form.group}_group_name")
    names = given.pop(f"{form.group}_members")
    if not 1 <= num_learners <= world.world_size:
        raise ConfigError(
            f"{frame.__name__}: {LEARNERS}={num_learners} must be between 1 and world_size={world.world_size}."
        )
    group = world.create_rpc_group(name, world.members if names == "all" else names)
    is_learner = 0 <= world.rank < num_learners
    if is_learner:
        learners = world.create_collective_group(list(range(num_learners)))
        made = [DistributedDataParallel(model, process_group=learners.group) for model in made]
    result = frame(*made, optimizer, criterion, group, model_server_helper(1, group_name, members), **given)
    result.role = "learner" if is_learner else "sampler"
    if not is_learner:
        result.update = _no_update
    group.barrier()  # until every member has its part of the buffer
    return result


def _no_update(*_: Any, **__: Any) -> tuple[None, None]:
    """Replaces `update` in samplers: does nothing."""
    return None, None


def _checked(frame: type[Frame], form: ConfigTemplate, config: Config) -> dict[str, Any]:
    """Returns `frame_config` completed with defaults; raises ConfigError on keys that would have no effect."""
    if config.get("frame", frame.__name__) != frame.__name__:
        raise ConfigError(f"the configuration is for {config['frame']}, not for {frame.__name__}. Use that class.")
    given, defaults = dict(config.get("frame_config", {})), form.defaults(frame)
    for name, value in (UNUSED | dict(form.unused)).items():
        if name not in defaults and given.pop(name, value) != value:
            raise ConfigError(f"{frame.__name__}: {name} has no effect here. Remove it, or set it to {value!r}.")
    if unknown := sorted(given.keys() - defaults.keys()):
        raise ConfigError(
            f"{frame.__name__}: frame_config has the unknown keys {', '.join(unknown)}; the known keys are "
            f"{', '.join(sorted(defaults))}."
        )
    return copy.deepcopy(defaults) | given


def _named(given: Any, kind: type, world: World, home: ModuleType) -> Any:
    """Returns the class that `given` is or names."""
    found = _find(given, world, home) if isinstance(given, str) else given
    if not (inspect.isclass(found) and issubclass(found, kind)):
        raise ConfigError(
            f"{given!r:.80} is not a subclass of {kind.__name__}. Pass the class, its name in the module that created "
            f'the World or in {home.__name__}, or "module.Class".'
        )
    return found


def _find(name: str, world: World, home: ModuleType) -> Any:
    if "." in name:
        place, _, qualname = name.rpartition(".")
        return resolve(f"{place}:{qualname}")
    places = (sys.modules.get(world.scope.entrance), sys.modules.get("__main__"), home)
    return next((found for place in places if (found := getattr(place, name, None)) is not None), None)


def _criterion(given: Any, args: list[Any], kwargs: dict[str, Any], world: World) -> Callable[..., Any]:
    """Returns the loss: an instance of a class, or a function with these arguments."""
    found = _find(given, world, nn) if isinstance(given, str) else given
    if inspect.isclass(found) and issubclass(found, nn.Module):
        return found(*args, **kwargs)
    if not callable(found) or args:
        raise ConfigError(
            f"criterion={given!r:.80} with criterion_args={args!r:.80} is not a loss. Name a class such as MSELoss, or "
            "pass a function of value and target, with criterion_kwargs."
        )
    return functools.partial(found, **kwargs) if kwargs else found
