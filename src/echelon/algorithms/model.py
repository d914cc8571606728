"""Networks whose parameters lie in one flat tensor; among them the model, which is published, and the policy that acts
with it.

One flat tensor makes clipping, the optimizer step, the all-reduce, publishing, loading and following (a target network)
one operation each, whatever the number of layers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from echelon.algorithms.exploration import Exploration
from echelon.algorithms.value_networks import Critic, build_acting
from echelon.config import AlgorithmConfig, NetworkConfig
from echelon.errors import ConfigError
from echelon.layers import State
from echelon.layout import ALIGNMENT
from echelon.networks import ActOutput, NetworkOutput, PolicyNetwork, action_mask
from echelon.objectives.distributions import Distribution, Greedy, Sample, forbid
from echelon.presets.impala import ImpalaConfig
from echelon.schema import Spaces, Tree

FLOATS_PER_LINE = ALIGNMENT // 4
PRECISION = torch.float32  # of parameters
NUM_SHARED_FIGURES = 16  # numbers that learners tell each other with a gradient


class WeightsReader(Protocol):
    """Where newer weights lie."""

    @property
    def version(self) -> int: ...

    def read(self, out: np.ndarray[Any, Any]) -> int: ...


class FlatModule:
    """A network whose parameters are views of `parameters`, their gradients of `gradients`."""

    def __init__(self, network: nn.Module, device: torch.device | str) -> None:
        self.network = network.to(device)
        self.device = torch.device(device)
        named = list(self.network.named_parameters())
        for name, parameter in named:
            if parameter.dtype != PRECISION:
                raise ConfigError(
                    f"network parameter {name} is {parameter.dtype}; Echelon keeps parameters in float32. Build the "
                    "network in float32 and set --learner.precision bfloat16 to compute in bfloat16."
                )
        self.leaves = [parameter for _, parameter in named]
        size = sum(_padded(p.numel()) for p in self.leaves)
        self.parameters = torch.zeros(size, dtype=PRECISION, device=self.device)
        # What several learners add up in one go: the gradients, and what they tell of the loss.
        self.exchange = torch.zeros(size + NUM_SHARED_FIGURES, dtype=PRECISION, device=self.device)
        self.gradients, self.shared_figures = self.exchange[:size], self.exchange[size:]
        for parameter, (start, stop) in zip(self.leaves, self._ranges(), strict=True):
            self.parameters[start:stop] = parameter.data.reshape(-1)
            parameter.data = self.parameters[start:stop].view(parameter.shape)
            parameter.grad = self.gradients[start:stop].view(parameter.shape)

    def _ranges(self) -> Iterator[tuple[int, int]]:
        offset = 0
        for parameter in self.leaves:
            yield offset, offset + parameter.numel()
            offset += _padded(parameter.numel())

    def descend(self, loss: Tensor) -> None:
        """Makes `gradients` those of `loss`."""
        self.gradients.zero_()
        loss.backward(inputs=self.leaves)  # type: ignore[no-untyped-call]

    def copy(self) -> FlatModule:
        """A network alike, with parameters of its own that need no gradients."""
        return FlatModule(copy.deepcopy(self.network).requires_grad_(False), self.device)

    def weights(self) -> dict[str, Tensor]:
        """Parameters and buffers by name, as they are saved and loaded."""
        return dict(self.network.state_dict())

    def load_weights(self, weights: dict[str, Tensor], source: str) -> None:
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

    def tensors(self) -> list[Tensor]:
        """The flat parameters, then every buffer."""
        return [self.parameters, *self.network.buffers()]

    def bind(self, tensors: list[Tensor]) -> None:
        """Goes on with `tensors`, of the sizes of its own, in the order of `tensors()`; it can only be read then."""
        for mine, tensor in zip(self.tensors(), tensors, strict=True):
            mine.data = tensor
        for parameter, (start, stop) in zip(self.leaves, self._ranges(), strict=True):
            parameter.data = self.parameters[start:stop].view(parameter.shape)
            parameter.grad = None
            parameter.requires_grad_(False)
        self.network.eval()  # a user's dropout is for learning


class Model(FlatModule):
    """The network that acts, and its action distribution, as the algorithm needs them.

    `critic` is there where actors judge their own actions (`algorithm.publish_critic`), `reward_deviation` where they
    learn from their own normalised rewards: it travels with the model.
    """

    network: PolicyNetwork

    def __init__(
        self,
        config: NetworkConfig,
        spaces: Spaces,
        algorithm: AlgorithmConfig | None = None,
        *,
        seed: int = 0,
        device: str = "cpu",
        precision: str = "float32",
        compile: bool = False,
    ) -> None:
        self.config, self.spaces = config, spaces
        self.mixed = precision == "bfloat16"
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # those of GPUs are the caller's
            acting = build_acting(config, spaces, algorithm or ImpalaConfig())
        super().__init__(acting.network, device)
        self.distribution: Distribution = acting.distribution
        self.critic = FlatModule(acting.critic, device) if acting.critic is not None else None
        is_scaled = algorithm is not None and algorithm.publishes_reward_scale
        self.reward_deviation = torch.ones((), dtype=torch.float64, device=device) if is_scaled else None
        # A recurrent core cuts its sequences by their data, which no static graph can follow.
        compiles = compile and not self.network.state_shapes
        self._forward: Any = torch.compile(self.network) if compiles else self.network
        self._act: Any = torch.compile(self.network.act) if compiles else self.network.act
        self._first = torch.zeros(0, dtype=torch.bool, device=self.device)

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision that the learner was asked for."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.mixed else nullcontext()

    def evaluate(self, observation: Tree, state: tuple[Tensor, ...], first: Tensor) -> NetworkOutput:
        """The network over sequences (T, B, ...), in the precision that the learner was asked for."""
        if not self.mixed:
            output: NetworkOutput = self._forward(observation, state, first)
            return output
        with self.autocast():
            output = self._forward(observation, state, first)
        return NetworkOutput(output.params.float(), output.value.float(), output.state)

    def params(self, observation: Tree) -> Tensor:
        """What a network without memory says about single steps (B, ...): the parameters of their actions."""
        params: Tensor = self._act(observation, (), self._first).params
        return params

    def weights(self) -> dict[str, Tensor]:
        critic = self.critic.weights() if self.critic is not None else {}
        return {**super().weights(), **{f"critic.{name}": tensor for name, tensor in critic.items()}}

    def tensors(self) -> list[Tensor]:
        scale = [self.reward_deviation] if self.reward_deviation is not None else []
        return [*super().tensors(), *scale]

    def flats(self) -> list[FlatModule]:
        """What travels together."""
        return [self, self.critic] if self.critic is not None else [self]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts())

    def parts(self) -> list[np.ndarray[Any, Any]]:
        """What is published, in order: the flat parameters, then every buffer (then the critic's), on the CPU."""
        tensors = [tensor for flat in self.flats() for tensor in flat.tensors()]
        return [tensor.detach().cpu().contiguous().numpy() for tensor in tensors]


class Mirror:
    """A model's weights as seen by an actor: one byte array that a weights board is read into."""

    def __init__(self, model: Model) -> None:
        # Aligned by torch: matrix products may differ in their last bit with the alignment.
        self.memory: np.ndarray[Any, Any] = torch.zeros(model.nbytes, dtype=torch.uint8).numpy()
        self.version = 0
        offset = 0
        for flat in model.flats():
            views = []
            for tensor in flat.tensors():
                part = tensor.detach().cpu().contiguous().numpy()
                raw = self.memory[offset : offset + part.nbytes]
                raw[:] = part.reshape(-1).view(np.uint8)
                views.append(torch.from_numpy(raw.view(part.dtype)).view(tensor.shape))
                offset += part.nbytes
            flat.bind(views)

    def follow(self, board: WeightsReader) -> int:
        """Takes over newer weights if there are any; returns the version that acts from now on."""
        if board.version > self.version:
            self.version = board.read(self.memory)
        return self.version


class ActionValues(NamedTuple):
    """What an actor needs for the first priorities of its transitions (`objectives.values.initial_priorities`)."""

    chosen: Tensor  # (K,) the value of the action taken
    best: Tensor  # (K,) the value of the action that the policy itself would take


class Action(NamedTuple):
    """What a policy chose for K rows; the log-probability is 0 where chance had no part in it, or all."""

    action: Tensor
    log_prob: Tensor
    state: State  # recurrent, after the step
    value: Tensor | None  # of what was observed, if asked for
    action_values: ActionValues | None  # if asked for, and known to the model


class Policy:
    """Chooses actions with a model. It learns nothing, and keeps neither recurrent state nor random generator."""

    def __init__(
        self, model: Model, *, with_value: bool = False, with_action_values: bool = False, mixed: bool = False
    ) -> None:
        """`mixed` computes the network in bfloat16."""
        self.model, self.with_value, self.with_action_values, self.mixed = model, with_value, with_action_values, mixed

    @torch.inference_mode()
    def act(
        self,
        observation: Tree,
        state: State,
        first: Tensor,
        rng: torch.Generator,
        exploration: Exploration | None = None,
        *,
        greedy: bool = False,
    ) -> Action:
        """Actions for one step of K rows: leaves (K, ...), state leaves (K, ...), first (K,).

        They are drawn by `rng` and changed as `exploration` says; `greedy` takes the most likely ones.
        """
        distribution, mask = self.model.distribution, action_mask(observation)
        output = self._forward(observation, state, first)
        if greedy:
            action = distribution.mode(output.params, mask)
            sample = Sample(action, distribution.log_prob(output.params, action, mask))
        else:
            sample = distribution.sample(output.params, rng, mask)
            if exploration is not None:
                sample = exploration.apply(distribution, sample, rng, mask)
        values = self._judge(observation, output.params, sample.action, mask) if self.with_action_values else None
        return Action(sample.action, sample.log_prob, output.state, output.value, values)

    def _forward(self, observation: Tree, state: State, first: Tensor) -> ActOutput:
        network = self.model.network
        if not self.mixed:
            return network.act(observation, state, first, with_value=self.with_value)
        with torch.autocast(self.model.device.type, torch.bfloat16, cache_enabled=False):
            return network.act(observation, state, first, with_value=self.with_value)

    def _judge(self, observation: Tree, params: Tensor, action: Tensor, mask: Tensor | None) -> ActionValues | None:
        """What `action` is worth, and the policy's own; None where only the learner could tell."""
        distribution, critic = self.model.distribution, self.model.critic
        if isinstance(distribution, Greedy):
            chosen = params.gather(-1, action.unsqueeze(-1)).squeeze(-1)
            return ActionValues(chosen, forbid(params, mask).amax(-1))
        if critic is None:
            return None
        network: Critic = critic.network  # type: ignore[assignment]
        features = network.encoders(observation)
        own = distribution.mode(params, mask)
        return ActionValues(network.judge(features, action).amin(0), network.judge(features, own).amin(0))


def _padded(count: int) -> int:
    return -(-count // FLOATS_PER_LINE) * FLOATS_PER_LINE
