"""Checks an environment: quickly before every run, and in full for `echelon check`."""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv

from echelon.config import EnvConfig
from echelon.envs.findings import Findings
from echelon.envs.loop import LoopGroup
from echelon.envs.make import env_seeds, make_group
from echelon.envs.trial import RandomActions, Trial
from echelon.envs.vector import EnvFailed, EnvGroup, StepRows, VectorGroup
from echelon.errors import EnvError, UnsuitableEnvError, user_line
from echelon.names import text_of
from echelon.schema import MASK, Spaces, flatten, space_leaves

QUICK_STEPS = 24
QUICK_S = 0.5  # of the quick check; its environment is created anyway
TRIAL_S = 10.0  # of the steps of a full check
SPEED_S = 0.5  # of each measurement of the speed
SPEED_ENVS = 8
CHECKS = ("reset signature", "step signature", "observation", "reward", "end of episode", "action mask", "exception")


class OutOfTimeError(BaseException):
    """The time of a quick check is over. No Exception: an environment must not catch it."""


def quick_check(group: EnvGroup, config: EnvConfig, *, may_interrupt: bool) -> list[str]:
    """Resets and steps the environment of `group`; raises EnvError with everything that is wrong. Returns its warnings.

    It takes at most QUICK_STEPS steps and QUICK_S seconds. `may_interrupt` is set in a process that ends soon: there a
    call that takes longer is interrupted. In other processes that could leave global state of the environment's module
    half initialized, so the check waits for the call and makes no other. A vector environment is checked as a whole.
    """
    if not isinstance(group, LoopGroup | VectorGroup):
        return []
    findings = Findings()
    try:
        with _preserved_generators(), _time_limit(QUICK_S if may_interrupt else 0.0):
            Trial(group, findings).run(QUICK_STEPS, QUICK_S)
    except OutOfTimeError:
        if isinstance(group.env.unwrapped, AsyncVectorEnv):
            group.env.close(terminate=True)  # would wait for the interrupted call
    errors = findings.of("error")
    if config.on_error == "restart":  # environments that raise are replaced
        errors = [error for error in errors if error.check != "exception"]
    if errors:
        raise EnvError(
            f"{text_of(config.id)} has {len(errors)} error{'s' if len(errors) > 1 else ''}; nothing was started. "
            "`echelon check` shows more.\n"
            + "\n".join(f"  {error}" for error in errors)
            + "".join(f"\n{error.traceback}" for error in errors if error.traceback)
        )
    return [f"{text_of(config.id)}: {warning}" for warning in findings.of("warning")]


@contextlib.contextmanager
def _time_limit(limit_s: float) -> Iterator[None]:
    """Raises OutOfTimeError in the block after `limit_s`; 0, or a thread other than the main one: never."""
    if not limit_s or threading.current_thread() is not threading.main_thread():
        yield
        return
    is_armed = True

    def stop(number: int, frame: FrameType | None) -> None:
        if is_armed:
            raise OutOfTimeError

    previous = signal.signal(signal.SIGALRM, stop)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            yield
        finally:
            is_armed = False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)


@contextlib.contextmanager
def _preserved_generators() -> Iterator[None]:
    """Restores the global random generators: an environment may use them, and a run must not depend on its check."""
    torch: Any = sys.modules.get("torch")
    python, numpy = random.getstate(), np.random.get_state()
    state = torch.get_rng_state() if torch is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        if state is not None:
            torch.set_rng_state(state)


@dataclass(slots=True)
class EnvReport:
    """The result of a full check."""

    findings: Findings = field(default_factory=Findings)
    spaces: Spaces | None = None  # None if the environment could not be created
    is_vector: bool = False
    steps_per_s: dict[int, float] = field(default_factory=dict)  # by number of environments
    reward_scale: float = 0.0  # mean absolute reward; 0 without rewards, or if one is not finite
    largest: Mapping[str, float] = field(default_factory=dict)  # absolute value of each leaf of the observation


def check_env(config: EnvConfig, num_steps: int) -> EnvReport:
    """Returns what `num_steps` random steps show about an environment; raises ConfigError for wrong usage."""
    report, seeds = EnvReport(), env_seeds(0, 0, 0, SPEED_ENVS)
    group = _created(config, seeds[:1], report.findings)
    if group is None:
        return report
    report.is_vector, report.spaces = isinstance(group, VectorGroup), group.spaces
    if report.is_vector:  # two of them, so that a missing axis shows
        group.close()
        group = _created(config, seeds[:2], report.findings)
    if not isinstance(group, LoopGroup | VectorGroup):
        return report
    _check_spaces(group.spaces, report.findings)
    trial = Trial(group, report.findings)
    with contextlib.closing(group):
        goes_on = trial.run(num_steps, TRIAL_S)
        report.largest = trial.largest
        if trial.rewards and np.isfinite(trial.rewards).all():
            report.reward_scale = float(np.abs(trial.rewards).mean())
        if goes_on:
            _check_ends(trial)
    _summarize(trial)
    if goes_on and not report.findings.of("error"):
        _check_seed(config, group.seeds, trial)
        for count in (1, SPEED_ENVS):
            report.steps_per_s[count] = _speed(config, seeds[:count])
    return report


def _created(config: EnvConfig, seeds: list[int], findings: Findings) -> EnvGroup | None:
    begun = time.perf_counter()
    try:
        group = make_group(config, seeds)
    except EnvFailed as error:
        place = user_line(error.__cause__) if error.__cause__ is not None else ""
        text = f"creating it raised {error.failure.error}{f', at {place}' if place else ''}."
        remedy = f"Correct it, or its keyword arguments {config.kwargs} (--env-kwargs)."
        findings.add("error", "creation", text, remedy, traceback=error.failure.traceback)
        return None
    except UnsuitableEnvError as error:
        findings.add("error", "spaces", str(error))
        return None
    findings.add("ok", "creation", f"created in {time.perf_counter() - begun:.2f} s", key="created")
    return group


def _check_spaces(spaces: Spaces, findings: Findings) -> None:
    action = spaces.action
    for leaf, part in zip(
        space_leaves(spaces.observation), flatten(spaces.observation, spaces.observation), strict=True
    ):
        if isinstance(part, gym.spaces.Box) and part.dtype == np.float64:
            text = f"{leaf.path} is float64; it is stored and learned from as float32."
            findings.add("warning", "spaces", text, "Declare float32, unless values need more than 7 digits.")
        if isinstance(part, gym.spaces.Box) and len(part.shape) > 3:
            text = f"{leaf.path} has {len(part.shape)} dimensions {part.shape}: it is flattened, without convolutions."
            findings.add("warning", "spaces", text, "An image has 3: stack frames over its channels.")
    if isinstance(action, gym.spaces.Box):
        is_infinite = ~(np.isfinite(action.low) & np.isfinite(action.high))
        if is_infinite.any():
            text = f"the bounds of action {np.flatnonzero(is_infinite).tolist()} are not finite; it is not scaled."
            remedy = "Give the Box finite bounds; sac, td3 and ddpg need them."
            findings.add("warning", "action space", text, remedy)
        elif (action.low >= action.high).any():
            which = np.flatnonzero(action.low >= action.high).tolist()
            text = f"action {which} has no range: low is not below high."
            findings.add("error", "action space", text, "Correct the bounds of the Box, or remove this action.")
    if not findings.has_problem("spaces"):
        findings.add("ok", "spaces", f"observation {spaces.observation}")
    if not findings.has_problem("action space"):
        findings.add("ok", "action space", f"{action}")


def _check_ends(trial: Trial) -> None:
    """Reports whether the reset after an episode was seen; without one, resets inside the episode."""
    findings = trial.findings
    if trial.num_ends:
        findings.add("ok", "autoreset", f"{trial.num_ends} episodes ended and the next one started")
    elif trial.lead or trial.reset(None):
        text = f"no episode ended within {trial.num_steps} steps."
        findings.add("info", "autoreset", text, "More --steps would check the reset after an end.")


def _summarize(trial: Trial) -> None:
    """Adds an "ok" for the checks of the steps without a finding, and what the rewards were."""
    findings, steps = trial.findings, f"{trial.num_steps} steps"
    has_mask = MASK in getattr(trial.spaces.observation, "spaces", ())
    texts = {
        "reset signature": "reset(seed=) returns (observation, info)",
        "step signature": "step(action) returns five values",
        "observation": f"in its space and finite, {steps}",
        "reward": f"finite numbers, {steps}",
        "end of episode": "terminated and truncated are bools",
        "action mask": "allows at least one action",
        "exception": f"none, {steps}",
    }
    for check in CHECKS:
        needed = trial.num_steps if check not in ("reset signature", "observation") else trial.recorded
        if (
            not any(entry.check == check for entry in findings.entries)
            and needed
            and (check != "action mask" or has_mask)
        ):
            findings.add("ok", check, texts[check])


def _check_seed(config: EnvConfig, seeds: list[int], before: Trial) -> None:
    """Compares the first steps with those of an equal environment with the same seed and actions."""
    group = make_group(config, seeds)
    assert isinstance(group, LoopGroup | VectorGroup)
    with contextlib.closing(group):
        again = Trial(group, Findings())
        again.run(min(before.num_steps, 20), TRIAL_S)
    pairs = zip(before.recorded, again.recorded, strict=False)
    if all(np.array_equal(one, other) for one, other in pairs):
        before.findings.add("ok", "seed", "the same seed gives the same steps")
        return
    text = "two environments with the same seed and actions differ: runs cannot be repeated."
    remedy = "Call super().reset(seed=seed) and draw all random numbers from self.np_random."
    before.findings.add("warning", "seed", text, remedy)


def _speed(config: EnvConfig, seeds: list[int]) -> float:
    """Returns the steps per second of a group of environments with random actions, as an actor steps it."""
    group = make_group(config, seeds)
    with contextlib.closing(group):
        space, n = group.spaces.observation, len(seeds)
        observation = [np.zeros((n, *leaf.shape), leaf.dtype) for leaf in space_leaves(space)]
        rows = StepRows(observation, np.zeros(n, np.float32), *(np.zeros(n, np.bool_) for _ in range(3)))
        paths = [leaf.path for leaf in space_leaves(space)]
        mask = observation[paths.index(f"observation.{MASK}")] if f"observation.{MASK}" in paths else None
        actions, num_steps, step_s = RandomActions(group.spaces), 0, 0.0
        group.reset(observation)
        end_s = time.perf_counter() + SPEED_S
        while time.perf_counter() < end_s:
            drawn = np.array([actions.draw(None if mask is None else mask[i]) for i in range(n)])
            begun = time.perf_counter()
            group.step(drawn, rows)
            step_s += time.perf_counter() - begun
            num_steps += n
    return num_steps / step_s
