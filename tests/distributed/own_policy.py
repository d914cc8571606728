"""A policy of a user's own, as a learner and its workers get it, and a program that trains it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import echelon
import warm
from echelon.schema import TransitionBatch


class Own(nn.Module):
    """Q-learning with one linear layer; `state_dict` is its state, as for any module."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Linear(4, 2)
        self.register_buffer("num_updates", torch.zeros((), dtype=torch.int64))
        self.optimizer = torch.optim.SGD(self.parameters(), 1e-3)

    def act(self, observation: Any, *, explore: bool) -> int:
        assert observation.shape == (4,) and observation.dtype == np.float32
        if explore and np.random.random() < 0.5:
            return int(np.random.randint(2))
        with torch.no_grad():
            return int(self.values(torch.from_numpy(observation)).argmax())

    def update(self, batch: TransitionBatch) -> dict[str, float]:
        with torch.no_grad():
            target = batch.reward + batch.discount * self.values(batch.next_observation).amax(1)
        chosen = self.values(batch.observation).gather(1, batch.action.unsqueeze(1)).squeeze(1)
        loss = (chosen - target).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.num_updates += 1
        return {"loss": loss.item()}


def main(run_dir: str, shm_dir: str, epochs: str, resume: str) -> None:
    """Trains with one worker, in processes of their own; prints what was saved."""
    saved: list[str] = []
    policy = Own()

    def save(*, epoch: int, policy: Any) -> None:
        saved.append(f"{epoch}:{int(policy.num_updates)}")

    node = echelon.AsyncLearningNode(
        policy,
        update_steps=4,
        batch_size=16,
        epochs=int(epochs),
        buffer_size=5_000,
        server_address=("127.0.0.1", 0),
        eval_freq=0.25,
        save_func=save,
        save_freq=5,
        run_dir=run_dir,
        resume=resume == "resume",
    )
    if resume != "resume":
        node.config = echelon.config.replace(node.config, shm_dir=shm_dir)
    command = [sys.executable, "-m", "echelon.cli.main", "worker", "--learner", f"127.0.0.1:{node.address[1]}"]
    worker = warm.Popen([*command, "--env", "CartPole-v1", "--policy", f"{Path(__file__).resolve()}:Own"])
    torch.set_num_threads(3)
    before = torch.get_rng_state()
    try:
        result = node.learn()
    finally:
        code = worker.wait(60) if not sys.exc_info()[0] else worker.kill()
    print(f"result {result.status} {result.summary['updates']} {int(policy.num_updates)} saved {' '.join(saved)}")
    print(f"worker left with {code}")
    kept = torch.get_num_threads() == 3 and torch.equal(torch.get_rng_state(), before)
    print(f"the caller's threads and generator are {'kept' if kept else 'changed'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
