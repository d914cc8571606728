"""The bound of `echelon bench async`: the shortest time between two training iterations that this machine allows.

It follows from two costs, each measured alone with the run's classes and shapes: one rollout (a trajectory of an
actor's K environments) and one iteration of the learner (all passes over one trajectory, and publishing). The rollout
is measured with the initial policy and with the final one of the run, and the mean of both is its cost.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from echelon.bench.processes import one_thread, session_in
from echelon.bench.stages import RATE, Collecting, make_learning_stage, stage_context
from echelon.config import TrainConfig
from echelon.config import replace as replace_fields
from echelon.roles.plan.layouts import minibatch_samples
from echelon.roles.plan.parts import Plan
from echelon.roles.plan.placement import learner_device, learner_threads
from echelon.runs.weights import find_weights

NUM_CHUNKS, CHUNK_S = 3, 0.5
CHUNK_STEPS = 64  # rows of a rollout that are measured at a time; the cost of a row does not depend on their number


@dataclass(frozen=True, slots=True)
class Cost:
    """The time of a unit of work, without the time during which other programs had the core."""

    cpu_s: float
    wall_s: float  # longer than `cpu_s` where the work waits, as for a GPU, and shorter where it uses several cores


@dataclass(frozen=True, slots=True)
class Bound:
    """The costs of a rollout and of an iteration of the learner, and the least time between two iterations."""

    rollout: Cost
    learn: Cost
    num_cores: int

    @property
    def sync_s(self) -> float:
        """The bound with one actor that waits while the learner learns, as the learner waits for the rollout."""
        return self.rollout.wall_s + self.learn.wall_s

    def terms(self, num_actors: int) -> dict[str, float]:
        """Returns what bounds the time between two iterations if `num_actors` roll out while the learner learns."""
        at_a_time = min(num_actors, self.num_cores)
        return {
            "learning": self.learn.wall_s,
            "rollouts": max(self.rollout.wall_s / num_actors, self.rollout.cpu_s / at_a_time),
            "cores": (self.rollout.cpu_s + self.learn.cpu_s) / self.num_cores,
        }

    def async_s(self, num_actors: int) -> float:
        return max(self.terms(num_actors).values())

    def limit(self, num_actors: int) -> str:
        """Returns the name of the term that is the bound."""
        terms = self.terms(num_actors)
        return max(terms, key=lambda name: terms[name])


@dataclass(frozen=True, slots=True)
class Learning:
    """The cost of an iteration, and what the learner computes with."""

    cost: Cost
    device: str
    threads: int


def median_cost(costs: Iterable[Cost]) -> Cost:
    both = [(cost.cpu_s, cost.wall_s) for cost in costs]
    return Cost(*(statistics.median(times) for times in zip(*both, strict=True)))


def mean_cost(costs: Iterable[Cost]) -> Cost:
    both = [(cost.cpu_s, cost.wall_s) for cost in costs]
    return Cost(*(statistics.mean(times) for times in zip(*both, strict=True)))


def measure_rollout(config: TrainConfig, run_dir: Path | None = None) -> Cost:
    """Measures a rollout with the final policy of the run in `run_dir`, or with the initial one.

    An environment may take longer the better the policy is: that of a Humanoid that stands a little takes 19 % longer.
    """
    with _collecting(config, run_dir) as collecting:
        share = collecting.schema.num_steps / config.actor.trajectory
        return median_cost(_cost(collecting.roll_out, share) for _ in range(NUM_CHUNKS))


def measure_learning(config: TrainConfig) -> Learning:
    """Measures an iteration of the learner."""
    with _collecting(config) as collecting, session_in(config.shm_dir) as session:
        context = stage_context(
            replace_fields(config, **{"optimizer.learning_rate": RATE, "acting.mode": "local"}), session
        )
        num_parameters = Plan(context).model.parameters.numel()
        device = learner_device(config, num_parameters)
        threads = learner_threads(config, num_parameters, minibatch_samples(config)) or 1
        plan = Plan(context, device=device)
        views = plan.schema.views(np.zeros(plan.schema.nbytes, np.uint8))
        for name, view in views.items():
            view[...] = np.resize(collecting.views[name], view.shape)  # repeats the rows
        with contextlib.closing(make_learning_stage(plan, views, samples_per_step=0.0)) as learning:
            torch.set_num_threads(threads)
            learning.learn()  # the first call allocates and compiles
            cost = median_cost(_cost(learning.learn, 1.0) for _ in range(NUM_CHUNKS))
    return Learning(cost, device, threads)


@contextlib.contextmanager
def _collecting(config: TrainConfig, run_dir: Path | None = None) -> Iterator[Collecting]:
    """Yields an actor's environments with their policy, for a part of a trajectory."""
    num_steps = min(config.actor.trajectory, CHUNK_STEPS)
    part = replace_fields(config, **{"actor.trajectory": num_steps, "acting.mode": "local"})
    with session_in(config.shm_dir) as session, one_thread():
        plan = Plan(stage_context(part, session))
        if run_dir is not None:
            plan.model.load_weights(find_weights(str(run_dir)), str(run_dir))
        with contextlib.closing(Collecting(plan)) as collecting:
            yield collecting


def _cost(work: Callable[[], object], share: float) -> Cost:
    """Repeats `work`, which is this `share` of a unit, for CHUNK_S; returns the cost of a unit."""
    count, begin = 0.0, _now()
    while not count or _now().wall_s - begin.wall_s < CHUNK_S:
        work()
        count += share
    end = _now()
    return Cost((end.cpu_s - begin.cpu_s) / count, (end.wall_s - begin.wall_s) / count)


def _now() -> Cost:
    """Returns the processor time of this process, and the time that this thread ran or slept by choice."""
    return Cost(time.process_time(), time.perf_counter() - _core_wait_s())


def _core_wait_s() -> float:
    """Returns how long this thread was ready to run while its core ran another; 0 if the kernel does not count it."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0
