"""Uses a trained policy in a loop of your own: `python act.py RUN`. Of Echelon, only the policy is loaded."""

from __future__ import annotations

import sys

from maze import Maze

import echelon


def play(run: str, num_episodes: int = 10) -> list[float]:
    """Returns the return of each episode."""
    policy, env, returns = echelon.load(run, checkpoint="best"), Maze(), []
    for episode in range(num_episodes):
        (observation, _), state, total, ended = env.reset(seed=episode), None, 0.0, False
        while not ended:
            action, state = policy.act(observation, state)  # the mask is an entry of the observation
            observation, reward, terminated, truncated, _ = env.step(action)
            total, ended = total + reward, terminated or truncated
        returns.append(total)
    return returns


if __name__ == "__main__":
    returns = play(sys.argv[1])
    print(f"mean return {sum(returns) / len(returns):.3f} of {len(returns)} episodes")
