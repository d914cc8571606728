"""The channel: how processes ask each other, and what becomes of a message when one of them dies.

Every service names how its messages are delivered:

READ    A question changes nothing. The client repeats it until it is answered, by this server or by its successor.
STATE   A question for what is newer than the client has. The server holds it until there is something, or for a while.
        Only the newest counts, one question is under way, and nothing is queued.
RECORD  A question changes something once. It carries a number of the sender's that stays the same however often it is
        sent; the client repeats it until it is answered, and the handler takes each number once, by its journal.
CALL    A question is sent once, and runs at most once. Calls of one caller begin in their order; one that waits for a
        call of its own holds up nobody, so calls nest to any depth. Whoever learns that the peer is dead says so to the
        caller's side, and what was not answered raises PeerLost; nothing is sent again, to the peer or its successor.

A `Server` (channel_server.py) offers services of the first three to any number of clients (channel_client.py) over TCP.
Calls are between two processes: `Calls` (channel_calls.py) is the caller's side, `Callee` (channel_callee.py) the
callee's. Between them are a `CallWriter` and a `CallReader` for each direction: lines in shared memory (lines.py), also
where both sides are one process, or sockets over TCP (channel_ends.py).

A post is a message without an answer, of either side, and may be lost. A message is one or more frames. On sockets the
first one opens with a header of eight 64-bit words: `MAGIC`, the kind, digests of the service's name and of the layout
on which both sides must agree, the number that an answer shares with its question, and three words of the service's
own. What follows is the service's, in a layout of its own, so that it can be written and read in place. The codec makes
the messages of calls: `(number, *request)` there, `(number, *outcome)` back; `failure` and `error_of` are about errors.

Needs only the standard library.
"""

from __future__ import annotations

import enum
import hashlib
import struct
import sys
import traceback
from dataclasses import dataclass, field
from typing import NamedTuple

from echelon.errors import EchelonError, Refused, RpcException

MAGIC = 0x31_4E_48_43_48_43_45  # "ECHCHN1", little end first
NUM_WORDS = 8
HEADER = struct.Struct(f"<{NUM_WORDS}q")
MAX_REASON_BYTES = 1000
TRACEBACK_CHARACTERS = 20_000

Part = bytes | bytearray | memoryview
Own = tuple[int, int, int]  # words of the service's own, at the end of the header

NOTHING: Own = (0, 0, 0)


class Delivery(enum.Enum):
    """What becomes of a message when somebody dies or a connection breaks."""

    READ = "read"
    STATE = "state"
    RECORD = "record"
    CALL = "call"


class Kind:
    """What a message is; clients send the first two, servers all but the first. Plain numbers: an enum's are slow."""

    ASK, POST, ANSWER, REFUSED = range(1, 5)


@dataclass(frozen=True, slots=True)
class Service:
    """What is offered and asked for; equal on both sides."""

    name: str
    delivery: Delivery
    layout: int = 0  # digest of what both sides must agree on
    digest: int = field(init=False)  # the name as the header carries it

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", digest_of(self.name))


class Message(NamedTuple):
    """A question or a post, as a server gets it."""

    connection: bytes
    service: Service
    is_post: bool
    number: int
    own: Own
    frames: list[memoryview]  # the first opens with the header


def digest_of(agreed: object) -> int:
    """Sixty-four bits that differ where the representations of `agreed` do."""
    return int.from_bytes(hashlib.blake2b(repr(agreed).encode(), digest_size=8).digest(), "little", signed=True)


def header(kind: int, service: Service, number: int, own: Own = NOTHING) -> bytes:
    """A header by itself."""
    return HEADER.pack(MAGIC, kind, service.digest, service.layout, number, *own)


# How an error of a call is told.


class Refusal(Refused):
    """The callee itself, not the function that was called, says no to a request; the caller gets it as Refused."""


def failure(error: BaseException, posted: bool = False) -> tuple[str, ...]:
    """How `error`, just caught, is told to the caller; of a post nobody waits for, every error is a failure."""
    try:
        text = str(error)
    except BaseException as worse:
        text = f"(its text could not be made: {type(worse).__name__})"
    if isinstance(error, Refusal) and not posted:
        return ("refused", _printable(text))
    trace = "".join(traceback.format_exception(error))
    return ("failed", type(error).__qualname__, _printable(text), _printable(trace))


def error_of(outcome: object, where: str) -> EchelonError:
    """The error that `outcome` tells, of what was called `where`; raises Refused if it tells none."""
    match outcome:
        case (_, "refused", str(text)):
            return Refused(f"{where} was refused: {text}")
        case (_, "failed", str(kind), str(text), str(trace)):
            return RpcException(f"{where} failed with {kind}: {text}", kind, trace)
    raise Refused(f"an answer was refused: it is a {type(outcome).__name__} of no known form.")


def print_error(text: str) -> None:
    """What happens to the error of a post unless somebody listens: it is written to stderr."""
    print(text, file=sys.stderr, flush=True)


def _printable(text: str) -> str:
    """`text` as UTF-8 can say it, its end if it is long."""
    return text[-TRACEBACK_CHARACTERS:].encode(errors="replace").decode()
