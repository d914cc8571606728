"""`echelon bench train` on two hosts: the rate of the run, and the limit of the cores of both."""

from __future__ import annotations

import io

from echelon.bench.processes import free_port
from echelon.bench.train import bench_train, table
from echelon.config import replace
from echelon.control_groups import num_cores
from echelon.presets import preset
from hosts import Site, gone
from running import Running


def test_a_run_on_two_hosts_is_measured(site: Site) -> None:
    address = f"127.0.0.1:{free_port()}"
    agent = Running(
        site.folder / "agent", site.memory("agent"), "host", f"--join={address}", "--shm-dir", str(site.memory("agent"))
    )
    site.started.append(agent)
    changes = {
        "engine": "hosts",
        "hosts.count": 2,
        "hosts.address": f"tcp://{address}",
        "actor.num_actors": 2,
        "actor.envs": 8,
        "acting.mode": "local",
        "stop.steps": 6_000,
        "shm_dir": str(site.memory("head")),
    }
    output = io.StringIO()
    config = replace(preset("impala", "CartPole-v1"), **changes)
    report = bench_train(config, seconds=120.0, num_chunks=1, chunk_s=0.02, output=output)
    assert "echelon host --join" in output.getvalue(), "the command for the other host is shown"
    assert [(host["actors"], host["lost"]) for host in report["hosts"]] == [(1, ""), (1, "")]
    assert report["num_cores"] == num_cores(), "both hosts are this machine"
    cost_us = sum(stage["alone"]["cpu_us"] for stage in report["stages"].values())
    assert abs(report["limit"]["alone"] - 1e6 * report["num_cores"] / cost_us) < 1.0
    assert report["efficiency"]["alone"] == report["env_steps_per_s"] / report["limit"]["alone"] > 0
    assert report["processor"] is None or "carrier" in report["processor"]["roles_us"]
    assert "2 hosts with" in table(report) and report["rest"] in table(report)
    assert agent.code() == 0, agent.text()
    gone(agent)
