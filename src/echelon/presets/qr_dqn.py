"""QR-DQN."""

from __future__ import annotations

from typing import Annotated, Literal

from echelon.config import EnvId, TrainConfig, replace
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
def qr_dqn(env: EnvId = "CartPole-v1", family: str = "") -> TrainConfig:
    """Quantile regression DQN, one actor, uniform replay."""
    config = dqn(env, family)
    shared = {name: getattr(config.algorithm, name) for name in DqnConfig.__struct_fields__ if name != "name"}
    # Returns are far above 1, so kappa is too: otherwise a large error at an episode's end weighs like a small one.
    return replace(config, preset="qr-dqn", algorithm=QrDqnConfig(**{**shared, "num_quantiles": 32, "huber": 50.0}))
