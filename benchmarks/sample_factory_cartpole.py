"""Trains CartPole-v1 with Sample Factory (APPO) for a fixed time; run by `peers.py` in Sample Factory's environment."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from sample_factory.algo.runners.runner import AlgoObserver
from sample_factory.algo.utils.misc import ExperimentStatus
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner

from steady import Progress

SETTINGS: dict[str, object] = {
    "serial_mode": False,
    "async_rl": True,
    "num_workers": 2,
    "num_envs_per_worker": 32,
    "worker_num_splits": 2,
    "policy_workers_per_policy": 1,
    "rollout": 32,
    "batch_size": 1024,
    "num_epochs": 1,
    "learning_rate": 1e-3,
    "use_rnn": False,
    "recurrence": 1,
    "encoder_mlp_layers": [64, 64],
    "nonlinearity": "tanh",
    "normalize_input": False,
    "reward_scale": 0.1,
    "device": "cpu",
}


class Watch(AlgoObserver):  # type: ignore[misc]
    """Reports the steps that the learner has consumed to `Progress` after every training step."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def on_training_step(self, runner: Any, training_iteration_since_resume: int) -> None:
        returns = runner.policy_avg_stats.get("reward", [[]])[0]
        self.progress.record(sum(runner.env_steps.values()), float(np.mean(returns)) if len(returns) else float("nan"))
        if self.progress.over:  # 2.1.1 never advances the clock that its own --train_for_seconds compares with
            runner.cfg.train_for_env_steps = 0


def make_env(full_env_name: str, cfg: Any = None, env_config: Any = None, render_mode: str | None = None) -> Any:
    return gym.make(full_env_name, render_mode=render_mode)


def arguments(seed: int, folder: str) -> list[str]:
    """Returns Sample Factory's command line: SETTINGS, and options that reduce its output."""
    argv = ["--env=CartPole-v1", "--algo=APPO", "--experiment=peer", f"--train_dir={folder}", f"--seed={seed}"]
    argv += ["--save_every_sec=100000", "--save_best_every_sec=100000", "--log_to_file=False"]
    argv += ["--with_wandb=False", "--restart_behavior=overwrite"]
    for name, value in SETTINGS.items():
        words = [str(word) for word in value] if isinstance(value, list) else [str(value)]
        argv += [f"--{name}", *words]
    return argv


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    register_env("CartPole-v1", make_env)
    with tempfile.TemporaryDirectory(prefix="sample-factory-") as folder:
        argv = arguments(options.seed, folder)
        sf_parser, _ = parse_sf_args(argv)
        _, runner = make_runner(parse_full_cfg(sf_parser, argv))
        progress = Progress("sample-factory", options.seconds, options.result)
        runner.register_observer(Watch(progress))
        status = runner.init()
        if status == ExperimentStatus.SUCCESS:
            status = runner.run()
    if status != ExperimentStatus.SUCCESS:
        return 1
    progress.write(SETTINGS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
