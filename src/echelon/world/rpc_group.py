"""RpcGroup: named members that call each other, share values and offer services under keys.

The host of the world stores the keys and their owners; values and services stay in the process that paired or
registered them. Callers cache the owner of a key, so a service call takes one round trip; if the owner no longer has
the key or is gone, they ask the host again. Every method may be called from any thread.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from echelon.errors import GroupKeyError, PeerLost, TransportTimeout, WorldError
from echelon.transport.channel_calls import Future
from echelon.world.functions import SERVICE, VALUE, name_of

if TYPE_CHECKING:
    from echelon.world.membership import Membership

DONE = {VALUE: "paired", SERVICE: "registered"}
EXPLAIN_S = 5.0  # how long the host may take to provide the details of an error

Kwargs = Mapping[str, Any] | None
Fetch = Callable[[float | None], Any]  # fetches the value, with a timeout in seconds


class Remote:
    """A handle of a value in the process of `owner`: a result that is kept there, or a paired value."""

    def __init__(self, owner: str, fetch: Fetch, free: Callable[[], None] | None = None) -> None:
        """`free` is called when this handle is deleted."""
        self.owner = owner
        self._fetch, self._free = fetch, free

    def to_here(self, timeout_s: float | None = None) -> Any:
        """Returns a copy of the current value; raises the error of the call that should have produced it."""
        return self._fetch(timeout_s)

    def __del__(self) -> None:
        if self._free is not None:
            self._free()


class RpcGroup:
    """A group of members of a world, created by `World.create_rpc_group`."""

    def __init__(self, world: Membership, name: str, members: Sequence[str]) -> None:
        self._world, self._name, self._members = world, name, sorted(members)
        self.own: dict[tuple[str, str], Any] = {}  # kind and key -> the value or service of this process
        self.owners: dict[tuple[str, str], str] = {}
        self._binding = threading.Lock()
        self._arrivals = itertools.count(1)
        self._destroyed = False

    # Calls.

    def rpc_sync(
        self, to: str, func: Callable[..., Any], timeout: float = -1, args: Sequence[Any] = (), kwargs: Kwargs = None
    ) -> Any:
        """Runs `func` in the process of the member `to` and returns its result."""
        return self.rpc_async(to, func, timeout, args, kwargs).wait()

    def rpc_async(
        self, to: str, func: Callable[..., Any], timeout: float = -1, args: Sequence[Any] = (), kwargs: Kwargs = None
    ) -> Future:
        """Starts a call; the future's `wait()` returns the value or raises the error."""
        return self._call(to, func, timeout, args, kwargs, False)

    def remote(
        self, to: str, func: Callable[..., Any], timeout: float = -1, args: Sequence[Any] = (), kwargs: Kwargs = None
    ) -> Remote:
        """Starts a call whose result stays in the process of `to` until the handle is deleted."""
        return self._kept(to, self._call(to, func, timeout, args, kwargs, True))

    def _call(
        self, to: str, func: Callable[..., Any], timeout: float, args: Sequence[Any], kwargs: Kwargs, keep: bool
    ) -> Future:
        self._check_usable()
        if to not in self._members:
            raise WorldError(f"{to!r} is not in the group {self._name!r}, whose members are {self._shown}.")
        path = name_of(func)
        request = (self._name, "function", path, *_given(f"{path}()", args, kwargs), keep)
        return self._world.begin_call(to, f"{path}()", request, timeout)

    # Shared values.

    def pair(self, key: str, value: Any) -> None:
        """Shares `value` under `key`; each fetch sends a copy of its current state."""
        self._bind(VALUE, key, value)

    def unpair(self, key: str) -> None:
        """Removes a value that this member paired."""
        self._unbind(VALUE, key)

    def is_paired(self, key: str) -> bool:
        return self._holder(VALUE, key) is not None

    def get_paired(self, key: str) -> Remote:
        """Returns a handle of a value that a member paired; `to_here()` fetches it."""
        return Remote(self._find(VALUE, key), lambda timeout_s: self._ask(VALUE, key, (), {}, timeout_s).wait())

    # Services.

    def register(self, key: str, service: Callable[..., Any]) -> None:
        """Lets the members call `service`, any callable, by `key`; it runs in a thread of this process."""
        if not callable(service):
            raise WorldError(f"{key!r} of the group {self._name!r} cannot be registered: {service!r} is not callable.")
        self._bind(SERVICE, key, service)

    def deregister(self, key: str) -> None:
        """Removes a service that this member registered."""
        self._unbind(SERVICE, key)

    def is_registered(self, key: str) -> bool:
        return self._holder(SERVICE, key) is not None

    def registered_sync(self, key: str, args: Sequence[Any] = (), kwargs: Kwargs = None, timeout: float = -1) -> Any:
        """Calls the service `key` and returns its result."""
        return self._ask(SERVICE, key, args, kwargs, timeout).wait()

    def registered_async(
        self, key: str, args: Sequence[Any] = (), kwargs: Kwargs = None, timeout: float = -1
    ) -> Future:
        """Starts a call of the service `key`."""
        return self._ask(SERVICE, key, args, kwargs, timeout)

    def registered_remote(
        self, key: str, args: Sequence[Any] = (), kwargs: Kwargs = None, timeout: float = -1
    ) -> Remote:
        """Starts a call of the service `key` whose result stays in the owner's process."""
        owner = self._find(SERVICE, key)
        return self._kept(owner, self._begin(owner, (SERVICE, key, *_given(repr(key), args, kwargs), True), timeout))

    def _kept(self, owner: str, future: Future) -> Remote:
        """Returns a handle of the result of a call, which `owner` keeps until the handle is deleted."""
        world = self._world

        def fetch(timeout_s: float | None) -> Any:
            future.wait(timeout_s)
            request: tuple[Any, ...] = ("", "kept", "", (future.number,), {}, False)
            return world.begin_call(owner, f"the result of {future.what}", request, timeout_s).wait()

        return Remote(owner, fetch, lambda: world.free(owner, future.number))

    def _ask(self, kind: str, key: str, args: Sequence[Any], kwargs: Kwargs, timeout: float | None) -> Future:
        """Requests a call or a value from the owner of `key`; retries with the new owner if it has changed."""
        self._check_usable()
        request = (kind, key, *_given(repr(key), args, kwargs), False)
        owner = self.owners.get((kind, key))
        try:
            future = self._begin(owner or self._find(kind, key), request, timeout)
        except PeerLost:
            if owner is None:
                raise
            self.owners.pop((kind, key), None)  # the call was not sent, so it may go to the next owner
            future = self._begin(self._find(kind, key), request, timeout)
        future.if_missing = lambda: self._begin(self._find(kind, key), request, timeout).wait()
        return future

    def _begin(self, owner: str, request: tuple[Any, ...], timeout: float | None) -> Future:
        kind, key = request[0], request[1]

        def missing() -> Any:
            raise self._unknown(kind, key)

        future = self._world.begin_call(owner, f"{key!r} of the group {self._name!r}", (self._name, *request), timeout)
        future.if_missing = missing
        return future

    # Keys.

    def _bind(self, kind: str, key: str, thing: Any) -> None:
        self._check_usable()
        with self._binding:  # two threads may bind the same key
            if (kind, key) in self.own:
                raise self._taken(kind, key, self._world.name)
            self.own[kind, key] = thing  # before others can find the key
        match self._world.control("bind", self._name, kind, key, self._world.name):
            case ("taken", str(holder)):
                del self.own[kind, key]
                raise self._taken(kind, key, holder)

    def _unbind(self, kind: str, key: str) -> None:
        self._check_usable()
        if (kind, key) not in self.own:
            raise GroupKeyError(
                f"{key!r} is not {DONE[kind]} by {self._world.name!r} in the group {self._name!r}, so it cannot remove "
                "it. Only the owner can."
            )
        self._world.control("unbind", self._name, kind, key, self._world.name)
        self.own.pop((kind, key), None)

    def _holder(self, kind: str, key: str) -> str | None:
        self._check_usable()
        match self._world.control("find", self._name, kind, key):
            case ("ok", str(holder)):
                return holder
        return None

    def _find(self, kind: str, key: str) -> str:
        self._check_usable()
        match self._world.control("find", self._name, kind, key):
            case ("ok", str(holder)):
                self.owners[kind, key] = holder
                return holder
            case ("lost", str(holder), str(why)):
                raise PeerLost(f"{key!r} of the group {self._name!r} was lost with its owner {holder!r}: {why}.")
        raise self._unknown(kind, key)

    def _taken(self, kind: str, key: str, holder: str) -> GroupKeyError:
        return GroupKeyError(f"{key!r} is already {DONE[kind]} in the group {self._name!r}, by {holder!r}.")

    def _unknown(self, kind: str, key: str) -> GroupKeyError:
        self.owners.pop((kind, key), None)
        return GroupKeyError(f"{key!r} is not found in the group {self._name!r}: no member has {DONE[kind]} it.")

    # The group itself.

    def barrier(self, timeout: float = -1) -> None:
        """Waits until every member has reached the barrier.

        The n-th call of a member, from any of its threads, matches the n-th call of every other member. Raises PeerLost
        if a member died or left, and TransportTimeout with the names of the absent members. A call that timed out does
        not count.
        """
        self._check_usable()
        me, number = self._world.name, next(self._arrivals)
        try:
            answer = self._world.control("barrier", self._name, me, number, timeout_s=timeout)
        except TransportTimeout as error:
            answer = self._world.explain(error, "withdraw", self._name, me, number)
        match answer:
            case ("absent", list(absent)):
                raise TransportTimeout(
                    f"{_listed(absent) or 'no member'} did not reach the barrier of the group "
                    f"{self._name!r} within {self._world.seconds(timeout):g} s."
                )
            case ("lost", str(lost), str(why)):
                raise PeerLost(f"{lost!r} never reached the barrier of the group {self._name!r}: {why}.")

    def size(self) -> int:
        return len(self._members)

    def is_member(self, name: str | None = None) -> bool:
        """Whether `name`, by default this process, is in the group."""
        return (self._world.name if name is None else name) in self._members

    def get_group_name(self) -> str:
        return self._name

    def get_group_members(self) -> list[str]:
        """Returns the names of the members, sorted."""
        return list(self._members)

    def get_cur_name(self) -> str:
        """Returns the name of this process."""
        return self._world.name

    def meet(self) -> None:
        """Waits until every member has created the group; called by `create_rpc_group`."""
        world, name = self._world, self._name
        try:
            answer = world.control("create_rpc_group", name, world.name, self._members)
        except TransportTimeout as error:
            missing = world.explain(error, "give_up_group", name, world.name)
            if not missing:  # the last member has just entered
                return
            absent = [member for member in missing if not world.is_there(member)]
            also = f" Not in this world: {_listed(absent)}." if absent else ""
            raise TransportTimeout(
                f"{_listed(missing)} did not create the group {name!r} within {world.timeout_s:g} s.{also}"
            ) from None
        match answer:
            case ("lost", str(lost), str(why)):
                gone = PeerLost(f"{lost!r} never entered the group {name!r}: {why}.")
                world.explain(gone, "leave_group", name, world.name)
                raise gone
            case ("differs", list(others)):
                raise WorldError(
                    f"{world.name!r} creates the group {name!r} with the members {self._shown}, but another process "
                    f"with {_listed(others)}. Group names are unique in a world."
                )
        world.await_members(self._members)

    def destroy(self) -> None:
        """Leaves the group: the keys of this member are removed; barriers of the others raise PeerLost."""
        if not self._destroyed:
            self._world.scope.groups.pop(self._name, None)
            self._world.control("leave_group", self._name, self._world.name)
            self._destroyed = True

    def check_world(self, what: str) -> None:
        """Raises PeerLost if the host of the world is gone, WorldStopped if the world has ended.

        For an operation `what` that makes no call because all other members have left, but must not continue after the
        end of the world.
        """
        self._world.check(what)

    @property
    def _shown(self) -> str:
        return _listed(self._members)

    def _check_usable(self) -> None:
        if self._destroyed:
            raise WorldError(f"the group {self._name!r} was used after destroy(). Create it again.")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _given(what: str, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call; refuses a string or tensor, which would be split into its items."""
    if not isinstance(args, tuple | list):
        raise WorldError(f"args of {what} is {type(args).__name__}, not a tuple: write args=(value,).")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise WorldError(f"kwargs of {what} is {type(kwargs).__name__}, not a dict: write kwargs={{'name': value}}.")
    return tuple(args), dict(kwargs or {})


def enter_rpc_group(world: Membership, name: str, members: Sequence[str]) -> RpcGroup:
    """Creates the group `name` of `members`, which include this process; returns when all of them have called this."""
    if len(set(members)) < len(members) or isinstance(members, str) or not members:
        raise WorldError(f"the group {name!r} needs a list of distinct members, not {members!r}.")
    if world.name not in members:
        raise WorldError(f"{world.name!r} is not in the group {name!r} of {_listed(members)}, so it cannot create it.")
    group = RpcGroup(world, name, members)
    if world.scope.groups.setdefault(name, group.own) is not group.own:
        raise WorldError(f"there is a group {name!r} already in {world.name!r}. destroy() it first.")
    try:
        group.meet()
    except BaseException:
        world.scope.groups.pop(name, None)
        raise
    return group
