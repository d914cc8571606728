"""A model that members share by pushing and pulling: the newest weights, by version."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch import nn

from echelon.servers.ordered import Ordered, OrderedServerImpl
from echelon.servers.parameters import bare, load, state_of

if TYPE_CHECKING:
    from echelon.world import RpcGroup


class PushPullModelServer:
    """Access to one shared model. The versions that local models have are kept here, model by model.

    A model in DistributedDataParallel or DataParallel is pushed and pulled as the one inside.
    """

    def __init__(self, model_name: str, o_server: Ordered, *, shares_buffers: bool = True) -> None:
        """Without `shares_buffers` a model gets buffers with its first pull only; from then on they are its own."""
        self.model_name, self.o_server, self.shares_buffers = model_name, o_server, shares_buffers
        self._versions: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()

    def version(self, model: nn.Module) -> int:
        """The version of the weights that were last pushed from or pulled into `model`; 0 at first."""
        return self._versions.get(bare(model), 0)

    def push(self, model: nn.Module, pull_on_fail: bool = True) -> bool:
        """Shares the weights as the version after the model's.

        False if somebody else pushed meanwhile: then the model gets the newest weights. With `pull_on_fail` off it
        keeps its own and gets only their version, so that its next push counts.
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
        """Loads the newest weights if the model has others; True if there are any."""
        found = self.o_server.newer(self.model_name, self.version(model))
        if isinstance(found, tuple):
            state, version = found
            with_buffers = self.shares_buffers or self.version(model) == 0
            load(model, state, f"model {self.model_name}", with_buffers)
            self._versions[bare(model)] = int(version)
        return found is not None


class PushPullModelServerImpl:
    """The home of one shared model, in the memory of the member that makes it."""

    def __init__(
        self, server_name: str, group: RpcGroup, model_name: str = "model", o_server: Ordered | None = None
    ) -> None:
        """Without `o_server` it makes an ordered server of the same name.

        `accessor` is for this member; others make `PushPullModelServer(model_name, OrderedServer(server_name, group))`.
        """
        ordered = o_server or OrderedServerImpl(server_name, group, version_depth=0)  # nobody asks for older weights
        self.accessor = PushPullModelServer(model_name, ordered)
