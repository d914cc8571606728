"""What the frames share: optimizers and schedules, when models are pulled, saving and loading."""

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

Optimizer = torch.optim.Optimizer
MakeOptimizer = Callable[..., Optimizer]
MakeSchedule = Callable[..., torch.optim.lr_scheduler.LRScheduler]


class ModelServer(Protocol):
    """Where a learner leaves a model and workers find it: `echelon.servers.PushPullModelServer`."""

    def push(self, model: nn.Module, pull_on_fail: bool = True) -> bool: ...

    def pull(self, model: nn.Module) -> bool: ...


class Frame:
    """An algorithm as an object: it acts, stores, learns and keeps its models up to date.

    `networks` are what `save` writes, by name. While `is_syncing` (as at first), every act pulls the newest weights;
    with `set_sync(False)` only `manual_sync` does. A model in DistributedDataParallel or DataParallel is a learner's:
    it pulls nothing, and of learners with equal weights the first one pushes.
    """

    FORM: ClassVar[ConfigTemplate]
    role = ""  # "learner" or "sampler", of a frame that was made from a configuration

    @classmethod
    def generate_config(cls, config: Config | None = None) -> dict[str, Any]:
        """`config` with everything in it that can be configured; what it says stays."""
        return generate(cls, cls.FORM, config)

    @classmethod
    def init_from_config(cls, config: Config, model_device: str | torch.device = "cpu") -> Self:
        """The frame that `config` describes, with its groups and servers; all members of the world call it.

        The first `learner_process_number` ranks learn together; `update` of the others does nothing.
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
        """An optimizer for each of the models with its learning rate."""
        if isinstance(make, Optimizer):
            name = type(make).__name__
            raise ConfigError(
                f"{type(self).__name__} makes an optimizer for each of its models, so it takes the class {name}, not "
                f"an instance of it. Pass torch.optim.{name}, and its arguments as optimizer_kwargs or learning_rate."
            )
        self.optimizers = [make(model.parameters(), **{"lr": rate, **(options or {})}) for model, rate in given]
        return self.optimizers

    def add_schedules(
        self,
        make: MakeSchedule | None,
        args: Sequence[Sequence[Any]] | None,
        kwargs: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        """A schedule for each optimizer, with the arguments in its place; `update_lr_scheduler` steps them."""
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
        """One step of `optimizer` down `loss`, with the gradient kept within `gradient_max`."""
        optimizer.zero_grad(set_to_none=True)
        with among_learners(model):
            loss.backward()  # type: ignore[no-untyped-call]
        self.clip(model)
        optimizer.step()

    def clip(self, model: nn.Module) -> None:
        """Keeps the length of the model's gradient within `gradient_max`."""
        if math.isfinite(self.gradient_max):
            nn.utils.clip_grad_norm_(model.parameters(), self.gradient_max)

    def update_lr_scheduler(self) -> None:
        """One step of every learning-rate schedule."""
        for schedule in self.schedules:
            schedule.step()

    # Keeping up to date.

    def set_sync(self, is_syncing: bool) -> None:
        """Whether every act pulls the newest weights first."""
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
        """What is saved beside the networks."""
        return {
            "num_updates": self.num_updates,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_updates = state["num_updates"]
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def save(self, model_dir: str | Path, network_map: Mapping[str, str] | None = None, version: int = 0) -> None:
        """Writes the networks and what belongs to them as safetensors and JSON; `network_map` renames networks."""
        names = _renamed(self.networks, network_map, type(self).__name__)
        networks = {names[name]: bare(network).state_dict() for name, network in self.networks.items()}
        save_state(Path(model_dir), type(self).__name__, version, {"networks": networks, "frame": self.state_dict()})

    def load(self, model_dir: str | Path, network_map: Mapping[str, str] | None = None, version: int = -1) -> int:
        """Takes back what `save` wrote as `version`, -1: the newest. Returns the version."""
        names = _renamed(self.networks, network_map, type(self).__name__)
        found, state = load_state(Path(model_dir), type(self).__name__, version)
        saved = state["networks"]
        for name, network in self.networks.items():
            if names[name] not in saved:
                raise ConfigError(
                    f"{type(self).__name__} version {found} in {model_dir} has the networks {', '.join(saved)}, none "
                    f"called {names[name]}. Name it in network_map={{{name!r}: ...}}."
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
