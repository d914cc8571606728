"""`echelon bench act`: actions per second of one inference server, fed by processes of this machine.

Feeders stand for actors whose environments cost nothing: they lay ready observations on the act board, ask, and wait,
one group while the other is answered. The server is the one that training uses, in this process. Beside the rate stands
the server *alone*: the same rounds answered again and again with nobody to wait for, which is its limit.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from echelon.algorithms.model import Model
from echelon.bench.exits import check_running
from echelon.bench.feeder import MEASURE, NUM_GROUPS, STOP, Feed, Tally
from echelon.bench.machine import hardware
from echelon.config import NetworkConfig
from echelon.engines.local import LocalEngine
from echelon.engines.process import ProcessSpec
from echelon.errors import ConfigError, RunError
from echelon.roles.placement import pick_device
from echelon.room import check_room, free_memory
from echelon.schema import Spaces
from echelon.servers.cuda import CudaAnswerer, CudaServer
from echelon.servers.inference import InferenceServer, PolicyAnswerer
from echelon.servers.lane import Timings
from echelon.transport.act_board import ActBoard
from echelon.transport.batcher import Batcher, BatchRule, Round
from echelon.transport.segments import check_platform
from echelon.transport.session import create_session
from echelon.transport.shared_memory import WeightsBoard

Tell = Callable[[str], None]
NUM_ACTIONS = 10
START_TIMEOUT_S = 60.0
LOOK_INTERVAL_S = 0.1

# The policy of the RPC benchmark: 2,000 numbers, a layer to 10, five more of 10; and the Nature CNN on Atari frames.
NETWORKS: dict[str, tuple[NetworkConfig, gym.spaces.Box]] = {
    "mlp": (NetworkConfig(hidden=(10,) * 5, shared=True), gym.spaces.Box(0.0, 1.0, (2000,), np.float32)),
    "cnn": (NetworkConfig(), gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)),
}


@dataclass(frozen=True, slots=True)
class ActSetting:
    """What `echelon bench act` measures."""

    network: str = "cnn"
    batches: tuple[int, ...] = (64, 256, 1024, 4096)  # rows of a round; a measurement each
    feeders: int = 2
    device: str = "auto"
    precision: str = "float32"
    seconds: float = 5.0  # of each measurement, after a warm-up of a fifth of it
    max_wait_us: float = 50_000.0
    spin_us: float = 0.0  # how long a feeder looks for its answer before it sleeps
    shm_dir: str = "/dev/shm"

    def __post_init__(self) -> None:
        if self.network not in NETWORKS:
            raise ConfigError(f"network={self.network} is not known; there are {', '.join(NETWORKS)}.")
        if self.precision not in ("float32", "bfloat16"):
            raise ConfigError(f"precision={self.precision} is not known; there are float32 and bfloat16.")
        if self.feeders < 1:
            raise ConfigError(f"feeders={self.feeders} must be at least 1.")
        if self.seconds <= 0:
            raise ConfigError(f"seconds={self.seconds:g} must be above 0.")
        for batch in self.batches:
            if batch < 1:
                raise ConfigError(f"batch={batch} must be at least 1.")
            if batch % self.feeders:
                raise ConfigError(
                    f"batch={batch} does not divide among {self.feeders} feeders. Use a multiple, or another --feeders."
                )


def default_feeders() -> int:
    """Half of the cores, as a power of two: the other half is for the server, and for what feeds its GPU."""
    return 1 << (max(2, len(os.sched_getaffinity(0)) // 2).bit_length() - 1)


def bench_act(setting: ActSetting, tell: Tell = print) -> dict[str, Any]:
    """Measures every batch of `setting`, one after the other."""
    from echelon.runs.folder import versions

    check_platform()
    config, space = NETWORKS[setting.network]
    spaces = Spaces(space, gym.spaces.Discrete(NUM_ACTIONS))
    device = pick_device(setting.device, Model(config, spaces).parameters.numel())
    if device == "cpu" and setting.precision != "float32":
        raise ConfigError(f"precision={setting.precision} is for a GPU; the CPU answers in float32.")
    results = []
    for batch in setting.batches:
        tell(f"{setting.network} on {device}: rounds of {batch} from {setting.feeders} feeders, {setting.seconds:g} s")
        results.append(_measure(setting, Model(config, spaces, device=device), batch, tell))
    return {
        "bench": "act",
        **asdict(setting),
        "device": device,
        "hardware": hardware(device),
        "versions": versions(),
        "results": results,
    }


def _measure(setting: ActSetting, model: Model, batch: int, tell: Tell) -> dict[str, Any]:
    session, threads = create_session(setting.shm_dir), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        serving = Serving(setting, model, batch, session, tell)
        try:
            return {"batch": batch, "alone": serving.alone(), **serving.fed()}
        finally:
            serving.close()
    finally:
        torch.set_num_threads(threads)
        shutil.rmtree(session, ignore_errors=True)


class Serving:
    """The server of one measurement and the memory it shares with its feeders."""

    def __init__(self, setting: ActSetting, model: Model, batch: int, session: Path, tell: Tell) -> None:
        space = model.spaces.observation
        assert isinstance(space, gym.spaces.Box)
        rows = batch // setting.feeders
        self.feed = Feed(tuple(space.shape), str(space.dtype), rows, setting.feeders, setting.spin_us)
        self.setting, self.session, self.layout = setting, session, self.feed.layout
        check_room(self.layout.nbytes, f"a batch of {batch}", free_memory(session.parent), "--batch")
        self.board = ActBoard(session, self.layout)
        weights = WeightsBoard(session, model.nbytes)
        weights.publish(model.parts(), 1)
        self.tally = Tally(session, setting.feeders)
        self.engine: LocalEngine | None = None
        self.timings = Timings()
        self.answerer: PolicyAnswerer | CudaAnswerer
        if model.device.type == "cpu":
            self.answerer = PolicyAnswerer(model, self.board, weights, 0)
            return
        groups = [self.layout.seats_of(0, group) for group in range(NUM_GROUPS)]
        self.answerer = CudaAnswerer(
            model, self.board, weights, 0, groups=groups, precision=setting.precision, tell=tell
        )
        self.timings = self.answerer.time_passes()

    def alone(self) -> dict[str, Any]:
        """The server with nobody to wait for: one round at a time, and with a round of each group under way."""
        rng, answerer = np.random.default_rng(0), self.answerer
        for leaf in self.board.observation:
            self.feed.fill(leaf[: self.layout.num_clients], rng)
            leaf[self.layout.num_clients :] = leaf[: self.layout.num_clients]
        ones = np.ones(self.layout.num_clients, np.int64)
        rounds = [Round(np.asarray(self.layout.seats_of(0, group)), ones, 0) for group in range(NUM_GROUPS)]
        for round in rounds:
            answerer.answer(round)  # captures and allocates
        rate = self._repeat(lambda: answerer.answer(rounds[0]))
        pace = {"actions_per_s": rate, "round_ms": 1e3 * self.feed.rows * self.feed.num_feeders / rate}
        if not isinstance(answerer, CudaAnswerer):
            return pace
        flying = [answerer.launch(round) for round in rounds]

        def turn() -> None:
            for group, round in enumerate(rounds):
                for flight in flying[group]:
                    answerer.land(flight)
                flying[group] = answerer.launch(round)

        overlapped = NUM_GROUPS * self._repeat(turn)
        for flights in flying:
            for flight in flights:
                answerer.land(flight)
        return {**pace, "overlapped_actions_per_s": overlapped}

    def _repeat(self, work: Callable[[], object]) -> float:
        """Rows per second of `work`, which is one round."""
        start, count, seconds = time.perf_counter(), 0, min(1.0, self.setting.seconds)
        while (elapsed_s := time.perf_counter() - start) < seconds or not count:
            work()
            count += 1
        return count * self.feed.rows * self.feed.num_feeders / elapsed_s

    def fed(self) -> dict[str, Any]:
        """The server with its feeders."""
        self._start_feeders()
        rule = BatchRule(max_wait_us=self.setting.max_wait_us)
        batcher = Batcher(self.board, 0, rule)  # now that all are seated, so that it expects all
        if isinstance(self.answerer, CudaAnswerer):
            server: InferenceServer = CudaServer(batcher, self.answerer)
        else:
            server = InferenceServer(batcher, self.answerer)
        self._serve(server, self.setting.seconds / 5)
        before = self._now(server)
        self.tally.phase[0] = MEASURE
        self._serve(server, self.setting.seconds)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.tally.answered.all() and time.monotonic() < deadline:  # one has had no turn yet
            self._serve(server, LOOK_INTERVAL_S)
        self.tally.phase[0] = STOP
        after = self._now(server)
        return self._report({name: after[name] - before[name] for name in after})

    def _start_feeders(self) -> None:
        self.engine = LocalEngine(str(self.session), preload=("echelon.bench.feeder",))
        for index in range(self.setting.feeders):
            config = {"feed": self.feed.to_json(), "session": str(self.session), "index": index}
            self.engine.start(
                ProcessSpec(f"feeder-{index}", "echelon.bench.feeder:Feeder", config, log=str(self.session / "log"))
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (self.board.asked > 0).all():
            time.sleep(0.01)
            check_running(self.engine)
            if time.monotonic() > deadline:
                raise RunError(f"the {self.setting.feeders} feeders were not ready within {START_TIMEOUT_S:.0f} s.")

    def _serve(self, server: InferenceServer, seconds: float) -> None:
        assert self.engine is not None
        end, look = time.monotonic() + seconds, 0.0
        while (now := time.monotonic()) < end:
            if now > look:
                check_running(self.engine)
                look = now + LOOK_INTERVAL_S
            server.step(0.01)

    def _now(self, server: InferenceServer) -> dict[str, float]:
        counts = {
            name: getattr(server, name) for name in ("num_rounds", "num_rows", "wait_s", "forward_s", "transfer_s")
        }
        return {"elapsed_s": time.perf_counter(), **counts, **asdict(self.timings)}

    def _report(self, spent: dict[str, float]) -> dict[str, Any]:
        elapsed_s, tally = spent["elapsed_s"], self.tally
        if not spent["num_rounds"] or not tally.answered.all():
            raise RunError(f"nothing was answered within {elapsed_s:.1f} s. Raise --seconds, or lower --batch.")
        p50, p95 = np.percentile(tally.latencies() * 1e-6, (50, 95))
        passes = spent["passes"]
        row_bytes = sum(leaf[0, 0].nbytes for leaf in self.board.observation)
        laid_bytes = float(tally.answered.sum()) * self.feed.rows * row_bytes
        return {
            "actions_per_s": spent["num_rows"] / elapsed_s,
            "rounds_per_s": spent["num_rounds"] / elapsed_s,
            "mean_batch": spent["num_rows"] / spent["num_rounds"],
            "latency_ms": {"50": float(p50), "95": float(p95)},
            "server": {name: spent[f"{name}_s"] / elapsed_s for name in ("wait", "forward", "transfer")},
            "gpu_ms": {name: spent[f"{name}_ms"] / passes for name in ("to_gpu", "forward", "from_gpu")}
            if passes
            else {},
            "feeders": {
                "laying": float(tally.laying_ns.sum() / tally.total_ns.sum()),
                "waiting": float(tally.waiting_ns.sum() / tally.total_ns.sum()),
                "laid_gb_per_s": 1e-9 * spent["num_rows"] * row_bytes / elapsed_s,
                "one_laying_gb_per_s": laid_bytes / float(tally.laying_ns.sum()),
            },
        }

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close(0.0)
        if isinstance(self.answerer, CudaAnswerer):
            self.answerer.close()


def table(report: dict[str, Any]) -> str:
    """The report as people read it."""
    machine = report["hardware"]
    where = f"{machine['cores']} cores{', ' + machine['gpu'] if machine['gpu'] else ''}"
    head = f"{report['network']} on {report['device']}, {report['precision']}, {report['feeders']} feeders; {where}"
    rows = ["", head, ""]
    rates = ("batch", "actions/s", "p50 ms", "p95 ms", "mean batch", "alone/s", "overlapped/s")
    rows.append("".join(f"{name:>13}" for name in rates))
    for result in report["results"]:
        latency, alone = result["latency_ms"], result["alone"]
        overlapped = alone.get("overlapped_actions_per_s")
        rows.append(
            f"{result['batch']:>13}{result['actions_per_s']:>13,.0f}{latency['50']:>13.3f}{latency['95']:>13.3f}"
            f"{result['mean_batch']:>13.1f}{alone['actions_per_s']:>13,.0f}"
            + (f"{overlapped:>13,.0f}" if overlapped else f"{'-':>13}")
        )
    rows += ["", "where the time goes: a round on the GPU in ms, and shares of the server's and the feeders' time", ""]
    shares = ("batch", "to GPU", "forward", "from GPU", "wait", "compute", "settle", "laying", "waiting", "GB/s laid")
    rows.append("".join(f"{name:>10}" for name in shares))
    for result in report["results"]:
        gpu, server, feeders = result["gpu_ms"], result["server"], result["feeders"]
        times = [f"{gpu[name]:.3f}" if gpu else "-" for name in ("to_gpu", "forward", "from_gpu")]
        parts = [server["wait"], server["forward"], server["transfer"], feeders["laying"], feeders["waiting"]]
        cells = [str(result["batch"]), *times, *(f"{share:.0%}" for share in parts), f"{feeders['laid_gb_per_s']:.2f}"]
        rows.append("".join(f"{cell:>10}" for cell in cells))
    return "\n".join(rows)
