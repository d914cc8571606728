"""Plans sessions of faults from a seed and plays them; a session is one run, its faults in turn, and its end."""

from __future__ import annotations

import collections
import itertools
import os
import random
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from faults.catalogue import (
    ENDINGS,
    ENVIRONMENT,
    INTERRUPTED_START,
    OUTSIDE,
    Ending,
    Fault,
    faults_of,
    inflict,
    interrupt_start,
    problems_of,
)
from faults.kinds import KINDS, Kind
from faults.scene import Never, Scene

FAULTS_PER_SESSION = 6
MAX_KILLS = 3  # of one role in one run: beyond that the supervisor delays restarts on purpose
HANG_TIMEOUT_S = 4.0
DISK_MB = 24
START_TIMEOUT_S = 120.0
LEAVE_S = 10.0  # for the last processes of a run to go after its end


@dataclass(frozen=True)
class Session:
    """A run of a kind, the faults that it survives and the way it ends; all of it follows from the seed."""

    number: int
    kind: Kind
    faults: tuple[Fault, ...]
    ending: Ending | None  # None: the run is interrupted while it starts
    seed: int


@dataclass(frozen=True)
class Record:
    """What became of one fault."""

    session: int
    kind: str
    role: str
    fault: str
    moment: str
    seconds: float | None  # until training went on, or the run had ended; None: never
    problems: list[str]
    report: str  # the file with the stacks and the output, if there is a problem
    load: float

    @property
    def row(self) -> dict[str, Any]:
        return asdict(self)


def sessions(seed: int, num_faults: int, names: list[str]) -> Iterator[Session]:
    """Yields sessions with `num_faults` faults in all; every fault of a kind comes once before any comes again."""
    draw = random.Random(seed)
    kinds = [kind for kind in KINDS if kind.name in names]
    pools: dict[str, collections.deque[Fault]] = {kind.name: collections.deque() for kind in kinds}
    endings: dict[str, collections.deque[Ending]] = {kind.name: collections.deque() for kind in kinds}
    order: list[Kind] = []
    for number in itertools.count():
        if num_faults <= 0:
            return
        order = order or draw.sample(kinds, len(kinds))
        kind = order.pop()
        if number % 8 == 7:
            num_faults -= 1
            yield Session(number, kind, (), None, draw.getrandbits(31))
            continue
        if not endings[kind.name]:
            fitting = [ending for ending in ENDINGS if fits(ending, kind)]
            endings[kind.name].extend(draw.sample(fitting, len(fitting)))
        faults = _draw_faults(kind, pools[kind.name], draw, min(FAULTS_PER_SESSION, num_faults - 1))
        ending = endings[kind.name].popleft()
        if ending.role == ENVIRONMENT:  # its environments are not restarted
            faults = [fault for fault in faults if fault.role != ENVIRONMENT]
        num_faults -= len(faults) + 1
        yield Session(number, kind, tuple(faults), ending, draw.getrandbits(31))


def fits(ending: Ending, kind: Kind) -> bool:
    return {"company": bool(kind.company), "env": kind.has_env}.get(ending.needs, True)


def _draw_faults(kind: Kind, pool: collections.deque[Fault], draw: random.Random, count: int) -> list[Fault]:
    """Takes the next faults of a kind, no role more than MAX_KILLS kills; one that kills its host comes last."""
    found: list[Fault] = []
    kills: collections.Counter[str] = collections.Counter()
    waiting: list[Fault] = []
    while len(found) < count and len(waiting) < 100:
        if not pool:
            pool.extend(draw.sample(every := faults_of(kind), len(every)))
        fault = pool.popleft()
        cost = _cost(fault, kind)
        if any(kills[role] + number > MAX_KILLS for role, number in cost.items()):
            waiting.append(fault)
            continue
        kills += cost
        found.append(fault)
    pool.extendleft(reversed(waiting))
    return sorted(found, key=lambda fault: fault.role == "agent")


def _cost(fault: Fault, kind: Kind) -> collections.Counter[str]:
    """Returns the kills by role that the supervisor counts."""
    if fault.name == "pause" or fault.role in (ENVIRONMENT, "worker"):
        return collections.Counter()
    role = "learner" if fault.role.startswith("learner") else fault.role
    cost = collections.Counter({role: 2 if fault.moment in ("start", "first progress") else 1})
    if fault.name == "kill with the learner":
        cost["learner"] += 1
    return cost if fault.role != "agent" else collections.Counter({"agent": MAX_KILLS})


def play(session: Session, popen: Callable[..., Any], reports: Path) -> list[Record]:
    """Plays a session; returns a record per fault, up to and including the first that the run did not survive."""
    ending, draw = session.ending, random.Random(session.seed)
    words = [f"--seed={session.seed % 1000}", f"--supervision.hang-timeout-s={HANG_TIMEOUT_S:g}"]
    words += ending.words if ending is not None else ()
    scene = Scene(session.kind, words, popen, DISK_MB)
    records: list[Record] = []

    def note(fault: Fault, act: Callable[[], float | list[str]]) -> bool:
        began, seconds, problems = time.monotonic(), None, []
        try:
            found = act()
            seconds = found if isinstance(found, float) else time.monotonic() - began
            problems = [] if isinstance(found, float) else found
            problems += problems_of(scene) if scene.run_dir.exists() else []
        except Never as error:
            problems = [str(error)]
        except Exception:  # a defect of this program: the other sessions go on
            problems = [traceback.format_exc()]
        report = f"session-{session.number}-{len(records)}.txt" if problems else ""
        if problems:
            (reports / report).write_text(f"{fault}: {problems}\n\n{scene.stacks()}")
        where = (session.number, session.kind.name, fault.role, fault.name, fault.moment)
        records.append(Record(*where, seconds, problems, report, os.getloadavg()[0]))
        return seconds is not None

    try:
        if ending is None:
            note(
                Fault(INTERRUPTED_START, "coordinator"),
                lambda: interrupt_start(scene, draw.uniform(0.0, 2.5)) + left_behind(scene),
            )
            return records
        start = Fault("(start)", "coordinator")
        if not note(start, lambda: begin(scene)):
            return records
        records.clear()
        for fault in session.faults:
            if fault.name == "kill, disk full" and not scene.is_mounted:
                print("skipped: kill, disk full (it needs the right to mount a small disk)")
                continue
            if not note(fault, lambda fault=fault: inflict(scene, fault, draw.uniform(0.0, 0.4))):  # type: ignore[misc]
                return records
            if fault.role == "worker":
                scene.begin_company()
        if ending.needs != "disk" or scene.is_mounted:
            note(Fault(ending.name, ending.role), lambda: ending.act(scene) + left_behind(scene))
        return records
    finally:
        scene.close()


def begin(scene: Scene) -> float:
    began = time.monotonic()
    scene.until(scene.version, "training begins", START_TIMEOUT_S)
    scene.until_training()
    scene.until(scene.newest_checkpoint, "there is a checkpoint")
    for role in set(scene.kind.roles) - {"forkserver"}:
        scene.until(lambda role=role: role in OUTSIDE or scene.progress(role)[1] > 0, f"{role} makes progress")  # type: ignore[misc]
    scene.until(lambda: set(scene.kind.roles) <= {*scene.entries(), *OUTSIDE}, "all processes are recorded")
    return time.monotonic() - began


def left_behind(scene: Scene) -> list[str]:
    """Returns the processes, shared memory and files that a run has left after its end; ends its company first."""
    for one in scene.company:
        one.terminate()
    for one in scene.company:
        one.wait()
    deadline = time.monotonic() + LEAVE_S
    while (pids := scene.processes()) and time.monotonic() < deadline:
        time.sleep(0.02)
    problems = [f"{len(pids)} processes are left"] if pids else []
    if left := [path.name for path in scene.memory.iterdir()]:
        problems.append(f"shared memory is left: {left}")
    if (scene.run_dir / "processes.json").exists():
        problems.append("processes.json is left")
    return problems
