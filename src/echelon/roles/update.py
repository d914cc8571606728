"""What turns losses into a changed model: here, on this learner alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from echelon.algorithms.model import Model
from echelon.algorithms.protocol import Loss
from echelon.config import OptimizerConfig


class LocalUpdate:
    """Backward, clip, step, each on the model's flat tensors."""

    def __init__(self, config: OptimizerConfig, model: Model) -> None:
        self.config, self.gradients = config, model.gradients
        self.parameter = nn.Parameter(model.parameters)
        self.parameter.grad = model.gradients
        if config.name == "adam":
            self.optimizer: torch.optim.Optimizer = torch.optim.Adam(
                [self.parameter], lr=config.learning_rate, eps=config.epsilon, fused=True
            )
        else:
            self.optimizer = torch.optim.RMSprop(
                [self.parameter], lr=config.learning_rate, eps=config.epsilon, alpha=0.99
            )

    def schedule(self, progress: float) -> None:
        """Sets the learning rate for a run that is `progress` (0 to 1) done."""
        if self.config.schedule == "linear":
            rate = self.config.learning_rate * max(1.0 - progress, 0.0)
            for group in self.optimizer.param_groups:
                group["lr"] = rate

    def __call__(self, loss: Loss) -> None:
        self.gradients.zero_()
        loss.value.backward()  # type: ignore[no-untyped-call]
        if self.config.clip_norm > 0:
            norm = torch.linalg.vector_norm(self.gradients)
            self.gradients.mul_((self.config.clip_norm / (norm + 1e-6)).clamp_(max=1.0))
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)
