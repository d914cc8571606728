"""What workers and the gateway say to each other: messages with whole pieces of episodes, and answers with weights.

A worker has one message under way at a time. Those that bring something are records of the channel, numbered from 1
up: the gateway answers every message once it is dealt with, and one that comes again with its answer alone. When the
run ends, it posts that to all workers.
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
PROTOCOL = 1  # goes up when a message changes its meaning
LIMITS = Limits(total_bytes=1 << 30)
MAX_NAME = 64  # characters of a worker's name
Count = Annotated[int, msgspec.Meta(ge=-(1 << 40), le=1 << 40)]  # so that sums of them fit into 64 bits


class _Message(msgspec.Struct, tag_field="kind", forbid_unknown_fields=True):
    """One message; its class is its kind."""


class Ask(_Message, tag="ask"):
    """A worker asks what is trained; the answer is `Task`."""

    protocol: int


class Arrive(_Message, tag="arrive"):
    """A worker is there, with environments of these spaces; the answer is `Welcome`."""

    protocol: int
    worker: str
    spaces: dict[str, Any]
    own: bool  # whether it brings a policy object of the user's


class Piece(_Message, tag="piece"):
    """Steps of an episode; the answer is `Next`."""

    worker: str
    number: Count
    has_version: Count  # of the weights that the worker has
    observation: list[Any]  # leaves (L + 1, ...); a stack of images as {"frames": (F, ...), "numbers": (L + 1, S)}
    action: Any  # (L, ...)
    reward: Any  # (L,)
    version: Any  # (L,) of the weights that chose each action
    num_old: Count  # steps at its start that the piece before it had too
    terminated: bool
    truncated: bool
    episode_return: float  # up to here
    episode_length: Count


class Score(_Message, tag="score"):
    """What an evaluation episode came to; the answer is `Next`."""

    worker: str
    number: Count
    has_version: Count
    version: Count  # of the weights that it began with
    episode_return: float
    episode_length: Count


class Sign(_Message, tag="sign"):
    """A worker is alive, at an episode that takes long; there is no answer."""

    worker: str


class Leave(_Message, tag="leave"):
    """A worker goes, and will not come again; there is no answer."""

    worker: str


class Task(_Message, tag="task"):
    """What is trained: the configuration, and the layout of a user's own policy where it is one."""

    train: dict[str, Any]
    own: list[Any] | None


class Welcome(_Message, tag="welcome"):
    """A worker may begin; all of its first episodes are learned from."""

    place: int  # counts workers from 0: where it stands on a ladder of exploration
    version: int
    weights: Any  # (nbytes,) as the board holds them
    env_steps: int  # of the run so far


class Next(_Message, tag="next"):
    """What a message brought is in the learner's hands; the newest weights, unless the worker has them."""

    evaluates: bool  # whether the next episode is an evaluation
    version: int
    weights: Any | None
    env_steps: int


class Wait(_Message, tag="wait"):
    """Not yet: the learner is still starting."""


class Stranger(_Message, tag="stranger"):
    """This run does not know the worker: the learner was started anew. It has to arrive again."""


class Over(_Message, tag="over"):
    """The run has reached its end."""


class Stopped(_Message, tag="stopped"):
    """The run was stopped before its end: it may be gone on with, at this address."""


FromWorker = Ask | Arrive | Piece | Score | Sign | Leave
FromGateway = Task | Welcome | Next | Wait | Stranger | Over | Stopped

TASK = Service("the task", Delivery.READ)  # Ask, Arrive
EPISODES = Service("episodes", Delivery.RECORD)  # Piece, Score; posted: Sign, Leave, Over, Stopped


def socket_name(worker: str) -> bytes:
    """The name of a worker's socket, which a gateway that knows the worker finds it by."""
    return b"w" + hashlib.blake2b(worker.encode(), digest_size=16).digest()


def pack(message: FromWorker | FromGateway) -> list[Buffer]:
    """The frames of `message`, to follow a header, which has its number; buffers are views of its arrays."""
    fields = {name: getattr(message, name) for name in message.__struct_fields__ if name != "number"}
    return encode({"kind": message.__struct_config__.tag, **fields}, LIMITS)


def from_worker(asked: Asked) -> FromWorker:
    """The message of a worker; raises Refused on anything else."""
    number = {} if asked.is_post or asked.service != EPISODES else {"number": asked.number}
    kinds = Sign | Leave if asked.is_post else Ask | Arrive if asked.service == TASK else Piece | Score
    message: FromWorker = _unpack(asked.frames[1:], kinds, number)
    worker = getattr(message, "worker", "")
    if len(worker) > MAX_NAME:
        raise Refused(
            f"a message of a worker was refused: its name has {len(worker)} characters, {MAX_NAME} are allowed."
        )
    return message


def from_door(frames: Sequence[Buffer]) -> FromGateway:
    """What the gateway says, in the frames after the header."""
    message: FromGateway = _unpack(frames, FromGateway, {})
    return message


def _unpack(frames: Sequence[Buffer], kinds: Any, more: dict[str, int]) -> Any:
    tree = decode(frames, LIMITS)
    try:
        return msgspec.convert(tree | more if isinstance(tree, dict) else tree, kinds)
    except (msgspec.ValidationError, TypeError) as error:
        raise Refused(f"a message was refused: {error}.") from None
