"""docs/cluster.md: every command that it shows is one that this version accepts. Every printed training has an end."""

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

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "cluster.md").read_text()
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


ENDS = re.compile(r"--(steps|minutes|episodes|until-return|config|help)\b")
TRAINING = re.compile(r"echelon (?:train|learner) [a-z][\w-]* [\w./:-]*[A-Z][\w./:-]*(?: .*)?")  # a preset and an ENV


def trainings(text: str) -> list[str]:
    """Returns the commands of trainings in a page: in its blocks of code, and in its sentences."""
    blocks = r"```.*?```|(?:^    .*\n)+"
    whole = text.replace("\\\n", " ")
    lines = [line for block in re.findall(blocks, whole, re.DOTALL | re.MULTILINE) for line in block.splitlines()]
    quoted = re.findall(r"`([^`]+)`", re.sub(blocks, "", whole, flags=re.DOTALL | re.MULTILINE))
    found = [TRAINING.fullmatch(" ".join(line.partition(" #")[0].split())) for line in [*lines, *quoted]]
    return [match[0] for match in found if match and " ENV" not in match[0]]


@pytest.mark.parametrize("page", ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_every_training_that_a_page_shows_has_an_end(page: str) -> None:
    assert [text for text in trainings((ROOT / page).read_text()) if not ENDS.search(text)] == []


def accept(*args: Any, **options: Any) -> str:
    return "accepted"


class Worker:
    def __init__(self, learner: str, *args: Any, **options: Any) -> None:
        assert learner == "10.0.0.1:4444"

    def work(self, episodes: int) -> None:
        assert episodes == 0
