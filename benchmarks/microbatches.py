"""Measures the memory and the time of one update for several values of `learner.microbatches`, on random trajectories.

The peak is the largest number of bytes that existed at one time during an update, beyond those that existed before it
(weights, moments of the optimizer, the batch). On a CPU it counts the tensors that torch operations return; on a GPU it
is torch's own count. The last column compares the gradient of the last optimizer step with that of whole minibatches.

    python benchmarks/microbatches.py                                  # IMPALA on vectors of 348 numbers, CPU
    python benchmarks/microbatches.py --preset ppo --envs 128          # 8 minibatches per pass
    python benchmarks/microbatches.py --kind images --envs 16          # the Nature CNN
    python benchmarks/microbatches.py --device cuda --kind images --envs 512 --precision bfloat16
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from echelon.algorithms.model import Model
from echelon.bench.allocated import Allocated
from echelon.config import TrainConfig, replace
from echelon.presets import preset
from echelon.roles.loss_account import LossAccount
from echelon.roles.update import ModelTrainable
from echelon.schema import Batch, Spaces

KINDS = {
    "vectors": Spaces(gym.spaces.Box(-np.inf, np.inf, (348,)), gym.spaces.Box(-0.4, 0.4, (17,))),  # as Humanoid-v5
    "images": Spaces(gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), gym.spaces.Discrete(6)),  # as Atari
}


def settings(options: argparse.Namespace, microbatches: int) -> TrainConfig:
    return replace(
        preset(options.preset, "CartPole-v1"),
        **{
            "learner.microbatches": microbatches,
            "learner.precision": options.precision,
            "learner.compile": options.compile,
            "learner.threads": options.threads,
            "network.hidden": tuple(options.hidden),
            "network.core": options.core,
            "network.normalize_observation": options.kind == "vectors",
            "optimizer.learning_rate": 1e-12,  # all updates then start from the same weights
            "optimizer.clip_norm": 0.0,
        },
    )


def random_batch(options: argparse.Namespace, model: Model) -> Batch:
    """Returns trajectories of random numbers in which a tenth of the steps are not valid."""
    steps, lanes, spaces = options.trajectory, options.envs, KINDS[options.kind]
    generator, device = torch.Generator().manual_seed(0), torch.device(options.device)
    shape = (steps + 1, lanes, *(spaces.observation.shape or ()))
    if options.kind == "images":
        observation = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        action = torch.randint(6, (steps, lanes), generator=generator)
    else:
        observation = torch.randn(shape, generator=generator)
        action = torch.randn(steps, lanes, 17, generator=generator)
    flags = torch.rand(4, steps + 1, lanes, generator=generator).to(device)
    return Batch(
        observation=observation.to(device),
        first=flags[0] < 0.05,
        action=action.to(device),
        log_prob=-torch.rand(steps, lanes, generator=generator).to(device) - 1.0,
        reward=torch.randn(steps, lanes, generator=generator).to(device),
        terminated=flags[1, :-1] < 0.02,
        truncated=flags[2, :-1] < 0.02,
        valid=flags[3, :-1] > 0.1,
        state=tuple(torch.zeros(lanes, *shape, device=device) for shape in model.network.state_shapes),
        lanes=torch.arange(lanes),
    )


def measured(options: argparse.Namespace, microbatches: int) -> tuple[dict[str, float], torch.Tensor]:
    """Returns the peak in bytes and the seconds of one update, and its last gradient."""
    config = settings(options, microbatches)
    learner, on_gpu = config.learner, options.device.startswith("cuda")
    model = Model(
        config.network,
        KINDS[options.kind],
        config.algorithm,
        device=options.device,
        precision=learner.precision,
        compile=learner.compile,
        microbatches=learner.microbatches,
    )
    trainable, account, batch = ModelTrainable(config, model), LossAccount(), random_batch(options, model)

    def learn() -> float:
        begun = time.perf_counter()
        trainable.learn(batch, account, lambda: None, None)
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    learn()  # creates the optimizer's moments; compiles
    took_s = min(learn() for _ in range(options.rounds))
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    counting: AbstractContextManager[Any] = nullcontext() if on_gpu else Allocated()
    with counting as allocated:
        learn()
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else allocated.peak
    return {"microbatches": microbatches, "peak_bytes": peak, "update_s": took_s}, model.gradients.clone()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--preset", choices=("impala", "ppo", "async-ppo"), default="impala", help="what learns")
    parser.add_argument("--kind", choices=sorted(KINDS), default="vectors", help="observations")
    parser.add_argument("--envs", type=int, default=256, help="environments of all actors together")
    parser.add_argument("--trajectory", type=int, default=32, help="steps of each")
    parser.add_argument("--hidden", type=int, nargs="*", default=[256, 256], help="sizes of the hidden layers")
    parser.add_argument("--core", choices=("none", "lstm", "gru"), default="none", help="recurrent core")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 2, 4, 8], help="values to compare")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32", help="of the passes")
    parser.add_argument("--compile", action="store_true", help="compile the network with torch.compile")
    parser.add_argument("--threads", type=int, default=1, help="threads on the CPU")
    parser.add_argument("--rounds", type=int, default=3, help="timed updates, of which the fastest is reported")
    parser.add_argument("--output", default="", help="write the rows to this file as JSON")
    options = parser.parse_args()
    rows, first = [], None
    size = f"{options.envs} environments x {options.trajectory} steps"
    print(f"{options.preset}, {options.kind}, {size}, {options.device}, {options.precision}")
    print(f"{'microbatches':>12} {'peak MB':>9} {'of whole':>9} {'ms':>8} {'gradient differs by':>20}")
    for microbatches in options.microbatches:
        row, gradient = measured(options, microbatches)
        first = gradient if first is None else first
        row["gradient_difference"] = float((gradient - first).norm() / first.norm())
        rows.append(row)
        share = row["peak_bytes"] / rows[0]["peak_bytes"]
        figures = f"{row['peak_bytes'] / 1e6:>9.1f} {share:>9.3f} {row['update_s'] * 1e3:>8.0f}"
        print(f"{microbatches:>12} {figures} {row['gradient_difference']:>20.1e}")
    if options.output:
        Path(options.output).write_text(json.dumps({"options": vars(options), "rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
