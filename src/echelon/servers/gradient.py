"""A model that members train together by pushing gradients: its client, for any member.

```
 push ─▶ a secondary reducer ─(one gradient a batch)─▶ the primary reducer ─(one a batch)─▶ optimizer
 pull ◀─────────────────── ordered server ◀─────────────────── weights, version + 1 ───────────┘
```

A push does not wait for an optimizer step: it returns when a reducer has the gradient. A reducer whose queue is full
drops its oldest gradient, counts it and logs a message. If a secondary reducer dies, members push to another one; the
gradients that it had not forwarded are lost, and the members count them and log a message. If the primary reducer dies,
or a reducer fails, the next push raises, as does `watch`. If the host of the world dies, every call raises PeerLost.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch import Tensor, nn

from echelon.errors import EchelonError, PeerLost, RpcException, TransportTimeout
from echelon.servers.model import PushPullModelServer
from echelon.servers.ordered import Ordered, OrderedServer
from echelon.servers.parameters import Shapes, bare, check_shapes, gradient_of

if TYPE_CHECKING:
    from echelon.world import RpcGroup

logger = logging.getLogger("echelon.servers")


class ReducerFailed(EchelonError, RuntimeError):
    """A reducer failed with another error, which the message names."""


REMOTE_ERRORS = {kind.__name__: kind for kind in (PeerLost, TransportTimeout, ReducerFailed)}


@contextlib.contextmanager
def same_error() -> Iterator[None]:
    """Raises the error of a reducer in another process as the same type in this process."""
    try:
        yield
    except RpcException as error:
        if error.kind in REMOTE_ERRORS:
            raise REMOTE_ERRORS[error.kind](str(error).partition("\n")[0]) from error
        raise


class PushPullGradServer:
    """A client of one shared model: pushes gradients, pulls newer weights.

    A member that is a secondary reducer pushes to itself; any other chooses a random reducer for every push. Of a model
    wrapped in DistributedDataParallel or DataParallel, the inner model is pushed and pulled.
    """

    def __init__(
        self,
        server_name: str,
        group: RpcGroup,
        model_name: str = "model",
        secondary_reducers: Sequence[str] | None = None,
        o_server: Ordered | None = None,
        reducer: Callable[[Tensor], None] | None = None,
    ) -> None:
        """By default, all members are secondary reducers, and the weights are in an ordered server of the same name.

        `reducer` pushes a gradient to the secondary reducer of this process, if it has one.
        """
        self.server_name, self.group, self.model_name = server_name, group, model_name
        self.secondary_reducers = list(secondary_reducers or group.get_group_members())
        self.undelivered = 0  # gradients that no reducer received
        self.lost = 0  # gradients that were lost with a secondary reducer
        self._where = f"gradient server {server_name}"
        ordered = o_server or OrderedServer(server_name, group)
        self._models = PushPullModelServer(model_name, ordered, shares_buffers=False)
        self._reducer = reducer
        # For each live reducer: the numbers of this client's gradients that it may not have forwarded yet.
        self._handed_in: dict[str, deque[int]] = {member: deque() for member in self.secondary_reducers}
        self._death: PeerLost | None = None  # the error of the reducer that died last
        self._shapes: Shapes | None = None
        self._checked: WeakSet[nn.Module] = WeakSet()

    def push(self, model: nn.Module, pull: bool = True) -> bool:
        """Pushes the model's gradients and clears them, then pulls unless `pull` is False; returns what `pull` returns.

        Every parameter needs a gradient: ModelError, which is a RuntimeError, names a parameter that has none.
        """
        gradient = gradient_of(model, self._where)
        if bare(model) not in self._checked:
            self._check(model)
        with same_error():
            self._hand_in(gradient)
        model.zero_grad()
        return not pull or self.pull(model)

    def pull(self, model: nn.Module) -> bool:
        """Loads the newest weights if the model has older ones; returns whether the server has any.

        Only the first pull loads buffers, such as normalization statistics: the optimizer does not change them.
        """
        return self._models.pull(model)

    def version(self, model: nn.Module) -> int:
        """Returns the version of the weights that were last pulled into `model`; 0 at first."""
        return self._models.version(model)

    def _check(self, model: nn.Module) -> None:
        """Raises ModelError if the parameters of `model` differ from those of the managed model."""
        if self._shapes is None:
            self._shapes = self.group.registered_sync(f"{self.server_name}/shapes")
        check_shapes(model, self._shapes or {}, self._where)
        self._checked.add(bare(model))

    def _hand_in(self, gradient: Tensor) -> None:
        """Pushes a gradient to a live secondary reducer."""
        if self._reducer is not None:
            self._reducer(gradient)
            return
        while self._handed_in:
            to = random.choice(list(self._handed_in))
            try:
                number, passed_on = self.group.registered_sync(f"{self.server_name}/{to}/push", args=(gradient,))
            except PeerLost as error:
                self._leave_out(to, error)
                continue
            mine = self._handed_in[to]
            mine.append(number)
            while mine and mine[0] <= passed_on:
                mine.popleft()
            return
        self.undelivered += 1
        raise PeerLost(f"{self._where}: none of the reducers {self.secondary_reducers} is alive: {self._death}")

    def _check_world(self, what: str) -> None:
        """Raises if the world is over: reducers then cannot be reached, though they may be alive."""
        self.group.check_world(f"{what} of the gradient server {self.server_name!r}")

    def _leave_out(self, reducer: str, error: PeerLost) -> None:
        self._check_world(f"a push to {reducer!r}")
        num, self._death = len(self._handed_in.pop(reducer)), error
        self.lost += num
        logger.warning(
            "%s: the secondary reducer %s is lost (%s), and with it %d gradients from %s that it may not have "
            "forwarded. %d reducers are left.",
            *(self._where, reducer, error, num, self.group.get_cur_name(), len(self._handed_in)),
        )

    # Statistics and failures.

    def stats(self) -> dict[str, dict[str, int]]:
        """Returns the counts of every live reducer, by member.

        `pushed`, `reduced`, `queued` and `dropped` count the gradients that members pushed to it. `primary_pushed` and
        so on count the reduced gradients that the primary reducer received from the secondary ones, each of `batch`
        pushed ones. `under_way` counts reduced gradients that are being sent to the primary reducer, `undelivered`
        those that it did not receive because it was lost. `steps` counts the steps of the optimizer.
        """
        return self._ask_reducers("stats")

    def watch(self) -> None:
        """Raises the error of a reducer that failed, if there is one."""
        with same_error():
            self._ask_reducers("watch")

    def _ask_reducers(self, service: str) -> dict[str, Any]:
        """Calls a service of every live reducer; returns the replies by member."""
        self._check_world(f"{service}()")
        members = set(self.secondary_reducers)
        with contextlib.suppress(PeerLost):  # the next push raises it
            members.add(self.group.registered_sync(f"{self.server_name}/primary"))
        futures = {}
        for member in sorted(members):
            with contextlib.suppress(PeerLost):  # its counts are lost with it
                futures[member] = self.group.registered_async(f"{self.server_name}/{member}/{service}")
        answers = {}
        for member, future in futures.items():
            with contextlib.suppress(PeerLost):
                answers[member] = future.wait()
        self._check_world(f"{service}()")  # after the end of the world, replies of live reducers may be missing
        return answers

    def dropped(self) -> int:
        """Returns how many pushed gradients the live reducers dropped because their queues were full."""
        return sum(
            counts.get("dropped", 0) + counts["batch"] * counts.get("primary_dropped", 0)
            for counts in self.stats().values()
        )
