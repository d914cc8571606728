"""The intake: converts pieces of episodes from workers into transitions in the gateway's replay shard.

Pieces are not trusted: an invalid piece is refused with the reason before anything is written.

Shapes: L steps of a piece, M transitions, S frames of a stack, F frames of a piece.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

from echelon.errors import Refused
from echelon.layout import Leaf
from echelon.replay.pieces import Spans, spans_of
from echelon.replay.shard import ShardWriter
from echelon.roles.frame_stacks import stack_leaves
from echelon.roles.journal import GATEWAY
from echelon.schema import action_leaf, flatten, space_choices, space_leaves
from echelon.transport.episode_wire import EpisodePiece

if TYPE_CHECKING:
    from echelon.roles.plan.replay import ReplayPlan

Array = np.ndarray[Any, Any]
ROUNDING = 1e-5  # tolerance for a continuous action at its bound
BEYOND = 1_000.0  # tolerance for an observation outside its bounds, in widths of its interval


class Intake:
    """Validates pieces and appends their transitions to the gateway's shard."""

    def __init__(self, plan: ReplayPlan) -> None:
        config, spaces = plan.config, plan.context.spaces
        self.writer, self.limiter, self.tally = ShardWriter(plan.shard(GATEWAY)), plan.limiter(), plan.tally()
        self.n_step, self.discount = config.replay.n_step, config.algorithm.discount
        self.clip, self.prioritized = config.algorithm.reward_clip, config.replay.prioritized
        self.max_steps = config.workers.max_steps
        self.leaves, self.choices = space_leaves(spaces.observation), space_choices(spaces.observation)
        self.stacks = {leaf.path for leaf in stack_leaves(config, spaces)}
        limits = observation_limits(spaces.observation)
        self.limits = {i: limit for i, limit in limits.items() if self.leaves[i].path not in self.stacks}
        self.action = action_leaf(spaces.action)
        self.action_bounds = action_bounds(spaces.action, as_env=config.algorithm.is_users)
        self.ring_capacity = {ring.name: ring.capacity for ring in plan.layout.rings}

    @property
    def num_values(self) -> int:
        """The number of values in an observation and an action."""
        return sum(int(np.prod(leaf.shape)) for leaf in (*self.leaves, self.action))

    @property
    def max_bytes(self) -> int:
        """The size limit of a piece: its arrays, the frame numbers of its stacks, and 1 MB for the rest."""
        arrays = sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in (*self.leaves, self.action))
        numbers = sum(8 * leaf.shape[0] for leaf in self.leaves if leaf.path in self.stacks)
        return (self.max_steps + 1) * (arrays + numbers + 4 + 8) + (1 << 20)  # with reward and version

    # Validation.

    def check(self, piece: EpisodePiece) -> None:
        """Raises Refused if a piece is invalid."""
        length = len(piece.reward) if isinstance(piece.reward, np.ndarray) and piece.reward.ndim else 0
        if not 1 <= length <= self.max_steps:
            raise Refused(
                f"a piece of {length} steps was refused: 1 to {self.max_steps} (workers.max_steps) are allowed."
            )
        most_old = min(self.n_step - 1, length)
        if not 0 <= piece.num_old <= most_old:
            raise Refused(
                f"a piece of {length} steps was refused: num_old={piece.num_old}, but 0 to {most_old} are allowed."
            )
        _fits(piece.reward, Leaf("reward", (), np.dtype(np.float32)), length)
        _fits(piece.version, Leaf("version", (), np.dtype(np.int64)), length)
        _fits(piece.action, self.action, length)
        if len(piece.observation) != len(self.leaves):
            raise Refused(
                f"a piece was refused: its observation has {len(piece.observation)} leaves, not {len(self.leaves)}."
            )
        for leaf, value in zip(self.leaves, piece.observation, strict=True):
            if leaf.path in self.stacks:
                self._check_stack(leaf, value, length + 1)
            else:
                _fits(value, leaf, length + 1)
        self._check_values(piece)

    def _check_stack(self, leaf: Leaf, value: Any, count: int) -> None:
        """Checks a stack of images, which is sent as its frames and the frame numbers of every observation."""
        if not isinstance(value, dict) or value.keys() != {"frames", "numbers"}:
            raise Refused(f'a piece was refused: {leaf.path} must be a dict with "frames" and "numbers".')
        frames, numbers = value["frames"], value["numbers"]
        room = min(self.ring_capacity[leaf.path], count * leaf.shape[0])
        num_frames = len(frames) if isinstance(frames, np.ndarray) and frames.ndim else 0
        if not 1 <= num_frames <= room:
            raise Refused(f"a piece was refused: {leaf.path} has {num_frames} frames, 1 to {room} are allowed.")
        _fits(frames, Leaf(f"frames of {leaf.path}", leaf.shape[1:], leaf.dtype), num_frames)
        _fits(numbers, Leaf(f"numbers of {leaf.path}", leaf.shape[:1], np.dtype(np.int64)), count)
        _within(numbers, 0, num_frames - 1, f"numbers of {leaf.path}")

    def _check_values(self, piece: EpisodePiece) -> None:
        """Raises Refused if a number is NaN or infinite, or outside its space."""
        named = zip(self.leaves, piece.observation, strict=True)
        arrays = {leaf.path: value for leaf, value in named if leaf.dtype.kind == "f" and isinstance(value, np.ndarray)}
        for name, value in {"reward": piece.reward, "action": piece.action, **arrays}.items():
            if value.dtype.kind == "f" and not np.isfinite(value).all():
                where = np.argwhere(~np.isfinite(value))[0]
                raise Refused(
                    f"{name} is {value[tuple(where)]} at step {where[0]} of a piece. The environment must return "
                    "finite numbers: check it, or wrap it to clip them."
                )
        for choices in self.choices:
            _within(piece.observation[choices.leaf], choices.low, choices.high, self.leaves[choices.leaf].path)
        for i, (low, high) in self.limits.items():
            least, most = piece.observation[i].min(0), piece.observation[i].max(0)
            stray = np.append(np.extract(least < low, least), np.extract(most > high, most))
            if stray.size:
                raise Refused(
                    f"{self.leaves[i].path} of a piece holds {stray[0]}, over {BEYOND:,.0f} widths of its space beyond "
                    "it. Correct the environment, or the bounds of its observation space."
                )
        if self.action_bounds is not None:
            _within(piece.action, *self.action_bounds, "action")

    # Storage.

    def spans(self, piece: EpisodePiece) -> Spans:
        """Returns the transitions of a valid piece. Raises Refused if an n-step reward overflows float32."""
        reward = np.clip(piece.reward, -self.clip, self.clip) if self.clip else piece.reward
        spans = spans_of(reward, self.n_step, self.discount, terminated=piece.terminated, truncated=piece.truncated)
        beyond = np.flatnonzero(~np.isfinite(spans.reward))
        if len(beyond):
            first, last = int(spans.start[beyond[0]]), int(spans.stop[beyond[0]])
            raise Refused(
                f"the sum of the rewards from step {first} to step {last - 1} of a piece, "
                f"{reward[first:last].tolist()}, overflows float32. Scale the rewards, or clip them."
            )
        return spans

    def append(self, piece: EpisodePiece, spans: Spans, newest: int) -> None:
        """Appends the transitions of a piece atomically. Versions above `newest` are clipped to it."""
        count = len(spans.start)
        if count == 0:
            return
        version = np.clip(piece.version[:count], 0, newest)
        fields: dict[str, Array] = {"action": piece.action[:count], "version": version}
        fields |= {"reward": spans.reward, "discount": spans.discount}
        # Every step starts a transition, so a slice suffices; with n_step=1 a slice also suffices for the ends.
        ends = slice(1, count + 1) if self.n_step == 1 else spans.stop
        for leaf, value in zip(self.leaves, piece.observation, strict=True):
            rows = self._store(leaf, value) if leaf.path in self.stacks else value
            fields[leaf.path], fields[f"next_{leaf.path}"] = rows[:count], rows[ends]
        first = self.tally.top_priority if self.prioritized else 1.0
        self.writer.append(fields, np.full(count, first))

    def _store(self, leaf: Leaf, value: dict[str, Array]) -> Array:
        """Stores the frames of stacked images in their side ring and returns their numbers (L + 1, S) there."""
        frames = value["frames"]
        number: Array = self.writer.store(leaf.path, {"frame": frames}, len(frames)) + value["numbers"]
        return number

    def wake_learner(self) -> None:
        """Wakes the learner, after the shard has new items and the tally counts them."""
        self.limiter.note_inserted(GATEWAY, self.writer.head)


def action_bounds(space: gym.Space[Any], *, as_env: bool) -> tuple[Any, Any] | None:
    """Returns the smallest and the largest action, or None if the space has no bounds.

    With `as_env` these are the bounds of the environment's action space; otherwise those of the built-in algorithms,
    where discrete actions count from 0 and continuous actions are in [-1, 1].
    """
    match space:
        case gym.spaces.Discrete():
            start = int(space.start) if as_env else 0
            return start, start + int(space.n) - 1
        case gym.spaces.MultiDiscrete():
            first = space.start if as_env else np.zeros_like(space.nvec)
            return first, first + space.nvec - 1
        case gym.spaces.Box():
            return (space.low, space.high) if as_env else (-1.0 - ROUNDING, 1.0 + ROUNDING)
        case _:
            return None


def observation_limits(space: gym.Space[Any]) -> dict[int, tuple[Array, Array]]:
    """Returns the least and the largest number that a worker may send, by leaf; leaves without limits are left out.

    The limits are far outside the declared bounds. Bounds of honest environments are inexact: they are missed by
    rounding, or are those of normalized observations ([0, 1] for bytes), and runs without workers do not check them. A
    number beyond the limits comes from no such mistake, and overflows when a network squares it.
    """
    limits: dict[int, tuple[Array, Array]] = {}
    for i, sub in enumerate(flatten(space, space)):
        if not isinstance(sub, gym.spaces.Box):
            continue
        low, high = sub.low.astype(np.float64), sub.high.astype(np.float64)
        with np.errstate(over="ignore"):
            one_sided = np.fmax(1.0, np.fmin(np.abs(low), np.abs(high)))  # of the finite bound
            width = np.where(np.isfinite(high - low), high - low, one_sided)
            low, high = low - BEYOND * width, high + BEYOND * width
        least, most = (
            (np.iinfo(sub.dtype).min, np.iinfo(sub.dtype).max) if sub.dtype.kind in "iu" else (-np.inf, np.inf)
        )
        if (low > least).any() or (high < most).any():
            limits[i] = low, high
    return limits


def _fits(value: Any, leaf: Leaf, count: int) -> None:
    if not isinstance(value, np.ndarray) or value.shape != (count, *leaf.shape) or value.dtype != leaf.dtype:
        got = f"{value.shape} of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        raise Refused(f"a piece was refused: {leaf.path} is {got}, expected {(count, *leaf.shape)} of {leaf.dtype}.")


def _within(value: Array, low: Any, high: Any, name: str) -> None:
    stray = value[(value < low) | (value > high)]
    if stray.size:
        raise Refused(f"a piece was refused: {name} holds {stray.flat[0]}; its space is {low} to {high}.")
