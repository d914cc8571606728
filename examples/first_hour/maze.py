"""An environment of your own: a Dict observation with an image, numbers and a mask of the allowed actions.

`echelon check maze.py:Maze` looks for mistakes in it.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

WALLS = np.array(
    [[cell == "#" for cell in row] for row in ("......", ".##.#.", "....#.", ".#.#..", ".#...#", "...#..")]
)
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))
CELL = 4  # pixels
GREY, GREEN, RED = (90, 90, 90), (0, 200, 0), (220, 0, 0)


class Maze(gym.Env[dict[str, np.ndarray[Any, Any]], np.int64]):
    """Walk to the green cell. Every step costs a little, the goal is worth 1; walls and borders cannot be chosen."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012 as gymnasium has it

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        side = CELL * len(WALLS)
        self.observation_space = gym.spaces.Dict(
            {
                "camera": gym.spaces.Box(0, 255, (side, side, 3), np.uint8),
                "compass": gym.spaces.Box(-1.0, 1.0, (2,), np.float32),  # to the goal
                "action_mask": gym.spaces.MultiBinary(len(MOVES)),  # this key masks the actions; 1 = allowed
            }
        )
        self.action_space = gym.spaces.Discrete(len(MOVES))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        free = np.argwhere(~WALLS)
        self.place, self.goal = free[self.np_random.choice(len(free), 2, replace=False)]
        self.t = 0
        return self._observation(), {}

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place = self.place + MOVES[action]
        self.t += 1
        arrived = bool((self.place == self.goal).all())
        return self._observation(), 1.0 if arrived else -0.02, arrived, self.t >= 50, {}

    def render(self) -> np.ndarray[Any, Any]:
        return self._picture().repeat(8, 0).repeat(8, 1)

    def _observation(self) -> dict[str, np.ndarray[Any, Any]]:
        next_to = [self.place + move for move in MOVES]
        mask = [bool((cell >= 0).all() and (cell < len(WALLS)).all() and not WALLS[tuple(cell)]) for cell in next_to]
        compass = (self.goal - self.place) / len(WALLS)
        return {
            "camera": self._picture(),
            "compass": compass.astype(np.float32),
            "action_mask": np.array(mask, np.int8),
        }

    def _picture(self) -> np.ndarray[Any, Any]:
        cells = np.zeros((*WALLS.shape, 3), np.uint8)
        cells[WALLS], cells[tuple(self.goal)], cells[tuple(self.place)] = GREY, GREEN, RED
        return cells.repeat(CELL, 0).repeat(CELL, 1)
