"""The best weights of a run: those of the evaluation with the highest mean return, kept as `checkpoints/best`.

The evaluator alone writes them, with the atomic rename of checkpoints. They hold what is needed to act, not what is
needed to resume. If the evaluator dies while it writes, the earlier best weights are still there; its successor reads
their return and continues from it, as does a resumed run.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.runs.checkpoint import BEST, latest_checkpoint, load_parts, put_tree
from echelon.runs.progress import misfit

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Best:
    """The evaluation that the best weights come from."""

    return_mean: float
    env_steps: int  # of the run, as reported when the evaluation began
    episodes: int


def read_best(checkpoints: Path) -> Best | None:
    """Returns the evaluation of the best weights so far, or None; raises ConfigError if they are damaged."""
    latest_checkpoint(checkpoints)  # restores weights whose replacement was not completed
    path = checkpoints / BEST
    if not path.is_dir():
        return None
    parts: Any = load_parts(path, ("evaluation",)).get("evaluation")
    try:
        best = Best(float(parts["return_mean"]), int(parts["env_steps"]), int(parts["episodes"]))
    except (LookupError, TypeError, ValueError) as error:
        raise misfit(path, f"its evaluation is {parts!r:.80}") from error
    return best


def is_better(best: Best, other: Best | None) -> bool:
    """Returns whether `best` replaces `other`. A return that is not a number replaces nothing."""
    return math.isfinite(best.return_mean) and (other is None or best.return_mean > other.return_mean)


def save_best(checkpoints: Path, weights: dict[str, torch.Tensor], best: Best) -> None:
    """Replaces the best weights atomically."""
    tree: dict[str, Any] = {"model": weights, "evaluation": asdict(best)}
    put_tree(checkpoints, BEST, tree, best.env_steps)
