"""Roles for the tests of the engines: each does one thing."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from echelon.world.node import Node


class Counting:
    """Counts to `config["steps"]` into a file; idles for ever with 0."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config, self.finished, self.steps = config, False, 0
        self.file = Path(config["file"])

    def step(self, timeout_s: float) -> bool:
        self.steps += 1
        self.file.write_text(str(self.steps))
        self.finished = self.steps == self.config["steps"]
        if not self.config["steps"]:
            time.sleep(timeout_s)
        return True

    def close(self) -> None:
        self.file.with_suffix(".closed").write_text("")


class Talking(Counting):
    """Prints in every step, as environments of users do."""

    def step(self, timeout_s: float) -> bool:
        print("x" * 10_000, flush=True)
        print("y", file=sys.stderr)
        return super().step(timeout_s)


class Raising(Counting):
    def step(self, timeout_s: float) -> bool:
        raise ValueError(self.config["message"])


class RaisingWithoutEnd(Raising):
    def close(self) -> None:
        time.sleep(3600.0)


class Killed(Counting):
    """Ends by the signal `config["signal"]`."""

    def step(self, timeout_s: float) -> bool:
        os.kill(os.getpid(), self.config["signal"])
        return True


class Patron(Counting):
    """Ends a forked child and a program by SIGTERM, and writes down how they ended."""

    def step(self, timeout_s: float) -> bool:
        codes = set()
        for _ in range(20):  # ended right after the fork, too
            forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600.0,))
            forked.start()
            forked.terminate()
            forked.join(20.0)
            codes.add(str(forked.exitcode))
        program = subprocess.Popen(["sleep", "3600"])
        program.terminate()
        self.file.write_text(f"{' '.join(codes)} {program.wait(20.0)}")
        self.finished = True
        return True


class Parent(Counting):
    """Has children that hold every descriptor it inherited; then is killed."""

    def step(self, timeout_s: float) -> bool:
        escapes = bool(self.config["children_escape"])  # into a session of their own, as daemons do
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(3600)"], close_fds=False, start_new_session=escapes
        )
        if (pid := os.fork()) == 0:
            if escapes:
                os.setsid()
            time.sleep(3600.0)
        self.file.write_text(f"{child.pid} {pid}")
        if escapes:
            while os.getpgid(pid) != pid:
                time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
        return True


def refuse(config: dict[str, Any]) -> Counting:
    raise RuntimeError("made wrongly")


class Speaking:
    """Joins a world; when it is asked to, posts `config["num_words"]` words to the host and leaves."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config, self.finished = config, False
        self.node = Node.join(config["address"], config["name"], timeout_s=60.0)
        self.node.serve("speak", self._speak)

    def _speak(self) -> None:
        for number in range(self.config["num_words"]):
            self.node.post(self.node.host_name, "note", self.config["name"], number, bytes(1000))
        self.finished = True

    def step(self, timeout_s: float) -> bool:
        return self.node.poll(timeout_s)

    def close(self) -> None:
        self.node.close()
