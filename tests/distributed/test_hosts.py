"""A run over two hosts: what comes out is the same, and each of them, and the link, may fail."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from echelon.control_groups import num_cores
from hosts import (
    FAR,
    NEAR,
    SECRET,
    Site,
    far_actors_act,
    gone,
    made_hosts,
    places,
    set_cable,
    until_divided,
    when_quiet,
)
from running import DEADLINE_S, has_torch, parent_of, processes_marked, train_shortly, wait_until


@pytest.mark.parametrize(
    ("preset", "fields"), [("ppo", {}), ("a3c", {"learner.max_lag": 0, "learner.batch": 8, "algorithm.minibatches": 2})]
)
def test_two_hosts_learn_what_one_does(site: Site, tmp_path: Path, preset: str, fields: dict[str, int]) -> None:
    changes = {"stop.steps": 6_000, "actor.num_actors": 4, "actor.envs": 8, "seed": 3, **fields}
    (tmp_path / "near").mkdir()
    near = train_shortly(tmp_path / "near", site.memory("near"), preset, "inline", **changes)
    head = site.head(preset, steps=6_000, seed=3, **fields)
    agent = site.agent(head)
    assert head.code() == 0 and agent.code() == 0, (head.text(), agent.text())
    assert head.summary()["weights_sha256"] == near["weights_sha256"]
    assert head.summary()["restarts"] == 0 and head.summary()["lag_max"] == 0
    assert [(host["actors"], host["lost"]) for host in head.summary()["hosts"]] == [(2, ""), (2, "")]
    assert "second 2 actors" in head.text()
    assert "left: the run is over" in agent.text()
    head.assert_nothing_left()
    gone(agent)


def test_an_agent_that_is_killed_loses_its_actors_to_the_other_host(site: Site) -> None:
    head = site.head("impala", **{"hosts.lease-s": 1.0})
    agent = site.agent(head)
    far_actors_act(head)
    assert re.search(r"second +\d+  actors 2 and 3\n", head.text()), "where everything runs is shown"
    os.kill(agent.process.pid, signal.SIGKILL)
    began = time.monotonic()
    gone(agent)
    head.until(lambda: "host second is lost (silent for" in head.text(), "the head gives the host up")
    far_actors_act(head)
    print(f"measured: its actors act on the head {time.monotonic() - began:.2f} s after the agent was killed")
    assert head.stop()["restarts"] == 1


@pytest.mark.parametrize("preset", ["impala", pytest.param("ppo", marks=pytest.mark.full)])
def test_hosts_join_a_run_that_has_begun_leave_it_and_join_again(site: Site, preset: str) -> None:
    head = site.head(preset, **{"hosts.lease-s": 1.0})
    first = site.agent(head, name="first")
    until_divided(head, ["", "", "first", "first"])
    second = site.agent(head, name="second")
    until_divided(head, ["", "second", "first", "first"])
    assert "host second joined; second takes actor 1 from this host" in head.text()
    os.kill(first.process.pid, signal.SIGKILL)
    gone(first)
    until_divided(head, ["", "second", "", "second"])
    again = site.agent(head, name="first")
    until_divided(head, ["", "second", "first", "second"])
    second.process.send_signal(signal.SIGTERM)
    assert second.code() == 0, second.text()
    until_divided(head, ["", "", "first", "first"])
    summary = head.stop()
    assert again.code() == 0, again.text()
    assert summary["restarts"] == 2, "an actor that moves to a new host is not counted"
    assert [(host["name"], bool(host["lost"])) for host in summary["hosts"][1:]] == [
        ("first", True),
        ("second", True),
        ("first", False),
    ]


def test_the_number_of_actors_follows_the_cores_between_its_bounds(site: Site) -> None:
    cores = num_cores()
    least, most = cores + 1, 2 * cores + 1
    bounds = {"min-actors": least, "max-actors": most, "hosts": 1, "learner.batch": 2, "hosts.lease-s": 1.0}
    head = site.head("impala", **bounds)
    head.until(lambda: "waiting for hosts with 1 more core" in head.text(), "this host alone does not suffice")
    first = site.agent(head, name="first")
    until_divided(head, [*[""] * cores, *["first"] * cores, None])
    second = site.agent(head, name="second")
    head.until(lambda: places(head, most).count("second") > 0 and None not in places(head, most), "all actors run")
    for agent in (first, second):
        os.kill(agent.process.pid, signal.SIGKILL)
    head.until(lambda: head.text().count(" is lost (silent for") == 2, "both are lost")
    head.until(
        lambda: [one for one in places(head, most) if one is not None] == [""] * least, "more than the cores run"
    )
    head.until_learning()
    assert next(host["actors"] for host in head.stop()["hosts"]) == least


def test_an_elastic_head_that_is_preempted_asks_to_be_started_again(site: Site) -> None:
    bounds = {"min-actors": num_cores() + 1, "max-actors": num_cores() + 1, "hosts": 1, "learner.batch": 1}
    head = site.head("impala", **bounds, **{"auto-resume": True})
    agent = site.agent(head)
    head.until_learning()
    head.process.terminate()
    assert head.code() == 143 and list((head.run_dir / "checkpoints").glob("step_*")), head.text()
    assert agent.code() == 0, agent.text()
    head.assert_nothing_left()


def test_roles_and_fork_servers_of_either_host_are_replaced(site: Site) -> None:
    head = site.head("impala", **{"run.checkpoint-interval-s": 0.5})
    agent = site.agent(head)
    far_actors_act(head)
    head.kill("carrier")
    far_actors_act(head)
    pid = head.kill("actor-2")  # its number is that of this machine, too
    assert head.pid("actor-2", besides=pid)
    far_actors_act(head)
    server = parent_of(head.pid("actor-2"))
    assert server in processes_marked(agent.mark)
    os.kill(server, signal.SIGKILL)
    head.until(lambda: f"the fork server (process {server}) was ended by SIGKILL" in head.text(), "it is told")
    far_actors_act(head)
    head.kill("learner")
    head.until(lambda: "the learner resumes from" in head.text(), "the learner is restored")
    far_actors_act(head)
    assert head.stop()["restarts"] == 4
    assert agent.code() == 0, agent.text()
    gone(agent)


def test_an_agent_works_without_torch_and_interrupted_gives_its_actors_back_at_once(site: Site) -> None:
    head = site.head("impala")
    agent = site.agent(head, fresh=True)
    far_actors_act(head)
    assert has_torch(head.pid("learner")) and not has_torch(agent.process.pid)
    agent.process.send_signal(signal.SIGINT)
    head.until(lambda: "host second left: it was stopped" in head.text(), "it says goodbye")
    gone(agent)
    far_actors_act(head)
    assert head.stop()["restarts"] == 1


def test_an_agent_that_is_stopped_sends_first_what_its_actors_have_completed(site: Site) -> None:
    head = site.head("impala")
    agent = site.agent(head)
    far_actors_act(head)
    carrier = head.pid("carrier")

    def is_ahead() -> bool:
        """Stops the carrier while its actors may go on: what they complete now stays with the agent."""
        os.kill(carrier, signal.SIGSTOP)
        for _ in range(100):
            if sum(agent.heads(4)[2:]) > sum(head.heads(4)[2:]):
                return True
            time.sleep(0.01)
        os.kill(carrier, signal.SIGCONT)  # they had used up their grants
        return False

    wait_until(is_ahead, "the agent has slots that the head has not")
    completed = when_quiet(lambda: agent.heads(4)[2:])
    agent.process.send_signal(signal.SIGTERM)
    agent.until(lambda: "leaving: ending 2 actors" in agent.text(), "it leaves")
    time.sleep(0.5)  # an agent that did not wait for the carrier would be gone, and its trajectories discarded
    assert "host second left" not in head.text()
    os.kill(carrier, signal.SIGCONT)
    assert agent.code() == 0 and "could not be sent" not in agent.text(), agent.text()
    assert all(now >= then for now, then in zip(head.heads(4)[2:], completed, strict=True))
    head.until(lambda: "host second left: it was stopped; this host takes actors 2 and 3" in head.text(), "it goes on")
    far_actors_act(head)
    assert head.stop()["restarts"] == 1


def test_a_head_that_is_killed_ends_everybody_and_may_go_on_alone(site: Site) -> None:
    head = site.head("impala", **{"hosts.lease-s": 1.0, "run.checkpoint-interval-s": 0.2})
    agent = site.agent(head)
    head.until(lambda: list((head.run_dir / "checkpoints").glob("step_*")), "there is a checkpoint")
    far_actors_act(head)
    head.process.kill()
    assert agent.code() == 1
    assert "has not replied for" in agent.text() and "has ended its actors" in agent.text()
    gone(agent)
    (head.run_dir / "processes.json").unlink(missing_ok=True)
    alone = site.resume(head, hosts=1, steps=head.rows()[-1]["env_steps"] + 20_000)
    assert alone.code() == 0, alone.text()
    alone.assert_nothing_left()


def test_a_link_that_is_cut_heals_without_a_restart(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_SECRET", SECRET)
    with made_hosts() as hosts:
        near, far = hosts
        head = site.head("impala", before=near, address=NEAR)
        agent = site.agent(head, before=far)
        assert NEAR != FAR
        far_actors_act(head)
        set_cable(hosts, "down")
        before = head.heads(4)
        time.sleep(4.0)  # a time that TCP and ZeroMQ notice
        head.until_learning()
        assert sum(head.heads(4)[2:]) <= sum(before[2:]) + 4, "nothing came"
        set_cable(hosts, "up")
        began = time.monotonic()
        far_actors_act(head)
        print(f"measured: far actors act {time.monotonic() - began:.2f} s after the link is there again")
        assert head.stop()["restarts"] == 0
        assert agent.process.wait(DEADLINE_S) == 0, agent.text()


def test_another_secret_is_told(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_SECRET", SECRET)
    head = site.head("impala")
    head.until(lambda: "waiting for 1 more host" in head.text(), "it waits")
    monkeypatch.setenv("ECHELON_SECRET", "quite another secret, as it is")
    agent = site.agent(head)
    assert agent.code() == 1 and "ECHELON_SECRET" in agent.text()
    head.process.send_signal(signal.SIGINT)
    assert head.code() == 130
    head.assert_nothing_left()


def test_a_host_without_the_module_is_refused_and_one_with_it_prints_at_the_head(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "only_at_the_head"
    package.mkdir()
    (package / "own_envs.py").write_text("from toy_envs import CounterEnv as Own\nprint('a line of the user')\n")
    monkeypatch.setenv("PYTHONPATH", str(package))
    head = site.head("impala", env="own_envs:Own")
    head.until(lambda: "waiting for 1 more host" in head.text(), "it waits")
    monkeypatch.delenv("PYTHONPATH")
    agent = site.agent(head)
    assert agent.code() == 1, agent.text()
    for one in (agent, head):
        one.until(lambda one=one: "host second cannot run" in one.text(), "both say it")
        [line] = [line for line in one.text().splitlines() if "host second cannot run" in line]
        assert "cannot import own_envs" in line
    monkeypatch.setenv("PYTHONPATH", str(package))
    again = site.agent(head, name="third")
    far_actors_act(head)
    log = head.run_dir / "logs" / "actor-3.log"
    head.until(lambda: log.exists() and "a line of the user" in log.read_text(), "what its actors print is at the head")
    head.stop()
    assert again.code() == 0, again.text()


def test_a_run_becomes_elastic_and_local_again_when_it_is_resumed(site: Site, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    changes = {"stop.steps": 2_000, "actor.num_actors": 2, "actor.envs": 8}
    train_shortly(tmp_path, site.memory("head"), "impala", "local", **changes)
    [run_dir] = [path.parent for path in tmp_path.rglob("config.json")]
    for steps, words, engine, least in (
        (3_000, ("--engine=hosts", "--hosts.min-actors=1"), "hosts", 1),
        (4_000, ("--hosts=1",), "hosts", 1),
        (5_000, ("--engine=local",), "local", 0),
    ):
        resumed = site._start("again", "head", "resume", str(run_dir), f"--steps={steps}", *words, before=())
        assert resumed.code() == 0, resumed.text()
        config = json.loads((run_dir / "config.json").read_text())["config"]
        assert (config["engine"], config["hosts"]["min_actors"]) == (engine, least)
