"""The lobby: where the first worker says what its environment observes and does, before a run can be laid out.

For learners whose machine has no environment. Waits for: a worker that arrives; it is told to wait, and finds the door
at the same address when the run has begun.
"""

from __future__ import annotations

from collections.abc import Callable

from echelon import config_io
from echelon.config import TrainConfig
from echelon.errors import Refused
from echelon.roles.door import check_protocol, spaces_of
from echelon.roles.own import StateLayout
from echelon.schema import Spaces, action_leaf, space_leaves
from echelon.transport.door import Door
from echelon.transport.episode_wire import Arrive, Ask, Refusal, Stranger, Task, Wait, from_worker, pack
from echelon.transport.secret import secret_from_environment

MAX_BYTES = 1 << 20
LOOK_S = 1.0


def await_spaces(config: TrainConfig, own: StateLayout | None, tell: Callable[[str], None]) -> tuple[Spaces, str]:
    """The spaces of the first worker, and the address at which it will look for the door."""
    task = Task(config_io.to_json(config), own.to_json() if own is not None else None)
    door = Door("workers", config.workers.address, secret_from_environment(), MAX_BYTES)
    try:
        tell(f"waiting at {door.address.removeprefix('tcp://')} for the first worker, for its spaces")
        while True:
            message = door.receive()
            if message is None:
                door.sleep(LOOK_S)
                continue
            connection, frames = message
            try:
                spaces = _answer(door, connection, [frame.buffer for frame in frames], task)
            except Refused as error:
                door.refuse(connection, *pack(Refusal(str(error))))
                continue
            if spaces is not None:
                return spaces, door.address
    finally:
        door.close()


def _answer(door: Door, connection: bytes, frames: list[memoryview], task: Task) -> Spaces | None:
    message = from_worker(frames)
    if isinstance(message, Ask):
        check_protocol(message.protocol)
        door.send(connection, *pack(task))
        return None
    if not isinstance(message, Arrive):
        door.send(connection, *pack(Stranger()))
        return None
    check_protocol(message.protocol)
    spaces = spaces_of(message)
    space_leaves(spaces.observation)
    action_leaf(spaces.action)
    door.send(connection, *pack(Wait()))
    return spaces
