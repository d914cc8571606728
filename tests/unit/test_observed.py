"""What an unknown environment observes is found out in a process that leaves nothing behind."""

from __future__ import annotations

import json
import secrets
import signal
from pathlib import Path

import pytest

from echelon.envs.observed import observed_family
from running import Runs, processes_marked
from warm import MARK

ENV = f"{Path(__file__).parents[1]}/unruly.py:ParentalEnv"
SLEEPING = """
import pathlib, subprocess, sys, time

def make(flag):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    pathlib.Path(flag).touch()
    time.sleep(3600)
"""


def test_what_the_environment_starts_ends_with_the_look_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, mark := secrets.token_hex(8))
    assert observed_family(ENV, {}, []) == "vectors"
    assert processes_marked(mark) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_look_ends_the_environment_too(runs: Runs, tmp_path: Path, number: signal.Signals) -> None:
    (file := tmp_path / "sleeping.py").write_text(SLEEPING)
    kwargs = json.dumps({"flag": str(flag := tmp_path / "flag")})
    run = runs.train("dqn", f"{file}:make", fresh=True, env_kwargs=kwargs)
    run.until(flag.exists, "the environment is being created")
    run.process.send_signal(number)
    assert run.code() == 128 + number, run.text()
    assert "Traceback" not in run.text()
    run.assert_nothing_left()
