"""The agent of `echelon bench rpc`: its policy, equal for all transports, and how it serves requests.

The policy has linear layers without activations and samples an action from a softmax. It does not learn, and keeps no
state between calls except buffers, allocated once per batch size. `SeatAgent` is the inference server of a training
with this policy (`shm`, `tcp`); `CallAgent` serves calls of other libraries.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic_ns
from typing import Any, Protocol

import numpy as np
import torch

from echelon.bench.rpc import RpcSetting
from echelon.bench.rpc_processes import JOIN, WARM_UP, Results, layout_of
from echelon.errors import ConfigError
from echelon.servers.inference import InferenceServer
from echelon.transport.act_board import ActBoard
from echelon.transport.act_listener import ActListener
from echelon.transport.batcher import Batcher, BatchRule, Round

Array = np.ndarray[Any, Any]
SEED = 1
SPIN_US = 200.0  # about the time that the observers of a small batch need for their next states


class AgentPolicy:
    """Chooses an action for each of n flat states: Linear(num_inputs, out), then `nlayers` times Linear(out, out)."""

    def __init__(self, setting: RpcSetting) -> None:
        device = torch.device(setting.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"device={setting.device} does not exist: torch sees no GPU. Use --device cpu.")
        torch.set_num_threads(1)  # layers this small are slower with threads, and the observers need the cores
        torch.manual_seed(SEED)
        sizes = [setting.num_inputs, *[setting.out_features] * (setting.nlayers + 1)]
        layers = [torch.nn.Linear(i, o, device=device) for i, o in itertools.pairwise(sizes)]
        self.device, self.num_inputs, self.num_actions = device, setting.num_inputs, setting.out_features
        self.weights = [layer.weight.detach() for layer in layers]
        self.biases = [layer.bias.detach() for layer in layers]
        self._choosers: dict[int, Callable[[Array], Array]] = {}  # by batch size, so at most as many as observers

    def choose(self, states: Array) -> Array:
        """Returns actions (n,) for `states` (n, num_inputs) of float32; valid until the next call of the same size."""
        chooser = self._choosers.get(len(states))
        if chooser is None:
            make = self._chooser_on_gpu if self.device.type == "cuda" else self._chooser
            chooser = self._choosers[len(states)] = make(len(states))
        return chooser(states)

    def _chooser(self, count: int) -> Callable[[Array], Array]:
        with torch.inference_mode():
            draw, actions = self._draw(count), torch.empty(count, dtype=torch.int64)
        answer = actions.numpy()

        def choose(states: Array) -> Array:
            with torch.inference_mode():
                draw(torch.from_numpy(states), actions)
            return answer

        return choose

    def _chooser_on_gpu(self, count: int) -> Callable[[Array], Array]:
        """Returns a chooser that computes on the GPU, captured once as a CUDA graph."""
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
            work()  # libraries allocate workspaces on the first call, which cannot be captured
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
        """Returns a function of (states, actions) that writes one sampled action per state without allocating.

        The layers work on columns, (features, n), where the first and largest product is cheaper. An action is sampled
        as the first of exponential clocks to ring, whose rates are the probabilities.
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


class RandomAnswerer:
    """Writes sampled actions of the policy, and records the duration of each round."""

    def __init__(self, setting: RpcSetting, board: ActBoard, results: Results) -> None:
        self.policy, self.results = AgentPolicy(setting), results
        self.states = board.observation[0][:, 0]  # (S, num_inputs)
        self.actions = board.action[:, 0]  # (S,)
        self.policy.choose(self.states)

    def answer(self, round: Round) -> int:
        # A complete round is read in place; one with gaps is gathered.
        where = round.span if round.whole else round.seats
        self.actions[where] = self.policy.choose(self.states[where])
        self.results.record_round(len(round.seats), round.first_ns)
        return 0

    def close(self) -> None:
        pass


class SeatAgent:
    """The role of an agent whose observers have seats on its board: a step is one round.

    It waits for requests by the batch rule: for all observers of the previous round, at most `max_wait_us`. If an
    observer stops or dies, the others continue without it; if the agent dies, the coordinator ends the run.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        setting, folder = RpcSetting(**config["setting"]), Path(config["session"])
        self.results, self.board = Results(folder, setting), ActBoard(folder, layout_of(setting))
        self.finished = False
        rule = BatchRule(setting.batch, max_wait_us=setting.max_wait_us, spin_us=SPIN_US)
        self.batcher, listener = Batcher(self.board, 0, rule), None
        if setting.transport == "tcp":
            address = f"tcp://{setting.master_addr}:{setting.master_port}"
            listener = ActListener(self.board, 0, address)
            self.results.agent[1] = int(listener.address.rpartition(":")[2])
        self.server = InferenceServer(self.batcher, RandomAnswerer(setting, self.board, self.results), listener)
        self.results.agent[0] = JOIN

    def step(self, timeout_s: float) -> bool:
        worked = self.server.step(timeout_s)
        if not worked:
            self._pause()
        return worked

    def _pause(self) -> None:
        """Without requests: starts the next phase if all are ready for it; after the last phase the run ends."""
        results = self.results
        ready = results.agent[0]
        if (ready == JOIN and self.board.incarnation.all()) or (ready == WARM_UP and results.all_warm):
            self.batcher.expect_all()  # so that the first batch is complete
            results.agent[0] = ready + 1
        self.finished = results.all_ended

    def close(self) -> None:
        self.server.close()


class PendingAction(Protocol):
    """The future of a call, in the form of its library."""

    def set_result(self, action: int, /) -> None: ...


class CallAgent:
    """Serves calls, all of a round together or each alone; calling threads are serialized."""

    def __init__(self, setting: RpcSetting, results: Results) -> None:
        self.policy, self.results = AgentPolicy(setting), results
        self.lock = threading.Lock()
        self.states = np.zeros((setting.num_observers, setting.num_inputs), np.float32)
        self.waiting: dict[int, PendingAction] = {}  # by observer
        self.first_ns = 0
        self.policy.choose(self.states if setting.batch else self.states[:1])

    def join_round(self, index: int, state: Array, pending: PendingAction) -> None:
        """Keeps the request of an observer until all have sent one; the last request triggers the round."""
        arrived_ns = monotonic_ns()
        with self.lock:
            if not self.waiting:
                self.first_ns = arrived_ns
            self.states[index] = state
            self.waiting[index] = pending
            if len(self.waiting) < len(self.states):
                return
            actions = self.policy.choose(self.states).tolist()
            self.results.record_round(len(self.states), self.first_ns)
            answered, self.waiting = self.waiting, {}
        for asker, waiting in answered.items():
            waiting.set_result(actions[asker])

    def answer(self, state: Array) -> int:
        """Returns the action for a single request."""
        arrived_ns = monotonic_ns()
        with self.lock:
            action = int(self.policy.choose(state[None])[0])
            self.results.record_round(1, arrived_ns)
        return action
