"""Sizes of the shared structures of a run: the slot ring, the groups of environments, the board of act requests."""

from __future__ import annotations

import gymnasium as gym

from echelon.config import TrainConfig
from echelon.errors import ConfigError
from echelon.roles.context import Context
from echelon.schema import Spaces, TrajectorySchema, action_leaf, space_leaves
from echelon.transport.act_board import ActLayout


def num_gradients(config: TrainConfig) -> int:
    """Returns the slots that a trajectory of an actor takes: one, or one per gradient if actors send gradients."""
    return getattr(config.algorithm, "minibatches", 1) if config.algorithm.slots == "gradients" else 1


def window(config: TrainConfig) -> int:
    """Returns how many slots an actor may be ahead of the learner, which is also the number of its slots.

    It follows from the lag bound. Without one it is `actor.slots` trajectories, or more if a batch needs more.
    """
    actor, lag, batch, count = (
        config.actor,
        config.learner.max_lag,
        config.batch_trajectories,
        num_gradients(config),
    )
    if lag is None:
        return max(actor.slots * count, -(-batch // (config.hosts.min_actors or actor.num_actors)) + count)
    if batch % actor.num_actors:
        raise ConfigError(
            f"learner.batch={batch} is not a multiple of the {actor.num_actors} actors, but learner.max_lag={lag} "
            "requires an equal share of every actor. Use a multiple, or 0 for one trajectory each."
        )
    share = batch // actor.num_actors
    if share % count and lag * share < count - 1:  # an actor could not write its share: it would wait for slots forever
        raise ConfigError(
            f"algorithm.minibatches={count} gradients per rollout are more than an actor may be ahead with "
            f"learner.batch={batch} and learner.max_lag={lag}. Use --learner.batch {count * actor.num_actors}, or a "
            "multiple of it."
        )
    return (lag + 1) * share


def minibatch_samples(config: TrainConfig) -> int:
    """Returns the samples of one optimizer step, over all learners."""
    if config.algorithm.experience == "replay":
        return config.replay.batch
    if config.algorithm.slots == "gradients":
        return 1  # the actors process the samples
    actor, count = config.actor, int(getattr(config.algorithm, "minibatches", 1))
    num_steps = config.batch_trajectories * actor.trajectory * actor.envs_per_actor
    if count > num_steps:
        raise ConfigError(
            f"algorithm.minibatches={count} exceeds the {num_steps} steps of a batch. Lower it, or raise "
            "--envs-per-actor."
        )
    return num_steps // count


def num_groups(config: TrainConfig) -> int:
    """Returns the number of groups in which an actor steps its environments: `acting.groups`, or 1 with local acting.

    The default is two, so that an actor steps one group while the actions of the other are computed.
    """
    envs, groups = config.actor.envs_per_actor, config.acting.groups
    if config.acting.mode != "central":
        return 1
    if groups and envs % groups:
        raise ConfigError(
            f"acting.groups={groups} does not divide the {envs} environments of an actor (--envs-per-actor). Use a "
            "divisor, or 0 for automatic choice."
        )
    groups = groups or (1 if envs % 2 else 2)
    if 0 < config.acting.max_batch < envs // groups:
        raise ConfigError(
            f"acting.max_batch={config.acting.max_batch} is below the {envs // groups} environments of one request "
            f"({envs} per actor, in {groups} groups). Raise it, or --acting.groups, or use 0 for no limit."
        )
    return groups


def noise_shapes(config: TrainConfig, spaces: Spaces) -> tuple[tuple[int, ...], ...]:
    """Returns the shape of the last noise of an environment, if the policy samples with correlated noise."""
    algorithm, is_continuous = config.algorithm, isinstance(spaces.action, gym.spaces.Box)
    is_sampled = is_continuous and algorithm.distribution in ("stochastic", "squashed")
    return (action_leaf(spaces.action).shape,) if algorithm.noise_correlation and is_sampled else ()


def trajectory_schema(context: Context) -> TrajectorySchema:
    """Returns the layout of a trajectory."""
    train, actor = context.train, context.train.actor
    is_replayed = train.has_hosts and train.experience == "replay"
    # The head computes the priorities of other hosts from the values of actors that act by themselves.
    with_values = is_replayed and train.replay.prioritized and train.acting.mode != "central"
    return TrajectorySchema(context.spaces, actor.trajectory, actor.envs_per_actor, context.state_shapes, with_values)


def act_layout(context: Context) -> ActLayout:
    """Returns the layout of the board of act requests of a run with central acting."""
    config, spaces = context.train, context.spaces
    servers, actors = config.acting.servers, config.actor.num_actors
    if servers > actors:
        raise ConfigError(
            f"acting.servers={servers} exceeds actor.num_actors={actors}, so some servers would have no actor. Lower "
            "it, or raise --actors."
        )
    groups = num_groups(config)
    return ActLayout(
        observation=tuple(space_leaves(spaces.observation)),
        action=action_leaf(spaces.action),
        state_shapes=context.state_shapes + noise_shapes(config, spaces),
        rows=config.actor.envs_per_actor // groups,
        num_clients=actors,
        num_groups=groups,
        num_servers=servers,
    )
