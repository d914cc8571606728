"""How the parts of one run fit together: the model, the schema, and the shared memory, alike in every process."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path

from echelon.algorithms.model import Model
from echelon.config import OwnConfig, TrainConfig
from echelon.errors import ConfigError
from echelon.roles.context import Context
from echelon.roles.gradient_slots import GradientSchema, num_pieces
from echelon.roles.journal import Journal
from echelon.roles.own import StateLayout
from echelon.roles.replay_plan import ReplayPlan
from echelon.schema import TrajectorySchema, action_leaf, space_leaves
from echelon.transport.act_board import ActBoard, ActLayout
from echelon.transport.session import make_secret
from echelon.transport.shared_memory import SlotRing, WeightsBoard


def window(config: TrainConfig) -> int:
    """Slots an actor may be ahead of the learner, which is also how many it has.

    A bound on the lag decides it; without one it is `actor.slots` trajectories, or what it takes to fill a batch.
    """
    actor, lag, batch, pieces = config.actor, config.learner.max_lag, config.batch_trajectories, num_pieces(config)
    if lag is None:
        return max(actor.slots * pieces, -(-batch // actor.num_actors) + pieces)
    if batch % actor.num_actors:
        raise ConfigError(
            f"learner.batch={batch} is not a multiple of the {actor.num_actors} actors, but learner.max_lag={lag} "
            "needs every actor to bring the same share. Use a multiple, or 0 for one trajectory each."
        )
    share = batch // actor.num_actors
    if share % pieces and lag * share < pieces - 1:  # an actor would wait for room with less than its share written
        raise ConfigError(
            f"algorithm.minibatches={pieces} gradients of a rollout are more than an actor may be ahead with "
            f"learner.batch={batch} and learner.max_lag={lag}. Use --learner.batch {pieces * actor.num_actors}, or a "
            "multiple of it."
        )
    return (lag + 1) * share


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


class Plan:
    """The model and the memory that the roles of a run share; a part is made when asked for."""

    def __init__(self, context: Context, *, device: str = "cpu") -> None:
        self.context, self.schema, self.device = context, context.schema, device

    @cached_property
    def model(self) -> Model:
        config, device = self.context.train, self.device
        return Model(
            config.network,
            self.context.spaces,
            config.algorithm,
            seed=config.seed,
            device=device,
            precision=config.learner.precision if device != "cpu" else "float32",
            compile=config.learner.compile and device != "cpu",
        )

    @cached_property
    def replay(self) -> ReplayPlan:
        """The parts of a run that learns from replayed transitions."""
        return ReplayPlan(self.context)

    @cached_property
    def slots(self) -> TrajectorySchema | GradientSchema:
        """What lies in a slot of the ring."""
        train = self.context.train
        return GradientSchema.of(train, self.model) if train.experience == "gradients" else self.schema

    def ring(self, learner: int = 0) -> SlotRing:
        """The slots of the actors that a learner takes from."""
        train, folder = self.context.train, self.context.session
        if train.learner.num_learners > 1:
            folder /= f"ring-{learner}"
            folder.mkdir(exist_ok=True)
        return SlotRing(folder, self.slots, len(train.actors_of(learner)), window(train))

    def board(self) -> WeightsBoard:
        return WeightsBoard(self.context.session, self.weights_bytes)

    @property
    def weights_bytes(self) -> int:
        """What is published, be it of our model or of the user's own policy."""
        own = isinstance(self.context.train.algorithm, OwnConfig)
        return self.own_layout.nbytes if own else self.model.nbytes

    @property
    def own_layout(self) -> StateLayout:
        """How the state of the user's own policy lies on the board."""
        return StateLayout.from_json(json.loads(self.own_file.read_text()))

    @property
    def own_file(self) -> Path:
        return self.context.session / "own-layout.json"

    @property
    def workers_file(self) -> Path:
        """Where the door writes the address that workers come to."""
        return self.context.session / "workers.address"

    def act_board(self) -> ActBoard:
        return ActBoard(self.context.session, act_layout(self.context))

    def door_file(self, server: int) -> Path:
        """Where an inference server that is asked over TCP writes its address."""
        return self.context.session / f"act-{server}.address"

    def shared_bytes(self) -> int:
        """What the run needs in shared memory."""
        config = self.context.train
        acting = act_layout(self.context).nbytes if config.acting.mode == "central" else 0
        shared = WeightsBoard.size(self.weights_bytes) + acting
        shared += Journal.size() if config.has_workers else 0
        if config.experience == "replay":
            return shared + self.replay.nbytes
        return shared + SlotRing.size(self.slots, config.actor.num_actors, window(config))

    def make(self) -> list[str]:
        """Makes all of the memory, before any role looks for it; returns what to tell the user of it."""
        news = []
        if self.context.train.experience == "replay":
            news = self.replay.make()
        else:
            for learner in range(self.context.train.learner.num_learners):
                self.ring(learner).close()
        self.board()
        if "tcp" in (self.context.train.acting.transport, self.context.train.replay.transport):
            make_secret(self.context.session)
        if self.context.train.acting.mode == "central":
            self.act_board()
        return news
