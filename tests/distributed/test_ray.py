"""A real Ray cluster of two hosts, with tokens: a training and a launch use both nodes, and leave nothing there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from echelon.control_groups import num_cores
from hosts import FAR, Site
from ray_nodes import RayNodes, made_cluster, needs_ray
from running import DEADLINE_S, TESTS, Running, train_shortly, wait_until

pytestmark = [needs_ray, pytest.mark.xdist_group("ray")]
PROGRAM = TESTS / "distributed" / "ray_launch_programs.py"
ENDS = {  # how rank 3, on the other node, ends -> the error of launch
    "raise": [
        "RpcException: '3' (rank 3, process ",
        f" on {FAR}) failed with ValueError: it broke",
        "raise ValueError",
    ],
    "kill": ["PeerLost: '3' (rank 3, process ", f" on {FAR}) was ended by SIGKILL; the others were stopped."],
    "kill the actor": [f"PeerLost: the Ray node {FAR} was lost (", "), and every member with it."],
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayNodes]:
    with made_cluster(2) as nodes:
        yield nodes


def launched(nodes: RayNodes, *words: str, program: Path = PROGRAM) -> subprocess.Popen[str]:
    """A program on the first node."""
    path = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    return subprocess.Popen(
        [*nodes.hosts[0], sys.executable, str(program), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def lines_of(process: subprocess.Popen[str]) -> list[str]:
    try:
        return process.communicate(timeout=3 * DEADLINE_S)[0].splitlines()
    finally:
        process.kill()


def assert_nothing_left(nodes: RayNodes) -> None:
    """No actor, and no process that it started: only those of Ray itself."""
    wait_until(lambda: not nodes.agents(1), "no actor of Echelon is left")
    wait_until(lambda: not nodes.started_by_echelon(1), "no process of Echelon is left")


def test_a_cluster_learns_what_one_host_does(site: Site, nodes: RayNodes, tmp_path: Path) -> None:
    changes = {"stop.steps": 3_000, "actor.num_actors": 2, "actor.envs": 8, "seed": 3}
    settings = {"engine": "ray", "hosts.ray-address": "auto", "actors": 2, "steps": 3_000, "seed": 3}
    run = site.head("ppo", before=nodes.hosts[0], **settings)
    (tmp_path / "near").mkdir()
    near = train_shortly(tmp_path / "near", site.memory("near"), "ppo", "inline", **changes)
    assert run.code() == 0, run.text()
    assert run.summary()["weights_sha256"] == near["weights_sha256"]
    assert run.summary()["restarts"] == 0 and run.summary()["lag_max"] == 0
    assert [(host["actors"], host["lost"]) for host in run.summary()["hosts"]] == [(1, ""), (1, "")]
    assert run.summary()["hosts"][1]["name"] == FAR
    run.assert_nothing_left()
    assert_nothing_left(nodes)


@pytest.mark.full
def test_a_run_on_a_cluster_is_measured(site: Site, nodes: RayNodes, tmp_path: Path) -> None:
    words = ["impala", "CartPole-v1", "--engine=ray", "--address=auto", "--actors=2", "--seconds=10", "--acting=local"]
    words += [f"--json={tmp_path / 'report.json'}", f"--shm-dir={site.memory('head')}"]
    run = Running(tmp_path / "run", site.memory("head"), "bench", "train", *words, before=nodes.hosts[0])
    site.started.append(run)
    assert run.code() == 0, run.text()
    report = json.loads((tmp_path / "report.json").read_text())
    assert [host["actors"] for host in report["hosts"]] == [1, 1]
    assert report["num_cores"] == num_cores(), "both nodes are this machine"
    assert_nothing_left(nodes)


@pytest.mark.full
def test_a_local_ray_trains_and_resumes(tmp_path: Path, shm_dir: Path) -> None:
    run_dir, options = tmp_path / "run", {"evaluation.episodes": 0, "acting": "local", "actors": 1}
    run = Running.train("impala", "CartPole-v1", run_dir, shm_dir, engine="ray", steps=2_000, **options)
    assert run.code() == 0, run.text()
    run.assert_nothing_left()
    resumed = Running.resume(run_dir, shm_dir, 4_000)
    assert resumed.code() == 0, resumed.text()
    assert resumed.summary()["env_steps"] >= 4_000 and "resuming from" in resumed.text()
    assert [host["actors"] for host in resumed.summary()["hosts"]] == [1], "Ray was used again"
    resumed.assert_nothing_left()


def test_a_launch_uses_both_nodes(nodes: RayNodes) -> None:
    *printed, last = lines_of(launched(nodes, "return"))
    members = json.loads(last)
    assert sorted(printed) == [f"{rank} prints" for rank in range(4)], "lines of the other node are shown, too"
    assert [member["network"] for member in members] == [network for network in nodes.networks for _ in range(2)]
    assert all(member["called"] == ["0", "1", "2", "3"] and member["total"] == 6.0 for member in members)
    assert all(member["gpus"] == members[0]["gpus"] for member in members), "Ray hides no GPU"
    assert not [left for member in members for pid in member["pids"] for left in Path("/dev/shm").glob(f"*-{pid}-*")]
    assert_nothing_left(nodes)


@pytest.mark.full
@pytest.mark.parametrize("how", ENDS)
def test_the_end_of_a_member_on_another_node_is_raised(nodes: RayNodes, how: str) -> None:
    error = json.loads(lines_of(launched(nodes, how))[-1])
    assert [words for words in ENDS[how] if words not in error] == [], error
    assert_nothing_left(nodes)


@pytest.mark.full
def test_a_launcher_that_is_killed_takes_its_members_with_it(nodes: RayNodes) -> None:
    with launched(nodes, "stay") as process:
        assert process.stdout is not None
        while process.stdout.readline() != "all stay\n":
            assert process.poll() is None
        assert nodes.started_by_echelon(1)
        process.send_signal(signal.SIGKILL)
        assert_nothing_left(nodes)


@pytest.mark.full
def test_a_program_that_a_node_lacks_is_refused_with_its_name(nodes: RayNodes) -> None:
    program = nodes.only_near / "program.py"
    shutil.copy(PROGRAM, program)
    error = json.loads(lines_of(launched(nodes, "return", program=program))[-1])
    assert f"ConfigError: the Ray node {FAR} cannot run members of launch(): the file {program} is not" in error
    assert_nothing_left(nodes)
