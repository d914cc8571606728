"""The fuzzers of benchmarks/fuzz.py: a bounded run of each finds nothing, and what one finds can be repeated."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import warm
from running import TESTS

FUZZ = TESTS.parent / "benchmarks" / "fuzz.py"
COUNTS = {"frames": (10_000, 1_000), "cli": (500, 250), "sockets": (300, 100), "folders": (12, 6)}
FINDER = """
import argparse, random, sys
from pathlib import Path
from fuzzing import harness

def trial(chance):
    if (drawn := int(chance.random() * 50)) == 7:
        raise harness.Finding("a seven", drawn)
    return "other"

parser = argparse.ArgumentParser()
harness.add_options(parser, 1_000, 100)
sys.exit(harness.run("sevens", lambda: trial, parser.parse_args()))
"""


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (TESTS.parent / "src", FUZZ.parent)))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return warm.run([sys.executable, *map(str, words)], env=environment, timeout=120)


@pytest.mark.parametrize("kind", COUNTS)
def test_a_bounded_run_finds_nothing(tmp_path: Path, kind: str) -> None:
    count, block = COUNTS[kind]
    options = [
        f"--count={count}",
        f"--block-size={block}",
        "--seed=20",
        "--processes=1",
        f"--save={tmp_path / 'input'}",
    ]
    ended = run(FUZZ, kind, *options)
    assert ended.returncode == 0, ended.stdout[-4_000:] + ended.stderr[-4_000:]
    assert f"{count:,} trials in" in ended.stdout


def test_a_finding_is_saved_and_repeated(tmp_path: Path) -> None:
    saved = tmp_path / "input"
    found = run("-c", FINDER, "--seed=3", f"--save={saved}", "--processes=2")
    assert found.returncode == 1 and "input: 7" in saved.read_text()
    words = found.stdout.splitlines()[-1].split()  # the command that repeats it
    again = run("-c", FINDER, *words[words.index("--seed") :], f"--save={saved}")
    assert again.returncode == 1 and "100 trials" in again.stdout.splitlines()[0]
