"""Plays episodes with the weights of a run: `evaluate` for statistics, `play` to watch them.

Heavy modules are imported inside functions, as in `training`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from echelon.config import EnvId, TrainConfig, replace
from echelon.errors import ConfigError
from echelon.families import name_of
from echelon.names import short_name
from echelon.runs.checkpoint import NEWEST
from echelon.runs.report import number_text
from echelon.video import Array, Cell, Screen, VideoConfig, make_screens, video_files

if TYPE_CHECKING:
    from echelon.algorithms.exploration import Exploration
    from echelon.algorithms.model import Model
    from echelon.roles.evaluator import Match

ABSENT = "-"
NO_KWARGS: Mapping[str, Any] = MappingProxyType({})
SHOWN_INFO = ("score", "time", "coins", "life", "lives")  # shown where the environment's info has them


def evaluate(
    run_dir: str | Path,
    *,
    episodes: int = 10,
    seed: int = 1,
    greedy: bool = True,
    steps: int = 0,
    checkpoint: str = NEWEST,
    env: EnvId | None = None,
    env_kwargs: Mapping[str, Any] = NO_KWARGS,
    network: str | Callable[..., Any] | None = None,
    trust: bool = False,
    progress: Callable[[int, int], None] = lambda num_ended, num_steps: None,
) -> dict[str, Any]:
    """Plays episodes with the weights of a run, in its environment or in `env`; returns statistics.

    The weights are those of `checkpoint`: newest, best, step_N or weights.safetensors; RUN/checkpoints/NAME in place of
    the run names both. Actions are `greedy`, or sampled and explored as at the end of training, with independent noise.
    With `steps`, longer episodes are cut.
    `env` is a name or a callable, `network` the factory of the run's network: a run that was trained with a lambda or
    another callable that cannot be imported needs them.
    `env_kwargs` are keyword arguments of the environment: they are added to the run's, or replace them. An `env` of
    another name than the run's (SuperMarioBros-1-2 has the name of SuperMarioBros-1-1) drops the run's. Only with
    `trust` is code imported that somebody else's configuration names, as by `resume`.
    `progress` is called with the numbers of ended episodes and of steps so far.
    """
    from echelon.envs.make import env_seeds
    from echelon.roles.evaluator import EVALUATION_SEED, Match
    from echelon.runs.weights import run_of, weights_path

    _check_counts(episodes, steps)
    run_dir, checkpoint = run_of(run_dir, checkpoint)
    config = _load_config(run_dir, env, env_kwargs, network, trust)
    source = weights_path(str(run_dir), checkpoint)
    with _one_thread():
        model = _load_model(run_dir, config, source, env_kwargs)
        seeds, rules = env_seeds(seed, EVALUATION_SEED + 1, 0, episodes), _exploration(config, greedy)
        match = Match(config.env, model, episodes, seeds, greedy=greedy, exploration=rules)
        with contextlib.closing(match):
            return {**match.play(seed, steps, progress).summary(), **_place(source)}


def play(
    run_dir: str | Path,
    video: VideoConfig | None = None,
    *,
    episodes: int = 1,
    seed: int = 1,
    greedy: bool = True,
    steps: int = 0,
    checkpoint: str = NEWEST,
    env: EnvId | None = None,
    env_kwargs: Mapping[str, Any] = NO_KWARGS,
    network: str | Callable[..., Any] | None = None,
    trust: bool = False,
    report: Callable[[str], None] = lambda line: None,
    progress: Callable[[int], None] = lambda num_steps: None,
) -> dict[str, Any]:
    """Plays episodes one after the other and shows them as `video` says; returns statistics and the `files` written.

    `greedy`, `steps`, `checkpoint`, `env`, `env_kwargs`, `network` and `trust` are those of `evaluate`.
    `report` is called with lines of text, `progress` with the number of steps so far.
    """
    from echelon.envs.make import env_seeds, with_rendering
    from echelon.roles.evaluator import EVALUATION_SEED, EvaluationScore, Match
    from echelon.runs.weights import run_of, weights_path

    video = video or VideoConfig()
    _check_counts(episodes, steps)
    run_dir, checkpoint = run_of(run_dir, checkpoint)
    config = _load_config(run_dir, env, env_kwargs, network, trust)
    source = weights_path(str(run_dir), checkpoint)
    changes = [short_name(env)] if env is not None else []
    changes += [f"{key}-{value}" for key, value in (env_kwargs or {}).items()]
    name = re.sub(r"[^\w.-]+", "-", "-".join([source.stem, str(seed), *changes]))  # ALE/Pong-v5 has a slash
    files = video_files(video, Path(run_dir) / "videos" / name[:150])
    score = EvaluationScore([], [])
    with _one_thread(), contextlib.ExitStack() as stack:
        model = _load_model(run_dir, config, source, env_kwargs)
        seeds, rules = env_seeds(seed, EVALUATION_SEED + 1, 0, 1), _exploration(config, greedy)
        env_config = with_rendering(config.env)
        match = Match(env_config, model, 1, seeds, greedy=greedy, exploration=rules, with_values=True)
        stack.callback(match.close)
        watched = WatchedMatch(match, short_name(config.env.id), video.overlay, episodes)
        fps = float(match.group.metadata.get("render_fps") or 0.0)
        screens = make_screens(video, files, fps, f"{watched.name} {source.name}")
        for screen in screens:
            stack.callback(screen.close)
        report(f"playing {source} in {watched.name}, {'greedy' if greedy else 'sampled'} actions, seed {seed}")
        for i in range(episodes):
            for num_steps in watched.play(i, seed + i, steps, screens):
                progress(sum(score.lengths) + num_steps)
            score.returns.append(float(match.returns[0]))
            score.lengths.append(int(match.lengths[0]))
            report(
                f"episode {i + 1} of {episodes}: return {number_text(score.returns[-1])}, {score.lengths[-1]:,} steps"
            )
            if any(screen.is_closed for screen in screens):
                break
        for screen in screens:
            screen.finish(report)
    return {**score.summary(), **_place(source), "files": [str(path) for path in files]}


class WatchedMatch:
    """A match of one environment that is shown on screens, step by step."""

    def __init__(self, match: Match, name: str, overlay: bool, episodes: int) -> None:
        self.match, self.name, self.overlay, self.episodes = match, name, overlay, episodes
        self._info: Sequence[str] | None = None  # of the first picture: later captions have the same size

    def play(self, episode: int, seed: int, max_steps: int, screens: Sequence[Screen]) -> Iterator[int]:
        """Plays and shows an episode; yields the number of its steps after each."""
        match, ended = self.match, False
        match.begin(seed)
        while True:
            picture, caption = self._picture(), self._caption(episode) if self.overlay else []
            for screen in screens:
                screen.show(picture, caption)
            if ended or any(screen.is_closed for screen in screens) or match.lengths[0] == (max_steps or -1):
                return
            ended = match.step() is not None
            yield int(match.lengths[0])

    def _picture(self) -> Array:
        try:
            picture = self.match.group.render()
        except Exception as error:  # of the user's code, or a package that rendering needs
            raise ConfigError(f"{self.name} cannot be rendered: {type(error).__name__}: {error}") from error
        if not isinstance(picture, np.ndarray) or picture.ndim != 3 or picture.shape[2] != 3:
            shown = f"an array of shape {picture.shape}" if isinstance(picture, np.ndarray) else f"{picture!r:.40}"
            raise ConfigError(
                f"{self.name} cannot be rendered: its render() returned {shown}, not a picture (H, W, 3). Its class or "
                'factory must accept render_mode="rgb_array"; or give an environment with equal spaces that does, with '
                "--env (env=)."
            )
        return np.ascontiguousarray(picture, np.uint8)

    def _caption(self, episode: int) -> list[list[Cell]]:
        match = self.match
        head = [Cell("return", number_text(float(match.returns[0]))), Cell("step", f"{match.lengths[0]:,}")]
        acted = [Cell("action", self._action(), 2 if self.episodes > 1 else 3)]
        if self.episodes > 1:
            acted.append(Cell("episode", f"{episode + 1}/{self.episodes}"))
        texts = info_texts(match.group.info)
        self._info = list(texts) if self._info is None else self._info
        info = [Cell(name, texts.get(name, ABSENT)) for name in self._info]
        return [[*head, Cell("value", self._value())], acted, info[:3], info[3:]][: 2 + -(-len(info) // 3)]

    def _action(self) -> str:
        """Returns the action that led to the current picture."""
        if self.match.chosen is None:
            return ABSENT
        action = self.match.policy.model.distribution.to_env(self.match.chosen.action.numpy())[0]
        if action.dtype.kind == "f":
            return " ".join(f"{x:+.2f}" for x in action.flat)
        names = self.match.group.metadata.get("action_names")
        return str(names[int(action)]) if names and not action.shape else " ".join(map(str, action.flat))

    def _value(self) -> str:
        """Returns the value of the state, or else that of its best action, in which the action was chosen."""
        chosen = self.match.chosen
        values = None if chosen is None else chosen.action_values.best if chosen.action_values else chosen.value
        return ABSENT if values is None else f"{float(values[0]):,.2f}"


def info_texts(info: Mapping[str, Any]) -> dict[str, str]:
    """Returns what a caption shows of an environment's info, by name."""
    texts = {"stage": f"{info['world']}-{info['stage']}"} if {"world", "stage"} <= info.keys() else {}
    texts |= {name: f"{info[name]:,}" for name in SHOWN_INFO if isinstance(info.get(name), int | float | np.number)}
    return {**texts, **({"flag": "yes" if info["flag_get"] else "no"} if "flag_get" in info else {})}


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Computes with one thread; restores the state of the process at the end."""
    import torch

    from echelon.process_state import preserve_state

    with preserve_state():
        torch.set_num_threads(1)
        yield


def _check_counts(episodes: int, steps: int) -> None:
    if episodes < 1:
        raise ConfigError(f"episodes={episodes} must be at least 1.")
    if steps < 0:
        raise ConfigError(f"steps={steps} must be at least 1, or 0 to play every episode to its end.")


def _load_config(
    run_dir: str | Path,
    env: EnvId | None,
    env_kwargs: Mapping[str, Any],
    network: str | Callable[..., Any] | None,
    trust: bool,
) -> TrainConfig:
    """Returns the configuration of a run, with `env` and `network` in place of its own if they are given."""
    from echelon.runs.folder import RunFolder

    given = [*(("env.id", "env.wrappers") if env is not None else ()), *(("network.name",) if network else ())]
    config = RunFolder.open(Path(run_dir)).load_config(trust=trust, given=given)
    if config.algorithm.is_users:
        raise ConfigError(f"{run_dir} trained a user's own policy: evaluate it in the user's program.")
    if env is not None:
        kwargs = config.env.kwargs if _same_kind(env, config.env.id) else {}
        config = replace(config, env=replace(config.env, id=env, kwargs=kwargs, wrappers=()))
    if network is not None:
        config = replace(config, **{"network.name": network})
    if not config.env.id:
        raise ConfigError(f"{run_dir} names no environment, as its workers had their own: give one with --env (env=).")
    return replace(config, **{"env.kwargs": {**config.env.kwargs, **env_kwargs}})


def _same_kind(env: EnvId, other: EnvId) -> bool:
    """Returns whether both ids name one environment, but for its stage or version: the same arguments fit both."""
    if not isinstance(env, str) or not isinstance(other, str):
        return False
    return name_of(env) == name_of(other) and env.rpartition(":")[0] == other.rpartition(":")[0]


def _load_model(run_dir: str | Path, config: TrainConfig, source: Path, env_kwargs: Mapping[str, Any]) -> Model:
    """Returns the model for the environment of `config`; raises ConfigError if it has other spaces than the run's.

    `env_kwargs` are those that the caller gave, for the message.
    """
    from echelon.envs.make import probe_spaces
    from echelon.policy import TrainedPolicy
    from echelon.runs.folder import RunFolder
    from echelon.runs.policy_spec import PolicySpec
    from echelon.runs.weights import read_weights
    from echelon.schema import same_layout

    spaces = probe_spaces(config.env)
    trained = RunFolder.open(Path(run_dir)).read_spaces()
    if trained is not None:  # an older release did not record them
        differing = [
            f"{verb} {other}, not {own}"
            for verb, other, own in (
                ("observes", spaces.observation, trained.observation),
                ("acts in", spaces.action, trained.action),
            )
            if not same_layout(other, own)
        ]
        if differing:
            name = short_name(config.env.id) + (f" with {dict(env_kwargs)}" if env_kwargs else "")
            options = "--env and --env-kwargs, or env= and env_kwargs=" if env_kwargs else "--env, or env="
            raise ConfigError(
                f"the weights of {run_dir} do not fit {name}, which {' and '.join(differing)}. "
                f"Give an environment with the spaces of the run ({options})."
            )
    return TrainedPolicy(PolicySpec.of(config, spaces), read_weights(source), source).model


def _place(source: Path) -> dict[str, Any]:
    """Returns the name of the checkpoint that was played, and its environment steps if they are known."""
    from echelon.runs.weights import steps_of

    return {"checkpoint": source.name, "env_steps": steps_of(source)}


def _exploration(config: TrainConfig, greedy: bool) -> Exploration | None:
    """Returns the exploration at the end of training, of the environment that explores least; None if `greedy`.

    Its noise is independent at every step, as is that of a policy that samples.
    """
    from echelon.algorithms.exploration import Explorer

    if greedy:
        return None
    num_envs = config.actor.num_actors * config.actor.envs_per_actor
    last = Explorer(config.algorithm, [num_envs - 1], num_envs).at(sys.maxsize)
    return dataclasses.replace(last, process=None) if last is not None else None
