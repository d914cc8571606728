"""Versioned values under keys: a push is accepted only if it is based on the newest version.

A version is a label, a number or a string. The first push of a key is always accepted; any other must name the newest
version as its predecessor. If two members push from the same version, the second is rejected and must pull first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Protocol

from echelon.errors import ConfigError

if TYPE_CHECKING:
    from echelon.world import RpcGroup

Version = int | str


class Ordered(Protocol):
    """The interface of an ordered server and of its clients."""

    def push(self, key: str, value: Any, version: Version, prev_version: Version | None) -> bool:
        """Stores `value` as `version`; changes nothing and returns False unless `prev_version` is the newest."""
        ...

    def pull(self, key: str, version: Version | None = None) -> tuple[Any, Version] | None:
        """Returns the value of `version` (None: the newest) and its version; None if the server does not have it."""
        ...

    def newer(self, key: str, version: Version | None) -> tuple[Any, Version] | Version | None:
        """Returns the newest value and its version; only the version if it equals `version`; None without a value."""
        ...


class OrderedServerImpl:
    """Stores the newest version of every key and `version_depth` earlier ones, in the memory of its member.

    A lock serializes the threads that push and pull for other members. A value that is pushed or pulled in this process
    is shared with the server, so the caller must not change it. If the process dies, its values are lost and requests
    for them raise PeerLost. If the host of the world dies, calls in this process raise PeerLost too, as no other member
    can push.
    """

    def __init__(self, server_name: str, group: RpcGroup, version_depth: int = 1) -> None:
        if version_depth < 0:
            raise ConfigError(f"ordered server {server_name}: version_depth={version_depth} must be 0 or more.")
        self.server_name, self.group, self.version_depth = server_name, group, version_depth
        self._lock = threading.Lock()
        self._values: dict[str, OrderedDict[Version, Any]] = {}
        # Remote callers need no check: their call itself fails after the end of the world.
        group.register(f"{server_name}/push", self._push)
        group.register(f"{server_name}/pull", self._pull)
        group.register(f"{server_name}/newer", self._newer)

    def push(self, key: str, value: Any, version: Version, prev_version: Version | None) -> bool:
        self._check("push")
        return self._push(key, value, version, prev_version)

    def pull(self, key: str, version: Version | None = None) -> tuple[Any, Version] | None:
        self._check("pull")
        return self._pull(key, version)

    def newer(self, key: str, version: Version | None) -> tuple[Any, Version] | Version | None:
        self._check("pull")
        return self._newer(key, version)

    def _push(self, key: str, value: Any, version: Version, prev_version: Version | None) -> bool:
        with self._lock:
            kept = self._values.setdefault(key, OrderedDict())
            if kept and (next(reversed(kept)) != prev_version or version in kept):
                return False
            kept[version] = value
            if len(kept) > self.version_depth + 1:
                kept.popitem(last=False)
            return True

    def _pull(self, key: str, version: Version | None = None) -> tuple[Any, Version] | None:
        with self._lock:
            kept = self._values.get(key)
            if not kept:
                return None
            wanted = next(reversed(kept)) if version is None else version
            return (kept[wanted], wanted) if wanted in kept else None

    def _newer(self, key: str, version: Version | None) -> tuple[Any, Version] | Version | None:
        newest = self._pull(key)
        return version if newest is not None and newest[1] == version else newest

    def _check(self, service: str) -> None:
        self.group.check_world(f"{service}() of the ordered server {self.server_name!r}")


class OrderedServer:
    """A client of the ordered server of this name, for any member of the group; values are copied."""

    def __init__(self, server_name: str, group: RpcGroup) -> None:
        self.server_name, self.group = server_name, group

    def push(self, key: str, value: Any, version: Version, prev_version: Version | None) -> bool:
        done: bool = self.group.registered_sync(f"{self.server_name}/push", args=(key, value, version, prev_version))
        return done

    def pull(self, key: str, version: Version | None = None) -> tuple[Any, Version] | None:
        found: tuple[Any, Version] | None = self.group.registered_sync(f"{self.server_name}/pull", args=(key, version))
        return found

    def newer(self, key: str, version: Version | None) -> tuple[Any, Version] | Version | None:
        found: tuple[Any, Version] | Version | None
        found = self.group.registered_sync(f"{self.server_name}/newer", args=(key, version))
        return found


OrderedServerSimple, OrderedServerSimpleImpl = OrderedServer, OrderedServerImpl  # Machin's names
