"""What the head and the agents of other hosts say to each other.

Control: an agent joins (a read, repeated until it is let in), asks what it is to do (a state: commands behind those it
has), reports what happened (records, numbered from 1 up) and posts what its roles show. Bulk: it asks for what is newer
than its weights and grants (a state), and brings slots (records, `transport.slot_wire`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from echelon.engines.process import Failure
from echelon.errors import Refused
from echelon.transport.channel import HEADER, Delivery, Part, Service

MAX_BYTES = 64 << 20  # of a frame of control
QUEUED_BYTES = 16 << 20  # of slots of a host under way
MAX_NAME = 64

Reported = Literal["message", "env_restarted"]  # services of the coordinator that roles elsewhere may ask

JOIN = Service("join", Delivery.READ)  # JoinRequest -> Assignment
COMMANDS = Service("commands", Delivery.STATE)  # own words: commands taken, the token -> list of commands
EVENTS = Service("events", Delivery.RECORD)  # own words: 0, the token; list of events -> nothing
GAUGES = Service("gauges", Delivery.STATE)  # posted; own words: 0, the token; rows by role
NEWER = Service("weights and grants", Delivery.STATE)  # own words: version, first stream, token; known grants


class JoinRequest(msgspec.Struct):
    """A host that wants to take part."""

    version: str  # of Echelon
    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
    cores: int


class Assignment(msgspec.Struct):
    """What a host needs to know before its first role starts; with `wait` only the first fields hold."""

    wait: bool = False  # the run is not ready: ask again
    name: str = ""  # of the host in this run; empty until it has a place
    missing: int = 0  # hosts that have not joined yet
    token: int = 0
    lease_s: float = 0.0
    bulk: str = ""  # the address of the carrier, whose host is the one that was joined
    first: int = 0  # actor whose slots are stream 0 of the host's ring
    streams: int = 0
    slots: int = 0  # of each stream
    slot: list[Any] = []  # SlotBytes
    weights: int = 0  # bytes
    preload: list[str] = []


class Start(msgspec.Struct, tag="start"):
    """Start a role."""

    spec: dict[str, Any]  # ProcessSpec


class Signal(msgspec.Struct, tag="signal"):
    """Send a signal to a role."""

    name: str
    number: int


class Dismiss(msgspec.Struct, tag="dismiss"):
    """The run is over, or has no use for the host; why."""

    why: str


class Started(msgspec.Struct, tag="started"):
    """A role runs."""

    name: str
    pid: int


class Ended(msgspec.Struct, tag="ended"):
    """A role ended; as `Exit`."""

    name: str
    pid: int
    code: int
    signal: Annotated[int, msgspec.Meta(ge=0, le=64)]
    ended_with: str
    log: str  # the end of it, where nothing else says why
    failure: Failure | None


class Report(msgspec.Struct, tag="report"):
    """What a role has to say to the coordinator, and by which of its services."""

    function: Reported
    text: str


class Left(msgspec.Struct, tag="left"):
    """The host leaves; all of its roles have ended."""

    why: str


Command = Start | Signal | Dismiss
Event = Started | Ended | Report | Left


def pack(value: Any) -> bytes:
    """A message, to follow a header."""
    return msgspec.msgpack.encode(value)


def question(value: Any) -> list[Part]:
    """The frames of a message as a client sends it, with room for its header."""
    return [bytearray(HEADER.size), pack(value)]


def unpack(frames: Sequence[memoryview], kind: Any) -> Any:
    """The message in the frame after the header; raises Refused on anything else."""
    if len(frames) != 2:
        raise Refused(f"a message between hosts was refused: {len(frames)} frames, not 2.")
    try:
        return msgspec.msgpack.decode(frames[1], type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(f"a message between hosts was refused: {error}.") from None
