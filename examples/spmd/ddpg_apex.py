"""DDPGApex on Pendulum with 2 workers and 2 learners: `python examples/spmd/ddpg_apex.py [--seed N]`.

Both workers play an episode, then the learners make `updates_per_round` updates together, each on transitions sampled
from both workers, and so on. The result therefore does not depend on the speed of the machine. Without the barriers no
process would wait for another. The first worker to solve the task ends the world; it is solved when the smoothed
return, including exploration noise, is above -200 five times in a row.
"""

from __future__ import annotations

import argparse
import sys

import gymnasium as gym
import torch as t
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from echelon.frames import DDPGApex
from echelon.servers import model_server_helper
from echelon.world import RpcGroup, World, launch

observe_dim, action_dim, action_range = 3, 1, 2.0
max_episodes = 500
solved_reward, solved_repeat = -200, 5
exploration = 0.4  # standard deviation of the noise on actions
updates_per_round, learn_from = 200, 800  # updates begin when that many transitions are stored


class Actor(nn.Module):
    def __init__(self, state_dim: int, action_dim: int, action_range: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(state_dim, 16)
        self.fc2 = nn.Linear(16, 16)
        self.fc3 = nn.Linear(16, action_dim)
        self.action_range = action_range

    def forward(self, state: t.Tensor) -> t.Tensor:
        a = t.relu(self.fc1(state))
        a = t.relu(self.fc2(a))
        return t.tanh(self.fc3(a)) * self.action_range


class Critic(nn.Module):
    def __init__(self, state_dim: int, action_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(state_dim + action_dim, 16)
        self.fc2 = nn.Linear(16, 16)
        self.fc3 = nn.Linear(16, 1)

    def forward(self, state: t.Tensor, action: t.Tensor) -> t.Tensor:
        q = t.relu(self.fc1(t.cat([state, action], dim=1)))
        q = t.relu(self.fc2(q))
        return self.fc3(q)


def work(ddpg_apex: DDPGApex, group: RpcGroup, env: gym.Env, rank: int) -> None:
    """Plays episodes until the task is solved."""
    smoothed_total_reward, reward_fulfilled = None, 0
    for episode in range(1, max_episodes + 1):
        ddpg_apex.manual_sync()
        state = t.tensor(env.reset()[0]).view(1, observe_dim)
        total_reward, over = 0.0, False
        while not over:
            action = ddpg_apex.act_with_noise({"state": state}, (0.0, exploration), mode="normal")
            action = action.clamp(-action_range, action_range)
            observed, reward, terminated, truncated, _ = env.step(action.view(-1).numpy())
            next_state = t.tensor(observed).view(1, observe_dim)
            ddpg_apex.store_transition(
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

        if smoothed_total_reward is None:
            smoothed_total_reward = total_reward
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
    actor, actor_t = (Actor(observe_dim, action_dim, action_range) for _ in range(2))
    critic, critic_t = (Critic(observe_dim, action_dim) for _ in range(2))
    models = [actor, actor_t, critic, critic_t]
    t.manual_seed(1000 * seed + world.rank)
    if is_learner:
        learners = world.create_collective_group(ranks=[2, 3])
        models = [DistributedDataParallel(model, process_group=learners.group) for model in models]
    ddpg_apex = DDPGApex(
        *models,
        t.optim.Adam,
        nn.MSELoss(),
        group,
        model_server_helper(model_num=1),
        batch_size=64,
        actor_learning_rate=1e-3,
        critic_learning_rate=2e-3,
        discount=0.98,
        update_rate=0.01,
        replay_size=50_000,
    )
    ddpg_apex.set_sync(False)
    group.barrier()
    if is_learner:
        while True:
            group.barrier()
            if ddpg_apex.replay_buffer.all_size() >= learn_from:
                for _ in range(updates_per_round):
                    ddpg_apex.update()
            group.barrier()
    env = gym.make("Pendulum-v1")
    env.reset(seed=1000 * seed + world.rank)
    work(ddpg_apex, group, env, world.rank)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    launch(main, world_size=4, args=(parser.parse_args().seed,))
