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
