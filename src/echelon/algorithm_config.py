"""What the configuration of every learning rule has: its values, and the names of the parts it is put together from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from echelon.bounds import at_least, fractions

Distribution = Literal["stochastic", "greedy", "deterministic", "squashed"]  # how network outputs become actions
Experience = Literal["queue", "replay"]  # learned from once and in order, or drawn again and again
Slots = Literal["trajectories", "gradients"]  # what actors write


@dataclass(frozen=True)
class AlgorithmConfig:
    """The `algorithm` section of a run. A rule subclasses it in its module of `echelon.presets`, with its own values.

    A part is named by import path ("module:name"), so that nothing of it is imported before it is needed.
    """

    classes: ClassVar[dict[str, type[AlgorithmConfig]]] = {}  # every rule's, by name

    builder: ClassVar[str] = ""  # builder(config, model, seed, peers); "": the user's program brings the rule
    network: ClassVar[str] = "echelon.algorithms.value_networks:actor_critic"  # network(network_config, spaces, config)
    distribution: ClassVar[Distribution] = "stochastic"
    exploration: ClassVar[str] = ""  # exploration(config, envs, num_envs); "": the policy itself explores
    experience: ClassVar[Experience] = "queue"
    slots: ClassVar[Slots] = "trajectories"

    name: str = ""
    discount: float = 0.99
    reward_clip: float = 0.0  # of single rewards; 0: none; 1: to [-1, 1] as on Atari

    @property
    def is_users(self) -> bool:
        """Whether a program of the user's brings the rule, as an object."""
        return not self.builder

    @property
    def publishes_reward_scale(self) -> bool:
        """Whether the deviation of rewards travels with the weights, as actors learn from rewards of their own."""
        return False

    def __init_subclass__(cls) -> None:
        AlgorithmConfig.classes[cls.name] = cls

    def __post_init__(self) -> None:
        fractions(self, "algorithm", "discount")
        at_least(self, "algorithm", reward_clip=0)
