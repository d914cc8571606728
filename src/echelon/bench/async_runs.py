"""One training of `echelon bench async`: how long its iterations take, from the timelines of its roles."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from echelon.bench.async_bound import Cost, measure_rollout
from echelon.bench.async_setting import MIN_ITERATIONS
from echelon.bench.watch import Usage, usage, watched_training
from echelon.config import TrainConfig, replace
from echelon.errors import ConfigError
from echelon.runs.timeline import Span, read_timelines, read_work

Progress = Callable[[int, int | None], None]  # (iterations, total)
LEARNER = "learner"


@dataclass(frozen=True, slots=True)
class TimeToScore:
    """When the mean return reached the score: since the first trajectory began."""

    seconds: float
    env_steps: int


@dataclass(frozen=True, slots=True)
class Used:
    """The use of the cores by a training, after its warm-up."""

    others_cores: float  # cores that other programs used, on average
    idle_cores: float

    @classmethod
    def of(cls, usage: Usage, num_cores: int) -> Used:
        per_us = num_cores / usage.total_us
        return cls(per_us * usage.others_us, per_us * usage.idle_us)


@dataclass(frozen=True, slots=True)
class Iterations:
    """The measured part of a training: from the start of one iteration of the learner to that of a later one."""

    start_s: float
    end_s: float
    count: int
    timelines: Mapping[str, Sequence[Span]]  # of every role, for the whole run

    @classmethod
    def of(cls, timelines: Mapping[str, Sequence[Span]], num_actors: int) -> Iterations:
        """Leaves out the first iterations, in which the actors start together.

        The number of iterations is a multiple of the actors, because they take turns: the iterations of one turn are
        not equally long.
        """
        starts = [start for start, _ in timelines.get(LEARNER, ())]
        first = num_warm_up(num_actors)
        count = (len(starts) - 1 - first) // num_actors * num_actors
        if count < 1:
            raise ConfigError(
                f"the learner began {len(starts)} iterations, which is too few: the first {first} are left out. Raise "
                "--seconds, or the score if the run reached it."
            )
        return cls(starts[first], starts[first + count], count, timelines)

    @property
    def interval_s(self) -> float:
        """The mean time between two iterations, T."""
        return (self.end_s - self.start_s) / self.count

    def busy(self, name: str) -> float:
        """Returns the share of the time in which a role rolls out or learns."""
        spans = window(self.timelines[name], self.start_s, self.end_s)
        return sum(end - start for start, end in spans) / (self.end_s - self.start_s)

    @property
    def learner_busy(self) -> float:
        return self.busy(LEARNER)

    @property
    def actors_busy(self) -> float:
        """The mean share over the actors."""
        actors = [name for name in self.timelines if name.startswith("actor")]
        return sum(map(self.busy, actors)) / len(actors)

    @property
    def is_learning_bound(self) -> bool:
        """Whether the actors wait for the learner for a larger share of the time than it waits for them."""
        return self.learner_busy > self.actors_busy


@dataclass(frozen=True, slots=True)
class Ran:
    """A training that is over."""

    iterations: Iterations
    work_s: float  # processor time of a rollout and of an iteration of the learner; other programs hardly change it
    lag_mean: float
    used: Used | None  # None if the run was too short to tell
    rollout: Cost  # with the final policy
    score: TimeToScore | None

    def figures(self) -> dict[str, Any]:
        """Returns the run for the report."""
        measured = self.iterations
        return {
            "interval_s": measured.interval_s,
            "iterations": measured.count,
            "learner_busy": measured.learner_busy,
            "actors_busy": measured.actors_busy,
            "work_s": self.work_s,
            "lag_mean": self.lag_mean,
            "used": self.used and asdict(self.used),
            "final_rollout": asdict(self.rollout),
            "score": self.score and {"seconds": self.score.seconds, "env_steps": self.score.env_steps},
        }


def work_of(work: Mapping[str, Sequence[float]]) -> float:
    """Returns the processor time of a mean rollout and of a mean iteration of the learner.

    `work` is that of each role at the end of each of its rollouts or iterations. It counts from the end of the first
    one, before which the role starts. So it is the time of a known number of them, wherever in them the run ends.
    """
    learner = [work[LEARNER]]
    actors = [times for name, times in work.items() if name.startswith("actor")]
    return sum(
        sum(times[-1] - times[0] for times in roles) / sum(len(times) - 1 for times in roles)
        for roles in (actors, learner)
    )


def num_warm_up(num_actors: int) -> int:
    """Returns the number of iterations that are left out at the start."""
    return num_actors + 1


def num_iterations(num_actors: int, seconds: float, interval_s: float) -> int:
    """Returns how many iterations a run needs that measures for `seconds`, if they take `interval_s` each."""
    turns = max(MIN_ITERATIONS, math.ceil(seconds / interval_s)) / num_actors
    return num_warm_up(num_actors) + math.ceil(turns) * num_actors + 1


def window(spans: Sequence[Span], start_s: float, end_s: float) -> list[Span]:
    """Returns the parts of `spans` between two times."""
    inside = ((max(start, start_s), min(end, end_s)) for start, end in spans)
    return [(start, end) for start, end in inside if start < end]


def run_training(config: TrainConfig, count: int | None, num_cores: int, progress: Progress) -> Ran:
    """Trains with `config` until the learner has begun `count` iterations; None: until the run's own stop condition."""
    steps = config.stop.steps if count is None else count * config.actor.trajectory * config.actor.envs_per_actor
    config = replace(config, **{"stop.steps": steps, "run.timeline": True})
    with watched_training(config, lambda row: progress(row["updates"], count), io.StringIO()) as watched:
        result = watched.result
        if result.signal:
            raise KeyboardInterrupt
        timelines, work = read_timelines(result.run_dir), read_work(result.run_dir)
        rollout = measure_rollout(config, result.run_dir)
    used, summary = usage(watched.samples, num_cores, whole_machine=True), result.summary
    begin_s = min((spans[0][0] for spans in timelines.values()), default=0.0)
    score = TimeToScore(timelines[LEARNER][-1][1] - begin_s, summary["env_steps"])
    return Ran(
        iterations=Iterations.of(timelines, config.actor.num_actors),
        work_s=work_of(work),
        lag_mean=float(summary["lag_mean"]),
        used=Used.of(used, num_cores) if used else None,
        rollout=rollout,
        score=score if result.status == "solved" else None,
    )
