"""Finds out what an unknown environment observes, images or vectors, in a process of its own.

The process that starts a run imports neither the environment nor gymnasium, and code of the user's runs once more only.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from echelon.families import OWN
from echelon.interrupts import Interrupts

TIMEOUT_S = 60.0  # an environment that takes longer to create counts as one of vectors
LOOK_S = 0.02


def observed_family(env: str, kwargs: Mapping[str, Any], wrappers: Sequence[str]) -> str:
    """Returns the family of an environment that is not known by its id: "images" or "vectors".

    An environment that cannot be created counts as one of vectors: the run then reports why.
    """
    command = [sys.executable, "-m", __name__, env, json.dumps(dict(kwargs)), json.dumps(list(wrappers))]
    # A pipe would stay open while a process of the environment lives. Interrupts are recorded from before the start of
    # the process until it has ended: its session does not receive the signals of the terminal.
    with tempfile.TemporaryFile("w+") as output, Interrupts() as interrupts:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL, start_new_session=True
        )
        deadline = time.monotonic() + TIMEOUT_S
        try:
            while process.poll() is None and not interrupts.came and time.monotonic() < deadline:
                time.sleep(LOOK_S)
        finally:  # also after a second interrupt, which raises
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        interrupts.check()
        output.seek(0)
        last = output.read().rstrip().rpartition("\n")[2]
    return last if last in OWN else OWN[0]


def main(env: str, kwargs: str, wrappers: str) -> None:
    from echelon.config import EnvConfig
    from echelon.envs.make import probe_spaces
    from echelon.schema import is_image, space_leaves

    spaces = probe_spaces(EnvConfig(id=env, kwargs=json.loads(kwargs), wrappers=json.loads(wrappers)))
    leaves = space_leaves(spaces.observation)
    print("images" if any(is_image(leaf.shape, leaf.dtype) for leaf in leaves) else "vectors", flush=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    finally:
        os.killpg(os.getpid(), signal.SIGKILL)  # with this process everything that the environment started
