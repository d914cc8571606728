"""What turns batches into a changed model: losses, an optimizer step each, for one learner or for several alike.

With several learners a loss is the mean of what this one has, `count` of it. Each weighs its gradient and what the loss
shows by its count, one all-reduce adds both up, and dividing by the sum of the counts makes them those of the whole
batch; so all learners clip and step alike, whatever their shares, and show, or miss, the same numbers.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn

from echelon.algorithms import build_algorithm
from echelon.algorithms.model import FlatModule, Model
from echelon.algorithms.peers import ALONE, Peers
from echelon.algorithms.protocol import POLICY, Algorithm, Loss, ParameterGroup
from echelon.algorithms.replayed import Replayed
from echelon.config import OptimizerConfig, TrainConfig
from echelon.schema import Batch, GradientBatch, TransitionBatch

Array = np.ndarray[Any, Any]
Tick = Callable[[], None]
AnyBatch = Batch | TransitionBatch | GradientBatch
Acknowledge = Callable[[Any, torch.Tensor], None]  # takes the keys of items, and their new priorities
NOTHING_ELSE: Mapping[str, ParameterGroup] = MappingProxyType({})


class Reading:
    """Numbers on their way from the learner's device: nobody waits for it before they are read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._copied = tensor.detach(), None
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor.detach(), non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def read(self) -> Array:
        if self._copied is not None:
            self._copied.synchronize()
        array: Array = self._tensor.numpy()
        return array


class Unchecked(NamedTuple):
    """The newest losses of a batch on their way to somebody who looks at them."""

    number: int  # of the batch
    names: tuple[str, ...]
    values: Reading


class LossAccount:
    """Means of what the losses of many minibatches say, computed where the losses are."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()  # of the newest minibatch
        self.newest = torch.zeros(0)  # its values
        self._sums: dict[tuple[str, ...], torch.Tensor] = {}
        self._counts = collections.Counter[tuple[str, ...]]()
        self._unchecked = collections.deque[Unchecked]()

    def note(self, names: tuple[str, ...], values: torch.Tensor) -> None:
        """One minibatch: what is shown of it, and a vector of that."""
        self.names, self.newest = names, values
        if names in self._sums:
            self._sums[names] += values
        else:
            self._sums[names] = values.clone()
        self._counts[names] += 1

    def close_batch(self, number: int) -> None:
        """The minibatches of batch `number` are all noted."""
        self._unchecked.append(Unchecked(number, self.names, Reading(self.newest)))

    def find_lost(self, keep: int = 0) -> str:
        """What became NaN or infinite and when, or "": looks at all batches but the newest `keep`."""
        while len(self._unchecked) > keep:
            number, names, values = self._unchecked.popleft()
            for name, value in zip(names, values.read().tolist(), strict=True):
                if name.endswith("loss") and not math.isfinite(value):
                    return f"the {name.replace('_', ' ')} became {value} at update {number}"
        return ""

    def take(self) -> dict[str, float]:
        """The means since the last time."""
        sums, counts = collections.Counter[str](), collections.Counter[str]()
        for names, total in self._sums.items():
            for name, value in zip(names, total.tolist(), strict=True):
                sums[name] += value
                counts[name] += self._counts[names]
        self._sums.clear()
        self._counts.clear()
        return {name: value / counts[name] for name, value in sums.items()}


class Stepper:
    """An optimizer over one flat tensor."""

    def __init__(self, config: OptimizerConfig, module: FlatModule, learning_rate: float, peers: Peers = ALONE) -> None:
        self.module, self.learning_rate, self.peers = module, learning_rate, peers
        parameter = nn.Parameter(module.parameters)
        parameter.grad = module.gradients
        on_gpu = module.device.type == "cuda"
        settings: dict[str, Any] = {"lr": learning_rate, "eps": config.epsilon, "capturable": on_gpu}
        if config.name == "adam":
            self.optimizer: torch.optim.Optimizer = torch.optim.Adam([parameter], fused=True, **settings)
        else:
            self.optimizer = torch.optim.RMSprop([parameter], alpha=0.99, **settings)

    def __call__(self, loss: Loss, clip_norm: float) -> None:
        gradients = self.module.gradients
        if loss.gradient is not None:
            gradients.copy_(loss.gradient)
        elif self.peers.size == 1:
            self.module.descend(loss.value)
        else:
            self._descend_together(loss)
        if clip_norm > 0:
            norm = torch.linalg.vector_norm(gradients)
            gradients.mul_((clip_norm / (norm + 1e-6)).clamp_(max=1.0))
        self.optimizer.step()

    def _descend_together(self, loss: Loss) -> None:
        """Makes the gradients, and what `loss` shows, those of all learners' losses."""
        module, count = self.module, loss.count
        module.shared_figures.zero_()
        figures = module.shared_figures[: 2 + len(loss.metrics)]
        if isinstance(count, int) and count == 0:  # there is nothing to descend, and its mean is no number
            module.gradients.zero_()
        else:
            module.descend(loss.value * count)
            shown = [loss.value, *loss.metrics.values()]
            figures[0] = count
            torch.mul(torch.stack([value.detach() for value in shown]), count, out=figures[1:])
        self.peers.add_up(module.exchange)
        total = figures[0].clamp(min=1.0)
        module.gradients.div_(total)
        loss.value, *values = (figures[1:] / total).unbind()
        loss.metrics = dict(zip(loss.metrics, values, strict=True))


class LocalUpdate:
    """Backward, clip, step, each on the flat tensors of the group that a loss is for."""

    def __init__(
        self,
        config: OptimizerConfig,
        model: FlatModule,
        groups: Mapping[str, ParameterGroup] = NOTHING_ELSE,
        peers: Peers = ALONE,
    ) -> None:
        """`groups` are those that the algorithm learns beside the model."""
        self.config = config
        self.steppers = {POLICY: Stepper(config, model, config.learning_rate, peers)}
        for name, group in groups.items():
            self.steppers[name] = Stepper(config, group.module, group.learning_rate, peers)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """That of the model."""
        return self.steppers[POLICY].optimizer

    def schedule(self, progress: float) -> None:
        """Sets the learning rates for a run that is `progress` (0 to 1) done."""
        if self.config.schedule == "linear":
            for stepper in self.steppers.values():
                for group in stepper.optimizer.param_groups:
                    group["lr"] = stepper.learning_rate * max(1.0 - progress, 0.0)

    def __call__(self, loss: Loss) -> None:
        self.steppers[loss.group](loss, self.config.clip_norm)

    def state_dict(self) -> dict[str, Any]:
        return {name: stepper.optimizer.state_dict() for name, stepper in self.steppers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, stepper in self.steppers.items():
            on_gpu = stepper.module.device.type == "cuda"  # where the state comes from, it may have been another device
            groups = [{**group, "capturable": on_gpu} for group in state[name]["param_groups"]]
            stepper.optimizer.load_state_dict({**state[name], "param_groups": groups})


def learn_once(
    algorithm: Algorithm,
    batch: AnyBatch,
    update: LocalUpdate,
    account: LossAccount,
    tick: Tick = lambda: None,
    acknowledge: Acknowledge | None = None,
) -> None:
    """One batch, the same for every learning rule: minibatches, their losses in order, an update each.

    `tick` is called after each, so that a learner with much to do is seen to move; `acknowledge` gets the priorities of
    each minibatch, where items are drawn by priority.
    """
    for minibatch in algorithm.minibatches(batch):
        shown: dict[str, torch.Tensor] = {}
        for loss in algorithm.losses(minibatch):
            update(loss)
            tick()
            shown["loss" if loss.group == POLICY else f"{loss.group}_loss"] = loss.value.detach()
            shown |= {name: value.detach() for name, value in loss.metrics.items()}
        account.note(tuple(shown), torch.stack(list(shown.values())))
        if acknowledge is not None and (priorities := algorithm.priorities(minibatch)) is not None:
            acknowledge(minibatch.keys, priorities)
    algorithm.finish(batch)


class LearnFunction(Protocol):
    """Learns from one batch, as `learn_once` does."""

    def __call__(self, batch: Any, account: LossAccount, tick: Tick, acknowledge: Acknowledge | None) -> None: ...


def make_learning(
    config: TrainConfig, algorithm: Algorithm, update: LocalUpdate, peers: Peers = ALONE
) -> LearnFunction:
    """`learn_once`; as one recorded graph where a GPU repeats the same operations with every batch.

    A user's network, a schedule, a compiler, or parts of several learners may change them.
    """
    is_fixed = config.network.name == "auto" and config.optimizer.schedule == "constant" and not config.learner.compile
    if algorithm.model.device.type == "cuda" and isinstance(algorithm, Replayed) and is_fixed and peers.size == 1:
        from echelon.roles.recorded import RecordedLearning  # here alone: most runs never need it

        return RecordedLearning(algorithm, update)
    return lambda batch, account, tick, acknowledge: learn_once(algorithm, batch, update, account, tick, acknowledge)


class Trainable(Protocol):
    """What the learner updates, publishes and checkpoints."""

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

    def learn(self, batch: AnyBatch, account: LossAccount, tick: Tick, acknowledge: Acknowledge | None) -> None:
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


class ModelTrainable:
    """A model of ours, its rule and its optimizer."""

    def __init__(self, config: TrainConfig, model: Model, peers: Peers = ALONE) -> None:
        self.model, self.device, self.peers = model, model.device, peers
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device.index or 0)
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.benchmark = True  # shapes stay the same from batch to batch
        self.threads = config.learner.threads or 1
        self.algorithm = build_algorithm(config.algorithm, model, config.seed, peers)
        self.update = LocalUpdate(config.optimizer, model, self.algorithm.groups, peers)
        # What a network of the user's keeps beside its parameters is known to it alone, so all learners have one's.
        self.foreign = [] if config.network.name == "auto" else list(model.network.buffers())
        self._learn = make_learning(config, self.algorithm, self.update, peers)

    @property
    def policy(self) -> Any:
        return self.model.network

    @property
    def learning_rate(self) -> float | None:
        rate: float = self.update.optimizer.param_groups[0]["lr"]
        return rate

    def schedule(self, progress: float) -> None:
        self.update.schedule(progress)

    def learn(self, batch: AnyBatch, account: LossAccount, tick: Tick, acknowledge: Acknowledge | None) -> None:
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
