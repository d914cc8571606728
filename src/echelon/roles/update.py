"""What turns losses into a changed model: one step of an optimizer each, for one learner or for several alike.

With several learners a loss is the mean of what this one has, `count` of it. Each weighs its gradient and what the loss
shows by its count, one all-reduce adds both up, and dividing by the sum of the counts makes them those of the whole
batch; so all learners clip and step alike, whatever their shares, and show, or miss, the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from echelon.algorithms.model import FlatModule
from echelon.algorithms.peers import ALONE, Peers
from echelon.algorithms.protocol import POLICY, Algorithm, Group, Loss
from echelon.config import OptimizerConfig
from echelon.roles.account import LossAccount
from echelon.schema import Batch, GradientBatch, TransitionBatch

Acknowledge = Callable[[Any, torch.Tensor], None]  # takes the keys of items, and their new priorities
NOTHING_ELSE: Mapping[str, Group] = MappingProxyType({})


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
        module.told.zero_()
        told = module.told[: 2 + len(loss.metrics)]
        if isinstance(count, int) and count == 0:  # there is nothing to descend, and its mean is no number
            module.gradients.zero_()
        else:
            module.descend(loss.value * count)
            shown = [loss.value, *loss.metrics.values()]
            told[0] = count
            torch.mul(torch.stack([value.detach() for value in shown]), count, out=told[1:])
        self.peers.add_up(module.exchange)
        total = told[0].clamp(min=1.0)
        module.gradients.div_(total)
        loss.value, *values = (told[1:] / total).unbind()
        loss.metrics = dict(zip(loss.metrics, values, strict=True))


class LocalUpdate:
    """Backward, clip, step, each on the flat tensors of the group that a loss is for."""

    def __init__(
        self,
        config: OptimizerConfig,
        model: FlatModule,
        groups: Mapping[str, Group] = NOTHING_ELSE,
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
    batch: Batch | TransitionBatch | GradientBatch,
    update: LocalUpdate,
    account: LossAccount,
    tick: Callable[[], None] = lambda: None,
    acknowledge: Acknowledge = lambda keys, priorities: None,
) -> None:
    """One batch, the same for every learning rule: minibatches, their losses in order, an update each.

    `tick` is called after each, so that a learner with much to do is seen to move; `acknowledge` gets the priorities of
    each minibatch, where the rule has some.
    """
    for minibatch in algorithm.minibatches(batch):
        shown: dict[str, torch.Tensor] = {}
        for loss in algorithm.losses(minibatch):
            update(loss)
            tick()
            shown["loss" if loss.group == POLICY else f"{loss.group}_loss"] = loss.value.detach()
            shown |= {name: value.detach() for name, value in loss.metrics.items()}
        account.note(tuple(shown), torch.stack(list(shown.values())))
        priorities = algorithm.priorities(minibatch)
        if priorities is not None:
            acknowledge(minibatch.keys, priorities)
    algorithm.finish(batch)
