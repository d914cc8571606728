"""What members say to each other: a request, and how it went."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass
from typing import Any

from echelon.errors import EchelonError, Refused
from echelon.world.directory import Member

TRACEBACK_CHARACTERS = 20_000


class RemoteError(EchelonError):
    """A handler in another process raised; `kind` is its exception's name, `remote_traceback` where it happened."""

    def __init__(self, text: str, kind: str, remote_traceback: str) -> None:
        super().__init__(f"{text}\n{remote_traceback}")
        self.kind = kind
        self.remote_traceback = remote_traceback


class Refusal(Refused):
    """The world itself, not a handler, says no to a request; the caller gets it as Refused."""


@dataclass(frozen=True, slots=True)
class Request:
    """A call (`number` above 0, its answer carries it) or a post (0)."""

    number: int
    sender: str
    incarnation: str
    function: str
    args: tuple[Any, ...]

    def to_wire(self) -> tuple[Any, ...]:
        return (self.number, self.sender, self.incarnation, self.function, self.args)

    @classmethod
    def from_wire(cls, message: object) -> Request:
        """The request another process sent; raises Refused on anything else."""
        match message:
            case (int(number), str(sender), str(incarnation), str(function), tuple(args)):
                return cls(number, sender, incarnation, function, args)
        raise Refused(f"a message was refused: it is no request but a {type(message).__name__}.")


@dataclass(slots=True)
class Pending:
    """A call that waits for its answer."""

    member: Member
    function: str
    settled: bool = False
    value: Any = None
    error: EchelonError | None = None

    def settle(self, outcome: object) -> None:
        """Takes what the peer said; raises Refused if that is no answer."""
        where = f"{self.function}() in {self.member.name!r}"
        match outcome:
            case (_, "answer", value):
                self.value = value
            case (_, "refused", str(text)):
                self.error = Refused(f"{where} was refused: {text}")
            case (_, "failed", str(kind), str(text), str(trace)):
                self.error = RemoteError(f"{where} failed with {kind}: {text}", kind, trace)
            case _:
                raise Refused(f"an answer was refused: it is a {type(outcome).__name__} of no known form.")
        self.settled = True


def failure(error: Exception, posted: bool = False) -> tuple[str, ...]:
    """How `error`, just caught, is told to the caller; of a post nobody waits for, every error is a failure."""
    if isinstance(error, Refusal) and not posted:
        return ("refused", _printable(str(error)))
    return ("failed", type(error).__qualname__, _printable(str(error)), _printable(traceback.format_exc()))


def print_error(text: str) -> None:
    """What happens to the error of a post unless somebody listens: it is written to stderr."""
    print(text, file=sys.stderr, flush=True)


def _printable(text: str) -> str:
    """`text` as UTF-8 can say it, its end if it is long."""
    return text[-TRACEBACK_CHARACTERS:].encode(errors="replace").decode()
