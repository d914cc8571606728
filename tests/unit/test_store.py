"""The store over the world: the same results as torch's own, bounded waits, and threads that must not use it."""

from __future__ import annotations

import re
import threading
import tomllib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, PrefixStore

from echelon.errors import ConfigError, PeerLost, Refused, TransportTimeout
from echelon.transport.codec import decode, encode
from echelon.world.process_group import FIRST_TORCH, LAST_TORCH, interface_of, make_process_group
from echelon.world.store import WorldStore
from echelon.world.store_table import StoreTable
from running import TESTS

RANGE = r"torch 2\.10 to 2\.15"
KEYS = st.sampled_from(["a", "b", "c"])
VALUES = st.sampled_from(["", "x", "y", "\0z"])
OPERATIONS = st.one_of(
    st.tuples(st.just("set"), KEYS, VALUES),
    st.tuples(st.just("get"), KEYS),
    st.tuples(st.just("add"), st.sampled_from(["m", "n"]), st.integers(-3, 3)),
    st.tuples(st.just("compare_set"), KEYS, VALUES, VALUES),
    st.tuples(st.just("delete_key"), KEYS),
    st.tuples(st.just("check"), st.lists(KEYS, min_size=1, max_size=3)),
    st.tuples(st.just("num_keys")),
)


def over_the_wire(table: StoreTable) -> Callable[..., Any]:
    """Calls `table` as another process would, through the codec."""

    def ask(*question: Any) -> Any:
        operation, *args = decode([bytes(frame) for frame in encode(question)])
        return decode([bytes(frame) for frame in encode(table(operation, *args))])

    return ask


@given(st.lists(OPERATIONS, max_size=30))
def test_it_answers_as_a_store_of_torch_does(operations: list[tuple[Any, ...]]) -> None:
    theirs = HashStore()
    ours = WorldStore(over_the_wire(StoreTable()), timeout_s=0.0)
    for operation, *args in operations:
        if operation == "get" and not theirs.check(args):
            with pytest.raises(TransportTimeout, match=repr(args[0])):
                ours.get(*args)
        else:
            assert getattr(ours, operation)(*args) == getattr(theirs, operation)(*args), (operation, args)


def test_torch_reaches_every_operation_through_a_prefix() -> None:
    """torch calls a store written in Python from C++, where some functions have other names."""
    store = WorldStore(StoreTable(), timeout_s=0.0)
    prefixed = PrefixStore("p", store)
    prefixed.set("a", "1")
    assert prefixed.get("a") == b"1" and store.get("p/a") == b"1"
    assert prefixed.add("n", 2) == 2 and prefixed.check(["a", "n"]) and not prefixed.check(["a", "b"])
    assert prefixed.compare_set("a", "1", "2") == b"2" and prefixed.num_keys() == 2
    assert prefixed.delete_key("a") and not prefixed.delete_key("a")
    prefixed.wait(["n"], timedelta(seconds=0.01))
    with pytest.raises(TransportTimeout, match=r"set 'p/b' in the world's store within 0\.01 s"):
        prefixed.wait(["b"], timedelta(seconds=0.01))
    store.forget("p/")
    assert store.num_keys() == 0


def test_a_wait_ends_when_the_key_comes_or_somebody_is_lost() -> None:
    table = StoreTable()
    asked = threading.Event()

    def ask(operation: str, *args: Any) -> Any:
        answer = table(operation, *args)
        asked.set()
        return answer

    def come_late() -> None:
        asked.wait()
        table("set", "late", b"here")

    comer = threading.Thread(target=come_late)
    comer.start()
    assert WorldStore(ask).get("late") == b"here"
    comer.join()

    def watch() -> None:
        raise PeerLost("'b' is gone")

    with pytest.raises(PeerLost, match="'b' is gone"):
        WorldStore(table, watch=watch).get("never")


def test_threads_of_torch_are_not_let_through_to_what_belongs_to_one_thread() -> None:
    table = StoreTable()
    store = WorldStore(table, one_thread=True)
    store.set("a", "1")
    seen: list[bool] = []

    def look() -> None:
        seen.append(store.check(["a"]))
        store.set("b", "2")

    other = threading.Thread(target=look)
    other.start()
    other.join()
    assert seen == [False] and store.check(["a"]) and not store.check(["b"])


@pytest.mark.parametrize("question", [("set", "a"), ("get", 1), ("set", "a", "text"), ("drop",), (3, 4)])
def test_the_table_refuses_what_is_no_question(question: tuple[Any, ...]) -> None:
    with pytest.raises(Refused, match="the store has no operation"):
        StoreTable()(*question)


def test_who_does_not_come_to_a_process_group_is_named() -> None:
    store = WorldStore(StoreTable())
    with pytest.raises(TransportTimeout, match="'b', 'c' did not join the process group 'g' of a, b, c"):
        make_process_group(store, "g", 0, ["a", "b", "c"], timeout_s=0.02)
    with pytest.raises(TransportTimeout, match=r"'a' did not join the process group 'g'"):
        make_process_group(store, "g", 1, ["a", "b"], timeout_s=0.02)  # the first one timed out and has left
    with pytest.raises(TransportTimeout, match=r"'b' did not join"):
        make_process_group(HashStore(), "g", 0, ["a", "b"], timeout_s=0.02)


@pytest.mark.parametrize("version", ["2.9.1", "2.16.0", "3.0.0a0+git0123abc"])
def test_a_torch_outside_of_the_range_makes_no_process_group(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails before it joins the others, which would wait for it."""
    store = HashStore()
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(ConfigError, match=rf"tested with {RANGE}; this is torch {re.escape(version)}\. Install"):
        make_process_group(store, "g", 0, ["a"], timeout_s=1.0)
    assert store.num_keys() == 0


@pytest.mark.parametrize(
    ("owner", "name"), [("ProcessGroup", "_register_backend"), ("ProcessGroupGloo", "create_device")]
)
def test_a_torch_without_what_a_process_group_needs_makes_none(
    owner: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HashStore()
    monkeypatch.delattr(getattr(dist, owner), name)
    with pytest.raises(ConfigError, match=rf", without {owner}\.{name}\. Install a version from 2\.10 to "):
        make_process_group(store, "g", 0, ["a"], timeout_s=1.0)
    assert store.num_keys() == 0


def test_pip_installs_a_torch_of_the_range() -> None:
    """The package's requirement has the same range; the versions that `make` installs are in it."""
    project = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["project"]
    (major, first), (_, last) = FIRST_TORCH, LAST_TORCH
    assert f"torch>={major}.{first},<{major}.{last + 1}" in project["dependencies"]
    pinned = re.search(r"^torch==(\d+)\.(\d+)", (TESTS.parent / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None and FIRST_TORCH <= (int(pinned[1]), int(pinned[2])) <= LAST_TORCH


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.254") == ""
