"""Process groups of torch.distributed among any processes that share a store; the others need not know.

What is not public in torch is used here and nowhere else. So a group is refused with a torch outside of the range that
was tested (`FIRST_TORCH` to `LAST_TORCH`, also in pyproject.toml), and with one that lacks a name.

A group made here is not registered with torch.distributed: its methods (`group.allreduce([tensor]).wait()`) and
DistributedDataParallel(module, process_group=group) work, and so do those functions of torch.distributed that take
`group` and count ranks inside of it (`group_src`, `group_dst`).

Sockets: gloo listens at `hostname` alone, nccl at the interface that has it, so `hostname` is the address of this host
by which the other members reach it; 127.0.0.1 where all of them are on one. What travels between hosts is neither
authenticated nor encrypted by gloo or nccl: keep such groups on a network of their own.
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
LOOK_S = 0.1  # how often a wait for gloo looks whether everybody is alive
LINGER_S = 1.0  # how long a group outlives its end
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface

# Every group lives until it is ended: torch keeps only its own half of a store that is written in Python, and it stops
# for good if the last to let go of a group is a DistributedDataParallel just after an operation. Its end then waits for
# gloo's thread without giving up the interpreter, which that thread needs to tidy the operation up.
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
    """The process group `name` of `members`, of whom this process is number `rank`; returns when all are in it.

    Every member calls it with the same name and members; names are used once for each store. Whoever does not come
    within `timeout_s` is named by a TransportTimeout; after it, the same bound holds for each operation of the group.
    `watch` raises when a member is gone, and is asked now and then while gloo connects, in a thread of its own that
    must be able to ask the store: gloo itself may wait for the dead five times as long, and names nobody. `on_met` is
    called when all are here: from then on the name is used up, as others may have the group though this one fails.
    """
    _check(rank, members, backend)
    check_torch(backend)
    deadline = time.monotonic() + timeout_s
    own = _meet(PrefixStore(f"{name}/", store), name, rank, members, timeout_s)
    on_met()
    try:
        group: Any = dist.ProcessGroup(own, rank, len(members))
        kind = getattr(dist.ProcessGroup.BackendType, backend.upper())
        if backend == "nccl":  # it connects at the first operation
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
            "Did a member end meanwhile, or is there a firewall between them?"
        ) from error
    _alive[id(group)] = (group, store)
    return cast(dist.ProcessGroup, group)


def end_process_group(group: dist.ProcessGroup) -> None:
    """Ends a group of `make_process_group`; its sockets close a little later, when nothing refers to it any more."""
    group.shutdown()
    timer = threading.Timer(LINGER_S, _release, (id(group),))
    timer.daemon = True
    timer.start()


def _release(key: int) -> None:
    with _releasing:
        _alive.pop(key, None)


# Before the interpreter ends, it waits for a group that is just being released, and no other is released after that: it
# would stop that thread in the middle, which torch answers by aborting the process.
atexit.register(_releasing.acquire)


def check_torch(backend: str) -> None:
    """Refuses a torch that is not known to make groups as we do, before anything has begun."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    relied_on = {"ProcessGroup": GROUP_NAMES, "ProcessGroupGloo": GLOO_NAMES}
    if backend == "nccl":
        relied_on["ProcessGroupNCCL"] = NCCL_NAMES
    missing = [f"{owner}.{name}" for owner, names in relied_on.items() for name in names if not _has(owner, name)]
    if missing or not FIRST_TORCH <= version <= LAST_TORCH:
        lacks = f", without {', '.join(missing)}" if missing else ""
        first, last = (".".join(map(str, end)) for end in (FIRST_TORCH, LAST_TORCH))
        raise ConfigError(
            f"process groups of several learners or members rely on what torch keeps private, and were tested with "
            f"torch {first} to {last}; this is torch {torch.__version__}{lacks}. Install one from {first} to {last}."
        )


def _has(owner: str, name: str) -> bool:
    """Whether torch.distributed has the class `owner`, and that the attribute `name`, which may have dots."""
    try:
        operator.attrgetter(f"{owner}.{name}")(dist)
    except AttributeError:
        return False
    return True


def _check(rank: int, members: Sequence[str], backend: str) -> None:
    if not 0 <= rank < len(members):
        raise ConfigError(f"there is no rank {rank} among the {len(members)} members {', '.join(members)}.")
    if len(set(members)) < len(members):
        raise ConfigError(f"a member is named twice among {', '.join(members)}. Name each once.")
    if backend not in BACKENDS:
        raise ConfigError(f"there is no backend {backend!r}: use {' or '.join(BACKENDS)}.")
    if backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise ConfigError("the backend nccl needs a GPU and a torch that is built with it. Use gloo on this machine.")


def _meet(store: Store, name: str, rank: int, members: Sequence[str], timeout_s: float) -> Store:
    """Waits until every member is here: gloo and nccl would not say whom they miss. Returns a store for them alone.

    Its prefix comes from a word of each, so that those who try again after a failure read nothing of the first time.
    """
    store.set(f"here/{rank}", secrets.token_hex(8))
    keys = [f"here/{other}" for other in range(len(members))]
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except (TransportTimeout, dist.DistStoreError) as error:
        late = [member for key, member in zip(keys, members, strict=True) if not store.check([key])]
        if late:  # else the last has come just now, and goes on
            store.delete_key(keys[rank])  # whoever comes later must not find us
            raise TransportTimeout(
                f"{', '.join(map(repr, late))} did not come to the process group {name!r} of {', '.join(members)} "
                f"within {timeout_s:g} s. Every member has to make it."
            ) from error
    words = b"".join(store.get(key) for key in keys)
    return PrefixStore(f"{hashlib.sha256(words).hexdigest()[:16]}/", store)


def _gloo(store: Store, group: dist.ProcessGroup, hostname: str, timeout_s: float) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=hostname)]
    options._timeout = timedelta(seconds=timeout_s)
    return gloo(store, group.rank(), group.size(), options)


def _watched(connect: Callable[[], Any], watch: Callable[[], None], deadline: float) -> Any:
    """What `connect` returns or raises; what `watch` raises meanwhile, or RuntimeError at the `deadline`."""
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
            raise RuntimeError("it took longer than the timeout")
    return made.result()


def _nccl(store: Store, group: dist.ProcessGroup, hostname: str, timeout_s: float) -> Any:
    if interface := interface_of(hostname):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # nccl has no option for it, and reads it once
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return nccl(store, group.rank(), group.size(), options)


def _devices(backend: str) -> list[str]:
    if backend == "nccl":
        return ["cuda"]
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def interface_of(hostname: str) -> str:
    """The name of the interface of this host that has the IPv4 address `hostname`, or ""."""
    try:
        wanted = socket.inet_aton(socket.gethostbyname(hostname))
    except OSError:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no such address
                continue
            if answer[20:24] == wanted:
                return name
    return ""
