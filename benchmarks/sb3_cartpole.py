"""Trains CartPole-v1 with stable-baselines3 (PPO) for a fixed time; run by `peers.py` in its own environment."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from steady import Progress

# 64 environments, as for the other peers. On two cores one torch thread is nearly three times as fast as two: the
# batches are too small to split.
SETTINGS: dict[str, object] = {"n_steps": 32, "learning_rate": 1e-3, "device": "cpu"}
NUM_ENVS = 64
BATCH_BY_EPOCHS = {1: 1024, 4: 512}


class Watch(BaseCallback):  # type: ignore[misc]
    """Reports the steps that PPO has learned from to `Progress` after every update, and ends the run on time."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.progress = progress

    def _on_rollout_start(self) -> None:
        returns = [episode["r"] for episode in self.model.ep_info_buffer or ()]
        self.progress.record(self.num_timesteps, float(np.mean(returns)) if returns else float("nan"))

    def _on_step(self) -> bool:
        return not self.progress.over


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, choices=sorted(BATCH_BY_EPOCHS), default=4, help="passes over the data")
    parser.add_argument("--vector", choices=("dummy", "subprocess"), default="dummy", help="dummy is faster")
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = SETTINGS | {"n_epochs": options.epochs, "batch_size": BATCH_BY_EPOCHS[options.epochs]}
    vector = {"dummy": DummyVecEnv, "subprocess": SubprocVecEnv}[options.vector]
    environments = make_vec_env("CartPole-v1", n_envs=NUM_ENVS, seed=options.seed, vec_env_cls=vector)
    policy = {"net_arch": [64, 64]}
    model = PPO("MlpPolicy", environments, policy_kwargs=policy, seed=options.seed, **settings)
    progress = Progress("stable-baselines3", options.seconds, options.result)
    model.learn(total_timesteps=10**12, callback=Watch(progress))
    environments.close()
    progress.write(settings | {"vector": options.vector, "num_envs": NUM_ENVS, "policy": policy, "torch_threads": 1})


if __name__ == "__main__":
    main()
