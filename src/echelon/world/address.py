"""Addresses of the world: their kinds, and where a member may bind.

There are three kinds of address: `ipc://FOLDER/file` (one machine; only this user may enter the folder), `tcp://HOST:PORT`
(a secret authenticates peers) and `inproc://name` (several members in
one thread of one process).
"""

from __future__ import annotations

import os
import re
import socket
from contextlib import suppress
from pathlib import Path

from echelon.disk import is_private
from echelon.errors import ConfigError
from echelon.transport.secret import numeric, secret_for

IPC_PATH_BYTES = 107  # sockaddr_un holds 108, including the terminating zero
NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


def check_name(name: str) -> None:
    """Raises ConfigError on a name that cannot be part of an address."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name[:80]!r} is not a valid member name: use 1 to 64 letters, digits, or any of '_.:-'.")


def check_address(address: str) -> None:
    """Raises ConfigError on an address that no member may bind, such as one off the loopback without a secret."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        length = len(os.fsencode(rest))
        if length > IPC_PATH_BYTES or not rest.startswith("/"):
            raise ConfigError(
                f"the address {address} has a path of {length} bytes; ipc needs an absolute path of at most "
                f"{IPC_PATH_BYTES} bytes. Choose a shorter folder, such as one under /tmp."
            )
        folder = Path(rest).parent
        if not folder.is_dir():
            raise ConfigError(f"the folder of the address {address} does not exist. Create it first.")
        if not is_private(folder):  # nothing else keeps other users from connecting, or from listening there first
            raise ConfigError(
                f"the folder of the address {address} is not a folder of this user that no other user can enter. "
                f"Create another one with `mkdir -m 700`, or `chmod 700 {folder}`."
            )
    elif scheme == "tcp":
        host, _, port = rest.rpartition(":")
        if not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ConfigError(f"the address {address} has no port: write tcp://127.0.0.1:PORT (0: any free port).")
        secret_for(address)
        if host in ("*", "0.0.0.0", ""):
            raise ConfigError(
                f"the address {address} names no interface, so others could not connect to it. Use the address at "
                "which they reach this host."
            )
    elif scheme != "inproc" or not rest:
        raise ConfigError(
            f"{address!r} is not an address: write ipc:///folder/file, tcp://127.0.0.1:PORT or inproc://name."
        )


def member_address(host_address: str, name: str, incarnation: str) -> str:
    """Returns where a member of the world at `host_address` binds.

    That is a file beside the host's, a name below the host's, or any port of the interface that reaches the host.
    """
    if path := ipc_path(host_address):
        return f"ipc://{path.parent}/{name}.{incarnation}"
    if host_address.startswith("inproc://"):
        return f"{host_address}/{name}.{incarnation}"
    host, _, port = host_address.removeprefix("tcp://").rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing, only queries the routing table
        try:
            probe.connect((host, int(port)))
        except (OSError, ValueError) as error:
            raise ConfigError(f"no interface of this machine reaches {host_address}: {error}.") from error
        return f"tcp://{probe.getsockname()[0]}:0"


def resolved(address: str) -> str:
    """Returns `address` with its host name resolved to an IP address: a name is looked up once, here."""
    scheme, _, rest = numeric(address).partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or host == "*":
        return address
    try:
        return f"tcp://{socket.gethostbyname(host)}:{port}"
    except OSError as error:
        raise ConfigError(f"the host of the address {address} cannot be found: {error}.") from error


def is_sibling(host_address: str, address: str) -> bool:
    """Whether `address` may be that of a member of the world at `host_address`.

    The check keeps a member from making the others connect elsewhere.
    """
    try:
        check_address(address)
    except ConfigError:
        return False
    path, own = ipc_path(address), ipc_path(host_address)
    if path and own:
        return path.parent == own.parent and path != own
    return path is None and own is None and address.partition("://")[0] == host_address.partition("://")[0]


def ipc_path(address: str) -> Path | None:
    """Returns the socket file of an ipc address, None for other addresses."""
    return Path(address.removeprefix("ipc://")) if address.startswith("ipc://") else None


def remove(address: str) -> None:
    """Removes the socket file of an ipc address; other addresses have none."""
    if path := ipc_path(address):
        with suppress(OSError):
            path.unlink(missing_ok=True)
