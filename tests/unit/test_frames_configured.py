"""Configurations of frames: their contents, and the errors that are raised before anything starts."""

from __future__ import annotations

import inspect
import json
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from echelon.errors import ConfigError, WorldError
from echelon.frames import A3C, IMPALA, DDPGApex, DQNApex, configured
from echelon.frames.frame import Frame

FRAMES: list[type[Frame]] = [A3C, DQNApex, DDPGApex, IMPALA]


@pytest.mark.parametrize("frame", FRAMES)
def test_a_generated_configuration_has_every_keyword_and_keeps_what_was_given(frame: type[Frame]) -> None:
    given = {"mine": 1, "frame_config": {"batch_size": 7, "model_args": [[4], [4]]}}
    made = frame.generate_config(given)
    keywords = inspect.signature(frame.__init__).parameters.values()
    own = {each.name: each.default for each in keywords if each.kind is each.KEYWORD_ONLY}
    section = made["frame_config"]
    assert section == section | own | {"batch_size": 7, "model_args": [[4], [4]]}
    assert made["frame"] == frame.__name__ and made["mine"] == 1
    assert len(section["models"]) == len(section["model_kwargs"]) == len(frame.FORM.models)
    assert json.loads(json.dumps(made)) == made
    assert frame.generate_config(made) == made and "frame" not in given


class Alone(SimpleNamespace):
    """A world of one, entered by this module."""

    name, rank, world_size, members = "alone", 0, 1, ("alone",)
    scope = SimpleNamespace(entrance=__name__)


class QNet(nn.Linear):
    """The class that the bare name refers to."""


@pytest.mark.parametrize(
    ("frame", "section", "message"),
    [
        (DQNApex, {"models": ["QNet"]}, "have 1, 2 and 2 entries; it needs 2 of each, for QNet, QNet"),
        (DQNApex, {"models": ["QNet", "Nothing"]}, "'Nothing' is not a subclass of Module. Pass the class"),
        (DQNApex, {"models": [f"{__name__}.QNet", f"{__name__}.Missing"]}, 'has no "Missing"'),
        (DQNApex, {"models": [QNet, "QNet"], "optimizer": "Adamant"}, "'Adamant' is not a subclass of Optimizer"),
        (
            DQNApex,
            {"models": ["QNet", "QNet"], "criterion": "Loss"},
            "criterion='Loss' .* is not a loss",
        ),
        (DQNApex, {"models": ["QNet", "QNet"], "lr_scheduler": "Never"}, "'Never' is not a subclass of LRScheduler"),
        (DQNApex, {"learning_rates": 0.1}, "unknown keys learning_rates; the known keys are apex_group_name, "),
        (DQNApex, {"visualize": True}, "visualize has no effect here. Remove it, or set it to False"),
        (DDPGApex, {"learning_rate": 0.5}, "learning_rate has no effect here. Remove it, or set it to 0.001"),
        (
            DQNApex,
            {"models": ["QNet", "QNet"], "model_args": [[2, 2]] * 2, "learner_process_number": 2},
            "learner_process_number=2 must be between 1 and world_size=1",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    frame: type[Frame], section: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configured, "world_here", lambda caller: Alone())
    with pytest.raises(ConfigError, match=message):
        frame.init_from_config({"frame_config": section})


def test_a_configuration_belongs_to_its_frame_and_to_a_world(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorldError, match=r"A3C.init_from_config: this process is in no world"):
        A3C.init_from_config(A3C.generate_config())
    monkeypatch.setattr(configured, "world_here", lambda caller: Alone())
    with pytest.raises(ConfigError, match="the configuration is for IMPALA, not for A3C"):
        A3C.init_from_config(IMPALA.generate_config())
