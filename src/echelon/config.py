"""What a user can set: frozen dataclasses, one section a part; a field is read in one module."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from echelon.errors import ConfigError


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _at_least(config: Any, section: str, **least: float) -> None:
    """Each named field of `config` must not be below the number given for it."""
    for name, bound in least.items():
        value = getattr(config, name)
        require(value >= bound, f"{section}.{name}={value} must be at least {bound}.")


def _fractions(config: Any, section: str, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(0 <= value <= 1, f"{section}.{name}={value} must lie between 0 and 1.")


def _above_zero(config: Any, section: str, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(value > 0, f"{section}.{name}={value} must be above 0.")


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
        _at_least(self, "actor", num_actors=1, envs=1, trajectory=1, slots=1)


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
        _at_least(self, "acting", servers=1, groups=0, max_batch=0, max_wait_us=0, spin_us=0)
        require(
            self.servers == 1 or self.address.endswith(":0"),
            f"acting.address={self.address} names one port for {self.servers} servers. Use port 0: any free ones.",
        )


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """How batches become weights."""

    batch: int = 0  # trajectories per batch; 0: one from every actor
    max_lag: int | None = None  # versions; 0: synchronous, None: bounded only by actor.slots
    patience_s: float = 2.0  # with max_lag >= 1: how long a batch waits for an actor that stalled
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    threads: int = 0  # torch threads of the learner; 0: all cores for a large network, else 1
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False  # torch.compile of the loss

    def __post_init__(self) -> None:
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
        _at_least(self, "network", core_size=1)


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
        _at_least(self, "optimizer", epsilon=0, clip_norm=0)


@dataclass(frozen=True, slots=True)
class ImpalaConfig:
    """V-trace actor-critic (Espeholt et al., 2018)."""

    name: Literal["impala"] = "impala"
    discount: float = 0.99
    rho_clip: float = 1.0
    c_clip: float = 1.0
    trace_lambda: float = 1.0
    epochs: int = 1  # passes over each batch; V-trace corrects for the later ones too
    minibatches: int = 1  # pieces of each pass, by environment
    value_weight: float = 0.5
    entropy_weight: float = 0.01
    normalize_advantage: bool = False
    reward_clip: float = 0.0  # 0: none; 1: to [-1, 1] as on Atari
    normalize_reward: bool = False

    def __post_init__(self) -> None:
        _fractions(self, "algorithm", "discount", "trace_lambda")
        _at_least(self, "algorithm", epochs=1, minibatches=1, rho_clip=0, c_clip=0, value_weight=0, reward_clip=0)


@dataclass(frozen=True, slots=True)
class PpoConfig:
    """Clipped PPO with GAE (Schulman et al., 2017)."""

    name: Literal["ppo"] = "ppo"
    discount: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    value_clip: float = 0.0  # 0: off
    epochs: int = 4
    minibatches: int = 4
    value_weight: float = 0.5
    entropy_weight: float = 0.0
    normalize_advantage: bool = True
    reward_clip: float = 0.0
    normalize_reward: bool = False
    correct_lag: bool = False  # V-trace targets and advantages in place of GAE, for data that lags

    def __post_init__(self) -> None:
        _fractions(self, "algorithm", "discount", "gae_lambda")
        require(self.clip > 0, f"algorithm.clip={self.clip} must be above 0: no step would ever be learned from.")
        _at_least(self, "algorithm", epochs=1, minibatches=1, value_clip=0, value_weight=0, reward_clip=0)


@dataclass(frozen=True, slots=True)
class DqnConfig:
    """Double Q-learning (van Hasselt et al., 2016), dueling (Wang et al., 2016)."""

    name: Literal["dqn"] = "dqn"
    discount: float = 0.99
    double: bool = True
    dueling: bool = True
    huber: float = 1.0  # TD errors beyond it count linearly; 0: all are squared
    target_period: int = 500  # updates between copies to the target network; 0: it follows by target_tau
    target_tau: float = 0.0  # the part of the way that the target network goes at every update
    epsilon_start: float = 1.0  # chance of a random action at the first step ...
    epsilon_end: float = 0.05
    epsilon_steps: int = 10_000  # ... falls in a straight line over so many environment steps
    epsilon_ladder: bool = False  # environment i of N: 0.4^(1 + 7i/(N-1)) in place of the schedule (Ape-X)
    reward_clip: float = 0.0  # of single rewards, before they are summed over n steps

    def __post_init__(self) -> None:
        _fractions(self, "algorithm", "discount", "target_tau", "epsilon_start", "epsilon_end")
        _at_least(self, "algorithm", huber=0, target_period=0, epsilon_steps=0, reward_clip=0)
        require(
            (self.target_period > 0) != (self.target_tau > 0),
            f"algorithm.target_period={self.target_period} and algorithm.target_tau={self.target_tau}: the target "
            "network is copied every so many updates or follows by a part of the way. Set one, and the other to 0.",
        )


@dataclass(frozen=True, slots=True)
class DdpgConfig:
    """Deterministic policy gradients (Lillicrap et al., 2016); TD3 (Fujimoto et al., 2018) by its values."""

    name: Literal["ddpg"] = "ddpg"
    discount: float = 0.99
    num_critics: int = 1  # TD3: 2, of which the lower counts
    policy_delay: int = 1  # critic updates per policy update; TD3: 2
    target_noise: float = 0.0  # on the actions that targets are computed from; TD3: 0.2
    target_noise_clip: float = 0.5
    target_tau: float = 0.005
    critic_learning_rate: float = 1e-3  # the policy's is optimizer.learning_rate
    huber: float = 0.0  # TD errors beyond it count linearly; 0: all are squared
    noise: float = 0.1  # deviation of the noise that actors add, in units of half the action range
    noise_ladder: float = 0.0  # else than 0: the noise falls to this from the first environment to the last
    random_steps: int = 1_000  # environment steps with actions drawn at random, before the policy acts
    publish_critic: bool = False  # actors get the critic too, for the priorities of what they store
    reward_clip: float = 0.0  # of single rewards, before they are summed over n steps

    def __post_init__(self) -> None:
        _fractions(self, "algorithm", "discount")
        _at_least(self, "algorithm", num_critics=1, policy_delay=1, target_noise=0, target_noise_clip=0, huber=0)
        _at_least(self, "algorithm", noise=0, noise_ladder=0, random_steps=0, reward_clip=0)
        _above_zero(self, "algorithm", "target_tau", "critic_learning_rate")
        require(
            self.noise_ladder <= self.noise,
            f"algorithm.noise_ladder={self.noise_ladder} exceeds algorithm.noise={self.noise}, from which it falls.",
        )


@dataclass(frozen=True, slots=True)
class SacConfig:
    """Soft actor-critic with a learned temperature (Haarnoja et al., 2018), for continuous and discrete actions."""

    name: Literal["sac"] = "sac"
    discount: float = 0.99
    num_critics: int = 2
    target_tau: float = 0.005
    critic_learning_rate: float = 1e-3  # the policy's is optimizer.learning_rate
    temperature: float = 1.0  # what entropy is worth; the first value where it is learned
    learn_temperature: bool = True
    temperature_learning_rate: float = 1e-3
    target_entropy: float | None = None  # none: -(action components), or 0.98 of a uniform choice's if discrete
    random_steps: int = 1_000  # environment steps with actions drawn at random, before the policy acts
    reward_clip: float = 0.0  # of single rewards, before they are summed over n steps

    def __post_init__(self) -> None:
        _fractions(self, "algorithm", "discount")
        _at_least(self, "algorithm", num_critics=1, random_steps=0, reward_clip=0)
        _above_zero(self, "algorithm", "target_tau", "temperature", "critic_learning_rate", "temperature_learning_rate")


AlgorithmConfig = ImpalaConfig | PpoConfig | DqnConfig | DdpgConfig | SacConfig


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
    frames: Literal["auto", "stacked", "whole"] = "auto"  # stacked: frames of stacked images lie once; auto: for ALE/
    publish_every: int = 1  # updates from one version of the weights to the next
    checkpoint: bool = False  # its content is part of the checkpoints

    def __post_init__(self) -> None:
        _at_least(self, "replay", batch=1, n_step=1, samples_per_insert=0, publish_every=1)
        _fractions(self, "replay", "alpha", "beta_start", "beta_end")
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
class EvaluationConfig:
    """Greedy evaluation beside training, with seeds of its own."""

    interval_s: float = 60.0  # 0: never
    episodes: int = 10

    def __post_init__(self) -> None:
        _at_least(self, "evaluation", interval_s=0, episodes=1)


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The run folder."""

    dir: str = ""  # "": runs/<preset>-<env>-<time>
    checkpoint_interval_s: float = 30.0
    keep_checkpoints: int = 3
    init_from: str = ""  # run folder or weights file to start from

    def __post_init__(self) -> None:
        _at_least(self, "run", checkpoint_interval_s=0, keep_checkpoints=1)


@dataclass(frozen=True, slots=True)
class StopConfig:
    """When to stop; the first condition that holds."""

    steps: int = 0
    minutes: float = 0.0
    until_return: float | None = None  # mean return of the last 100 episodes

    def __post_init__(self) -> None:
        _at_least(self, "stop", steps=0, minutes=0)


@dataclass(frozen=True, slots=True)
class SupervisionConfig:
    """What the coordinator does about roles that die or hang."""

    hang_timeout_s: float = 30.0
    max_same_failures: int = 3  # the same exception this often ...
    failure_window_s: float = 60.0  # ... within this time ends the run

    def __post_init__(self) -> None:
        require(self.hang_timeout_s > 0, f"supervision.hang_timeout_s={self.hang_timeout_s} must be above 0.")
        _at_least(self, "supervision", max_same_failures=1, failure_window_s=0)


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
    algorithm: AlgorithmConfig = field(default_factory=ImpalaConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
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
        require(0 <= self.seed < 1 << 63, f"seed={self.seed} must be a number from 0 to 2**63 - 1.")
        require(
            self.experience == "queue" or self.learner.max_lag is None,
            f"learner.max_lag={self.learner.max_lag} is for trajectories, but {self.algorithm.name} replays. Use none.",
        )

    @property
    def experience(self) -> Literal["queue", "replay"]:
        """How steps reach the learner: as trajectories, once and in order, or as transitions, drawn again and again."""
        return "queue" if isinstance(self.algorithm, ImpalaConfig | PpoConfig) else "replay"

    @property
    def batch_trajectories(self) -> int:
        return self.learner.batch or self.actor.num_actors


def replace(config: TrainConfig, **changes: Any) -> TrainConfig:
    """`config` with dotted fields changed, all at once: replace(config, **{"actor.envs": 8, "seed": 1})."""
    sections: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        head, _, rest = path.partition(".")
        known = getattr(getattr(config, head, None), "__dataclass_fields__", ())
        is_there = hasattr(config, head) and (not rest or rest in known)
        require(is_there, f"there is no field {path} in the configuration.")
        sections.setdefault(head, {})[rest] = value
    values = {}
    for head, fields in sections.items():
        section = fields.pop("", getattr(config, head))
        values[head] = dataclasses.replace(section, **fields) if fields else section
    return dataclasses.replace(config, **values)
