"""Names the bottleneck of a run and a remedy, from the time that its roles spend in each phase."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

Shares = Mapping[str, float]  # phase -> share of a role's wall time, in [0, 1]

RARE = ("exchange", "hung")  # only with several learners; only of actors in a call that has not returned
PHASES = ("env", "act", "learn", "exchange", "transfer", "hung", "wait")
BUSY = 0.9  # above this share a role, or all cores together, count as saturated
LARGE = 0.3  # a share of the learners' time that is worth saving
LATE_EPISODES = 4  # for each worker; a learner with more of them is behind
IDLE = 0.5  # above this share of waiting, a learner could update more often
_WORK = ("env", "act", "learn", "exchange", "transfer")
_REMEDIES = {
    "env": "A vectorised environment would cost less per step (--env.vector vector_entry_point, or envpool:ID)",
    "act": "More environments per actor (--envs-per-actor) would share each forward pass",
    "learn": "Fewer epochs, a smaller network or a GPU (--device cuda) would cost less per sample",
    "exchange": "One learner (--learners 1) would have nothing to exchange",
    "transfer": "Longer trajectories (--actor.trajectory) would transfer data less often",
}

_PARTS = {  # the phases of an actor
    "env": "stepping the environments",
    "act": "choosing actions",
    "learn": "computing gradients",
    "transfer": "transferring data",
}


def bottleneck(
    roles: Mapping[str, Shares],
    *,
    num_cores: int,
    num_processes: int,
    lag_bounded: bool = True,
    replayed: bool = False,
    on_gpu: bool = False,
    vectorised: bool = False,
    num_joined: int = 0,
) -> str:
    """Returns one sentence that names the bottleneck and one that names the remedy.

    `roles` maps names such as "actor-0", "inference-0" and "learner" to phase shares; `num_processes` run on
    `num_cores`; `replayed`: a limiter paces actors and learner; `on_gpu`: the learner uses a GPU; `vectorised`: the
    environments are; `num_joined`: actors that join a batch, if it grows with their number, else 0.
    """
    sentences = _bottleneck(roles, num_cores, num_processes, lag_bounded, replayed, on_gpu, vectorised)
    learners = [shares for name, shares in roles.items() if name.startswith("learner")]
    if num_joined <= 2 or not learners or _mean(learners, "wait") <= IDLE:
        return sentences
    fewer = "" if lag_bounded else "--learner.batch N or "
    return (
        f"{sentences} A batch has one trajectory of each of the {num_joined} actors, so batches grow with the actors: "
        f"{fewer}--envs-per-actor 0 would update more often."
    )


def _bottleneck(
    roles: Mapping[str, Shares],
    num_cores: int,
    num_processes: int,
    lag_bounded: bool,
    replayed: bool,
    on_gpu: bool,
    vectorised: bool,
) -> str:
    actors, servers, learners = (
        [shares for name, shares in roles.items() if name.startswith(kind)]
        for kind in ("actor", "inference", "learner")
    )
    if not actors or not learners:
        return "bottleneck: unknown (no times from actors and learner yet)."
    if _mean(actors, "hung") >= LARGE:
        return _hanging(roles)
    work = {phase: sum(shares.get(phase, 0.0) for shares in roles.values()) for phase in _WORK}
    actors_learn = _mean(actors, "learn") > 0.0
    if _mean(learners, "exchange") >= LARGE and _busy(learners) >= max(_busy(actors), _busy(servers)):
        return _exchanging(learners, _mean(actors, "wait"), replayed, on_gpu)
    is_full = num_processes >= num_cores and sum(work.values()) >= BUSY * num_cores
    if num_processes == 1 or is_full:
        remedy = _remedy(max(work, key=work.__getitem__), actors_learn, replayed, vectorised)
        return _processor(work, _all(num_cores, num_processes), remedy)
    actors_busy, learner_busy = _busy(actors), _busy(learners)
    servers_busy, who = _busy(servers), "the learner" if len(learners) == 1 else f"the {len(learners)} learners"
    waits = f"actors wait {_mean(actors, 'wait'):.0%}, {who} {_mean(learners, 'wait'):.0%}"
    if servers:
        waits += f", inference {_mean(servers, 'wait'):.0%}"
    if max(actors_busy, learner_busy, servers_busy) < 0.6:
        more = "Allowing lag (--learner.max-lag 1)" if lag_bounded else "More --actor.slots"
        if replayed:
            more = "Another --replay.samples-per-insert (0: no limit), or more actors or environments,"
        if servers:
            more = f"`--acting auto` measures whether central acting is faster here. {more}"
        return f"bottleneck: none is busy; they wait for each other ({waits}). {more} would let them run concurrently."
    if servers_busy >= max(learner_busy, actors_busy):
        return _inference(servers_busy, len(servers), _mean(actors, "wait"), num_cores - num_processes)
    if learner_busy >= actors_busy:
        less = _less_learning(replayed, on_gpu)
        return f"bottleneck: {who} (busy {learner_busy:.0%}; actors wait {_mean(actors, 'wait'):.0%}). {less}"
    return _acting(actors, learners, num_cores - num_processes, vectorised)


def _hanging(roles: Mapping[str, Shares]) -> str:
    """Returns the text for actors that spend their time in calls that do not return."""
    name, shares = max(roles.items(), key=lambda item: item[1].get("hung", 0.0))
    return (
        f"bottleneck: an environment that hangs: {shares['hung']:.0%} of the time of {name} was spent in calls that "
        "did not return within seconds. After --supervision.hang-timeout-s the stack of the actor is shown (also in "
        f"logs/{name}.log), and the actor is replaced."
    )


def _exchanging(learners: list[Shares], actors_wait: float, replayed: bool, on_gpu: bool) -> str:
    """Returns the text for several learners that spend more time on the exchange than sharing the work saves."""
    larger = f"larger minibatches ({'--replay.batch' if replayed else '--learner.batch'})"
    threads = "" if on_gpu else " --learner.threads gives one learner more cores without it."
    return (
        f"bottleneck: the learners exchange gradients at every optimizer step, "
        f"{_mean(learners, 'exchange'):.0%} of their time (actors wait {actors_wait:.0%}). One learner (--learners 1) "
        f"or {larger} would save that.{threads}"
    )


def _less_learning(replayed: bool, on_gpu: bool) -> str:
    if replayed:
        first = "Smaller batches (--replay.batch)" if on_gpu else "A GPU (--device cuda)"
        return f"{first}, a smaller network or a lower --replay.samples-per-insert would help."
    gpu = "" if on_gpu else ", a GPU (--device cuda)"
    return f"Larger batches (--learner.batch){gpu} or fewer epochs would help."


def workers_bottleneck(learner: Shares, num_behind: int = 0, num_workers: int = 1) -> str:
    """Returns the sentences for a run with workers, whose times are unknown: the learner is the limit, or they are.

    `num_behind` episodes have arrived whose updates have not been made. A learner that keeps up has at most a few per
    worker; one that is behind may still have waited at the beginning, for the first workers.
    """
    busy = 1.0 - learner.get("wait", 0.0)
    if busy >= BUSY or num_behind > LATE_EPISODES * max(1, num_workers):
        late = f"{num_behind:,} episodes wait" if num_behind > 1 else "episodes wait"
        return (
            f"bottleneck: the learner (busy {busy:.0%}); {late} for their updates. A GPU (--device cuda), a "
            "smaller network, or fewer or smaller updates (--update-steps, --batch-size) would help."
        )
    return f"bottleneck: the workers (the learner is busy {busy:.0%}); more workers would send more episodes."


def _inference(busy: float, num_servers: int, actors_wait: float, free_cores: int) -> str:
    who = "the inference server" if num_servers == 1 else f"the {num_servers} inference servers"
    more = f"More of them (--acting.servers, {free_cores} cores are free), a" if free_cores > 0 else "A"
    return (
        f"bottleneck: {who} (busy {busy:.0%}; actors wait {actors_wait:.0%}). {more} GPU (--acting.device cuda), a "
        "smaller network or a policy in every actor (--acting local) would help."
    )


def _acting(actors: list[Shares], learners: list[Shares], free_cores: int, vectorised: bool) -> str:
    shares = {phase: _mean(actors, phase) for phase in _PARTS}
    phase = max(shares, key=shares.__getitem__)
    remedy = _remedy(phase, actors_learn=shares["learn"] > 0.0, replayed=False, vectorised=vectorised)
    more = f"More actors (--actor.num_actors, {free_cores} cores are free) would help" if free_cores > 0 else ""
    if remedy:
        remedy, more = f" {remedy}.", f" {more} too." if more else ""
    else:
        more = f" {more or 'More cores would help'}."
    waits = "the learner waits" if len(learners) == 1 else f"the {len(learners)} learners wait"
    return (
        f"bottleneck: the actors, {_PARTS[phase]} ({phase} {shares[phase]:.0%} of an actor's time; "
        f"{waits} {_mean(learners, 'wait'):.0%}).{remedy}{more}"
    )


def _remedy(phase: str, actors_learn: bool, replayed: bool, vectorised: bool) -> str:
    """Returns what would make `phase` cheaper; "" if nothing is known."""
    if phase == "env" and vectorised:
        return ""
    if phase == "learn" and actors_learn:
        return "A smaller network, or a preset that learns on a GPU, would cost less per sample"
    if phase == "learn" and replayed:
        return (
            "A lower --replay.samples-per-insert, a smaller network or a GPU (--device cuda) would cost less per step"
        )
    return _REMEDIES[phase]


def _processor(work: Mapping[str, float], all_busy: str, remedy: str) -> str:
    total = sum(work.values()) or 1.0
    split = ", ".join(f"{phase} {work[phase] / total:.0%}" for phase in _WORK if phase != "exchange" or work[phase])
    less = f"More cores, or less work: {remedy[0].lower()}{remedy[1:]}." if remedy else "More cores would help."
    return f"bottleneck: the processor, {all_busy} ({split}), so more actors would not help. {less}"


def _all(num_cores: int, num_processes: int) -> str:
    if num_cores == num_processes == 1:
        return "one process does everything"
    return f"all {num_cores} cores are busy with {num_processes} processes"


def _busy(roles: list[Shares]) -> float:
    """Returns the mean share of time in which `roles` do not wait; 0 if there are none."""
    if not roles:
        return 0.0
    return statistics.fmean(sum(shares.get(phase, 0.0) for phase in _WORK) for shares in roles)


def _mean(roles: list[Shares], phase: str) -> float:
    return statistics.fmean(shares.get(phase, 0.0) for shares in roles)
