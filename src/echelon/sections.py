"""The sections of a configuration, one a part of the system; those of learning rules lie with their presets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from msgspec import field

from echelon.fields import Section, doc, require, require_address


class EnvConfig(Section, frozen=True):
    """Which environment, and how it is made and stepped."""

    SECTION = "env"

    id: Annotated[str | Callable[..., Any], doc('gymnasium id, "module:factory", "file.py:factory", "envpool:ID"')] = (
        "CartPole-v1"
    )
    kwargs: Annotated[dict[str, Any], doc("keyword arguments of the environment")] = field(default_factory=dict)
    wrappers: Annotated[tuple[str, ...], doc('"module:callable", applied in order to each environment')] = ()
    vector: Annotated[
        Literal["auto", "loop", "vector_entry_point"], doc("auto: vectorised for Atari, else our loop")
    ] = "auto"
    on_error: Annotated[Literal["stop", "restart"], doc("what an environment that raises does to the run")] = "stop"


class ActorConfig(Section, frozen=True):
    """How experience is collected."""

    SECTION = "actor"

    num_actors: Annotated[int, doc("actor processes", ge=1)] = 2
    envs: Annotated[int, doc("K, environments per actor", ge=1)] = 16
    trajectory: Annotated[int, doc("T, steps per trajectory", "steps", ge=1)] = 20
    slots: Annotated[int, doc("trajectories each actor may have written and unread", "trajectories", ge=1)] = 4


class ActingConfig(Section, frozen=True):
    """Who chooses the actions: every actor with its own copy of the policy, or inference servers for all of them."""

    SECTION = "acting"

    mode: Annotated[
        Literal["auto", "local", "central"],
        doc("who acts: every actor, or inference servers; auto: what measures faster"),
    ] = "auto"
    servers: Annotated[int, doc("inference servers, which share the actors", ge=1)] = 1
    groups: Annotated[
        int, doc("groups of an actor's environments: one steps while others wait; 0: 2 if envs is even", ge=0)
    ] = 0
    batch: Annotated[bool, doc("false: every request is answered alone")] = True
    max_batch: Annotated[int, doc("environments per forward pass; 0: all that ask", ge=0)] = 0
    max_wait_us: Annotated[float, doc("how long a request waits for those of the other actors", "µs", ge=0)] = 200.0
    spin_us: Annotated[
        float, doc("how long a server looks for requests before it sleeps; for idle cores", "µs", ge=0)
    ] = 0.0
    value: Annotated[bool, doc("replies carry the value of what was seen, too; the rules here do without")] = False
    device: Annotated[str, doc("where the servers compute: auto, cpu, cuda, cuda:N")] = "auto"
    transport: Annotated[Literal["shm", "tcp"], doc("how requests travel: shared memory, or ZeroMQ over TCP")] = "shm"
    address: Annotated[str, doc("where servers listen with tcp; off the loopback only with ECHELON_SECRET")] = (
        "tcp://127.0.0.1:0"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_address(self.address, "acting.address")
        require(
            self.servers == 1 or self.address.endswith(":0"),
            f"acting.address={self.address} names one port for {self.servers} servers. Use port 0: any free ones.",
        )


class LearnerConfig(Section, frozen=True):
    """How batches become weights."""

    SECTION = "learner"

    batch: Annotated[
        int, doc("trajectories (a3c: gradients) per batch; 0: one from every actor", "trajectories", ge=0)
    ] = 0
    max_lag: Annotated[int, doc("0: synchronous; none: bounded only by actor.slots", "versions", ge=0)] | None = None
    num_learners: Annotated[
        int,
        doc(
            "learner processes, which share every batch (default 1); they divide the actors, with replay at most those",
            ge=1,
            because="use --learners 1 or more",
        ),
    ] = 1
    patience_s: Annotated[float, doc("with max_lag >= 1: how long a batch waits for an actor that stalled", "s")] = 2.0
    device: Annotated[str, doc("where the learner learns: auto, cpu, cuda, cuda:N")] = "auto"
    threads: Annotated[
        int, doc("of each learner; 0: by the work of a batch and the cores that actors leave", "threads", ge=0)
    ] = 0
    precision: Annotated[Literal["float32", "bfloat16"], doc("of the forward and backward passes")] = "float32"
    compile: Annotated[bool, doc("torch.compile of the loss")] = False


class NetworkConfig(Section, frozen=True):
    """The shape of the policy and value network."""

    SECTION = "network"

    name: Annotated[str, doc('auto: encoders chosen by the observation space; or "module:factory"')] = "auto"
    hidden: Annotated[tuple[Annotated[int, doc("", ge=1)], ...], doc("units of the hidden layers")] = (64, 64)
    activation: Annotated[Literal["tanh", "relu"], doc("of the hidden layers")] = "tanh"
    core: Annotated[Literal["none", "lstm", "gru"], doc("memory behind the hidden layers")] = "none"
    core_size: Annotated[int, doc("units of the core", ge=1)] = 128
    shared: Annotated[bool, doc("one torso for policy and value (always so for images and recurrent cores)")] = False
    normalize_observation: Annotated[bool, doc("by the running mean and deviation of what was observed")] = False
    initial_log_std: Annotated[
        float, doc("logarithm of the first deviation of continuous actions", "half the action range")
    ] = 0.0


class OptimizerConfig(Section, frozen=True):
    """How gradients become steps."""

    SECTION = "optimizer"

    name: Annotated[Literal["adam", "rmsprop"], doc("the rule")] = "adam"
    learning_rate: Annotated[float, doc("step size", gt=0)] = 5e-4
    schedule: Annotated[Literal["constant", "linear"], doc("linear: to 0 at the end of the run")] = "constant"
    epsilon: Annotated[float, doc("added to the root in the denominator", ge=0)] = 1e-5
    clip_norm: Annotated[float, doc("largest global gradient norm; 0: no clipping", ge=0)] = 0.5


class ReplayConfig(Section, frozen=True):
    """Where transitions lie, and how they are drawn for learning."""

    SECTION = "replay"

    capacity: Annotated[int, doc("kept over all shards; the oldest make room", "transitions")] = 1_000_000
    min_size: Annotated[int, doc("learning waits below this", "transitions")] = 1_000
    batch: Annotated[int, doc("transitions per update", "transitions", ge=1)] = 256
    n_step: Annotated[int, doc("rewards summed before the value of what follows", "steps", ge=1)] = 1
    samples_per_insert: Annotated[
        float, doc("transitions drawn for each one stored; 0: as fast as the learner can", ge=0)
    ] = 256.0
    prioritized: Annotated[bool, doc("draw by TD error")] = False
    alpha: Annotated[float, doc("priority = error^alpha; 0: uniform", ge=0, le=1)] = 0.6
    beta_start: Annotated[float, doc("how far importance weights undo the priorities, at first", ge=0, le=1)] = 0.4
    beta_end: Annotated[float, doc("how far they do at the end of the run", ge=0, le=1)] = 1.0
    frames: Annotated[
        Literal["auto", "stacked", "whole"], doc("stacked: frames are stored once; auto: where known")
    ] = "auto"
    publish_every: Annotated[int, doc("updates from one version of the weights to the next", "updates", ge=1)] = 1
    checkpoint: Annotated[bool, doc("its content is part of the checkpoints")] = False
    transport: Annotated[
        Literal["shm", "tcp"], doc("how the learner reads shards: in place, or through a shard server")
    ] = "shm"
    address: Annotated[str, doc("where that listens with tcp; off the loopback only with ECHELON_SECRET")] = (
        "tcp://127.0.0.1:0"
    )
    prefetch: Annotated[int, doc("batches that are under way with tcp while the learner learns", ge=0)] = 2
    lost_after_s: Annotated[
        float, doc("how long a shard server may be silent before it is lost, with its shards", "s", ge=1)
    ] = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_address(self.address, "replay.address")
        require(
            self.transport == "shm" or not self.checkpoint,
            "replay.checkpoint=true needs the shards on the learner's host, but replay.transport=tcp reads them from "
            "others. Use --replay.transport shm, or --replay.checkpoint false.",
        )
        require(
            self.min_size >= self.batch,
            f"replay.min_size={self.min_size} is below replay.batch={self.batch}: the first batch could not be filled.",
        )
        require(
            self.min_size <= self.capacity,
            f"replay.min_size={self.min_size} exceeds replay.capacity={self.capacity}: the learner would wait forever. "
            "Lower min_size or raise capacity.",
        )


class WorkersConfig(Section, frozen=True):
    """Workers in place of actors: they come from anywhere, with whole episodes, and leave with the newest weights."""

    SECTION = "workers"

    address: Annotated[
        str,
        doc('tcp://HOST:PORT to come to, port 0: any; off the loopback only with ECHELON_SECRET; "": none'),
    ] = ""
    updates: Annotated[int, doc("per episode that workers bring", "updates", ge=1)] = 64
    evaluation: Annotated[
        float,
        doc(
            "the part of all episodes that is played greedily, logged and not learned from",
            ge=0,
            lt=1,
            because="some episodes must be learned from",
        ),
    ] = 0.08
    max_steps: Annotated[int, doc("of one message; longer episodes come in pieces", "steps", ge=1)] = 5_000
    spaces: Annotated[
        Literal["learner", "worker"], doc("whose environment has them: one made here, or the first worker's")
    ] = "learner"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.address:
            require_address(self.address, "workers.address")

    def num_writers(self, num_actors: int) -> int:
        """Who brings transitions: every actor, or the one gateway that all workers come to."""
        return 1 if self.address else num_actors


class EvaluationConfig(Section, frozen=True):
    """Greedy evaluation beside training, with seeds of its own."""

    SECTION = "evaluation"

    interval_s: Annotated[float, doc("between two evaluations; 0: never", "s", ge=0)] = 60.0
    episodes: Annotated[int, doc("of each evaluation", "episodes", ge=1)] = 10


class RunConfig(Section, frozen=True):
    """The run folder."""

    SECTION = "run"

    dir: Annotated[str, doc("the run folder (default: runs/PRESET-ENV-TIME)")] = ""
    checkpoint_interval_s: Annotated[float, doc("between two checkpoints", "s", ge=0)] = 30.0
    keep_checkpoints: Annotated[int, doc("the newest that are kept", ge=1)] = 3
    init_from: Annotated[str, doc("run folder or weights file to start from")] = ""


class StopConfig(Section, frozen=True):
    """When to stop; the first condition that holds."""

    SECTION = "stop"

    steps: Annotated[int, doc("stop after this many environment steps (at the end of a batch)", "steps", ge=0)] = 0
    minutes: Annotated[float, doc("stop after this time", "minutes", ge=0)] = 0.0
    until_return: Annotated[float | None, doc("stop when the mean return of the last 100 episodes reaches this")] = None
    episodes: Annotated[int, doc("stop after this many workers' episodes that were learned from", "episodes", ge=0)] = 0


class HostsConfig(Section, frozen=True):
    """Several hosts, with `engine=hosts`: this one, the head, and those whose agents join."""

    SECTION = "hosts"

    count: Annotated[int, doc("the hosts of the run, this one among them", ge=1)] = 1
    address: Annotated[str, doc("where this host listens for the others; port 0: any free one")] = "tcp://127.0.0.1:0"
    bulk_port: Annotated[
        int, doc("where trajectories come to, at the same address; 0: any free one", ge=0, le=65_535)
    ] = 0
    lease_s: Annotated[
        float, doc("a host that has not heard this one for so long ends its actors; others then get them", "s", ge=1)
    ] = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_address(self.address, "hosts.address")

    @property
    def bulk_address(self) -> str:
        """Where slots come to, at the same interface."""
        return f"{self.address.rpartition(':')[0]}:{self.bulk_port}"


class SupervisionConfig(Section, frozen=True):
    """What the coordinator does about roles that die or hang."""

    SECTION = "supervision"

    hang_timeout_s: Annotated[float, doc("how long a role may make no progress before it is hung", "s", gt=0)] = 30.0
    max_same_failures: Annotated[int, doc("the same exception this often within the window ends the run", ge=1)] = 3
    failure_window_s: Annotated[float, doc("the window in which the same exceptions are counted", "s", ge=0)] = 60.0
