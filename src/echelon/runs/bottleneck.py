"""Where the time goes, in one sentence: which part of a run limits it, and what to change."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

Shares = Mapping[str, float]  # phase -> share of a role's wall time, in [0, 1]

PHASES = ("env", "act", "learn", "transfer", "wait")
BUSY = 0.9  # a role, or all cores together, above this share has nothing left to give
_WORK = ("env", "act", "learn", "transfer")
_REMEDIES = {
    "env": "A vectorised environment would cost less a step (--env.vector vector_entry_point, or envpool:ID)",
    "act": "More environments per actor (--envs-per-actor) would share each forward pass",
    "learn": "Fewer epochs, a smaller network or a GPU (--device cuda) would cost less a sample",
    "transfer": "Longer trajectories (--actor.trajectory) would pass data on less often",
}


def bottleneck(
    roles: Mapping[str, Shares],
    *,
    num_cores: int,
    num_processes: int,
    lag_bounded: bool = True,
    replayed: bool = False,
    on_gpu: bool = False,
) -> str:
    """One sentence naming the bottleneck and one naming the remedy.

    `roles` maps names such as "actor-0", "inference-0" and "learner" to phase shares; `num_processes` is how many run
    on `num_cores`; `replayed` where a limiter paces actors and learner; `on_gpu` where a GPU learns.
    """
    actors, servers, learners = (
        [shares for name, shares in roles.items() if name.startswith(kind)]
        for kind in ("actor", "inference", "learner")
    )
    if not actors or not learners:
        return "bottleneck: not known (no times from actors and learner yet)."
    work = {phase: sum(shares.get(phase, 0.0) for shares in roles.values()) for phase in _WORK}
    if num_processes >= num_cores and sum(work.values()) >= BUSY * num_cores:
        return _processor(work, num_cores, num_processes)
    actors_busy, learner_busy = _busy(actors), _busy(learners)
    servers_busy = _busy(servers) if servers else 0.0
    waits = f"actors wait {_mean(actors, 'wait'):.0%}, the learner {_mean(learners, 'wait'):.0%}"
    if servers:
        waits += f", inference {_mean(servers, 'wait'):.0%}"
    if max(actors_busy, learner_busy, servers_busy) < 0.6:
        more = "Allowing lag (--learner.max-lag 1)" if lag_bounded else "More --actor.slots"
        if replayed:
            more = "Another --replay.samples-per-insert (0: no limit), or more actors or environments,"
        if servers:
            more = f"`--acting auto` measures whether requests pay here. {more}"
        return f"bottleneck: none is busy; they wait for each other ({waits}). {more} would let them work at one time."
    if servers_busy >= max(learner_busy, actors_busy):
        return _inference(servers_busy, len(servers), _mean(actors, "wait"), num_cores - num_processes)
    if learner_busy >= actors_busy:
        less = _less_learning(replayed, on_gpu)
        return f"bottleneck: the learner (busy {learner_busy:.0%}; actors wait {_mean(actors, 'wait'):.0%}). {less}"
    return _acting(actors, learners, num_cores - num_processes)


def _less_learning(replayed: bool, on_gpu: bool) -> str:
    if replayed:
        first = "Smaller batches (--replay.batch)" if on_gpu else "A GPU (--device cuda)"
        return f"{first}, a smaller network or a lower --replay.samples-per-insert would help."
    gpu = "" if on_gpu else ", a GPU (--device cuda)"
    return f"Larger batches (--learner.batch){gpu} or fewer epochs would help."


def workers_bottleneck(learner: Shares) -> str:
    """The same of a run with workers, which are elsewhere: either they keep the learner busy, or they do not."""
    busy = 1.0 - learner.get("wait", 0.0)
    if busy >= BUSY:
        return (
            f"bottleneck: the learner (busy {busy:.0%}); episodes wait for their updates. A GPU (--device cuda), a "
            "smaller network, or fewer or smaller updates (--update-steps, --batch-size) would help."
        )
    return f"bottleneck: the workers (the learner is busy {busy:.0%}); more of them would bring more episodes."


def _inference(busy: float, num_servers: int, actors_wait: float, free_cores: int) -> str:
    who = "the inference server" if num_servers == 1 else f"the {num_servers} inference servers"
    more = f"More of them (--acting.servers, {free_cores} cores are free), a" if free_cores > 0 else "A"
    return (
        f"bottleneck: {who} (busy {busy:.0%}; actors wait {actors_wait:.0%}). {more} GPU (--acting.device cuda), a "
        "smaller network or a policy in every actor (--acting local) would help."
    )


def _acting(actors: list[Shares], learners: list[Shares], free_cores: int) -> str:
    shares = {phase: _mean(actors, phase) for phase in ("env", "act", "transfer")}
    phase = max(shares, key=shares.__getitem__)
    part = {"env": "stepping the environments", "act": "choosing actions", "transfer": "handing over data"}[phase]
    more = f" More actors (--actor.num_actors, {free_cores} cores are free) would help too." if free_cores > 0 else ""
    return (
        f"bottleneck: the actors, {part} ({phase} {shares[phase]:.0%} of an actor's time; "
        f"the learner waits {_mean(learners, 'wait'):.0%}). {_REMEDIES[phase]}.{more}"
    )


def _processor(work: Mapping[str, float], num_cores: int, num_processes: int) -> str:
    total = sum(work.values())
    split = ", ".join(f"{phase} {work[phase] / total:.0%}" for phase in _WORK)
    largest = max(work, key=work.__getitem__)
    return (
        f"bottleneck: the processor, {_all(num_cores, num_processes)} ({split}), so more actors would only take turns. "
        f"More cores, or less work: {_REMEDIES[largest][0].lower()}{_REMEDIES[largest][1:]}."
    )


def _all(num_cores: int, num_processes: int) -> str:
    if num_cores == num_processes == 1:
        return "one process does everything"
    return f"all {num_cores} cores are busy with {num_processes} processes"


def _busy(roles: list[Shares]) -> float:
    return statistics.fmean(sum(shares.get(phase, 0.0) for phase in _WORK) for shares in roles)


def _mean(roles: list[Shares], phase: str) -> float:
    return statistics.fmean(shares.get(phase, 0.0) for shares in roles)
