"""Learning rules: each one file, none of them knows a process."""

from __future__ import annotations

from echelon.algorithms.impala import Impala
from echelon.algorithms.model import Model
from echelon.algorithms.ppo import Ppo
from echelon.algorithms.protocol import Algorithm
from echelon.config import AlgorithmConfig, ImpalaConfig, PpoConfig


def build_algorithm(config: AlgorithmConfig, model: Model, seed: int) -> Algorithm:
    """The learning rule that `config` describes."""
    match config:
        case ImpalaConfig():
            return Impala(config, model, seed)
        case PpoConfig():
            return Ppo(config, model, seed)


__all__ = ["Algorithm", "Impala", "Model", "Ppo", "build_algorithm"]
