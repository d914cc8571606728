"""A run over three hosts with a secret: it solves CartPole; hosts, links, agents and the learner may fail."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hosts import (
    NEAR,
    SECRET,
    UNTIL_SOLVED,
    Site,
    Words,
    counted,
    gone,
    kill_host,
    made_hosts,
    places,
    set_cable,
    until_solved,
)
from running import Running

QUICK: dict[str, Any] = {"run.checkpoint-interval-s": 0.5, "network.hidden": 16}
REPLAY = {"actor.trajectory": 8, "replay.min-size": 200, "replay.batch": 32, "replay.samples-per-insert": 4}
CUT_S = 10.0


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Words]]:
    monkeypatch.setenv("ECHELON_SECRET", SECRET)
    with made_hosts(3) as hosts:
        yield hosts


def start(site: Site, hosts: list[Words], preset: str, **options: object) -> list[Running]:
    """The head, with an actor on each host, and the agents `first` and `second`."""
    head = site.head(preset, before=hosts[0], address=NEAR, **{"hosts": 3, "actors": 3, **options})
    return [
        head,
        *(site.agent(head, before=hosts[number], name=name) for number, name in ((1, "first"), (2, "second"))),
    ]


def all_act(head: Running, *names: str) -> None:
    """Waits until all actors act, one on each of these hosts if they are given."""
    head.until(lambda: not names or sorted(filter(None, places(head, 3))) == sorted(names), f"{names} have actors")
    before = acted(head)
    head.until(lambda: all(now > then + 1 for now, then in zip(acted(head), before, strict=True)), "all act")


def acted(head: Running) -> list[int]:
    """How much each actor has done so far: its trajectories, or with replay its steps."""
    has_replay = any(head.shm_dir.glob("echelon-*/tally"))
    return counted(head, 3) if has_replay else head.heads(3)


def is_without(head: Running, name: str) -> bool:
    """Whether all actors run, and none of them on this host."""
    hosts = places(head, 3)
    return name not in hosts and None not in hosts and len(hosts) == 3


def lose_a_host_add_one_and_kill_the_learner(site: Site, hosts: list[Words], head: Running) -> Running:
    """The host `first` ends; one called `late` joins in its place; returns the agent of it."""
    all_act(head, "first", "second")
    began = time.monotonic()
    kill_host(hosts[1])
    head.until(lambda: "host first is lost (silent for" in head.text(), "the head gives the host up")
    head.until(lambda: is_without(head, "first"), "its actor runs elsewhere")
    all_act(head)
    print(f"measured: the actor of the lost host acts elsewhere {time.monotonic() - began:.1f} s after its end")
    late = site.agent(head, before=hosts[1], name="late")
    began = time.monotonic()
    head.until(lambda: "host late joined; late takes actor" in head.text(), "a host that joins gets an actor")
    all_act(head, "late", "second")
    print(f"measured: an actor acts on a host {time.monotonic() - began:.1f} s after its agent was started")
    pid = head.kill("learner")
    head.until(lambda: "the learner resumes from step_" in head.text(), "the learner is restored")
    assert head.pid("learner", besides=pid)
    head.until_learning()
    all_act(head, "late", "second")
    return late


@pytest.mark.full
def test_a_host_is_lost_another_joins_and_the_learner_is_killed(site: Site, hosts: list[Words]) -> None:
    head, _, second = start(site, hosts, "impala", **QUICK, **{"hosts.lease-s": 4.0})
    late = lose_a_host_add_one_and_kill_the_learner(site, hosts, head)
    summary = head.stop()
    assert late.code() == 0 and second.code() == 0, (late.text(), second.text())
    assert summary["restarts"] == 2, "of the actor whose host was lost, and of the learner"
    assert [host["name"] for host in summary["hosts"][1:] if not host["lost"]] == ["second", "late"]


@pytest.mark.full
@pytest.mark.parametrize(("preset", "acting"), [("impala", "local"), ("apex-dqn", "local"), ("impala", "central")])
def test_everything_fails_in_turn_and_the_run_goes_on(site: Site, hosts: list[Words], preset: str, acting: str) -> None:
    replay = REPLAY if preset == "apex-dqn" else {}
    options = {**QUICK, **replay, "hosts.lease-s": CUT_S + 5.0, "acting": acting}
    head, _, second = start(site, hosts, preset, **options)
    late = lose_a_host_add_one_and_kill_the_learner(site, hosts, head)
    pids = head.processes()
    set_cable(hosts, "down", 1)
    time.sleep(CUT_S)
    head.until_learning()
    set_cable(hosts, "up", 1)
    began = time.monotonic()
    all_act(head, "late", "second")
    print(f"measured: all act {time.monotonic() - began:.1f} s after the link is there again")
    assert head.processes() == pids, "nothing was restarted"
    head.until(lambda: "host second is back" in head.text(), "the head reports it")
    os.kill(second.process.pid, signal.SIGKILL)
    gone(second)
    head.until(lambda: "host second is lost (silent for" in head.text(), "the head gives the host up")
    head.until(lambda: is_without(head, "second"), "its actor runs elsewhere")
    all_act(head)
    head.until_learning()
    summary = head.stop()
    assert late.code() == 0, late.text()
    assert summary["restarts"] == 3, "of the actors of two lost hosts, and of the learner"


@pytest.mark.full
@pytest.mark.parametrize(("preset", "options"), [("impala", {}), ("apex-dqn", {"actor.trajectory": 8})])
def test_cartpole_is_solved(site: Site, hosts: list[Words], preset: str, options: dict[str, object]) -> None:
    head, *agents = start(site, hosts, preset, **UNTIL_SOLVED, **options)
    until_solved(head)
    summary = head.stop()
    assert summary["restarts"] == 0, head.text()
    print(f"measured: solved after {summary['env_steps']:,} steps in {summary['wall_s']:.0f} s")
    assert [host["actors"] for host in summary["hosts"]] == [1, 1, 1]
    assert all(agent.code() == 0 for agent in agents)
