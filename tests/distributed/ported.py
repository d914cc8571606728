"""Loops as people bring them from Machin: hand-made worlds under torch.multiprocessing, `terminal`, wrapped learners.

Four processes train with A3C, then 2 workers and 2 learners with DQNApex and IMPALA, a few episodes each; the first
worker that is done ends the world by `exit(0)` while learners learn on.
"""

from __future__ import annotations

from time import sleep
from typing import Any

import gymnasium as gym
import torch as t
from torch import nn
from torch.distributions import Categorical
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel

from echelon.frames import A3C, IMPALA, DQNApex
from echelon.servers import grad_server_helper, model_server_helper
from echelon.world import World

observe_dim, action_num = 4, 2
max_steps, max_episodes = 20, 3


class QNet(nn.Module):
    def __init__(self, state_dim: int, outputs: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(state_dim, 16)
        self.fc2 = nn.Linear(16, outputs)

    def forward(self, some_state: t.Tensor) -> Any:  # the items call it "state"
        return self.fc2(t.relu(self.fc1(some_state)))


class Actor(QNet):
    def forward(self, state: t.Tensor, action: t.Tensor | None = None) -> Any:
        dist = Categorical(logits=super().forward(state))
        act = action if action is not None else dist.sample()
        return act, dist.log_prob(act.flatten()), dist.entropy()


def play(frame: Any, env: Any, act: Any) -> list[dict[str, Any]]:
    """An episode; what the limit of steps ends counts as terminal, as such loops write it."""
    frame.manual_sync()
    state = t.tensor(env.reset()[0], dtype=t.float32).view(1, observe_dim)
    terminal, step, observations = False, 0, []
    while not terminal and step <= max_steps:
        step += 1
        with t.no_grad():
            old_state = state
            action, *others = act({"state": old_state})
            observed, reward, terminal, _, _ = env.step(action.item())
            state = t.tensor(observed, dtype=t.float32).view(1, observe_dim)
            item = {
                "state": {"state": old_state},
                "action": {"action": action},
                "next_state": {"state": state},
                "reward": reward,
                "terminal": terminal or step == max_steps,
            }
            observations.append(item | ({"action_log_prob": others[0].item()} if others else {}))
    return observations


def models(world: World, *made: nn.Module) -> Any:
    if world.rank not in (2, 3):
        return made
    learner_group = world.create_collective_group(ranks=[2, 3])
    return [DistributedDataParallel(module=model, process_group=learner_group.group) for model in made]


def main(rank: int) -> None:
    world = World(world_size=4, rank=rank, name=str(rank), rpc_timeout=60)
    env = gym.make("CartPole-v1")
    mse = nn.MSELoss(reduction="sum")

    creators = [lambda: Actor(observe_dim, action_num), lambda: QNet(observe_dim, 1)]
    servers = grad_server_helper(creators, learning_rate=5e-3)
    a3c = A3C(creators[0](), creators[1](), mse, servers)
    a3c.set_sync(False)
    for _ in range(max_episodes):
        a3c.store_episode(play(a3c, env, a3c.act))
        a3c.update()

    apex_group = world.create_rpc_group("apex", ["0", "1", "2", "3"])
    accessors = model_server_helper(model_num=2)
    pair = models(world, QNet(observe_dim, action_num), QNet(observe_dim, action_num))
    dqn = DQNApex(*pair, t.optim.Adam, mse, apex_group, (accessors[0],), batch_size=10, replay_device="cpu")
    impala_group = world.create_rpc_group("impala", ["0", "1", "2", "3"])
    pair = models(world, Actor(observe_dim, action_num), QNet(observe_dim, 1))
    impala = IMPALA(*pair, t.optim.Adam, mse, impala_group, (accessors[1],), batch_size=2)
    for frame in (dqn, impala):
        frame.set_sync(False)
    impala_group.barrier()
    if rank in (0, 1):
        for _ in range(max_episodes):
            dqn.store_episode(play(dqn, env, lambda state: [dqn.act_discrete_with_noise(state)]))
            impala.store_episode(play(impala, env, impala.act))
        impala_group.barrier()
        learned = [accessors[0].version(dqn.qnet), accessors[1].version(impala.actor)]
        while min(learned) < 1:  # what the learners pushed has arrived here
            sleep(0.01)
            dqn.manual_sync()
            impala.manual_sync()
            learned = [accessors[0].version(dqn.qnet), accessors[1].version(impala.actor)]
        print("solved", flush=True)
        exit(0)
    impala_group.barrier()
    while True:
        dqn.update()
        impala.update()


if __name__ == "__main__":
    spawn(main, nprocs=4)
    print("all gone", flush=True)
