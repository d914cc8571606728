"""The options of `echelon bench async`, and the defaults of its trainings. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from echelon.errors import ConfigError

SYNC, ASYNC = "sync", "async"
SECONDS, SCORE_SECONDS = 20.0, 600.0
MIN_ITERATIONS = 4  # that are measured
SETS_STOP = "the benchmark sets the stop conditions itself: use --seconds S and --time-to-score R."
DEFAULTS: Mapping[str, str] = {  # the published study of asynchronous PPO on Humanoid
    "actor.trajectory": "512",
    "actor.slots": "2",  # an actor fills one while the other waits for the learner: the lag stays small
    "network.hidden": "32,32,32",
    "network.activation": "tanh",
    "algorithm.epochs": "20",
    "algorithm.discount": "0.99",
    "algorithm.gae_lambda": "0.95",
    "algorithm.clip": "0.2",
    "algorithm.value_clip": "0",
    "algorithm.entropy_weight": "0.01",
    "algorithm.normalize_advantage": "true",
    "optimizer.name": "adam",
    "optimizer.learning_rate": "3e-4",
    "optimizer.clip_norm": "0.5",
}


@dataclass(frozen=True, slots=True)
class AsyncSetting:
    """The options of the command."""

    envs: tuple[int, ...] = (32, 48, 96)  # K
    num_actors: int = 2  # N of asynchronous training
    sync_envs: int | None = None  # K of a further synchronous row, 0: none; None: as many environments as N actors have
    minibatch: int = 4096  # steps
    seconds: float | None = None  # of a run
    rounds: int = 1
    score: float | None = None
    with_timelines: bool = True

    def __post_init__(self) -> None:
        if not self.envs or min(self.envs) < 1 or len(set(self.envs)) < len(self.envs):
            given = ",".join(map(str, self.envs))
            raise ConfigError(f"envs_per_actor={given} must be different numbers of at least 1.")
        for name, least in {"num_actors": 2, "minibatch": 1, "rounds": 1}.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {least}.")
        if self.sync_envs is not None and self.sync_envs < 0:
            raise ConfigError(f"sync_envs={self.sync_envs} must be at least 0; 0 is for none.")
        if self.seconds is not None and not self.seconds > 0:
            raise ConfigError(f"seconds={self.seconds:g} must be above 0.")

    @property
    def run_s(self) -> float:
        return self.seconds or (SECONDS if self.score is None else SCORE_SECONDS)

    @property
    def rows(self) -> dict[int, tuple[str, ...]]:
        """What is trained for each K."""
        extra = self.num_actors * max(self.envs) if self.sync_envs is None else self.sync_envs
        rows: dict[int, tuple[str, ...]] = {extra: (SYNC,)} if extra else {}
        return {**dict.fromkeys(self.envs, (SYNC, ASYNC)), **{k: v for k, v in rows.items() if k not in self.envs}}
