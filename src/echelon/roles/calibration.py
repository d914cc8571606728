"""The calibration: a process that measures the cost of the environments and the policy before a run starts.

It waits for no other process. It writes its result to the session folder, where `choice` reads it. It is a separate
process because environments may hang, crash or leak resources, which must not affect the run.

Shapes: K environments of an actor, G groups that central acting steps them in.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from echelon.algorithms.model import Model, Policy
from echelon.config import EnvConfig
from echelon.envs.make import env_seeds, make_group
from echelon.envs.vector import StepRows
from echelon.roles.context import Context
from echelon.roles.placement import pick_device, server_threads
from echelon.roles.plan.findings import CALIBRATED, CallCost, Measured
from echelon.roles.plan.layouts import num_groups, num_passes, round_rows
from echelon.roles.plan.parts import Plan
from echelon.roles.plan.placement import learner_device
from echelon.schema import Tree, map_tree, space_leaves, unflatten

CALIBRATION_SEED = 1 << 23  # an actor number that no actor has
MEASURE_S = 0.04  # time budget for each function, unless MIN_CALLS calls take longer
MIN_CALLS, MAX_CALLS = 3, 25
WHOLE_S = 0.5  # if a few steps of all environments take longer, only two environments are measured
LEARN_FORWARDS = 4  # a learning pass costs about as much as this many forward passes
SHORT_S = 0.002  # a shorter forward pass is measured with the rows of a whole trajectory


class Clock:
    """Records the costs of repeated calls of one function."""

    def __init__(self) -> None:
        self._costs: list[CallCost] = []

    def call(self, function: Callable[[], Any]) -> None:
        start, start_cpu = time.perf_counter(), time.process_time()
        function()
        cpu_s = time.process_time() - start_cpu
        self._costs.append(CallCost(time.perf_counter() - start, cpu_s))

    def cost(self) -> CallCost:
        """Returns the typical cost: the median CPU time plus the lower quartile of the idle time.

        The quartile ignores calls that waited because another process used the core.
        """
        costs = self._costs
        cpu_s = statistics.median(cost.cpu_s for cost in costs)
        idle = sorted(max(cost.wall_s - cost.cpu_s, 0.0) for cost in costs)
        return CallCost(cpu_s + idle[len(idle) // 4], cpu_s)


def measure(*functions: Callable[[], Any], before: Sequence[Callable[[], Any]] = ()) -> list[CallCost]:
    """Returns the cost of each function. The functions are called in turn, between MIN_CALLS and MAX_CALLS times.

    `before` holds a function for each of them that is called before every call and is not measured.
    """
    needs = before or [lambda: None] * len(functions)
    for function, need in zip(functions, needs, strict=True):
        need()
        function()  # not measured: the first call allocates and compiles
    clocks, begun, count = [Clock() for _ in functions], time.perf_counter(), 0
    while count < MIN_CALLS or (count < MAX_CALLS and time.perf_counter() - begun < MEASURE_S * len(functions)):
        for clock, function, need in zip(clocks, functions, needs, strict=True):
            need()
            clock.call(function)
        count += 1
    return [clock.cost() for clock in clocks]


class TrialEnvs:
    """A group of environments and a policy that acts in them, set up as in an actor."""

    def __init__(self, config: EnvConfig, model: Model, seeds: list[int]) -> None:
        self.group = make_group(config, seeds)
        n, space = len(seeds), self.group.spaces.observation
        self.leaves = [np.zeros((n, *leaf.shape), leaf.dtype) for leaf in space_leaves(space)]
        flags = [np.zeros(n, np.bool_) for _ in range(3)]
        self._rows = StepRows(self.leaves, np.zeros(n, np.float32), *flags)
        self.observation = unflatten(space, iter([torch.from_numpy(leaf) for leaf in self.leaves]))
        self.first = torch.ones(n, dtype=torch.bool)
        self._policy, self._to_env = Policy(model), model.distribution.to_env
        self._rng, self._state = torch.Generator().manual_seed(seeds[0]), model.network.initial_state(n, model.device)
        self.group.reset(self.leaves)

    def act(self) -> None:
        """Chooses the actions of the next step. Called before each step, as the valid actions may change."""
        chosen = self._policy.act(self.observation, self._state, self.first, self._rng)
        self._action, self._state = self._to_env(chosen.action.numpy()), chosen.state

    def step(self) -> None:
        self.group.step(self._action, self._rows)
        self.group.failures.clear()  # the actors report their own failures
        np.logical_not(self._rows.valid, out=self.first.numpy())


class Forward:
    """Forward passes over observations of `trial`, which are repeated to fill `num_rows` rows."""

    def __init__(
        self, model: Model, trial: TrialEnvs, num_rows: int, *, threads: int = 1, with_value: bool = False
    ) -> None:
        self.policy, self.model, self.threads = Policy(model, with_value=with_value), model, threads
        device = model.device
        copies = -(-num_rows // len(trial.first))
        self.leaves: Tree = map_tree(lambda leaf: _repeated(leaf, copies)[:num_rows], trial.observation)
        self.first = _repeated(trial.first, copies)[:num_rows]
        self.state = model.network.initial_state(num_rows, device)
        self.generator = torch.Generator(device).manual_seed(0)

    def act(self) -> None:
        """Computes the actions of all rows, including the transfers to and from the GPU if the model is on one."""
        torch.set_num_threads(self.threads)
        observation, first = map_tree(self._to_device, self.leaves), self._to_device(self.first)
        chosen = self.policy.act(observation, self.state, first, self.generator)
        chosen.action.cpu(), chosen.log_prob.cpu()
        torch.set_num_threads(1)

    def evaluate(self) -> None:
        """Computes the learner's forward pass over all rows."""
        with torch.inference_mode():
            self.model.network.act(self.leaves, self.state, self.first, with_value=True)

    def _to_device(self, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.to(self.model.device)


def _repeated(leaf: torch.Tensor, copies: int) -> torch.Tensor:
    return leaf.repeat(copies, *[1] * (leaf.dim() - 1))


class Calibration:
    """The calibration role: measures everything in its only step and finishes."""

    def __init__(self, context: Context) -> None:
        torch.set_num_threads(1)
        self.context, self.config, self.finished = context, context.train, False
        self.model = Plan(context).model
        self.model.network.eval()
        self._seeds = env_seeds(
            self.config.seed, CALIBRATION_SEED, context.generation, self.config.actor.envs_per_actor
        )
        self._trials: list[TrialEnvs] = []

    def step(self, timeout_s: float) -> bool:
        del timeout_s
        whole, part = self._environments()
        act, round = self._acting()
        Measured(whole, part, act, round, self._learn(act)).write(self.context.session / CALIBRATED)
        self.finished = True
        return True

    def _environments(self) -> tuple[CallCost, CallCost]:
        """Measures a step of all environments of an actor, and of one group of central acting.

        If environments are stepped in turn and are slow to make or step, two are measured and their cost is multiplied.
        """
        envs, groups = self.config.actor.envs_per_actor, num_groups(self.config)
        if self._make(1).group.in_turn:  # it also imports the packages of the environment
            begun, few = time.perf_counter(), min(envs, 2)
            trial = self._make(few)
            make_s = time.perf_counter() - begun
            [step] = measure(trial.step, before=[trial.act])
            if envs / few * (make_s + (MIN_CALLS + 1) * step.wall_s) > WHOLE_S:
                return step.times(envs / few), step.times(envs / few / groups)
        parts = [self._make(envs // count) for count in dict.fromkeys((groups, 1))]
        costs = measure(*[part.step for part in parts], before=[part.act for part in parts])
        return costs[-1], costs[0]

    def _make(self, num_envs: int) -> TrialEnvs:
        self._trials.append(TrialEnvs(self.config.env, self.model, self._seeds[:num_envs]))
        return self._trials[-1]

    def _acting(self) -> tuple[CallCost, CallCost]:
        """Measures choosing the actions of one actor's environments locally, and those of one round of a server."""
        rows, envs, model = round_rows(self.config), self.config.actor.envs_per_actor, self.model
        device = pick_device(self.config.acting.device, model.parameters.numel(), "--acting.device")
        threads = server_threads(self.config, model) if device == "cpu" else 1
        alone = self._forward(envs)
        if (device, threads, rows, self.config.acting.value) == ("cpu", 1, envs, False):
            [cost] = measure(alone.act)
            return cost, cost
        if device != "cpu":
            model = Plan(self.context, device=device).model
            model.network.eval()
        serving = Forward(model, self._trials[-1], rows, threads=threads, with_value=self.config.acting.value)
        act, round = measure(alone.act, serving.act)
        return act, round

    def _forward(self, num_rows: int) -> Forward:
        return Forward(self.model, self._trials[-1], num_rows)

    def _learn(self, act: CallCost) -> CallCost:
        """Returns the cost of learning from one environment step on these cores; zero if a GPU learns."""
        learner, model, actor = self.config.learner, self.model, self.config.actor
        if learner_device(self.config, model.parameters.numel()) != "cpu":
            return CallCost(0.0, 0.0)
        rows = actor.envs_per_actor * (actor.trajectory if act.cpu_s < SHORT_S else 1)
        [forward] = measure(self._forward(rows).evaluate)
        cpu_s = LEARN_FORWARDS * num_passes(self.config) * forward.cpu_s / rows
        return CallCost(cpu_s / ((learner.threads or 1) * learner.num_learners), cpu_s)

    def close(self) -> None:
        for trial in self._trials:
            trial.group.close()


def calibration(config: dict[str, Any]) -> Calibration:
    """The entry point of a calibration process."""
    return Calibration(Context.from_config(config))
