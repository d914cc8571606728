"""Adam and RMSprop over one flat parameter tensor.

They call the functions behind `torch.optim.Adam` and `torch.optim.RMSprop`. The classes would import torch's compiler,
which takes about a second at the start of every learner.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.rmsprop import rmsprop

from echelon.algorithms.protocol import ParameterGroup
from echelon.config import OptimizerConfig

UPDATES: dict[str, Any] = {
    "adam": functools.partial(adam, fused=True, beta1=0.9, beta2=0.999, amsgrad=False, maximize=False),
    "rmsprop": functools.partial(rmsprop, alpha=0.99, momentum=0.0, centered=False),
}
UNUSED: dict[str, list[list[Any]]] = {"adam": [[]], "rmsprop": [[], []]}  # moments of other variants
MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "rmsprop": ("square_avg",)}  # as torch's classes name them


class Optimizer:
    """The optimizer of one parameter group."""

    def __init__(self, config: OptimizerConfig, group: ParameterGroup) -> None:
        self.name, self.epsilon = config.name, config.epsilon
        self.learning_rate, self.weight_decay = group.learning_rate, group.weight_decay
        self.parameters, self.gradients = group.module.parameters.detach(), group.module.gradients
        self.on_gpu = self.parameters.device.type == "cuda"
        step_device = self.parameters.device if self.on_gpu else "cpu"  # on the GPU, a CUDA graph can record the step
        self.state = {"step": torch.zeros((), device=step_device)}
        self.state |= {name: torch.zeros_like(self.parameters) for name in MOMENTS[config.name]}

    @torch.no_grad()
    def step(self) -> None:
        """Updates the parameters from the gradients."""
        step, *moments = ([tensor] for tensor in self.state.values())
        tensors = [self.parameters], [self.gradients], *moments, *UNUSED[self.name], step
        settings = {"lr": self.learning_rate, "weight_decay": self.weight_decay, "eps": self.epsilon}
        UPDATES[self.name](*tensors, capturable=self.on_gpu, **settings)

    def is_finite(self) -> bool:
        return all(bool(torch.isfinite(tensor).all()) for tensor in self.state.values())

    def state_dict(self) -> dict[str, Any]:
        """Returns the state in the form of torch's classes, whose parameter has the number 0."""
        return {"state": {0: self.state}}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Loads the moments; raises ValueError if they are not valid. None are stored before torch's first step."""
        if tree["state"].keys() - {0}:
            raise ValueError(f"the optimizer's state is of {len(tree['state'])} parameters, not of 1")
        for moments in tree["state"].values():
            found = {name: torch.as_tensor(value) for name, value in moments.items()}
            shapes = {name: tuple(value.shape) for name, value in found.items()}
            expected = {name: tuple(value.shape) for name, value in self.state.items()}
            if shapes != expected or not all(torch.isfinite(value).all() for value in found.values()):
                raise ValueError(
                    f"the optimizer's state has the shapes {shapes}, expected {expected}, with finite numbers"
                )
            for name, value in found.items():
                self.state[name].copy_(value)
