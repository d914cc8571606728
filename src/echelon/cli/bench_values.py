"""The values of a benchmark's settings, as its arguments give them."""

from __future__ import annotations

from typing import Any

from echelon.errors import ConfigError


def parse_value(default: Any, name: str, text: str) -> Any:
    """What `text` says for the setting `name`, in the type of its `default`."""
    try:
        return type(default)(text.strip())
    except ValueError as error:
        raise ConfigError(f"{name}={text!r} is not a number. Write --{name.replace('_', '-')} {default}.") from error
