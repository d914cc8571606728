"""Super Mario Bros, frame by frame: what its memory shows, its reward, and scenes without control that are skipped.

Rewards, ends of episodes and skipped scenes are those of gym-super-mario-bros, frame by frame. Two things differ: the
whole game also ends when the last castle is cleared, where the original waits forever, and at game over without one
more frame.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import gymnasium as gym

from echelon.envs.nes import Emulator
from echelon.errors import ConfigError, EnvError

NUM_WORLDS, NUM_STAGES = 8, 4
INTRO_WORLDS = (1, 2, 4, 7)  # their second stage starts with an area in which Mario walks into a pipe by himself
MAX_REWARD = 15.0  # of a frame
DEATH_REWARD = -25
MAX_MOVE = 5  # pixels per frame; more is a change of the area
MAX_SCENE = 3600  # frames; the longest scene, the end of a castle, takes about a third of it

# Addresses. Numbers of several digits have one digit per byte.
FLOAT_STATE = 0x1D
PLAYER_STATE = 0x0E
ENEMIES = slice(0x16, 0x1B)
X_PAGE, X_PIXEL = 0x6D, 0x86
Y_PAGE = 0xB5
AREA_TIMER = 0x6DE
LIVES, STAGE, WORLD, AREA = 0x75A, 0x75C, 0x75F, 0x760
MODE = 0x770
STAGE_TIMER = 0x7A0
SCORE, COINS, TIME = slice(0x7DE, 0x7E4), slice(0x7ED, 0x7EF), slice(0x7F8, 0x7FB)

# Values.
DEAD, DYING = 0x06, 0x0B
NO_CONTROL = frozenset((0x00, 0x01, 0x02, 0x03, 0x04, 0x05, 0x07))  # climbs, enters a pipe, walks by himself, loads
BELOW_SCREEN = 2  # Y_PAGE from here on: he fell into a pit
ON_POLE = 3
FLAGPOLE, BOWSER = 0x31, 0x2D
END_OF_WORLD = 2
NO_LIFE = 0xFF
START = 0x08


def parse_stage(stage: str) -> tuple[int, int]:
    """Returns world and stage of "WORLD-STAGE"; raises ConfigError if there is no such stage."""
    if re.fullmatch(f"[1-{NUM_WORLDS}]-[1-{NUM_STAGES}]", str(stage)):
        world, number = map(int, stage.split("-"))
        return world, number
    raise ConfigError(
        f'Super Mario Bros has no stage "{stage}": the stages are 1-1 to {NUM_WORLDS}-{NUM_STAGES} (worlds 1 to '
        f"{NUM_WORLDS} with stages 1 to {NUM_STAGES}), as in SuperMarioBros-1-1, without a version; SuperMarioBros is "
        "the whole game."
    )


class Game:
    """One stage, or the whole game if `stage` is None. Reads and writes the emulator's memory between frames."""

    def __init__(self, stage: tuple[int, int] | None) -> None:
        self.emulator = Emulator()
        self.ended = True  # until `start`
        self.flag_get = False
        self._stage = stage
        self._has_backup = False

    @property
    def ram(self) -> memoryview:
        return self.emulator.ram

    def start(self) -> None:
        """Goes to the first frame of the stage; the first call takes a fraction of a second for the title screen."""
        if self.emulator.is_closed:
            raise gym.error.ClosedEnvironmentError("the game was closed: create a new environment.")
        if self._has_backup:
            self.emulator.restore()
        else:
            self._leave_title()
            self.emulator.backup()
            self._has_backup = True
        self._x, self._time = self._x_position(), self._number(TIME)
        self.ended = self.flag_get = False

    def frame(self, buttons: int) -> float:
        """Emulates a frame, and any scene that follows, in which Mario cannot be controlled; returns the reward.

        `flag_get` stays set from the frame in which the stage was cleared until it is cleared by the caller.
        """
        self.emulator.step(buttons)
        x, time = self._x_position(), self._number(TIME)
        moved, ticked = x - self._x, time - self._time
        self._x, self._time = x, time
        dies = self._is_dying() or self.ram[PLAYER_STATE] == DEAD
        reward = (moved if abs(moved) <= MAX_MOVE else 0) + min(ticked, 0) + (DEATH_REWARD if dies else 0)
        cleared = self.ram[MODE] == END_OF_WORLD or self._is_on_pole()
        self.flag_get |= cleared
        if self._stage is not None:
            self.ended = dies or cleared
        else:
            self.ended = self.ram[MODE] == END_OF_WORLD and self.ram[WORLD] == NUM_WORLDS - 1
        if not self.ended:
            self._skip_scenes()
            self.ended = self._stage is None and self.ram[LIVES] == NO_LIFE
        return max(-MAX_REWARD, min(MAX_REWARD, float(reward)))

    def info(self) -> dict[str, Any]:
        return {
            "x_pos": self._x_position(),
            "time": self._number(TIME),
            "score": self._number(SCORE),
            "coins": self._number(COINS),
            "life": self.ram[LIVES],
            "world": self.ram[WORLD] + 1,
            "stage": self.ram[STAGE] + 1,
            "flag_get": self.flag_get,
        }

    def close(self) -> None:
        self.ended = True
        self.emulator.close()

    def _number(self, digits: slice) -> int:
        number = 0
        for digit in self.ram[digits]:
            number = 10 * number + digit
        return number

    def _x_position(self) -> int:
        return self.ram[X_PAGE] * 256 + self.ram[X_PIXEL]

    def _is_dying(self) -> bool:
        return self.ram[PLAYER_STATE] == DYING or self.ram[Y_PAGE] >= BELOW_SCREEN

    def _is_on_pole(self) -> bool:
        """Whether Mario holds the pole of the flag; where there is neither flag nor Bowser, he holds a vine."""
        if self.ram[FLOAT_STATE] != ON_POLE:
            return False
        return any(enemy in (FLAGPOLE, BOWSER) for enemy in self.ram[ENEMIES])

    def _leave_title(self) -> None:
        """Leaves the title screen for the stage, and waits for the first tick of its clock."""
        self.emulator.step(START)
        self.emulator.step(0)

        def press_start() -> None:
            self.emulator.step(START)
            if self._stage is not None:
                world, stage = self._stage
                self.ram[WORLD], self.ram[STAGE] = world - 1, stage - 1
                self.ram[AREA] = stage - 1 + (world in INTRO_WORLDS and stage >= 2)
            self.emulator.step(0)
            self.ram[STAGE_TIMER] = 0

        self._repeat(press_start, lambda: self._number(TIME) == 0)
        first = self._number(TIME)

        def wait() -> None:
            self.emulator.step(START)
            self.emulator.step(0)

        self._repeat(wait, lambda: self._number(TIME) >= first)

    def _skip_scenes(self) -> None:
        """Emulates until Mario can be controlled: after a death, in a pipe, between stages."""
        if self._is_dying():
            self.ram[PLAYER_STATE] = DEAD  # without the animation
            self.emulator.step(0)
        if self._stage is None and self.ram[MODE] == END_OF_WORLD:
            time = self._number(TIME)
            self._repeat(lambda: self.emulator.step(0), lambda: self._number(TIME) == time)
        if 1 < self.ram[AREA_TIMER] < 0xFF:
            self.ram[AREA_TIMER] = 1

        def load() -> None:
            self.ram[STAGE_TIMER] = 0
            self.emulator.step(0)

        self._repeat(load, lambda: self.ram[PLAYER_STATE] in NO_CONTROL or self.ram[MODE] == END_OF_WORLD)

    def _repeat(self, act: Callable[[], None], condition: Callable[[], bool]) -> None:
        """Calls `act` while `condition` holds; raises EnvError if it does not cease to."""
        for _ in range(MAX_SCENE):
            if not condition():
                return
            act()
        raise EnvError(
            f"Super Mario Bros did not return to play within {MAX_SCENE} frames (world {self.ram[WORLD] + 1}, stage "
            f"{self.ram[STAGE] + 1}, player state {self.ram[PLAYER_STATE]}): its memory is not that of a game in play."
        )
