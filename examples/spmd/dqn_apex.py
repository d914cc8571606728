"""DQNApex on CartPole with 2 workers and 2 learners: `python examples/spmd/dqn_apex.py [--seed N]`.

Both workers play an episode, then the learners make `updates_per_round` updates together, each on transitions sampled
from both workers, and so on. The result therefore does not depend on the speed of the machine. Without the barriers no
process would wait for another. The first worker to solve the task ends the world.
"""

from __future__ import annotations

import argparse
import sys

import gymnasium as gym
import torch as t
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from echelon.frames import DQNApex
from echelon.servers import model_server_helper
from echelon.world import RpcGroup, World, launch

observe_dim, action_num = 4, 2
max_episodes, max_steps = 2000, 200
solved_reward, solved_repeat = 190, 5
updates_per_round, learn_from = 100, 500  # updates begin when that many transitions are stored


class QNet(nn.Module):
    def __init__(self, state_dim: int, action_num: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(state_dim, 16)
        self.fc2 = nn.Linear(16, 16)
        self.fc3 = nn.Linear(16, action_num)

    def forward(self, some_state: t.Tensor) -> t.Tensor:
        a = t.relu(self.fc1(some_state))
        a = t.relu(self.fc2(a))
        return self.fc3(a)


def work(dqn_apex: DQNApex, group: RpcGroup, env: gym.Env, rank: int) -> None:
    """Plays episodes until the task is solved."""
    smoothed_total_reward, reward_fulfilled = 0.0, 0
    for episode in range(1, max_episodes + 1):
        dqn_apex.manual_sync()
        state = t.tensor(env.reset()[0]).view(1, observe_dim)
        total_reward, over = 0.0, False
        while not over:
            action = dqn_apex.act_discrete_with_noise({"state": state})
            observed, reward, terminated, truncated, _ = env.step(action.item())
            next_state = t.tensor(observed).view(1, observe_dim)
            dqn_apex.store_transition(
                {
                    "state": {"state": state},
                    "action": {"action": action},
                    "next_state": {"state": next_state},
                    "reward": reward,
                    "terminated": terminated,
                    "truncated": truncated,
                }
            )
            state, over = next_state, terminated or truncated
            total_reward += reward

        smoothed_total_reward = smoothed_total_reward * 0.9 + total_reward * 0.1
        print(f"Process {rank} Episode {episode} smoothed reward={smoothed_total_reward:.2f}")
        reward_fulfilled = reward_fulfilled + 1 if smoothed_total_reward > solved_reward else 0
        if reward_fulfilled >= solved_repeat:
            print(f"Environment solved! Process {rank}, {episode} episodes.")
            sys.exit(0)  # ends the world: pending calls of the others raise WorldStopped
        group.barrier()  # both episodes are stored
        group.barrier()  # the learners have updated
    sys.exit(f"not solved within {max_episodes} episodes")


def main(world: World, seed: int) -> None:
    t.set_num_threads(1)
    group = world.create_rpc_group("apex", world.members)
    is_learner = world.rank in (2, 3)
    t.manual_seed(1000 * seed)  # learners start with equal weights
    q_net, q_net_t = QNet(observe_dim, action_num), QNet(observe_dim, action_num)
    t.manual_seed(1000 * seed + world.rank)
    if is_learner:
        learners = world.create_collective_group(ranks=[2, 3])
        q_net = DistributedDataParallel(q_net, process_group=learners.group)
        q_net_t = DistributedDataParallel(q_net_t, process_group=learners.group)
    dqn_apex = DQNApex(
        q_net,
        q_net_t,
        t.optim.Adam,
        nn.MSELoss(),
        group,
        model_server_helper(model_num=1),
        batch_size=64,
        learning_rate=1e-3,
        discount=0.98,
        n_step=3,
        epsilon_decay=0.9995,
        replay_size=50_000,
    )
    dqn_apex.set_sync(False)
    group.barrier()
    if is_learner:
        while True:
            group.barrier()
            if dqn_apex.replay_buffer.all_size() >= learn_from:
                for _ in range(updates_per_round):
                    dqn_apex.update()
            group.barrier()
    env = gym.make("CartPole-v1", max_episode_steps=max_steps)
    env.reset(seed=1000 * seed + world.rank)
    work(dqn_apex, group, env, world.rank)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    launch(main, world_size=4, args=(parser.parse_args().seed,))
