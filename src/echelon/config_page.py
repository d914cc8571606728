"""Generates the reference of all configuration fields: python -m echelon.config_page > docs/configuration.md"""

from __future__ import annotations

from typing import Any

from echelon.config import AlgorithmConfig, TrainConfig
from echelon.fields import ConfigField, Section, fields, option_text

HEAD = """# Configuration

This page lists every configuration field. Set a field on the command line with `--section.field VALUE`
(`echelon train`, `echelon learner`), in a [file](guide.md#configuration-files) with `--config FILE`, or in Python with
`echelon.config.replace(config, **{"section.field": value})`. The run folder stores all fields in
`config.json`. The defaults below are those of the config classes; presets change some of them. `echelon train PRESET
ENV --help` shows the values of a preset for an environment.

This page is generated from the annotations in `src/echelon/config.py`, `sections.py`, `run_sections.py` and `presets/`:
`python -m echelon.config_page > docs/configuration.md`.
"""
COLUMNS = "| field | type | default | bounds | unit | meaning |\n|---|---|---|---|---|---|"


def page() -> str:
    """Returns the page as Markdown."""
    whole = TrainConfig()
    parts = [HEAD, _table("## The run", whole)]
    for field in fields(TrainConfig):
        if field.name == "algorithm":
            classes = AlgorithmConfig.classes().values()
            parts += [_table(f"## `algorithm` with `name={cls().name}`", cls()) for cls in classes]
        elif field.is_section:
            parts.append(_table(f"## `{field.name}`", getattr(whole, field.name)))
    return "\n".join(parts)


def _table(title: str, section: Section) -> str:
    rows = [_row(field, getattr(section, field.name)) for field in fields(type(section)) if not field.is_section]
    return "\n".join([title, "", str(type(section).__doc__), "", COLUMNS, *rows, ""])


def _row(field: ConfigField, default: Any) -> str:
    cells = [f"`{field.path}`", field.type, _text(default), field.bounds, field.unit, field.meaning]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _text(value: Any) -> str:
    match value:
        case str() if value:
            return f"`{value}`"
        case int() if value >= 10_000:
            return f"{value:_}"
    return option_text(value)


if __name__ == "__main__":
    print(page(), end="")
