"""Members without processes: member infos, the watch, the registry of the host, the node thread."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echelon.errors import TransportError
from echelon.transport import session
from echelon.transport.channel import Refusal
from echelon.transport.codec import DEFAULT_LIMITS, encode
from echelon.transport.lines import LineWriter
from echelon.transport.session import start_ticks
from echelon.world import entrance as entrance_module
from echelon.world import node_thread
from echelon.world import watch as watch_module
from echelon.world.address import member_address
from echelon.world.directory import Member
from echelon.world.endpoint import Arrival
from echelon.world.entrance import Entrance, remove_folder_of
from echelon.world.functions import Scope
from echelon.world.messages import Deferred
from echelon.world.node import Node
from echelon.world.node_thread import NodeThread
from echelon.world.registry import OK, GroupRecord, Registry
from echelon.world.switchboard import Switchboard
from echelon.world.watch import SILENCE_S, MemberInfo, MemberWatch, write_info
from running import TESTS, wait_until

FAR = MemberInfo(-1, 1, "/nowhere", "", "", "", 0)  # of a member that must be heard of
PATIENCE_S = 30.0


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Node]:
    with Node.host(f"ipc://{tmp_path}/gateway", "m0") as node:
        yield node


def test_a_card_that_names_a_pipe_blocks_nobody(tmp_path: Path) -> None:
    info = write_info(0, 1, tmp_path)
    assert info.is_near and info.is_beside
    assert not dataclasses.replace(info, network="net:[1]").is_beside
    os.unlink(tmp_path / "nonce")
    os.mkfifo(tmp_path / "nonce")
    assert not info.is_near


def test_only_the_folder_of_a_member_is_removed(tmp_path: Path) -> None:
    own, theirs, precious = (tmp_path / name for name in ("a.1.shared", "b.2.shared", "precious"))
    for folder in (own, theirs, precious):
        folder.mkdir(mode=0o700)
    linked = tmp_path / "c.3.shared"
    linked.symlink_to(precious)
    mine = write_info(0, 1, own)
    theirs_too = write_info(1, 1, precious)
    for folder in (precious, linked):
        remove_folder_of(dataclasses.replace(theirs_too, folder=str(folder)), mine)
    assert precious.is_dir() and linked.is_dir()
    remove_folder_of(write_info(1, 1, theirs), mine)
    assert not theirs.exists() and own.is_dir()


def test_a_member_that_removes_its_folder_just_then_has_done_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, theirs = tmp_path / "a.1.shared", tmp_path / "b.2.shared"
    own.mkdir()
    theirs.mkdir()
    infos = write_info(0, 1, own), write_info(1, 1, theirs)
    monkeypatch.setattr(MemberInfo, "is_near", property(lambda info: shutil.rmtree(info.folder) is None))
    remove_folder_of(infos[1], infos[0])
    assert not theirs.exists() and own.is_dir()


def test_siblings_of_two_containers_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their parents may have the same pid and start time, in the same mounted folder."""
    monkeypatch.setattr(entrance_module, "SHM_DIR", str(tmp_path))
    here = entrance_module._meeting_folder(2)
    assert entrance_module._meeting_folder(2) == here
    monkeypatch.setattr(session, "pid_namespace", lambda: "pid:[4026532178]")
    there = entrance_module._meeting_folder(2)
    assert there != here and sorted(tmp_path.iterdir()) == sorted([here, there])


def test_the_thread_of_a_node_ends_without_waiting_for_its_tick(host: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_thread, "TICK_S", 600.0)
    thread = NodeThread(host, MemberWatch(lambda one, why: None), lambda: None, lambda error: None)
    thread.start()
    done: list[str] = []
    thread.do(lambda: done.append("before"))
    stopper = threading.Thread(target=thread.stop, daemon=True)
    stopper.start()
    stopper.join(PATIENCE_S)
    assert not stopper.is_alive() and done == ["before"]


def test_no_other_thread_polls_a_node_that_has_one(host: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the thread that created it, in which another node joins: ZeroMQ sockets belong to one thread."""
    pollers, poll = set[str](), Node.poll

    def noted(node: Node, *args: Any) -> bool:
        if node is host:
            pollers.add(threading.current_thread().name)
        return poll(node, *args)

    monkeypatch.setattr(Node, "poll", noted)
    thread = NodeThread(host, MemberWatch(lambda one, why: None), lambda: None, lambda error: None)
    thread.start()
    with Node.join(host.address, "m1", timeout_s=PATIENCE_S) as node:
        assert node.members == ["m0", "m1"]
    thread.stop()
    assert pollers == {"echelon-node"}


def test_the_dead_are_heard_out_before_they_are_told_of(host: Node, tmp_path: Path) -> None:
    """Their last messages may still be in our sockets when their process has ended."""
    told: list[str] = []
    host.serve("last", told.append)
    watch = MemberWatch(lambda member, why: told.append(why), host.drain)
    code = f"""
import sys
from echelon.world.node import Node
with Node.join(sys.argv[1], "m1", timeout_s={PATIENCE_S}) as node:
    sys.stdin.read()  # until it is watched: one poll of the host may serve its join and its farewell
    for number in range(100):
        node.post("m0", "last", str(number))
"""
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent / "src")}
    command = [sys.executable, "-c", code, host.address]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE) as child:
        wait_until(lambda: (host.poll(0.01), host.member("m1"))[1], "it has joined")
        member, ticks = host.member("m1"), start_ticks(child.pid)
        assert member is not None and ticks is not None
        assert watch.add(member, dataclasses.replace(write_info(1, 2, tmp_path), ticks=ticks))
        child.communicate(timeout=PATIENCE_S)
        assert child.returncode == 0
    watch.look()
    assert told == [*map(str, range(100)), f"its process {child.pid} has ended"]
    watch.close()


def test_whoever_opens_again_is_served_once_and_nobody_after_the_end(shm_dir: Path) -> None:
    """The caller abandoned its first attempt, which took too long."""
    with Node.host(f"ipc://{shm_dir}/gateway", "m0") as node:
        info = write_info(0, 1, shm_dir)
        thread = NodeThread(node, MemberWatch(lambda one, why: None), lambda: None, lambda error: None)
        switchboard = Switchboard(thread, info, Scope(__name__), DEFAULT_LIMITS)
        writers = [LineWriter(shm_dir, name) for name in ("first", "second")]
        for writer in writers:
            switchboard._on_open_line("m1", "life", (info.to_wire(), writer.name))
        assert [writer.abandoned for writer in writers] == [True, False]
        switchboard.close()
        assert writers[1].abandoned
        with pytest.raises(Refusal, match="'m0' is about to leave"):
            switchboard._on_open_tcp("m1", "life")
        for writer in writers:
            writer.close(discard=True)


def test_a_watch_that_was_stopped_itself_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    now, died = 1000.0, []
    monkeypatch.setattr(watch_module.time, "monotonic", lambda: now)
    watch = MemberWatch(lambda member, why: died.append((member.name, why)))
    assert not watch.add(Member("far", "ipc:///nowhere/far", 1, "first", FAR.to_wire()), FAR)
    now += 3 * SILENCE_S  # the watch was not polled meanwhile
    watch.look()
    assert died == []
    for _ in range(2 * int(SILENCE_S)):
        now += 1.0
        watch.look()
    assert died == [("far", f"it sent no heartbeat for {SILENCE_S:.0f} s")]


def test_a_member_that_died_while_it_joined_is_noticed(host: Node, tmp_path: Path) -> None:
    registry = Registry(host, 2)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    (tmp_path / "m1").mkdir(mode=0o700)
    info = write_info(1, 2, tmp_path / "m1").to_wire()
    dead = Member("m1", member_address(host.address, "m1", "first"), child, "first", info)
    host._on_join(dead)
    assert host.member("m1") == dead
    registry.watch.look()
    assert host.member("m1") is None and "has ended" in host.why_gone("m1")
    registry.watch.close()


def test_a_host_that_was_stopped_lets_in_who_knocked_meanwhile(
    host: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, ask = threading.Semaphore(0), Node._ask

    def noted(node: Node, *args: Any) -> Any:
        asked.release()
        return ask(node, *args)

    monkeypatch.setattr(Node, "_ask", noted)
    monkeypatch.setattr(entrance_module, "TRY_S", 0.3)
    registry, joined = Registry(host, 2), list[str]()
    (tmp_path / "m1").mkdir(mode=0o700)
    info = write_info(1, 2, tmp_path / "m1")

    def join() -> None:
        with entrance_module._join(Entrance("m1", 1, 2, host.address, PATIENCE_S), host.address, info) as node:
            joined.extend(node.members)

    joiner = threading.Thread(target=join, daemon=True)
    joiner.start()
    for _ in range(3):
        assert asked.acquire(timeout=PATIENCE_S)
    time.sleep(0.1)  # what it said last is under way
    deadline = time.monotonic() + PATIENCE_S
    while joiner.is_alive() and time.monotonic() < deadline:
        host.poll(0.01)
    assert joined == ["m0", "m1"]
    registry.watch.close()


def test_a_barrier_is_passed_by_all_or_by_none() -> None:
    group = GroupRecord("g", ["a", "b"])
    group.arrive("a", 1)
    group.arrive("b", 7)
    assert group.withdraw("a", 1) == OK  # it timed out just when the other arrived
    group.arrive("a", 2)
    assert group.withdraw("a", 2) == ("absent", ["b"])
    group.arrive("b", 8)
    group.leave("a", "it left")
    assert group.withdraw("b", 8) == ("lost", "a", "it left")
    assert group.withdraw("b", 7) == OK


def test_a_group_that_somebody_gave_up_leaves_nothing(host: Node) -> None:
    registry = Registry(host, 2)
    answers = []
    registry._enter_group("g", "a", ["a", "ghost"])
    assert registry._give_up_group("g", "a") == ["ghost"]
    for name in ("a", "b"):
        registry._enter_group("g", name, ["a", "b"]).attach(answers.append)
    assert answers == [OK, OK]
    registry._leave_group("g", "a")
    registry._enter_group("g", "a", ["a", "b"]).attach(answers.append)  # waits until b has left the previous group
    assert registry._give_up_group("g", "a") == ["b"]
    registry._leave_group("g", "b")
    registry._enter_group("g", "b", ["a", "b"]).attach(answers.append)
    assert answers == [OK, OK]


def test_an_answer_whose_number_is_no_number_is_dropped(host: Node) -> None:
    frames = [bytes(frame) for frame in encode(([1], "answer", 1), host.limits)]
    host._take_answer(Arrival(frames, b"", "ipc:///nowhere"))
    assert host.members == ["m0"]


def test_a_broken_thread_tells_those_who_wait(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One call is pending when the thread breaks, another is made later."""
    with Node.host(f"ipc://{tmp_path}/gateway", "m0") as node:
        node.serve("wait", lambda: broken.append("asked") or Deferred())
        broken: list[str] = []

        def tick() -> None:
            if broken:
                raise RuntimeError("a bug")

        thread = NodeThread(
            node,
            MemberWatch(lambda one, why: None),
            tick,
            lambda error: thread.fail(lambda: TransportError(str(error))),
        )
        thread.start()
        try:
            for _ in range(2):
                with pytest.raises(TransportError, match=r"^a bug$"):
                    thread.call("m0", "wait", timeout_s=PATIENCE_S)
        finally:
            thread.stop()
    assert "'m0' leaves its world: Traceback" in capsys.readouterr().err
