"""The intake: pieces of episodes that workers bring become transitions in the gateway's replay shard.

Nothing of a piece is trusted: what does not fit is refused with the reason, before anything is touched.

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
from echelon.schema import action_leaf, space_choices, space_leaves
from echelon.transport.episode_wire import Piece

if TYPE_CHECKING:
    from echelon.roles.plan.replay import ReplayPlan

Array = np.ndarray[Any, Any]
ROUNDING = 1e-5  # of a continuous action at its bound


class Intake:
    """The gateway's shard, and what may go into it."""

    def __init__(self, plan: ReplayPlan) -> None:
        config, spaces = plan.config, plan.context.spaces
        self.writer, self.limiter, self.tally = ShardWriter(plan.shard(GATEWAY)), plan.limiter(), plan.tally()
        self.n_step, self.discount = config.replay.n_step, config.algorithm.discount
        self.clip, self.prioritized = config.algorithm.reward_clip, config.replay.prioritized
        self.max_steps = config.workers.max_steps
        self.leaves, self.choices = space_leaves(spaces.observation), space_choices(spaces.observation)
        self.stacks = {leaf.path for leaf in stack_leaves(config, spaces)}
        self.action = action_leaf(spaces.action)
        self.action_bounds = action_bounds(spaces.action, as_env=config.algorithm.is_users)
        self.ring_capacity = {ring.name: ring.capacity for ring in plan.layout.rings}

    @property
    def max_bytes(self) -> int:
        """Of the largest array that a piece may have."""
        rows = self.max_steps + 1
        largest = max(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in (*self.leaves, self.action))
        return rows * max(largest, 8) + (1 << 20)

    # What is refused.

    def check(self, piece: Piece) -> None:
        """Raises Refused on a piece that does not fit."""
        length = len(piece.reward) if isinstance(piece.reward, np.ndarray) and piece.reward.ndim else 0
        if not 1 <= length <= self.max_steps:
            raise Refused(
                f"a piece of {length} steps was refused: 1 to {self.max_steps} (workers.max_steps) are taken."
            )
        if not 0 <= piece.num_old <= min(self.n_step - 1, length):
            raise Refused(f"a piece of {length} steps was refused: {piece.num_old} of them cannot have come before.")
        _fits(piece.reward, Leaf("reward", (), np.dtype(np.float32)), length)
        _fits(piece.version, Leaf("version", (), np.dtype(np.int64)), length)
        _fits(piece.action, self.action, length)
        if len(piece.observation) != len(self.leaves):
            raise Refused(
                f"a piece was refused: it has {len(piece.observation)} leaves, {len(self.leaves)} are observed."
            )
        for leaf, value in zip(self.leaves, piece.observation, strict=True):
            if leaf.path in self.stacks:
                self._check_stack(leaf, value, length + 1)
            else:
                _fits(value, leaf, length + 1)
        self._check_values(piece)

    def _check_stack(self, leaf: Leaf, value: Any, count: int) -> None:
        """A stack of images: its frames, and which of them every observation is made of."""
        if not isinstance(value, dict) or value.keys() != {"frames", "numbers"}:
            raise Refused(f"a piece was refused: {leaf.path} must come as its frames and their numbers.")
        frames, numbers = value["frames"], value["numbers"]
        room = min(self.ring_capacity[leaf.path], count * leaf.shape[0])
        num_frames = len(frames) if isinstance(frames, np.ndarray) and frames.ndim else 0
        if not 1 <= num_frames <= room:
            raise Refused(f"a piece was refused: {leaf.path} has {num_frames} frames, 1 to {room} are taken.")
        _fits(frames, Leaf(f"frames of {leaf.path}", leaf.shape[1:], leaf.dtype), num_frames)
        _fits(numbers, Leaf(f"numbers of {leaf.path}", leaf.shape[:1], np.dtype(np.int64)), count)
        _within(numbers, 0, num_frames - 1, f"numbers of {leaf.path}")

    def _check_values(self, piece: Piece) -> None:
        """No number may come in that nobody could learn from."""
        named = zip(self.leaves, piece.observation, strict=True)
        arrays = {leaf.path: value for leaf, value in named if leaf.dtype.kind == "f" and isinstance(value, np.ndarray)}
        for name, value in {"reward": piece.reward, "action": piece.action, **arrays}.items():
            if value.dtype.kind == "f" and not np.isfinite(value).all():
                where = np.argwhere(~np.isfinite(value))[0]
                raise Refused(
                    f"{name} is {value[tuple(where)]} at step {where[0]} of a piece. The environment must give finite "
                    "numbers: check it, or wrap it to clip what it gives."
                )
        for choices in self.choices:
            _within(piece.observation[choices.leaf], choices.low, choices.high, self.leaves[choices.leaf].path)
        if self.action_bounds is not None:
            _within(piece.action, *self.action_bounds, "action")

    # What is taken in.

    def spans(self, piece: Piece) -> Spans:
        """The transitions of a piece that fits; raises Refused where their rewards are beyond what can be stored."""
        reward = np.clip(piece.reward, -self.clip, self.clip) if self.clip else piece.reward
        spans = spans_of(reward, self.n_step, self.discount, terminated=piece.terminated, truncated=piece.truncated)
        beyond = np.flatnonzero(~np.isfinite(spans.reward))
        if len(beyond):
            first, last = int(spans.start[beyond[0]]), int(spans.stop[beyond[0]])
            raise Refused(
                f"the rewards from step {first} to before step {last} of a piece, {reward[first:last].tolist()}, have "
                "a sum that float32 cannot hold. Scale the rewards, or clip them."
            )
        return spans

    def append(self, piece: Piece, spans: Spans, newest: int) -> None:
        """Appends the transitions of a piece; readers see all of them at once. No version is above the `newest`."""
        count = len(spans.start)
        if count == 0:
            return
        version = np.clip(piece.version[:count], 0, newest)
        fields: dict[str, Array] = {"action": piece.action[:count], "version": version}
        fields |= {"reward": spans.reward, "discount": spans.discount}
        # Every step in turn starts one, so views will do; so they do for the ends where all are one step on.
        ends = slice(1, count + 1) if self.n_step == 1 else spans.stop
        for leaf, value in zip(self.leaves, piece.observation, strict=True):
            rows = self._store(leaf, value) if leaf.path in self.stacks else value
            fields[leaf.path], fields[f"next_{leaf.path}"] = rows[:count], rows[ends]
        first = self.tally.top_priority if self.prioritized else 1.0
        self.writer.append(fields, np.full(count, first))

    def _store(self, leaf: Leaf, value: dict[str, Array]) -> Array:
        """Puts the frames of stacked images into their side ring; the numbers (L + 1, S) that they have there."""
        frames = value["frames"]
        number: Array = self.writer.store(leaf.path, {"frame": frames}, len(frames)) + value["numbers"]
        return number

    def wake_learner(self) -> None:
        """Wakes the learner: the shard has new items, and the tally counts them."""
        self.limiter.note_inserted(GATEWAY, self.writer.head)


def action_bounds(space: gym.Space[Any], *, as_env: bool) -> tuple[Any, Any] | None:
    """The least and the largest action: as the environment takes it, or as our rules choose it, where discrete ones
    count from 0 and continuous ones go from -1 to 1."""
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


def _fits(value: Any, leaf: Leaf, count: int) -> None:
    if not isinstance(value, np.ndarray) or value.shape != (count, *leaf.shape) or value.dtype != leaf.dtype:
        got = f"{value.shape} of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        raise Refused(
            f"a piece was refused: {leaf.path} is {got} where {(count, *leaf.shape)} of {leaf.dtype} is wanted."
        )


def _within(value: Array, low: Any, high: Any, name: str) -> None:
    stray = value[(value < low) | (value > high)]
    if stray.size:
        raise Refused(f"a piece was refused: {name} holds {stray.flat[0]}; its space is {low} to {high}.")
