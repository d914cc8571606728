"""How the parts of one run fit together: the model, the schema, the shared memory, and who does what with them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.algorithms.exploration import Explorer
from echelon.algorithms.model import Model, Policy
from echelon.algorithms.peers import ALONE
from echelon.config import TrainConfig
from echelon.hosts.messages import Assignment
from echelon.hosts.ownership import Ownership
from echelon.objectives.distributions import Distribution
from echelon.roles.context import Context, Station
from echelon.roles.frame_stacks import image_stacks
from echelon.roles.gradient_slots import GradientSchema
from echelon.roles.journal import Journal
from echelon.roles.placement import keep_freed_memory
from echelon.roles.plan.layouts import act_layout, num_gradients, num_groups, window
from echelon.roles.plan.placement import learner_device
from echelon.roles.plan.replay import ReplayPlan
from echelon.roles.plan.start import PRELOAD
from echelon.roles.user_policy import StateLayout
from echelon.schema import TrajectorySchema, space_choices
from echelon.transport.act_board import ActBoard
from echelon.transport.session import make_secret, secret_of
from echelon.transport.shared_memory import SlotRing, WeightsBoard
from echelon.transport.slot_wire import SlotBytes, Stack
from echelon.transport.sockets import announce

if TYPE_CHECKING:
    import torch

    from echelon.algorithms.peers import Peers
    from echelon.roles.acting import Acting, Exploring
    from echelon.roles.actor import LocalActing
    from echelon.roles.experience import Experience
    from echelon.roles.source import Source
    from echelon.roles.update import Trainable
    from echelon.transport.act_listener import ActListener
    from echelon.transport.batcher import Batcher
    from echelon.world.node import Node

EVALUATOR_NICE = 10


NUM_EVALUATIONS = 10  # of workers, whose mean is shown; a worker's is a single episode


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """A process of the run: `kind` is the module of its role, and the function in it that makes it."""

    name: str
    kind: str
    index: int = 0
    nice: int = 0


def roles_of(config: TrainConfig) -> list[RoleSpec]:
    """The processes of a run, in the order in which they are started."""
    roles = [RoleSpec(name, "learner", index) for index, name in enumerate(config.learner_names)]
    if config.has_workers:
        return [*roles, RoleSpec("gateway", "gateway")]
    if config.engine == "hosts":
        roles.append(RoleSpec("carrier", "carrier"))
    if config.algorithm.experience == "replay" and config.replay.transport == "tcp":
        roles.append(RoleSpec("shards-0", "shards"))
    if config.acting.mode == "central":
        roles += [RoleSpec(f"inference-{index}", "inference", index) for index in range(config.acting.servers)]
    roles += [RoleSpec(f"actor-{index}", "actor", index) for index in range(config.actor.num_actors)]
    if config.evaluation.interval_s > 0:
        roles.append(RoleSpec("evaluator", "evaluator", nice=EVALUATOR_NICE))
    return roles


def num_evaluations(config: TrainConfig) -> int:
    """How many of the newest evaluations the shown return is the mean of."""
    return NUM_EVALUATIONS if config.has_workers else 1


def restored_text(config: TrainConfig, place: str, steps: int, updates: int) -> str:
    """What to say of learners that go on from `place`, with `steps` and `updates` since then lost."""
    who = "the learners go on" if config.learner.num_learners > 1 else "the learner goes on"
    again = f"{updates:,} updates"
    if config.algorithm.experience != "replay":  # where steps count when they are made, and stay
        again = f"{max(steps, 0):,} steps and {again}"
    return f"{who} from {place}" + (f"; {again} since then are learned anew" if updates > 0 else "")


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
        return self.gradient_slots if self.context.train.algorithm.slots == "gradients" else self.schema

    @cached_property
    def gradient_slots(self) -> GradientSchema:
        return GradientSchema.of(self.context.train.actor, num_gradients(self.context.train), self.model)

    def ring(self, learner: int = 0) -> SlotRing:
        """The slots of the actors that a learner takes from."""
        train, folder = self.context.train, self.context.session
        if train.learner.num_learners > 1:
            folder /= f"ring-{learner}"
            folder.mkdir(exist_ok=True)
        return SlotRing(folder, self.slots, self._num_streams(learner), window(train))

    def _num_streams(self, learner: int = 0) -> int:
        return self.context.streams[1] if self.context.streams else len(self.context.train.actors_of(learner))

    # Other hosts.

    @cached_property
    def slot_bytes(self) -> SlotBytes:
        """A slot as it crosses to another host."""
        stacks, actor = [], self.context.train.actor
        for leaf in image_stacks(self.context.spaces):
            place = next(field for field in self.schema.fields if field.name == leaf.path)
            frames, frame_bytes = leaf.shape[0], math.prod(leaf.shape[1:])
            stacks.append(Stack(place.offset, actor.trajectory + 1, actor.envs, frames, frame_bytes))
        return SlotBytes(self.schema.nbytes, tuple(stacks))

    def raw_ring(self) -> SlotRing:
        """The slots of the actors as bytes."""
        return SlotRing(self.context.session, self.slot_bytes, self._num_streams(), window(self.context.train))

    def ownership(self) -> Ownership:
        return Ownership(self.context.session, self._num_streams())

    @property
    def carrier_file(self) -> Path:
        """Where the carrier writes the address that host agents bring slots to."""
        return self.context.session / "carrier.address"

    def assignment(self) -> Assignment:
        """What a host needs to know before its first role."""
        return Assignment(
            slots=window(self.context.train),
            slot=self.slot_bytes.to_wire(),
            weights=self.weights_bytes,
            preload=list(PRELOAD),
        )

    def board(self) -> WeightsBoard:
        return WeightsBoard(self.context.session, self.weights_bytes)

    @property
    def weights_bytes(self) -> int:
        """What is published, be it of our model or of the user's own policy."""
        return self.user_layout.nbytes if self.context.train.algorithm.is_users else self.model.nbytes

    @property
    def user_layout(self) -> StateLayout:
        """How the state of the user's own policy lies on the board."""
        return StateLayout.from_json(json.loads(self.user_layout_file.read_text()))

    @property
    def user_layout_file(self) -> Path:
        return self.context.session / "own-layout.json"

    @property
    def workers_file(self) -> Path:
        """Where the gateway writes the address that workers come to."""
        return self.context.session / "workers.address"

    def act_board(self) -> ActBoard:
        return ActBoard(self.context.session, act_layout(self.context))

    def act_address_file(self, server: int) -> Path:
        """Where an inference server that is asked over TCP writes its address."""
        return self.context.session / f"act-{server}.address"

    # What the roles are made of.

    def trainable(self, node: Node) -> Trainable:
        """What the learner updates, publishes and checkpoints; `node` is the learner's, by which several meet."""
        context = self.context
        if context.train.algorithm.is_users:
            from echelon.roles.user_policy import UserTrainable

            assert context.user_objects is not None, (
                "a run with the user's own policy has it in the process of its learner"
            )
            return UserTrainable(context.user_objects.policy, self.user_layout)
        from echelon.roles.learners import join_learners
        from echelon.roles.update import ModelTrainable

        config = context.train
        device = learner_device(config, self.model.parameters.numel(), context.index)
        if device == "cpu" and not context.shares_process and context.user_objects is None:  # a process of its own
            keep_freed_memory()
        model = self.model if device == "cpu" else Plan(context, device=device).model
        return ModelTrainable(config, model, join_learners(context, node, model.device))

    def source(self, device: torch.device, peers: Peers = ALONE) -> Source:
        """Where the batches come from of a learner that learns on `device`, with `peers`."""
        config, learner = self.context.train, self.context.index
        if config.has_workers:
            from echelon.roles.episode_source import EpisodeSource

            return EpisodeSource(self.replay, device)
        if config.algorithm.experience == "replay":
            from echelon.roles.replay_part import ReplayPart
            from echelon.roles.replay_source import ReplaySource

            return ReplaySource(self.replay, device) if peers.size == 1 else ReplayPart(self.replay, device, peers)
        if config.algorithm.slots == "gradients":
            from echelon.roles.gradient_source import GradientSource

            return GradientSource(config, self.gradient_slots, self.ring(), device)
        from echelon.roles.queue_source import QueueSource

        return QueueSource(config, self.schema, self.ring(learner), device, learner)

    def experience(self, station: Station) -> Experience:
        """Where the steps of the actor go."""
        config, index = self.context.train, self.context.index
        if config.algorithm.experience == "replay":
            from echelon.roles.replay_experience import ReplayExperience

            return ReplayExperience(self.replay, self.schema, index, station)
        if config.algorithm.slots == "gradients":
            from echelon.roles.gradient_experience import GradientExperience

            return GradientExperience(self, Plan(self.context).model, station)
        from echelon.roles.experience import SlotExperience

        learner = config.learner_of(index)
        first = self.context.streams[0] if self.context.streams else config.actors_of(learner).start
        stream = index - first
        return SlotExperience(self.ring(learner), self.schema, stream, station)

    def acting(self, distribution: Distribution, seed: int) -> Acting:
        """Who chooses the actions of the actor."""
        config = self.context.train
        replays = config.algorithm.experience == "replay"
        env_steps = self.replay.tally_steps() if replays else lambda: 0
        if config.acting.mode == "central":
            return self._central_acting(self._exploring(distribution, seed, env_steps))
        return self.local_acting(seed, env_steps)

    def local_acting(self, seed: int, env_steps: Callable[[], int]) -> LocalActing:
        """The actor's own copy of the policy, which explores by the `env_steps` of the run."""
        from echelon.roles.actor import LocalActing

        config = self.context.train
        exploring = self._exploring(self.model.distribution, seed, env_steps)
        policy = Policy(self.model, with_action_values=exploring is not None and config.replay.prioritized)
        return LocalActing(policy, self.board(), config.actor.envs, seed, exploring)

    def _exploring(self, distribution: Distribution, seed: int, env_steps: Callable[[], int]) -> Exploring | None:
        """How the actor's groups explore, each environment as its place in the run says; None: as the policy does."""
        from echelon.roles.acting import Exploring

        config, index = self.context.train, self.context.index
        if config.algorithm.experience != "replay":
            return None
        num_envs = config.actor.envs
        total, size = config.actor.num_actors * num_envs, num_envs // num_groups(config)
        firsts = range(index * num_envs, (index + 1) * num_envs, size)
        explorers = [Explorer(config.algorithm, range(first, first + size), total) for first in firsts]
        return Exploring(explorers, env_steps, distribution, seed)

    def _central_acting(self, exploring: Exploring | None) -> Acting:
        from echelon.roles.central_acting import CentralActing, RemoteActing

        context = self.context
        if context.train.acting.transport == "shm":
            return CentralActing(self.act_board(), context.index, context.incarnation, exploring)
        layout, secret = act_layout(context), secret_of(context.session)
        file = self.act_address_file(layout.server_of(context.index))
        return RemoteActing(layout, file, context.index, context.incarnation, secret, exploring)

    def act_listener(self, batcher: Batcher) -> ActListener | None:
        """Where actors ask an inference server over TCP, if they do; a successor listens where the one before it did.

        To be opened last: who finds the address is answered.
        """
        acting = self.context.train.acting
        if acting.transport == "shm":
            return None
        from echelon.transport.act_listener import ActListener, Bounds

        file = self.act_address_file(batcher.server)
        address = file.read_text() if file.exists() else acting.address
        choices = [Bounds(one.leaf, one.low, one.high) for one in space_choices(self.context.spaces.observation)]
        listener = ActListener(batcher.board, batcher.server, address, secret_of(self.context.session), choices)
        announce(file, listener.address)
        return listener

    # Shared memory.

    def shared_bytes(self) -> int:
        """What the run needs in shared memory."""
        config = self.context.train
        acting = act_layout(self.context).nbytes if config.acting.mode == "central" else 0
        shared = WeightsBoard.size(self.weights_bytes) + acting
        shared += Journal.size() if config.has_workers else 0
        if config.algorithm.experience == "replay":
            return shared + self.replay.nbytes
        return shared + SlotRing.size(self.slots, config.actor.num_actors, window(config))

    def make(self) -> list[str]:
        """Makes all of the memory, before any role looks for it; returns what to tell the user of it."""
        news = []
        if self.context.train.algorithm.experience == "replay":
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
