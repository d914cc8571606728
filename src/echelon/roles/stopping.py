"""The stop conditions and the progress of a run."""

from __future__ import annotations

from collections.abc import Collection

from echelon.config import StopConfig, TrainConfig

RETURN_WINDOW = 100  # episodes in the mean return


def stop_reason(
    stop: StopConfig, env_steps: int, returns: Collection[float], elapsed_s: float, episodes: int = 0
) -> str:
    """Returns which stop condition is met, or "" if none is."""
    if stop.steps and env_steps >= stop.steps:
        return "steps"
    if stop.episodes and episodes >= stop.episodes:
        return "episodes"
    if stop.minutes and elapsed_s >= 60 * stop.minutes:
        return "minutes"
    return "return" if is_goal_reached(stop, returns) else ""


def is_goal_reached(stop: StopConfig, returns: Collection[float]) -> bool:
    """Returns whether the mean return of the newest episodes has reached `stop.until_return`."""
    goal = stop.until_return
    return goal is not None and len(returns) >= RETURN_WINDOW and sum(returns) / len(returns) >= goal


def progress(stop: StopConfig, env_steps: int, elapsed_s: float, episodes: int = 0) -> float:
    """Returns the completed fraction (0 to 1) of the run, by the stop condition that is closest to being met."""
    fractions = [0.0]
    if stop.steps:
        fractions.append(env_steps / stop.steps)
    if stop.episodes:
        fractions.append(episodes / stop.episodes)
    if stop.minutes:
        fractions.append(elapsed_s / (60 * stop.minutes))
    return min(max(fractions), 1.0)


def stop_text(stop: StopConfig) -> str:
    """Returns the stop conditions as options."""
    texts = {"steps": stop.steps or None, "minutes": stop.minutes or None, "episodes": stop.episodes or None}
    texts["until-return"] = stop.until_return
    return ", ".join(f"--{name} {value:g}" for name, value in texts.items() if value is not None)


def raised_rate(config: TrainConfig, before: float, now: float) -> str:
    """Returns a sentence if the learning rate rises as the progress of a run falls from `before` to `now`, else ""."""
    rate, is_linear = config.optimizer.learning_rate, config.optimizer.schedule == "linear"
    if not is_linear or now >= before or config.algorithm.is_users or constant_schedules(config):
        return ""
    return (
        f"The learning rate, which was down to {rate * (1.0 - before):.3g}, continues at {rate * (1.0 - now):.3g}: it "
        "falls to 0 over the new total (optimizer.schedule=linear)"
    )


def constant_schedules(config: TrainConfig) -> list[str]:
    """Returns the schedules that stay constant because the length of the run is unknown."""
    stop, optimizer, replay = config.stop, config.optimizer, config.replay
    if stop.steps or stop.minutes or stop.episodes:
        return []
    constant = []
    if optimizer.schedule == "linear":
        constant.append(f"the learning rate stays at {optimizer.learning_rate:g} (optimizer.schedule=linear)")
    if replay.prioritized and replay.beta_start != replay.beta_end:
        constant.append(f"the importance weights stay at replay.beta_start={replay.beta_start:g}")
    return constant
