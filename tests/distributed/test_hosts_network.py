"""The network of a run over two hosts: who is refused, which ports listen, and what a bad link costs."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from hosts import (
    FAR,
    NEAR,
    SECRET,
    Site,
    Words,
    bad_cable,
    far_actors_act,
    made_hosts,
    when_quiet,
    with_version,
)
from running import Running

LISTENS = "0A"


def test_strangers_get_one_line_and_only_documented_ports_listen(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHELON_SECRET", SECRET)
    with made_hosts() as (near, far):
        head = site.head("apex-dqn", before=near, address=NEAR, acting="central")
        head.until(lambda: "waiting for 1 more host" in head.text(), "it waits")
        text, older = head.text(), with_version(tmp_path / "older", "0.0.7")
        agent = site.agent(head, before=(*far, "env", f"PYTHONPATH={older}"), name="older")
        assert_refused(agent, head, text, "it has Echelon 0.0.7 and this run has")
        text = head.text()
        monkeypatch.setenv("ECHELON_SECRET", "quite another secret, as it is")
        assert_refused(site.agent(head, before=far, name="wrong"), head, text, "ECHELON_SECRET")
        monkeypatch.delenv("ECHELON_SECRET")
        without = site.agent(head, before=far, name="without")
        assert without.code() == 2 and "ECHELON_SECRET" in without.text(), "it connects to nothing"
        assert len(without.text().splitlines()) == 1, without.text()
        monkeypatch.setenv("ECHELON_SECRET", SECRET)
        agent = site.agent(head, before=far)
        far_actors_act(head)
        text = head.text()
        control = int(text.partition("host --join ")[2].split()[0].rpartition(":")[2])
        inside = listening(near)
        assert {address for address, _ in inside} == {NEAR}
        assert len(inside) == 2 and control in {port for _, port in inside}, "control and bulk"
        assert not listening(far), "an agent only connects"
        far_actors_act(head)
        assert head.stop()["restarts"] == 0 and "refused" not in head.text().removeprefix(text)
        assert agent.code() == 0, agent.text()


@pytest.mark.full
def test_learners_listen_only_at_the_address_of_their_host(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_SECRET", SECRET)
    with made_hosts() as (near, far):
        head = site.head("impala", before=near, address=NEAR, learners=2)
        agent = site.agent(head, before=far)
        head.until_learning()
        for host, address in ((near, NEAR), (far, FAR)):
            assert {place for place, _ in listening(host)} == {address}
        head.stop()
        assert agent.code() == 0, agent.text()


@pytest.mark.full
@pytest.mark.parametrize("preset", ["impala", "ppo"])
def test_cartpole_is_learned_over_a_bad_link_and_nothing_is_lost(
    site: Site, monkeypatch: pytest.MonkeyPatch, preset: str
) -> None:
    """Of synchronous `ppo`, half of each batch comes over the link."""
    monkeypatch.setenv("ECHELON_SECRET", SECRET)
    with made_hosts() as hosts, bad_cable(hosts, delay_ms=20.0, loss=0.02):
        head = site.head(preset, before=hosts[0], address=NEAR, **{"actor.trajectory": 20})
        agent = site.agent(head, before=hosts[1])
        head.until(lambda: any((row["return_mean"] or 0) > 150 for row in head.rows()), "it learns", 200.0)
        agent.process.send_signal(signal.SIGSTOP)  # from here on only what has been received counts
        for name in ("actor-0", "actor-1"):
            head.kill(name, signal.SIGSTOP)
        slots = when_quiet(lambda: head.heads(4))
        head.until(
            lambda: -4 * 8 <= uncounted(head) < 4 * 20 * 8 + 4 * 8, "all are learned but less than a batch", 30.0
        )
        made = zip(agent.heads(4)[2:], head.heads(4)[2:], strict=True)
        assert all(0 <= here - there <= 4 for here, there in made), "what is not at the head has not been acknowledged"
        agent.process.send_signal(signal.SIGCONT)
        for name in ("actor-0", "actor-1"):
            head.kill(name, signal.SIGCONT)
        far_actors_act(head)
        summary = head.stop()
        assert (summary["restarts"], summary["dropped"]) == (0, 0) and "refused" not in head.text(), head.text()
        assert agent.code() == 0 and "refused" not in agent.text(), agent.text()
        waits = {name: f"{shares['wait']:.0%}" for name, shares in summary["time"].items()}
        lag = f"lag {summary['lag_mean']:.2f}, at most {summary['lag_max']}"
        print(f"measured: {preset}: trajectories of each actor {slots}; {lag}")
        print(f"measured: share of the time that each role waits: {waits}")


def uncounted(head: Running) -> int:
    """Steps in the trajectories that have come to the head, less those that the learner has counted.

    The step that resets an environment after an episode is not counted.
    """
    row = head.rows()[-1]
    return sum(head.heads(4)) * 20 * 8 - int(row["env_steps"]) - int(row["episodes"])


def assert_refused(agent: Running, head: Running, before: str, why: str) -> None:
    """Both sides say why, in one line each; `before` is what the head had said."""
    assert agent.code() == 1, agent.text()
    head.until(lambda: why in head.text().removeprefix(before), "the head says it")
    for text in (agent.text(), head.text().removeprefix(before)):
        assert len([line for line in text.splitlines() if why in line]) == 1, text


def listening(host: Words) -> list[tuple[str, int]]:
    """The addresses and ports where a host listens, as its kernel says."""
    found = []
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for row in Path(f"/proc/{host[2]}/net/{kind}").read_text().splitlines()[1:]:
            place, state = row.split()[1], row.split()[3]
            address, _, port = place.partition(":")
            if state == LISTENS or kind.startswith("udp"):
                numbers = bytes.fromhex(address)[::-1]
                found.append((".".join(map(str, numbers)) if len(numbers) == 4 else address, int(port, 16)))
    return found
