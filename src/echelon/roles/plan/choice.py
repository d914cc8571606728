"""Chooses between local and central acting for `acting.mode=auto`, by a performance model and a calibration.

Before the run, a calibration (`roles.calibration`) measures the cost of environments, policy and learning per step.
From these costs, `forecast` estimates the steps per second of both modes as the minimum of four limits:

- the CPU: the number of cores divided by the CPU time of one step, summed over all processes;
- the actors: with local acting, an actor steps its K environments, then acts. With central acting, it steps G groups in
  turn and sends a request for each; it waits only if a reply takes longer than stepping the other groups;
- the server, with central acting: it processes one round after the other;
- the learner, which is the same for both.

Local acting needs one forward pass of K rows per actor, and each actor copies every version of the weights. Central
acting needs requests and rounds, but a round is one pass for all actors, possibly on a GPU, and only the servers copy
weights.

The other costs of roles and requests were measured once and are the constants below (CartPole-v1 with 2 actors of 32
environments, on 2 cores of an EPYC). With local acting, an actor took 378 us of CPU time for a step of all its
environments, of which the environments took 216 us and the policy 77 us. With central acting, it took 187 us for a step
of half of them, of which the environments took 108 us. A server took 256 to 300 us for a round of two requests, of
which the policy took 120 us.

If both modes are about equally fast, local acting is chosen: it needs fewer processes and can be reproducible.
"""

from __future__ import annotations

import dataclasses
import math
import select
import signal
import time
from dataclasses import dataclass
from typing import Literal

from echelon.config import TrainConfig, replace
from echelon.control_groups import num_cores
from echelon.engines.inline import InlineEngine
from echelon.engines.local import LocalEngine
from echelon.engines.process import Exit, ProcessSpec
from echelon.errors import ConfigError
from echelon.roles.context import Context
from echelon.roles.plan.findings import CALIBRATED, Measured, Prepared
from echelon.roles.plan.layouts import act_layout, num_groups, round_rows
from echelon.roles.plan.stages import Stages

CALIBRATION = "calibration"
LIMIT_S = 30.0  # a calibration that takes longer is killed
LOOK_S = 0.1
MARGIN = 0.05  # central acting must be faster by this fraction
COPY_BYTES_PER_S = 8e9  # copying weights that another core wrote
TICK_S = 50e-6  # CPU time of an actor for a step of a group, besides environments and policy
ASK_S = 30e-6  # CPU time of an actor to send a request and wake up with the reply
SEAT_S = 5e-6  # CPU time of a server for each request of a round
ROUND_S = 140e-6  # CPU time of a server for each round, besides the policy
WAKE_S = 60e-6  # from the change of a futex word until the sleeping process runs


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen acting mode, and the reason."""

    mode: Literal["local", "central"]
    reason: str


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of a run that the forecast depends on."""

    cores: int
    actors: int
    envs: int  # per actor
    groups: int  # per actor, with central acting
    servers: int
    round_rows: int
    version_steps: float  # environment steps from one version of the weights to the next
    weights_bytes: int

    @classmethod
    def of(cls, config: TrainConfig, cores: int, weights_bytes: int) -> Shape:
        """Returns the shape of `config`, whose acting mode must be central."""
        actor = config.actor
        return cls(
            cores=cores,
            actors=config.actors_per_host,
            envs=actor.envs_per_actor,
            groups=num_groups(config),
            servers=config.acting.servers,
            round_rows=round_rows(config),
            version_steps=_version_steps(config),
            weights_bytes=weights_bytes,
        )

    @property
    def copy_s(self) -> float:
        """Seconds per environment step to copy every version of the weights once."""
        return self.weights_bytes / COPY_BYTES_PER_S / self.version_steps


@dataclass(frozen=True, slots=True)
class Forecast:
    """The expected environment steps per second of both modes."""

    local: float
    central: float

    @property
    def mode(self) -> Literal["local", "central"]:
        return "central" if self.central > (1.0 + MARGIN) * self.local else "local"


def _version_steps(config: TrainConfig) -> float:
    replay, actor = config.replay, config.actor
    if config.experience == "replay":
        return replay.publish_every * replay.batch / (replay.samples_per_insert or 1.0)
    return config.batch_trajectories * actor.trajectory * actor.envs_per_actor


def forecast(shape: Shape, measured: Measured) -> Forecast:
    """Applies the performance model in the module docstring."""
    return Forecast(_local(shape, measured), _central(shape, measured))


def _local(shape: Shape, measured: Measured) -> float:
    whole, act, learn = measured.whole, measured.act, measured.learn
    K, A = shape.envs, shape.actors
    cpu_s = (whole.cpu_s + act.cpu_s + TICK_S) / K + A * shape.copy_s + learn.cpu_s  # of one step
    return min(shape.cores / cpu_s, A * K / (whole.wall_s + act.wall_s + TICK_S), _rate(learn.wall_s))


def _central(shape: Shape, measured: Measured) -> float:
    part, learn = measured.part, measured.learn
    K, A, G, J = shape.envs, shape.actors, shape.groups, shape.servers
    requests = shape.round_rows * G / K  # per round
    overhead_s = ROUND_S + requests * SEAT_S
    round_s, round_cpu_s = measured.round.wall_s + overhead_s, measured.round.cpu_s + overhead_s
    turn_s, turn_cpu_s = part.wall_s + TICK_S + ASK_S, part.cpu_s + TICK_S + ASK_S
    cpu_s = G * turn_cpu_s / K + round_cpu_s / shape.round_rows + J * shape.copy_s + learn.cpu_s
    cycle_s = max(G * turn_s, turn_s + round_s + 2 * WAKE_S)
    return min(shape.cores / cpu_s, A * K / cycle_s, J * shape.round_rows / round_s, _rate(learn.wall_s))


def _rate(seconds: float) -> float:
    return 1.0 / seconds if seconds else math.inf


def settled(config: TrainConfig) -> Choice | None:
    """Returns the acting mode if it follows from the configuration alone, else None."""
    if config.has_workers:
        return Choice("local", "every worker chooses its own actions")
    if config.experience == "gradients":
        return Choice("local", "actors compute gradients and need the policy themselves")
    if config.acting.mode != "auto":
        return Choice(config.acting.mode, "as configured")
    if config.experience == "replay" and config.replay.prioritized:
        return Choice("local", "actors need the policy's values for the initial priorities of their transitions")
    return None


def choose_acting(context: Context, engine: InlineEngine | LocalEngine, prepared: Prepared, stages: Stages) -> Choice:
    """Returns the acting mode: the configured one or, for `auto`, the one that suits the run, or its head.

    With `auto`, raises ConfigError if the settings of central acting are invalid, even if local acting would be chosen.
    """
    config = context.train
    if config.experience == "replay" and config.acting.value:
        raise ConfigError(
            f"acting.value=true, but the networks of {config.preset} have action values and no state value. Leave it "
            "at false."
        )
    choice = settled(config)
    if choice is not None:
        return choice
    config = replace(config, acting=replace(config.acting, mode="central"))
    context = dataclasses.replace(context, train=config)
    act_layout(context)
    if isinstance(engine, InlineEngine):
        return Choice("local", "all roles run in one process, so no forward pass can be shared")
    if config.learner.max_lag == 0 and prepared.on_cpu:
        return Choice("local", "every actor chooses its own actions, which keeps the run reproducible")
    gone = _calibrate(context, engine, stages)
    if gone is None or gone.code or gone.signal:
        how = f"did not finish within {LIMIT_S:g} s" if gone is None else _first_line(gone.cause)
        return Choice("local", f"the calibration {how}")
    measured = Measured.read(context.session / CALIBRATED)
    shape = Shape.of(config, num_cores(), prepared.weights_bytes)
    forecasted = forecast(shape, measured)
    return Choice(forecasted.mode, reason_text(shape, measured, forecasted))


def reason_text(shape: Shape, measured: Measured, forecasted: Forecast) -> str:
    """Returns the reason for a choice, in one line."""
    better, other = forecasted.local, forecasted.central
    rival = "central"
    if forecasted.mode == "central":
        better, other, rival = other, better, "local"
    if better == other:
        return f"the learner limits both modes to about {better:,.0f} steps/s"
    return (
        f"about {better:,.0f} steps/s against {other:,.0f} with {rival} acting: {shape.envs} environments step in "
        f"{_time(measured.whole.wall_s)}; an actor chooses their actions in {_time(measured.act.wall_s)}, a server "
        f"those of {shape.round_rows} environments in {_time(measured.round.wall_s)}"
    )


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _calibrate(context: Context, engine: LocalEngine, stages: Stages) -> Exit | None:
    """Runs the calibration and returns its exit, or None if it did not finish within LIMIT_S and was killed."""
    context = dataclasses.replace(context, name=CALIBRATION)
    engine.start(
        ProcessSpec(CALIBRATION, "echelon.roles.calibration:calibration", context.to_config(keep_objects=False))
    )
    stages.begin("acting", "measuring local and central acting")
    deadline = math.inf
    while time.monotonic() < deadline:
        stages.look()
        select.select(engine.descriptors, [], [], LOOK_S)
        for gone in engine.exits():
            return gone
        if deadline == math.inf and engine.pid(CALIBRATION) is not None:  # until then the fork server is importing
            deadline = time.monotonic() + LIMIT_S
    engine.signal(CALIBRATION, signal.SIGKILL)
    while not engine.exits():  # wait until the fork server reports the kill
        select.select(engine.descriptors, [], [], LOOK_S)
    return None
