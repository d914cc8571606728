"""A model that members share by pushing and pulling its weights, which have versions."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch import nn

from echelon.servers.ordered import Ordered, OrderedServerImpl
from echelon.servers.parameters import bare, load, state_of

if TYPE_CHECKING:
    from echelon.world import RpcGroup


class PushPullModelServer:
    """A client of one shared model; it records the version of each local model.

    Of a model wrapped in DistributedDataParallel or DataParallel, the inner model is pushed and pulled.
    """

    def __init__(self, model_name: str, o_server: Ordered, *, shares_buffers: bool = True) -> None:
        """Without `shares_buffers`, only the first pull loads the model's buffers; later pulls leave them unchanged."""
        self.model_name, self.o_server, self.shares_buffers = model_name, o_server, shares_buffers
        self._versions: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()

    def version(self, model: nn.Module) -> int:
        """Returns the version of the weights that were last pushed from or pulled into `model`; 0 at first."""
        return self._versions.get(bare(model), 0)

    def push(self, model: nn.Module, pull_on_fail: bool = True) -> bool:
        """Stores the weights as the version after the model's; returns whether the push was accepted.

        A push is rejected if another member has pushed meanwhile; the newest weights are then loaded into the model.
        With `pull_on_fail=False` the model keeps its weights and takes over only the newest version number, so that
        its next push is accepted.
        """
        version = self.version(model)
        state = state_of(model, f"model {self.model_name}")
        if self.o_server.push(self.model_name, state, version + 1, version):
            self._versions[bare(model)] = version + 1
            return True
        if pull_on_fail:
            self.pull(model)
        elif (newest := self.o_server.pull(self.model_name)) is not None:
            self._versions[bare(model)] = int(newest[1])
        return False

    def pull(self, model: nn.Module) -> bool:
        """Loads the newest weights unless the model has them; returns whether the server has any."""
        found = self.o_server.newer(self.model_name, self.version(model))
        if isinstance(found, tuple):
            state, version = found
            with_buffers = self.shares_buffers or self.version(model) == 0
            load(model, state, f"model {self.model_name}", with_buffers)
            self._versions[bare(model)] = int(version)
        return found is not None


class PushPullModelServerImpl:
    """The server of one shared model, in the memory of the member that creates it."""

    def __init__(
        self, server_name: str, group: RpcGroup, model_name: str = "model", o_server: Ordered | None = None
    ) -> None:
        """Without `o_server`, creates an ordered server of the same name.

        This member uses `accessor`; others create
        `PushPullModelServer(model_name, OrderedServer(server_name, group))`.
        """
        ordered = o_server or OrderedServerImpl(server_name, group, version_depth=0)  # older weights are never pulled
        self.accessor = PushPullModelServer(model_name, ordered)
