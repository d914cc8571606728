"""What other hosts cost the head, and their agents: bytes, messages and processor time, for many hosts on one machine.

    python benchmarks/scale.py [--hosts 4 16 64] [--actors-per-host 16] [--slot-bytes 29000] [--weights-bytes 44000]
        [--slots-per-s -1] [--versions-per-s -1] [--seconds 10] [--json FILE]
    python benchmarks/scale.py --frames --hosts 4 --actors-per-host 2

Coordinator, engine, carrier, agents and connections are those of `echelon train --engine hosts`. Actors and learner are
stubs (scale_roles.py), and hosts are not checked before they join. `--hosts` counts those besides the head, whose own
actors are idle. A slot has 20 steps of as many CartPole environments as `--slot-bytes` needs, or with `--frames` the
frames of Pong; weights are those of a network of about `--weights-bytes`. A rate of -1 means as fast as possible.

Three parts are measured: nothing happens; weights are published; slots are sent. The costs of a version or a slot are
those of its part divided by their number, so they are right where a part keeps the carrier busy. In the end every slot
must have come once, in order and whole; else the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

import echelon.roles.coordinator
from echelon.config import TrainConfig
from echelon.config import replace as replace_config
from echelon.engines.process import ProcessSpec
from echelon.hosts.agent import take_part
from echelon.hosts.engine import HostsEngine
from echelon.hosts.quorum import Quorum
from echelon.presets import preset
from echelon.roles.context import Context
from echelon.roles.supervisor import PROCESSES
from echelon.schema import Spaces
from echelon.transport.secret import SECRET_VARIABLE
from echelon.transport.session import create_session
from echelon.world.node import Node
from scale_roles import Panel

STUBS = ("actor", "learner")
TRAJECTORY = 20
CARTPOLE_STEP_BYTES = 45  # of a slot
PATIENCE_S = 300.0
LOOK_S = 0.05
SETTLE_S = 1.5  # before and after a part, at most a quarter of it
START_S = 4.0  # after the start of the last actor, before the first reading; at most as long as a part
NICE = 19  # of stub actors: what is measured comes first
LEASE_S = 300.0  # a host is not lost because a thousand processes start on two cores
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
Pipe = Any  # a connection of multiprocessing


@dataclass(frozen=True)
class Setting:
    """One simulated run."""

    hosts: int
    actors_per_host: int
    slot_bytes: int
    weights_bytes: int
    slots_per_s: float
    versions_per_s: float
    seconds: float
    frames: bool

    @property
    def num_actors(self) -> int:
        return (self.hosts + 1) * self.actors_per_host

    def config(self, folder: Path) -> TrainConfig:
        config = preset("impala", "ALE/Pong-v5" if self.frames else "CartPole-v1")
        envs = config.actor.envs if self.frames else max(1, self.slot_bytes // (TRAJECTORY * CARTPOLE_STEP_BYTES))
        actor = replace_config(config.actor, num_actors=self.num_actors, envs=envs, trajectory=TRAJECTORY)
        network = config.network
        if not self.frames:  # actor and critic have two layers of h units each: about 2 h (h + 8) parameters
            units = max(1, round(math.sqrt(self.weights_bytes / 8 + 16.0) - 4.0))
            network = replace_config(network, hidden=(units, units))
        return replace_config(
            config,
            engine="hosts",
            actor=actor,
            network=network,
            hosts=replace_config(config.hosts, count=self.hosts + 1, lease_s=LEASE_S),
            acting=replace_config(config.acting, mode="local"),
            evaluation=replace_config(config.evaluation, episodes=0),
            run=replace_config(config.run, dir=str(folder)),
        )

    def spaces(self) -> Spaces:
        import gymnasium as gym
        import numpy as np

        if self.frames:
            return Spaces(gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), gym.spaces.Discrete(6))
        return Spaces(gym.spaces.Box(-1.0, 1.0, (4,), np.float32), gym.spaces.Discrete(2))


class ScaleEngine(HostsEngine):
    """Starts stubs in place of the actors and the learner."""

    sizes: dict[str, Any]

    def start(self, spec: ProcessSpec) -> None:
        kind = spec.name.partition("-")[0]
        if kind in STUBS:
            nice = NICE if kind == "actor" else 0
            config = {**spec.config, "sizes": self.sizes}
            spec = replace(spec, entry=f"scale_roles:{kind}", config=config, nice=nice)
        super().start(spec)


def run_head(setting: Setting, folder: Path, memory: Path, pipe: Pipe) -> None:
    """Runs the coordinator of one simulated run: the body of a process."""
    from echelon.interrupts import Interrupts
    from echelon.roles.plan.parts import Plan
    from echelon.runs.console import Console
    from echelon.runs.metrics import MetricsWriter

    session, config = create_session(str(memory)), setting.config(folder)
    (folder / "logs").mkdir(parents=True)
    output = (folder / "output").open("w")
    engine = ScaleEngine(str(session), ["scale_roles"], config.hosts.address, config.hosts.lease_s)
    world = Node.host(f"ipc://{session}/world")
    try:
        context = Context(
            name="coordinator", index=0, incarnation=0, generation=0, train=config, spaces=setting.spaces(),
            state_shapes=(), session=session, address=world.host_address, run_dir=folder, started_at=time.monotonic(),
        )  # fmt: skip
        plan = Plan(context)
        context = replace(context, state_shapes=plan.model.network.state_shapes)
        plan = Plan(context)
        plan.make()
        Panel(session)
        assignment = plan.assignment()
        engine.sizes = {name: getattr(assignment, name) for name in ("slot", "streams", "slots", "weights")}
        pipe.send({"address": engine.address, "session": session, **engine.sizes})
        began = time.monotonic()
        counts = plan.slot_counts()
        assignment = msgspec.structs.replace(assignment, check={})
        engine.gather(
            assignment, Quorum(config.hosts.count), counts, plan.carrier_file, lambda text: None, lambda: None
        )
        pipe.send(time.monotonic() - began)
        console, metrics = Console("scale", folder, output), MetricsWriter(folder, append=False)
        with Interrupts() as interrupts:
            coordinator = echelon.roles.coordinator.Coordinator(context, engine, world, console, metrics, interrupts)
            summary = coordinator.run()
        console.close()
        metrics.close()
        pipe.send({**summary, "restarts": coordinator.restarts, "hosts": engine.hosts()})
    finally:
        engine.close(0.0)
        world.close()
        shutil.rmtree(session, ignore_errors=True)


def run_host(number: int, memory: Path, folder: Path, pipe: Pipe) -> None:
    """Runs the agent of one simulated host: the body of a process."""
    address = pipe.recv()
    with (folder / f"host-{number}").open("w") as log:
        take_part(address, str(memory), lambda text: print(text, file=log, flush=True), f"host-{number}")


@dataclass(frozen=True)
class Reading:
    """Sums over the run so far."""

    at: float
    slots: int
    versions: int
    cpu_s: dict[str, float]  # by process; "carrier main" is the thread that is not libzmq's
    up: dict[str, int]  # bytes to the head, by connection: control or bulk
    down: dict[str, int]
    segments: int  # TCP segments with data, in both directions


Part = tuple[Reading, Reading]


class Run:
    """A simulated run from start to end, seen from outside."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._folder = Path(tempfile.mkdtemp(prefix="echelon-scale-"))
        self._memory = Path(tempfile.mkdtemp(prefix="echelon-scale-", dir="/dev/shm"))
        self._context = multiprocessing.get_context("fork")
        pipes = [self._context.Pipe() for _ in range(setting.hosts)]
        self._agents = [
            self._context.Process(target=run_host, args=(number, self._memory, self._folder, theirs))
            for number, (_, theirs) in enumerate(pipes, 1)
        ]
        self._pipe, theirs = self._context.Pipe()
        self._head = self._context.Process(target=run_head, args=(setting, self._folder / "run", self._memory, theirs))
        self.joined_s = self.started_s = 0.0
        try:
            for agent in self._agents:
                agent.start()  # before the head: it has no threads yet
            self._head.start()
            found = self._receive()
            began = time.monotonic()
            for ours, _ in pipes:
                ours.send(found["address"])
            self.slot_bytes, self.weights_bytes = found["slot"][0], found["weights"]
            self._panel, self._session = Panel(found["session"]), Path(found["session"])
            self.joined_s = self._receive()
            self._await_start()
            self.started_s = time.monotonic() - began
            time.sleep(min(START_S, setting.seconds))
            self._ports = {"control": found["address"].rpartition(":")[2], "bulk": self._carrier_port()}
        except BaseException:
            self.close()
            raise

    def _receive(self) -> Any:
        if not self._pipe.poll(PATIENCE_S):
            raise SystemExit(f"the head has not replied for {PATIENCE_S:g} s; see {self._folder}")
        return self._pipe.recv()

    def _carrier_port(self) -> str:
        return (self._session / "carrier.address").read_text().rpartition(":")[2]

    def _processes(self) -> dict[str, Any]:
        path = self._folder / "run" / PROCESSES
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def _await_start(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while sum(name.startswith("actor-") for name in self._processes()) < self.setting.num_actors:
            if time.monotonic() > deadline or not self._head.is_alive():
                raise SystemExit(f"the actors have not started within {PATIENCE_S:g} s; see {self._folder}")
            time.sleep(LOOK_S)

    def measure(self, *, slots_per_s: float = 0.0, versions_per_s: float = 0.0) -> Part:
        """Returns two readings, `seconds` apart, while slots and versions come at these rates."""
        self._panel["slots_per_s"], self._panel["versions_per_s"] = slots_per_s, versions_per_s
        settle_s = min(SETTLE_S, self.setting.seconds / 4)
        time.sleep(settle_s)
        first = self._read()
        time.sleep(self.setting.seconds)
        last = self._read()
        self._panel["slots_per_s"] = self._panel["versions_per_s"] = 0.0
        time.sleep(settle_s)
        return first, last

    def _read(self) -> Reading:
        pids = {name: self._processes()[name]["pid"] for name in ("coordinator", "carrier")}
        cpu_s = {name: process_cpu_s(pid) for name, pid in pids.items()}
        cpu_s["carrier main"] = thread_cpu_s(pids["carrier"])
        cpu_s["agents"] = sum(process_cpu_s(agent.pid or 0) for agent in self._agents)
        up, down, segments = dict[str, int](), dict[str, int](), 0
        for name, port in self._ports.items():
            words = subprocess.run(["ss", "-Htin", f"sport = :{port}"], capture_output=True, text=True, check=True)
            values = [word.split(":") for word in words.stdout.split() if word.count(":") == 1]
            up[name], down[name] = (_sum(values, key) for key in ("bytes_received", "bytes_acked"))
            segments += _sum(values, "data_segs_in") + _sum(values, "data_segs_out")
        counts = int(self._panel["slots"]), int(self._panel["versions"])
        return Reading(time.monotonic(), *counts, cpu_s, up, down, segments)

    def end(self) -> dict[str, Any]:
        """Waits for all granted slots, ends the run, and returns its summary."""
        self._panel["is_over"] = 1
        if not self._pipe.poll(60.0):
            self._panel["is_over"] = 2
        summary: dict[str, Any] = self._receive()
        return {**summary, "slots": int(self._panel["slots"]), "wrong": int(self._panel["wrong"])}

    def close(self) -> None:
        for process in (self._head, *self._agents):
            if process.pid is not None:
                process.join(20.0 if not sys.exc_info()[0] else 0.0)
                if process.is_alive():
                    process.terminate()
                    process.join(20.0)
        shutil.rmtree(self._memory, ignore_errors=True)
        if not sys.exc_info()[0]:
            shutil.rmtree(self._folder, ignore_errors=True)


def _sum(values: Sequence[Sequence[str]], key: str) -> int:
    return sum(int(value) for name, value in values if name == key)


def process_cpu_s(pid: int) -> float:
    """Returns the processor time of another process, by its clock (see clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | 2)


def thread_cpu_s(pid: int) -> float:
    """Returns the processor time of the first thread of a process."""
    fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def figures(setting: Setting) -> dict[str, Any]:
    """Simulates one run and returns its costs."""
    run = Run(setting)
    try:
        idle = run.measure()
        weights = run.measure(versions_per_s=setting.versions_per_s)
        slots = run.measure(slots_per_s=setting.slots_per_s)
        summary = run.end()
    finally:
        run.close()
    hosts, names = setting.hosts, ("coordinator", "carrier", "carrier main", "agents")
    num_sent = max(1.0, moved(weights, "down", "bulk") / run.weights_bytes)  # versions, once for each host
    num_slots = max(1, slots[1].slots - slots[0].slots)
    return {
        "hosts": hosts,
        "actors": hosts * setting.actors_per_host,
        "slot_bytes": run.slot_bytes,
        "weights_bytes": run.weights_bytes,
        "joined_s": run.joined_s,
        "started_s": run.started_s,
        "idle": {
            "core": {name: used_s(idle, name) / seconds(idle) for name in names},
            "bytes_per_host_s": {
                f"{way} {name}": moved(idle, way, name) / hosts / seconds(idle)
                for way in ("up", "down")
                for name in ("control", "bulk")
            },
            "segments_per_host_s": (idle[1].segments - idle[0].segments) / hosts / seconds(idle),
        },
        "weights": {
            "sent_per_s": num_sent / seconds(weights),
            "us_per_version_and_host": {name: 1e6 * used_s(weights, name) / num_sent for name in names},
        },
        "slots": {
            "slots_per_s": num_slots / seconds(slots),
            "us_per_slot": {name: 1e6 * used_s(slots, name) / num_slots for name in names},
            "bytes_per_slot": {way: moved(slots, way, "bulk") / num_slots for way in ("up", "down")},
            "segments_per_slot": (slots[1].segments - slots[0].segments) / num_slots,
        },
        "check": summary,
    }


def seconds(part: Part) -> float:
    return part[1].at - part[0].at


def used_s(part: Part, name: str) -> float:
    return part[1].cpu_s[name] - part[0].cpu_s[name]


def moved(part: Part, way: str, name: str) -> int:
    """Returns the bytes of the connections for control or bulk in a part, up to the head or down."""
    return int(getattr(part[1], way)[name] - getattr(part[0], way)[name])


def text_of(row: dict[str, Any]) -> str:
    """Returns the costs of a run as a user reads them."""
    idle, weights, slots, check = row["idle"], row["weights"], row["slots"], row["check"]

    def listed(values: dict[str, float], form: str, factor: float = 1.0) -> str:
        return ", ".join(f"{name} {factor * value:{form}}" for name, value in values.items())

    return (
        f"{row['hosts']} hosts, {row['actors']} actors; a slot has {row['slot_bytes']:,} bytes, weights have "
        f"{row['weights_bytes']:,}; joined after {row['joined_s']:.2f} s, all actors after {row['started_s']:.1f} s\n"
        f"  idle: % of a core: {listed(idle['core'], '.2f', 100.0)}\n"
        f"    per host and second: {listed(idle['bytes_per_host_s'], ',.0f')} bytes, "
        f"{idle['segments_per_host_s']:.1f} segments\n"
        f"  weights: {weights['sent_per_s']:,.0f} sent per second; us per version and host: "
        f"{listed(weights['us_per_version_and_host'], ',.0f')}\n"
        f"  slots: {slots['slots_per_s']:,.0f} per second; us per slot: {listed(slots['us_per_slot'], ',.0f')}\n"
        f"    per slot: {listed(slots['bytes_per_slot'], ',.0f')} bytes, {slots['segments_per_slot']:.2f} segments\n"
        f"  checked: {check['slots']:,} slots, {check['wrong']} wrong, {check['missing']} missing"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--actors-per-host", type=int, default=16)
    parser.add_argument("--slot-bytes", type=int, default=29_000)
    parser.add_argument("--weights-bytes", type=int, default=44_000)
    parser.add_argument("--slots-per-s", type=float, default=-1.0)
    parser.add_argument("--versions-per-s", type=float, default=-1.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--frames", action="store_true", help="slots and weights of Pong")
    parser.add_argument("--json", type=Path, help="file for all figures")
    given = vars(parser.parse_args())
    path, sizes = given.pop("json"), given.pop("hosts")
    os.environ[SECRET_VARIABLE] = f"echelon-{secrets.token_hex(32)}"
    rows = []
    for num in sizes:
        row = figures(Setting(num, **given))
        rows.append(row)
        print(text_of(row), flush=True)
    if path:
        path.write_text(json.dumps(rows, indent=1))
    return int(any(row["check"]["wrong"] or row["check"]["missing"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
