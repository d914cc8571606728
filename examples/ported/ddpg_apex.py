"""DDPGApex on Pendulum, ported from a script for Machin: `python examples/ported/ddpg_apex.py [--seed N]`.

Machin's tutorial has no program for it: this is the tutorial's loop for DQNApex with the frame's default settings.
examples/spmd/ddpg_apex.py is the idiomatic version. Comments that begin with `was:` show the original line.
"""

import argparse
import logging  # was: from machin.utils.logging import default_logger as logger
from time import sleep

import gymnasium as gym  # was: import gym
import torch as t
from torch import nn
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel

from echelon.frames import DDPGApex  # was: from machin.frame.algorithms import DDPGApex
from echelon.servers import model_server_helper  # was: from machin.frame.helpers.servers import model_server_helper
from echelon.world import World  # was: from machin.parallel.distributed import World

logging.basicConfig(level=logging.INFO, format="[%(asctime)s] <%(levelname)s>:%(name)s:%(message)s")
logger = logging.getLogger("ddpg_apex")
observe_dim, action_dim, action_range = 3, 1, 2
max_episodes, max_steps = 2000, 200
solved_reward, solved_repeat = -200, 5


def layers(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, outputs))


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = layers(observe_dim, action_dim)

    def forward(self, state):
        return t.tanh(self.layers(state)) * action_range


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = layers(observe_dim + action_dim, 1)

    def forward(self, state, action):
        return self.layers(t.cat([state, action], dim=1))


def work(ddpg_apex, env, rank):
    smoothed, fulfilled = None, 0
    for episode in range(1, max_episodes + 1):
        sleep(0.1)  # so that learners keep up
        total_reward, terminal, step = 0, False, 0
        state = t.tensor(env.reset()[0], dtype=t.float32).view(1, observe_dim)  # was: env.reset()
        ddpg_apex.manual_sync()
        while not terminal and step <= max_steps:
            step += 1
            action = ddpg_apex.act_with_noise({"state": state}, noise_param=(0, 0.2), mode="normal")
            observed, reward, terminated, truncated, _ = env.step(
                action[0].numpy()
            )  # was: state, reward, terminal, _ =
            terminal = terminated or truncated
            next_state = t.tensor(observed, dtype=t.float32).view(1, observe_dim)
            ddpg_apex.store_transition(
                {
                    "state": {"state": state},
                    "action": {"action": action},
                    "next_state": {"state": next_state},
                    "reward": reward,
                    "terminal": terminal or step == max_steps,
                }
            )
            state = next_state
            total_reward += reward

        smoothed = total_reward if smoothed is None else smoothed * 0.9 + total_reward * 0.1
        logger.info(f"Process {rank} Episode {episode} smoothed reward={smoothed:.2f}")
        fulfilled = fulfilled + 1 if smoothed > solved_reward else 0
        if fulfilled >= solved_repeat:
            logger.info(f"Environment solved! Process {rank}, {episode} episodes.")
            exit(0)


def main(rank, seed):
    t.manual_seed(1000 * seed + rank)
    env = gym.make("Pendulum-v1")  # was: Pendulum-v0
    env.reset(seed=1000 * seed + rank)
    world = World(world_size=4, rank=rank, name=str(rank), rpc_timeout=20)
    servers = model_server_helper(model_num=1)
    group = world.create_rpc_group("apex", ["0", "1", "2", "3"])
    models = [Actor(), Actor(), Critic(), Critic()]
    if rank in (2, 3):
        learners = world.create_collective_group(ranks=[2, 3])
        models = [DistributedDataParallel(module=model, process_group=learners.group) for model in models]
    ddpg_apex = DDPGApex(*models, t.optim.Adam, nn.MSELoss(reduction="sum"), group, servers)
    group.barrier()
    ddpg_apex.set_sync(False)
    if rank in (0, 1):
        work(ddpg_apex, env, rank)
    else:
        while ddpg_apex.replay_buffer.all_size() < 500:
            sleep(0.1)
        while True:
            ddpg_apex.update()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    spawn(main, args=(parser.parse_args().seed,), nprocs=4)
