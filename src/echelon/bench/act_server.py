"""The inference server of `echelon bench act`, measured alone and with feeders."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from echelon.algorithms.model import Model
from echelon.bench.act import ActSetting
from echelon.bench.act_feeder import MEASURE, NUM_GROUPS, STOP, Feed, FeederCounts
from echelon.bench.harness import Progress, repeat
from echelon.bench.processes import Processes, one_thread, session_in
from echelon.config import NetworkConfig
from echelon.errors import RunError
from echelon.memory_check import check_fits, free_memory
from echelon.roles.placement import pick_device
from echelon.schema import Spaces
from echelon.servers.cuda import CudaAnswerer, CudaServer
from echelon.servers.gpu_pipeline import Timings
from echelon.servers.inference import InferenceServer, PolicyAnswerer
from echelon.transport.act_board import ActBoard
from echelon.transport.batcher import Batcher, BatchRule, Round
from echelon.transport.shared_memory import WeightsBoard

NUM_ACTIONS = 10
START_TIMEOUT_S = 60.0
LOOK_INTERVAL_S = 0.1

# The policy of the RPC benchmark: 2,000 numbers, a layer to 10, five more of 10; and the Nature CNN on Atari frames.
NETWORKS: dict[str, tuple[NetworkConfig, gym.spaces.Box]] = {
    "mlp": (NetworkConfig(hidden=(10,) * 5, shared=True), gym.spaces.Box(0.0, 1.0, (2000,), np.float32)),
    "cnn": (NetworkConfig(), gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)),
}


def make_model(setting: ActSetting, device: str = "cpu") -> Model:
    config, space = NETWORKS[setting.network]
    return Model(config, Spaces(space, gym.spaces.Discrete(NUM_ACTIONS)), device=device)


def device_of(setting: ActSetting) -> str:
    """Returns the device of the server."""
    return pick_device(setting.device, make_model(setting).parameters.numel())


def measure(setting: ActSetting, progress: Progress) -> dict[str, Any]:
    """Measures the server alone and with feeders."""
    with session_in(setting.shm_dir) as session, one_thread():
        serving = MeasuredServer(setting, make_model(setting, device_of(setting)), session, progress)
        try:
            return {"batch": setting.batch, "alone": serving.alone(), **serving.fed()}
        finally:
            serving.close()


class MeasuredServer:
    """The server of one measurement, and the memory it shares with its feeders."""

    def __init__(self, setting: ActSetting, model: Model, session: Path, progress: Progress) -> None:
        space = model.spaces.observation
        assert isinstance(space, gym.spaces.Box)
        rows = setting.batch // setting.num_feeders
        self.feed = Feed(tuple(space.shape), str(space.dtype), rows, setting.num_feeders, setting.spin_us)
        self.setting, self.session, self.progress, self.layout = setting, session, progress, self.feed.layout
        check_fits(self.layout.nbytes, f"a batch of {setting.batch}", free_memory(session.parent), "--batch")
        self.board = ActBoard(session, self.layout)
        weights = WeightsBoard(session, model.nbytes)
        weights.publish(model.parts(), 1)
        self.tally = FeederCounts(session, setting.num_feeders)
        self.timings = Timings()
        self.answerer: PolicyAnswerer | CudaAnswerer
        if model.device.type == "cpu":
            self.answerer = PolicyAnswerer(model, self.board, weights, 0)
            return
        groups = [self.layout.seats_of(0, group) for group in range(NUM_GROUPS)]
        self.answerer = CudaAnswerer(
            model, self.board, weights, 0, groups=groups, precision=setting.precision, report=print
        )
        self.timings = self.answerer.time_passes()

    def alone(self) -> dict[str, Any]:
        """Measures the server without feeders: one round at a time, and with a round of each group in flight."""
        rng, answerer = np.random.default_rng(0), self.answerer
        for leaf in self.board.observation:
            self.feed.fill(leaf[: self.layout.num_clients], rng)
            leaf[self.layout.num_clients :] = leaf[: self.layout.num_clients]
        ones = np.ones(self.layout.num_clients, np.int64)
        rounds = [Round(np.asarray(self.layout.seats_of(0, group)), ones, 0) for group in range(NUM_GROUPS)]
        for round in rounds:
            answerer.answer(round)  # the first call captures and allocates
        rate = self._repeat(lambda: answerer.answer(rounds[0]))
        pace = {"actions_per_s": rate, "round_ms": 1e3 * self.setting.batch / rate}
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
        """Returns the rows per second of `work`, which is one round."""
        done = repeat(work, min(1.0, self.setting.seconds))
        return done.count * self.setting.batch / done.wall_s

    def fed(self) -> dict[str, Any]:
        """Measures the server with its feeders."""
        seconds, tally = self.setting.seconds, self.tally
        with Processes(self.session, preload=("echelon.bench.act_feeder",)) as feeders:
            self._seat(feeders)
            rule = BatchRule(max_wait_us=self.setting.max_wait_us)
            batcher = Batcher(self.board, 0, rule)  # after all feeders have seats, so that it expects all of them
            if isinstance(self.answerer, CudaAnswerer):
                server: InferenceServer = CudaServer(batcher, self.answerer)
            else:
                server = InferenceServer(batcher, self.answerer)
            self._serve(server, seconds / 5, feeders)
            before = self._now(server)
            tally.phase[0] = MEASURE
            self._serve(server, seconds, feeders)
            deadline = time.monotonic() + START_TIMEOUT_S
            while not tally.answered.all() and time.monotonic() < deadline:  # a feeder has not been served yet
                self._serve(server, LOOK_INTERVAL_S, feeders)
            tally.phase[0] = STOP
            after = self._now(server)
        return self._report({name: after[name] - before[name] for name in after})

    def _seat(self, feeders: Processes) -> None:
        """Starts the feeders and waits until all have sent a request."""
        for index in range(self.feed.num_feeders):
            config = {"feed": asdict(self.feed), "index": index}
            feeders.start(f"feeder-{index}", "echelon.bench.act_feeder:Feeder", config)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (self.board.asked > 0).all():
            time.sleep(0.01)
            feeders.check()
            if time.monotonic() > deadline:
                raise RunError(f"the {self.feed.num_feeders} feeders were not ready within {START_TIMEOUT_S:.0f} s.")

    def _serve(self, server: InferenceServer, seconds: float, feeders: Processes) -> None:
        start, look = time.monotonic(), 0.0
        while (now := time.monotonic()) < start + seconds:
            if now > look:
                feeders.check()
                self.progress(int(now - start), int(seconds))
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
            raise RunError(f"no request was served within {elapsed_s:.1f} s. Raise --seconds, or lower --batch.")
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
        if isinstance(self.answerer, CudaAnswerer):
            self.answerer.close()
