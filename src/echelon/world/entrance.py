"""How a process enters a world: where it finds the others, and how it opens the world as its host or joins it.

Siblings, which are processes with the same parent and script, meet in a private folder in shared memory. Its name is
derived from the user, the parent, the script and the world size. Other processes meet at an address. The folder of a
killed member is removed by the surviving members, or by the next run.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from echelon.disk import is_private
from echelon.errors import ConfigError, Refused, TransportTimeout
from echelon.transport.codec import Limits
from echelon.transport.secret import REMEDY, secret_for
from echelon.transport.session import NAME, create_session, session_name, start_ticks, sweep
from echelon.transport.sockets import is_handshake_refused, why_silent
from echelon.transport.store_order import check_platform
from echelon.world.address import check_address, check_name, resolved
from echelon.world.node import Node
from echelon.world.registry import BEGUN, Registry
from echelon.world.watch import MemberInfo, write_info

SHM_DIR = "/dev/shm"
SHARED = ".shared"  # suffix of a member's folder that is beside its socket
HOST_SOCKET = "host"  # file name of the host's socket in the meeting folder
LIMITS = Limits(header_bytes=16 << 20, total_bytes=1 << 30)  # of any message between members
TRY_S = 5.0  # how long a listening host may take to admit this process
PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Entrance:
    """The name and rank of a process, and the world that it enters; `launched`: the launcher is host, not rank 0."""

    name: str
    rank: int
    size: int
    address: str
    timeout_s: float
    launched: bool = False

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.rank < 0 and not self.address:
            raise ConfigError(
                f"World({self.name!r}) has neither a rank nor an address. Pass rank and world_size in every process "
                "that starts the world, or the address of a world to join."
            )
        if self.rank >= 0 and not self.rank < self.size:
            raise ConfigError(f"World({self.name!r}) has rank={self.rank} of world_size={self.size}: no such rank.")

    @property
    def is_host(self) -> bool:
        return self.rank == 0 and not self.launched


@dataclass(frozen=True, slots=True)
class Entered:
    """A node that has entered its world, its `MemberInfo`, and the registry if it is the host."""

    node: Node
    info: MemberInfo
    registry: Registry | None = None


def enter(entrance: Entrance) -> Entered:
    """Opens or joins the world; on failure, raises an error with the reason within the entrance's timeout."""
    check_platform()
    if entrance.address:
        address = resolved(entrance.address)
        check_address(address)
        folder = _member_folder(address, entrance.name)
    else:
        address, folder = _meet(entrance)
    try:
        info = write_info(entrance.rank, max(1, entrance.size), folder)
        if entrance.is_host:
            node = _open(entrance, address, info)
            return Entered(node, info, Registry(node, entrance.size))
        return Entered(_join(entrance, address, info), info)
    except BaseException:
        remove_folder(folder)
        raise


def _open(entrance: Entrance, address: str, info: MemberInfo) -> Node:
    deadline = time.monotonic() + entrance.timeout_s
    while True:
        try:
            return Node.host(address, entrance.name, limits=LIMITS, info=info.to_wire())
        except ConfigError:  # a previous world of these processes may be about to end
            if entrance.address or time.monotonic() >= deadline:
                raise
            time.sleep(PAUSE_S)


def _join(entrance: Entrance, address: str, info: MemberInfo) -> Node:
    deadline = time.monotonic() + entrance.timeout_s
    name, own_info = entrance.name, info.to_wire()

    def join_timeout_s() -> float:
        """Returns how long the host may take to admit this process; raises Refused if the secrets differ."""
        if address.startswith("tcp://") and is_handshake_refused(address, secret_for(address)):
            raise Refused(f"the world at {address} does not admit {name!r}: its secret is another. {REMEDY}")
        return min(TRY_S, max(0.1, deadline - time.monotonic()))

    def retry_timeout_s(error: TransportTimeout) -> float:
        if time.monotonic() >= deadline:
            raise TransportTimeout(_no_world(entrance, address)) from error
        return join_timeout_s()

    while True:
        try:
            return Node.join(
                address,
                name,
                timeout_s=join_timeout_s(),
                limits=LIMITS,
                info=own_info,
                on_silence=retry_timeout_s,
            )
        except Refused as error:
            if entrance.address or BEGUN not in str(error) or time.monotonic() >= deadline:
                raise
            time.sleep(PAUSE_S)  # the previous world of these siblings is about to end


def _no_world(entrance: Entrance, address: str) -> str:
    if address.startswith("tcp://"):
        return f"{entrance.name!r} found no world at {address}: {why_silent(address)}"
    return (
        f"{entrance.name!r} found no host of its world within {entrance.timeout_s:g} s, at {address}. Was rank 0 "
        "started by the same parent process and with the same script? If not, give all processes an address."
    )


def _meet(entrance: Entrance) -> tuple[str, Path]:
    """Returns the address where the siblings of this process meet, and a folder for this member beside it."""
    while True:
        address = f"ipc://{_meeting_folder(entrance.size)}/{HOST_SOCKET}"
        with contextlib.suppress(FileNotFoundError):  # a sibling that left their last world has just removed it
            return address, _member_folder(address, entrance.name)


def _meeting_folder(size: int) -> Path:
    """Returns the folder where the siblings of this process meet; the first of them creates it."""
    sweep(SHM_DIR)
    parent = os.getppid()
    script = os.path.realpath(getattr(sys.modules.get("__main__"), "__file__", None) or os.getcwd())
    identity = f"{os.getuid()} {parent} {start_ticks(parent)} {script} {size}"
    folder = Path(SHM_DIR) / session_name(parent, hashlib.sha256(identity.encode()).hexdigest()[:8])
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not is_private(folder) and os.path.lexists(folder):  # else a sibling has just removed it
        raise ConfigError(f"{folder} is not a private folder of this user. Remove it, or give the world an address.")
    return folder


def _member_folder(address: str, name: str) -> Path:
    """Creates a private folder for a member of the world at `address`, beside its socket file if it has one."""
    if not address.startswith("ipc://"):
        return create_session(SHM_DIR)
    folder = Path(address.removeprefix("ipc://")).parent / f"{name}.{secrets.token_hex(8)}{SHARED}"
    folder.mkdir(mode=0o700)
    return folder


def remove_folder_of(dead: MemberInfo, own: MemberInfo) -> None:
    """Removes the folder of a dead member of this host, after checking that the path is that of a member's folder."""
    folder = Path(dead.folder)
    is_session = folder.parent == Path(SHM_DIR) and NAME.fullmatch(folder.name)
    is_sibling = folder.parent == Path(own.folder).parent and folder.name.endswith(SHARED)
    if (is_session or is_sibling) and dead.is_near:
        remove_folder(folder)


def remove_folder(folder: Path) -> None:
    """Removes a member's folder, and the meeting folder that contains it if it is then empty."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.parent.parent == Path(SHM_DIR):
        with contextlib.suppress(OSError):  # not empty: other members use it
            folder.parent.rmdir()
