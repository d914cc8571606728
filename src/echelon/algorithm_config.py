"""The base class of every algorithm's configuration: its hyperparameters and the names of its parts."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from echelon.errors import ConfigError
from echelon.fields import Section, doc

Distribution = Literal["stochastic", "greedy", "deterministic", "squashed"]  # how network outputs become actions
Experience = Literal["queue", "replay"]  # each trajectory used once, in order, or transitions sampled repeatedly
Slots = Literal["trajectories", "gradients"]  # what actors write

REWARD_BOUND = 10.0  # of the absolute value of a normalized reward

# Hyperparameters of several algorithms.
ValueWeight = Annotated[float, doc("weight of the value loss", ge=0)]
EntropyWeight = Annotated[float, doc("weight of the entropy bonus")]
NormalizeAdvantage = Annotated[bool, doc("normalize advantages to mean 0 and standard deviation 1 in each minibatch")]
RewardClip = Annotated[
    float, doc("clip rewards to [-reward_clip, reward_clip]; 0: no clipping; 1 is usual for Atari", ge=0)
]
NoiseCorrelation = Annotated[
    float,
    doc(
        "correlation of the exploration noise of consecutive steps; 0: independent; no effect on discrete actions",
        ge=0,
        lt=1,
        because="noise with correlation 1 never changes",
    ),
]
NormalizeReward = Annotated[
    bool, doc("divide rewards by the running standard deviation of discounted returns, to at most 10")
]
NormalizeReplayedReward = Annotated[
    bool, doc("divide rewards by their running root mean square, to at most 10; not with prioritized replay")
]


class AlgorithmConfig(Section, frozen=True):
    """The `algorithm` section of a run. Every algorithm has a subclass in its module of `echelon.presets`.

    Parts are named by import path ("module:name"), so that they are imported only when needed.
    """

    SECTION = "algorithm"

    builder: ClassVar[str] = ""  # builder(config, model, seed, peers); "": the user's program provides the algorithm
    network: ClassVar[str] = "echelon.algorithms.value_networks:actor_critic"  # network(network_config, spaces, config)
    distribution: ClassVar[Distribution] = "stochastic"
    exploration: ClassVar[str] = ""  # exploration(config, envs, num_envs); "": the policy itself explores
    experience: ClassVar[Experience] = "queue"
    slots: ClassVar[Slots] = "trajectories"

    name: Annotated[str, doc("the algorithm")] = ""
    discount: Annotated[float, doc("discount factor (gamma)", ge=0, le=1)] = 0.99

    @property
    def is_users(self) -> bool:
        """Whether the user's program provides the algorithm, as an object."""
        return not self.builder

    def epsilon(self, env_steps: int) -> float | None:
        """Returns the probability of a random action after `env_steps` steps of the run.

        None if the algorithm has none, or not the same for all environments.
        """
        del env_steps
        return None

    @property
    def reaches_learner(self) -> Literal["queue", "replay", "gradients"]:
        """What the learner receives: trajectories (queue), transitions (replay) or gradients."""
        return self.experience

    @property
    def whole_minibatches(self) -> str:
        """Why `learner.microbatches` must be 1, and what to use instead; "" if minibatches can be split."""
        if self.is_users:
            return "the user's program computes the update. Split its batches there"
        if self.slots == "gradients":
            return "the actors compute the gradients. Use --algorithm.minibatches and --learner.batch, which split them"
        if self.experience == "replay":
            return "it learns from transitions. Lower --replay.batch"
        return ""

    @property
    def publishes_reward_scale(self) -> bool:
        """Whether weights are published with the reward scale, which actors that compute gradients need."""
        return False

    @property
    def reward_clip(self) -> float:
        """Bound on the absolute value of a reward; 0: no clipping. Every algorithm defines this field."""
        raise NotImplementedError

    @property
    def normalize_reward(self) -> bool:
        """Whether rewards are scaled by a running statistic; a field of every algorithm of the presets."""
        return False

    @property
    def noise_correlation(self) -> float:
        """Correlation of the exploration noise of consecutive steps; a field of algorithms with continuous actions."""
        return 0.0

    @classmethod
    def classes(cls) -> dict[str, type[AlgorithmConfig]]:
        """Returns the config classes of all algorithms, by name."""
        found: dict[str, type[AlgorithmConfig]] = {}
        for rule in cls.__subclasses__():
            for name, other in {rule().name: rule, **rule.classes()}.items():
                if name in found or (name == rule().name and other is not rule):
                    places = " and ".join(f"{one.__module__}:{one.__name__}" for one in (found.get(name, rule), other))
                    raise ConfigError(f"{places} both define the algorithm {name!r}. Give one of them another `name`.")
                found[name] = other
        return found
