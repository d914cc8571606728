"""Callbacks of a training: the class to override, and those that report to Weights & Biases, MLflow and Prometheus."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.callbacks.callback import Callback, Training
    from echelon.callbacks.prometheus import Prometheus
    from echelon.callbacks.trackers import Mlflow, Wandb

__all__ = ["Callback", "Mlflow", "Prometheus", "Training", "Wandb"]
HOMES = {
    "Callback": "callback",
    "Mlflow": "trackers",
    "Prometheus": "prometheus",
    "Training": "callback",
    "Wandb": "trackers",
}


def __getattr__(name: str) -> Any:
    """Imports a name on first use."""
    if name in HOMES:
        return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
