"""The algorithms, one file each. They do not depend on processes, queues or engines."""

from __future__ import annotations

from typing import Any

from echelon.algorithms.a3c import GradientServer
from echelon.algorithms.ddpg import Ddpg
from echelon.algorithms.dqn import Dqn
from echelon.algorithms.impala import Impala
from echelon.algorithms.model import Model
from echelon.algorithms.peers import ALONE, Peers, add_up_observed
from echelon.algorithms.ppo import Ppo
from echelon.algorithms.protocol import Algorithm
from echelon.algorithms.sac import Sac
from echelon.config import AlgorithmConfig
from echelon.errors import ConfigError
from echelon.names import resolve


def build_algorithm(config: AlgorithmConfig, model: Model, seed: int, peers: Peers = ALONE) -> Algorithm:
    """Returns the algorithm of `config` for one of the `peers`; `model` must be built for the same config."""
    if not config.builder:
        raise ConfigError(
            f"algorithm.name={config.name} is provided by a user's program (AsyncLearningNode): run that program, or "
            "use a built-in algorithm."
        )
    build: Any = resolve(config.builder)
    algorithm: Algorithm = build(config, model, seed, peers)
    for module in (model, *(group.module for group in algorithm.groups.values())):
        add_up_observed(module.network, peers)
    return algorithm


__all__ = ["Algorithm", "Ddpg", "Dqn", "GradientServer", "Impala", "Model", "Ppo", "Sac", "build_algorithm"]
