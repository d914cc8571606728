"""The exception tree: every error says what, where, the value and the remedy."""

from __future__ import annotations


class EchelonError(Exception):
    """The root of everything Echelon raises on purpose."""


class ConfigError(EchelonError):
    """A value the user gave cannot work; the command line ends with exit code 2."""


class EnvError(EchelonError):
    """An environment raised; the message names actor, environment index, seed, step, and carries the traceback."""


class DivergedError(EchelonError):
    """A NaN or infinity reached observations, rewards, the loss or the weights."""


class RunError(EchelonError):
    """A run ended by a failure that no restart can mend; carries the remote traceback."""


class TransportError(EchelonError):
    """A peer or a segment failed; subclasses say how."""


class TransportTimeout(TransportError):
    """A peer did not answer in time."""


class PeerLost(TransportError):
    """A peer left while somebody waited for it."""


class Refused(TransportError):
    """A frame, a peer or a call was refused by the rules of the wire."""


class RpcException(EchelonError):
    """A function failed in another process; `kind` is its exception's name, `remote_traceback` where it happened."""

    def __init__(self, text: str, kind: str, remote_traceback: str) -> None:
        super().__init__(text, kind, remote_traceback)  # all of them: pickle makes it anew from these
        self.kind = kind
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        return f"{self.args[0]}\n{self.remote_traceback}"


class WorldStopped(SystemExit):
    """The world has ended while somebody waited in it; uncaught, it ends the process quietly.

    It is no Exception: loops that survive errors shall end, too.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = 0


class WorldError(EchelonError, RuntimeError):
    """The world or a group of it was used in a way that it does not allow."""


class GroupKeyError(EchelonError, KeyError):
    """A key of a group is missing, taken, or somebody else's."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # KeyError would show the quoted repr


def diverged(what: str, learning_rate: float | None) -> DivergedError:
    """The error of a training in which `what` happened: no environment is to blame for it."""
    lower = "the learning rate"
    if learning_rate is not None:
        lower = f"--optimizer.learning-rate (now {learning_rate:g}) or --optimizer.clip-norm"
    return DivergedError(f"{what}. Lower {lower}, or scale the rewards.")
