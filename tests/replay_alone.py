"""Uses replay in a process that can import nothing but the standard library, numpy, msgspec and Echelon."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

ALLOWED = {"numpy", "msgspec", "echelon", *sys.stdlib_module_names}


class Refusal:
    """The first of the module finders; refuses other packages."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name.partition(".")[0] not in ALLOWED:
            raise ModuleNotFoundError(f"{name} is not to be needed", name=name)


def main() -> None:
    sys.meta_path.insert(0, Refusal())  # type: ignore[arg-type]
    import numpy as np

    for module in ("sharded", "frames", "nstep", "episodes", "limiter"):
        importlib.import_module(f"echelon.replay.{module}")
    from echelon.replay.layout import item_layout
    from echelon.replay.reader import ShardReader
    from echelon.replay.shard import Shard, ShardWriter
    from echelon.replay.sharded import Replay

    shard = Shard(item_layout({"number": ((), np.int64)}, 64))
    ShardWriter(shard).append({"number": np.arange(64)}, np.arange(64.0))
    replay = Replay([ShardReader(shard)])
    drawn = replay.sample(32, 0.4, np.random.default_rng(0))
    print("drawn", replay.update(drawn.keys, np.ones(32)))


if __name__ == "__main__":
    main()
