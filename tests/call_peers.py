"""Callers and callees inside one process, over both forms of the channel: lines in shared memory, and TCP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import zmq

from echelon.transport.blocks import BlockPool
from echelon.transport.channel_callee import Callee
from echelon.transport.channel_calls import Future
from echelon.transport.channel_ends import CallReader, CallWriter, SocketEnd
from echelon.transport.codec import DEFAULT_LIMITS
from echelon.transport.lines import LineReader, LineWriter
from echelon.world.functions import SERVICE, Runner, Scope
from echelon.world.switchboard import MemberCalls

PATIENCE_S = 60.0
FORMS = ("line", "tcp")
SECRET = "a secret of the tests"
MAX_BYTES = 1 << 30


class Way(NamedTuple):
    """The ends of one direction."""

    writer: CallWriter
    reader: CallReader


class Ends(NamedTuple):
    """Those of a connection: requests there, answers back."""

    requests: Way
    answers: Way

    def close(self) -> None:
        for end in (*self.requests, *self.answers):
            end.close()


def line(folder: Path, name: str, blocks: bool = True) -> Way:
    """A line; without blocks, large messages go in pieces."""
    writer = LineWriter(folder, name)
    if not blocks:
        writer._pool = BlockPool(Path("/nowhere"), name, most_bytes=0)
    return Way(writer, LineReader(folder, name))


def sockets() -> Ends:
    context: zmq.Context[Any] = zmq.Context.instance()
    callee = SocketEnd.listen(context, "tcp://127.0.0.1:0", SECRET, MAX_BYTES, "caller")
    caller = SocketEnd.connect(context, callee.address, SECRET, MAX_BYTES, "caller")
    return Ends(Way(caller.writer, callee), Way(callee.writer, caller))


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_ends(form: str, shm_dir: Path) -> Iterator[Callable[[], Ends]]:
    """Makes connections of one form."""
    made: list[Ends] = []

    def make() -> Ends:
        if form == "line":
            names = (f"{len(made)}.requests", f"{len(made)}.answers")
            made.append(Ends(line(shm_dir, names[0]), line(shm_dir, names[1])))
        else:
            made.append(sockets())
        return made[-1]

    yield make
    for ends in made:
        ends.close()


@pytest.fixture
def ends(make_ends: Callable[[], Ends]) -> Ends:
    return make_ends()


class Peers:
    """Somebody who calls services of somebody else."""

    def __init__(self, ends: Ends) -> None:
        scope = Scope(__name__)
        self.services: dict[tuple[str, str], Any] = {}
        scope.groups["g"] = self.services
        self.runner = Runner(scope)
        self.calls = MemberCalls("callee", ends.requests.writer, ends.answers.reader, DEFAULT_LIMITS)
        callee = ends.requests.reader, ends.answers.writer
        self.callee = Callee("caller", *callee, self.runner, DEFAULT_LIMITS, self.ask_room)
        self.num_asked = 0
        self.callee.start()

    def ask_room(self) -> None:
        self.num_asked += 1

    def begin(self, service: Callable[..., Any], *args: Any, keep: bool = False, timeout_s: float = 60.0) -> Future:
        name = f"{len(self.services)}"
        self.services[SERVICE, name] = service
        return self.calls.begin(name, ("g", SERVICE, name, args, {}, keep), timeout_s)

    def close(self) -> None:
        self.callee.close()
        self.calls.close()


@pytest.fixture
def make_peers(make_ends: Callable[[], Ends]) -> Iterator[Callable[[], Peers]]:
    made: list[Peers] = []

    def make() -> Peers:
        made.append(Peers(make_ends()))
        return made[-1]

    yield make
    for peers in made:
        peers.close()


@pytest.fixture
def peers(make_peers: Callable[[], Peers]) -> Peers:
    return make_peers()


class Nobody:
    """A peer that takes everything in and says nothing."""

    def send(self, frames: Sequence[Any], timeout_s: float, go_on: Callable[[], bool] = lambda: False) -> bool:
        return True

    def receive(self, timeout_s: float) -> None:
        return None

    def wake(self) -> None: ...

    def close(self) -> None: ...


def received(way: Way, count: int) -> list[list[bytes]]:
    messages: list[list[bytes]] = []
    for _ in range(count):
        frames = way.reader.receive(PATIENCE_S)
        assert frames is not None
        messages.append([bytes(frame) for frame in frames])
    return messages


def no_room() -> None:
    raise AssertionError("nobody asks for room here")


def fail_with(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail
