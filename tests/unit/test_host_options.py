"""What a user may ask of several hosts on the command line, and what the refusals say."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest

import echelon.training as training
from echelon.cli import host
from echelon.cli import resume as resume_command
from echelon.cli.train import SHORT, make_parser, parse_config
from echelon.config import TrainConfig
from echelon.errors import ConfigError


def parsed(*words: str) -> TrainConfig:
    parser: argparse.ArgumentParser = make_parser("echelon train", "", words)
    return parse_config(parser, words, SHORT)


def test_a_number_of_hosts_implies_the_engine_and_the_scheme() -> None:
    config = parsed("impala", "CartPole-v1", "--hosts", "2", "--hosts.address", "0.0.0.0:7000")
    assert (config.engine, config.hosts.count, config.hosts.address) == ("hosts", 2, "tcp://0.0.0.0:7000")
    assert parsed("impala", "CartPole-v1", "--hosts", "1").engine == "local"
    elastic = parsed("impala", "CartPole-v1", "--min-actors", "1", "--max-actors", "8")
    assert (elastic.engine, elastic.hosts.min_actors, elastic.actor.num_actors) == ("hosts", 1, 8)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("impala", "--engine", "hosts"), "give --hosts N"),
        (("impala", "--hosts.lease-s", "5"), "--hosts.lease_s has no effect"),
        (("impala", "--engine", "local", "--hosts", "2"), "--hosts 2 does not go with --engine local"),
        (("impala", "--hosts", "2", "--learners", "4", "--actors", "4"), "--learners 4 does not fit --hosts 2"),
        (("dqn", "--hosts", "2", "--learners", "2", "--actors", "2"), "the whole replay is at the head"),
        (
            ("impala", "--hosts", "2", "--learners", "2", "--hosts.address", "0.0.0.0:7000"),
            "needs the address at which other hosts reach this one",
        ),
        (
            ("dqn", "--hosts", "2", "--actors", "2", "--replay.transport", "tcp"),
            "tcp does not work with several hosts",
        ),
        (("impala", "--hosts", "2", "--acting.servers", "2"), "each host has one inference server"),
        (("impala", "--hosts", "2", "--acting.transport", "tcp"), "reach through shared memory"),
        (("sac", "--hosts", "2"), "hosts.count=2 exceeds actor.num_actors=1"),
        (("impala", "--min-actors", "3", "--max-actors", "2"), "hosts.min_actors=3 exceeds actor.num_actors=2"),
        (("ppo", "--min-actors", "1", "--max-actors", "4"), "--min-actors 1 does not work with learner.max_lag=0"),
        (("impala", "--min-actors", "1", "--engine", "local"), "--min-actors 1 does not go with --engine local"),
        (("impala", "--actors", "4", "--max-actors", "4"), "set twice, by --actors and by --max-actors"),
        (("impala", "--hosts", "2", "--hosts.address", "0.0.0.0"), "hosts.address=tcp:..0.0.0.0 is"),
    ],
)
def test_what_hosts_cannot_do_is_refused_with_the_reason(words: tuple[str, ...], text: str) -> None:
    preset, *rest = words
    with pytest.raises(ConfigError, match=text):
        parsed(preset, "CartPole-v1", *rest)


@pytest.mark.parametrize(
    ("join", "text"), [("127.0.0.1", "has no port"), ("no-such-host.invalid:7000", "does not resolve")]
)
def test_an_address_that_cannot_be_joined_is_refused_at_once(join: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        host.run(["--join", join])


def test_a_resumed_run_may_listen_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        training, "resume", lambda run, **options: asked.update(options) or SimpleNamespace(exit_code=0)
    )
    resume_command.run(["run", "--hosts", "2", "--hosts.address", "0.0.0.0:7000", "--hosts.bulk-port=7001"])
    assert asked["hosts"] == 2
    assert asked["fields"] == {"hosts.address": "0.0.0.0:7000", "hosts.bulk_port": "7001"}
