"""launch: results, failures, ends, and leftovers, with real processes."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launch_programs as programs
import pytest
import torch

import warm
from echelon.errors import ConfigError, RpcException
from echelon.world import launch, launching
from running import DEADLINE_S, MARK, TESTS

SCRIPT = TESTS / "distributed" / "launch_programs.py"
WORDS = {  # how one of four members ends -> the result or the error text of launch
    "return": [f"[{', '.join([repr(['0', '1', '2', '3'])] * 4)}]"],  # functions of the script itself were found
    "raise": ["RpcException: '1' (rank 1, process ", ") failed with ValueError: it broke", "in end_by\n    raise Val"],
    "kill": ["PeerLost: '1' (rank 1, process ", ") was ended by SIGKILL; the others were stopped."],
    "kill the fork server": [
        "PeerLost: the fork server (process ",
        ") was ended by SIGKILL, and every member with it.",
    ],
    "leave at once": [
        "PeerLost: '1' (rank 1, process ",
        ") left with code 0 without a result; the others were stopped.",
    ],
    "exit with 3": ["RpcException: '1' (rank 1, process ", "called exit(3)"],
    "return what cannot be sent": ["what __main__:end() returned in '1' cannot be sent", "builtins.set"],
    "exit": ["[None, None, None, None]"],
    "exit at the start": ["[None, None, None, None]"],
}


DEEP = """
from echelon.world import launch
from program.other import double


def main(world):
    group = world.create_rpc_group("all", world.members)
    value = group.rpc_sync(world.name_of(1 - world.rank), double, args=(4,))
    group.barrier()
    return value


if __name__ == "__main__":
    print(launch(main, 2))
"""


LATE = """
from threading import Timer

from echelon.world import launch
from echelon.world.node import Node

adopt = Node._adopt


def adopt_later(node, directory):
    if node._host is None:  # what the answer to a join says is known at once
        adopt(node, directory)
    else:
        Timer(0.3, adopt, (node, directory)).start()


Node._adopt = adopt_later


def main(world):
    return world.members


if __name__ == "__main__":
    print(launch(main, 3))
"""


def said_by(*words: str, folder: Path | None = None) -> str:
    search = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    environment = {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1", MARK: secrets.token_hex(8)}
    command = [sys.executable, "-W", "error", *words]
    done = warm.run(command, env=environment, cwd=folder, timeout=3 * DEADLINE_S)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    outcomes: dict[str, Any] = json.loads(said_by(str(SCRIPT)))
    return outcomes


@pytest.mark.parametrize("how", WORDS)
def test_a_launch_ends_with_its_members_and_leaves_nothing(outcomes: dict[str, Any], how: str) -> None:
    """The others wait in a collective, a call, a barrier, or for a group: `exit(0)` or a failure ends them."""
    told, num_processes, num_folders = outcomes[how]
    assert [words for words in WORDS[how] if words not in told] == [], told
    assert (num_processes, num_folders) == (0, 0)


def test_results_come_in_the_order_of_the_ranks() -> None:
    """A member that returned keeps serving; a member that called `stop` has a result, too."""
    names = ["c", "a", "b"]
    told = launch(programs.tell, 3, (torch.ones(4), {"k": [1, None]}), names=names)
    assert told == [(rank, names[rank], ["a", "b", "c"], 3, 4.0, {"k": [1, None]}) for rank in range(3)]


def test_everybody_knows_of_all_from_the_start_even_if_word_of_them_is_late(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE)
    assert said_by(str(tmp_path / "late.py")) == f"{[['0', '1', '2']] * 3}\n"


def test_whoever_waits_hears_why_a_member_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is the failure, never that the process ended or, depending on timing, that it left."""
    monkeypatch.setattr(launching, "FAILED_GRACE_S", DEADLINE_S)  # until they have written the file
    with pytest.raises(RpcException, match="failed with ValueError: it broke"):
        launch(programs.hear, 3, (str(tmp_path / "heard-"),))
    for rank in (0, 2):
        heard = (tmp_path / f"heard-{rank}").read_text()
        assert heard.startswith("WorldStopped: ") and "failed with ValueError: it broke" in heard


def test_functions_beside_a_module_deep_in_a_package_can_be_called(tmp_path: Path) -> None:
    """`python -m program.deep.main`: the whole package belongs to the program, in the launched processes too."""
    (tmp_path / "program" / "deep").mkdir(parents=True)
    (tmp_path / "program" / "other.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "program" / "deep" / "main.py").write_text(DEEP)
    for folder in ("program", "program/deep"):
        (tmp_path / folder / "__init__.py").touch()
    assert said_by("-m", "program.deep.main", folder=tmp_path) == "[8, 8]\n"


def test_the_members_watch_their_launcher_by_its_process() -> None:
    """They need no heartbeats of it: suspending all processes for a while ends nothing."""
    assert launch(programs.must_hear_of_the_host, 1) == [False]


def test_a_script_that_launches_when_it_is_loaded_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text("from echelon.world import launch\n\n\ndef f(world):\n    pass\n\n\nlaunch(f, 2)\n")
    assert 'Put the call under `if __name__ == "__main__":`' in said_by(str(script))


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: launch(lambda world: 1, 2), "a lambda of test_launch cannot be called in another process"),
        (lambda: launch(programs.name, 0), "world_size of at least 1"),
        (lambda: launch(programs.name, 2, names=["a", "a"]), "as many distinct names"),
        (lambda: launch(programs.name, 1, names=["a b"]), "not a valid member name"),
        (lambda: launch(programs.name, 2, engine="magic"), "no engine 'magic'"),
        (lambda: launch(programs.name, 2, address="auto"), "address='auto' is that of a Ray cluster"),
        (lambda: launch(programs.name, 2, engine="ray", address="127.0.0.1:9"), "RAY_AUTH_MODE is not token"),
        (lambda: launch(programs.name, 2, (object(),)), r"args of launch\(\) cannot be sent .*builtins.object"),
    ],
)
def test_what_cannot_be_launched_is_refused_before_anything_starts(call: Callable[[], object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        call()
    assert not list(Path("/dev/shm").glob(f"echelon-{os.getpid()}-*"))
