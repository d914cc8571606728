"""The exceptions of Echelon. A message states what failed, where, the value and the remedy."""

from __future__ import annotations

import functools
import sysconfig
import traceback
from pathlib import Path

OURS = str(Path(__file__).parent)


class EchelonError(Exception):
    """Base class of all exceptions that Echelon raises deliberately."""


class ConfigError(EchelonError):
    """The user gave an invalid value; the command exits with code 2."""


class UnsuitableEnvError(ConfigError):
    """An environment was created, but its type, spaces or autoreset mode are not supported."""


class EnvError(EchelonError):
    """An environment raised or violates its interface; the message says where, with the traceback if it raised."""


class DivergedError(EchelonError):
    """Observations, rewards, the loss or the weights contain NaN or infinity."""


class RunError(EchelonError):
    """A failure that no restart can fix ended the run; the message has the remote traceback."""


class ExportError(EchelonError):
    """A network cannot be exported, or the exported file does not compute what the policy computes."""


class TransportError(EchelonError):
    """A peer or a shared-memory segment failed; subclasses distinguish how."""


class TransportTimeout(TransportError):
    """A peer did not reply within the timeout."""


class PeerLost(TransportError):
    """A peer ended or disconnected while a caller waited for it."""


class Refused(TransportError):
    """A frame, a peer or a call violates the wire protocol and was refused."""


class RpcException(EchelonError):
    """A function failed in another process; `kind` names the exception, `remote_traceback` is its traceback there."""

    def __init__(self, text: str, kind: str, remote_traceback: str) -> None:
        super().__init__(text, kind, remote_traceback)  # all three: pickle recreates the exception from `args`
        self.kind = kind
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        return f"{self.args[0]}\n{self.remote_traceback}"


class WorldStopped(SystemExit):
    """The world ended while this process waited in it; if uncaught, the process exits without a traceback.

    It does not derive from Exception, so that loops with `except Exception` end, too.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = 0


class WorldError(EchelonError, RuntimeError):
    """The world or one of its groups was used incorrectly."""


class GroupKeyError(EchelonError, KeyError):
    """A key of a group is missing, already taken, or owned by another process."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # KeyError would show the quoted repr


def escaped(text: str) -> str:
    """Returns `text` with every character that is not printable, newlines included, as a Python escape sequence.

    Text of a peer passes through it before it becomes part of a message: a terminal would interpret its control
    characters, and its newlines could forge other messages.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def escaped_lines(text: str) -> str:
    """Returns `text` with each of its lines escaped. All text for a terminal or a log passes through it."""
    return text if text.isprintable() else "\n".join(map(escaped, text.split("\n")))


def user_line(error: BaseException) -> str:
    """Returns where `error` was raised in the user's code, "nets.py:3 in make: return x"; else "".

    It is the innermost line outside Echelon and installed packages.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((OURS, "<", *_libraries())):
            return f"{frame.filename}:{frame.lineno} in {frame.name}{f': {frame.line}' if frame.line else ''}"
    return ""


def raised_at(error: BaseException) -> str:
    """Returns `user_line` in brackets, after a space, to end a clause; "" if there is none."""
    line = user_line(error)
    return f" ({line})" if line else ""


@functools.cache
def _libraries() -> tuple[str, ...]:
    return tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))


def diverged(what: str, learning_rate: float | None) -> DivergedError:
    """Returns the error for a training that diverged by `what`, as opposed to an environment that emits NaN."""
    lower = "the learning rate"
    if learning_rate is not None:
        lower = f"--optimizer.learning-rate (now {learning_rate:g}) or --optimizer.clip-norm"
    return DivergedError(f"{what}. Lower {lower}, or scale the rewards.")
