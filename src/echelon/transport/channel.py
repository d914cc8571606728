"""The channel: how processes that share no memory ask each other, over TCP.

A `Server` (channel_server.py) offers services; a `Client` (channel_client.py) asks them. Every service names how its
messages are delivered:

READ    A question changes nothing. The client repeats it until it is answered, by this server or by its successor.
STATE   A question for what is newer than the client has. The server holds it until there is something, or for a while.
        Only the newest counts, one question is under way, and nothing is queued.
RECORD  A question changes something once. It carries a number of the sender's that stays the same however often it is
        sent; the client repeats it until it is answered, and the handler takes each number once, by its journal.

A post is a message without an answer, of either side, and may be lost. A message is one or more frames. The first one
opens with a header of eight 64-bit words: `MAGIC`, the kind, digests of the service's name and of the layout on which
both sides must agree, the number that an answer shares with its question, and three words of the service's own. What
follows is the service's, in a layout of its own, so that it can be written and read in place.

Needs only the standard library.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from dataclasses import dataclass, field
from typing import NamedTuple

MAGIC = 0x31_4E_48_43_48_43_45  # "ECHCHN1", little end first
NUM_WORDS = 8
HEADER = struct.Struct(f"<{NUM_WORDS}q")
MAX_REASON_BYTES = 1000

Part = bytes | bytearray | memoryview
Own = tuple[int, int, int]  # words of the service's own, at the end of the header

NOTHING: Own = (0, 0, 0)


class Delivery(enum.Enum):
    """What becomes of a message when somebody dies or a connection breaks."""

    READ = "read"
    STATE = "state"
    RECORD = "record"


class Kind(enum.IntEnum):
    """What a message is; clients send the first two, servers all but the first."""

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


def header(kind: Kind, service: Service, number: int, own: Own = NOTHING) -> bytearray:
    """A header by itself."""
    words = bytearray(HEADER.size)
    HEADER.pack_into(words, 0, MAGIC, kind, service.digest, service.layout, number, *own)
    return words
