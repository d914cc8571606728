"""QR-DQN."""

from __future__ import annotations

from typing import Annotated, Literal

from echelon.config import TrainConfig, replace
from echelon.families import is_atari
from echelon.fields import doc
from echelon.presets.dqn import DqnConfig, dqn
from echelon.presets.registry import register


class QrDqnConfig(DqnConfig, frozen=True):
    """Quantile regression DQN (Dabney et al., 2018): learns quantiles of the return; everything else is as in DQN."""

    builder = "echelon.algorithms.qr_dqn:QrDqn"
    network = "echelon.algorithms.qr_dqn:quantile_values"

    name: Annotated[Literal["qr-dqn"], doc("the algorithm")] = "qr-dqn"  # type: ignore[assignment]
    num_quantiles: Annotated[int, doc("number of quantiles per action", ge=1)] = 200
    huber: Annotated[float, doc("kappa of the quantile Huber loss: larger errors count linearly", gt=0)] = 1.0


@register(QrDqnConfig)
def qr_dqn(env: str = "CartPole-v1") -> TrainConfig:
    """Quantile regression DQN, one actor, uniform replay."""
    if is_atari(env):  # as in the paper, except for actors, gradient clipping and publish_every
        return replace(
            dqn(env),
            **{
                "preset": "qr-dqn",
                "algorithm": QrDqnConfig(
                    double=False,
                    dueling=False,
                    target_period=10_000,
                    epsilon_end=0.01,
                    epsilon_steps=250_000,
                    reward_clip=1.0,
                ),
                "replay.min_size": 50_000,
                "optimizer.learning_rate": 5e-5,
                "optimizer.epsilon": 0.01 / 32,
            },
        )
    return replace(
        dqn(env),
        preset="qr-dqn",
        # Returns are far above 1, so kappa is too: otherwise a large error at an episode's end weighs like a small one.
        algorithm=QrDqnConfig(num_quantiles=32, huber=50.0, target_period=100, epsilon_end=0.04, epsilon_steps=8_000),
    )
