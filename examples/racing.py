"""SAC on CarRacing-v3 with a learner and remote workers, with the interface of learn-to-race.

python examples/racing.py learner --address 0.0.0.0:4444         # on the GPU machine; needs no environment
python examples/racing.py worker --learner learner-host:4444     # on any number of simulator machines
python examples/racing.py worker --learner learner-host:4444 --pool 8      # 8 cars in an EnvPool
python examples/racing.py local --workers 2                      # everything on this machine

Between machines set ECHELON_SECRET to the same value on both sides. The learner takes its spaces from the first worker:
with `--camera` those of learn-to-race (`pose` and one camera, reduced by a wrapper), otherwise four grey images of the
road ahead, which train faster. Needs box2d (`pip install "echelon[box2d]"`) or, with --pool, envpool.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from typing import Any

import gymnasium as gym
import numpy as np

import echelon
from echelon.config import TrainConfig, replace
from echelon.envs.racing import PixelPool, Pixels, Racing, grey


class SmallCamera(gym.ObservationWrapper[Any, Any, Any]):
    """Reduces the observation of learn-to-race to `pose` and a grey image of 42 x 42 of the road ahead."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        pose = env.observation_space["pose"]  # type: ignore[index]
        self.observation_space = gym.spaces.Dict(
            {"pose": pose, "camera": gym.spaces.Box(0, 255, (1, 42, 42), np.uint8)}
        )

    def observation(self, observation: Any) -> Any:
        return {"pose": observation["pose"], "camera": grey(observation["camera"])[None, ::2, ::2]}


def policy(*, camera: bool) -> TrainConfig:
    """Returns the configuration; only workers and `echelon eval` create the environment."""
    changes: dict[str, Any] = {"workers.spaces": "worker"}
    if camera:
        changes |= {"env.id": "echelon.envs.racing:Racing", "env.wrappers": (f"{__file__}:SmallCamera",)}
        changes |= {"network.normalize_observation": True}
    else:
        changes |= {"env.id": "echelon.envs.racing:Pixels", "replay.frames": "stacked"}
    return replace(echelon.preset("sac", "CarRacing-v3"), **changes)


def learn(options: argparse.Namespace) -> None:
    host, _, port = options.address.rpartition(":")
    node = echelon.AsyncLearningNode(
        policy(camera=options.camera),
        update_steps=options.update_steps,
        epochs=options.epochs,
        buffer_size=100_000,
        min_size=5_000,
        server_address=(host, int(port)),
        save_func=lambda *, epoch, policy: print(
            f"epoch {epoch}: {sum(p.numel() for p in policy.parameters()):,} weights"
        ),
        save_freq=50,
    )
    others = []
    if options.what == "local":
        address = f"{host}:{node.address[1]}"
        flags = ["--camera"] if options.camera else []
        command = [sys.executable, __file__, "worker", "--learner", address, "--pool", str(options.pool), *flags]
        others = [subprocess.Popen(command) for _ in range(options.workers)]
    try:
        print(node.learn().summary["workers"])
    finally:
        for other in others:
            other.terminate()


def work(options: argparse.Namespace) -> None:
    if options.pool:
        echelon.AsyncWorker(options.learner, env=PixelPool, envs=options.pool).work()
    elif options.camera:
        echelon.AsyncWorker(options.learner, env_wrapper=SmallCamera, env=Racing).work()
    else:
        echelon.AsyncWorker(options.learner, env=Pixels).work()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("learner", "worker", "local"))
    parser.add_argument("--address", default="127.0.0.1:0", help="address the learner listens on")
    parser.add_argument("--learner", default="127.0.0.1:4444", help="address of the learner, for a worker")
    parser.add_argument("--workers", type=int, default=2, help="of `local`")
    parser.add_argument("--pool", type=int, default=0, help="cars per worker, in an EnvPool")
    parser.add_argument("--camera", action="store_true", help="learn-to-race's observation; use it on both sides")
    parser.add_argument("--epochs", type=int, default=500)
    parser.add_argument("--update-steps", type=int, default=64)
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):  # a worker leaves its learner properly
        work(options) if options.what == "worker" else learn(options)
