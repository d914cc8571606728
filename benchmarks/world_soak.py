"""A soak test: processes call each other in every way; checks that nothing is lost, duplicated, reordered or leaked.

    python3 benchmarks/world_soak.py                                  # 3 processes, 100,000 calls each
    python3 benchmarks/world_soak.py --calls 3000 --json out.json

Each process calls the others from two threads: functions and services, awaited immediately, later, or never; results
that stay remote; paired values; failing calls; tensors from none to 8 MB, filled with a byte that the callee verifies.
Every call of a thread to a process has the next number, and the callee records calls out of order. Memory, threads,
descriptors and segments are counted after each fifth of the calls, while no call is in flight; the last two counts must
not both exceed the first two. Runs of fewer than 20,000 calls end before memory has settled, so it is not checked. Exit
code 1 means that a check failed.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from echelon.world import RpcException, RpcGroup, World, launch

NUM_SAMPLES, NUM_EARLY, NUM_LATE = 5, 2, 2
SETTLED = 20_000  # calls per process after which memory has settled
IN_FLIGHT = 32  # calls of a thread that it has not awaited
SECOND_THREAD = 0.1  # share of the calls made by the second thread
KIB, MIB = 1 << 10, 1 << 20
SIZES = [(0.45, 0, 0), (0.3, 1, KIB), (0.17, KIB, 64 * KIB), (0.06, 64 * KIB, MIB), (0.02, MIB, 8 * MIB)]
SHARED = " /dev/shm/"
SIZED = ("in_use", "memory", "segment_bytes")
MAY_GROW = {  # allowed growth: a share, plus a constant
    "in_use": (0.0, 2 * MIB),
    "memory": (0.05, 8 * MIB),  # malloc leaves holes between blocks of all sizes
    "segment_bytes": (0.05, 8 * MIB),
    "threads": (0.0, 2),
    "descriptors": (0.0, 2),
    "segments": (0.05, 2),
}


class OnPurpose(Exception):
    """The exception of calls that must fail."""


@dataclass
class Notes:
    """The calls that a process has received. Calls of one caller run sequentially, so each entry has one writer."""

    last: dict[str, int] = field(default_factory=dict)  # caller -> the number of its last call
    wrong: list[str] = field(default_factory=list)

    def take(self, caller: str, number: int, payload: torch.Tensor | None) -> int:
        expected = self.last.get(caller, 0) + 1
        if number != expected:
            self.wrong.append(f"call {number} of {caller} arrived instead of {expected}")
        self.last[caller] = number
        return 0 if payload is None else check(self.wrong, payload, number, caller)


NOTES = Notes()


def check(wrong: list[str], payload: torch.Tensor, number: int, whose: str) -> int:
    """Returns the length of `payload`; records an error if one of its bytes does not match `number`."""
    if payload.numel() and not bool((payload == number % 251).all()):
        wrong.append(f"the tensor of call {number} of {whose} changed in transit")
    return payload.numel()


def take(caller: str, number: int, payload: torch.Tensor | None = None) -> int:
    return NOTES.take(caller, number, payload)


def give_back(caller: str, number: int, payload: torch.Tensor | None = None) -> torch.Tensor | None:
    NOTES.take(caller, number, payload)
    return payload


def fail(caller: str, number: int, payload: torch.Tensor | None = None) -> None:
    NOTES.take(caller, number, payload)
    raise OnPurpose(f"call {number} of {caller}")


def seen() -> dict[str, int]:
    return NOTES.last


class Caller:
    """One thread's calls to the other processes."""

    def __init__(self, name: str, world: World, group: RpcGroup, seed: str) -> None:
        self.name = name
        self.made: Counter[str] = Counter()  # calls of each kind
        self.num: Counter[str] = Counter()  # numbered calls to each process
        self.wrong: list[str] = []
        self._others = [member for member in world.members if member != world.name]
        self._world, self._group = world, group
        self._random = random.Random(seed)
        self._pending: deque[Callable[[], None]] = deque()
        self._kinds = [getattr(self, f"_{kind}") for kind in KINDS]

    def call(self, num_calls: int) -> None:
        for _ in range(num_calls):
            member = self._random.choice(self._others)
            kind = self._random.choice(self._kinds)
            kind(member)
            self.made[kind.__name__[1:]] += 1
            while len(self._pending) >= IN_FLIGHT:
                self._wait_for_one()
        while self._pending:
            self._wait_for_one()

    def _wait_for_one(self) -> None:
        self._pending.rotate(self._random.randrange(len(self._pending)))
        self._pending.popleft()()

    def _next(self, member: str) -> tuple[str, int, torch.Tensor | None]:
        """Returns the arguments of the next numbered call to `member`."""
        self.num[member] += 1
        number = self.num[member]
        _, low, high = self._random.choices(SIZES, [weight for weight, _, _ in SIZES])[0]
        size = self._random.randint(low, high)
        return self.name, number, torch.full((size,), number % 251, dtype=torch.uint8) if size else None

    def _answered(self, args: tuple[str, int, torch.Tensor | None], answer: object) -> None:
        _, number, payload = args
        size = 0 if payload is None else payload.numel()
        if isinstance(answer, torch.Tensor):
            answer = check(self.wrong, answer, number, "an answer")
        if (answer or 0) != size:
            self.wrong.append(f"call {number} of {self.name} returned {answer!r}, not {size}")

    def _sync(self, member: str) -> None:
        args = self._next(member)
        self._answered(args, self._group.rpc_sync(member, give_back, args=args))

    def _later(self, member: str) -> None:
        args = self._next(member)
        future = self._group.rpc_async(member, give_back, args=args)
        self._pending.append(lambda: self._answered(args, future.wait()))

    def _never(self, member: str) -> None:
        self._group.rpc_async(member, take, args=self._next(member))

    def _remote(self, member: str) -> None:
        args = self._next(member)
        kept = self._group.remote(member, give_back, args=args)
        self._pending.append(lambda: self._answered(args, kept.to_here()))

    def _service(self, member: str) -> None:
        args = self._next(member)
        self._answered(args, self._group.registered_sync(f"take of {member}", args=args))

    def _service_later(self, member: str) -> None:
        args = self._next(member)
        future = self._group.registered_async(f"take of {member}", args=args)
        self._pending.append(lambda: self._answered(args, future.wait()))

    def _paired(self, member: str) -> None:
        of, payload = self._group.get_paired(f"value of {member}").to_here()
        if of != member or check(self.wrong, payload, 7, f"the value of {member}") != 5000:
            self.wrong.append(f"the value of {member} is that of {of}")

    def _pair(self, _: str) -> None:
        key = f"another of {self.name}"
        self._group.pair(key, self.name)
        if self._group.get_paired(key).to_here() != self.name:
            self.wrong.append(f"{key} is not what was paired")
        self._group.unpair(key)

    def _fails(self, member: str) -> None:
        caller, number, payload = self._next(member)
        try:
            self._group.rpc_sync(member, fail, args=(caller, number, payload))
        except RpcException as error:
            if f"OnPurpose: call {number} of {caller}\n" not in str(error):
                self.wrong.append(f"call {number} of {caller} failed with another's error: {error}")
        else:
            self.wrong.append(f"call {number} of {caller} did not fail")


KINDS = ("sync", "later", "never", "remote", "service", "service_later", "paired", "pair", "fails")


class MallocInfo(ctypes.Structure):
    """glibc's statistics of malloc; `uordblks` and `hblkhd` are the allocated bytes."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
    )


LIBC = ctypes.CDLL(None)
LIBC.mallinfo2.restype = MallocInfo


def measure() -> dict[str, int]:
    """Returns the resources of this process, without pages that malloc can release; segments are mapped ones."""
    gc.collect()
    LIBC.malloc_trim(0)
    malloc = LIBC.mallinfo2()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    mapped = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if SHARED in line]
    return {
        "in_use": malloc.uordblks + malloc.hblkhd,
        "memory": int(status["RssAnon"].split()[0]) << 10,
        "threads": int(status["Threads"]),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "segments": len(mapped),
        "segment_bytes": sum(int(end, 16) - int(start, 16) for start, end in mapped),
    }


def member(world: World, num_calls: int, seed: int) -> dict[str, Any]:
    """Runs one process; returns its report."""
    group = world.create_rpc_group("soak", world.members)
    group.register(f"take of {world.name}", take)
    group.pair(f"value of {world.name}", (world.name, torch.full((5000,), 7, dtype=torch.uint8)))
    shares = [num_calls - int(SECOND_THREAD * num_calls), int(SECOND_THREAD * num_calls)]
    callers = [Caller(f"{world.name}.{i}", world, group, f"{seed} {world.name} {i}") for i in range(len(shares))]

    def call(part: float) -> None:
        threads = [
            threading.Thread(target=caller.call, args=(int(part * share),))
            for caller, share in zip(callers, shares, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        group.barrier()

    group.barrier()
    started = time.monotonic()
    samples = []
    for _ in range(NUM_SAMPLES):
        call(1 / NUM_SAMPLES)
        samples.append(measure())
        group.barrier()
    elapsed_s = time.monotonic() - started
    arrived = {other: group.rpc_sync(other, seen) for other in world.members if other != world.name}
    group.barrier()
    wrong = [*NOTES.wrong, *(text for caller in callers for text in caller.wrong)]
    for caller in callers:
        for other, number in caller.num.items():
            if (got := arrived[other].get(caller.name, 0)) != number:
                wrong.append(f"{caller.name} made {number} calls to {other}, where {got} arrived")
    made: Counter[str] = sum((caller.made for caller in callers), Counter())
    return {"made": dict(made), "wrong": wrong, "samples": samples, "elapsed_s": elapsed_s}


def judge(reports: list[dict[str, Any]], num_calls: int) -> list[str]:
    """Returns the failed checks as text; empty if all passed."""
    wrong = [text for report in reports for text in report["wrong"]]
    for rank, report in enumerate(reports):
        for what, (share, more) in MAY_GROW.items() if num_calls >= SETTLED else ():
            values = [sample[what] for sample in report["samples"]]
            early, late = max(values[:NUM_EARLY]), min(values[-NUM_LATE:])
            if late > early * (1 + share) + more:
                wrong.append(f"process {rank}: {what} grew from {early} to {late}")
    return wrong


def show(reports: list[dict[str, Any]], wrong: list[str], num_calls: int) -> None:
    made: Counter[str] = sum((Counter(report["made"]) for report in reports), Counter())
    print(f"{sum(made.values()):,} calls: " + ", ".join(f"{kind} {made[kind]:,}" for kind in KINDS))
    for rank, report in enumerate(reports):
        print(f"process {rank}: {sum(report['made'].values()) / report['elapsed_s']:,.0f} calls/s")
        for what in MAY_GROW:
            values = [sample[what] for sample in report["samples"]]
            texts = [f"{value / MIB:,.1f}" if what in SIZED else str(value) for value in values]
            print(f"  {what:<14}" + "".join(f"{text:>9}" for text in texts) + (" MiB" if what in SIZED else ""))
    for text in wrong[:20]:
        print(f"WRONG: {text}")
    memory = "memory flat" if num_calls >= SETTLED else "too short to judge memory"
    print(f"{len(wrong)} wrong" if wrong else f"nothing lost, duplicated, reordered or changed; {memory}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--calls", type=int, default=100_000, help="calls per process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    reports = launch(member, options.processes, args=(options.calls, options.seed))
    wrong = judge(reports, options.calls)
    show(reports, wrong, options.calls)
    if options.json:
        options.json.write_text(json.dumps({"reports": reports, "wrong": wrong}, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
