"""How a process ends that is still in its world: with which error, or by `exit`.

A child of multiprocessing ends with its error in flight. A plain process (`python script.py`) has lost it before
anything of ours runs: of an error that nobody caught `sys.last_value` is left, of `exit()` nothing. So `exit`, `quit`
and `sys.exit` note what they raise; a bare `raise SystemExit` in a plain process cannot be told from its normal end.
"""

from __future__ import annotations

import builtins
import dis
import functools
import multiprocessing
import sys
import threading
from collections.abc import Callable
from typing import Any


class Exit:
    """A call of `exit`, and the outermost frame of the program, that of the script."""

    def __init__(self, error: SystemExit) -> None:
        self.error = error
        self._frame = sys._getframe()
        while self._frame.f_back is not None:
            self._frame = self._frame.f_back

    @property
    def was_caught(self) -> bool:
        """Whether the program came to its end all the same: what that frame did last was to return."""
        return dis.opname[self._frame.f_code.co_code[self._frame.f_lasti]].startswith("RETURN")


_noted: Exit | None = None
_is_noting = False


def note_exits() -> None:
    """From now on `ending_error` knows of `exit` in a plain process."""
    global _is_noting
    if _is_noting or multiprocessing.parent_process() is not None or hasattr(sys, "ps1"):
        return
    _is_noting = True
    for module, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
        if hasattr(module, name):  # `python -S` has no others than that of sys
            setattr(module, name, _noting(getattr(module, name)))


def ending_error() -> BaseException | None:
    """What ends this process, asked while it ends; None if it has come to its end."""
    if (error := sys.exc_info()[1]) is not None:
        return error
    if hasattr(sys, "ps1"):  # at a prompt errors end nothing
        return None
    if isinstance(uncaught := getattr(sys, "last_value", None), BaseException):
        return uncaught
    return None if _noted is None or _noted.was_caught else _noted.error


def _noting(leave: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(leave)
    def noting(*args: Any, **kwargs: Any) -> Any:
        global _noted
        try:
            return leave(*args, **kwargs)
        except SystemExit as error:
            if threading.current_thread() is threading.main_thread():  # another thread ends itself alone
                _noted = Exit(error)
            raise

    return noting
