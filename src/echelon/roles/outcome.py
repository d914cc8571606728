"""How a run ended: its status, whether it reached its goal, and what to do if it did not."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from echelon.config import TrainConfig
from echelon.roles.plan.start import num_first_steps
from echelon.roles.stopping import RETURN_WINDOW
from echelon.runs.report import number_text

NO_UPDATES = "no_updates"
CALLBACK = "callback"  # the reason of a run that a callback ended
LIMITS = ("steps", "minutes", "episodes")  # stop conditions that end a run whether or not it has learned


def outcome(config: TrainConfig, figures: Mapping[str, Any], run_dir: str) -> dict[str, str]:
    """Returns what the summary says about the end of a run, from the `figures` that the learner reported.

    `status` is solved, finished, stopped or no_updates; `advice` is there if the run was stopped, has missed its
    goal or has learned nothing.
    """
    reason, goal = figures["reason"], config.stop.until_return
    if figures.get("goal_reached"):
        return {"status": "solved"}
    if not figures["updates"] and reason in LIMITS:
        return {"status": NO_UPDATES, "advice": _no_update(config, figures)}
    status = "finished" if reason in (*LIMITS, CALLBACK) else "stopped"
    if goal is not None:
        return {"status": status, "advice": _goal_missed(config, figures, goal, run_dir)}
    can_resume = figures["checkpoint"] is not None and not config.algorithm.is_users  # the latter by its own program
    advice = {"advice": f"To continue: echelon resume {run_dir}"} if status == "stopped" and can_resume else {}
    return {"status": status, **advice}


def _no_update(config: TrainConfig, figures: Mapping[str, Any]) -> str:
    option = f"--{figures['reason']}"
    if (replay := figures.get("replay")) is not None:
        inserted = min(replay["inserted"], config.stop.steps or sys.maxsize)  # actors go on until they are stopped
        if inserted >= config.replay.min_size:
            return f"no update was made: the run reached its end before the learner could update. Raise {option}."
        return (
            f"no update was made: {inserted:,} of the {config.replay.min_size:,} transitions that the first "
            f"update needs were collected. Raise {option}, or lower --replay.min-size."
        )
    return (
        f"no update was made: the run ended before the first batch of {num_first_steps(config):,} steps was complete. "
        f"Raise {option}, or lower --learner.batch or --actor.trajectory."
    )


def _goal_missed(config: TrainConfig, figures: Mapping[str, Any], goal: float, run_dir: str) -> str:
    reached, episodes = figures["return_mean"], figures["episodes"]
    if reached is None:
        what = "no episode has ended"
    elif episodes < RETURN_WINDOW:
        what = f"the mean return of {episodes} episodes is {number_text(reached)}, and the goal needs {RETURN_WINDOW}"
    else:
        what = f"the mean return of the last {RETURN_WINDOW} episodes is {number_text(reached)}"
    limit = getattr(config.stop, figures["reason"]) if figures["reason"] in LIMITS else 0
    more = f" --{figures['reason']} {2 * limit:.10g} --until-return {goal:g}" if limit else ""  # twice as far
    return f"the goal --until-return {goal:g} was missed: {what}. To train on: echelon resume {run_dir}{more}"
