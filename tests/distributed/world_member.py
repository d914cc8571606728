"""Members of a world, forks of this process: they run every program of the suite and report failures.

python world_member.py RANKS SIZE [ADDRESS]; RANKS are those of this host, such as 0,1. Each prints a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import traceback

from world_suite import PROGRAMS

from echelon.world import World

TIMEOUT_S = 80.0


def run(rank: int, size: int, address: str) -> None:
    world = World(f"m{rank}", rank, size, address=address, timeout_s=TIMEOUT_S)
    failures = {}
    for program in PROGRAMS.values():
        try:
            program(world)
        except Exception:
            failures[program.__name__] = traceback.format_exc()
    world.stop()
    os.write(1, f"{json.dumps([rank, os.getpid(), failures])}\n".encode())  # in one write


def main(ranks: str, size: str, address: str = "") -> int:
    children = []
    for rank in ranks.split(","):
        child = os.fork()
        if child == 0:
            run(int(rank), int(size), address)
            return 0
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
