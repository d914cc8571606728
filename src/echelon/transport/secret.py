"""The secret of a run. Peers on other hosts must be authenticated with it; peers on the loopback may be."""

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
    """Returns a key derived from the secret: scrypt makes it slow to guess a short secret from a recorded handshake."""
    if len(secret) < MIN_SECRET_CHARACTERS:
        raise ConfigError(
            f"the secret has {len(secret)} characters; at least {MIN_SECRET_CHARACTERS} are required. Set "
            f"{SECRET_VARIABLE} to a random value, for example the output of `openssl rand -hex 32`."
        )
    return hashlib.scrypt(secret.encode(), salt=b"echelon curve 1", n=2**14, r=8, p=1, dklen=32)


def secret_from_environment() -> str | None:
    """Returns the run's secret from `ECHELON_SECRET`, or None if it is not set."""
    return os.environ.get(SECRET_VARIABLE) or None


def is_loopback(host: str) -> bool:
    """Returns whether `host` is an IPv4 loopback address."""
    with suppress(ValueError):
        return ipaddress.IPv4Address(host).is_loopback
    return False


def numeric(address: str) -> str:
    """Returns `address` with localhost replaced by 127.0.0.1: libzmq binds no names, and no hosts file is consulted."""
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    return f"tcp://127.0.0.1:{port}" if scheme == "tcp" and host.lower() == "localhost" else address


def needs_secret(address: str) -> bool:
    """Returns whether peers at `address` must be authenticated: all except those that only this machine can reach."""
    scheme, _, rest = numeric(address).partition("://")
    return scheme not in ("ipc", "inproc") and not is_loopback(rest.rpartition(":")[0])


def check_secret(address: str, secret: str | None) -> None:
    """Raises ConfigError if the secret is too short, or if `address` needs a secret and there is none."""
    if secret is not None:
        stretched(secret)
    elif needs_secret(address):
        raise ConfigError(
            f"{address} is not on the loopback, so peers must be authenticated, but no secret is set. Set "
            f"{SECRET_VARIABLE} to the same value on every host (at least {MIN_SECRET_CHARACTERS} characters, for "
            "example the output of `openssl rand -hex 32`), or use tcp://127.0.0.1:PORT."
        )
