"""How actors are divided among hosts: by cores, with few moves, always in the same way."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from echelon.hosts.balance import balance, divide_among_learners

HOSTS = "abcdef"


def divide(places: str, cores: dict[str, int], least: int | None = None) -> str:
    """The hosts of the actors by letter; "-" has none. Without `least` all of them run."""
    found = balance([None if place == "-" else place for place in places], cores, least or len(places))
    return "".join(place or "-" for place in found)


def test_at_first_actors_are_divided_evenly_and_in_order() -> None:
    assert divide("--------", {"a": 2, "b": 2}) == "aaaabbbb"
    assert divide("-------", {"a": 4, "b": 4, "c": 4}) == "aabbccc"


def test_a_host_with_more_cores_has_more_actors_and_each_has_one() -> None:
    assert divide("--------", {"a": 1, "b": 3}) == "aabbbbbb"
    assert divide("----", {"a": 2, "b": 64}) == "abbb"
    assert divide("--", {"a": 2, "b": 2, "c": 2}) == "bc"


def test_a_host_that_joins_takes_actors_of_the_others_and_a_lost_one_gives_them_back() -> None:
    assert divide("aaabbb", {"a": 2, "b": 2, "c": 2}) == "aacbbc"
    assert divide("aacbbc", {"a": 2, "b": 2}) == "aaabbb"
    assert divide("aabb", {"a": 2, "c": 2}) == "aacc"


def test_actors_beyond_one_per_core_wait_for_a_host_but_some_always_run() -> None:
    assert divide("------", {"a": 2}, least=1) == "aa----"
    assert divide("aa----", {"a": 2, "b": 3}, least=1) == "aabbb-"
    assert divide("aabbb-", {"a": 2, "b": 3, "c": 8}, least=1) == "acbccc"
    assert divide("aabbb-", {"a": 2}, least=1) == "aa----"
    assert divide("aabbb-", {"a": 2}, least=4) == "aaaa--"


hosts = st.dictionaries(st.sampled_from(HOSTS), st.integers(1, 64), min_size=1)
places = st.lists(st.sampled_from([*HOSTS, None]), min_size=1, max_size=40)


@given(places, hosts, st.integers(1, 40))
def test_every_division_is_balanced_and_stays_as_it_is(
    before: list[str | None], cores: dict[str, int], least: int
) -> None:
    after = balance(before, cores, least)
    counts = {host: after.count(host) for host in cores}
    assert sum(counts.values()) == min(len(before), max(least, sum(cores.values())))
    assert min(counts.values()) > 0 or max(counts.values()) <= 1, "no host is idle that could have an actor"
    for giver, taker in ((giver, taker) for giver in cores for taker in cores if counts[giver] > 1):
        assert (counts[taker] + 1) / cores[taker] >= counts[giver] / cores[giver], "no move improves it"
    left = sum(old in cores and old != new for old, new in zip(before, after, strict=True))
    assert left == sum(max(0, before.count(host) - counts[host]) for host in cores), "as few moves as possible"
    assert balance(after, cores, least) == after


def test_many_hosts_are_divided_quickly() -> None:
    began = time.monotonic()
    cores = {f"host-{number}": 16 for number in range(400)}
    after = balance([None] * 6400, cores, 6400)
    assert all(after.count(host) == 16 for host in cores)
    assert time.monotonic() - began < 5.0, "it takes milliseconds; with a loop over all hosts for each actor, 20 s"


def test_with_a_learner_on_every_host_actors_stay_with_their_learner() -> None:
    assert divide_among_learners([None] * 6, {"a": 1, "b": 64, "c": 1}) == list("aabbcc")
    assert divide_among_learners(list("aabbcc"), {"a": 1, "c": 1}) == list("aaaacc"), "b is lost"
