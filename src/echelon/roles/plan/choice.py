"""Which acting a run gets when it is left to choose: what a small model says is faster, after a calibration.

A calibration (`roles.calibration`) measures before the run what the environments, the policy and learning cost a step;
`forecast` makes steps per second out of it, for either acting the least of what its parts allow:

- the processors: the cores, over the processor time that one step takes of all processes together;
- the actors: each goes through its K environments. With local acting it steps them, then acts. With central acting it
  steps G groups in turn and asks for each; it waits only where an answer takes longer than stepping the other groups;
- the server, with central acting: one round after the other;
- the learner, which is the same for both.

Local acting pays a forward pass of K rows per actor, and each actor copies every version of the weights. Central acting
pays requests and rounds, and only its servers copy weights, but a round is one pass for all actors, maybe on a GPU.

What roles and requests cost beside that was measured once and stands in the constants below: CartPole-v1 with 2 actors
of 32 environments, on 2 cores of an EPYC. An actor took 378 us of processor time for a step of all its environments
with local acting, of which 216 were theirs and 77 the policy's; with central acting it took 187 us for a step of half
of them, of which theirs were 108. A server took 256 to 300 us for a round of two questions, of which the policy 120.

Where the two come out alike, local acting is chosen: it needs fewer processes, and it can repeat exactly.
"""

from __future__ import annotations

import dataclasses
import math
import os
import select
import signal
import time
from dataclasses import dataclass
from typing import Literal

from echelon.config import TrainConfig, replace
from echelon.engines.inline import InlineEngine
from echelon.engines.local import LocalEngine
from echelon.engines.process import Exit, ProcessSpec
from echelon.errors import ConfigError
from echelon.roles.context import Context
from echelon.roles.plan.findings import CALIBRATED, Measured, Prepared
from echelon.roles.plan.layouts import act_layout, num_groups, round_rows

CALIBRATION = "calibration"
LIMIT_S = 30.0  # a calibration that is not over by then is ended
LOOK_S = 0.1
MARGIN = 0.05  # what central acting must be ahead by
COPY_BYTES_PER_S = 8e9  # of weights that come from another core
TICK_S = 50e-6  # processor time of an actor for a step of a group, beside environments and policy
ASK_S = 30e-6  # and to ask, and to be woken with the answer
SEAT_S = 5e-6  # processor time of a server for each question of a round
ROUND_S = 140e-6  # and for the round, beside the policy
WAKE_S = 60e-6  # between a word's change and the sleeper at work


@dataclass(frozen=True, slots=True)
class Choice:
    """Who acts, and why."""

    mode: Literal["local", "central"]
    reason: str


@dataclass(frozen=True, slots=True)
class Shape:
    """How a run is laid out."""

    cores: int
    actors: int
    envs: int  # of an actor
    groups: int  # of an actor, with central acting
    servers: int
    round_rows: int
    version_steps: float  # environment steps from one version of the weights to the next
    weights_bytes: int

    @classmethod
    def of(cls, config: TrainConfig, cores: int, weights_bytes: int) -> Shape:
        """The layout of `config`, whose acting is central."""
        actor = config.actor
        return cls(
            cores=cores,
            actors=actor.num_actors,
            envs=actor.envs,
            groups=num_groups(config),
            servers=config.acting.servers,
            round_rows=round_rows(config),
            version_steps=_version_steps(config),
            weights_bytes=weights_bytes,
        )

    @property
    def copy_s(self) -> float:
        """Copying every version of the weights once, per environment step."""
        return self.weights_bytes / COPY_BYTES_PER_S / self.version_steps


@dataclass(frozen=True, slots=True)
class Forecast:
    """Environment steps per second that either acting should reach."""

    local: float
    central: float

    @property
    def mode(self) -> Literal["local", "central"]:
        return "central" if self.central > (1.0 + MARGIN) * self.local else "local"


def _version_steps(config: TrainConfig) -> float:
    replay, actor = config.replay, config.actor
    if config.experience == "replay":
        return replay.publish_every * replay.batch / (replay.samples_per_insert or 1.0)
    return config.batch_trajectories * actor.trajectory * actor.envs


def forecast(shape: Shape, measured: Measured) -> Forecast:
    """What the model in the text above says."""
    return Forecast(_local(shape, measured), _central(shape, measured))


def _local(shape: Shape, measured: Measured) -> float:
    whole, act, learn = measured.whole, measured.act, measured.learn
    K, A = shape.envs, shape.actors
    cpu_s = (whole.cpu_s + act.cpu_s + TICK_S) / K + A * shape.copy_s + learn.cpu_s  # of one step
    return min(shape.cores / cpu_s, A * K / (whole.wall_s + act.wall_s + TICK_S), _rate(learn.wall_s))


def _central(shape: Shape, measured: Measured) -> float:
    part, learn = measured.part, measured.learn
    K, A, G, J = shape.envs, shape.actors, shape.groups, shape.servers
    questions = shape.round_rows * G / K  # of a round
    beside_s = ROUND_S + questions * SEAT_S
    round_s, round_cpu_s = measured.round.wall_s + beside_s, measured.round.cpu_s + beside_s
    turn_s, turn_cpu_s = part.wall_s + TICK_S + ASK_S, part.cpu_s + TICK_S + ASK_S
    cpu_s = G * turn_cpu_s / K + round_cpu_s / shape.round_rows + J * shape.copy_s + learn.cpu_s
    cycle_s = max(G * turn_s, turn_s + round_s + 2 * WAKE_S)
    return min(shape.cores / cpu_s, A * K / cycle_s, J * shape.round_rows / round_s, _rate(learn.wall_s))


def _rate(seconds: float) -> float:
    return 1.0 / seconds if seconds else math.inf


def settled(config: TrainConfig) -> Choice | None:
    """What `acting.mode` stands for where nothing has to be measured or looked up."""
    if config.has_workers:
        return Choice("local", "every worker chooses its own actions")
    if config.experience == "gradients":
        return Choice("local", "actors learn with the policy that they act with")
    if config.engine == "hosts":
        return Choice("local", "every host acts for its own actors")
    if config.acting.mode != "auto":
        return Choice(config.acting.mode, "as asked for")
    if config.experience == "replay" and config.replay.prioritized:
        return Choice("local", "actors judge what they do, for the first priorities of their transitions")
    return None


def choose_acting(context: Context, engine: InlineEngine | LocalEngine, prepared: Prepared) -> Choice:
    """What `acting.mode` stands for: itself, or where it is `auto` what suits the run.

    ConfigError where the run could not have central acting as it is configured, even if local acting would be chosen.
    """
    config = context.train
    if config.experience == "replay" and config.acting.value:
        raise ConfigError(f"acting.value=true, but the networks of {config.preset} judge actions. Leave it at false.")
    choice = settled(config)
    if choice is not None:
        return choice
    config = replace(config, acting=replace(config.acting, mode="central"))
    context = dataclasses.replace(context, train=config)
    act_layout(context)
    if isinstance(engine, InlineEngine):
        return Choice("local", "one process does everything, so there is nobody to share a forward pass with")
    if config.learner.max_lag == 0 and prepared.on_cpu:
        return Choice("local", "learner.max_lag=0 repeats exactly, which central acting cannot")
    gone = _calibrate(context, engine)
    if gone is None or gone.code or gone.signal:
        how = f"was not over within {LIMIT_S:g} s" if gone is None else _first_line(gone.cause)
        return Choice("local", f"the calibration {how}")
    measured = Measured.read(context.session / CALIBRATED)
    shape = Shape.of(config, len(os.sched_getaffinity(0)), prepared.weights_bytes)
    forecasted = forecast(shape, measured)
    return Choice(forecasted.mode, reason_text(shape, measured, forecasted))


def reason_text(shape: Shape, measured: Measured, forecasted: Forecast) -> str:
    """The reason of a choice, in one line."""
    better, other = forecasted.local, forecasted.central
    rival = "central"
    if forecasted.mode == "central":
        better, other, rival = other, better, "local"
    if better == other:
        return f"the learner takes no more than about {better:,.0f} steps/s, whoever acts"
    return (
        f"about {better:,.0f} steps/s against {other:,.0f} with {rival} acting: {shape.envs} environments step in "
        f"{_time(measured.whole.wall_s)}, an actor chooses their actions in {_time(measured.act.wall_s)}, a server "
        f"those of {shape.round_rows} in {_time(measured.round.wall_s)}"
    )


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _calibrate(context: Context, engine: LocalEngine) -> Exit | None:
    """How the calibration ended; None where it did not."""
    context = dataclasses.replace(context, name=CALIBRATION)
    engine.start(
        ProcessSpec(CALIBRATION, "echelon.roles.calibration:calibration", context.to_config(keep_objects=False))
    )
    deadline = math.inf
    while time.monotonic() < deadline:
        select.select(engine.descriptors, [], [], LOOK_S)
        for gone in engine.exits():
            return gone
        if deadline == math.inf and engine.pid(CALIBRATION) is not None:  # before, the fork server is still importing
            deadline = time.monotonic() + LIMIT_S
    engine.signal(CALIBRATION, signal.SIGKILL)
    while not engine.exits():  # killed: the fork server tells
        select.select(engine.descriptors, [], [], LOOK_S)
    return None
