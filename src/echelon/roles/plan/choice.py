"""Chooses between local and central acting for `acting.mode=auto`.

An inference server on a GPU computes the actions of all actors in one pass, in less than a millisecond even for
convolutions. It pays off if an actor would need longer than that on its core. On the CPU it has no advantage: the
server takes the cores from the actors, and batches save little. Measured on 2 cores, central acting was between 35 %
slower and 4 % faster there; on 16 cores with an H200 it was 32 and 54 % faster for Atari (docs/acting.md).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from echelon.config import TrainConfig, replace
from echelon.errors import ConfigError
from echelon.roles.context import Context
from echelon.roles.plan.findings import Prepared
from echelon.roles.plan.layouts import act_layout

GPU_ROUND_S = 1e-3  # a request to a server on a GPU and its reply, for convolutions (`echelon bench act`)


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen acting mode, and the reason."""

    mode: Literal["local", "central"]
    reason: str


def settled(config: TrainConfig) -> Choice | None:
    """Returns the acting mode if it follows from the configuration alone, else None."""
    if config.has_workers:
        return Choice("local", "every worker chooses its own actions")
    if config.experience == "gradients":
        return Choice("local", "actors compute gradients and need the policy themselves")
    if config.acting.mode != "auto":
        return Choice(config.acting.mode, "as configured")
    if config.experience == "replay" and config.replay.prioritized:
        return Choice("local", "actors need the policy's values for the initial priorities of their transitions")
    return None


def choose_acting(context: Context, prepared: Prepared) -> Choice:
    """Returns the acting mode: the configured one or, for `auto`, the one that suits the run, or its head.

    Where `auto` has a choice, raises ConfigError if the settings of central acting are invalid, even if local acting is
    chosen.
    """
    config = context.train
    if config.experience == "replay" and config.acting.value:
        raise ConfigError(
            f"acting.value=true, but the networks of {config.preset} have action values and no state value. Leave it "
            "at false."
        )
    choice = settled(config)
    if choice is not None:
        return choice
    act_layout(dataclasses.replace(context, train=replace(config, acting=replace(config.acting, mode="central"))))
    if config.engine == "inline":
        return Choice("local", "all roles run in one process, so no forward pass can be shared")
    if config.learner.max_lag == 0 and prepared.device == "cpu":
        return Choice("local", "every actor chooses its own actions, which keeps the run reproducible")
    if prepared.act_s is None:
        return Choice("local", "an inference server would compute on the CPU, too")
    mode: Literal["local", "central"] = "central" if prepared.act_s > GPU_ROUND_S else "local"
    return Choice(
        mode,
        f"an actor takes {1e3 * prepared.act_s:.2g} ms to choose the actions of its {config.actor.envs_per_actor} "
        f"environments, a server on a GPU about {1e3 * GPU_ROUND_S:.0f} ms for those of all actors",
    )
