"""The channel: requests and replies between processes, with declared delivery guarantees when one of them dies.

Every service declares how its messages are delivered:

READ    A request changes nothing. The client repeats it until it is answered, by this server or its successor.
STATE   A request for newer state than the client has. The server holds it until there is some, or for a bounded time.
        Only the newest state matters, one request is in flight, and nothing is queued.
RECORD  A request changes something exactly once. The sender numbers it, and repetitions have the
        same number. The client repeats it until it is answered; the handler's journal processes each number once.
CALL    A request is sent once and runs at most once. The calls of one caller start in order. A call that waits for a
        call of its own does not delay others, so calls nest to any depth. When a process detects that the peer is dead,
        it notifies the caller's side, and unanswered calls raise PeerLost; nothing is sent again, to the peer or its
        successor.

A `Server` (channel_server.py) offers services of the first three to any number of clients (channel_client.py) over TCP.
Calls are between two processes: `Calls` (channel_calls.py) is the caller's side, `Callee` (channel_callee.py) the
callee's. Between them are a `CallWriter` and a `CallReader` for each direction: lines in shared memory (lines.py), even
if both sides are the same process, or TCP sockets (channel_ends.py).

A post is a message without a reply, sent by either side; it may be lost. A message has one or more frames. On sockets
the first frame starts with a header of eight 64-bit words: `MAGIC`, the kind, digests of the service's name and of the
layout on which both sides must agree, the number that a reply shares with its request, and three words for the
service. The rest is in the service's own layout, so that it can be written and read in place. Calls are encoded by the
codec: `(number, *request)` to the callee, `(number, *outcome)` back; `failure` and `error_of` convert errors.

Imports only the standard library.
"""

from __future__ import annotations

import enum
import hashlib
import struct
import sys
import traceback
from dataclasses import dataclass, field
from typing import NamedTuple

from echelon.errors import EchelonError, Refused, RpcException, escaped_lines

MAGIC = 0x31_4E_48_43_48_43_45  # "ECHCHN1", little-endian
NUM_WORDS = 8
HEADER = struct.Struct(f"<{NUM_WORDS}q")
MAX_REASON_BYTES = 1000
TRACEBACK_CHARACTERS = 20_000

Part = bytes | bytearray | memoryview
Own = tuple[int, int, int]  # words for the service, at the end of the header

NOTHING: Own = (0, 0, 0)


class Delivery(enum.Enum):
    """What happens to a message when a process dies or a connection breaks."""

    READ = "read"
    STATE = "state"
    RECORD = "record"
    CALL = "call"


class Kind:
    """The kind of a message; clients send the first two, servers all but the first. Plain integers: enums are slow."""

    ASK, POST, ANSWER, REFUSED = range(1, 5)


@dataclass(frozen=True, slots=True)
class Service:
    """A service that a server offers and clients use; equal on both sides."""

    name: str
    delivery: Delivery
    layout: int = 0  # digest of the layout that both sides must share
    digest: int = field(init=False)  # digest of the name, for the header

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", digest_of(self.name))


class Message(NamedTuple):
    """A request or a post, as received by a server."""

    connection: bytes
    service: Service
    is_post: bool
    number: int
    own: Own
    frames: list[memoryview]  # the first starts with the header


def digest_of(agreed: object) -> int:
    """Returns a 64-bit digest of the repr of `agreed`."""
    return int.from_bytes(hashlib.blake2b(repr(agreed).encode(), digest_size=8).digest(), "little", signed=True)


def header(kind: int, service: Service, number: int, own: Own = NOTHING) -> bytes:
    """Returns a header."""
    return HEADER.pack(MAGIC, kind, service.digest, service.layout, number, *own)


# The errors of calls.


class Refusal(Refused):
    """The callee itself, not the called function, refuses a request; it is raised as Refused in the caller."""


def failure(error: BaseException, posted: bool = False) -> tuple[str, ...]:
    """Returns the outcome that reports `error`, just caught, to the caller; for a post, every error is a failure."""
    try:
        text = str(error)
    except BaseException as worse:
        text = f"(its message could not be formatted: {type(worse).__name__})"
    if isinstance(error, Refusal) and not posted:
        return ("refused", _printable(text))
    trace = "".join(traceback.format_exception(error))
    return ("failed", type(error).__qualname__, _printable(text), _printable(trace))


def error_of(outcome: object, where: str) -> EchelonError:
    """Returns the error in `outcome`, the reply to the call `where`; raises Refused if it contains none."""
    match outcome:
        case (_, "refused", str(text)):
            return Refused(f"{where} was refused: {text}")
        case (_, "failed", str(kind), str(text), str(trace)):
            return RpcException(f"{where} failed with {kind}: {text}", kind, trace)
    raise Refused(f"a reply was refused: it is a {type(outcome).__name__} of unknown form.")


def print_error(text: str) -> None:
    """Writes an error to stderr, its lines escaped; the default if no handler is set."""
    print(escaped_lines(text), file=sys.stderr, flush=True)


def _printable(text: str) -> str:
    """Returns `text` as valid UTF-8; only its end if it is long."""
    return text[-TRACEBACK_CHARACTERS:].encode(errors="replace").decode()
