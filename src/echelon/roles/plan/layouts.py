"""How large the shared structures of a run are: the slot ring, groups of environments, the board of act requests."""

from __future__ import annotations

from echelon.config import TrainConfig
from echelon.errors import ConfigError
from echelon.roles.context import Context
from echelon.schema import action_leaf, space_leaves
from echelon.transport.act_board import ActLayout


def num_gradients(config: TrainConfig) -> int:
    """Slots that a trajectory of an actor takes: one, or of its own gradients one each."""
    return getattr(config.algorithm, "minibatches", 1) if config.algorithm.slots == "gradients" else 1


def window(config: TrainConfig) -> int:
    """Slots an actor may be ahead of the learner, which is also how many it has.

    A bound on the lag decides it; without one it is `actor.slots` trajectories, or what it takes to fill a batch.
    """
    actor, lag, batch, count = (
        config.actor,
        config.learner.max_lag,
        config.batch_trajectories,
        num_gradients(config),
    )
    if lag is None:
        return max(actor.slots * count, -(-batch // actor.num_actors) + count)
    if batch % actor.num_actors:
        raise ConfigError(
            f"learner.batch={batch} is not a multiple of the {actor.num_actors} actors, but learner.max_lag={lag} "
            "needs every actor to bring the same share. Use a multiple, or 0 for one trajectory each."
        )
    share = batch // actor.num_actors
    if share % count and lag * share < count - 1:  # an actor would wait for room with less than its share written
        raise ConfigError(
            f"algorithm.minibatches={count} gradients of a rollout are more than an actor may be ahead with "
            f"learner.batch={batch} and learner.max_lag={lag}. Use --learner.batch {count * actor.num_actors}, or a "
            "multiple of it."
        )
    return (lag + 1) * share


def minibatch_samples(config: TrainConfig) -> int:
    """Samples that a step of the optimizer is made of, over all learners."""
    if config.algorithm.experience == "replay":
        return config.replay.batch
    if config.algorithm.slots == "gradients":
        return 1  # the actors have been through the samples
    actor, count = config.actor, int(getattr(config.algorithm, "minibatches", 1))
    return config.batch_trajectories * actor.trajectory * actor.envs // count


def num_groups(config: TrainConfig) -> int:
    """Groups that the environments of an actor are stepped in: with local acting one, else what was asked for.

    Two by default, so that an actor steps one while the other's actions are chosen.
    """
    envs, groups = config.actor.envs, config.acting.groups
    if config.acting.mode != "central":
        return 1
    if groups and envs % groups:
        raise ConfigError(
            f"acting.groups={groups} does not divide the actor.envs={envs} environments of an actor. Use a divisor, or "
            "0 to have it chosen."
        )
    groups = groups or (1 if envs % 2 else 2)
    if 0 < config.acting.max_batch < envs // groups:
        raise ConfigError(
            f"acting.max_batch={config.acting.max_batch} is below the {envs // groups} environments of one request "
            f"(actor.envs={envs} in {groups} groups). Raise it, or --acting.groups, or use 0 for no limit."
        )
    return groups


def round_rows(config: TrainConfig) -> int:
    """Rows of a round in which every actor of a server asks for one of its groups."""
    acting, actor = config.acting, config.actor
    rows = actor.envs // num_groups(config)
    if not acting.batch:
        return rows
    most = rows * -(-actor.num_actors // acting.servers)
    return max(rows, min(most, acting.max_batch // rows * rows)) if acting.max_batch else most


def act_layout(context: Context) -> ActLayout:
    """The board of act requests of a run with central acting."""
    config, spaces = context.train, context.spaces
    servers, actors = config.acting.servers, config.actor.num_actors
    if servers > actors:
        raise ConfigError(
            f"acting.servers={servers} exceeds actor.num_actors={actors}, and a server without an actor does nothing. "
            "Lower it, or raise --actors."
        )
    groups = num_groups(config)
    return ActLayout(
        observation=tuple(space_leaves(spaces.observation)),
        action=action_leaf(spaces.action),
        state_shapes=context.state_shapes,
        rows=config.actor.envs // groups,
        num_clients=actors,
        num_groups=groups,
        num_servers=servers,
    )


def num_passes(config: TrainConfig) -> float:
    """How often a step is learned from."""
    if config.algorithm.experience == "replay":
        return config.replay.samples_per_insert
    return getattr(config.algorithm, "epochs", 1)
