"""The NES emulator of the package nes-py, through its compiled library, and the ROM of gym-super-mario-bros.

Neither package is imported: both need gym, the predecessor of gymnasium, and fail with NumPy 2. Only two of their files
are used, which are looked up without running code of the packages.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import math
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from echelon.errors import ConfigError

Array = np.ndarray[Any, Any]
INSTALL = "pip install --no-deps nes-py==8.2.1 gym-super-mario-bros==7.4.0 (it compiles, so it needs g++)"
ROM = "_roms/super-mario-bros.nes"
RAM_SIZE = 0x800
SCREEN_SHAPE = (240, 256, 4)  # blue, green, red and an unused byte
HANDLE = ctypes.c_void_p
# The functions of the library: their arguments and results.
FUNCTIONS: dict[str, tuple[list[Any], Any]] = {
    "Initialize": ([ctypes.c_wchar_p], HANDLE),
    "Controller": ([HANDLE, ctypes.c_uint], HANDLE),
    "Screen": ([HANDLE], HANDLE),
    "Memory": ([HANDLE], HANDLE),
    "Reset": ([HANDLE], None),
    "Step": ([HANDLE], None),
    "Backup": ([HANDLE], None),
    "Restore": ([HANDLE], None),
    "Close": ([HANDLE], None),
}


class Emulator:
    """An NES that plays Super Mario Bros. A call of `step` releases the GIL, so that threads run in parallel.

    `ram` is its memory and `screen` its picture, (240, 256, 4) as blue, green, red and an unused byte. Both are views:
    they show the current frame, and changes of `ram` change the game. References to them must not outlive `close`.
    """

    def __init__(self) -> None:
        self._library = load_library()
        # The library casts every character to a byte, so characters must be the bytes of the path.
        handle = self._library.Initialize(os.fsencode(find_file("gym_super_mario_bros", ROM)).decode("latin-1"))
        self._close = weakref.finalize(self, self._library.Close, handle)
        self._handle = HANDLE(handle)
        self._step = self._library.Step
        self._buttons = _view(self._library.Controller(handle, 0), 1)
        self.ram = _view(self._library.Memory(handle), RAM_SIZE)
        pixels = _view(self._library.Screen(handle), math.prod(SCREEN_SHAPE))
        self.screen: Array = np.frombuffer(pixels, np.uint8).reshape(SCREEN_SHAPE)
        self._library.Reset(self._handle)

    def step(self, buttons: int) -> None:
        """Emulates one frame, with the buttons pressed whose bits are set."""
        self._buttons[0] = buttons
        self._step(self._handle)

    def backup(self) -> None:
        """Saves the state, in place of the one saved before: there is one place for it."""
        self._library.Backup(self._handle)

    def restore(self) -> None:
        """Returns to the saved state."""
        self._library.Restore(self._handle)

    def close(self) -> None:
        self.ram, self.screen = memoryview(bytearray(self.ram)), self.screen.copy()  # the last frame
        self._close()

    @property
    def is_closed(self) -> bool:
        return not self._close.alive


def _view(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


@functools.cache
def load_library() -> ctypes.CDLL:
    """Loads the library of nes-py; raises ConfigError if it is missing, or of a version with another interface."""
    path = find_file("nes_py", "lib_nes_env*.so")
    try:
        library = ctypes.CDLL(path)
        for name, (arguments, result) in FUNCTIONS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, result
    except (OSError, AttributeError) as error:
        raise ConfigError(f"the NES emulator {path} cannot be used ({error}): {INSTALL}.") from error
    return library


def find_file(package: str, pattern: str) -> str:
    """Returns the path of a file of an installed package, without importing it; ConfigError if it is not installed."""
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    for path in (path for folder in folders or () for path in sorted(Path(folder).glob(pattern))):
        return str(path)
    missing = f"{package} has no file {pattern}" if folders else f"{package} is not installed"
    raise ConfigError(f"Super Mario Bros needs the packages nes-py and gym-super-mario-bros ({missing}): {INSTALL}.")
