"""What the configuration of every learning rule has: its values, and the names of the parts it is put together from."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from echelon.errors import ConfigError
from echelon.fields import Section, doc

Distribution = Literal["stochastic", "greedy", "deterministic", "squashed"]  # how network outputs become actions
Experience = Literal["queue", "replay"]  # learned from once and in order, or drawn again and again
Slots = Literal["trajectories", "gradients"]  # what actors write


class AlgorithmConfig(Section, frozen=True):
    """The `algorithm` section of a run. A rule subclasses it in its module of `echelon.presets`, with its own values.

    A part is named by import path ("module:name"), so that nothing of it is imported before it is needed.
    """

    SECTION = "algorithm"

    builder: ClassVar[str] = ""  # builder(config, model, seed, peers); "": the user's program brings the rule
    network: ClassVar[str] = "echelon.algorithms.value_networks:actor_critic"  # network(network_config, spaces, config)
    distribution: ClassVar[Distribution] = "stochastic"
    exploration: ClassVar[str] = ""  # exploration(config, envs, num_envs); "": the policy itself explores
    experience: ClassVar[Experience] = "queue"
    slots: ClassVar[Slots] = "trajectories"

    name: Annotated[str, doc("the learning rule")] = ""
    discount: Annotated[float, doc("weight of a reward one step later", ge=0, le=1)] = 0.99

    @property
    def is_users(self) -> bool:
        """Whether a program of the user's brings the rule, as an object."""
        return not self.builder

    @property
    def reaches_learner(self) -> Literal["queue", "replay", "gradients"]:
        """What a learner is given, in one word."""
        return self.experience

    @property
    def publishes_reward_scale(self) -> bool:
        """Whether the deviation of rewards travels with the weights, as actors learn from rewards of their own."""
        return False

    @property
    def reward_clip(self) -> float:
        """The largest size of a single reward, 0 for any: a field of every rule."""
        raise NotImplementedError

    @classmethod
    def classes(cls) -> dict[str, type[AlgorithmConfig]]:
        """The config classes of all rules, by name."""
        found: dict[str, type[AlgorithmConfig]] = {}
        for rule in cls.__subclasses__():
            for name, other in {rule().name: rule, **rule.classes()}.items():
                if name in found or (name == rule().name and other is not rule):
                    places = " and ".join(f"{one.__module__}:{one.__name__}" for one in (found.get(name, rule), other))
                    raise ConfigError(f"{places} are both the learning rule {name!r}. Give `name` a value of its own.")
                found[name] = other
        return found
