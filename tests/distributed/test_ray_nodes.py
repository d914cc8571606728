"""`--engine ray` on a real Ray cluster of three hosts, with tokens: Ray starts the agents, and says which are gone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hosts import FAR, NEAR, THIRD, UNTIL_SOLVED, Site, kill_host, set_cable, until_solved
from ray_nodes import ADDRESS, RayNodes, made_cluster, needs_ray
from running import Running, processes_marked, wait_until

pytestmark = [needs_ray, pytest.mark.full, pytest.mark.xdist_group("ray")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayNodes]:
    with made_cluster() as nodes:
        yield nodes


def start(site: Site, nodes: RayNodes, preset: str, **options: object) -> Running:
    """Three actors, one on each node."""
    settings = {"engine": "ray", "hosts.ray-address": "auto", "hosts": 3, "actors": 3, **options}
    return site.head(preset, before=nodes.hosts[0], **settings)


def act(run: Running) -> None:
    """Waits until all actors act."""
    for index in range(3):
        run.until_acting(index, 3)


def assert_nothing_left(run: Running, nodes: RayNodes) -> None:
    run.assert_nothing_left()
    wait_until(lambda: not nodes.agents(1) and not nodes.agents(2), "no agent is left")


def test_without_the_token_of_the_cluster_the_remedy_is_told(
    site: Site, nodes: RayNodes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable, value, remedy in (
        ("RAY_AUTH_TOKEN", "0" * 32, "its token differs"),
        ("RAY_AUTH_TOKEN", "", "no token here"),
        ("RAY_AUTH_MODE", "disabled", "set RAY_AUTH_MODE=token"),
    ):
        with monkeypatch.context() as changed:
            changed.setenv(variable, value)
            run = start(site, nodes, "impala", **{"hosts.ray-address": ADDRESS})
            assert run.code() == 2 and remedy in run.text(), run.text()
            run.assert_nothing_left()


@pytest.mark.parametrize(("preset", "options"), [("impala", {}), ("apex-dqn", {"actor.trajectory": 8})])
def test_cartpole_is_solved(site: Site, nodes: RayNodes, preset: str, options: dict[str, object]) -> None:
    run = start(site, nodes, preset, **UNTIL_SOLVED, **options)
    until_solved(run)
    assert all(not host["lost"] for host in run.stop()["hosts"])
    assert_nothing_left(run, nodes)


def test_an_agent_dies_with_its_actor_and_with_the_run(site: Site, nodes: RayNodes) -> None:
    run = start(site, nodes, "impala", **{"hosts.lease-s": 300.0})
    act(run)
    [agent] = nodes.agents(1)
    os.kill(agent, signal.SIGKILL)
    run.until(lambda: f"host {FAR} is lost" in run.text(), "it is given up long before the lease ends")
    act(run)
    run.process.kill()
    wait_until(lambda: not nodes.agents(1) and not nodes.agents(2), "Ray ends the agents with the run")
    wait_until(lambda: not processes_marked(run.mark), "nothing is left of the run")
    wait_until(lambda: not list(run.shm_dir.iterdir()), "shared memory is empty")


def test_a_node_that_dies_is_given_up_and_a_new_one_gets_actors(site: Site, nodes: RayNodes) -> None:
    run = start(site, nodes, "impala", **{"hosts.lease-s": 300.0})
    act(run)
    kill_host(nodes.hosts[2])
    run.until(lambda: f"host {THIRD} is lost" in run.text(), "it is given up long before the lease ends")
    act(run)
    nodes.start(2)
    run.until(lambda: " joined; " in run.text(), "a node of the same address takes part")
    act(run)
    run.process.send_signal(signal.SIGINT)
    assert run.code() == 130, run.text()
    assert [host["name"][:8] for host in run.summary()["hosts"] if not host["lost"]][1:] == [FAR, THIRD]
    wait_until(lambda: not nodes.agents(1) and not nodes.agents(2), "no agent is left")


def test_a_link_is_cut_for_a_while_and_the_learner_is_killed(site: Site, nodes: RayNodes) -> None:
    run = start(site, nodes, "impala", **{"run.checkpoint-interval-s": 0.5})
    act(run)
    pids = run.processes()
    set_cable(nodes.hosts, "down", 1)
    time.sleep(10.0)
    run.until_learning()
    set_cable(nodes.hosts, "up", 1)
    act(run)
    assert run.processes() == pids, "nothing was restarted"
    pid = run.kill("learner")
    run.until(lambda: "the learner resumes from step_" in run.text(), "the learner is restored")
    assert run.pid("learner", besides=pid)
    run.until_learning()
    act(run)
    assert run.stop()["restarts"] == 1
    assert all(not host["lost"] for host in run.summary()["hosts"])
    assert_nothing_left(run, nodes)


def test_a_run_goes_on_without_its_cluster(site: Site, nodes: RayNodes) -> None:
    run = start(site, nodes, "impala", **{"hosts.lease-s": 300.0})
    act(run)
    [driver] = [pid for pid in processes_marked(run.mark) if "ray_driver" in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(driver, signal.SIGKILL)
    run.until(lambda: "the connection to the Ray cluster is lost" in run.text(), "it is reported")
    act(run)
    assert run.stop()["restarts"] == 2
    assert_nothing_left(run, nodes)


def test_only_the_address_of_the_node_listens(site: Site, nodes: RayNodes) -> None:
    run = start(site, nodes, "impala")
    run.until_acting(2, 3)
    owners = {pid for pid in processes_marked(run.mark) if "ray_driver" not in Path(f"/proc/{pid}/cmdline").read_text()}
    table = [row.split() for row in Path(f"/proc/{min(owners)}/net/tcp").read_text().splitlines()[1:]]
    inodes = {
        os.readlink(link).removeprefix("socket:[").rstrip("]")
        for pid in owners
        for link in Path(f"/proc/{pid}/fd").iterdir()
        if link.is_symlink() and os.readlink(link).startswith("socket:")
    }
    listening = {row[1].partition(":")[0] for row in table if row[3] == "0A" and row[9] in inodes}
    assert listening == {bytes(map(int, reversed(NEAR.split(".")))).hex().upper()}
    run.stop()
