"""A gradient server in one process, with a group that calls its services directly."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import echelon.servers.gradient_member
from echelon.errors import PeerLost, RpcException, TransportTimeout, WorldStopped
from echelon.servers import OrderedServerImpl, PushPullGradServer, PushPullGradServerImpl
from echelon.servers.gradient import ReducerFailed

PATIENCE_S = 30.0


class Answer:
    """Stands in for a group's future: of a completed call, or of one without a reply."""

    def __init__(self, value: Any, is_done: bool) -> None:
        self._value, self._is_done = value, is_done

    def done(self) -> bool:
        return self._is_done

    def wait(self, timeout_s: float | None = None) -> Any:
        if not self._is_done:
            raise TransportTimeout("no answer.")
        return self._value


class Group:
    """The group as seen by the member `own`; all services are in this process."""

    def __init__(self, own: str = "0", members: Sequence[str] = ("0",)) -> None:
        self.own, self.members = own, list(members)
        self.services: dict[str, Callable[..., Any]] = {}
        self.failure: Exception | None = None  # the error that every call raises
        self.is_deaf = False  # calls are accepted but get no reply

    def get_cur_name(self) -> str:
        return self.own

    def get_group_members(self) -> list[str]:
        return self.members

    def register(self, key: str, service: Callable[..., Any]) -> None:
        self.services[key] = service

    def check_world(self, what: str) -> None:
        """Never raises: this world does not end."""

    def registered_sync(self, key: str, args: Sequence[Any] = ()) -> Any:
        return self.registered_async(key, args).wait()

    def registered_async(self, key: str, args: Sequence[Any] = ()) -> Answer:
        if self.failure is not None:
            raise self.failure
        if self.is_deaf:
            return Answer(None, is_done=False)
        return Answer(self.services[key](*args), is_done=True)


class EndedGroup(Group):
    """The group of a world that has ended while calls are still served."""

    def check_world(self, what: str) -> None:
        raise WorldStopped(what)


def test_the_end_of_the_world_is_for_each_member_to_notice_itself() -> None:
    """A server must not raise it for remote callers: they would receive it as an error of the call."""
    group = EndedGroup()
    ordered, server = OrderedServerImpl("o", group), PushPullGradServerImpl("s", group)  # type: ignore[arg-type]
    for here in (lambda: ordered.push("k", 1, 1, None), lambda: ordered.pull("k"), lambda: ordered.newer("k", 1)):
        with pytest.raises(WorldStopped, match="of the ordered server 'o'"):
            here()
    with pytest.raises(WorldStopped, match="the reducer '0' of the gradient server 's'"):
        server.watch()
    assert group.services["o/push"]("k", "value", 1, None) is True
    assert group.services["o/pull"]("k") == ("value", 1) and group.services["o/newer"]("k", 1) == 1
    group.services["s/0/watch"]()
    assert group.services["s/0/push"](torch.ones(2)) == (1, 0)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def push(server: PushPullGradServer, model: nn.Module, pull: bool = False) -> None:
    model(torch.randn(8, 2) + 5.0).sum().backward()
    server.push(model, pull)


def server_in(group: Any, batch: int = 1, o_server: Any = None) -> PushPullGradServerImpl:
    """Creates a server with all parts in one process."""
    server = PushPullGradServerImpl("s", group, o_server=o_server, reduce_batch_size=batch)
    model = net()
    server.manage_model(model, torch.optim.SGD(model.parameters(), lr=0.1))
    server.start()
    return server


def finish(server: PushPullGradServerImpl) -> None:
    """Waits until everything is reduced: the thread ends when there is nothing left."""
    if (thread := server._thread) is not None:
        thread.join(PATIENCE_S)


def test_a_step_counts_once_its_weights_can_be_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = Group()
    ordered = OrderedServerImpl("s", group)
    server = server_in(group, o_server=ordered)
    told: list[int] = []
    published = ordered.push

    def watched(key: str, value: Any, version: Any, prev_version: Any) -> bool:
        told.append(server.steps)
        return published(key, value, version, prev_version)

    monkeypatch.setattr(ordered, "push", watched)
    for _ in range(3):
        push(server.accessor, net())
    finish(server)
    assert told == [0, 1, 2] and server.steps == 3


def test_the_thread_of_a_primary_reducer_ends_when_idle_and_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(echelon.servers.gradient_member, "IDLE_S", 0.01)
    server = server_in(Group())
    for num in (1, 2, 3):
        push(server.accessor, net())
        finish(server)
        assert server._thread is None and server.steps == num
    server.stop()
    push(server.accessor, net())
    assert server._thread is None and server.stats()["primary_pushed"] == 3 and server.stats()["queued"] == 1


def test_buffers_come_with_the_first_pull_and_are_the_members_own_from_then_on() -> None:
    server, model = server_in(Group()), net()
    linear, norm = model[0], model[1]
    norm.running_mean.fill_(9.0)
    assert server.accessor.pull(model) and norm.running_mean.tolist() == [0.0] * 3
    before = linear.weight.detach().clone()
    for _ in range(3):
        push(server.accessor, model)
        finish(server)
        assert server.accessor.pull(model)
    assert server.accessor.version(model) == 4 and not torch.equal(before, linear.weight)
    assert int(norm.num_batches_tracked) == 3 and norm.running_mean.abs().min() > 0.0


def test_what_was_not_answered_in_time_is_kept_and_goes_on() -> None:
    group: Any = Group("1", ["0", "1"])
    home: Any = Group("0", ["0", "1"])
    home.services = group.services
    primary = server_in(home, batch=2)
    member = PushPullGradServerImpl("s", group, primary_reducer="0", reduce_batch_size=2)
    member.start()
    push(member.accessor, net())
    group.is_deaf = True
    for _ in range(2):
        with pytest.raises(TransportTimeout, match=r"primary reducer 0 is late; 16 reduced gradients are not"):
            for _ in range(100):
                push(member.accessor, net())
    counts = member.stats()
    assert counts["under_way"] == 17 and counts["undelivered"] == counts["dropped"] == 0
    assert counts["pushed"] == counts["reduced"] + counts["queued"]
    for answer in member._under_way:
        answer._is_done = True
    group.is_deaf = False
    push(member.accessor, net())
    member.watch()
    assert member.stats()["under_way"] <= 1 and member.stats()["undelivered"] == 0
    group.failure = PeerLost("0 is gone.")
    with pytest.raises(PeerLost, match="the primary reducer 0 is lost: 0 is gone"):
        for _ in range(2):
            push(member.accessor, net())
    assert member.stats()["undelivered"] == 1  # acknowledged gradients are not counted
    primary.stop()


def test_gradients_that_went_with_a_reducer_are_counted_and_told(caplog: pytest.LogCaptureFixture) -> None:
    group: Any = Group("1", ["0", "1"])
    home: Any = Group()
    home.services = group.services
    primary = server_in(home, batch=4)
    accessor = PushPullGradServer("s", group, secondary_reducers=["0"])
    for _ in range(6):
        push(accessor, net())
    group.failure = PeerLost("0 is gone.")
    with caplog.at_level(logging.WARNING, "echelon.servers"):
        for _ in range(2):
            with pytest.raises(PeerLost, match=r"none of the reducers \['0'\] is alive: 0 is gone"):
                push(accessor, net())
    assert accessor.lost == 2 and accessor.undelivered == 2  # four had been forwarded
    (message,) = caplog.messages
    assert "reducer 0 is lost (0 is gone.), and with it 2 gradients from 1" in message
    primary.stop()


@pytest.mark.parametrize("kind", [PeerLost, TransportTimeout, ReducerFailed])
def test_what_a_reducer_elsewhere_raises_arrives_as_the_same_kind(kind: type[Exception]) -> None:
    group: Any = Group("1", ["0", "1"])
    home: Any = Group()
    home.services = group.services
    primary = server_in(home, batch=4)
    accessor = PushPullGradServer("s", group, secondary_reducers=["0"])
    push(accessor, net())
    group.failure = RpcException("'s/0/push' in '0' failed with X: why", kind.__name__, "its traceback")
    for call in (lambda: push(accessor, net()), accessor.watch):
        with pytest.raises(kind, match=r"^'s/0/push' in '0' failed with X: why$"):
            call()
    group.failure = RpcException("it failed", "OSError", "its traceback")
    with pytest.raises(RpcException, match="it failed"):
        push(accessor, net())
    primary.stop()
