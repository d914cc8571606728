"""The pupil: what the learner teaches. A model of ours, with its rule and optimizer, or a policy of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch

from echelon.algorithms import build_algorithm
from echelon.algorithms.peers import ALONE, Peers
from echelon.config import OwnConfig, TrainConfig
from echelon.errors import ConfigError
from echelon.roles.account import LossAccount
from echelon.roles.context import Context
from echelon.roles.learners import join_learners
from echelon.roles.own import load_state, state_of
from echelon.roles.placement import learner_device, learner_threads
from echelon.roles.plan import Plan
from echelon.roles.recorded import make_learning
from echelon.roles.update import Acknowledge, LocalUpdate
from echelon.schema import Batch, GradientBatch, TransitionBatch
from echelon.world.node import Node

Array = np.ndarray[Any, Any]
AnyBatch = Batch | TransitionBatch | GradientBatch


class Pupil(Protocol):
    """What learns from batches, is published, saved and loaded."""

    device: torch.device

    @property
    def peers(self) -> Peers:
        """Those that learn from the same batches, in other processes."""

    @property
    def policy(self) -> Any:
        """What acts, as it is handed to the user."""

    @property
    def learning_rate(self) -> float | None: ...

    def schedule(self, progress: float) -> None:
        """The run is `progress` (0 to 1) done."""

    def learn(self, batch: AnyBatch, account: LossAccount, tick: Callable[[], None], acknowledge: Acknowledge) -> None:
        """Learns from one batch."""

    def parts(self) -> list[Array]:
        """What is published, in order, on the CPU."""

    def is_finite(self) -> bool:
        """Whether no weight is lost."""

    def weights(self) -> dict[str, torch.Tensor]:
        """What acts, by name."""

    def load_weights(self, weights: dict[str, torch.Tensor], source: str) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""

    def load_state_dict(self, tree: Mapping[str, Any], source: str) -> None: ...


class ModelPupil:
    """A model of ours, its rule and its optimizer."""

    def __init__(self, context: Context, node: Node) -> None:
        config: TrainConfig = context.train
        plan = Plan(context)
        device = learner_device(config, plan.model.parameters.numel(), context.index)
        if device != "cpu":
            torch.cuda.set_device(torch.device(device).index or 0)
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.benchmark = True  # shapes stay the same from batch to batch
            plan = Plan(context, device=device)
        self.model, self.device = plan.model, plan.model.device
        self.threads = learner_threads(config.learner, self.model)
        self.peers = peers = join_learners(context, node, self.device)
        self.algorithm = build_algorithm(config.algorithm, self.model, config.seed, peers)
        self.update = LocalUpdate(config.optimizer, self.model, self.algorithm.groups, peers)
        # What a network of the user's keeps beside its parameters is known to it alone, so all learners have one's.
        self.foreign = [] if config.network.name == "auto" else list(self.model.network.buffers())
        self._learn = make_learning(config, self.algorithm, self.update)

    @property
    def policy(self) -> Any:
        return self.model.network

    @property
    def learning_rate(self) -> float | None:
        rate: float = self.update.optimizer.param_groups[0]["lr"]
        return rate

    def schedule(self, progress: float) -> None:
        self.update.schedule(progress)

    def learn(self, batch: AnyBatch, account: LossAccount, tick: Callable[[], None], acknowledge: Acknowledge) -> None:
        torch.set_num_threads(self.threads)
        self._learn(batch, account, tick, acknowledge)
        if self.peers.size > 1:
            for buffer in self.foreign:
                self.peers.take_first(buffer)
        torch.set_num_threads(1)  # actors in this process (inline) compute as they do in their own

    def parts(self) -> list[Array]:
        return self.model.parts()

    def is_finite(self) -> bool:
        return bool(torch.isfinite(self.model.parameters).all())

    def weights(self) -> dict[str, torch.Tensor]:
        return self.model.weights()

    def load_weights(self, weights: dict[str, torch.Tensor], source: str) -> None:
        self.model.load_weights(weights, source)

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.weights(),
            "optimizer": self.update.state_dict(),
            "algorithm": self.algorithm.state_dict(),
        }

    def load_state_dict(self, tree: Mapping[str, Any], source: str) -> None:
        self.model.load_weights(tree["model"], source)
        self.update.load_state_dict(tree["optimizer"])
        self.algorithm.load_state_dict(tree["algorithm"])


class OwnPupil:
    """A policy object of the user's; it learns, and holds its optimizers, by itself."""

    def __init__(self, policy: Any, context: Context) -> None:
        self.policy, self.layout = policy, Plan(context).own_layout
        self.device, self.learning_rate, self.peers = torch.device("cpu"), None, ALONE

    def schedule(self, progress: float) -> None:
        """Its own affair."""

    def learn(self, batch: AnyBatch, account: LossAccount, tick: Callable[[], None], acknowledge: Acknowledge) -> None:
        del acknowledge  # transitions are drawn uniformly
        figures = self.policy.update(batch) or {}
        tick()
        account.note(tuple(figures), torch.tensor([float(value) for value in figures.values()]))

    def parts(self) -> list[Array]:
        return [self.layout.pack(state_of(self.policy))]

    def is_finite(self) -> bool:
        return all(bool(np.isfinite(array).all()) for array in state_of(self.policy).values())

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(array) for name, array in state_of(self.policy).items()}

    def load_weights(self, weights: dict[str, torch.Tensor], source: str) -> None:
        mine = {name: tensor.shape for name, tensor in self.weights().items()}
        theirs = {name: tensor.shape for name, tensor in weights.items()}
        if mine != theirs:
            raise ConfigError(
                f"the state in {source} has {theirs}, the policy has {mine}. Give the policy it comes from."
            )
        load_state(self.policy, {name: tensor.numpy() for name, tensor in weights.items()})

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.weights()}

    def load_state_dict(self, tree: Mapping[str, Any], source: str) -> None:
        self.load_weights(tree["model"], source)


def make_pupil(context: Context, node: Node) -> Pupil:
    """`node` is its learner's, by which several find each other."""
    if isinstance(context.train.algorithm, OwnConfig):
        assert context.brought is not None, "a run with the user's own policy has it in the process of its learner"
        return OwnPupil(context.brought.policy, context)
    return ModelPupil(context, node)
