"""A model that members train together by pushing gradients: access to it from any member.

```
 push ─▶ a secondary reducer ─(one gradient a batch)─▶ the primary reducer ─(one a batch)─▶ optimizer
 pull ◀─────────────────── ordered server ◀─────────────────── weights, version + 1 ───────────┘
```

Nobody waits for a step: a push is done when a reducer has it, and a reducer whose queue is full drops its oldest
gradient, counts it and says so. If a secondary reducer dies, members push to another one; what they had handed in there
and was not passed on is gone with it: they count it and say so. If the primary one dies, or a reducer fails, the next
push raises, as does `watch`. If the host of the world dies, everything here raises PeerLost.
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
    """A reducer failed by another error, which its message names."""


ELSEWHERE = {kind.__name__: kind for kind in (PeerLost, TransportTimeout, ReducerFailed)}


@contextlib.contextmanager
def as_told() -> Iterator[None]:
    """What a reducer raises elsewhere is raised here as the same kind of error."""
    try:
        yield
    except RpcException as error:
        if error.kind in ELSEWHERE:
            raise ELSEWHERE[error.kind](str(error).partition("\n")[0]) from error
        raise


class PushPullGradServer:
    """Access to one shared model: gradients go there, newer weights come back.

    A member that is a secondary reducer itself pushes to itself; any other chooses one at random every time. A model in
    DistributedDataParallel or DataParallel is pushed and pulled as the one inside.
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
        """By default all members are secondary reducers, and the server has an ordered server of the same name.

        `reducer` takes a gradient into the secondary reducer of this process, if it has one.
        """
        self.server_name, self.group, self.model_name = server_name, group, model_name
        self.secondary_reducers = list(secondary_reducers or group.get_group_members())
        self.undelivered = 0  # gradients that no reducer took
        self.lost = 0  # gradients that went with a secondary reducer
        self._where = f"gradient server {server_name}"
        ordered = o_server or OrderedServer(server_name, group)
        self._models = PushPullModelServer(model_name, ordered, shares_buffers=False)
        self._reducer = reducer
        # The numbers, at each reducer that is alive, of the gradients from here that it may still have.
        self._handed_in: dict[str, deque[int]] = {member: deque() for member in self.secondary_reducers}
        self._death: PeerLost | None = None  # of the reducer that died last
        self._shapes: Shapes | None = None
        self._checked: WeakSet[nn.Module] = WeakSet()

    def push(self, model: nn.Module, pull: bool = True) -> bool:
        """Hands the model's gradients in and removes them; then pulls, unless `pull` is off. Returns what `pull` does.

        Every parameter needs a gradient: ModelError, which is a RuntimeError, names the one that has none.
        """
        gradient = gradient_of(model, self._where)
        if bare(model) not in self._checked:
            self._check(model)
        with as_told():
            self._hand_in(gradient)
        model.zero_grad()
        return not pull or self.pull(model)

    def pull(self, model: nn.Module) -> bool:
        """Loads the newest weights if the model has older ones; True if there are any.

        Buffers, such as the statistics of a normalisation, come with the first pull only: the optimizer changes none.
        """
        return self._models.pull(model)

    def version(self, model: nn.Module) -> int:
        """The version of the weights that were last pulled into `model`; 0 at first."""
        return self._models.version(model)

    def _check(self, model: nn.Module) -> None:
        """Refuses a model whose parameters are not those of the managed one."""
        if self._shapes is None:
            self._shapes = self.group.registered_sync(f"{self.server_name}/shapes")
        check_shapes(model, self._shapes or {}, self._where)
        self._checked.add(bare(model))

    def _hand_in(self, gradient: Tensor) -> None:
        """Gives a gradient to a secondary reducer that is alive."""
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
        """Raises if the world is over: then reducers are out of reach, and none of them need be dead."""
        self.group.check_world(f"{what} of the gradient server {self.server_name!r}")

    def _leave_out(self, reducer: str, error: PeerLost) -> None:
        self._check_world(f"a push to {reducer!r}")
        num, self._death = len(self._handed_in.pop(reducer)), error
        self.lost += num
        logger.warning(
            "%s: the secondary reducer %s is lost (%s), and with it %d gradients from %s that it is not known to have "
            "passed on. %d reducers are left to push to.",
            *(self._where, reducer, error, num, self.group.get_cur_name(), len(self._handed_in)),
        )

    # What became of it all.

    def stats(self) -> dict[str, dict[str, int]]:
        """The counts of every reducer that is alive, by member.

        `pushed`, `reduced`, `queued` and `dropped` are of gradients that members pushed there; `primary_pushed` and so
        on are of those that the primary reducer got from the secondary ones, each made of `batch` pushed ones, as are
        those `under_way` to it and those `undelivered` as it was lost; `steps` are the optimizer's.
        """
        return self._ask_reducers("stats")

    def watch(self) -> None:
        """Raises what a reducer failed by, if one did."""
        with as_told():
            self._ask_reducers("watch")

    def _ask_reducers(self, service: str) -> dict[str, Any]:
        """What a service of every reducer that is alive says."""
        self._check_world(f"{service}()")
        members = set(self.secondary_reducers)
        with contextlib.suppress(PeerLost):  # it is told of by whoever pushes
            members.add(self.group.registered_sync(f"{self.server_name}/primary"))
        futures = {}
        for member in sorted(members):
            with contextlib.suppress(PeerLost):  # its counts are gone with it
                futures[member] = self.group.registered_async(f"{self.server_name}/{member}/{service}")
        answers = {}
        for member, future in futures.items():
            with contextlib.suppress(PeerLost):
                answers[member] = future.wait()
        self._check_world(f"{service}()")  # else answers may be missing of reducers that live
        return answers

    def dropped(self) -> int:
        """How many pushed gradients the reducers that are alive dropped because their queues were full."""
        return sum(
            counts.get("dropped", 0) + counts["batch"] * counts.get("primary_dropped", 0)
            for counts in self.stats().values()
        )
