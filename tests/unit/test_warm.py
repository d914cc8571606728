"""A process that is forked from the warm one is what a fresh interpreter is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import warm
from running import DEADLINE_S, processes_marked, wait_until
from telling import children
from warm import MARK

SCRIPT = """
import os, signal, sys, threading, atexit, warnings
print(__name__, sys.argv, sys.path, os.getcwd(), sorted(os.environ.items()), os.getsid(0) == os.getpid())
print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), threading.active_count())
print(sys.modules["__main__"].__dict__ is globals(), "echelon" in sys.modules or "torch" in sys.modules)
print(sorted(int(name) for name in os.listdir("/proc/self/fd") if int(name) < 3), sys.stdin.read())
atexit.register(print, "the end")
how = sys.argv[1] if len(sys.argv) > 1 else ""
if how != "kill":  # else it may come just before the end
    threading.Timer(0.1, print, ["a thread"]).start()
if how == "raise":
    raise ValueError("it broke")
if how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "interrupt":
    os.kill(os.getpid(), signal.SIGINT)
if how == "warn":
    warnings.warn("beware")
sys.exit(how or 7)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "module.py").write_text(SCRIPT)
    return {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", MARK: "a test"}


@pytest.mark.parametrize("ahead", [[], ["-W", "error"]])
@pytest.mark.parametrize("how", [[], ["words"], ["raise"], ["kill"], ["interrupt"], ["warn"]])
@pytest.mark.parametrize("what", ["script", "module", "code"])
def test_it_runs_and_ends_as_a_fresh_one(
    what: str, how: list[str], ahead: list[str], tmp_path: Path, environment: dict[str, str]
) -> None:
    words = {"script": [f"{tmp_path}/module.py"], "module": ["-m", "module"], "code": ["-c", SCRIPT]}[what]
    command = [sys.executable, *ahead, *words, *how]
    fresh = subprocess.run(
        command, cwd="/", env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=DEADLINE_S
    )
    forked = warm.run(command, cwd="/", env=environment, timeout=DEADLINE_S)
    assert forked.returncode == fresh.returncode
    assert forked.stdout == fresh.stdout.replace("True False\n", "True True\n", 1)
    last = [done.stderr.splitlines()[-1:] for done in (forked, fresh)]
    assert last[0] == last[1]


def test_it_is_found_by_its_mark_and_waited_for_as_a_child(environment: dict[str, str]) -> None:
    environment[MARK] = "another test"
    process = warm.Popen([sys.executable, "-c", "input()"], env=environment, stdin=subprocess.PIPE)
    wait_until(lambda: processes_marked("another test") == [process.pid], "it bears its mark")
    assert process.pid in children()
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: process.poll() is not None, "it ended")
    assert process.wait() == -signal.SIGTERM and process.pid not in children()
    process.communicate()


def test_what_reads_other_variables_on_import_is_started_afresh(environment: dict[str, str]) -> None:
    code = [sys.executable, "-c", "import sys; print('torch' in sys.modules)"]
    assert warm.run(code, env=environment).stdout == "True\n"
    assert warm.run(code, env={**environment, "CUDA_VISIBLE_DEVICES": ""}).stdout == "False\n"
    assert warm.run(code, env={**environment, "OMP_NUM_THREADS": "2"}).stdout == "False\n"
