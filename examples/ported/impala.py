"""IMPALA on CartPole, ported from a script for Machin: `python examples/ported/impala.py [--seed N]`.

Loop, networks and settings are those of Machin's tutorial; examples/spmd/impala.py is the idiomatic version. Comments
that begin with `was:` show the original line.
"""

import argparse
import logging  # was: from machin.utils.logging import default_logger as logger
from time import sleep

import gymnasium as gym  # was: import gym
import torch as t
from torch import nn
from torch.distributions import Categorical
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel

from echelon.frames import IMPALA  # was: from machin.frame.algorithms import IMPALA
from echelon.servers import model_server_helper  # was: from machin.frame.helpers.servers import model_server_helper
from echelon.world import World  # was: from machin.parallel.distributed import World

logging.basicConfig(level=logging.INFO, format="[%(asctime)s] <%(levelname)s>:%(name)s:%(message)s")
logger = logging.getLogger("impala")
observe_dim, action_num = 4, 2
max_episodes, max_steps = 2000, 200
solved_reward, solved_repeat = 190, 5


def layers(outputs):
    return nn.Sequential(nn.Linear(observe_dim, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, outputs))


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = layers(action_num)

    def forward(self, state, action=None):
        dist = Categorical(probs=t.softmax(self.layers(state), dim=1))
        taken = dist.sample() if action is None else action
        return taken, dist.log_prob(taken.flatten()), dist.entropy()


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = layers(1)

    def forward(self, state):
        return self.layers(state)


def work(impala, env, rank):
    smoothed, fulfilled = 0, 0
    for episode in range(1, max_episodes + 1):
        sleep(0.1)  # so that learners keep up
        total_reward, terminal, step, items = 0, False, 0, []
        state = t.tensor(env.reset()[0], dtype=t.float32).view(1, observe_dim)  # was: env.reset()
        impala.manual_sync()
        while not terminal and step <= max_steps:
            step += 1
            with t.no_grad():
                action, action_log_prob, *_ = impala.act({"state": state})
            observed, reward, terminated, truncated, _ = env.step(action.item())  # was: state, reward, terminal, _ =
            terminal = terminated or truncated
            next_state = t.tensor(observed, dtype=t.float32).view(1, observe_dim)
            items.append(
                {
                    "state": {"state": state},
                    "action": {"action": action},
                    "next_state": {"state": next_state},
                    "reward": reward,
                    "action_log_prob": action_log_prob.item(),
                    "terminal": terminal or step == max_steps,
                }
            )
            state = next_state
            total_reward += reward
        impala.store_episode(items)

        smoothed = smoothed * 0.9 + total_reward * 0.1
        logger.info(f"Process {rank} Episode {episode} smoothed reward={smoothed:.2f}")
        fulfilled = fulfilled + 1 if smoothed > solved_reward else 0
        if fulfilled >= solved_repeat:
            logger.info(f"Environment solved! Process {rank}, {episode} episodes.")
            exit(0)


def main(rank, seed):
    t.manual_seed(1000 * seed + rank)
    env = gym.make("CartPole-v0")
    env.reset(seed=1000 * seed + rank)
    world = World(world_size=4, rank=rank, name=str(rank), rpc_timeout=20)
    servers = model_server_helper(model_num=1)
    group = world.create_rpc_group("impala", ["0", "1", "2", "3"])
    actor, critic = Actor(), Critic()
    if rank in (2, 3):
        learners = world.create_collective_group(ranks=[2, 3])
        actor = DistributedDataParallel(module=actor, process_group=learners.group)
        critic = DistributedDataParallel(module=critic, process_group=learners.group)
    impala = IMPALA(actor, critic, t.optim.Adam, nn.MSELoss(reduction="sum"), group, servers, batch_size=2)
    group.barrier()
    impala.set_sync(False)
    if rank in (0, 1):
        work(impala, env, rank)
    else:
        while impala.replay_buffer.all_size() < 5:
            sleep(0.1)
        while True:
            impala.update()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    spawn(main, args=(parser.parse_args().seed,), nprocs=4)
