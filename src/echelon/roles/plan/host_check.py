"""The host check: a process on a host that wants to join, which creates the environment and the network of the run.

A host that lacks a module, or has another version of the environment, is refused before it gets actors.
"""

from __future__ import annotations

from typing import Any

from echelon import config_io
from echelon.algorithms.model import Model
from echelon.config import TrainConfig
from echelon.envs.make import probe_spaces
from echelon.errors import ConfigError
from echelon.names import text_of
from echelon.schema import Spaces


class HostCheck:
    """The role of the check: raises ConfigError in its only step if this host cannot run the actors."""

    def __init__(self, train: TrainConfig, spaces: Spaces, weights_bytes: int) -> None:
        self.train, self.spaces, self.weights_bytes, self.finished = train, spaces, weights_bytes, False

    def step(self, timeout_s: float) -> bool:
        del timeout_s
        train, here = self.train, probe_spaces(self.train.env)
        if here.to_json() != self.spaces.to_json():
            raise ConfigError(
                f"{text_of(train.env.id)} has other spaces on this host, {here}, than at the head, {self.spaces}. "
                "Install the same version on both."
            )
        if (nbytes := Model(train.network, here, train.algorithm, seed=train.seed).nbytes) != self.weights_bytes:
            raise ConfigError(
                f"network.name={text_of(train.network.name)} has {nbytes:,} bytes of weights on this host and "
                f"{self.weights_bytes:,} at the head. Install the same version on both."
            )
        self.finished = True
        return True

    def close(self) -> None:
        """Does nothing: the check keeps nothing open."""


def host_check(config: dict[str, Any]) -> HostCheck:
    """The entry point of a check."""
    return HostCheck(config_io.from_json(config["train"]), Spaces.from_json(config["spaces"]), config["weights_bytes"])
