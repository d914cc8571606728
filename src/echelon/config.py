"""The configuration of a training run: frozen sections of fields. Each field is read in one module."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import field
from msgspec.structs import replace as replace_struct

from echelon.algorithm_config import REWARD_BOUND as REWARD_BOUND
from echelon.algorithm_config import AlgorithmConfig as AlgorithmConfig
from echelon.errors import ConfigError
from echelon.fields import AnySection, Section, doc, near_fields, require
from echelon.run_sections import EvaluationConfig as EvaluationConfig
from echelon.run_sections import HostsConfig as HostsConfig
from echelon.run_sections import RunConfig as RunConfig
from echelon.run_sections import StopConfig as StopConfig
from echelon.run_sections import SupervisionConfig as SupervisionConfig
from echelon.sections import ActingConfig as ActingConfig
from echelon.sections import ActorConfig as ActorConfig
from echelon.sections import EnvConfig as EnvConfig
from echelon.sections import EnvId as EnvId
from echelon.sections import LearnerConfig as LearnerConfig
from echelon.sections import NetworkConfig as NetworkConfig
from echelon.sections import OptimizerConfig as OptimizerConfig
from echelon.sections import ReplayConfig as ReplayConfig
from echelon.sections import WorkersConfig as WorkersConfig

_MAX_SHOWN_LEARNERS = 1_000  # in a message about --learners


class Renamed(NamedTuple):
    """The current path of a field; if its type changed, too, also the current values by the old ones as text."""

    path: str
    values: Mapping[str, Any] = MappingProxyType({})

    def value(self, old: Any) -> Any:
        """Returns the current value for the value `old` of the field under its old path."""
        return self.values.get(str(old).strip().lower(), old)


RENAMED = {  # by the old path
    "stop.epochs": Renamed("stop.episodes"),
    "algorithm.correct_lag": Renamed("algorithm.lag_correction", {"false": "none", "true": "vtrace"}),
}


def __getattr__(name: str) -> Any:
    """Returns the config class of an algorithm; it is defined in `echelon.presets`."""
    if name == "OwnConfig":
        warnings.warn("OwnConfig is now UserPolicyConfig; the next release drops it.", FutureWarning, stacklevel=2)
        name = "UserPolicyConfig"
    if name in (algorithms := _algorithms()):
        return algorithms[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_algorithms()})


def _algorithms() -> dict[str, type[AlgorithmConfig]]:
    import_module("echelon.presets")
    return {cls.__name__: cls for cls in AlgorithmConfig.classes().values()}


class TrainConfig(Section, frozen=True):
    """The configuration of one training run."""

    preset: Annotated[str, doc("the preset that the defaults come from")] = "impala"
    engine: Annotated[
        Literal["inline", "local", "hosts", "ray"],
        doc(
            "inline: all roles in one process; local: one process per role; hosts: actors on several hosts; ray: "
            "on the nodes of a Ray cluster"
        ),
    ] = "local"
    seed: Annotated[int, doc("seed of all random numbers", ge=0, le=(1 << 63) - 1)] = 0
    shm_dir: Annotated[str, doc("directory of the shared-memory files")] = "/dev/shm"
    env: EnvConfig = field(default_factory=EnvConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    acting: ActingConfig = field(default_factory=ActingConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    algorithm: AlgorithmConfig = field(default_factory=lambda: AlgorithmConfig.classes()["impala"]())
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    hosts: HostsConfig = field(default_factory=HostsConfig)
    run: RunConfig = field(default_factory=RunConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    supervision: SupervisionConfig = field(default_factory=SupervisionConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_modes()

    def _check_modes(self) -> None:
        require(
            self.engine != "inline" or self.acting.transport == "shm",
            "acting.transport=tcp needs --engine local: within one process, the order of messages from sockets is not "
            "fixed. Use --engine local, or --acting.transport shm.",
        )
        require(
            self.replay.transport == "shm" or (self.engine != "inline" and not self.has_workers),
            "replay.transport=tcp needs actors in separate processes: use --engine local without workers, or "
            "--replay.transport shm.",
        )
        require(
            self.replay.transport == "shm" or self.replay.lost_after_s + 2.0 <= self.supervision.hang_timeout_s,
            f"replay.lost_after_s={self.replay.lost_after_s:g} must be at least 2 s below supervision.hang_timeout_s="
            f"{self.supervision.hang_timeout_s:g}: otherwise a learner that waits for a silent shard server counts as "
            "hung. Lower lost_after_s or raise hang_timeout_s.",
        )
        require(
            self.algorithm.experience != "replay" or self.learner.max_lag is None,
            f"learner.max_lag={self.learner.max_lag} applies to trajectories, but {self.algorithm.name} learns from "
            "replay. Use --learner.max-lag none.",
        )
        require(
            self.algorithm.slots != "gradients" or self.acting.mode != "central",
            f"acting.mode=central does not work with {self.algorithm.name}: its actors compute gradients of the policy "
            "that they act with, so each needs its own copy. Use --acting local.",
        )
        self._check_hosts()
        self._check_workers()
        self._check_learners()

    def _check_hosts(self) -> None:
        """Refuses what several hosts do not support."""
        require(
            self.engine == "ray" or not self.hosts.ray_address,
            f"hosts.ray_address={self.hosts.ray_address} (--address) needs --engine ray.",
        )
        require(
            not self.has_hosts or self.replay.transport == "shm",
            "replay.transport=tcp does not work with several hosts: the replay is in the learner's memory there, also "
            "that of actors on other hosts. Use --replay.transport shm.",
        )
        require(
            not self.has_hosts or not self.replay.exact,
            "replay.exact=true does not work with several hosts: steps of other hosts arrive late. Use --replay.exact "
            "false.",
        )
        require(
            self.engine != "hosts" or self.hosts.count > 1 or self.hosts.min_actors > 0,
            "--engine hosts needs the number of hosts, this one included: give --hosts N, 2 or more, or --min-actors "
            "M.",
        )
        require(
            self.has_hosts or self.hosts.count == 1,
            f"--hosts {self.hosts.count} does not go with --engine {self.engine}: use --engine hosts or ray, or "
            "--hosts 1.",
        )
        least, most = self.hosts.min_actors, self.actor.num_actors
        require(
            least == 0 or self.has_hosts,
            f"--min-actors {least} does not go with --engine {self.engine}: other hosts run the others. Use --engine "
            "hosts, or --actors N.",
        )
        require(
            least <= most,
            f"hosts.min_actors={least} exceeds actor.num_actors={most}. Lower --min-actors, or raise --max-actors.",
        )
        require(
            least in (0, most) or self.experience == "replay" or self.learner.max_lag is None,
            f"--min-actors {least} does not work with learner.max_lag={self.learner.max_lag}: every batch has "
            f"trajectories of all {most} actors. Use --actors {most} alone, or a preset without that bound, such as "
            "impala or apex-dqn.",
        )
        require(
            not self.has_hosts or (self.acting.servers == 1 and self.acting.transport == "shm"),
            f"acting.servers={self.acting.servers} with acting.transport={self.acting.transport} does not work with "
            "several hosts: each host has one inference server, which its actors reach through shared memory. Use "
            "--acting.servers 1 --acting.transport shm.",
        )
        require(
            not self.has_hosts or self.hosts.count <= self.actor.num_actors,
            f"hosts.count={self.hosts.count} exceeds actor.num_actors={self.actor.num_actors}, so some hosts would "
            "have no actor. Lower --hosts, or raise --actors.",
        )

    def _check_workers(self) -> None:
        address = f"workers.address={self.workers.address}"
        require(
            not self.has_workers or self.algorithm.experience == "replay",
            f"{address} does not work with {self.algorithm.name}: it is on-policy, and workers' episodes come from "
            "older weights. Use a preset with replay, such as dqn, td3 or sac (`echelon learner --help` lists them).",
        )
        require(
            not self.has_workers or self.workers.max_steps >= self.replay.n_step,
            f"workers.max_steps={self.workers.max_steps} is below replay.n_step={self.replay.n_step}, so no transition "
            "fits into a message. Raise workers.max_steps, or lower replay.n_step.",
        )
        require(
            not self.has_workers or not self.replay.exact,
            f"{address} does not work with replay.exact=true: updates belong to workers' episodes. Use --replay.exact "
            "false.",
        )
        require(
            not self.has_workers or self.engine == "local",
            f"{address} needs a gateway process. Use --engine local.",
        )
        require(
            not self.has_workers or self.acting.mode != "central",
            f"{address} does not work with acting.mode=central: every worker chooses its own actions. Use --acting "
            "local.",
        )

    def _check_learners(self) -> None:
        count, actors, batch = self.learner.num_learners, self.actor.num_actors, self.batch_trajectories
        require(
            count == 1 or not self.has_hosts or self.algorithm.experience != "replay",
            f"--learners {count} does not work with {self.algorithm.name} and several hosts: the whole replay is at "
            "the head. Use --learners 1, or --engine local.",
        )
        require(
            count == 1 or self.engine != "ray",
            f"--learners {count} does not work with --engine ray: its nodes may change, learners stay on their hosts. "
            "Use --engine hosts, or --learners 1.",
        )
        require(
            count == 1 or not self.has_hosts or count == self.hosts.count,
            f"--learners {count} does not fit --hosts {self.hosts.count}: with several learners, every host has one, "
            f"near its actors. Use --learners {self.hosts.count}, or --learners 1 for one at the head.",
        )
        require(
            count == 1 or self.hosts.min_actors == 0,
            f"--learners {count} does not work with --min-actors: every learner needs its part of all actors. Use "
            f"--actors {actors} alone, or --learners 1.",
        )
        require(
            count == 1 or not self.has_hosts or self.hosts.hostname != "0.0.0.0",
            f"--learners {count} needs the address at which other hosts reach this one, because their learners connect "
            f"to its learner; hosts.address={self.hosts.address} names none. Use --hosts.address tcp://ADDRESS:PORT.",
        )
        require(
            count == 1 or self.engine != "inline",
            f"--learners {count} needs --engine local: learners wait for each other within a batch, so each needs a "
            "process. Use --engine local, or --learners 1.",
        )
        require(
            not (self.algorithm.experience == "replay" and self.replay.prioritized and self.algorithm.normalize_reward),
            "algorithm.normalize_reward=true does not work with replay.prioritized=true: actors compute initial "
            "priorities, and do not know the scale of the rewards. Set one of them to false.",
        )
        reason = self.algorithm.whole_minibatches
        require(
            self.learner.microbatches == 1 or not reason,
            f"learner.microbatches={self.learner.microbatches} does not work with {self.algorithm.name}: {reason}, or "
            "--learner.microbatches 1.",
        )
        alone = f"--learners {count} does not work: only one learner can receive {{}}. Use --learners 1."
        require(count == 1 or not self.has_workers, alone.format("workers' episodes"))
        require(count == 1 or self.algorithm.slots != "gradients", alone.format(f"{self.algorithm.name}'s gradients"))
        require(
            count == 1 or self.replay.transport == "shm",
            f"--learners {count} does not work with replay.transport=tcp: several learners sample only from shards in "
            "shared memory. Use --replay.transport shm, or --learners 1.",
        )
        require(
            actors >= count,
            f"--learners {count} exceeds the {actors} actors, and a learner without an actor receives no experience. "
            f"Use --learners {actors} or fewer; or, in a new run, --actors {count} or more.",
        )
        most = min(actors, _MAX_SHOWN_LEARNERS)
        fitting = " or ".join(str(n) for n in range(1, most + 1) if actors % n == 0 and batch % n == 0)
        option, amount = ("--actors", actors) if actors % count else ("--learner.batch", batch)
        below = amount // count * count
        require(
            self.algorithm.experience == "replay" or (actors % count == 0 and batch % count == 0),
            f"--learners {count} does not divide both the {actors} actors and the {batch} trajectories of a batch, so "
            f"the learners' parts would differ in size. Use --learners {fitting}; or, in a new run, {option} "
            f"{f'{below} or ' if below else ''}{below + count}.",
        )

    @property
    def learner_names(self) -> list[str]:
        """Process names of the learners; the first one publishes weights, writes checkpoints and keeps the account."""
        count = self.learner.num_learners
        return [f"learner-{index}" for index in range(count)] if count > 1 else ["learner"]

    def actors_of(self, learner: int) -> range:
        """Returns the indices of the actors that feed `learner`."""
        count, actors = self.learner.num_learners, self.actor.num_actors
        return range(learner * actors // count, (learner + 1) * actors // count)

    def learner_of(self, actor: int) -> int:
        return next(index for index in range(self.learner.num_learners) if actor in self.actors_of(index))

    @property
    def actors_per_host(self) -> int:
        """Number of actors on one host: with several hosts an equal part of them, rounded up."""
        return -(-self.actor.num_actors // self.hosts.count)

    @property
    def learners_per_host(self) -> int:
        """Number of learners on one host that has any: with several hosts there is one at the head, or one on each."""
        return self.learner.num_learners if self.hosts.count == 1 else 1

    @property
    def is_spread(self) -> bool:
        """Whether every host has a learner, which takes the trajectories of that host's actors."""
        return self.hosts.count > 1 and self.learner.num_learners > 1

    @property
    def has_workers(self) -> bool:
        return bool(self.workers.address)

    @property
    def has_hosts(self) -> bool:
        """Whether other hosts can take part."""
        return self.engine in ("hosts", "ray")

    @property
    def num_shards(self) -> int:
        """Number of replay shards: one per actor, or one for the gateway that receives all workers' episodes."""
        return self.workers.num_writers(self.actor.num_actors)

    @property
    def experience(self) -> Literal["queue", "replay", "gradients"]:
        """What the learner receives: trajectories, each used once and in order (queue), transitions, sampled repeatedly
        (replay), or gradients that actors computed."""
        return self.algorithm.reaches_learner

    @property
    def batch_trajectories(self) -> int:
        return self.learner.batch or self.actor.num_actors


def current_fields(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `changes`, values by dotted path of their field, with current paths; warns of old ones."""
    current = {}
    for path, value in changes.items():
        if path in RENAMED:
            renamed = RENAMED[path]
            text = f"{path} is now {renamed.path}; the next release drops the old name."
            warnings.warn(text, FutureWarning, stacklevel=3)
            path, value = renamed.path, renamed.value(value)
        current[path] = value
    return current


def _paths(config: Section) -> list[str]:
    """Returns the paths that `replace` takes for `config`."""
    values = {name: getattr(config, name) for name in config.__struct_fields__}
    inner = ((name, value) for name, value in values.items() if isinstance(value, Section))
    return [*values, *(f"{name}.{field}" for name, value in inner for field in value.__struct_fields__)]


def replace(config: AnySection, **changes: Any) -> AnySection:
    """Returns a copy of `config` with dotted fields changed: replace(config, **{"actor.envs": 8, "seed": 1}).

    All changes are applied together, so fields that must fit each other can be changed in one call. A total number of
    environments replaces a number per actor.
    """
    sections: dict[str, dict[str, Any]] = {}
    changes = current_fields(changes)
    if "actor.total_envs" in changes:
        changes.setdefault("actor.envs", 0)
    for path, value in changes.items():
        head, _, rest = path.partition(".")
        section = getattr(config, head, None)
        known = section.__struct_fields__ if isinstance(section, Section) else ()
        exists = head in config.__struct_fields__ and (not rest or rest in known)
        if not exists:
            raise ConfigError(f"there is no field {path} in the configuration.{near_fields(path, _paths(config))}")
        require(
            bool(rest) or not isinstance(section, Section) or isinstance(value, Section),
            f"{path} is a section, not a value: {value!r} does not fit. Set one of its fields: {path}.FIELD.",
        )
        sections.setdefault(head, {})[rest] = value
    values = {}
    for head, fields in sections.items():
        section = fields.pop("", getattr(config, head))
        values[head] = replace_struct(section, **fields) if fields else section
    return replace_struct(config, **values)
