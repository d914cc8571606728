"""Values under keys, with versions: a push counts only if it was made from the newest one.

Versions are labels, numbers or text. The first push of a key always counts; any other must name the newest version as
the one before it, so of two members that push from the same version, one is told to pull first.
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
    """What both sides of an ordered server offer."""

    def push(self, key: str, value: Any, version: Version, prev_version: Version | None) -> bool:
        """Stores `value` as `version`; False, and nothing is changed, unless `prev_version` is the newest there."""
        ...

    def pull(self, key: str, version: Version | None = None) -> tuple[Any, Version] | None:
        """The value of `version` (None: of the newest) and its version; None if that is not there."""
        ...

    def newer(self, key: str, version: Version | None) -> tuple[Any, Version] | Version | None:
        """The newest value and its version; only the version if it is `version`; None if nothing is there."""
        ...


class OrderedServerImpl:
    """Holds the newest version of every key and `version_depth` before it, in the memory of the member that makes it.

    Threads that serve other members push and pull; a lock lets one in at a time. Who pushes or pulls here directly
    shares the value with the server and changes it no more. If the process dies, its values are gone and whoever asks
    for them gets PeerLost; so does whoever asks here once the host of the world is gone, as nobody else can push.
    """

    def __init__(self, server_name: str, group: RpcGroup, version_depth: int = 1) -> None:
        if version_depth < 0:
            raise ConfigError(f"ordered server {server_name}: version_depth={version_depth} must be 0 or more.")
        self.server_name, self.group, self.version_depth = server_name, group, version_depth
        self._lock = threading.Lock()
        self._values: dict[str, OrderedDict[Version, Any]] = {}
        # Who calls from elsewhere learns of the world's end from the call itself.
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
    """Access to the ordered server of this name, from any member of the group; values are copied on their way."""

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
