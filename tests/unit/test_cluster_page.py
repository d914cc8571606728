"""docs/cluster.md: every command that it shows is one that this version accepts."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from echelon.cli import learner
from echelon.cli.main import main
from echelon.cli.train import make_parser, parse_config
from echelon.presets import REPLAY_PRESETS
from echelon.roles.plan.start import check_stop

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "cluster.md").read_text()
BLOCKS = re.findall(r"```\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [shlex.split(line) for block in BLOCKS for line in block.splitlines() if line.startswith("echelon ")]


def test_the_page_shows_every_way() -> None:
    assert {words[1] for words in COMMANDS} == {"train", "host", "resume", "kube", "learner", "worker"}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_is_accepted(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    name, rest = words[1], words[2:]
    if name == "train":
        rest = [word for word in rest if word != "--auto-resume"]
        check_stop(parse_config(make_parser("echelon train", "", rest), rest))
    elif name == "learner":
        parser = make_parser("echelon learner", "", rest, learner.OPTIONS, REPLAY_PRESETS)
        check_stop(parse_config(parser, learner.with_address(rest), learner.OPTIONS))
    elif name == "kube":
        assert main([name, *rest[: rest.index("|")]]) == 0
    else:
        monkeypatch.setattr("echelon.training.resume", lambda *args, **options: SimpleNamespace(exit_code=0))
        monkeypatch.setattr("echelon.hosts.agent.take_part", accept)
        monkeypatch.setattr("echelon.asynchronous.worker.AsyncWorker", Worker)
        assert main([name, *rest]) == 0


def accept(*args: Any, **options: Any) -> str:
    return "accepted"


class Worker:
    def __init__(self, learner: str, *args: Any, **options: Any) -> None:
        assert learner == "10.0.0.1:4444"

    def work(self, episodes: int) -> None:
        assert episodes == 0
