"""The common part of the frames: optimizers and schedules, synchronization of models, saving and loading."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from echelon.errors import ConfigError
from echelon.frames.configured import Config, ConfigTemplate, build, generate
from echelon.frames.modules import among_learners, bare, is_wrapped, publishes
from echelon.frames.saving import load_state, save_state
from echelon.servers.starting import check_rate

Optimizer = torch.optim.Optimizer
MakeOptimizer = Callable[..., Optimizer]
MakeSchedule = Callable[..., torch.optim.lr_scheduler.LRScheduler]


class ModelServer(Protocol):
    """The server to which a learner pushes a model and from which workers pull it: `PushPullModelServer`."""

    def push(self, model: nn.Module, pull_on_fail: bool = True) -> bool: ...

    def pull(self, model: nn.Module) -> bool: ...


class Frame:
    """An algorithm as an object: it acts, stores, learns and synchronizes its models.

    `save` writes `networks` by name. While `is_syncing` is True (the default), every act pulls the newest weights;
    after `set_sync(False)` only `manual_sync` does. A model wrapped in DistributedDataParallel or DataParallel belongs
    to a learner: it is never pulled, and of learners with equal weights the first one pushes.
    """

    FORM: ClassVar[ConfigTemplate]
    role = ""  # "learner" or "sampler", if the frame was created from a configuration

    @classmethod
    def generate_config(cls, config: Config | None = None) -> dict[str, Any]:
        """Returns `config` completed with the defaults of all missing keys."""
        return generate(cls, cls.FORM, config)

    @classmethod
    def init_from_config(cls, config: Config, model_device: str | torch.device = "cpu") -> Self:
        """Creates the frame that `config` describes, with its groups and servers; all members of the world call this.

        The first `learner_process_number` ranks learn together; `update` does nothing in the others.
        """
        made: Self = build(cls, cls.FORM, config, model_device)
        return made

    def __init__(self, networks: Mapping[str, nn.Module], gradient_max: float, discount: float) -> None:
        if not gradient_max > 0.0 or not 0.0 <= discount <= 1.0:
            raise ConfigError(
                f"{type(self).__name__}: gradient_max={gradient_max} must be above 0 and discount={discount} between 0 "
                "and 1."
            )
        self.networks = dict(networks)
        self.gradient_max, self.discount = gradient_max, discount
        self.optimizers: list[Optimizer] = []
        self.schedules: list[torch.optim.lr_scheduler.LRScheduler] = []
        self.is_syncing = True
        self.num_updates = 0

    def add_optimizers(
        self, make: MakeOptimizer, given: Sequence[tuple[nn.Module, float]], options: Mapping[str, Any] | None
    ) -> list[Optimizer]:
        """Creates an optimizer for each model, with its learning rate."""
        if isinstance(make, Optimizer):
            name = type(make).__name__
            raise ConfigError(
                f"{type(self).__name__} creates an optimizer for each of its models, so it needs the class {name}, not "
                f"an instance. Pass torch.optim.{name}, and its arguments as optimizer_kwargs or learning_rate."
            )
        for _, rate in given:
            check_rate(rate, type(self).__name__)
        self.optimizers = [make(model.parameters(), **{"lr": rate, **(options or {})}) for model, rate in given]
        return self.optimizers

    def add_schedules(
        self,
        make: MakeSchedule | None,
        args: Sequence[Sequence[Any]] | None,
        kwargs: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        """Creates a schedule for each optimizer, with its entry of the arguments; `update_lr_scheduler` steps them."""
        if make is None:
            return
        num = len(self.optimizers)
        every_args, every_kwargs = args or [()] * num, kwargs or [{}] * num
        if len(every_args) != num or len(every_kwargs) != num:
            raise ConfigError(
                f"{type(self).__name__}: lr_scheduler_args has {len(every_args)} entries and lr_scheduler_kwargs "
                f"{len(every_kwargs)}; they need one for each of the {num} optimizers."
            )
        for optimizer, given, named in zip(self.optimizers, every_args, every_kwargs, strict=True):
            self.schedules.append(make(optimizer, *given, **named))

    def descend(self, optimizer: Optimizer, model: nn.Module, loss: Tensor) -> None:
        """Makes one step of `optimizer` on `loss`, with the gradient clipped to `gradient_max`."""
        optimizer.zero_grad(set_to_none=True)
        with among_learners(model):
            loss.backward()  # type: ignore[no-untyped-call]
        self.clip(model)
        optimizer.step()

    def clip(self, model: nn.Module) -> None:
        """Clips the norm of the model's gradient to `gradient_max`."""
        if math.isfinite(self.gradient_max):
            nn.utils.clip_grad_norm_(model.parameters(), self.gradient_max)

    def update_lr_scheduler(self) -> None:
        """Steps every learning-rate schedule."""
        for schedule in self.schedules:
            schedule.step()

    # Synchronization.

    def set_sync(self, is_syncing: bool) -> None:
        """Sets whether every act pulls the newest weights first."""
        self.is_syncing = is_syncing

    def manual_sync(self) -> None:
        """Pulls the newest weights now."""
        raise NotImplementedError

    def pull(self, server: ModelServer, model: nn.Module) -> None:
        if not is_wrapped(model):
            server.pull(model)

    def push(self, server: ModelServer, model: nn.Module) -> None:
        if publishes(model):
            server.push(bare(model), pull_on_fail=not is_wrapped(model))

    # Saving.

    def state_dict(self) -> dict[str, Any]:
        """Returns the state to save besides the networks."""
        return {
            "num_updates": self.num_updates,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_updates = state["num_updates"]
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def save(self, model_dir: str | Path, network_map: Mapping[str, str] | None = None, version: int = 0) -> None:
        """Writes the networks and the frame's state as safetensors and JSON; `network_map` renames networks."""
        names = _renamed(self.networks, network_map, type(self).__name__)
        networks = {names[name]: bare(network).state_dict() for name, network in self.networks.items()}
        save_state(Path(model_dir), type(self).__name__, version, {"networks": networks, "frame": self.state_dict()})

    def load(self, model_dir: str | Path, network_map: Mapping[str, str] | None = None, version: int = -1) -> int:
        """Loads what `save` wrote as `version` (-1: the newest); returns the version."""
        names = _renamed(self.networks, network_map, type(self).__name__)
        found, state = load_state(Path(model_dir), type(self).__name__, version)
        saved = state["networks"]
        for name, network in self.networks.items():
            if names[name] not in saved:
                raise ConfigError(
                    f"{type(self).__name__} version {found} in {model_dir} has the networks {', '.join(saved)}, but "
                    f"not {names[name]}. Name one of them in network_map={{{name!r}: ...}}."
                )
            try:
                bare(network).load_state_dict(saved[names[name]])
            except RuntimeError as error:
                raise ConfigError(
                    f"the network {names[name]} of version {found} in {model_dir} does not fit {name}: {error}"
                ) from error
        self.load_state_dict(state["frame"])
        return found


def _renamed(networks: Iterable[str], network_map: Mapping[str, str] | None, frame: str) -> dict[str, str]:
    names = {name: name for name in networks}
    unknown = [name for name in network_map or {} if name not in names]
    if unknown:
        raise ConfigError(f"network_map names {', '.join(unknown)}; the networks of {frame} are {', '.join(names)}.")
    return names | dict(network_map or {})
