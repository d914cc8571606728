"""torch.distributed.rpc beside ours, with its public defaults (TensorPipe)."""

from __future__ import annotations

import threading
import warnings

import torch
from torch.distributed import rpc

from echelon.bench.world.pair import NAMES
from echelon.bench.world.setting import Setting
from echelon.bench.world.turn import Future, echo, measure
from echelon.errors import ConfigError

CALL_S = 60.0


def check() -> None:
    """Raises ConfigError where this PyTorch has no RPC."""
    if not (rpc.is_available() and hasattr(rpc, "TensorPipeRpcBackendOptions")):
        raise ConfigError(
            f"this build of PyTorch ({torch.__version__}) has no torch.distributed.rpc to measure beside. "
            "Give --peer none."
        )


def attend(name: str, folder: str, setting: Setting) -> dict[str, float]:
    """What either of the two does; the callee until it is killed."""
    warnings.filterwarnings("ignore", message="You are using a Backend")  # it warns of its own doing
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=CALL_S, init_method=f"file://{folder}/meet")
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        name, rank=NAMES.index(name), world_size=2, rpc_backend_options=options
    )
    if name == NAMES[1]:
        threading.Event().wait()  # calls are answered by threads of torch.distributed.rpc
    return measure(setting, TorchCaller())


class TorchCaller:
    """Calls the callee over torch.distributed.rpc."""

    def call(self, tensor: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = rpc.rpc_sync(NAMES[1], echo, args=(tensor,))
        return value

    def begin(self, tensor: torch.Tensor) -> Future:
        future: Future = rpc.rpc_async(NAMES[1], echo, args=(tensor,))
        return future
