"""The messages between the head and the agents of other hosts.

Control: an agent joins (a read, repeated until the run is ready), requests commands (a state: those after the ones it
has), reports events (records, numbered from 1), posts the gauges of its roles, and passes on what its learner asks of
the learners' store (records). The head recognizes it by its connection. Bulk: it requests newer weights and grants (a
state), and sends slots (records, `transport.slot_wire`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from echelon.engines.process import Failure
from echelon.errors import Refused
from echelon.transport.channel import HEADER, Delivery, Part, Service

MAX_BYTES = 64 << 20  # of a frame of control
QUEUED_BYTES = 16 << 20  # of a host's slots in flight
WEIGHTS_FRAME_BYTES = 1 << 20  # weights are sent in frames: while one is on the link, the next is encrypted
MAX_NAME = 64

Reported = Literal["message", "env_restarted"]  # services of the coordinator that roles of other hosts may use

JOIN = Service("join", Delivery.READ)  # JoinRequest -> Assignment
COMMANDS = Service("commands", Delivery.STATE)  # own words: number of commands received -> list of commands
EVENTS = Service("events", Delivery.RECORD)  # list of events -> nothing
GAUGES = Service("gauges", Delivery.STATE)  # posted; rows by role
STORE = Service("store", Delivery.RECORD)  # operation and arguments of the learners' store -> its result
# A request has triples (stream, its token, its grant) of the host's streams, a reply pairs (stream, its grant). Own
# words of a request: version; of a reply: version, environment steps of the run.
NEWER = Service("weights and grants", Delivery.STATE)


class JoinRequest(msgspec.Struct):
    """Asks for a place in the run."""

    version: str  # of Echelon
    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
    cores: int
    cpus: Annotated[str, msgspec.Meta(max_length=4096, pattern="^[^/]*/[0-9a-f]+$")] = "/0"  # `hosts.cpus.own_cpus`
    is_checked: bool = False  # `Assignment.check` has succeeded on it
    failure: str = ""  # why the check failed


class Assignment(msgspec.Struct):
    """What a host needs to know before its first role starts; with `wait` only the first fields hold."""

    wait: bool = False  # the run is not ready: ask again
    over: str = ""  # why the run has ended while the host waited: leave
    name: str = ""  # of the host in this run; empty until it has a place
    missing: str = ""  # what the start of the run waits for
    lease_s: float = 0.0
    num_actors: int = 0  # that the host has at first
    bulk: str = ""  # the carrier's address; only its port counts, the host is the one that was joined
    streams: int = 0  # of the whole run, as any actor may come to this host
    slots: int = 0  # of each stream
    slot: list[Any] = []  # SlotBytes
    weights: int = 0  # bytes
    has_bulk: bool = True  # False: this host has a learner, which takes the trajectories of its actors
    act_bytes: int = 0  # of the act requests of one actor, with central acting
    preload: list[str] = []
    check: dict[str, Any] = {}  # ProcessSpec of a role that must succeed on the host before it gets a place


class Start(msgspec.Struct, tag="start"):
    """Start a role."""

    spec: dict[str, Any]  # ProcessSpec
    stream: int | None = None  # of an actor
    slot: int | None = None  # the number of its next slot, if the actor is new on this host
    token: int = 0  # proves to the carrier that this host owns the stream now


class Signal(msgspec.Struct, tag="signal"):
    """Send a signal to a role."""

    name: str
    number: int


class Release(msgspec.Struct, tag="release"):
    """End an actor, which starts on another host; discard those of its slots that the carrier has not received."""

    name: str


class Dismiss(msgspec.Struct, tag="dismiss"):
    """Leave: the run is over."""

    why: str


class Started(msgspec.Struct, tag="started"):
    """A role has started."""

    name: str
    pid: int


class Ended(msgspec.Struct, tag="ended"):
    """A role has ended; the fields are those of `Exit`."""

    name: str
    pid: int
    code: int
    signal: Annotated[int, msgspec.Meta(ge=0, le=64)]
    ended_with: str
    failure: Failure | None


class Report(msgspec.Struct, tag="report"):
    """A role's report to the coordinator, and the service of the coordinator that it is for."""

    function: Reported
    text: str


class Logged(msgspec.Struct, tag="logged"):
    """What a role has written to its log since the last such event."""

    name: str
    text: bytes


class Left(msgspec.Struct, tag="left"):
    """The host leaves; all of its roles have ended."""

    why: str


Command = Start | Signal | Release | Dismiss
Event = Started | Ended | Report | Logged | Left


def pack(value: Any) -> bytes:
    """Returns the frame of a message, which follows the header."""
    return msgspec.msgpack.encode(value)


def request_frames(value: Any) -> list[Part]:
    """Returns the frames of a request, with room for the header."""
    return [bytearray(HEADER.size), pack(value)]


def unpack(frames: Sequence[memoryview], kind: Any) -> Any:
    """Returns the message in the frame after the header; raises Refused if it is malformed."""
    if len(frames) != 2:
        raise Refused(f"a message between hosts was refused: {len(frames)} frames, not 2.")
    try:
        return msgspec.msgpack.decode(frames[1], type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(f"a message between hosts was refused: {error}.") from None
