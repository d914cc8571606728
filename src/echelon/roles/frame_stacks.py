"""Finds the parts of an observation that are stacks of images, so that the replay stores each frame only once."""

from __future__ import annotations

import numpy as np

from echelon.config import EnvConfig, TrainConfig
from echelon.envs.mario import NAME as MARIO
from echelon.errors import ConfigError
from echelon.families import is_atari
from echelon.layout import Leaf
from echelon.names import path_of, text_of
from echelon.schema import Spaces, space_leaves

OUR_STACKS = frozenset(
    f"echelon.envs.{name}" for name in ("racing:Pixels", "racing:PixelPool", "mario:Mario", "mario:MarioPool")
)
MOST_FRAMES = 8  # with more, an array whose last axis is 1, 3 or 4 is one image with channels last, not a stack


def stack_leaves(config: TrainConfig, spaces: Spaces) -> list[Leaf]:
    """Returns the leaves of an observation that are stored as stacks of images over their first axis."""
    frames, leaves = config.replay.frames, space_leaves(spaces.observation)
    found = image_stacks(spaces)
    if frames != "stacked":
        num_stacked = _num_stacked(config.env) if frames == "auto" else 0
        return [leaf for leaf in found if leaf.shape[0] == num_stacked]
    if not found:
        shapes = ", ".join(f"{leaf.path} {leaf.shape} of {leaf.dtype}" for leaf in leaves)
        raise ConfigError(
            f"replay.frames=stacked, but no observation is a stack of uint8 images (frames, height, width): {shapes}. "
            "Use --replay.frames whole, or stack frames in the environment, over the first axis."
        )
    return found


def image_stacks(spaces: Spaces) -> list[Leaf]:
    """Returns the leaves of an observation that may be stacks of images over their first axis."""
    leaves = space_leaves(spaces.observation)
    return [leaf for leaf in leaves if leaf.dtype == np.uint8 and len(leaf.shape) >= 3 and not _is_image(leaf)]


def _is_image(leaf: Leaf) -> bool:
    """Returns whether `leaf` is a single image of shape (height, width, channels) and not a stack of frames."""
    return len(leaf.shape) == 3 and leaf.shape[2] in (1, 3, 4) and leaf.shape[0] > MOST_FRAMES


def _num_stacked(env: EnvConfig) -> int:
    """Returns the number of frames that a known environment stacks, or 0 if the environment is not known."""
    id = path_of(text_of(env.id))
    if id in OUR_STACKS or id.startswith(MARIO):
        return int(env.kwargs.get("stack", 4))
    is_grey = env.kwargs.get("gray_scale", True)  # EnvPool merges the colour channels of all frames into one axis
    if is_grey if id.startswith("envpool:") else is_atari(id):
        return int(env.kwargs.get("stack_num", 4))
    return 0
