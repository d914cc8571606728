"""Fuzzes command lines: mutated ones are parsed and make a configuration, but start nothing.

Every command must end with success, or with exit code 2 and one message.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import warnings
from pathlib import Path
from typing import Any

import echelon.asynchronous.worker
import echelon.training
from echelon import config_io
from echelon.cli.main import COMMANDS
from echelon.config import TrainConfig
from echelon.config_io import fields_of
from echelon.presets import PRESETS, preset
from echelon.roles.plan.start import check_stop
from echelon.running import RunResult
from fuzzing.folders import run_command
from fuzzing.harness import Trial
from fuzzing.mutations import WORDS, mutate_text

DEFAULT_COUNT, BLOCK = 20_000, 500
LINES = [
    "train impala CartPole-v1 --actors 2 --envs-per-actor 32 --until-return 475 --minutes 5",
    "train ppo CartPole-v1 --engine inline --steps 1e6 --seed 3 --actor.trajectory 20 --network.hidden 64,64",
    "train dqn CartPole-v1 --replay.capacity 1_000 --replay.min-size=100 --steps 2000 --run-dir runs/x",
    "train apex-dqn ALE/Pong-v5 --learners 2 --actors 4 --acting central --steps 10 --device cpu",
    'train sac Pendulum-v1 --env-kwargs {"g":9.8} --on-env-error restart --steps 10 --shm-dir /dev/shm',
    "train impala CartPole-v1 --hosts 2 --hosts.address tcp://127.0.0.1:0 --actors 4 --steps 10",
    "learner dqn CartPole-v1 --address 127.0.0.1:0 --episodes 10 --update-steps 4 --eval-freq 0.1",
    "worker --learner 127.0.0.1:4444 --envs 2 --env CartPole-v1 --patience 3 --episodes 4 --seed 1 --buffer-size 10",
    "host --join 127.0.0.1:4444",
    "resume runs/none --steps 2e6 --minutes 3 --until-return 4 --episodes 4 --learners 2 --hosts 2 --trust",
    "eval runs/none --episodes 3 --seed 5 --env CartPole-v1 --json --trust",
    "bench rpc --help",
    "train --help",
    "--version",
    "",
]


def start_nothing() -> None:
    """Makes the commands end where they would start a run, connect, or measure."""

    def run(config: TrainConfig, *rest: Any, **more: Any) -> RunResult:
        check_stop(config)
        config_io.from_json(config_io.to_json(config))
        return RunResult("finished", Path(config.run.dir), {})

    echelon.training.run = run
    signal.signal = lambda number, handler: None  # type: ignore[assignment]  # the worker's: this process keeps its own
    echelon.asynchronous.worker.AsyncWorker.work = lambda self, episodes=0: self.connection.close()  # type: ignore
    warnings.simplefilter("ignore", FutureWarning)  # old names of options
    os.chdir(tempfile.mkdtemp())


def mutate(line: list[str], options: list[str], chance: random.Random) -> list[str]:
    """Returns a command line with one to four changes."""
    changed = list(line)
    for _ in range(1 + int(4 * chance.random() ** 2)):
        place = int(chance.random() * (len(changed) + 1))
        kind = int(chance.random() * 8)
        if kind == 0:
            changed.insert(place, chance.choice(WORDS))
        elif kind <= 2:
            changed[place:place] = [f"--{chance.choice(options)}", chance.choice(WORDS)]
        elif kind == 3:
            changed.insert(place, f"--{chance.choice(options)}={chance.choice(WORDS)}")
        elif kind == 4:
            del changed[place : place + 1]
        elif kind == 5 and changed:
            changed.insert(place, chance.choice(changed))
        elif place < len(changed):
            changed[place] = mutate_text(changed[place], chance) if kind == 6 else chance.choice(WORDS)
    return changed


def add_options(parser: argparse.ArgumentParser) -> None:
    pass


def make(options: argparse.Namespace) -> Trial:
    start_nothing()
    paths = sorted({info.path.replace("_", "-") for name in PRESETS for info in fields_of(preset(name, "CartPole-v1"))})

    def trial(chance: random.Random) -> str:
        words = mutate(chance.choice(LINES).split(), paths, chance)
        if words[:1] in (["doctor"], ["bench"], ["host"]) and "--help" not in words:
            words += ["--help"]  # they would measure, sweep or wait
        command = words[0] if words and words[0] in COMMANDS else "other"
        return f"{command} {run_command(words, words)}"

    return trial
