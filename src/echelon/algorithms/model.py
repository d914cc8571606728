"""A policy and value network whose parameters lie in one flat tensor.

One flat tensor makes clipping, the optimizer step, the all-reduce, publishing and loading one operation each, whatever
the number of layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from echelon.config import NetworkConfig
from echelon.errors import ConfigError
from echelon.layout import ALIGNMENT
from echelon.networks import NetworkOutput, build_network
from echelon.objectives.distributions import Distribution, make_distribution
from echelon.schema import Spaces, Tree

FLOATS_PER_LINE = ALIGNMENT // 4


class Model:
    """Network and action distribution; the network's parameters are views of `parameters`, their gradients alike."""

    def __init__(
        self,
        config: NetworkConfig,
        spaces: Spaces,
        *,
        seed: int = 0,
        device: str = "cpu",
        precision: str = "float32",
        compile: bool = False,
    ) -> None:
        self.spaces = spaces
        self.mixed = precision == "bfloat16"
        self.distribution: Distribution = make_distribution(spaces.action)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = build_network(config, spaces, self.distribution.num_params)
        self.network.to(device)
        self.device = torch.device(device)
        named = list(self.network.named_parameters())
        for name, parameter in named:
            if parameter.dtype != torch.float32:
                raise ConfigError(
                    f"network parameter {name} is {parameter.dtype}; Echelon keeps parameters in float32. Build the "
                    "network in float32 and set --learner.precision bfloat16 to compute in bfloat16."
                )
        self.parameters = torch.zeros(sum(_padded(p.numel()) for _, p in named), device=self.device)
        self.gradients = torch.zeros_like(self.parameters)
        for (_, parameter), (start, stop) in zip(named, self._ranges(), strict=True):
            self.parameters[start:stop] = parameter.data.reshape(-1)
            parameter.data = self.parameters[start:stop].view(parameter.shape)
            parameter.grad = self.gradients[start:stop].view(parameter.shape)
        # A recurrent core cuts its sequences by their data, which no static graph can follow.
        self._forward = torch.compile(self.network) if compile and not self.network.state_shapes else self.network

    def evaluate(self, observation: Tree, state: tuple[torch.Tensor, ...], first: torch.Tensor) -> NetworkOutput:
        """The network over sequences (T, B, ...), in the precision that the learner was asked for."""
        if not self.mixed:
            output: NetworkOutput = self._forward(observation, state, first)
            return output
        with torch.autocast(self.device.type, torch.bfloat16):
            output = self._forward(observation, state, first)
        return NetworkOutput(output.params.float(), output.value.float(), output.state)

    def _ranges(self) -> Iterator[tuple[int, int]]:
        offset = 0
        for parameter in self.network.parameters():
            yield offset, offset + parameter.numel()
            offset += _padded(parameter.numel())

    def weights(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name, as they are saved and loaded."""
        return dict(self.network.state_dict())

    def load_weights(self, weights: dict[str, torch.Tensor], source: str) -> None:
        """Takes over `weights` in place; raises ConfigError when `source` holds those of another network."""
        mine = self.weights()
        for name in sorted(mine.keys() ^ weights.keys()):
            where = f"missing in {source}" if name in mine else f"only in {source}"
            raise ConfigError(f"weights do not fit: {name} is {where}. Use the network configuration they come from.")
        for name, tensor in mine.items():
            if tensor.shape != weights[name].shape:
                raise ConfigError(
                    f"weights do not fit: {name} has shape {tuple(weights[name].shape)} in {source} and "
                    f"{tuple(tensor.shape)} here. Use the environment and network configuration they come from."
                )
            tensor.copy_(weights[name])

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts())

    def parts(self) -> list[np.ndarray[Any, Any]]:
        """What is published, in order: the flat parameters, then every buffer, on the CPU."""
        tensors = [self.parameters, *self.network.buffers()]
        return [tensor.detach().cpu().contiguous().numpy() for tensor in tensors]


class Mirror:
    """A model's weights as seen by an actor: one byte array that a weights board is read into."""

    def __init__(self, model: Model) -> None:
        # Aligned by torch: matrix products may differ in their last bit with the alignment.
        self.memory: np.ndarray[Any, Any] = torch.zeros(model.nbytes, dtype=torch.uint8).numpy()
        self.version = 0
        offset = 0
        for tensor, part in zip([model.parameters, *model.network.buffers()], model.parts(), strict=True):
            raw = self.memory[offset : offset + part.nbytes]
            raw[:] = part.reshape(-1).view(np.uint8)
            tensor.data = torch.from_numpy(raw.view(part.dtype)).view(tensor.shape)
            offset += part.nbytes
        for parameter, (start, stop) in zip(model.network.parameters(), model._ranges(), strict=True):
            parameter.data = model.parameters[start:stop].view(parameter.shape)
            parameter.grad = None
            parameter.requires_grad_(False)
        model.network.eval()  # a user's dropout is for learning


def _padded(count: int) -> int:
    return -(-count // FLOATS_PER_LINE) * FLOATS_PER_LINE
