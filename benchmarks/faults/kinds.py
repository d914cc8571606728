"""The kinds of run that faults are tried on, and their roles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Company = Literal["", "workers", "host"]  # further processes beside the run


@dataclass(frozen=True)
class Kind:
    """A command and the processes of it that faults hit."""

    name: str
    words: tuple[str, ...]
    roles: tuple[str, ...]
    company: Company = ""
    in_step: bool = False  # max_lag=0 with one pass: the learner computes again, to the bit, what the actors computed
    has_env: bool = True  # environments run in roles, so an order to raise, hang or return NaN reaches them

    @property
    def num_learners(self) -> int:
        return sum(role.startswith("learner") for role in self.roles)


ENV = "faults.clock:Clock"
COMMON = (
    "--device=cpu",
    "--learner.threads=1",
    "--run.checkpoint-interval-s=0.2",
    "--steps=1000000000",
)
ACTORS = ("--actors=2", "--actor.envs=4")
QUIET = "--evaluation.episodes=0"
ONCE = ("--algorithm.epochs=1", "--algorithm.minibatches=1", "--actor.trajectory=16", *ACTORS, QUIET)
REPLAY = ("--replay.min-size=300", "--replay.capacity=20000", "--replay.samples-per-insert=4")
KINDS = (
    Kind(
        "impala",
        ("train", "impala", ENV, *ACTORS, "--evaluation.interval-s=0.2", "--evaluation.episodes=1"),
        ("actor-0", "actor-1", "learner", "evaluator", "forkserver"),
    ),
    Kind("ppo", ("train", "ppo", ENV, *ONCE), ("actor-0", "actor-1", "learner", "forkserver"), in_step=True),
    Kind(
        "ppo central",
        ("train", "ppo", ENV, *ONCE, "--acting=central"),
        ("inference-0", "actor-1", "learner"),
        in_step=True,
    ),
    Kind(
        "two learners",
        ("train", "impala", ENV, *ACTORS, QUIET, "--learners=2"),
        ("learner-0", "learner-1", "actor-0"),
    ),
    Kind("a3c", ("train", "a3c", ENV, *ACTORS, QUIET), ("actor-0", "learner")),
    Kind(
        "apex-dqn",
        ("train", "apex-dqn", ENV, *ACTORS, QUIET, *REPLAY, "--replay.checkpoint=true"),
        ("actor-0", "learner", "forkserver"),
    ),
    Kind(
        "apex-dqn tcp",
        ("train", "apex-dqn", ENV, *ACTORS, QUIET, *REPLAY, "--replay.transport=tcp", "--replay.lost-after-s=1"),
        ("shards-0", "actor-1", "learner"),
    ),
    Kind(
        "workers",
        ("learner", "dqn", ENV, *REPLAY, "--update-steps=4"),
        ("gateway", "learner", "worker"),
        company="workers",
        has_env=False,
    ),
    Kind(
        "hosts",
        ("train", "impala", ENV, *ACTORS, QUIET, "--hosts=2", "--hosts.lease-s=2"),
        ("actor-0", "actor-1", "learner", "carrier", "agent"),
        company="host",
    ),
)
