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
    "exchange": "One learner (--learners 1) would have nothing to exchange",
    "transfer": "Longer trajectories (--actor.trajectory) would transfer data less often",
}

_GPU = "a GPU (--device cuda)"
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
    has_gpu: bool = True,
    vectorised: bool = False,
    num_joined: int = 0,
    smaller_batch: str = "",
) -> str:
    """Returns one sentence that names the bottleneck and one that names the remedy.

    `roles` maps names such as "actor-0", "inference-0" and "learner" to phase shares; `num_processes` run on
    `num_cores`; `replayed`: a limiter paces actors and learner; `on_gpu`: the learner uses a GPU; `has_gpu`: there
    is one to recommend; `vectorised`: the environments are; `num_joined`: actors that join a batch, if it grows with
    their number, else 0; `smaller_batch`: the options that make it smaller.
    """
    sentences = _bottleneck(roles, num_cores, num_processes, lag_bounded, replayed, on_gpu, has_gpu, vectorised)
    learners = [shares for name, shares in roles.items() if name.startswith("learner")]
    if num_joined <= 2 or not learners or _mean(learners, "wait") <= IDLE:
        return sentences
    fewer = "" if lag_bounded else "--learner.batch N or "
    return (
        f"{sentences} A batch has one trajectory of each of the {num_joined} actors, so batches grow with the actors: "
        f"{fewer}{smaller_batch} would update more often."
    )


def _bottleneck(
    roles: Mapping[str, Shares],
    num_cores: int,
    num_processes: int,
    lag_bounded: bool,
    replayed: bool,
    on_gpu: bool,
    has_gpu: bool,
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
    actors_learn, gpu = _mean(actors, "learn") > 0.0, _GPU if has_gpu and not on_gpu else ""
    if _mean(learners, "exchange") >= LARGE and _busy(learners) >= max(_busy(actors), _busy(servers)):
        return _exchanging(learners, _mean(actors, "wait"), replayed, on_gpu)
    is_full = num_processes >= num_cores and sum(work.values()) >= BUSY * num_cores
    if num_processes == 1 or is_full:
        remedy = _remedy(max(work, key=work.__getitem__), actors_learn, replayed, gpu, vectorised)
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
        return f"bottleneck: none is busy; they wait for each other ({waits}). {more} would let them run concurrently."
    if servers_busy >= max(learner_busy, actors_busy):
        return _inference(servers_busy, len(servers), _mean(actors, "wait"), num_cores - num_processes, has_gpu)
    if learner_busy >= actors_busy:
        less = _less_learning(replayed, on_gpu, gpu)
        return f"bottleneck: {who} (busy {learner_busy:.0%}; actors wait {_mean(actors, 'wait'):.0%}). {less}"
    return _acting(actors, learners, num_cores - num_processes, gpu, vectorised)


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


def _less_learning(replayed: bool, on_gpu: bool, gpu: str) -> str:
    if replayed:
        batches = "smaller batches (--replay.batch)" if on_gpu else ""
        return f"{_any_of(batches, gpu, 'a smaller network', 'a lower --replay.samples-per-insert')} would help."
    return f"{_any_of('larger batches (--learner.batch)', gpu, 'fewer epochs')} would help."


def _any_of(*remedies: str) -> str:
    """Returns the remedies that are not empty as the beginning of a sentence: "One, another or a third"."""
    *others, last = filter(None, remedies)
    text = f"{', '.join(others)} or {last}" if others else last
    return text[0].upper() + text[1:]


def workers_bottleneck(
    learner: Shares, num_behind: int = 0, num_workers: int = 1, *, on_gpu: bool = False, has_gpu: bool = True
) -> str:
    """Returns the sentences for a run with workers, whose times are unknown: the learner is the limit, or they are.

    `num_behind` episodes have arrived whose updates have not been made. A learner that keeps up has at most a few per
    worker; one that is behind may still have waited at the beginning, for the first workers.
    """
    busy = 1.0 - learner.get("wait", 0.0)
    if busy >= BUSY or num_behind > LATE_EPISODES * max(1, num_workers):
        late = f"{num_behind:,} episodes wait" if num_behind > 1 else "episodes wait"
        gpu, fewer = _GPU if has_gpu and not on_gpu else "", "fewer or smaller updates (--update-steps, --batch-size)"
        less = _any_of(gpu, "a smaller network", fewer)
        return f"bottleneck: the learner (busy {busy:.0%}); {late} for their updates. {less} would help."
    return f"bottleneck: the workers (the learner is busy {busy:.0%}); more workers would send more episodes."


def _inference(busy: float, num_servers: int, actors_wait: float, free_cores: int, has_gpu: bool) -> str:
    who = "the inference server" if num_servers == 1 else f"the {num_servers} inference servers"
    more = f"more of them (--acting.servers, {free_cores} cores are free)" if free_cores > 0 else ""
    gpu = "a GPU (--acting.device cuda)" if has_gpu else ""
    less = _any_of(more, gpu, "a smaller network", "a policy in every actor (--acting local)")
    return f"bottleneck: {who} (busy {busy:.0%}; actors wait {actors_wait:.0%}). {less} would help."


def _acting(actors: list[Shares], learners: list[Shares], free_cores: int, gpu: str, vectorised: bool) -> str:
    shares = {phase: _mean(actors, phase) for phase in _PARTS}
    phase = max(shares, key=shares.__getitem__)
    remedy = _remedy(phase, actors_learn=shares["learn"] > 0.0, replayed=False, gpu=gpu, vectorised=vectorised)
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


def _remedy(phase: str, actors_learn: bool, replayed: bool, gpu: str, vectorised: bool) -> str:
    """Returns what would make `phase` cheaper; "" if nothing is known."""
    if phase == "env" and vectorised:
        return ""
    if phase == "learn" and actors_learn:
        other = "a preset that learns on a GPU" if gpu else ""
        return f"{_any_of('a smaller network', other)} would cost less per sample"
    if phase == "learn" and replayed:
        return f"{_any_of('a lower --replay.samples-per-insert', 'a smaller network', gpu)} would cost less per step"
    if phase == "learn":
        return f"{_any_of('fewer epochs', 'a smaller network', gpu)} would cost less per sample"
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
