"""Learning rules: each one file, none of them knows a process."""

from __future__ import annotations

from echelon.algorithms.ddpg import Ddpg
from echelon.algorithms.dqn import Dqn
from echelon.algorithms.impala import Impala
from echelon.algorithms.model import Model
from echelon.algorithms.ppo import Ppo
from echelon.algorithms.protocol import Algorithm
from echelon.algorithms.sac import Sac
from echelon.config import AlgorithmConfig, DdpgConfig, DqnConfig, ImpalaConfig, OwnConfig, PpoConfig, SacConfig
from echelon.errors import ConfigError


def build_algorithm(config: AlgorithmConfig, model: Model, seed: int) -> Algorithm:
    """The learning rule that `config` describes; `model` was made for the same."""
    match config:
        case ImpalaConfig():
            return Impala(config, model, seed)
        case PpoConfig():
            return Ppo(config, model, seed)
        case DqnConfig():
            return Dqn(config, model, seed)
        case DdpgConfig():
            return Ddpg(config, model, seed)
        case SacConfig():
            return Sac(config, model, seed)
        case OwnConfig():
            raise ConfigError(
                "algorithm.name=own is a rule that a program of its user's brings along: run that program "
                "(AsyncLearningNode), or name one of ours."
            )


__all__ = ["Algorithm", "Ddpg", "Dqn", "Impala", "Model", "Ppo", "Sac", "build_algorithm"]
