"""The agent's policy, the same in every backend: linear layers without activations, a softmax over actions, a draw.

Nothing learns and nothing is kept between calls but memory for the results, which is made once per batch size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from echelon.bench.rpc.setting import Setting
from echelon.errors import ConfigError

Array = np.ndarray[Any, Any]
SEED = 1


class AgentPolicy:
    """Chooses an action for each of n flat states: Linear(num_inputs, out), then `nlayers` times Linear(out, out)."""

    def __init__(self, setting: Setting) -> None:
        device = torch.device(setting.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"device={setting.device} is not there: torch sees no GPU. Use --device cpu.")
        torch.set_num_threads(1)  # layers this small only lose by threads, and the cores are the observers'
        torch.manual_seed(SEED)
        sizes = [setting.num_inputs, *[setting.out_features] * (setting.nlayers + 1)]
        layers = [torch.nn.Linear(i, o, device=device) for i, o in itertools.pairwise(sizes)]
        self.device, self.num_inputs, self.num_actions = device, setting.num_inputs, setting.out_features
        self.weights = [layer.weight.detach() for layer in layers]
        self.biases = [layer.bias.detach() for layer in layers]
        self._choosers: dict[int, Callable[[Array], Array]] = {}  # by batch size, so no more than there are observers

    def choose(self, states: Array) -> Array:
        """Actions (n,) for `states` (n, num_inputs) of float32; valid until the next call with as many states."""
        chooser = self._choosers.get(len(states))
        if chooser is None:
            make = self._chooser_on_gpu if self.device.type == "cuda" else self._chooser
            chooser = self._choosers[len(states)] = make(len(states))
        return chooser(states)

    def _chooser(self, count: int) -> Callable[[Array], Array]:
        draw, actions = self._draw(count), torch.empty(count, dtype=torch.int64)
        answer = actions.numpy()

        def choose(states: Array) -> Array:
            draw(torch.from_numpy(states), actions)
            return answer

        return choose

    def _chooser_on_gpu(self, count: int) -> Callable[[Array], Array]:
        """The same through memory of the GPU, recorded once as a CUDA graph."""
        draw = self._draw(count)
        staged = torch.empty(count, self.num_inputs, pin_memory=True)
        states_there = torch.empty(count, self.num_inputs, device=self.device)
        actions_there = torch.empty(count, dtype=torch.int64, device=self.device)
        actions = torch.empty(count, dtype=torch.int64, pin_memory=True)
        staged_array, answer = staged.numpy(), actions.numpy()

        def work() -> None:
            states_there.copy_(staged, non_blocking=True)
            draw(states_there, actions_there)
            actions.copy_(actions_there, non_blocking=True)

        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            work()  # libraries make their workspaces on the first call, which cannot be recorded
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()

        def choose(states: Array) -> Array:
            np.copyto(staged_array, states)
            graph.replay()
            torch.cuda.synchronize(self.device)
            return answer

        return choose

    def _draw(self, count: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """A function of (states, actions) that writes one drawn action per state, allocating nothing.

        The layers work on columns, (features, n), where the first and largest product is cheaper. An action is drawn
        as the winner of a race of exponential clocks whose rates are the probabilities.
        """
        device, num_actions = self.device, self.num_actions
        biases = [bias[:, None].expand(-1, count).contiguous() for bias in self.biases]
        hidden = [torch.empty(num_actions, count, device=device) for _ in self.biases]
        steps = list(zip(biases, self.weights, hidden, strict=True))
        logits = hidden[-1].t()
        probabilities = torch.empty(count, num_actions, device=device)
        clocks = torch.empty(count, num_actions, device=device)
        addmm, softmax, div, argmax = torch.addmm, torch.softmax, torch.div, torch.argmax

        def draw(states: torch.Tensor, actions: torch.Tensor) -> None:
            columns = states.t()
            for bias, weight, out in steps:
                addmm(bias, weight, columns, out=out)
                columns = out
            softmax(logits, -1, out=probabilities)
            div(probabilities, clocks.exponential_(), out=probabilities)
            argmax(probabilities, -1, out=actions)

        return draw
