"""One member's part of a gradient server: its reducers; in the primary member also the model and its optimizer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from echelon.errors import ConfigError, EchelonError, PeerLost, RpcException, TransportTimeout, WorldStopped
from echelon.servers.gradient import PushPullGradServer, ReducerFailed
from echelon.servers.ordered import Ordered, OrderedServer, OrderedServerImpl
from echelon.servers.parameters import Shapes, set_gradient, shapes_of, state_of
from echelon.servers.reducer import GradReducer

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from echelon.transport.channel_calls import Future
    from echelon.world import RpcGroup

MAX_UNDER_WAY = 16  # reduced gradients that a member has sent and that are not acknowledged yet
IDLE_S = 0.5  # idle time after which the thread of the primary reducer ends; the next gradient starts another


class PushPullGradServerImpl:
    """One member's part of a gradient server: a secondary reducer, the primary one, or both.

    The thread that pushes the last gradient of a batch to a secondary reducer reduces the batch and sends the result to
    the primary reducer. It waits for a reply only if `MAX_UNDER_WAY` results are not acknowledged. If no reply arrives
    in time, the push raises TransportTimeout; nothing is lost, and the next push retries.

    A thread of the primary reducer takes one batch at a time, passes its sum or mean to the optimizer as the gradient,
    steps the learning-rate schedule and publishes the weights. If pushes are faster than that, the queue drops its
    oldest gradient and counts it; so does the queue of a secondary reducer that fills up before `start`. If the primary
    reducer is lost, or its optimizer raises, the server has failed: `watch` and the next push raise.
    """

    def __init__(
        self,
        server_name: str,
        group: RpcGroup,
        model_name: str = "model",
        primary_reducer: str | None = None,
        secondary_reducers: Sequence[str] | None = None,
        o_server: Ordered | None = None,
        reduce_method: str = "sum",
        reduce_device: str | torch.device = "cpu",
        reduce_batch_size: int = 4,
        max_queue_size: int = 64,
    ) -> None:
        """The parameters are Machin's; by default the first member is the primary reducer, and all are secondary."""
        members = group.get_group_members()
        self.server_name, self.group, self.model_name = server_name, group, model_name
        self.own = group.get_cur_name()
        self.primary_reducer = members[0] if primary_reducer is None else primary_reducer
        self.secondary_reducers = list(members if secondary_reducers is None else secondary_reducers)
        unknown = {self.primary_reducer, *self.secondary_reducers} - set(members)
        if unknown or not self.secondary_reducers:
            raise ConfigError(
                f"gradient server {server_name}: the secondary reducers {self.secondary_reducers} and the primary "
                f"reducer {self.primary_reducer!r} must be among the members {members}, with at least one secondary."
            )
        settings = (reduce_batch_size, max_queue_size, reduce_method, reduce_device)
        name = f"gradient server {server_name}, %s reducer {self.own}"
        self.steps = 0  # optimizer steps whose weights are published
        self._batch = reduce_batch_size
        self.undelivered = 0  # reduced gradients that the primary reducer did not receive
        self._secondary = GradReducer(*settings, name % "secondary") if self.own in self.secondary_reducers else None
        self._primary = GradReducer(*settings, name % "primary") if self.is_primary else None
        self._managed: Managed | None = None
        self._failure: Exception | None = None
        self._lock = threading.Lock()  # guards _under_way and _unsent
        self._under_way: deque[Future] = deque()
        self._unsent: Tensor | None = None  # the reduced gradient that is sent next
        self._work, self._thread_lock = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_started, self._is_stopped = False, False
        self._serve(o_server)

    @property
    def is_primary(self) -> bool:
        return bool(self.own == self.primary_reducer)

    def _serve(self, o_server: Ordered | None) -> None:
        name, group = self.server_name, self.group
        if self._secondary is not None:
            group.register(f"{name}/{self.own}/push", self._take)
        if self.is_primary:
            o_server = o_server or OrderedServerImpl(name, group, version_depth=0)
            group.register(f"{name}/reduced", self._push_reduced)
            group.register(f"{name}/shapes", self._shapes)
            group.register(f"{name}/primary", lambda: self.own)
        if self._secondary is not None or self.is_primary:
            group.register(f"{name}/{self.own}/stats", self.stats)
            group.register(f"{name}/{self.own}/watch", self._watch)
        self.o_server = o_server or OrderedServer(name, group)
        reducer = None if self._secondary is None else self._push
        self.accessor = PushPullGradServer(
            name, group, self.model_name, self.secondary_reducers, self.o_server, reducer
        )

    def manage_model(self, model: nn.Module, optimizer: Optimizer, lr_scheduler: LRScheduler | None = None) -> None:
        """Sets the model to train, in the primary reducer; members can pull its weights from now on."""
        if not self.is_primary:
            raise RuntimeError(
                f"gradient server {self.server_name}: {self.own!r} is not the primary reducer; "
                f"{self.primary_reducer!r} is. Call manage_model() there."
            )
        if isinstance(lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ConfigError(
                f"gradient server {self.server_name}: ReduceLROnPlateau needs a metric, which gradients do not have. "
                "Use a schedule that counts steps."
            )
        self._managed = Managed(model, optimizer, lr_scheduler)
        self._publish(1)

    def start(self) -> None:
        """Starts the reduction; gradients that were pushed before are in the queue."""
        if self.is_primary and self._managed is None:
            raise RuntimeError(f"gradient server {self.server_name}: call manage_model() before start().")
        if self._is_started:
            raise RuntimeError(f"gradient server {self.server_name} was started already.")
        self._is_started = True
        self._wake()
        self._pass_on()

    def stop(self) -> None:
        """Ends the reduction; queued gradients stay in the queue and are counted as queued."""
        self._is_stopped = True
        self._work.set()
        if (thread := self._thread) is not None:
            thread.join()

    def watch(self) -> None:
        """Raises the error of this member's reducers, if they failed; PeerLost if the host of the world is gone."""
        self.group.check_world(f"the reducer {self.own!r} of the gradient server {self.server_name!r}")
        self._watch()

    def _watch(self) -> None:
        """Like `watch`, for remote callers: if the world has ended, their call itself fails."""
        if isinstance(self._failure, PeerLost):
            lost = f"gradient server {self.server_name}: the primary reducer {self.primary_reducer} is lost"
            raise PeerLost(f"{lost}: {self._failure}") from self._failure
        if self._failure is not None:
            raise ReducerFailed(
                f"gradient server {self.server_name}: the reducer of {self.own} failed with "
                f"{type(self._failure).__name__}: {self._failure}"
            ) from self._failure

    # The secondary reducer.

    def _push(self, gradient: Tensor) -> None:
        assert self._secondary is not None
        self.watch()
        self._secondary.push(gradient)
        self._pass_on()

    def _take(self, gradient: Tensor) -> tuple[int, int]:
        """Handles a push of another member.

        Returns the gradient's number in this reducer, and the number up to which all have reached the primary reducer.
        """
        assert self._secondary is not None
        self._watch()
        self._secondary.push(gradient)
        self._pass_on()
        counts = self.stats()
        return counts["pushed"], counts["pushed"] - counts["queued"] - self._batch * counts["under_way"]

    def _pass_on(self) -> None:
        """Reduces full batches and sends them to the primary reducer."""
        if self._secondary is None or not self._is_started or self._is_stopped:
            return
        with self._lock:
            try:
                if self._unsent is None:
                    self._unsent = self._secondary.reduce()
                while self._unsent is not None:
                    self._collect(MAX_UNDER_WAY - 1)
                    self._send(self._unsent)
                    self._unsent = self._secondary.reduce()
                self._collect(MAX_UNDER_WAY)
            except TransportTimeout as error:
                raise TransportTimeout(
                    f"gradient server {self.server_name}: the primary reducer {self.primary_reducer} is late; "
                    f"{len(self._under_way)} reduced gradients are not acknowledged: {error} Nothing is lost: the "
                    "gradients are kept, and the next push retries."
                ) from error
            except (PeerLost, RpcException, ReducerFailed) as error:
                self._failure = self._failure or error  # a failure of the primary reducer in this process came first
                self._give_up()
        self.watch()

    def _collect(self, most: int) -> None:
        """Processes the replies that have arrived; first waits for all of them if more than `most` are pending."""
        if len(self._under_way) > most:  # replies arrive in order: after this call none is pending
            self.group.registered_sync(f"{self.server_name}/primary")
        while self._under_way and self._under_way[0].done():
            self._under_way[0].wait()
            self._under_way.popleft()

    def _send(self, gradient: Tensor) -> None:
        if self._primary is not None:
            self._push_reduced(gradient)
        else:
            self._under_way.append(self.group.registered_async(f"{self.server_name}/reduced", args=(gradient,)))

    def _give_up(self) -> None:
        """Counts the gradients that the primary reducer did not acknowledge, and drops them."""
        self.undelivered += self._unsent is not None
        for future in self._under_way:
            try:
                future.wait(0.0)
            except EchelonError:
                self.undelivered += 1
        self._unsent = None
        self._under_way.clear()

    # The primary reducer.

    def _push_reduced(self, gradient: Tensor) -> None:
        assert self._primary is not None
        self.watch()
        self._primary.push(gradient)
        self._wake()

    def _wake(self) -> None:
        """Wakes the thread, or starts it. The thread ends when it is idle, so that it never outlives its world."""
        if not self.is_primary or not self._is_started:
            return
        with self._thread_lock:
            self._work.set()
            if self._thread is None and not self._is_stopped:
                name = f"reducer-{self.server_name}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()

    def _has_work(self) -> bool:
        """Waits until there may be work; returns False if the thread has to end."""
        self._work.wait(IDLE_S)
        with self._thread_lock:
            if self._is_stopped or not self._work.is_set():
                self._thread = None
                return False
            self._work.clear()
            return True

    def _run(self) -> None:
        assert self._primary is not None and self._managed is not None
        try:
            while self._has_work():
                while not self._is_stopped and (gradient := self._primary.reduce()) is not None:
                    self._managed.step(gradient)
                    self._publish(self.steps + 2)
                    self.steps += 1
        except WorldStopped:
            return
        except Exception as error:  # `watch` and the next push raise it
            self._failure = error

    def _publish(self, version: int) -> None:
        """Publishes the weights as `version`; the first is 1."""
        assert self._managed is not None
        state = state_of(self._managed.model, f"gradient server {self.server_name}")
        if not self.o_server.push(self.model_name, state, version, version - 1):
            raise RuntimeError(
                f"gradient server {self.server_name}: version {version} of {self.model_name!r} was rejected: another "
                "process pushed to its ordered server. Give every gradient server a different model_name."
            )

    def _shapes(self) -> Shapes:
        if self._managed is None:
            raise RuntimeError(
                f"gradient server {self.server_name}: {self.own} manages no model yet. Call manage_model() and start() "
                "there before others push."
            )
        return shapes_of(self._managed.model)

    def stats(self) -> dict[str, int]:
        """Returns the counts of this member's reducers."""
        under_way = len(self._under_way) + (self._unsent is not None)
        counts = {"undelivered": self.undelivered, "under_way": under_way, "batch": self._batch}
        if self._secondary is not None:
            counts |= self._secondary.stats()
        if self._primary is not None:
            counts |= {f"primary_{name}": count for name, count in self._primary.stats().items()}
            counts["steps"] = self.steps
        return counts


class Managed:
    """The model that is trained, its optimizer and its learning-rate schedule."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, lr_scheduler: LRScheduler | None) -> None:
        self.model, self.optimizer, self.lr_scheduler = model, optimizer, lr_scheduler

    def step(self, gradient: Tensor) -> None:
        set_gradient(self.model, gradient)
        self.optimizer.step()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
