#!/bin/bash
# The first hour with Echelon, in a minute on two cores: an environment and a network of your own are checked,
# trained, used, filmed, exported and compared. Copy this folder anywhere and run it there:
#
#     pip install -c PATH/constraints.txt 'PATH/dist/echelon-VERSION-py3-none-any.whl[video,onnx]'    # wheel of `make dist`
#     bash run.sh                            # uses wandb if it is installed
set -euo pipefail

steps=${STEPS:-60_000}
settings=(maze.py:Maze --network.name network.py:make --actors 2 --optimizer.learning-rate 2e-3 --steps "$steps")

step() { printf '\n[%s s] %s\n' "$SECONDS" "$1"; }

step "What is wrong with the environment?"
echelon check maze.py:Maze

step "Train. Everything is in out/run."
echelon train ppo "${settings[@]}" --run-dir out/run

step "Twenty greedy episodes with the best weights"
echelon eval out/run --checkpoint best --episodes 20

step "The policy in a loop of your own"
python act.py out/run

step "A video"
echelon play out/run --checkpoint best --output out/maze.mp4

step "A file for programs without Echelon and torch"
echelon export out/run --checkpoint best --format onnx -o out/maze.onnx
python act_onnx.py out/maze.onnx

step "Three seeds, beside three of asynchronous PPO, whose actors do not wait for the learner"
echelon train ppo "${settings[@]}" --seeds 0-2 --jobs 2 --run-dir out/ppo
echelon train async-ppo "${settings[@]}" --seeds 0-2 --jobs 2 --run-dir out/async-ppo
echelon compare out/ppo out/async-ppo -o out/compare.png
echelon list out

if python -c 'import wandb' 2>/dev/null; then
  step "Weights & Biases, without an account: out/wandb/wandb holds what it would send"
  echelon train ppo "${settings[@]}" --run-dir out/wandb --callback 'echelon.callbacks:Wandb(project="maze", mode="offline")'
fi

step "Done"
