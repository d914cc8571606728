"""Divides the actors of a run among its hosts, by their cores. Needs only the standard library."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import TypeVar

H = TypeVar("H")


def divide_among_learners(places: Sequence[H | None], cores: Mapping[H, int]) -> list[H | None]:
    """Returns the host of each actor, which is that of its learner: equal parts in the order in which hosts joined.

    Later, the actors of a host that is not among `cores` any longer go to the first one, as its learner does.
    """
    hosts = list(cores)
    if all(place is None for place in places):
        return [hosts[actor * len(hosts) // len(places)] for actor in range(len(places))]
    return [place if place in cores else hosts[0] for place in places]


def balance(places: Sequence[H | None], cores: Mapping[H, int], least: int) -> list[H | None]:
    """Returns the host of each actor, balanced by actors per core, with as few moves as possible.

    `places` are the present hosts of the actors, `cores` those of the hosts that take part, in the order in which they
    joined. An actor whose host is not among them goes to another. There is one actor per core, but at least `least`,
    and at most all; the rest has no place (None). Every host has at least one actor, if there are enough; among equals,
    the host that joined last has one more. Hosts take the actors with the lowest numbers, and give those with the
    highest. The result depends on nothing but the arguments.
    """
    hosts = list(cores)
    order = {host: place for place, host in enumerate(hosts)}
    kept: dict[H, list[int]] = {host: [] for host in hosts}
    for actor, place in enumerate(places):
        if place is not None and place in kept:
            kept[place].append(actor)
    counts = {host: len(actors) for host, actors in kept.items()}

    def next_load(host: H) -> tuple[bool, float, int]:
        """Ranks hosts for one more actor: the first takes it."""
        return counts[host] > 0, (counts[host] + 1) / cores[host], -order[host]

    def load(host: H) -> float:
        return counts[host] / cores[host]

    num_actors = min(len(places), max(least, sum(cores.values())))
    while sum(counts.values()) > num_actors:
        counts[max(hosts, key=load)] -= 1
    takers = [(next_load(host), host) for host in hosts]
    heapq.heapify(takers)
    for _ in range(num_actors - sum(counts.values())):
        host = takers[0][1]
        counts[host] += 1
        heapq.heapreplace(takers, (next_load(host), host))
    while givers := [host for host in hosts if counts[host] > 1]:
        giver, taker = max(givers, key=load), min(hosts, key=next_load)
        if counts[taker] and (counts[taker] + 1) / cores[taker] >= load(giver):
            break
        counts[giver], counts[taker] = counts[giver] - 1, counts[taker] + 1
    found: list[H | None] = [None] * len(places)
    for host in hosts:
        for actor in kept[host][: counts[host]]:
            found[actor] = host
    free = (actor for actor, place in enumerate(list(found)) if place is None)
    for host in hosts:
        for _ in range(counts[host] - len(kept[host][: counts[host]])):
            found[next(free)] = host
    return found
