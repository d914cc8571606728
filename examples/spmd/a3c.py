"""A3C on CartPole with 3 processes: `python examples/spmd/a3c.py [--seed N]`.

Every process plays, and pushes one gradient of actor and critic for each of its episodes; every gradient is one step of
the optimizers, which are in the first process. Processes do not wait for each other. The first process to solve the
task ends the world.
"""

from __future__ import annotations

import argparse
import sys

import gymnasium as gym
import torch as t
from torch import nn
from torch.distributions import Categorical

from echelon.frames import A3C
from echelon.servers import grad_server_helper
from echelon.world import World, launch

observe_dim, action_num = 4, 2
max_episodes, max_steps = 2000, 200
solved_reward, solved_repeat = 190, 5


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


def main(world: World, seed: int) -> None:
    t.set_num_threads(1)
    t.manual_seed(1000 * seed + world.rank)
    env = gym.make("CartPole-v1", max_episode_steps=max_steps)
    env.reset(seed=1000 * seed + world.rank)

    servers = grad_server_helper(
        [lambda: Actor(observe_dim, action_num), lambda: Critic(observe_dim)],
        learning_rate=5e-3,
        reduce_batch_size=1,  # no gradient waits for others
    )
    a3c = A3C(
        Actor(observe_dim, action_num),
        Critic(observe_dim),
        nn.MSELoss(),
        servers,
        batch_size=max_steps,  # the whole episode
        actor_update_times=1,
        critic_update_times=1,
    )
    a3c.set_sync(False)

    smoothed_total_reward, reward_fulfilled = 0.0, 0
    for episode in range(1, max_episodes + 1):
        a3c.manual_sync()
        state = t.tensor(env.reset()[0]).view(1, observe_dim)
        total_reward, over, observations = 0.0, False, []
        while not over:
            with t.no_grad():
                action = a3c.act({"state": state})[0]
            observed, reward, terminated, truncated, _ = env.step(action.item())
            next_state = t.tensor(observed).view(1, observe_dim)
            observations.append(
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
        a3c.store_episode(observations)
        a3c.update()

        smoothed_total_reward = smoothed_total_reward * 0.9 + total_reward * 0.1
        print(f"Process {world.rank} Episode {episode} smoothed reward={smoothed_total_reward:.2f}")
        reward_fulfilled = reward_fulfilled + 1 if smoothed_total_reward > solved_reward else 0
        if reward_fulfilled >= solved_repeat:
            print(f"Environment solved! Process {world.rank}, {episode} episodes.")
            sys.exit(0)  # ends the world: pending calls of the others raise WorldStopped
    sys.exit(f"not solved within {max_episodes} episodes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    launch(main, world_size=3, args=(parser.parse_args().seed,))
