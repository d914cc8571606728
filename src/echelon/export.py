"""Exports a trained policy to a file that other programs run: ONNX, torch.export, or weights as safetensors.

A graph takes the raw observation, a leaf per input in the order of the schema, and the state of a recurrent network. It
returns the greedy action in the environment's units, the parameters of the action distribution, and the next state.
Normalization and masks are inside, and the size of the batch is free. Every file is read again and compared with the
policy before it gets its name.

Shapes: K rows of a batch.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import secrets
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from echelon.errors import ConfigError, ExportError
from echelon.layers import State
from echelon.networks import action_mask
from echelon.policy import ObservationReader, TrainedPolicy, load
from echelon.runs.checkpoint import save_weights
from echelon.runs.policy_spec import KEY
from echelon.schema import MASK, Tree, flatten, map_tree, space_leaves

SUFFIXES = {"onnx": ".onnx", "torch-export": ".pt2", "safetensors": ".safetensors"}
TOLERANCE = 1e-5  # absolute up to 1, relative above
BATCHES, NUM_STEPS = (1, 5), 4  # rows of the compared batches, and steps of each
LARGE = 1e6  # bounds beyond this mean "unbounded": such observations do not occur
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")

Run = Callable[[Tree, State], list[Tensor]]  # of one step; returns action, params and state


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    path: Path
    inputs: list[str]
    outputs: list[str]
    difference: float  # the largest one between file and policy


def check_format(format: str, path: Path) -> None:
    """Raises ConfigError if this installation cannot export to `format`, or if `path` ends as another format does."""
    if format not in SUFFIXES:
        raise ConfigError(f"format={format!r} is unknown: use one of {', '.join(SUFFIXES)}.")
    if path.suffix in SUFFIXES.values() and path.suffix != SUFFIXES[format]:
        raise ConfigError(f"{path} does not fit --format {format}: its files end with {SUFFIXES[format]}.")
    missing = [name for name in ONNX_PACKAGES if find_spec(name) is None] if format == "onnx" else []
    if missing:
        raise ConfigError(f'--format onnx needs {" and ".join(missing)}: pip install "echelon[onnx]".')


def export_policy(policy: TrainedPolicy, path: Path, format: str) -> Exported:
    """Writes `policy` to `path`; raises ExportError, and leaves no file, if it differs from the policy."""
    check_format(format, path)
    if policy.model.device.type != "cpu":
        raise ConfigError(f'the policy is on {policy.model.device}: load it with device="cpu" to export it.')
    write: Callable[[PolicyGraph, Path], Run] = {
        "onnx": _write_onnx,
        "torch-export": _write_torch_export,
        "safetensors": _write_safetensors,
    }[format]
    graph, temporary = PolicyGraph(policy), path.with_name(f".{secrets.token_hex(4)}.{path.name}")
    try:
        try:
            with _silent():
                run = write(graph, temporary)
        except Exception as error:  # of the exporter, or of a user's network
            reason = str(error).strip().partition("\n")[0]
            raise ExportError(
                f"{policy.source} cannot be exported as {format}: {type(error).__name__}: {reason}. The network must "
                "be traceable by torch.export: no Python branches on the values of tensors."
            ) from error
        difference = largest_difference(policy, run)
        if not difference <= TOLERANCE:
            raise ExportError(
                f"{policy.source} was not exported as {format}: the file differs from the policy by {difference:.2g}, "
                f"more than {TOLERANCE:g}."
            )
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return Exported(path, graph.input_names, graph.output_names, difference)


class PolicyGraph(nn.Module):
    """The computation that is exported, with its own copy of the weights."""

    def __init__(self, policy: TrainedPolicy) -> None:
        super().__init__()
        self.policy, self.distribution = policy, policy.model.distribution
        self.network = copy.deepcopy(policy.model.network).cpu().eval()
        for parameter in self.network.parameters():
            parameter.data = parameter.data.clone()  # not a view of the model's flat parameters
            parameter.requires_grad_(False)
        num_states = len(self.network.state_shapes)
        self.input_names = [leaf.path for leaf in space_leaves(policy.spaces.observation)]
        self.input_names += [f"state.{i}" for i in range(num_states)]
        self.output_names = ["action", "params", *(f"next_state.{i}" for i in range(num_states))]

    def forward(self, observation: Tree, state: State = ()) -> tuple[Tensor, ...]:
        leaf = flatten(self.policy.spaces.observation, observation)[0]
        first = torch.zeros(leaf.shape[0], dtype=torch.bool)  # an episode starts with a state of zeros
        output = self.network.act(observation, state, first)
        action = self.distribution.mode(output.params, action_mask(observation))
        return (self.distribution.tensor_to_env(action), output.params, *output.state)

    def arguments(self, observation: Tree, state: State) -> tuple[Any, ...]:
        return (observation, state) if self.network.state_shapes else (observation,)


def _traced(graph: PolicyGraph) -> torch.export.ExportedProgram:
    """Returns the program of `graph` for any number of rows."""
    batch = torch.export.Dim("batch")
    arguments = graph.arguments(next(random_observations(graph.policy, 2)), graph.network.initial_state(2, "cpu"))
    return torch.export.export(graph, arguments, dynamic_shapes=map_tree(lambda leaf: {0: batch}, arguments))


def _write_onnx(graph: PolicyGraph, path: Path) -> Run:
    import onnxruntime

    program = torch.onnx.export(
        _traced(graph), input_names=graph.input_names, output_names=graph.output_names, dynamo=True, verbose=False
    )
    assert program is not None
    for value in (*program.model.graph.inputs, *program.model.graph.outputs):
        assert value.shape is not None
        value.shape[0] = "batch"
    program.model.metadata_props.update(graph.policy.spec.metadata())
    program.save(str(path), external_data=False)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = {entry.name for entry in session.get_inputs()}

    def run(observation: Tree, state: State) -> list[Tensor]:
        leaves = [*flatten(graph.policy.spaces.observation, observation), *state]
        feed = {name: leaf.numpy() for name, leaf in zip(graph.input_names, leaves, strict=True) if name in names}
        return [torch.from_numpy(np.asarray(output)) for output in session.run(graph.output_names, feed)]

    return run


def _write_torch_export(graph: PolicyGraph, path: Path) -> Run:
    torch.export.save(_traced(graph), path, extra_files={f"{KEY}.json": graph.policy.spec.metadata()[KEY]})
    module = torch.export.load(path).module()
    return lambda observation, state: list(module(*graph.arguments(observation, state)))


def _write_safetensors(graph: PolicyGraph, path: Path) -> Run:
    save_weights(path, graph.policy.model.weights(), graph.policy.spec.metadata())
    again = PolicyGraph(load(path, trust=True))  # this user has just loaded the same network
    return lambda observation, state: list(again(*graph.arguments(observation, state)))


@torch.inference_mode()
def largest_difference(policy: TrainedPolicy, run: Run) -> float:
    """Returns the largest difference between `policy` and `run` on random observations, over the steps of episodes."""
    network, distribution, worst = policy.model.network, policy.model.distribution, 0.0
    for num_rows in BATCHES:
        state, other_state = None, network.initial_state(num_rows, "cpu")
        observations = random_observations(policy, num_rows)
        for _ in range(NUM_STEPS):
            observation = next(observations)
            first = torch.full((num_rows,), state is None)
            before = network.initial_state(num_rows, "cpu") if state is None else state
            params = network.act(observation, before, first).params
            step = policy.act(observation, state)
            action, other_params, *after = run(observation, other_state)
            expected = torch.from_numpy(np.asarray(step.action))
            if not expected.is_floating_point():  # two choices whose scores are equal but for rounding are both right
                chosen = distribution.mode(other_params, action_mask(observation))
                expected = torch.from_numpy(distribution.to_env(chosen.numpy()))
            pairs = [(action, expected), (other_params, params), *zip(after, step.state, strict=True)]
            worst = max([worst, *(_difference(found, wanted) for found, wanted in pairs)])
            state, other_state = step.state, tuple(after)
    return worst


def _difference(found: Tensor, wanted: Tensor) -> float:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return float("inf")
    difference = (found.double() - wanted.double()).abs() / wanted.double().abs().clamp(min=1.0)
    return float(difference.nan_to_num(nan=float("inf")).max())


def random_observations(policy: TrainedPolicy, num_rows: int) -> Iterator[Tree]:
    """Yields batches of random observations of the policy's space, as tensors."""
    space = gym.vector.utils.batch_space(policy.spaces.observation, num_rows)
    space.seed(num_rows)
    rng, reader = np.random.default_rng(num_rows), ObservationReader(policy.spaces, torch.device("cpu"))

    def tamed(leaf: Any) -> Any:
        array = np.asarray(leaf)
        if array.dtype.kind != "f":
            return array
        return np.where(np.abs(array) < LARGE, array, rng.normal(size=array.shape)).astype(array.dtype)

    firsts = np.cumsum([0, *reader.parts])[:-1]
    while True:
        observation = map_tree(tamed, space.sample())
        if reader.mask_index is not None:
            observation[MASK][:, firsts] = 1  # a random mask may allow nothing
        yield reader.read(observation).observation


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Suppresses what torch's exporters warn and log about themselves."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
