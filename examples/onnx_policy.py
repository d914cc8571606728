"""Plays an episode with an exported policy; needs onnxruntime, but neither Echelon nor torch:

    echelon export runs/NAME --format onnx -o policy.onnx
    python examples/onnx_policy.py policy.onnx CartPole-v1

Observations are one array. Those of a Dict or Tuple have an input per entry, such as "observation.camera".
"""

from __future__ import annotations

import sys

import gymnasium as gym
import numpy as np
import onnxruntime


def play(file: str, env_id: str) -> None:
    session, env = onnxruntime.InferenceSession(file), gym.make(env_id)
    # The first dimension is the batch. A recurrent policy has inputs "state.0", …; an episode starts with zeros.
    inputs = {entry.name: entry for entry in session.get_inputs()}
    state = {
        name: np.zeros((1, *entry.shape[1:]), np.float32) for name, entry in inputs.items() if name != "observation"
    }
    observation, _ = env.reset(seed=0)
    dtype = {"tensor(float)": np.float32, "tensor(uint8)": np.uint8, "tensor(int64)": np.int64}[
        inputs["observation"].type
    ]
    total, num_steps, ended = 0.0, 0, False
    while not ended:
        feed = {"observation": np.asarray(observation, dtype)[np.newaxis], **state}
        action, _, *after = session.run(None, feed)
        state = dict(zip(state, after, strict=True))
        observation, reward, terminated, truncated, _ = env.step(action[0])
        total, num_steps, ended = total + float(reward), num_steps + 1, terminated or truncated
    print(f"return {total:.1f} after {num_steps} steps")


if __name__ == "__main__":
    play(*sys.argv[1:])
