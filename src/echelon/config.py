"""What a user can set: frozen dataclasses, one section a part; a field is read in one module."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

from echelon.algorithm_config import AlgorithmConfig as AlgorithmConfig
from echelon.bounds import at_least, fractions, require, tcp_address


def __getattr__(name: str) -> Any:
    """The config classes of learning rules, which lie with their presets."""
    import_module("echelon.presets")
    for cls in AlgorithmConfig.classes.values():
        if cls.__name__ == name:
            return cls
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass(frozen=True, slots=True)
class EnvConfig:
    """Which environment, and how it is made and stepped."""

    id: str | Callable[..., Any] = "CartPole-v1"  # gymnasium id, "module:factory", "file.py:factory", "envpool:ID"
    kwargs: dict[str, Any] = field(default_factory=dict)
    wrappers: tuple[str, ...] = ()  # "module:callable", applied in order to each environment
    vector: Literal["auto", "loop", "vector_entry_point"] = "auto"  # auto: vectorised for Atari, else our loop
    on_error: Literal["stop", "restart"] = "stop"  # what an environment that raises does to the run


@dataclass(frozen=True, slots=True)
class ActorConfig:
    """How experience is collected."""

    num_actors: int = 2
    envs: int = 16  # K, environments per actor
    trajectory: int = 20  # T, steps per trajectory
    slots: int = 4  # trajectories each actor may have written and unread

    def __post_init__(self) -> None:
        at_least(self, "actor", num_actors=1, envs=1, trajectory=1, slots=1)


@dataclass(frozen=True, slots=True)
class ActingConfig:
    """Who chooses the actions: every actor with its own copy of the policy, or inference servers for all of them."""

    mode: Literal["auto", "local", "central"] = "auto"  # auto: what measures faster at the start
    servers: int = 1  # inference servers, which share the actors
    groups: int = 0  # an actor steps one group of its environments while others wait for actions; 0: 2 if envs is even
    batch: bool = True  # false: every request is answered alone
    max_batch: int = 0  # environments per forward pass; 0: all that ask
    max_wait_us: float = 200.0  # how long a request waits for those of the other actors
    spin_us: float = 0.0  # how long a server looks for requests before it sleeps; for machines with idle cores
    value: bool = False  # replies carry the value of what was seen, too; the rules here do without
    device: str = "auto"  # where the servers compute: auto, cpu, cuda, cuda:N
    transport: Literal["shm", "tcp"] = "shm"  # how requests travel: shared memory, or ZeroMQ over TCP
    address: str = "tcp://127.0.0.1:0"  # where servers listen with tcp; off the loopback only with ECHELON_SECRET

    def __post_init__(self) -> None:
        at_least(self, "acting", servers=1, groups=0, max_batch=0, max_wait_us=0, spin_us=0)
        tcp_address(self.address, "acting.address")
        require(
            self.servers == 1 or self.address.endswith(":0"),
            f"acting.address={self.address} names one port for {self.servers} servers. Use port 0: any free ones.",
        )


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """How batches become weights."""

    batch: int = 0  # trajectories (a3c: gradients) per batch; 0: one from every actor
    max_lag: int | None = None  # versions; 0: synchronous, None: bounded only by actor.slots
    num_learners: int = 1  # processes that share every batch; --learners
    patience_s: float = 2.0  # with max_lag >= 1: how long a batch waits for an actor that stalled
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    threads: int = 0  # torch threads of each learner; 0: chosen by the work of a batch and the cores that actors leave
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False  # torch.compile of the loss

    def __post_init__(self) -> None:
        require(self.num_learners >= 1, f"--learners {self.num_learners} (learner.num_learners) must be at least 1.")
        require(self.batch >= 0, f"learner.batch={self.batch} must be 0 (one trajectory per actor) or more.")
        require(self.max_lag is None or self.max_lag >= 0, f"learner.max_lag={self.max_lag} must be None, 0 or more.")
        require(self.threads >= 0, f"learner.threads={self.threads} must be 0 (automatic) or more.")


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """The shape of the policy and value network."""

    name: str = "auto"  # auto: encoders chosen by the observation space; or "module:factory"
    hidden: tuple[int, ...] = (64, 64)
    activation: Literal["tanh", "relu"] = "tanh"
    core: Literal["none", "lstm", "gru"] = "none"
    core_size: int = 128
    shared: bool = False  # one torso for policy and value (always so for images and recurrent cores)
    normalize_observation: bool = False
    initial_log_std: float = 0.0  # continuous actions, in units of half the action range

    def __post_init__(self) -> None:
        require(all(size >= 1 for size in self.hidden), f"network.hidden={self.hidden}: every layer needs 1 or more.")
        at_least(self, "network", core_size=1)


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """How gradients become steps."""

    name: Literal["adam", "rmsprop"] = "adam"
    learning_rate: float = 5e-4
    schedule: Literal["constant", "linear"] = "constant"  # linear: to 0 at the end of the run
    epsilon: float = 1e-5
    clip_norm: float = 0.5  # global gradient norm; 0: no clipping

    def __post_init__(self) -> None:
        require(self.learning_rate > 0, f"optimizer.learning_rate={self.learning_rate} must be above 0.")
        at_least(self, "optimizer", epsilon=0, clip_norm=0)


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """Where transitions lie, and how they are drawn for learning."""

    capacity: int = 1_000_000  # transitions, over all shards; the oldest make room
    min_size: int = 1_000  # learning waits below this
    batch: int = 256  # transitions per update
    n_step: int = 1  # rewards summed before the value of what follows
    samples_per_insert: float = 256.0  # transitions drawn for each one stored; 0: as fast as the learner can
    prioritized: bool = False  # draw by TD error
    alpha: float = 0.6  # priority = error^alpha; 0: uniform
    beta_start: float = 0.4  # how far importance weights undo the priorities, at first ...
    beta_end: float = 1.0  # ... and at the end of the run
    frames: Literal["auto", "stacked", "whole"] = "auto"  # stacked: frames lie once; auto: where known
    publish_every: int = 1  # updates from one version of the weights to the next
    checkpoint: bool = False  # its content is part of the checkpoints
    transport: Literal["shm", "tcp"] = "shm"  # how the learner reads shards: in place, or through a shard server
    address: str = "tcp://127.0.0.1:0"  # where that listens with tcp; off the loopback only with ECHELON_SECRET
    prefetch: int = 2  # batches that are under way with tcp while the learner learns
    lost_after_s: float = 10.0  # a shard server that is silent for so long is lost, with its shards

    def __post_init__(self) -> None:
        at_least(self, "replay", batch=1, n_step=1, samples_per_insert=0, publish_every=1, prefetch=0, lost_after_s=1)
        tcp_address(self.address, "replay.address")
        require(
            self.transport == "shm" or not self.checkpoint,
            "replay.checkpoint=true needs the shards on the learner's host, but replay.transport=tcp reads them from "
            "others. Use --replay.transport shm, or --replay.checkpoint false.",
        )
        fractions(self, "replay", "alpha", "beta_start", "beta_end")
        require(
            self.min_size >= self.batch,
            f"replay.min_size={self.min_size} is below replay.batch={self.batch}: the first batch could not be filled.",
        )
        require(
            self.min_size <= self.capacity,
            f"replay.min_size={self.min_size} exceeds replay.capacity={self.capacity}: the learner would wait forever. "
            "Lower min_size or raise capacity.",
        )


@dataclass(frozen=True, slots=True)
class WorkersConfig:
    """Workers in place of actors: they come from anywhere, with whole episodes, and leave with the newest weights."""

    address: str = ""  # where they come to, tcp://HOST:PORT; off the loopback only with ECHELON_SECRET; "": no workers
    updates: int = 64  # per episode that is learned from; such an episode with its updates is an epoch
    evaluation: float = 0.08  # the part of all episodes that is played greedily, logged and not learned from
    max_steps: int = 5_000  # of one message; longer episodes come in pieces
    spaces: Literal["learner", "worker"] = "learner"  # whose environment has them: one made here, or the first worker's

    def __post_init__(self) -> None:
        if self.address:
            tcp_address(self.address, "workers.address")
        at_least(self, "workers", updates=1, max_steps=1)
        require(
            0.0 <= self.evaluation < 1.0,
            f"workers.evaluation={self.evaluation} must be at least 0 and below 1: some episodes must be learned from.",
        )


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    """Greedy evaluation beside training, with seeds of its own."""

    interval_s: float = 60.0  # 0: never
    episodes: int = 10

    def __post_init__(self) -> None:
        at_least(self, "evaluation", interval_s=0, episodes=1)


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The run folder."""

    dir: str = ""  # "": runs/<preset>-<env>-<time>
    checkpoint_interval_s: float = 30.0
    keep_checkpoints: int = 3
    init_from: str = ""  # run folder or weights file to start from

    def __post_init__(self) -> None:
        at_least(self, "run", checkpoint_interval_s=0, keep_checkpoints=1)


@dataclass(frozen=True, slots=True)
class StopConfig:
    """When to stop; the first condition that holds."""

    steps: int = 0
    minutes: float = 0.0
    until_return: float | None = None  # mean return of the last 100 episodes
    epochs: int = 0  # of a run with workers

    def __post_init__(self) -> None:
        at_least(self, "stop", steps=0, minutes=0, epochs=0)


@dataclass(frozen=True, slots=True)
class SupervisionConfig:
    """What the coordinator does about roles that die or hang."""

    hang_timeout_s: float = 30.0
    max_same_failures: int = 3  # the same exception this often ...
    failure_window_s: float = 60.0  # ... within this time ends the run

    def __post_init__(self) -> None:
        require(self.hang_timeout_s > 0, f"supervision.hang_timeout_s={self.hang_timeout_s} must be above 0.")
        at_least(self, "supervision", max_same_failures=1, failure_window_s=0)


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """One training run, whole."""

    preset: str = "impala"
    engine: Literal["inline", "local"] = "local"
    seed: int = 0
    shm_dir: str = "/dev/shm"
    env: EnvConfig = field(default_factory=EnvConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    acting: ActingConfig = field(default_factory=ActingConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    algorithm: AlgorithmConfig = field(default_factory=lambda: AlgorithmConfig.classes["impala"]())
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    run: RunConfig = field(default_factory=RunConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    supervision: SupervisionConfig = field(default_factory=SupervisionConfig)

    def __post_init__(self) -> None:
        require(
            self.engine != "inline" or self.acting.transport == "shm",
            "acting.transport=tcp needs processes: sockets of one process keep no fixed order. Use --engine local, or "
            "--acting.transport shm.",
        )
        require(
            self.replay.transport == "shm" or (self.engine == "local" and not self.has_workers),
            "replay.transport=tcp needs actors in processes of their own: use --engine local without workers, or "
            "--replay.transport shm.",
        )
        require(
            self.replay.transport == "shm" or self.replay.lost_after_s + 2.0 <= self.supervision.hang_timeout_s,
            f"replay.lost_after_s={self.replay.lost_after_s:g} must be 2 or more below supervision.hang_timeout_s="
            f"{self.supervision.hang_timeout_s:g}: a learner that waits for a silent host would be taken for hung.",
        )
        require(0 <= self.seed < 1 << 63, f"seed={self.seed} must be a number from 0 to 2**63 - 1.")
        require(
            self.experience != "replay" or self.learner.max_lag is None,
            f"learner.max_lag={self.learner.max_lag} is for trajectories, but {self.algorithm.name} replays. Use none.",
        )
        require(
            self.experience != "gradients" or self.acting.mode != "central",
            f"acting.mode=central, but actors of {self.algorithm.name} learn with the policy that they act with, so "
            "each needs its own. Use --acting local.",
        )
        require(
            self.has_workers or not self.stop.epochs,
            f"stop.epochs={self.stop.epochs} counts what workers bring, and there are none. Use `echelon "
            "learner`, or --steps.",
        )
        if self.has_workers:
            self._check_workers()
        if self.learner.num_learners > 1:
            self._check_learners()

    def _check_workers(self) -> None:
        address = f"workers.address={self.workers.address}"
        require(
            self.experience == "replay",
            f"{address}, but {self.algorithm.name} learns from what its newest weights did: workers' episodes come "
            "late. Use a preset that replays, such as dqn, ddpg or sac (`echelon learner --help` lists them).",
        )
        require(
            self.workers.max_steps >= self.replay.n_step,
            f"workers.max_steps={self.workers.max_steps} is below replay.n_step={self.replay.n_step}, so no transition "
            "would fit into a message. Raise it.",
        )
        require(self.engine == "local", f"{address} needs processes of its own. Use --engine local.")
        require(
            self.acting.mode != "central", f"{address}, where every worker chooses its own actions. Use --acting local."
        )

    def _check_learners(self) -> None:
        count, actors, batch = self.learner.num_learners, self.actor.num_actors, self.batch_trajectories
        require(
            self.engine == "local",
            f"--learners {count} need processes: learners wait for each other in the middle of a batch. Use --engine "
            "local, or --learners 1.",
        )
        what = "workers' episodes" if self.has_workers else f"{self.algorithm.name}'s gradients"
        require(
            not self.has_workers and self.experience != "gradients",
            f"--learners {count}, but {what} come to one learner. Use --learners 1.",
        )
        require(
            self.replay.transport == "shm",
            f"--learners {count} draw from shards of their own host; replay.transport=tcp reads them from others. Use "
            "--replay.transport shm, or --learners 1.",
        )
        require(
            actors >= count,
            f"--learners {count} are more than the {actors} actors, and a learner without an actor has nothing to "
            f"learn from. Use --learners {actors} or fewer; or, in a new run, --actors {count} or more.",
        )
        fitting = " or ".join(str(n) for n in range(1, actors + 1) if actors % n == 0 and batch % n == 0)
        option, amount = ("--actors", actors) if actors % count else ("--learner.batch", batch)
        below = amount // count * count
        require(
            self.experience == "replay" or (actors % count == 0 and batch % count == 0),
            f"--learners {count} do not divide the {actors} actors and the {batch} trajectories of a batch, so they "
            f"could not take equal parts. Use --learners {fitting}; or, in a new run, {option} "
            f"{f'{below} or ' if below else ''}{below + count}.",
        )

    @property
    def learner_names(self) -> list[str]:
        """Of their processes; the first one publishes, saves and keeps the account."""
        count = self.learner.num_learners
        return [f"learner-{index}" for index in range(count)] if count > 1 else ["learner"]

    def actors_of(self, learner: int) -> range:
        """The actors that a learner takes its share of a batch from."""
        count, actors = self.learner.num_learners, self.actor.num_actors
        return range(learner * actors // count, (learner + 1) * actors // count)

    def learner_of(self, actor: int) -> int:
        return next(index for index in range(self.learner.num_learners) if actor in self.actors_of(index))

    @property
    def has_workers(self) -> bool:
        return bool(self.workers.address)

    @property
    def num_shards(self) -> int:
        """Of the replay: one for each actor, or for the door through which all workers' episodes come."""
        return 1 if self.has_workers else self.actor.num_actors

    @property
    def experience(self) -> Literal["queue", "replay", "gradients"]:
        """What reaches the learner: trajectories, once and in order, transitions, drawn again and again, or what actors
        found in their own trajectories."""
        return "gradients" if self.algorithm.slots == "gradients" else self.algorithm.experience

    @property
    def batch_trajectories(self) -> int:
        return self.learner.batch or self.actor.num_actors


def replace(config: TrainConfig, **changes: Any) -> TrainConfig:
    """`config` with dotted fields changed, all at once: replace(config, **{"actor.envs": 8, "seed": 1})."""
    sections: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        head, _, rest = path.partition(".")
        section = getattr(config, head, None)
        known = getattr(section, "__dataclass_fields__", ())
        is_there = hasattr(config, head) and (not rest or rest in known)
        require(is_there, f"there is no field {path} in the configuration.")
        require(
            bool(rest) or not dataclasses.is_dataclass(section) or dataclasses.is_dataclass(value),
            f"{path} is a section, not a value: {value!r} does not fit. Name one of its fields, as in {path}.FIELD.",
        )
        sections.setdefault(head, {})[rest] = value
    values = {}
    for head, fields in sections.items():
        section = fields.pop("", getattr(config, head))
        values[head] = dataclasses.replace(section, **fields) if fields else section
    return dataclasses.replace(config, **values)
