"""Worlds without `launch`: calls, groups and keys, threads, deaths and ends, in real processes."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import world_faults as faults
import world_programs as programs
from world_cast import PATIENCE_S, TIMEOUT_S, run, started

from echelon.errors import ConfigError, Refused, TransportTimeout
from echelon.transport.sockets import is_handshake_refused
from echelon.world import World, get_cur_name, get_cur_rank, get_world
from echelon.world.node import Node
from running import wait_until


def test_everybody_knows_who_is_there() -> None:
    told = run(programs.tell_who_is_there)
    assert told == [(rank, f"m{rank}", 2, ["m0", "m1"], ["m0", "m1"], [0, 1]) for rank in range(2)]


def test_calls_that_call_back_never_wait_for_a_thread() -> None:
    assert run(programs.recurse) == [12, 12]


def test_a_call_that_waits_holds_up_its_own_caller_alone() -> None:
    assert run(programs.wait_in_a_handler, 3) == [None, (True, 2), None]


def test_answers_nobody_waits_for_hold_nobody_up() -> None:
    assert run(programs.leave_answers_unread) == [0, 0]


def test_results_stay_with_the_callee_until_their_handle_is_gone() -> None:
    run(programs.keep_remotes)


def test_what_cannot_be_called_or_sent_is_refused_with_the_reason() -> None:
    run(programs.refuse_bad_calls)


def test_groups_and_keys_say_what_they_do_not_allow() -> None:
    run(programs.misuse_groups)


def test_a_service_that_moved_is_found_again() -> None:
    assert run(programs.move_a_service) == [["m0", "m0", "m1", "m1"]] * 2


def test_a_fork_of_a_member_is_no_member() -> None:
    assert run(programs.use_in_a_fork) == [0, 0]


def test_a_process_may_leave_and_enter_the_next_world() -> None:
    run(programs.stop_and_begin_again)


def test_a_host_that_stops_serves_the_other_ranks_until_they_have_left() -> None:
    told, *rest = run(programs.stop_the_host_early, 3)
    assert rest == [None, None]
    assert told == ["'m0', the host of its world, waits for 'm1', 'm2' to leave. Ctrl-C ends the world."]


@pytest.mark.parametrize("how", ["barrier", "call", "group"])
def test_exit_in_a_member_ends_the_world_for_all(how: str) -> None:
    with started(faults.exit_while_others_wait, 3, (how,)) as members:
        first, second, third = (member.collect() for member in members)
        for member in (first, third):
            assert member.error == "" and "'m1' called exit(0)" in member.value
        assert [member.process.exitcode for member in (first, second, third)] == [0, 0, 0]


@pytest.mark.parametrize("how", ["barrier", "call", "future", "remote", "service", "group"])
def test_whoever_waits_for_a_killed_member_learns_its_name(how: str) -> None:
    with started(faults.lose_a_member, 3, (how,)) as members:
        first, second, third = (member.collect() for member in members)
        assert second.process.exitcode == -signal.SIGKILL
        for member in (first, third):
            assert member.error == "", member.error
            kind, text, waited_s = member.value
            assert kind == "PeerLost" and "'m1'" in text, text
            assert "has ended" in text or "left while" in text, text  # "left while": while its channel was being opened
            assert waited_s < TIMEOUT_S  # that would be its own timeout


def test_the_service_of_a_dead_member_is_found_with_its_successor() -> None:
    with started(faults.inherit_a_service, 3) as members:
        first, second, third = (member.collect() for member in members)
        assert second.process.exitcode == -signal.SIGKILL
        for member in (first, third):
            assert (member.error, member.value) == ("", ["m1", "m1", "m2", "m2"])


def test_unread_answers_of_a_dead_member_harm_nobody() -> None:
    with started(faults.lose_unread_answers) as members:
        first, second = (member.collect() for member in members)
        assert (first.error, first.value, first.process.exitcode) == ("", 2, 0)
        assert second.process.exitcode == -signal.SIGKILL


def test_a_line_that_is_not_opened_in_time_holds_nobody_up_for_longer() -> None:
    run(faults.call_while_another_thread_opens)


def test_the_survivors_go_on_without_the_dead() -> None:
    with started(faults.miss_somebody, 3) as members:
        first, second, third = (member.collect() for member in members)
        assert (first.error, first.value, third.error, third.value) == ("", 2, "", 2)
        assert second.process.exitcode == -signal.SIGKILL


def test_everybody_learns_of_the_end_of_the_host() -> None:
    with started(faults.lose_the_host, 3) as members:
        first, second, third = (member.collect() for member in members)
        assert first.process.exitcode == -signal.SIGKILL
        for member in (second, third):
            assert member.error == "" and len(member.value) == 2
            assert all("'m0'" in text and "has ended" in text for text in member.value), member.value


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_guests_come_and_leave(scheme: str, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/gateway" if scheme == "ipc" else f"tcp://localhost:{free_port()}"
    with started(programs.receive_guests, address=address, guests=1) as members:
        for rank, member in zip((0, 1, -1), members, strict=True):
            member.collect()
            assert member.error == "" and member.value == (rank, 2, ["guest0", "m0", "m1"], [0, 1])
            assert member.process.exitcode == 0
    assert list(tmp_path.iterdir()) == []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_host_is_told_that_somebody_came_with_another_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_SECRET", "the secret of the host, and long enough")
    address = f"tcp://127.0.0.1:{free_port()}"
    secret = "a secret of somebody else, as long"
    refused = threading.Thread(
        target=lambda: wait_until(lambda: is_handshake_refused(address, secret), "it is refused")
    )
    refused.start()
    with pytest.raises(TransportTimeout, match=r"rank 1 .* did not join .* its secret was another"):
        World("m0", 0, 2, address, timeout_s=5.0)
    refused.join()


@pytest.mark.parametrize("ask", [get_cur_rank, get_cur_name])
def test_a_process_in_no_world_has_neither_rank_nor_name(ask: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match=f"{ask.__name__}: this process is in no world. Create a World"):
        ask()


@pytest.mark.xdist_group("siblings")
def test_a_world_that_is_not_complete_names_who_is_missing() -> None:
    with pytest.raises(TransportTimeout, match=r"rank 1, 2 of .* did not join within 0.2 s"):
        World("m0", 0, 3, timeout_s=0.2)
    with pytest.raises(TransportTimeout, match=r"'m1' found no host of its world within 0\.2 s"):
        World("m1", 1, 3, timeout_s=0.2)
    with pytest.raises(TransportTimeout, match=r"found no world at tcp://127.0.0.1:1: nothing listens there"):
        World("m1", 1, 3, "tcp://127.0.0.1:1", timeout_s=0.2)
    assert get_world() is None
    assert not list(Path("/dev/shm").glob(f"echelon-{os.getppid()}-*"))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("m", -1, 3), "neither a rank nor an address"),
        (("m", 3, 3), "rank=3 of world_size=3"),
        (("m", 0), "rank=0 of world_size=-1"),
        (("a b", 0, 1), "not a valid member name"),
        (("m", 0, 1, "tcp://192.0.2.1:5000"), "ECHELON_SECRET"),
        (("m", 0, 1, "tcp://nowhere"), "no port"),
        (("m", 0, 1, "http://x"), "not an address"),
    ],
)
def test_a_world_that_cannot_be_says_why(arguments: tuple[object, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        World(*arguments)  # type: ignore[arg-type]
    assert get_world() is None


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("a secret of theirs", "a secret of ours"), ("a secret of theirs", ""), ("", "a secret of ours")],
)
def test_who_has_not_the_secret_of_the_host_is_told_before_its_timeout(
    theirs: str, ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    opened, over = threading.Event(), threading.Event()

    def host() -> None:
        with Node.host(address, "m0") as node:
            opened.set()
            while not over.is_set():
                node.poll(0.02)

    monkeypatch.setenv("ECHELON_SECRET", theirs)
    thread = threading.Thread(target=host)
    thread.start()
    try:
        assert opened.wait(PATIENCE_S)
        monkeypatch.setenv("ECHELON_SECRET", ours)
        with pytest.raises(Refused, match=f"the world at {address} does not admit 'm1'.* Set ECHELON_SECRET"):
            World("m1", 1, 2, address, timeout_s=1e6)
    finally:
        over.set()
        thread.join()


@pytest.mark.xdist_group("siblings")
def test_the_keywords_of_machin_are_understood() -> None:
    with World(name="0", rank=0, world_size=1, rpc_timeout=20, dist_timeout=30, init_rpc=True) as world:
        assert world.timeout_s == 20.0 and world.members == ["0"]
        group = world.create_rpc_group("alone", ["0"])
        group.register("double", lambda x: 2 * x)
        assert group.registered_sync("double", (4,)) == 8
        group.barrier()
    assert get_world() is None
    with pytest.raises(TypeError, match="'rcp_timeout'"):
        World(name="0", rank=0, world_size=1, rcp_timeout=20)
