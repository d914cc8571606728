"""Networks whose parameters are stored in one flat tensor; the model, which is published; the policy, which acts.

With one flat tensor, clipping, the optimizer step, the all-reduce, publishing, loading and the update of a target
network are one operation each, for any number of layers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from echelon.algorithms.exploration import Exploration, next_noise
from echelon.algorithms.value_networks import Critic, build_acting
from echelon.config import AlgorithmConfig, NetworkConfig
from echelon.errors import ConfigError
from echelon.layers import State
from echelon.layout import ALIGNMENT
from echelon.memory_check import check_fits, free_memory
from echelon.networks import ActOutput, NetworkOutput, PolicyNetwork, action_mask
from echelon.objectives.distributions import Distribution, Greedy, Sample, forbid
from echelon.presets.impala import ImpalaConfig
from echelon.schema import Spaces, Tree

FLOATS_PER_LINE = ALIGNMENT // 4
PRECISION = torch.float32  # of parameters
NUM_SHARED_FIGURES = 16  # numbers that learners exchange together with a gradient


class WeightsReader(Protocol):
    """A source of newer weights."""

    @property
    def version(self) -> int: ...

    def read(self, out: np.ndarray[Any, Any]) -> int: ...


class FlatModule:
    """A network whose parameters are views of the flat tensor `parameters`, and their gradients of `gradients`."""

    def __init__(self, network: nn.Module, device: torch.device | str) -> None:
        self.network = network.to(device)
        self.device = torch.device(device)
        named = list(self.network.named_parameters())
        for name, parameter in named:
            if parameter.dtype != PRECISION:
                raise ConfigError(
                    f"network parameter {name} is {parameter.dtype}; Echelon stores parameters in float32. Build the "
                    "network in float32 and set --learner.precision bfloat16 to compute in bfloat16."
                )
        self.leaves = [parameter for _, parameter in named]
        size = sum(_padded(p.numel()) for p in self.leaves)
        self.parameters = torch.zeros(size, dtype=PRECISION, device=self.device)
        # Several learners sum this in one all-reduce: the gradients, and the figures of the loss.
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
        """Sets `gradients` to the gradient of `loss`."""
        self.gradients.zero_()
        self.accumulate(loss)

    def accumulate(self, loss: Tensor) -> None:
        """Adds the gradient of `loss` to `gradients`."""
        loss.backward(inputs=self.leaves)  # type: ignore[no-untyped-call]

    def copy(self) -> FlatModule:
        """Returns a copy with separate parameters that need no gradients."""
        return FlatModule(copy.deepcopy(self.network).requires_grad_(False), self.device)

    def weights(self) -> dict[str, Tensor]:
        """Returns parameters and buffers by name, as saved and loaded."""
        return dict(self.network.state_dict())

    def load_weights(self, weights: dict[str, Tensor], source: str) -> None:
        """Loads `weights` in place; raises ConfigError if `source` contains the weights of another network."""
        mine = self.weights()
        for name in sorted(mine.keys() ^ weights.keys(), key=str):
            where = f"missing in {source}" if name in mine else f"only in {source}"
            raise ConfigError(
                f"weights do not fit: {name} is {where}. Use the network configuration they were saved with."
            )
        for name, tensor in mine.items():
            if not isinstance(weights[name], Tensor):
                raise ConfigError(f"weights do not fit: {name} is not a tensor in {source}.")
            if tensor.shape != weights[name].shape:
                raise ConfigError(
                    f"weights do not fit: {name} has shape {tuple(weights[name].shape)} in {source} and "
                    f"{tuple(tensor.shape)} here. Use the environment and network configuration they were saved with."
                )
            tensor.copy_(weights[name])

    def tensors(self) -> list[Tensor]:
        """Returns the flat parameters, then every buffer."""
        return [self.parameters, *self.network.buffers()]

    def bind(self, tensors: list[Tensor]) -> None:
        """Uses `tensors`, in the sizes and order of `tensors()`, as storage; the network is read-only afterwards."""
        for mine, tensor in zip(self.tensors(), tensors, strict=True):
            mine.data = tensor
        for parameter, (start, stop) in zip(self.leaves, self._ranges(), strict=True):
            parameter.data = self.parameters[start:stop].view(parameter.shape)
            parameter.grad = None
            parameter.requires_grad_(False)
        self.network.eval()  # dropout of a user's network applies only to learning


class Model(FlatModule):
    """The network that acts, with its action distribution.

    `critic` exists if actors compute initial priorities (`algorithm.publish_critic`), `reward_deviation` if actors
    compute gradients from normalised rewards. Both are published with the model.
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
        microbatches: int = 1,
    ) -> None:
        """The learner computes a minibatch in `microbatches` parts."""
        self.config, self.spaces, self.microbatches = config, spaces, microbatches
        self.mixed = precision == "bfloat16"
        _check_fits(config, spaces, algorithm or ImpalaConfig())
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # only the CPU generator; the caller owns those of GPUs
            acting = build_acting(config, spaces, algorithm or ImpalaConfig())
        super().__init__(acting.network, device)
        self.distribution: Distribution = acting.distribution
        self.critic = FlatModule(acting.critic, device) if acting.critic is not None else None
        is_scaled = algorithm is not None and algorithm.publishes_reward_scale
        self.reward_deviation = torch.ones((), dtype=torch.float64, device=device) if is_scaled else None
        # A recurrent core cuts its sequences depending on the data, which a static graph cannot represent.
        compiles = compile and not self.network.state_shapes
        self._forward: Any = torch.compile(self.network) if compiles else self.network
        self._act: Any = torch.compile(self.network.act) if compiles else self.network.act
        self._first = torch.zeros(0, dtype=torch.bool, device=self.device)

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns the autocast context of `learner.precision`."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.mixed else nullcontext()

    def evaluate(self, observation: Tree, state: tuple[Tensor, ...], first: Tensor) -> NetworkOutput:
        """Computes the network on sequences (T, B, ...), in `learner.precision`."""
        if not self.mixed:
            output: NetworkOutput = self._forward(observation, state, first)
            return output
        with self.autocast():
            output = self._forward(observation, state, first)
        return NetworkOutput(output.params.float(), output.value.float(), output.state)

    def params(self, observation: Tree) -> Tensor:
        """Returns the action parameters of single steps (B, ...), for a network without recurrent state."""
        params: Tensor = self._act(observation, (), self._first).params
        return params

    def weights(self) -> dict[str, Tensor]:
        critic = self.critic.weights() if self.critic is not None else {}
        return {**super().weights(), **{f"critic.{name}": tensor for name, tensor in critic.items()}}

    def tensors(self) -> list[Tensor]:
        scale = [self.reward_deviation] if self.reward_deviation is not None else []
        return [*super().tensors(), *scale]

    def flats(self) -> list[FlatModule]:
        """Returns the modules that are published together."""
        return [self, self.critic] if self.critic is not None else [self]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts())

    def parts(self) -> list[np.ndarray[Any, Any]]:
        """Returns the published arrays, on the CPU: the flat parameters, then every buffer (then the critic's)."""
        tensors = [tensor for flat in self.flats() for tensor in flat.tensors()]
        return [tensor.detach().cpu().contiguous().numpy() for tensor in tensors]


def _check_fits(config: NetworkConfig, spaces: Spaces, algorithm: AlgorithmConfig) -> None:
    """Raises ConfigError if a built-in network does not fit into memory; allocates nothing."""
    if config.name != "auto":
        return
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        acting = build_acting(config, spaces, algorithm)
    modules = [acting.network, *([acting.critic] if acting.critic is not None else [])]
    size = sum(parameter.numel() for module in modules for parameter in module.parameters())
    nbytes = 3 * 4 * size  # the module's, the flat ones and their gradients
    check_fits(nbytes, f"the network of {size:,} parameters", free_memory(), "network.hidden or network.core_size")


class Mirror:
    """An actor's copy of the weights: one byte array that the weights board is read into."""

    def __init__(self, model: Model) -> None:
        # Allocated by torch: matrix products can differ in the last bit with the alignment.
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
        """Reads newer weights if there are any; returns the current version."""
        if board.version > self.version:
            self.version = board.read(self.memory)
        return self.version


class ActionValues(NamedTuple):
    """Values for an actor's initial priorities (`objectives.values.initial_priorities`)."""

    chosen: Tensor  # (K,) the value of the action taken
    best: Tensor  # (K,) the value of the policy's greedy action


class Action(NamedTuple):
    """Actions for K rows; the log-probability is 0 where the action is deterministic or uniformly random."""

    action: Tensor
    log_prob: Tensor
    state: State  # after the step, as in `Policy.initial_state`
    value: Tensor | None  # of the observation, if requested
    action_values: ActionValues | None  # if requested and the model has them


class Policy:
    """Chooses actions with a model. It holds neither the state of the rows nor a random generator."""

    def __init__(
        self,
        model: Model,
        *,
        with_value: bool = False,
        with_action_values: bool = False,
        mixed: bool = False,
        noise_correlation: float = 0.0,
    ) -> None:
        """With `mixed`, the network is computed in bfloat16.

        `noise_correlation` is that of the noise of a row's samples with the noise of its previous sample.
        """
        self.model, self.with_value, self.with_action_values, self.mixed = model, with_value, with_action_values, mixed
        self.noise_correlation = noise_correlation
        self.noise_size = model.distribution.noise_size if noise_correlation else 0

    def initial_state(self, num_rows: int) -> State:
        """Returns the state of rows before their first step: the network's, then the last noise if it is correlated."""
        state = self.model.network.initial_state(num_rows, self.model.device)
        return (*state, torch.zeros(num_rows, self.noise_size, device=self.model.device)) if self.noise_size else state

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
        mask: Tensor | None = None,
    ) -> Action:
        """Returns the actions for one step of K rows: observation leaves (K, ...), state leaves (K, ...), first (K,).

        Actions are sampled with `rng` and changed by `exploration`; with `greedy` they are the most likely ones. `mask`
        is that of the observation by default.
        """
        distribution, mask = self.model.distribution, action_mask(observation) if mask is None else mask
        noise: State = ()
        if self.noise_size:
            state, noise = state[:-1], state[-1:]
        output = self._forward(observation, state, first)
        if greedy:
            action = distribution.mode(output.params, mask)
            sample = Sample(action, distribution.log_prob(output.params, action, mask))
        else:
            if noise:
                noise = (next_noise(noise[0], self.noise_correlation, rng),)
                sample = distribution.sample_at(output.params, noise[0])
            else:
                sample = distribution.sample(output.params, rng, mask)
            if exploration is not None:
                sample = exploration.apply(distribution, sample, rng, mask)
        values = (
            self._action_values(observation, output.params, sample.action, mask) if self.with_action_values else None
        )
        return Action(sample.action, sample.log_prob, (*output.state, *noise), output.value, values)

    def _forward(self, observation: Tree, state: State, first: Tensor) -> ActOutput:
        network = self.model.network
        if not self.mixed:
            return network.act(observation, state, first, with_value=self.with_value)
        with torch.autocast(self.model.device.type, torch.bfloat16, cache_enabled=False):
            return network.act(observation, state, first, with_value=self.with_value)

    def _action_values(
        self, observation: Tree, params: Tensor, action: Tensor, mask: Tensor | None
    ) -> ActionValues | None:
        """Returns the values of `action` and of the policy's own action; None if the model cannot value actions."""
        distribution, critic = self.model.distribution, self.model.critic
        if isinstance(distribution, Greedy):
            chosen = params.gather(-1, action.unsqueeze(-1)).squeeze(-1)
            return ActionValues(chosen, forbid(params, mask).amax(-1))
        if critic is None:
            return None
        network: Critic = critic.network  # type: ignore[assignment]
        features = network.encoders(observation)
        own = distribution.mode(params, mask)
        return ActionValues(network.value_of(features, action).amin(0), network.value_of(features, own).amin(0))


def _padded(count: int) -> int:
    return -(-count // FLOATS_PER_LINE) * FLOATS_PER_LINE
