"""Nodes in real processes: calls, posts, deaths, old incarnations, hostile frames, and nothing left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import node_member
import numpy as np
import pytest
import torch
import zmq
from world_cast import FORKSERVER, ensure_forkserver

from echelon.errors import ConfigError, PeerLost, Refused, RpcException, TransportTimeout
from echelon.transport.codec import encode
from echelon.transport.curve import secure_client
from echelon.transport.secret import user_secret
from echelon.world.node import Node

PATIENCE_S = 60.0  # a bound on what should take milliseconds, on a machine that may be busy

Start = Callable[[str], ForkServerProcess]
Knock = Callable[[], zmq.Socket[bytes]]


@pytest.fixture(params=["ipc", "tcp"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    address = f"ipc://{tmp_path}/host" if request.param == "ipc" else "tcp://127.0.0.1:0"
    with Node.host(address) as world:
        yield world


@pytest.fixture
def start(host: Node) -> Iterator[Start]:
    """Starts a member in a new process and waits until it has joined."""
    children: list[ForkServerProcess] = []

    def start_member(name: str) -> ForkServerProcess:
        ensure_forkserver()
        child = FORKSERVER.Process(target=node_member.main, args=(host.address, name, os.getpid()))
        child.start()
        children.append(child)
        wait_for(host, lambda: (seen := host.member(name)) is not None and seen.pid == child.pid)
        return child

    yield start_member
    for child in children:
        child.kill()
        child.join()
        child.close()


def send_signal(child: ForkServerProcess, number: signal.Signals) -> None:
    assert child.pid is not None
    os.kill(child.pid, number)


@pytest.fixture
def knock(host: Node) -> Iterator[Knock]:
    """Makes raw sockets that are connected to the host's gateway."""
    context = zmq.Context()

    def connect() -> zmq.Socket[bytes]:
        socket = context.socket(zmq.DEALER)
        if host.address.startswith("tcp://"):
            secure_client(socket, user_secret())
        socket.connect(host.address)
        sockets.append(socket)
        return socket

    sockets: list[zmq.Socket[bytes]] = []
    yield connect
    for socket in sockets:
        socket.close(linger=0)
    context.term()


def wait_for(world: Node, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        world.poll(0.05)


def ask(world: Node, to: str, function: str, *args: Any) -> Any:
    return world.call(to, function, *args, timeout_s=PATIENCE_S)


def test_values_and_tensors_travel_both_ways(host: Node, start: Start) -> None:
    start("a")
    weights: dict[str, Any] = {"w": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "step": np.int64(3)}
    image = np.random.default_rng(0).integers(0, 255, (64, 84, 84), dtype=np.uint8)
    back_weights, back_image, rest = ask(host, "a", "echo", weights, image, (None, [1.5, "x"]))
    assert torch.equal(back_weights["w"], weights["w"]) and back_weights["step"] == 3
    assert np.array_equal(back_image, image) and rest == (None, [1.5, "x"])
    assert ask(host, "a", "members") == host.members == ["a", "coordinator"]


def test_ten_thousand_posts_arrive_in_order(host: Node, start: Start) -> None:
    start("a")
    for i in range(10_000):
        host.post("a", "note", i)
    assert np.array_equal(ask(host, "a", "seen"), np.arange(10_000))
    assert host.dropped == 0


def test_posts_beyond_the_queue_are_dropped_and_counted(host: Node, start: Start) -> None:
    child = start("a")
    send_signal(child, signal.SIGSTOP)
    block = np.zeros(10_000, np.uint8)
    for _ in range(60_000):
        host.post("a", "echo", block)
        if host.dropped:
            break
    assert host.dropped == 1
    send_signal(child, signal.SIGCONT)
    host.post("nobody", "note", 1)
    assert host.dropped == 2


def test_a_remote_error_carries_its_traceback(host: Node, start: Start) -> None:
    start("a")
    with pytest.raises(RpcException, match="it broke") as caught:
        ask(host, "a", "fail", "it broke")
    assert caught.value.kind == "ValueError" and "in fail" in caught.value.remote_traceback
    assert "fail() in 'a'" in str(caught.value)
    with pytest.raises(RpcException, match=r"builtins\.set"):
        ask(host, "a", "unsendable")
    with pytest.raises(Refused, match=r"serves no function 'nothing_like_it'; it serves .*echo"):
        ask(host, "a", "nothing_like_it")
    assert ask(host, "a", "echo", 1) == (1,)


def test_a_failed_post_reaches_on_error(host: Node, start: Start) -> None:
    start("a")
    errors: list[str] = []
    host.on_error = errors.append
    host.serve("divide", lambda a, b: a / b)
    ask(host, "a", "post", "coordinator", "divide", 1, 0)
    ask(host, "a", "post", "coordinator", "multiply", 1, 0)
    wait_for(host, lambda: len(errors) == 2)
    assert "divide(), posted by 'a'" in errors[0] and "ZeroDivisionError" in errors[0]
    assert "serves no function 'multiply'" in errors[1]


def test_a_silent_peer_times_out_by_name(host: Node, start: Start) -> None:
    child = start("a")
    send_signal(child, signal.SIGSTOP)
    with pytest.raises(TransportTimeout, match=rf"'a' \(process {child.pid}\) did not answer pid\(\).*0.2 s"):
        host.call("a", "pid", timeout_s=0.2)
    send_signal(child, signal.SIGCONT)
    assert ask(host, "a", "echo", 2) == (2,)  # the late reply to the first call is not taken for the reply to this one
    with pytest.raises(TransportTimeout, match=r"no 'nobody' joined\. The members are a, coordinator"):
        host.call("nobody", "pid", timeout_s=0.05)


def test_whoever_waits_for_a_killed_member_gets_peer_lost(host: Node, start: Start) -> None:
    victim, _ = start("victim"), start("waiter")
    victim.kill()
    victim.join()
    ask(host, "waiter", "post", "waiter", "relay", "victim", "pid")  # it now calls a dead process, and waits
    assert ask(host, "waiter", "members") == ["coordinator", "victim", "waiter"]  # and serves meanwhile
    host.forget("victim", "killed by signal 9")
    wait_for(host, lambda: ask(host, "waiter", "lost") != [])
    lost = ask(host, "waiter", "lost")[0]
    assert "PeerLost" in lost and "killed by signal 9" in lost  # it waited, or learned it just before it called
    with pytest.raises(RpcException, match="cannot call 'victim', which is gone: killed by signal 9") as caught:
        ask(host, "waiter", "relay", "victim", "pid")
    assert caught.value.kind == "PeerLost"
    with pytest.raises(PeerLost, match="killed by signal 9"):
        host.call("victim", "pid")
    assert host.members == ["coordinator", "waiter"]


def test_a_new_incarnation_takes_the_name_over(host: Node, start: Start) -> None:
    notes: list[int] = []
    host.serve("note", notes.append)
    old = start("a")
    start("b")
    assert ask(host, "b", "relay", "a", "pid") == ask(host, "a", "pid") == old.pid  # so it is connected to both
    send_signal(old, signal.SIGSTOP)
    host.post("a", "post", "coordinator", "note", 1)  # the old process will run this when it wakes up
    new = start("a")
    assert ask(host, "a", "pid") == new.pid
    assert ask(host, "b", "relay", "a", "pid") == new.pid
    refused = host.refused
    send_signal(old, signal.SIGCONT)
    wait_for(host, lambda: host.refused > refused)
    ask(host, "a", "post", "coordinator", "note", 2)
    wait_for(host, lambda: 2 in notes)
    assert notes == [2] and host.members == ["a", "b", "coordinator"]


def test_whoever_joins_is_known_to_all_and_who_missed_that_asks(tmp_path: Path) -> None:
    """Many join simultaneously: the others receive several joins in one message."""
    with Node.host("inproc://many") as host:
        members = [Node.join("inproc://many", f"m{index}", timeout_s=PATIENCE_S) for index in range(40)]
        everybody = [*members, host]

        def all_know(names: set[str]) -> bool:
            for one in everybody:
                one.poll()
            return all(set(one.members) == names for one in everybody)

        names = {one.name for one in everybody}
        wait_for(host, lambda: all_know(names))
        members[3]._directory.version -= 1  # as if the last change had not arrived
        members[3]._directory.members.pop("m39")
        members.pop(7).close()
        everybody = [*members, host]
        wait_for(host, lambda: all_know(names - {"m7"}))
        members.append(Node.join("inproc://many", "m7", timeout_s=PATIENCE_S))
        everybody = [*members, host]
        wait_for(host, lambda: all_know(names))
        for member in members:
            member.close()


def test_a_former_life_is_refused(host: Node, knock: Knock) -> None:
    """Two incarnations of one name in this process: later messages of the first are refused."""
    notes: list[int] = []
    host.serve("note", notes.append)
    frames = encode((7, "a", "0123456789abcdef", "note", (1,)))
    join = encode((6, "a", "0123456789abcdef", "_join", (member_of(host, "a.0123456789abcdef"), 1, ())))
    old, new = knock(), knock()
    old.send_multipart(join)
    wait_for(host, lambda: "a" in host.members)
    old.send_multipart(frames)
    wait_for(host, lambda: notes == [1])
    new.send_multipart(encode((1, "a", "fedcba9876543210", "_join", (member_of(host, "a.fedcba9876543210"), 2, ()))))
    wait_for(host, lambda: (seen := host.member("a")) is not None and seen.pid == 2)
    old.send_multipart(frames)
    old.send_multipart(encode((0, "a", "0123456789abcdef", "_leave", ())))
    wait_for(host, lambda: host.refused == 2)
    assert notes == [1] and host.members == ["a", "coordinator"]


def member_of(host: Node, file: str) -> str:
    """Returns an address that a member of `host` could have, without a listener."""
    return "tcp://127.0.0.1:1" if host.address.startswith("tcp") else f"{host.address.rpartition('/')[0]}/{file}"


def test_members_that_call_each_other_do_not_deadlock(host: Node, start: Start) -> None:
    start("a")
    start("b")
    host.serve("double", lambda x: 2 * x)
    hops = ("b", "relay", "a", "relay", "b", "relay", "coordinator", "double", 21)
    assert ask(host, "a", "relay", *hops) == 42
    assert ask(host, "a", "relay", "a", "echo", 1) == (1,)


def test_hostile_frames_cost_the_host_nothing(host: Node, start: Start, knock: Knock) -> None:
    start("a")
    hostile: list[list[bytes]] = [
        [b""],
        [b"\xc1"],
        [b"\x91" * 100_000],
        [b"x" * 10, b"y" * 10],
        [bytes(frame) for frame in encode({"no": "request"})],
        [bytes(frame) for frame in encode((1, "a", "b"))],
        [os.urandom(3000), os.urandom(10)],
    ]
    for count, frames in enumerate(hostile, 1):
        socket = knock()
        socket.send_multipart(frames)
        wait_for(host, lambda count=count: host.refused == count)  # type: ignore[misc]
        socket.send_multipart(
            encode((1, "x", "y", "_join", (host.address, 1, ())))
        )  # ignored after the invalid message
    strangers: list[tuple[str, str, tuple[Any, ...]]] = [
        ("coordinator", "_join", (host.address, 1, ())),
        ("z", "_join", ("ipc:///etc/passwd", 1, ())),
        ("z", "_join", ("tcp://192.0.2.1:5000", 1, ())),
        ("../z", "_join", (member_of(host, "z"), 1, ())),
        ("a", "_leave", ()),
        ("z", "_directory", ((99, [], {}),)),
        ("z", "echo", ()),
    ]
    for name, function, args in strangers:
        socket = knock()
        socket.send_multipart(encode((1, name, "0" * 16, function, args)))
        wait_for(host, lambda socket=socket: bool(socket.poll(0)))  # type: ignore[misc]
        assert b"refused" in socket.recv_multipart()[0]
    assert host.members == ["a", "coordinator"] and ask(host, "a", "echo", 1) == (1,)


def test_the_last_post_before_the_end_arrives(host: Node, start: Start) -> None:
    child = start("a")
    words: list[str] = []
    host.serve("farewell", words.append)
    host.post("a", "stop", "coordinator", "so long")
    wait_for(host, lambda: words == ["so long"] and host.members == ["coordinator"])
    child.join(PATIENCE_S)
    assert child.exitcode == 0
    with pytest.raises(PeerLost, match="it left"):
        host.call("a", "pid")


def test_poll_wakes_on_a_file_descriptor(host: Node) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"x")
    assert host.poll(PATIENCE_S, [reader]) is False
    os.close(reader)
    os.close(writer)


def test_a_fork_may_not_use_the_world(host: Node) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            host.poll()
        except ConfigError:
            host.close()  # does nothing, and removes nothing
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    with Node.host("inproc://after-the-fork"):
        assert host.poll() is False
    assert not host.address.startswith("ipc") or Path(host.address.removeprefix("ipc://")).exists()


@pytest.mark.parametrize("host", ["ipc"], indirect=True)
def test_nothing_is_left_in_the_folder(host: Node, start: Start, tmp_path: Path) -> None:
    killed, forgotten, stopped = start("killed"), start("forgotten"), start("stopped")
    assert len(list(tmp_path.iterdir())) == 4
    for child in (killed, forgotten):
        child.kill()
        child.join()
    host.forget("forgotten", "killed")
    assert len(list(tmp_path.iterdir())) == 3
    host.post("stopped", "stop", "coordinator", "")
    wait_for(host, lambda: "stopped" not in host.members)
    stopped.join(PATIENCE_S)
    host.close()
    assert list(tmp_path.iterdir()) == []


def test_a_dead_file_is_replaced_and_a_live_host_is_not(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/host"
    (tmp_path / "host").touch()
    with Node.host(address):
        with pytest.raises(ConfigError, match="already listens"):
            Node.host(address)
        assert (tmp_path / "host").is_socket()
    assert not (tmp_path / "host").exists()


@pytest.mark.parametrize(
    ("address", "word"),
    [
        ("ipc://relative/x", "absolute"),
        (f"ipc:///tmp/{'x' * 103}", "108 bytes"),
        ("ipc:///no/such/folder/x", "does not exist"),
        ("tcp://0.0.0.0:0", "loopback"),
        ("tcp://*:0", "loopback"),
        ("tcp://192.0.2.1:5000", "loopback"),
        ("tcp://127.0.0.1:high", "no port"),
        ("tcp://127.0.0.1:70000", "no port"),
        ("udp://127.0.0.1:1", "not an address"),
        ("inproc://", "not an address"),
    ],
)
def test_an_address_that_cannot_work_is_refused(address: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        Node.host(address)


def test_names_and_joins_that_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a valid member name"):
        Node.host(f"ipc://{tmp_path}/x", "../x")
    with pytest.raises(ConfigError, match="107"):
        Node.join(f"ipc://{tmp_path}/x", "n" * 64)
    with pytest.raises(TransportTimeout, match=r"the host at ipc:.* did not answer _join"):
        Node.join(f"ipc://{tmp_path}/x", "a", timeout_s=0.05)
    assert list(tmp_path.iterdir()) == []


def test_worlds_of_one_thread_call_each_other(request: pytest.FixtureRequest) -> None:
    address = f"inproc://{request.node.name}"
    host = Node.host(address)
    a, b = Node.join(address, "a"), Node.join(address, "b")
    a.serve("square", lambda x: x * x)
    b.serve("through_a", lambda x: b.call("a", "square", x))
    a.serve("through_b", lambda x: a.call("b", "through_a", x))
    host.serve("through_all", lambda x: host.call("a", "through_b", x))
    assert b.call("coordinator", "through_all", 4) == 16
    for i in range(100):
        a.post("b", "note", i)
    notes: list[int] = []
    b.serve("note", notes.append)
    while b.poll():
        pass
    assert notes == list(range(100))
    host.forget("b", "no longer needed")
    with pytest.raises(PeerLost, match="no longer needed"):
        a.call("b", "through_a", 1)
    with pytest.raises(ConfigError, match="only the host can call forget"):
        a.forget("b", "")
    with pytest.raises(ConfigError, match="leading underscore"):
        a.serve("_join", len)
    host.close()
    while a.poll():
        pass
    with pytest.raises(PeerLost, match="the host closed the world"):
        a.call("coordinator", "through_all", 1)
    a.close()
    b.close()
    with pytest.raises(ConfigError, match="after it was closed"):
        a.poll()
