"""Several learners over two hosts: each learns from its host's actors, and they start again together."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from echelon.roles.supervisor import LEAVE_S
from hosts import NEAR, SECRET, Site, gone, made_hosts
from running import Running, train_shortly

LEARNERS: dict[str, Any] = {"learners": 2}
QUICK = {"hosts.lease-s": 1.0, "run.checkpoint-interval-s": 0.3}


def learns(head: Running) -> None:
    """All learners go on: each batch has a part of each."""
    before = head.rows()[-1]["updates"] if head.rows() else 0
    head.until(lambda: head.rows() and head.rows()[-1]["updates"] > before + 2, "the learners learn")


def test_learners_of_two_hosts_learn_what_those_of_one_do(site: Site, tmp_path: Path) -> None:
    changes = {"stop.steps": 6_000, "actor.num_actors": 4, "actor.envs": 8, "seed": 3, "learner.num_learners": 2}
    (tmp_path / "near").mkdir()
    near = train_shortly(tmp_path / "near", site.memory("near"), "ppo", "local", **changes)
    head = site.head("ppo", steps=6_000, seed=3, **LEARNERS)
    agent = site.agent(head)
    assert head.code() == 0 and agent.code() == 0, (head.text(), agent.text())
    assert head.summary()["weights_sha256"] == near["weights_sha256"]
    assert (head.summary()["env_steps"], head.summary()["lag_max"]) == (near["env_steps"], 0)
    again = site.resume(head, hosts=1, steps=near["env_steps"] + 2_000)  # both at the head
    assert again.code() == 0, again.text()
    head.assert_nothing_left()
    gone(agent)


@pytest.mark.parametrize("acting", ["local", pytest.param("central", marks=pytest.mark.full)])
def test_a_learner_of_another_host_is_replaced_there_and_at_the_head_if_the_host_is_lost(
    site: Site, acting: str
) -> None:
    head = site.head("impala", **LEARNERS, **QUICK, **{"acting": acting})
    agent = site.agent(head)
    learns(head)
    head.until(lambda: list((head.run_dir / "checkpoints").glob("step_*")), "there is a checkpoint")
    for name in ("learner-1", "learner-0"):
        pid = head.kill(name)
        assert head.pid(name, besides=pid)
        learns(head)
    assert head.text().count("the learners resume from step_") == 2
    assert "learner-1" in head.text() and "on host second) was ended by SIGKILL" in head.text()
    os.kill(agent.process.pid, signal.SIGKILL)
    gone(agent)
    head.until(lambda: "host second is lost (silent for" in head.text(), "the head gives the host up")
    learns(head)
    assert head.text().count("the learners resume from step_") == 3
    head.stop()


def test_a_host_with_a_learner_that_is_stopped_costs_no_update(site: Site) -> None:
    head = site.head("impala", **LEARNERS, **{"run.checkpoint-interval-s": 600.0})
    agent = site.agent(head)
    learns(head)
    checkpoints, learner = head.run_dir / "checkpoints", head.pid("learner-0")
    assert not list(checkpoints.glob("step_*"))
    disk = os.open(checkpoints, os.O_RDONLY)
    fcntl.flock(disk, fcntl.LOCK_EX)  # a slow disk: whoever writes a checkpoint waits
    agent.process.send_signal(signal.SIGTERM)
    head.until(lambda: "host second left" in head.text(), "the host has left")
    time.sleep(2 * LEAVE_S)
    assert head.pid("learner-0") == learner, head.text()
    os.close(disk)
    head.until(lambda: "the learners resume from step_" in head.text(), "the learners start from a checkpoint")
    learns(head)
    head.stop()
    gone(agent)


@pytest.mark.full
def test_learners_find_each_other_over_a_link(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_SECRET", SECRET)
    with made_hosts() as (near, far):
        head = site.head("ppo", before=near, address=NEAR, steps=6_000, **LEARNERS)
        agent = site.agent(head, before=far)
        assert head.code() == 0 and agent.code() == 0, (head.text(), agent.text())
