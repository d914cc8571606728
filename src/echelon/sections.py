"""The sections of the configuration, one per part of the system.

Sections about a run as a whole are in `run_sections`, those of algorithms in `echelon.presets`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

from msgspec import field

from echelon.fields import Section, doc, require, require_address, require_device

EnvId = str | Callable[..., Any]  # the name of an environment or of a factory, or the factory itself


class EnvConfig(Section, frozen=True):
    """The environment, and how it is created and stepped."""

    SECTION = "env"

    id: Annotated[EnvId, doc('gymnasium id, "module:factory", "file.py:factory" or "envpool:ID"')] = "CartPole-v1"
    kwargs: Annotated[dict[str, Any], doc("keyword arguments for the environment's constructor or factory")] = field(
        default_factory=dict
    )
    wrappers: Annotated[
        tuple[str | Callable[..., Any], ...],
        doc(
            'wrappers, each "module:callable" or with arguments "module:callable(size=3)", applied in order to every '
            "environment"
        ),
    ] = ()
    vector: Annotated[
        Literal["auto", "loop", "vector_entry_point"],
        doc(
            "how an actor steps its environments; auto: vectorised for Atari, Mario, envpool: and factories with "
            "num_envs, else in a loop"
        ),
    ] = "auto"
    on_error: Annotated[
        Literal["stop", "restart"], doc("when an environment raises: stop the run, or restart the environment")
    ] = "stop"


class ActorConfig(Section, frozen=True):
    """The actors: how experience is collected."""

    SECTION = "actor"

    num_actors: Annotated[int, doc("number of actors; with --min-actors the most that run at a time", ge=1)] = 2
    envs: Annotated[int, doc("environments per actor, K; 0: an equal part of actor.total_envs", ge=0)] = 0
    total_envs: Annotated[
        int,
        doc("environments of all actors together, where actor.envs is 0: each has an equal part, rounded", ge=1),
    ] = 32
    trajectory: Annotated[int, doc("steps per trajectory, T", "steps", ge=1)] = 20
    slots: Annotated[
        int,
        doc(
            "written trajectories per actor that the learner has not read yet, at most; a learner.max_lag decides "
            "instead",
            "trajectories",
            ge=1,
        ),
    ] = 4

    @property
    def envs_per_actor(self) -> int:
        """Number of environments of one actor, K.

        With a fixed total, more actors make steps faster, but change neither the size of a batch nor the lag, beyond
        rounding, unless there are more of them than environments.
        """
        return self.envs or max(math.ceil(self.total_envs / self.num_actors - 0.5), 1)

    @property
    def exceed_envs(self) -> bool:
        """Whether there are more actors than environments to divide among them: batches grow with the actors."""
        return not self.envs and self.num_actors > self.total_envs


class ActingConfig(Section, frozen=True):
    """Where actions are computed: in every actor, with its own copy of the policy, or in inference servers."""

    SECTION = "acting"

    mode: Annotated[
        Literal["auto", "local", "central"],
        doc(
            "local: every actor computes its actions; central: inference servers do; auto: central if a GPU serves and "
            "acting would keep an actor busy"
        ),
    ] = "auto"
    servers: Annotated[int, doc("number of inference servers; each serves a part of the actors", ge=1)] = 1
    groups: Annotated[
        int, doc("groups of environments per actor: one steps while others await actions; 0: 2 if envs is even", ge=0)
    ] = 0
    batch: Annotated[bool, doc("batch the requests of several actors; false: one forward pass per request")] = True
    max_batch: Annotated[int, doc("maximum number of environments per forward pass; 0: no limit", ge=0)] = 0
    max_wait_us: Annotated[
        float, doc("how long a request waits for requests of other actors to share its batch", "µs", ge=0)
    ] = 200.0
    spin_us: Annotated[
        float, doc("how long a server polls for requests before it sleeps; useful with idle cores", "µs", ge=0)
    ] = 0.0
    value: Annotated[bool, doc("replies also carry the value of the observation; no built-in algorithm needs it")] = (
        False
    )
    device: Annotated[str, doc("device of the inference servers: auto, cpu, cuda or cuda:N")] = "auto"
    workers_per_gpu: Annotated[
        int, doc("most learners and inference servers that auto and cuda put on one GPU; the others use the CPU", ge=1)
    ] = 3
    transport: Annotated[
        Literal["shm", "tcp"], doc("transport of requests and replies: shared memory, or ZeroMQ over TCP")
    ] = "shm"
    address: Annotated[
        str, doc("address the servers listen on with tcp; beyond the loopback ECHELON_SECRET is required")
    ] = "tcp://127.0.0.1:0"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_device(self.device, "acting.device")
        require_address(self.address, "acting.address")
        require(
            self.servers == 1 or self.address.endswith(":0"),
            f"acting.address={self.address} names one port for {self.servers} servers. Use port 0: each server takes a "
            "free port.",
        )


class LearnerConfig(Section, frozen=True):
    """The learner: batches, lag, devices."""

    SECTION = "learner"

    batch: Annotated[int, doc("trajectories (a3c: gradients) per batch; 0: one per actor", "trajectories", ge=0)] = 0
    max_lag: (
        Annotated[
            int, doc("maximum lag of a trajectory; 0: synchronous; none: bounded only by actor.slots", "versions", ge=0)
        ]
        | None
    ) = None
    num_learners: Annotated[
        int,
        doc(
            "learner processes, which share every batch; must divide the actors and the batch, or, with replay, not "
            "exceed the actors",
            ge=1,
            because="use --learners 1 or more",
        ),
    ] = 1
    microbatches: Annotated[
        int,
        doc(
            "parts of a minibatch whose gradients are accumulated for one optimizer step: the same gradient with "
            "1/microbatches of the memory for activations",
            ge=1,
        ),
    ] = 1
    patience_s: Annotated[float, doc("with max_lag >= 1: how long a batch waits for a stalled actor", "s")] = 2.0
    device: Annotated[str, doc("device of the learner: auto, cpu, cuda or cuda:N")] = "auto"
    threads: Annotated[
        int, doc("threads per learner; 0: chosen from the work per batch and the cores left by actors", "threads", ge=0)
    ] = 0
    precision: Annotated[Literal["float32", "bfloat16"], doc("precision of the forward and backward passes")] = (
        "float32"
    )
    compile: Annotated[bool, doc("compile the loss with torch.compile")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_device(self.device, "learner.device")


class NetworkConfig(Section, frozen=True):
    """The policy and value network."""

    SECTION = "network"

    name: Annotated[
        str | Callable[..., Any], doc('auto: encoders chosen from the observation space; or "module:factory"')
    ] = "auto"
    hidden: Annotated[tuple[Annotated[int, doc("", ge=1, le=1 << 24)], ...], doc("sizes of the hidden layers")] = (
        64,
        64,
    )
    activation: Annotated[Literal["tanh", "relu"], doc("activation of the hidden layers")] = "tanh"
    core: Annotated[Literal["none", "lstm", "gru"], doc("recurrent core after the hidden layers")] = "none"
    core_size: Annotated[int, doc("units of the recurrent core", ge=1, le=1 << 24)] = 128
    shared: Annotated[bool, doc("policy and value share one torso (always with images and recurrent cores)")] = False
    normalize_observation: Annotated[
        bool, doc("normalize observations by their running mean and standard deviation")
    ] = False
    observation_scale: Annotated[
        float,
        doc(
            "factor of observations, except images; above 1, a network learns functions that change more steeply", gt=0
        ),
    ] = 1.0
    initial_log_std: Annotated[
        float, doc("initial log standard deviation of continuous actions", "half the action range")
    ] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.name == "auto" or self.core == "none",
            f"network.core={self.core!r} has no effect on a network of your own: give it state_shapes, and set core to "
            "'none'.",
        )


class OptimizerConfig(Section, frozen=True):
    """The optimizer."""

    SECTION = "optimizer"

    name: Annotated[Literal["adam", "rmsprop"], doc("the optimizer")] = "adam"
    learning_rate: Annotated[float, doc("learning rate; of the policy, where critics have their own", gt=0)] = 5e-4
    schedule: Annotated[
        Literal["constant", "linear"], doc("schedule of the learning rate; linear: decays to 0 at the end of the run")
    ] = "constant"
    epsilon: Annotated[float, doc("added to the denominator for numerical stability", ge=0)] = 1e-5
    clip_norm: Annotated[float, doc("maximum global gradient norm; 0: no clipping", ge=0)] = 0.5


class ReplayConfig(Section, frozen=True):
    """The replay: how transitions are stored and sampled."""

    SECTION = "replay"

    capacity: Annotated[int, doc("capacity over all shards; the oldest transitions are evicted", "transitions")] = (
        1_000_000
    )
    min_size: Annotated[int, doc("size at which learning starts", "transitions")] = 1_000
    batch: Annotated[int, doc("batch size: transitions per update", "transitions", ge=1)] = 256
    n_step: Annotated[int, doc("n of n-step returns: rewards summed before the bootstrap value", "steps", ge=1)] = 1
    samples_per_insert: Annotated[
        float, doc("transitions sampled per transition inserted; 0: no limit, as fast as the learner can", ge=0)
    ] = 256.0
    prioritized: Annotated[bool, doc("prioritized replay: sample by TD error")] = False
    alpha: Annotated[float, doc("priority exponent: priority = error^alpha; 0: uniform", ge=0, le=1)] = 0.6
    beta_start: Annotated[float, doc("importance-sampling exponent beta at the start of the run", ge=0, le=1)] = 0.4
    beta_end: Annotated[float, doc("importance-sampling exponent beta at the end of the run", ge=0, le=1)] = 1.0
    frames: Annotated[
        Literal["auto", "stacked", "whole"],
        doc(
            "stacked: every frame of a stack is stored once; whole: stacks are stored; auto: stacked where the "
            "environment is known to stack frames"
        ),
    ] = "auto"
    exact: Annotated[
        bool,
        doc(
            "the learner never samples ahead of the actors, and catches up before the steps or episodes of the run "
            "end: the number of updates follows from the number of transitions"
        ),
    ] = False
    publish_every: Annotated[int, doc("updates between two published versions of the weights", "updates", ge=1)] = 1
    checkpoint: Annotated[bool, doc("checkpoints include the content of the replay")] = False
    transport: Annotated[
        Literal["shm", "tcp"], doc("how the learner reads shards: shm: in shared memory; tcp: through a shard server")
    ] = "shm"
    address: Annotated[
        str, doc("address the shard server listens on with tcp; beyond the loopback ECHELON_SECRET is required")
    ] = "tcp://127.0.0.1:0"
    prefetch: Annotated[int, doc("batches requested ahead with tcp", ge=0)] = 2
    lost_after_s: Annotated[
        float, doc("a shard server that is silent for this long is lost, with its shards", "s", ge=1)
    ] = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_address(self.address, "replay.address")
        require(
            self.transport == "shm" or not self.checkpoint,
            "replay.checkpoint=true needs the shards in the learner's shared memory, but replay.transport=tcp reads "
            "them from a shard server. Use --replay.transport shm, or --replay.checkpoint false.",
        )
        require(
            not self.exact or (self.samples_per_insert > 0 and self.transport == "shm"),
            f"replay.exact=true with replay.samples_per_insert={self.samples_per_insert:g} and replay.transport="
            f"{self.transport}: the number of updates follows from the transitions only if the ratio is above 0 and "
            "the shards are in shared memory. Use --replay.exact false, or change the others.",
        )
        require(
            self.min_size >= self.batch,
            f"replay.min_size={self.min_size} is below replay.batch={self.batch}: the first batch could not be filled. "
            "Raise min_size or lower batch.",
        )
        require(
            self.min_size <= self.capacity,
            f"replay.min_size={self.min_size} exceeds replay.capacity={self.capacity}: the learner would wait forever. "
            "Lower min_size or raise capacity.",
        )


class WorkersConfig(Section, frozen=True):
    """Workers in place of actors: separate programs that send whole episodes and receive the newest weights."""

    SECTION = "workers"

    address: Annotated[
        str,
        doc(
            "tcp://HOST:PORT that workers connect to, port 0: any free port; beyond the loopback ECHELON_SECRET is "
            'required; "": no workers'
        ),
    ] = ""
    updates: Annotated[int, doc("updates per episode received from a worker", "updates", ge=1)] = 64
    evaluation: Annotated[
        float,
        doc(
            "fraction of the episodes that are played greedily, logged and not learned from",
            ge=0,
            lt=1,
            because="some episodes must be learned from",
        ),
    ] = 0.08
    max_steps: Annotated[int, doc("maximum number of steps per message; longer episodes are split", "steps", ge=1)] = (
        5_000
    )
    spaces: Annotated[
        Literal["learner", "worker"],
        doc("source of the observation and action space: an environment made by the learner, or the first worker"),
    ] = "learner"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.address:
            require_address(self.address, "workers.address")

    def num_writers(self, num_actors: int) -> int:
        """Returns the number of processes that write transitions: one per actor, or the gateway alone."""
        return 1 if self.address else num_actors
