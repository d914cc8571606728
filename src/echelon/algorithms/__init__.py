"""Learning rules: each one file, none of them knows a process."""

from __future__ import annotations

from echelon.algorithms.a3c import GradientServer
from echelon.algorithms.ddpg import Ddpg
from echelon.algorithms.dqn import Dqn
from echelon.algorithms.impala import Impala
from echelon.algorithms.model import Model
from echelon.algorithms.peers import ALONE, Peers, add_up_observed
from echelon.algorithms.ppo import Ppo
from echelon.algorithms.protocol import Algorithm
from echelon.algorithms.sac import Sac
from echelon.config import (
    A3cConfig,
    AlgorithmConfig,
    DdpgConfig,
    DqnConfig,
    ImpalaConfig,
    OwnConfig,
    PpoConfig,
    SacConfig,
)
from echelon.errors import ConfigError


def build_algorithm(config: AlgorithmConfig, model: Model, seed: int, peers: Peers = ALONE) -> Algorithm:
    """The learning rule that `config` describes, for one of the `peers`; `model` was made for the same."""
    algorithm = _build(config, model, seed, peers)
    for module in (model, *(group.module for group in algorithm.groups.values())):
        add_up_observed(module.network, peers)
    return algorithm


def _build(config: AlgorithmConfig, model: Model, seed: int, peers: Peers) -> Algorithm:
    match config:
        case ImpalaConfig():
            return Impala(config, model, seed, peers)
        case PpoConfig():
            return Ppo(config, model, seed, peers)
        case A3cConfig():
            return GradientServer(config, model)
        case DqnConfig():
            return Dqn(config, model, seed, peers)
        case DdpgConfig():
            return Ddpg(config, model, seed, peers)
        case SacConfig():
            return Sac(config, model, seed, peers)
        case OwnConfig():
            raise ConfigError(
                "algorithm.name=own is a rule that a program of its user's brings along: run that program "
                "(AsyncLearningNode), or name one of ours."
            )


__all__ = ["Algorithm", "Ddpg", "Dqn", "GradientServer", "Impala", "Model", "Ppo", "Sac", "build_algorithm"]
