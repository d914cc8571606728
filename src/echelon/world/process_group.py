"""Process groups of torch.distributed among any processes that share a store; other processes are not involved.

Only this module uses private parts of torch. It therefore refuses torch versions outside the tested range
(`FIRST_TORCH` to `LAST_TORCH`, also in pyproject.toml), and versions that lack a name that it uses.

A group created here is not registered with torch.distributed: its methods (`group.allreduce([tensor]).wait()`) and
DistributedDataParallel(module, process_group=group) work, and so do the functions of torch.distributed that take
`group` and ranks inside it (`group_src`, `group_dst`).

Sockets: gloo listens at `hostname` only, nccl at the interface with that address. `hostname` is the address at which
the other members reach this host; 127.0.0.1 if all of them are on one host. gloo and nccl neither authenticate nor
encrypt the traffic between hosts: keep such groups on a private network.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import operator
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from echelon.errors import ConfigError, TransportError, TransportTimeout

FIRST_TORCH, LAST_TORCH = (2, 10), (2, 15)
GROUP_NAMES = ["BackendType", "_set_default_backend", "_register_backend", "_set_group_name", "shutdown"]
GLOO_NAMES = ["_Options", "_Options._devices", "_Options._timeout", "create_device"]
NCCL_NAMES = ["Options", "Options._timeout"]
BACKENDS = ("gloo", "nccl")
LOOK_S = 0.1  # how often a wait for gloo checks that all members are alive
LINGER_S = 1.0  # how long a group is kept after `end_process_group`
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface

# Groups are referenced here until `end_process_group`, for two reasons. torch keeps only the C++ half of a store that
# is written in Python. And torch deadlocks if a DistributedDataParallel drops the last reference to a group just after
# an operation: the destructor then waits for gloo's thread while it holds the GIL, which that thread needs to release
# the operation.
_alive: dict[int, tuple[dist.ProcessGroup, Store]] = {}  # by id
_releasing = threading.Lock()


def make_process_group(
    store: Store,
    name: str,
    rank: int,
    members: Sequence[str],
    *,
    backend: str = "gloo",
    hostname: str = "127.0.0.1",
    timeout_s: float = 60.0,
    watch: Callable[[], None] | None = None,
    on_met: Callable[[], None] = lambda: None,
) -> dist.ProcessGroup:
    """Creates the process group `name` of `members`, in which this process has `rank`; returns when all have joined.

    Every member calls this with the same name and members; a name can be used once per store. After `timeout_s`, a
    TransportTimeout names the members that did not join; later, `timeout_s` bounds each operation of the group.

    `watch` raises when a member has died. It is called repeatedly while gloo connects in a thread of its own, from
    which the store must be usable: gloo itself may wait five times as long for a dead member, and does not name it.
    `on_met` is called when all members have joined. From then on the name is used up, because other members may have
    the group even if this call fails.
    """
    _check(rank, members, backend)
    check_torch(backend)
    deadline = time.monotonic() + timeout_s
    own = _meet(PrefixStore(f"{name}/", store), name, rank, members, timeout_s)
    on_met()
    try:
        group: Any = dist.ProcessGroup(own, rank, len(members))
        kind = getattr(dist.ProcessGroup.BackendType, backend.upper())
        if backend == "nccl":  # connects at the first operation
            made = _nccl(own, group, hostname, timeout_s)
        elif watch is None:
            made = _gloo(own, group, hostname, timeout_s)
        else:
            made = _watched(lambda: _gloo(own, group, hostname, timeout_s), watch, deadline)
        group._set_default_backend(kind)
        for device in _devices(backend):
            group._register_backend(torch.device(device), kind, made)
        group._set_group_name(name)
    except RuntimeError as error:
        raise TransportError(
            f"the process group {name!r} of {', '.join(members)} could not be connected from {hostname}: {error}. "
            "Did a member exit meanwhile, or is there a firewall between them?"
        ) from error
    _alive[id(group)] = (group, store)
    return cast(dist.ProcessGroup, group)


def end_process_group(group: dist.ProcessGroup) -> None:
    """Ends a group of `make_process_group`; its sockets close LINGER_S later, if nothing else refers to it."""
    group.shutdown()
    timer = threading.Timer(LINGER_S, _release, (id(group),))
    timer.daemon = True
    timer.start()


def _release(key: int) -> None:
    with _releasing:
        _alive.pop(key, None)


# At exit, wait for a release that is in progress, and prevent any later one: the interpreter would stop the releasing
# thread midway, and torch would abort the process.
atexit.register(_releasing.acquire)


def check_torch(backend: str) -> None:
    """Raises ConfigError if this version of torch is not among those that were tested; call it before any work."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    relied_on = {"ProcessGroup": GROUP_NAMES, "ProcessGroupGloo": GLOO_NAMES}
    if backend == "nccl":
        relied_on["ProcessGroupNCCL"] = NCCL_NAMES
    missing = [f"{owner}.{name}" for owner, names in relied_on.items() for name in names if not _has(owner, name)]
    if missing or not FIRST_TORCH <= version <= LAST_TORCH:
        lacks = f", without {', '.join(missing)}" if missing else ""
        first, last = (".".join(map(str, end)) for end in (FIRST_TORCH, LAST_TORCH))
        raise ConfigError(
            f"process groups of several learners or members use private parts of torch, tested with torch {first} to "
            f"{last}; this is torch {torch.__version__}{lacks}. Install a version from {first} to {last}."
        )


def _has(owner: str, name: str) -> bool:
    """Whether torch.distributed has the class `owner` with the attribute `name`, which may have dots."""
    try:
        operator.attrgetter(f"{owner}.{name}")(dist)
    except AttributeError:
        return False
    return True


def _check(rank: int, members: Sequence[str], backend: str) -> None:
    if not 0 <= rank < len(members):
        raise ConfigError(f"there is no rank {rank} among the {len(members)} members {', '.join(members)}.")
    if len(set(members)) < len(members):
        raise ConfigError(f"a member appears twice among {', '.join(members)}. Name each member once.")
    if backend not in BACKENDS:
        raise ConfigError(f"there is no backend {backend!r}: use {' or '.join(BACKENDS)}.")
    if backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise ConfigError("the backend nccl needs a GPU and a torch that is built with nccl. Use gloo on this machine.")


def _meet(store: Store, name: str, rank: int, members: Sequence[str], timeout_s: float) -> Store:
    """Waits until every member has joined, since gloo and nccl would not name the missing; returns the group's store.

    The prefix of the store is a hash of one random token per member, so that members that retry after a failure read
    no keys of the first attempt.
    """
    store.set(f"here/{rank}", secrets.token_hex(8))
    keys = [f"here/{other}" for other in range(len(members))]
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except (TransportTimeout, dist.DistStoreError) as error:
        late = [member for key, member in zip(keys, members, strict=True) if not store.check([key])]
        if late:  # else the last member has joined just now
            store.delete_key(keys[rank])  # members that join later must not count this one
            raise TransportTimeout(
                f"{', '.join(map(repr, late))} did not join the process group {name!r} of {', '.join(members)} "
                f"within {timeout_s:g} s. Every member has to create it."
            ) from error
    tokens = b"".join(store.get(key) for key in keys)
    return PrefixStore(f"{hashlib.sha256(tokens).hexdigest()[:16]}/", store)


def _gloo(store: Store, group: dist.ProcessGroup, hostname: str, timeout_s: float) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=hostname)]
    options._timeout = timedelta(seconds=timeout_s)
    return gloo(store, group.rank(), group.size(), options)


def _watched(connect: Callable[[], Any], watch: Callable[[], None], deadline: float) -> Any:
    """Runs `connect` in a thread and returns its result; raises its error, that of `watch`, or at the `deadline`."""
    made: Future[Any] = Future()

    def work() -> None:
        try:
            made.set_result(connect())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=work, name="echelon-connect", daemon=True).start()
    while not wait_for([made], LOOK_S).done:
        watch()
        if time.monotonic() >= deadline:
            raise RuntimeError("connecting took longer than the timeout")
    return made.result()


def _nccl(store: Store, group: dist.ProcessGroup, hostname: str, timeout_s: float) -> Any:
    if interface := interface_of(hostname):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # nccl has no option for it; it reads this once
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return nccl(store, group.rank(), group.size(), options)


def _devices(backend: str) -> list[str]:
    if backend == "nccl":
        return ["cuda"]
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def interface_of(hostname: str) -> str:
    """Returns the name of this host's network interface with the IPv4 address `hostname`, or ""."""
    try:
        wanted = socket.inet_aton(socket.gethostbyname(hostname))
    except OSError:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # the interface has no IPv4 address
                continue
            if answer[20:24] == wanted:
                return name
    return ""
