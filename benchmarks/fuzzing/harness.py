"""Runs the trials of a fuzzer in several processes and reports progress, findings and memory.

A trial is a function of a random generator. It returns its outcome, a short text to count, and raises whatever the
fuzzed code should not have raised. Its processes are forked. A process that dies or hangs is a finding, too.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import multiprocessing
import os
import random
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

REPORT_S = 5.0
WARM_UP_BLOCKS = 3  # of each process, before its memory is measured first
MOST_GROWTH_MB = 64.0

Trial = Callable[[random.Random], str]


class Finding(Exception):
    """A trial found a defect; `data` is its input."""

    def __init__(self, text: str, data: object) -> None:
        super().__init__(text)
        self.text, self.data = text, data


class Done(NamedTuple):
    """The result of a block."""

    block: int
    outcomes: dict[str, int]
    rss_mb: float
    finding: str  # "" if there is none


def add_options(parser: argparse.ArgumentParser, count: int, block: int) -> None:
    parser.add_argument("--count", type=int, default=count, help="trials (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="default: one per core")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: the time")
    parser.add_argument("--block", type=int, help="repeat only this block of trials")
    parser.add_argument(
        "--block-size", type=int, default=block, help="trials that share a random generator (default: %(default)s)"
    )
    parser.add_argument("--limit-s", type=float, default=60.0, help="longest time of a block (default: %(default)s)")
    parser.add_argument("--save", type=Path, default=Path("fuzz-finding.txt"), help="file for the input of a finding")


def run(kind: str, make: Callable[[], Trial], options: argparse.Namespace) -> int:
    """Runs the trials of `options`; returns the exit code: 0 if nothing was found."""
    num_blocks = -(-options.count // options.block_size)
    blocks = range(num_blocks) if options.block is None else range(options.block, options.block + 1)
    num_processes = min(options.processes, len(blocks))
    print(f"{kind}: {len(blocks) * options.block_size:,} trials, seed {options.seed}, {num_processes} processes")
    fork = multiprocessing.get_context("fork")
    readers: dict[Connection, tuple[Any, int]] = {}
    folder = tempfile.TemporaryDirectory(prefix="echelon-fuzz-")
    tempfile.tempdir = folder.name  # of the processes below, which are killed and clean up nothing
    for place in range(num_processes):
        reader, writer = fork.Pipe(duplex=False)
        process = fork.Process(target=_work, args=(make, blocks[place::num_processes], options, writer), daemon=True)
        process.start()
        writer.close()
        readers[reader] = process, blocks[place]
    try:
        return _gather(kind, readers, num_processes, options)
    finally:
        for process, _ in readers.values():
            process.kill()
            process.join()
        folder.cleanup()


def _gather(kind: str, readers: dict[Connection, tuple[Any, int]], step: int, options: argparse.Namespace) -> int:
    outcomes, memory = collections.Counter[str](), collections.defaultdict[Connection, list[float]](list)
    began = reported = time.monotonic()
    found: tuple[int, str] | None = None
    while readers and found is None:
        for reader in wait(list(readers), REPORT_S):
            assert isinstance(reader, Connection)
            process, block = readers[reader]
            try:
                done: Done = reader.recv()
            except EOFError:
                process.join()
                del readers[reader]
                if process.exitcode:
                    found = block, f"process {process.pid} ended with exit code {process.exitcode}"
                continue
            outcomes.update(done.outcomes)
            memory[reader].append(done.rss_mb)
            readers[reader] = process, done.block + step
            if done.finding:
                found = done.block, done.finding
        if time.monotonic() - reported >= REPORT_S:
            reported = time.monotonic()
            print(f"  {_progress(outcomes, reported - began)}", flush=True)
    begin_mb, end_mb = (max((rss[place] for rss in memory.values()), default=0.0) for place in (0, -1))
    growth_mb = max((rss[-1] - rss[min(WARM_UP_BLOCKS, len(rss) - 1)] for rss in memory.values()), default=0.0)
    print(f"{kind}: {_progress(outcomes, time.monotonic() - began)}, growth {growth_mb:.1f} MB a process")
    print(
        f"  resident memory of the largest process: {begin_mb:.0f} MB after its first block, {end_mb:.0f} MB at the end"
    )
    for outcome, count in sorted(outcomes.items()):
        print(f"  {count:>12,}  {outcome}")
    if found is None and growth_mb > MOST_GROWTH_MB:
        found = 0, f"a process grew by {growth_mb:.0f} MB; {MOST_GROWTH_MB:.0f} are allowed"
    if found is None:
        return 0
    block, text = found
    options.save.write_text(text)
    again = f"python benchmarks/fuzz.py {kind} --seed {options.seed} --block {block} --block-size {options.block_size}"
    print(f"FOUND in block {block}: {text}\nwritten to {options.save}; repeat it with\n  {again}")
    return 1


def _progress(outcomes: collections.Counter[str], seconds: float) -> str:
    total = outcomes.total()
    return f"{total:,} trials in {seconds:.0f} s ({total / max(seconds, 1e-9):,.0f} a second)"


def _work(make: Callable[[], Trial], blocks: range, options: argparse.Namespace, writer: Connection) -> None:
    faulthandler.enable()
    signal.signal(signal.SIGALRM, _hangs)
    trial = make()
    for block in blocks:
        chance, outcomes, finding = random.Random(f"{options.seed}/{block}"), collections.Counter[str](), ""
        signal.setitimer(signal.ITIMER_REAL, options.limit_s)
        try:
            for _ in range(options.block_size):
                outcomes[trial(chance)] += 1
        except Finding as error:
            finding = f"{error.text}\n{''.join(traceback.format_exception(error))}\ninput: {error.data!r}\n"
        except Exception as error:
            finding = "".join(traceback.format_exception(error))
        signal.setitimer(signal.ITIMER_REAL, 0)
        writer.send(Done(block, dict(outcomes), rss_mb(), finding))
        if finding:
            return


def _hangs(number: int, frame: object) -> None:
    raise TimeoutError("the block took longer than --limit-s")


def rss_mb(pid: int | str = "self") -> float:
    """Returns the resident memory of a process in MB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
