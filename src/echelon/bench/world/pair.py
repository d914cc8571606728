"""The two processes of a library, started for one turn: the caller measures, and both leave.

Started anew for every turn: TensorPipe's threads poll all the time, also while nothing is called, so a pair that waited
for its turn would take the cores from the other.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import torch

from echelon.bench.world.setting import Setting
from echelon.engines.forkserver import die_with_parent
from echelon.errors import RunError

NAMES = ("caller", "callee")
ADDRESS = "address"  # the file that says where the two may meet over TCP
START_S = 120.0
LIBRARIES = {"echelon": "echelon.bench.world.ours", "torch-rpc": "echelon.bench.world.torch_rpc"}
LEAVE_S = {"echelon": 60.0, "torch-rpc": 0.0}  # how long the callee may take; that of torch-rpc would never leave


def take_turn(library: str, setting: Setting) -> dict[str, float]:
    """What calls of `library` reach."""
    limit_s = START_S + 10 * setting.seconds
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="echelon-bench-") as folder:
        (Path(folder) / ADDRESS).write_text(f"tcp://127.0.0.1:{free_port()}")
        words = json.dumps({"setting": dataclasses.asdict(setting), "folder": folder, "parent": os.getpid()})
        try:
            for name in NAMES:
                with (Path(folder) / name).open("wb") as log:
                    command = [sys.executable, "-m", "echelon.bench.world.pair", library, name, words]
                    processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log))
            told, _ = processes[0].communicate(timeout=limit_s)
            if not processes[0].returncode and LEAVE_S[library]:
                processes[1].communicate(timeout=LEAVE_S[library])
        except subprocess.TimeoutExpired as error:
            raise RunError(f"{library} was not done within {error.timeout:.0f} s.\n\n{_logs(folder)}") from None
        finally:
            for process in processes:
                process.kill()
                process.communicate()
        if processes[0].returncode:
            raise RunError(f"{library} left with code {processes[0].returncode}.\n\n{_logs(folder)}")
    return {name: float(value) for name, value in json.loads(told).items()}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _logs(folder: str) -> str:
    return "\n".join(f"{name}: {(Path(folder) / name).read_text(errors='replace')}" for name in NAMES)


def main(library: str, name: str, words: str) -> None:
    """The life of one of the two."""
    config = json.loads(words)
    die_with_parent(config["parent"])
    torch.set_num_threads(1)
    figures = import_module(LIBRARIES[library]).attend(name, config["folder"], Setting(**config["setting"]))
    print(json.dumps(figures), flush=True)
    if not LEAVE_S[library]:
        os._exit(0)  # its shutdown fails at times


if __name__ == "__main__":
    main(*sys.argv[1:])
