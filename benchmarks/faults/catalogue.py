"""Faults that a run survives, the moments at which they come, and the ways in which it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from faults.clock import LENGTH
from faults.kinds import Kind
from faults.scene import Never, Scene

END_S = 30.0  # within which a run that was asked to end has ended
NO_RESTART, RESTART = ("--env.on-error=stop",), ("--env.on-error=restart",)
ENVIRONMENT, COORDINATOR = "environment", "coordinator"
OUTSIDE = ("worker", "agent")  # not roles: nobody replaces them
MOMENTS = ("now", "checkpoint", "publish", "start", "first progress")
ORDERS = ("raise", "hang")


@dataclass(frozen=True)
class Fault:
    """One fault: what happens to which role, and when."""

    name: str
    role: str
    moment: str = "now"


def faults_of(kind: Kind) -> list[Fault]:
    """Returns the faults that a run of this kind survives, each once."""
    found = []
    for role in kind.roles:
        moments = ("now",) if role in OUTSIDE else MOMENTS[:3] if role == "forkserver" else MOMENTS
        found += [Fault("kill", role, moment) for moment in moments]
        if role != "agent":
            found.append(Fault("pause", role))
        if role not in (*OUTSIDE, "forkserver"):
            found += [Fault("stop", role), Fault("kill, output stalled", role), Fault("kill, disk full", role)]
        if role not in (*OUTSIDE, "forkserver") and not role.startswith("learner"):
            found.append(Fault("kill with the learner", role))
    if kind.has_env:
        found += [Fault(order, ENVIRONMENT) for order in ORDERS]
    return found


def inflict(scene: Scene, fault: Fault, delay_s: float) -> float:
    """Inflicts a fault and waits until the run has recovered; returns the seconds from the fault until then."""
    if fault.role == ENVIRONMENT:
        return _order(scene, fault.name, delay_s)
    if fault.name == "pause":
        return _pause(scene, fault.role, delay_s)
    with contextlib.ExitStack() as stack:
        if fault.name == "kill, output stalled":
            stack.enter_context(scene.output.stalled())
        elif fault.name == "kill, disk full":
            scene.until(scene.is_recorded, "processes.json is current")  # on a full disk it cannot be renewed
            stack.callback(fill(scene.disk).unlink)
        await_moment(scene, fault, delay_s)
        before = {name: scene.progress(name)[0] for name in scene.entries()}
        server = scene.entries().get("forkserver", {}).get("pid")
        saved, num_restored = scene.newest_checkpoint(), len(scene.restored())
        is_learner = fault.role.startswith("learner") or fault.name.endswith("learner") or fault.role == "forkserver"
        began = time.monotonic()
        scene.kill(fault.role, signal.SIGSTOP if fault.name == "stop" else signal.SIGKILL)
        if fault.name == "kill with the learner":
            scene.kill(_learner(scene.kind))
        until_at_work(scene, fault.role, before, server)
        seconds = time.monotonic() - began
    restored = scene.until(lambda: scene.restored()[num_restored:], "it is reported") if is_learner else [saved]
    if restored[0] < saved:
        raise Never(f"the learner resumed from step {restored[0]}, before the checkpoint of {saved}")
    return seconds


def await_moment(scene: Scene, fault: Fault, delay_s: float) -> None:
    """Waits for the moment of a fault; for a role that starts, its predecessor is killed first."""
    checkpoints = scene.run_dir / "checkpoints"
    version = scene.version()
    if fault.moment == "checkpoint":
        scene.until(lambda: any(checkpoints.glob(".tmp-*")), "a checkpoint is being written", poll_s=0.0002)
    elif fault.moment == "publish":
        scene.until(lambda: scene.version() > version, "the learner publishes", poll_s=0.0002)
    elif fault.moment in ("start", "first progress"):
        pid, incarnation = scene.kill(fault.role), scene.progress(fault.role)[0]
        scene.until(lambda: scene.entries().get(fault.role, {}).get("pid", pid) != pid, "the successor starts")
        if fault.moment == "first progress":
            scene.until(lambda: _has_begun(scene, fault.role, incarnation), "its first progress", poll_s=0.0002)
    else:
        time.sleep(delay_s)


def until_at_work(scene: Scene, role: str, before: dict[str, int], server: int | None) -> None:
    """Waits until the successor of a role has made progress and the learner has published since."""
    if role == "forkserver":
        scene.until(lambda: scene.entries().get("forkserver", {}).get("pid", server) != server, "a new fork server")
    if role == "agent":
        scene.until(lambda: not any("host" in entry for entry in scene.entries().values()), "the host is given up")
    again = [name for name in before if name not in (COORDINATOR, "forkserver")] if role == "forkserver" else [role]
    for name in again:
        if name not in OUTSIDE:
            scene.until(partial(_has_begun, scene, name, before[name]), f"{name} makes progress again")
    if scene.kind.company == "workers":
        seen = scene.interactions()
        scene.until(lambda: scene.interactions() > seen, "workers send steps")
    scene.until_training()


def _has_begun(scene: Scene, role: str, incarnation: int) -> bool:
    newest, progress = scene.progress(role)
    return newest > incarnation and progress > 0


def _pause(scene: Scene, role: str, delay_s: float) -> float:
    """Suspends a process for a moment: it continues, and nobody takes it for hung."""
    time.sleep(delay_s)
    pid = scene.kill(role, signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(pid, signal.SIGCONT)
    began = time.monotonic()
    scene.until_training()
    if role not in OUTSIDE and scene.pid(role) != pid:
        raise Never(f"{role} continues as the process that it was")
    return time.monotonic() - began


def _order(scene: Scene, what: str, delay_s: float) -> float:
    """Has one environment raise, hang or return NaN."""
    time.sleep(delay_s)
    restarts = scene.output.text().count("restarted:") + scene.output.text().count("starting it again")
    scene.give_order(what)
    scene.until(lambda: not scene.order.exists(), "an environment takes the order")
    began = time.monotonic()

    def is_reported() -> bool:
        text = scene.output.text()
        return text.count("restarted:") + text.count("starting it again") > restarts

    scene.until(is_reported, f"the environment that was told to {what} is replaced")
    scene.until_training()
    return time.monotonic() - began


def fill(disk: Path) -> Path:
    """Writes a file that takes all space of `disk`."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return ballast


@dataclass(frozen=True)
class Ending:
    """A way to end a run; `act` returns the problems that it found."""

    name: str
    act: Callable[[Scene], list[str]]
    role: str = COORDINATOR
    words: tuple[str, ...] = RESTART
    needs: str = ""  # "company" or "disk"; "env": environments in roles


def _stopped(scene: Scene, number: int = signal.SIGINT) -> list[str]:
    """Returns what is wrong with a run that was asked to stop by the signal `number`."""
    code = 128 + number
    problems = []
    found, summary = scene.wait(END_S), scene.summary()
    if found != code:
        problems.append(f"exit code {found} instead of {code}")
    if (status := summary.get("status")) != "stopped":
        problems.append(f"status {status} instead of stopped")
    steps = scene.checkpointed_steps(scene.run_dir / "checkpoints")
    if summary.get("env_steps") != steps:
        problems.append(f"the summary counts {summary.get('env_steps')} steps, the final checkpoint {steps}")
    return problems


def _signal(number: signal.Signals, *, everybody: bool = False, stalled: bool = False) -> Callable[[Scene], list[str]]:
    def act(scene: Scene) -> list[str]:
        with scene.output.stalled() if stalled else contextlib.nullcontext():
            company = {one.pid for one in scene.company}
            targets = [entry["pid"] for entry in scene.entries().values()] if everybody else [scene.process.pid]
            for pid in [pid for pid in targets if pid not in company]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            return _stopped(scene, number)

    return act


def _kill_coordinator(scene: Scene, *others: str) -> list[str]:
    saved = scene.newest_checkpoint()
    pids = [*(scene.pid(other) for other in others), scene.process.pid]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    scene.wait(END_S)
    problems = _ended(scene)
    if left := [path.name for path in scene.memory.glob(f"echelon-{scene.process.pid}-*")]:
        problems.append(f"shared memory is left: {left}")
    return problems + _resumed(scene, saved)


def _ended(scene: Scene) -> list[str]:
    """Waits for the last processes of the run to go, not for its company."""
    deadline = time.monotonic() + END_S
    company = {one.pid for one in scene.company}
    while (left := set(scene.processes()) - company) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [f"{len(left)} processes survive"] if left else []


def _resumed(scene: Scene, saved: int) -> list[str]:
    """Resumes a run, which continues from a checkpoint of at least `saved` steps, and stops it."""
    problems: list[str] = []
    scene.new_rows()
    num_rows = len(scene.rows)
    scene.resume()

    def learns() -> bool:
        scene.begin_company()  # an agent whose head is gone leaves
        return bool(scene.new_rows())

    scene.until(learns, "the resumed run learns")
    if (steps := scene.rows[num_rows]["env_steps"]) < saved:
        problems.append(f"resumed at {steps} steps, below the checkpoint of {saved}")
    scene.until_training()
    scene.process.send_signal(signal.SIGINT)
    return problems + _stopped(scene)


def _full_disk(scene: Scene) -> list[str]:
    """The final checkpoint goes to the fallback folder; that of before is untouched."""
    scene.until(scene.newest_checkpoint, "there is a checkpoint")
    learner = scene.kill(_learner(scene.kind), signal.SIGSTOP)  # so that the disk stays full
    saved = scene.newest_checkpoint()
    ballast = fill(scene.disk)
    os.kill(learner, signal.SIGCONT)
    scene.process.send_signal(signal.SIGINT)
    code = scene.wait(END_S)
    ballast.unlink()
    problems = [] if code == 1 else [f"exit code {code} instead of 1"]
    if (kept := scene.checkpointed_steps(scene.run_dir / "checkpoints")) is None or kept < saved:
        problems.append(f"the checkpoint of {saved} steps is lost: {kept}")
    rescued = [scene.checkpointed_steps(path.parent) for path in scene.fallback.rglob("step_*")]
    if not rescued or (rescued[0] or 0) < saved:
        problems.append(f"no final checkpoint in the fallback folder: {rescued}")
    if str(scene.fallback) not in scene.output.text():
        problems.append("the fallback folder is not named")
    return problems


def _taken_port(scene: Scene) -> list[str]:
    """A resume whose port is taken is refused with the port; when the port is free again, it works."""
    scene.process.send_signal(signal.SIGINT)
    problems, saved = _stopped(scene), scene.newest_checkpoint()
    with socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        squatter.bind(("127.0.0.1", scene.port))
        squatter.listen()
        scene.process = scene.start(["resume", str(scene.run_dir)], scene.output)
        said = len(scene.output.text())
        code = scene.wait(END_S)
        text = scene.output.text()[said:]
        if code not in (1, 2) or str(scene.port) not in text or "Traceback" in text:
            problems.append(f"with its port taken, resume ended with {code}: {text[-300:]}")
        if code is None:
            scene.process.send_signal(signal.SIGINT)
            scene.wait(END_S)
    return problems + _resumed(scene, saved)


def _fail(order: str, message: str, expected: int) -> Callable[[Scene], list[str]]:
    """An environment fails and is not restarted: the run ends with an error that names it."""

    def act(scene: Scene) -> list[str]:
        scene.give_order(order)
        code = scene.wait(END_S)
        problems = [] if code == expected else [f"exit code {code} instead of {expected}"]
        if message not in scene.output.text():
            problems.append(f"the error is not reported: {message!r} is missing")
        if scene.summary().get("status") != "failed":
            problems.append(f"status {scene.summary().get('status')} instead of failed")
        return problems

    return act


def _learner(kind: Kind) -> str:
    return next(role for role in (*kind.roles, "learner") if role.startswith("learner"))


ENDINGS = (
    Ending("SIGINT", _signal(signal.SIGINT)),
    Ending("SIGTERM", _signal(signal.SIGTERM)),
    Ending("SIGHUP", _signal(signal.SIGHUP)),
    Ending("SIGTERM to everybody", _signal(signal.SIGTERM, everybody=True)),
    Ending("SIGINT, output stalled", _signal(signal.SIGINT, stalled=True)),
    Ending("kill", _kill_coordinator),
    Ending("kill with the fork server", lambda scene: _kill_coordinator(scene, "forkserver")),
    Ending("disk full at the end", _full_disk, needs="disk"),
    Ending("port taken at resume", _taken_port, needs="company"),
    Ending("raise, no restart", _fail("raise", "told to raise", 1), ENVIRONMENT, NO_RESTART, needs="env"),
    Ending("nan", _fail("nan", "finite numbers", 2), ENVIRONMENT, needs="env"),
)
INTERRUPTED_START = "SIGINT while starting"


def interrupt_start(scene: Scene, delay_s: float) -> list[str]:
    """Interrupts a run that is starting."""
    scene.until(lambda: any(scene.memory.iterdir()), "the session is there")
    time.sleep(delay_s)
    scene.process.send_signal(signal.SIGINT)
    code = scene.wait(END_S)
    return [] if code in (130, -signal.SIGINT) else [f"exit code {code} instead of 130"]


def problems_of(scene: Scene) -> list[str]:
    """Checks the rows of metrics written since the last call."""
    known = scene.rows[-1] if scene.rows else {"version": 0}
    problems = []
    for row in scene.new_rows():
        if row["version"] < known["version"]:
            problems.append(f"version {row['version']} after {known['version']}")
        for figure in ("return_mean", "length_mean", "return_max"):
            if row["episodes"] and row[figure] != LENGTH:
                problems.append(f"{figure} {row[figure]} instead of {LENGTH}")
        if scene.kind.in_step and row["lag_max"]:
            problems.append(f"lag {row['lag_max']} in lock-step")
        if scene.kind.in_step and abs(row.get("kl") or 0.0) > 1e-5:
            problems.append(f"KL divergence {row['kl']}: what was learned is not what was acted")
        known = row
    return problems
