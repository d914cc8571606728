"""Uses an exported policy without Echelon and torch: `python act_onnx.py FILE.onnx`."""

from __future__ import annotations

import sys

import numpy as np
import onnxruntime
from maze import Maze

TYPES = {"tensor(float)": np.float32, "tensor(uint8)": np.uint8, "tensor(int64)": np.int64}

if __name__ == "__main__":
    session, env = onnxruntime.InferenceSession(sys.argv[1]), Maze()
    (observation, _), total, ended = env.reset(seed=0), 0.0, False
    while not ended:
        feed = {  # an input per entry, "observation.camera" and so on; the first dimension is the batch
            entry.name: observation[entry.name.removeprefix("observation.")][np.newaxis].astype(TYPES[entry.type])
            for entry in session.get_inputs()
        }
        action = session.run(["action"], feed)[0]
        observation, reward, terminated, truncated, _ = env.step(action[0])
        total, ended = total + reward, terminated or truncated
    print(f"return {total:.3f}")
