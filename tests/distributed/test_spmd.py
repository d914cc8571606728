"""The programs of examples/spmd and examples/ported: each runs to its end and leaves nothing behind."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
from pathlib import Path

import configured_frames
import pytest

import warm
from echelon.world import launch
from running import DEADLINE_S, MARK, TESTS, processes_marked, wait_until

EXAMPLES = TESTS.parent / "examples" / "spmd"
PORTED = TESTS.parent / "examples" / "ported"
FRAMES_PAGE = TESTS.parent / "docs" / "frames.md"
EASIER = {  # replacements in the program's text, so that it is solved after a few episodes
    "a3c": ("solved_reward, solved_repeat = 190, 5", "solved_reward, solved_repeat = 6, 3"),
    "dqn_apex": ("solved_reward, solved_repeat = 190, 5", "solved_reward, solved_repeat = 6, 3"),
    "impala": ("solved_reward, solved_repeat = 190, 5", "solved_reward, solved_repeat = 6, 3"),
    "ddpg_apex": ("solved_reward, solved_repeat = -200, 5", "solved_reward, solved_repeat = -4000, 3"),
}


class Ended:
    """A program that ran to its end."""

    def __init__(self, path: Path, *arguments: str, fresh: bool = False) -> None:
        mark = secrets.token_hex(8)
        environ = os.environ | {MARK: mark, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(path), *arguments]
        if fresh:
            done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=DEADLINE_S * 2)
        else:
            done = warm.run(command, env=environ, timeout=DEADLINE_S * 2)
        self.code, self.output, self.errors = done.returncode, done.stdout, done.stderr
        wait_until(lambda: not processes_marked(mark), "every process of the program is gone")


def changed(path: Path, folder: Path, *changes: tuple[str, str]) -> Path:
    """Returns a copy of a program with parts of its text changed."""
    text = path.read_text()
    for old, new in changes:
        assert text.count(old) == 1, f"{path} does not say {old!r} once"
        text = text.replace(old, new)
    copy = folder / path.name
    copy.write_text(text)
    return copy


@pytest.mark.parametrize("name", EASIER)
def test_an_example_ends_by_itself_when_it_is_solved(name: str, tmp_path: Path) -> None:
    ended = Ended(changed(EXAMPLES / f"{name}.py", tmp_path, EASIER[name]), "--seed", "3")
    assert ended.code == 0, ended.errors
    assert "Environment solved! Process" in ended.output
    assert "Episode 3 smoothed reward=" in ended.output
    assert "Traceback" not in ended.errors


def test_an_example_that_is_not_solved_in_time_fails(tmp_path: Path) -> None:
    path = changed(EXAMPLES / "a3c.py", tmp_path, ("max_episodes, max_steps = 2000,", "max_episodes, max_steps = 2,"))
    ended = Ended(path)
    assert ended.code != 0 and "not solved within 2 episodes" in ended.errors


@pytest.mark.full
@pytest.mark.parametrize("name", EASIER)
def test_a_script_for_machin_runs_under_torch_multiprocessing(name: str, tmp_path: Path) -> None:
    """The first worker that is done ends the world by `exit(0)` while the learners still learn."""
    old, new = EASIER[name]
    soon = {"dqn_apex": ("() < 500", "() < 20"), "ddpg_apex": ("() < 500", "() < 20"), "impala": ("() < 5", "() < 2")}
    changes = [(old, new.replace(", 3", ", 15")), *([soon[name]] if name in soon else [])]
    ended = Ended(changed(PORTED / f"{name}.py", tmp_path, *changes), fresh=True)
    assert ended.code == 0, ended.errors
    assert "Environment solved! Process" in ended.errors  # where logging writes
    assert "Traceback" not in ended.errors


@pytest.mark.parametrize("path", sorted(PORTED.glob("*.py")), ids=lambda path: path.stem)
def test_every_line_that_a_ported_script_changed_is_in_the_documentation(path: Path) -> None:
    before = re.findall(r"# was: (.*)", path.read_text())
    page = FRAMES_PAGE.read_text()
    assert len(before) >= 7
    assert [line for line in before if line not in page] == []


def test_frames_are_made_from_configurations() -> None:
    found = launch(configured_frames.main, 3)
    num_networks = {"DQNApex": 2, "DDPGApex": 4, "IMPALA": 2}
    for rank, one in enumerate(found):
        assert one["A3C"][:4] == ("", [False, False], configured_frames.NUM_STEPS, False)
        for kind, num in num_networks.items():
            learns = rank < 2
            role, is_wrapped, size, is_idle, weights, (batch_size, optimizers, num_schedules) = one[kind]
            assert role == ("learner" if learns else "sampler") and is_idle == (not learns), kind
            assert is_wrapped == [learns] * num and batch_size == 4, kind
            assert size == 3 * (1 if kind == "IMPALA" else configured_frames.NUM_STEPS), kind
            assert weights == pytest.approx(found[0][kind][4], rel=1e-5), f"{kind}: the worker has what learners pushed"
            assert set(optimizers) == {"SGD" if kind == "IMPALA" else "Adam"}
            assert num_schedules == (2 if kind == "DDPGApex" else 0)


def test_learners_that_wait_for_gradients_alone_end_with_the_world() -> None:
    ended = Ended(TESTS / "distributed" / "wrapped_learners.py")
    assert ended.code == 0, ended.errors
    assert "all gone" in ended.output


def test_a_process_may_end_while_its_groups_are_being_released() -> None:
    ended = Ended(TESTS / "distributed" / "ended_groups.py", fresh=True)
    assert ended.code == 0, ended.errors
    assert ended.output.split() == str([0] * 6).split() and not ended.errors
