"""`echelon bench train`: environment steps per second of a training, compared with the limit of its machines.

The limit is the rate of cores that only step environments, act and learn: it follows from the processor time of one
environment step in each of these stages, measured separately with the run's classes and shapes. The efficiency is the
training's rate over the limit; the difference to 1 is waiting, data transfer and record keeping.

With several hosts the stages are measured at the head, and the limit is that of the cores of all hosts, as if they were
equal to those of the head. Processor time is that of the roles at the head.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TextIO

from echelon.bench.harness import machine
from echelon.bench.load import loaded_cores
from echelon.bench.processes import one_thread, session_in
from echelon.bench.stages import StepCost, TrainingStages, measure
from echelon.bench.watch import OWN, Usage, usage, watched_training
from echelon.config import HostsConfig, TrainConfig, replace
from echelon.errors import ConfigError
from echelon.hosts.cpus import count_cpus
from echelon.names import short_name
from echelon.roles.plan.start import is_one_process, num_cores_of
from echelon.training import RunResult

Costs = dict[str, StepCost]
Reporter = Callable[[str], None]
NUM_CHUNKS, CHUNK_S = 5, 0.3


def bench_train(
    config: TrainConfig,
    *,
    seconds: float = 20.0,
    num_chunks: int = NUM_CHUNKS,
    chunk_s: float = CHUNK_S,
    output: TextIO | None = None,
) -> dict[str, Any]:
    """Trains for `seconds` (including the start), measures the stages alone and with loaded cores, and reports both."""
    if seconds <= 0:
        raise ConfigError(f"seconds={seconds:g} must be above 0.")
    if config.stop.minutes:
        raise ConfigError("set the time of a benchmark with --seconds S, not with --minutes.")
    out = output or sys.stdout

    def print_line(text: str) -> None:
        print(text, file=out, flush=True)

    num_cores = num_cores_of(config)
    if is_one_process(config):
        config = replace(config, **{"learner.threads": num_cores})
    print_line(f"training {config.preset} on {short_name(config.env.id)} for {seconds:g} s")
    result, used = _train(config, seconds, num_cores, print_line, out if config.has_hosts else io.StringIO())
    device = str(result.summary["device"])
    costs = _costs(config, result, num_cores, {"num_chunks": num_chunks, "chunk_s": chunk_s}, print_line)
    hosts = [host for host in result.summary.get("hosts", ()) if not host["lost"]]
    if hosts:
        num_cores = count_cpus((host["cpus"], host["cores"]) for host in hosts)
    rate = float(result.summary["env_steps_per_s"])
    limits = {load: limit(cost, num_cores, on_gpu=device != "cpu") for load, cost in costs.items()}
    report = {
        "bench": "train",
        **_setting(config, seconds, device, num_cores),
        "stages": {name: {load: asdict(cost[name]) for load, cost in costs.items()} for name in costs["alone"]},
        "limit": limits,
        "env_steps_per_s": rate,
        "samples_per_s": rate * _samples_per_step(result),
        "env_steps": result.summary["env_steps"],
        "efficiency": {load: rate / value for load, value in limits.items()},
        "processor": asdict(used) if used else None,
        "time": result.summary["time"],
        "bottleneck": result.summary["bottleneck"],
        "restarts": result.summary["restarts"],
        "return_mean": result.summary["return_mean"],
        **({"hosts": result.summary["hosts"]} if hosts else {}),
    }
    return {**report, "rest": _rest(report)}


def limit(costs: Costs, num_cores: int, *, on_gpu: bool) -> float:
    """Returns the environment steps per second that the stages allow.

    If the learner uses a GPU, the cores step and act, and the GPU's wall time is a separate limit.
    """
    collect_us = costs["env"].cpu_us + costs["act"].cpu_us
    if on_gpu:
        return min(1e6 * num_cores / collect_us, 1e6 / costs["learn"].wall_us)
    return 1e6 * num_cores / (collect_us + costs["learn"].cpu_us)


def _train(
    config: TrainConfig, seconds: float, num_cores: int, report: Reporter, output: TextIO
) -> tuple[RunResult, Usage | None]:
    """Trains without evaluation; the run folder is kept only if `run.dir` is set. `output` gets the run's messages."""

    def show(row: dict[str, Any]) -> None:
        report(f"  {row['wall_s']:5.1f} s: {row['env_steps']:>12,} steps, {row['env_steps_per_s']:>9,.0f} a second")

    with watched_training(replace(config, **{"stop.minutes": seconds / 60}), show, output) as watched:
        result, samples = watched.result, watched.samples
    if not result.summary["updates"]:
        what = f"the learner finished no batch within {seconds:g} s, including the start"
        least, replay = config.replay.min_size, result.summary.get("replay")
        if replay is not None and (inserted := replay["inserted"]) < least:
            raise ConfigError(
                f"{what}: the replay has {inserted:,} transitions, and learning starts at replay.min_size={least}. "
                f"Lower it (--replay.min-size {max(inserted // 4, 1)}), or raise --seconds."
            )
        raise ConfigError(f"{what}. Raise --seconds.")
    return result, usage(samples, num_cores, whole_machine=not is_one_process(config))


def _samples_per_step(result: RunResult) -> float:
    """Returns how often a step was used for learning; with replay, since learning started."""
    return float(result.summary["replay"]["samples_per_insert"]) if "replay" in result.summary else 1.0


def _costs(
    config: TrainConfig, result: RunResult, num_cores: int, chunks: dict[str, Any], report: Reporter
) -> dict[str, Costs]:
    """Returns the costs of the stages, alone and while the other cores are busy."""
    duration_s = 3 * chunks["num_chunks"] * chunks["chunk_s"]
    if config.has_hosts:  # the stages of one host are those of a run on it alone
        config = replace(config, engine="local", hosts=HostsConfig())
    with session_in(config.shm_dir) as session, one_thread():
        stages = TrainingStages(config, session, str(result.summary["device"]), _samples_per_step(result))
        with contextlib.closing(stages):
            report(f"measuring env, act and learn alone, about {duration_s:.0f} s")
            alone = measure(stages.by_name(), **chunks)
            report(f"measuring them while the other cores are busy ({num_cores - 1}), about {duration_s:.0f} s")
            with loaded_cores(num_cores - 1):
                return {"alone": alone, "loaded": measure(stages.by_name(), **chunks)}


def _setting(config: TrainConfig, seconds: float, device: str, num_cores: int) -> dict[str, Any]:
    """Returns the setting of the measurement and the machine."""
    from echelon import config_io

    return {
        "config": config_io.to_json(config),
        "seconds": seconds,
        "device": device,
        "num_cores": num_cores,
        **machine(device),
    }


def _rest(report: dict[str, Any]) -> str:
    """Returns one sentence: the cores' time besides the three stages, in microseconds per environment step."""
    used = report["processor"]
    if used is None:
        return "where the rest goes: unknown, because the run was too short. Raise --seconds."
    waiting = ", ".join(f"{name} {shares['wait']:.0%}" for name, shares in report["time"].items())
    waiting = f"Share of time spent waiting: {waiting}."
    if "hosts" in report:
        parts = {**used["roles_us"], "other programs": used["others_us"], "idle": used["idle_us"]}
        total = f"{used['total_us']:.2f} µs of the {report['hardware']['cores']} cores of the head"
        return f"a step of the run took {total}: {_parts_text(parts)}. {waiting}"
    stages_us = sum(cost["loaded"]["cpu_us"] for cost in report["stages"].values())
    roles = dict(used["roles_us"])
    inline = "learner" not in roles
    workers_us = roles.pop(OWN) if inline else roles.pop("actor", 0.0) + roles.pop("learner")
    parts = {
        "besides the stages": workers_us - stages_us,
        **roles,
        **({} if inline else {"other programs": used["others_us"]}),
        "without a core" if inline else "idle": used["idle_us"],
    }
    total = f"{used['total_us']:.2f} µs of {report['num_cores']} cores"
    return f"a step took {total}: the stages {stages_us:.2f}, {_parts_text(parts)}. {waiting}"


def _parts_text(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {us:.2f}" for name, us in sorted(parts.items(), key=lambda part: -part[1]))


def table(report: dict[str, Any]) -> str:
    """Returns the report as a text table."""
    stages, limits, efficiency = report["stages"], report["limit"], report["efficiency"]
    on_gpu = report["device"] != "cpu"
    rows = ["", f"{'µs of processor time a step':<30}{'alone':>10}{'loaded':>10}"]
    for name, cost in stages.items():
        rows.append(f"  {name:<28}{cost['alone']['cpu_us']:>10.2f}{cost['loaded']['cpu_us']:>10.2f}")
    if on_gpu:
        wall = stages["learn"]
        rows.append(f"  {'learn, by the clock':<28}{wall['alone']['wall_us']:>10.2f}{wall['loaded']['wall_us']:>10.2f}")
    if report["processor"] is not None:
        name = "all roles of the head, while training" if "hosts" in report else "all roles, while training"
        rows.append(f"  {name:<38}{sum(report['processor']['roles_us'].values()):>10.2f}")
    rows.append(f"{'limit, steps/s':<30}{limits['alone']:>10,.0f}{limits['loaded']:>10,.0f}")
    rows.append(f"{'trained, steps/s':<30}{report['env_steps_per_s']:>10,.0f}")
    if report["samples_per_s"] != report["env_steps_per_s"]:
        rows.append(f"{'learned from, samples/s':<30}{report['samples_per_s']:>10,.0f}")
    rows.append(f"{'efficiency':<30}{efficiency['alone']:>10.1%}{efficiency['loaded']:>10.1%}")
    hardware = report["hardware"]
    where = f"{report['num_cores']} of {hardware['cores']} cores of {hardware['processor']}"
    if "hosts" in report:
        hosts = sum(not host["lost"] for host in report["hosts"])
        head = f"{hardware['cores']} cores of {hardware['processor']}"
        where = f"{hosts} hosts with {report['num_cores']} cores in total, taken as equal to those of the head, {head}"
    restarts = f" {report['restarts']} roles were restarted." if report["restarts"] else ""
    rows += ["", f"{where}{', ' + hardware['gpu'] if hardware['gpu'] else ''}.{restarts}", report["rest"]]
    return "\n".join(rows)
