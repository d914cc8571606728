"""The messages between workers and the gateway: workers send pieces of episodes, and the replies carry weights.

A worker has one request in flight at a time. Requests with data (`EpisodePiece`, `Score`) are records of the channel,
numbered from 1: the gateway replies once it has processed a request, and answers a repeated request without processing
it again.
When the run ends, the gateway posts `RunEnded` or `Stopped` to all workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from echelon.errors import Refused
from echelon.transport.channel import Delivery, Service
from echelon.transport.channel import Message as Asked
from echelon.transport.codec import Buffer, Limits, decode, encode

Array = np.ndarray[Any, Any]
LIMITS = Limits(total_bytes=1 << 30)
MAX_NAME = 64  # characters of a worker's name
Count = Annotated[int, msgspec.Meta(ge=-(1 << 40), le=1 << 40)]  # so that sums of them fit into 64 bits


class _Message(msgspec.Struct, tag_field="kind", forbid_unknown_fields=True):
    """A message; its class determines its kind."""


class TaskRequest(_Message, tag="ask"):
    """A worker asks what the run trains; the reply is `Task`."""

    release: str  # the worker's version of Echelon


class Register(_Message, tag="arrive"):
    """A worker registers, with the spaces of its environments; the reply is `Welcome`."""

    release: str  # the worker's version of Echelon
    worker: str
    spaces: dict[str, Any]
    own: bool  # whether it acts with a policy object of the user's


class EpisodePiece(_Message, tag="piece"):
    """Consecutive steps of an episode; the reply is `Next`."""

    worker: str
    number: Count
    has_version: Count  # version of the weights that the worker has
    observation: list[Any]  # leaves (L + 1, ...); a stack of images as {"frames": (F, ...), "numbers": (L + 1, S)}
    action: Any  # (L, ...)
    reward: Any  # (L,)
    version: Any  # (L,) version of the weights that chose each action
    num_old: Count  # steps at its start that the previous piece contained too
    terminated: bool
    truncated: bool
    episode_return: float  # of the episode so far
    episode_length: Count


class Score(_Message, tag="score"):
    """The result of an evaluation episode; the reply is `Next`."""

    worker: str
    number: Count
    has_version: Count
    version: Count  # version of the weights that the episode began with
    episode_return: float
    episode_length: Count


class Heartbeat(_Message, tag="sign"):
    """The heartbeat of a worker during a long episode; there is no reply."""

    worker: str


class Leave(_Message, tag="leave"):
    """A worker leaves for good; there is no reply."""

    worker: str


class Task(_Message, tag="task"):
    """What the run trains: the configuration and, for a policy of the user's, its layout."""

    train: dict[str, Any]
    own: list[Any] | None


class Welcome(_Message, tag="welcome"):
    """A worker may begin; its first episodes are training episodes, not evaluations."""

    place: int  # index of the worker from 0, which selects its exploration rate
    version: int
    weights: Any  # (nbytes,) in the layout of the weights board
    env_steps: int  # of the run so far


class Next(_Message, tag="next"):
    """The learner has received the data; carries the newest weights, unless the worker has them already."""

    evaluates: bool  # whether the next episode is an evaluation
    version: int
    weights: Any | None
    env_steps: int


class Wait(_Message, tag="wait"):
    """The worker must try again later: the learner is still starting."""


class UnknownWorker(_Message, tag="stranger"):
    """The gateway does not know the worker, because the learner was restarted. The worker must register again."""


class RunEnded(_Message, tag="over"):
    """The run is complete."""


class Stopped(_Message, tag="stopped"):
    """The run was stopped before its end; it may be resumed at this address."""


FromWorker = TaskRequest | Register | EpisodePiece | Score | Heartbeat | Leave
FromGateway = Task | Welcome | Next | Wait | UnknownWorker | RunEnded | Stopped

TASK = Service("the task", Delivery.READ)  # Ask, Arrive
EPISODES = Service("episodes", Delivery.RECORD)  # Piece, Score; posted: Sign, Leave, Over, Stopped


def socket_name(worker: str) -> bytes:
    """Returns the routing id of a worker's socket, by which the gateway addresses the worker."""
    return b"w" + hashlib.blake2b(worker.encode(), digest_size=16).digest()


def pack(message: FromWorker | FromGateway) -> list[Buffer]:
    """Returns the frames of `message` after the header, which carries its number; buffers are views of its arrays."""
    fields = {name: getattr(message, name) for name in message.__struct_fields__ if name != "number"}
    return encode({"kind": message.__struct_config__.tag, **fields}, LIMITS)


def from_worker(asked: Asked) -> FromWorker:
    """Returns the decoded message of a worker; raises Refused for anything else."""
    number = {} if asked.is_post or asked.service != EPISODES else {"number": asked.number}
    kinds = (
        Heartbeat | Leave
        if asked.is_post
        else TaskRequest | Register
        if asked.service == TASK
        else EpisodePiece | Score
    )
    message: FromWorker = _unpack(asked.frames[1:], kinds, number)
    worker = getattr(message, "worker", "")
    if len(worker) > MAX_NAME or not worker.isprintable():
        raise Refused(
            f"a worker's message was refused: its name has {len(worker)} characters, at most {MAX_NAME} are allowed, "
            "all of them printable."
        )
    return message


def from_gateway(frames: Sequence[Buffer]) -> FromGateway:
    """Returns the gateway's message, decoded from the frames after the header."""
    message: FromGateway = _unpack(frames, FromGateway, {})
    return message


def _unpack(frames: Sequence[Buffer], kinds: Any, more: dict[str, int]) -> Any:
    tree = decode(frames, LIMITS)
    try:
        return msgspec.convert(tree | more if isinstance(tree, dict) else tree, kinds)
    except (msgspec.ValidationError, TypeError) as error:
        raise Refused(f"a message was refused: {error}.") from None
