"""docs/configuration.md agrees with the annotations of the fields."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config import AlgorithmConfig, TrainConfig
from echelon.config_io import fields_of
from echelon.config_page import page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def test_the_page_of_the_documentation_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python -m echelon.config_page > docs/configuration.md"


@pytest.mark.parametrize("name", AlgorithmConfig.classes())
def test_every_field_has_a_meaning_and_a_line_on_the_page(name: str) -> None:
    text, rule = page(), AlgorithmConfig.classes()[name]()
    for info in [*fields_of(TrainConfig()), *fields_of(rule)]:
        assert info.field.meaning, info.path
        assert f"| `{info.path}` |" in text, info.path
