"""What a value of the configuration must satisfy; a breach is an error that names the field and the value."""

from __future__ import annotations

from typing import Any

from echelon.errors import ConfigError


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def at_least(config: Any, section: str, **least: float) -> None:
    """Each named field of `config` must not be below the number given for it."""
    for name, bound in least.items():
        value = getattr(config, name)
        require(value >= bound, f"{section}.{name}={value} must be at least {bound}.")


def fractions(config: Any, section: str, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(0 <= value <= 1, f"{section}.{name}={value} must lie between 0 and 1.")


def above_zero(config: Any, section: str, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(value > 0, f"{section}.{name}={value} must be above 0.")


def parts(config: Any, section: str, *names: str) -> None:
    """Each named field must be above 0 and at most 1."""
    for name in names:
        value = getattr(config, name)
        require(0 < value <= 1, f"{section}.{name}={value} must be above 0 and at most 1.")


def tcp_address(address: str, name: str) -> None:
    """`address`, the value of `name`, must be tcp://HOST:PORT."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    require(
        address.startswith("tcp://") and bool(host) and port.isdecimal() and int(port) < 65_536,
        f"{name}={address} is no address. Write tcp://HOST:PORT; port 0 takes a free one.",
    )
