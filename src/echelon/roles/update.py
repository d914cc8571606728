"""Updates the model from batches: computes the losses and makes an optimizer step for each, on one or more learners.

With microbatches, or with several learners, a loss is the mean over the `count` samples of one part of a minibatch. Its
gradient and its reported values are multiplied by the count and summed over the microbatches, then, in one all-reduce,
over the learners. Dividing by the sum of the counts gives the gradient and the values of the whole minibatch. All
learners therefore clip and step identically, whatever their shares, and report the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol, cast

import numpy as np
import torch

from echelon.algorithms import build_algorithm
from echelon.algorithms.model import FlatModule, Model
from echelon.algorithms.peers import ALONE, Peers
from echelon.algorithms.protocol import POLICY, Algorithm, Loss, ParameterGroup, StaticAlgorithm
from echelon.config import OptimizerConfig, TrainConfig
from echelon.errors import ConfigError
from echelon.roles.loss_account import LossAccount
from echelon.roles.optimizer import Optimizer
from echelon.schema import Batch, GradientBatch, Sequences, TransitionBatch

Array = np.ndarray[Any, Any]
Tick = Callable[[], None]
AnyBatch = Batch | TransitionBatch | GradientBatch
Acknowledge = Callable[[Any, torch.Tensor], None]  # receives the keys of items and their new priorities
NOTHING_ELSE: Mapping[str, ParameterGroup] = MappingProxyType({})


class Stepper:
    """An optimizer over one flat parameter tensor."""

    def __init__(self, config: OptimizerConfig, group: ParameterGroup, peers: Peers = ALONE) -> None:
        self.module, self.peers = group.module, peers
        self.learning_rate = group.learning_rate  # at the start
        self.optimizer = Optimizer(config, group)
        self.is_accumulating = False

    def __call__(self, loss: Loss, clip_norm: float, accumulate: bool = False) -> torch.Tensor | None:
        """Makes a step; returns the norm before clipping. With `accumulate`, keeps the gradient: the next call adds."""
        gradients = self.module.gradients
        if loss.gradient is not None:
            gradients.copy_(loss.gradient)
        elif self.peers.size == 1 and not accumulate and not self.is_accumulating:
            self.module.descend(loss.value)
        else:
            self._add(loss)
            self.is_accumulating = accumulate
            if accumulate:
                return None
            self._combine(loss)
        norm: torch.Tensor = torch.linalg.vector_norm(gradients)
        if clip_norm > 0:
            gradients.mul_((clip_norm / (norm + 1e-6)).clamp_(max=1.0))
        self.optimizer.step()
        return norm

    def _add(self, loss: Loss) -> None:
        """Adds the gradient and the values of `loss`, times its count, to the sums of the minibatch."""
        module, count = self.module, loss.count
        if not self.is_accumulating:
            module.exchange.zero_()
        if isinstance(count, int) and count == 0:  # an empty part: its mean loss is NaN
            return
        module.accumulate(loss.value * count)
        shown = torch.stack([value.detach() for value in (loss.value, *loss.metrics.values())])
        module.shared_figures[0] += count
        module.shared_figures[1 : 1 + len(shown)] += shown * count

    def _combine(self, loss: Loss) -> None:
        """Divides the sums over all learners by their count, and replaces the values of `loss` by the results."""
        module = self.module
        self.peers.add_up(module.exchange)
        figures = module.shared_figures[: 2 + len(loss.metrics)]
        total = figures[0].clamp(min=1.0)
        module.gradients.div_(total)
        loss.value, *values = (figures[1:] / total).unbind()
        loss.metrics = dict(zip(loss.metrics, values, strict=True))


class LocalUpdate:
    """Makes the backward pass, clips and steps, on the flat tensors of the parameter group of each loss."""

    def __init__(
        self,
        config: OptimizerConfig,
        model: FlatModule,
        groups: Mapping[str, ParameterGroup] = NOTHING_ELSE,
        peers: Peers = ALONE,
    ) -> None:
        """`groups` are the parameter groups that the algorithm trains besides the model."""
        self.config = config
        trained = {POLICY: ParameterGroup(model, config.learning_rate), **groups}
        self.steppers = {name: Stepper(config, group, peers) for name, group in trained.items()}
        self.scale = 1.0  # of the learning rates, in relation to the configured ones

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of the model."""
        return self.steppers[POLICY].optimizer

    def schedule(self, progress: float, learning_rate: float | None = None) -> None:
        """Sets the learning rates at `progress` (0 to 1) of the run.

        `learning_rate` replaces the schedule: it is that of the model, and the others keep their proportion to it.
        """
        scale = max(1.0 - progress, 0.0) if self.config.schedule == "linear" else 1.0
        if learning_rate is not None:
            scale = learning_rate / self.config.learning_rate
        if scale != self.scale:
            self.scale = scale
            for stepper in self.steppers.values():
                stepper.optimizer.learning_rate = stepper.learning_rate * scale

    def __call__(self, loss: Loss, accumulate: bool = False) -> torch.Tensor | None:
        """Updates the group of `loss`; see `Stepper`."""
        return self.steppers[loss.group](loss, self.config.clip_norm, accumulate)

    def is_finite(self) -> bool:
        """Returns whether the moments of all optimizers are finite: otherwise they could not be restored."""
        return all(stepper.optimizer.is_finite() for stepper in self.steppers.values())

    def state_dict(self) -> dict[str, Any]:
        return {name: stepper.optimizer.state_dict() for name, stepper in self.steppers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the moments of the optimizers. Their settings are those of the configuration."""
        for name, stepper in self.steppers.items():
            stepper.optimizer.load_state_dict(state[name])


def learn_once(
    algorithm: Algorithm,
    batch: AnyBatch,
    update: LocalUpdate,
    account: LossAccount,
    tick: Tick = lambda: None,
    acknowledge: Acknowledge | None = None,
) -> None:
    """Learns from one batch, with any algorithm: makes an update for each loss of each minibatch, in order.

    `tick` is called after each loss, so that a learner with a long batch shows progress. `acknowledge` receives the new
    priorities of each minibatch, if items are drawn by priority.
    """
    microbatches = algorithm.model.microbatches
    for minibatch in algorithm.minibatches(batch):
        shown: dict[str, torch.Tensor] = {}
        losses = algorithm.losses(minibatch) if microbatches == 1 else _losses_of_parts(algorithm, minibatch)
        for number, loss in enumerate(losses, 1):
            norm = update(loss, accumulate=number < microbatches)
            tick()
            shown[loss.column] = loss.value.detach()
            shown |= {name: value.detach() for name, value in loss.metrics.items()}
            if norm is not None:
                shown[loss.norm_column] = norm
        account.note(tuple(shown), torch.stack(list(shown.values())))
        if acknowledge is not None and (priorities := algorithm.priorities(minibatch)) is not None:
            acknowledge(minibatch.keys, priorities)
    for part in batch.split(microbatches) if isinstance(batch, Batch) else [batch]:
        algorithm.finish(part)


def _losses_of_parts(algorithm: Algorithm, minibatch: Sequences) -> Iterator[Loss]:
    """Yields the losses of the microbatches of `minibatch`, lazily: the activations of one are freed before the next.

    The optimizer steps after the last, so an algorithm whose second loss depends on the step of the first is refused.
    """
    for part in minibatch.split(algorithm.model.microbatches):
        loss, *others = algorithm.losses(part)
        if others:
            raise ConfigError(
                f"learner.microbatches={algorithm.model.microbatches} needs an algorithm with one loss per minibatch, "
                f"but {type(algorithm).__name__} has {1 + len(others)}. Use --learner.microbatches 1."
            )
        yield loss


class LearnFunction(Protocol):
    """Learns from one batch, as `learn_once` does."""

    def __call__(self, batch: Any, account: LossAccount, tick: Tick, acknowledge: Acknowledge | None) -> None: ...


def make_learning(
    config: TrainConfig, algorithm: Algorithm, update: LocalUpdate, peers: Peers = ALONE
) -> LearnFunction:
    """Returns `learn_once`, or a recorded CUDA graph of it if a GPU runs the same operations for every batch.

    The operations may change with a user's network, a schedule, compilation or several learners.
    """
    is_fixed = config.network.name == "auto" and config.optimizer.schedule == "constant" and not config.learner.compile
    if algorithm.model.device.type == "cuda" and algorithm.is_static and is_fixed and peers.size == 1:
        from echelon.roles.recorded import RecordedLearning  # imported late: most runs do not need it

        return RecordedLearning(cast(StaticAlgorithm, algorithm), update)
    return lambda batch, account, tick, acknowledge: learn_once(algorithm, batch, update, account, tick, acknowledge)


class Trainable(Protocol):
    """What the learner updates, publishes and checkpoints."""

    device: torch.device

    @property
    def peers(self) -> Peers:
        """The learners in other processes that learn from the same batches."""

    @property
    def policy(self) -> Any:
        """The acting policy, as it is passed to the user's save function."""

    @property
    def learning_rate(self) -> float | None: ...

    def schedule(self, progress: float, learning_rate: float | None) -> None:
        """Sets schedules at `progress` (0 to 1) of the run; `learning_rate` replaces the schedule of that."""

    def learn(self, batch: AnyBatch, account: LossAccount, tick: Tick, acknowledge: Acknowledge | None) -> None:
        """Learns from one batch."""

    def parts(self) -> list[Array]:
        """Returns the arrays to publish, in order, on the CPU."""

    def is_finite(self) -> bool:
        """Returns whether all weights, and the moments of the optimizers, are finite."""

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns the weights of the acting policy by name."""

    def load_weights(self, weights: dict[str, torch.Tensor], source: str) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        """Returns the state to save in a checkpoint."""

    def load_state_dict(self, tree: Mapping[str, Any], source: str) -> None: ...


class ModelTrainable:
    """A built-in model with its algorithm and its optimizer."""

    def __init__(self, config: TrainConfig, model: Model, peers: Peers = ALONE) -> None:
        self.model, self.device, self.peers = model, model.device, peers
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device.index or 0)
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.benchmark = True  # shapes stay the same from batch to batch
        self.threads = config.learner.threads or 1
        self.algorithm = build_algorithm(config.algorithm, model, config.seed, peers)
        self.update = LocalUpdate(config.optimizer, model, self.algorithm.groups, peers)
        # A user's network may change its buffers differently on each learner, so all take the first learner's.
        self.foreign = [] if config.network.name == "auto" else list(model.network.buffers())
        self._learn = make_learning(config, self.algorithm, self.update, peers)

    @property
    def policy(self) -> Any:
        return self.model.network

    @property
    def learning_rate(self) -> float | None:
        return self.update.optimizer.learning_rate

    def schedule(self, progress: float, learning_rate: float | None) -> None:
        self.update.schedule(progress, learning_rate)

    def learn(self, batch: AnyBatch, account: LossAccount, tick: Tick, acknowledge: Acknowledge | None) -> None:
        torch.set_num_threads(self.threads)
        self._learn(batch, account, tick, acknowledge)
        if self.peers.size > 1:
            for buffer in self.foreign:
                self.peers.take_first(buffer)
        torch.set_num_threads(1)  # actors in this process (inline) compute as in separate processes

    def parts(self) -> list[Array]:
        return self.model.parts()

    def is_finite(self) -> bool:
        return bool(torch.isfinite(self.model.parameters).all()) and self.update.is_finite()

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
