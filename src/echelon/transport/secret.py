"""The secret of a run, and where it is needed: peers off the loopback must be authenticated, those on it may be."""

from __future__ import annotations

import hashlib
import ipaddress
import os
from contextlib import suppress
from functools import lru_cache

from echelon.errors import ConfigError

SECRET_VARIABLE = "ECHELON_SECRET"
MIN_SECRET_CHARACTERS = 16


@lru_cache(maxsize=8)
def stretched(secret: str) -> bytes:
    """The secret, stretched: scrypt makes guessing a short one from a recorded handshake slow."""
    if len(secret) < MIN_SECRET_CHARACTERS:
        raise ConfigError(
            f"the secret has {len(secret)} characters where at least {MIN_SECRET_CHARACTERS} are needed. Set "
            f"{SECRET_VARIABLE} to a random one, such as that of `openssl rand -hex 32`."
        )
    return hashlib.scrypt(secret.encode(), salt=b"echelon curve 1", n=2**14, r=8, p=1, dklen=32)


def secret_from_environment() -> str | None:
    """The run's secret from `ECHELON_SECRET`, or None where there is none."""
    return os.environ.get(SECRET_VARIABLE) or None


def is_loopback(host: str) -> bool:
    """Whether `host` is an IPv4 address that only this machine reaches."""
    with suppress(ValueError):
        return ipaddress.IPv4Address(host).is_loopback
    return False


def numeric(address: str) -> str:
    """`address` with the name localhost as a number: libzmq binds no names, and no file decides what it stands for."""
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    return f"tcp://127.0.0.1:{port}" if scheme == "tcp" and host.lower() == "localhost" else address


def needs_secret(address: str) -> bool:
    """Whether peers at `address` must be authenticated: all but those that only this machine reaches."""
    scheme, _, rest = numeric(address).partition("://")
    return scheme not in ("ipc", "inproc") and not is_loopback(rest.rpartition(":")[0])


def check_secret(address: str, secret: str | None) -> None:
    """Raises ConfigError where `address` must not be used with this secret, or without one."""
    if secret is not None:
        stretched(secret)
    elif needs_secret(address):
        raise ConfigError(
            f"{address} is not on the loopback, where peers must be authenticated, and there is no secret. Set "
            f"{SECRET_VARIABLE} to the same value on every host (at least {MIN_SECRET_CHARACTERS} characters, such as "
            "`openssl rand -hex 32`), or use tcp://127.0.0.1:PORT."
        )
