"""IMPALA on CartPole with 2 workers and 2 learners: `python examples/spmd/impala.py [--seed N]`.

Both workers play an episode, then the learners make `updates_per_round` updates together, each on episodes sampled from
both workers, and so on. The result therefore does not depend on the speed of the machine. Without the barriers no
process would wait for another. The first worker to solve the task ends the world.
"""

from __future__ import annotations

import argparse
import sys

import gymnasium as gym
import torch as t
from torch import nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel

from echelon.frames import IMPALA
from echelon.servers import model_server_helper
from echelon.world import RpcGroup, World, launch

observe_dim, action_num = 4, 2
max_episodes, max_steps = 2000, 200
solved_reward, solved_repeat = 190, 5
updates_per_round = 16


class Actor(nn.Module):
    def __init__(self, state_dim: int, action_num: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(state_dim, 16)
        self.fc2 = nn.Linear(16, 16)
        self.fc3 = nn.Linear(16, action_num)

    def forward(self, state: t.Tensor, action: t.Tensor | None = None) -> tuple[t.Tensor, t.Tensor, t.Tensor]:
        a = t.relu(self.fc1(state))
        a = t.relu(self.fc2(a))
        dist = Categorical(logits=self.fc3(a))
        act = action if action is not None else dist.sample()
        return act, dist.log_prob(act.flatten()), dist.entropy()


class Critic(nn.Module):
    def __init__(self, state_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(state_dim, 16)
        self.fc2 = nn.Linear(16, 16)
        self.fc3 = nn.Linear(16, 1)

    def forward(self, state: t.Tensor) -> t.Tensor:
        v = t.relu(self.fc1(state))
        v = t.relu(self.fc2(v))
        return self.fc3(v)


def work(impala: IMPALA, group: RpcGroup, env: gym.Env, rank: int) -> None:
    """Plays episodes until the task is solved."""
    smoothed_total_reward, reward_fulfilled = 0.0, 0
    for episode in range(1, max_episodes + 1):
        impala.manual_sync()
        state = t.tensor(env.reset()[0]).view(1, observe_dim)
        total_reward, over, observations = 0.0, False, []
        while not over:
            with t.no_grad():
                action, action_log_prob, *_ = impala.act({"state": state})
            observed, reward, terminated, truncated, _ = env.step(action.item())
            next_state = t.tensor(observed).view(1, observe_dim)
            observations.append(
                {
                    "state": {"state": state},
                    "action": {"action": action},
                    "next_state": {"state": next_state},
                    "reward": reward,
                    "action_log_prob": action_log_prob.item(),
                    "terminated": terminated,
                    "truncated": truncated,
                }
            )
            state, over = next_state, terminated or truncated
            total_reward += reward
        impala.store_episode(observations)

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
    group = world.create_rpc_group("impala", world.members)
    is_learner = world.rank in (2, 3)
    t.manual_seed(1000 * seed)  # learners start with equal weights
    actor, critic = Actor(observe_dim, action_num), Critic(observe_dim)
    t.manual_seed(1000 * seed + world.rank)
    if is_learner:
        learners = world.create_collective_group(ranks=[2, 3])
        actor = DistributedDataParallel(actor, process_group=learners.group)
        critic = DistributedDataParallel(critic, process_group=learners.group)
    impala = IMPALA(
        actor,
        critic,
        t.optim.Adam,
        nn.MSELoss(),
        group,
        model_server_helper(model_num=1),
        batch_size=4,
        learning_rate=1e-3,
        critic_learning_rate=3e-2,
        entropy_weight=0.3,
        replay_size=4,  # episodes of each worker: old ones are too far off-policy
    )
    impala.set_sync(False)
    group.barrier()
    if is_learner:
        while True:
            group.barrier()
            for _ in range(updates_per_round):
                impala.update()
            group.barrier()
    env = gym.make("CartPole-v1", max_episode_steps=max_steps)
    env.reset(seed=1000 * seed + world.rank)
    work(impala, group, env, world.rank)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    launch(main, world_size=4, args=(parser.parse_args().seed,))
