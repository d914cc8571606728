"""Creates the parts of a run that the roles use: the model, the schema, the shared memory and the role objects."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from echelon.algorithms.exploration import Explorer
from echelon.algorithms.model import Model, Policy
from echelon.algorithms.peers import ALONE
from echelon.objectives.distributions import Distribution
from echelon.roles.context import Context, Station
from echelon.roles.gradient_slots import GradientSchema
from echelon.roles.placement import keep_freed_memory
from echelon.roles.plan.layouts import act_layout, num_gradients, num_groups
from echelon.roles.plan.memory import Memory
from echelon.roles.plan.placement import learner_device
from echelon.roles.user_policy import StateLayout
from echelon.schema import TrajectorySchema, space_choices
from echelon.transport.sockets import announce

if TYPE_CHECKING:
    import torch

    from echelon.algorithms.peers import Peers
    from echelon.roles.acting import Acting, Exploring
    from echelon.roles.actor import LocalActing
    from echelon.roles.experience import Experience
    from echelon.roles.ring_sink import SlotSink
    from echelon.roles.source import Source
    from echelon.roles.update import Trainable
    from echelon.transport.act_listener import ActListener
    from echelon.transport.batcher import Batcher
    from echelon.world.node import Node


class Plan(Memory):
    """Creates the model and the shared memory of a run, and the objects of each role, on first use."""

    def __init__(self, context: Context, *, device: str = "cpu") -> None:
        super().__init__(context)
        self.device = device

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
            microbatches=config.learner.microbatches,
        )

    @cached_property
    def slots(self) -> TrajectorySchema | GradientSchema:
        """The layout of a slot of the ring."""
        return self.gradient_slots if self.context.train.algorithm.slots == "gradients" else self.schema

    @cached_property
    def gradient_slots(self) -> GradientSchema:
        return GradientSchema.of(self.context.train.actor, num_gradients(self.context.train), self.model)

    @property
    def weights_bytes(self) -> int:
        """The bytes of the published weights, of a built-in model or a user policy."""
        return self.user_layout.nbytes if self.context.train.algorithm.is_users else self.model.nbytes

    @property
    def user_layout(self) -> StateLayout:
        """The layout of a user policy's state on the weights board."""
        return StateLayout.from_json(json.loads(self.user_layout_file.read_text()))

    # Objects of the roles.

    def trainable(self, node: Node) -> Trainable:
        """Returns the object that the learner updates, publishes and checkpoints.

        `node` is the learner's node, through which several learners find each other.
        """
        context = self.context
        if context.train.algorithm.is_users:
            from echelon.roles.user_policy import UserTrainable

            assert context.user_objects is not None, (
                "the learner of a run with a user policy runs in the process that has the policy"
            )
            return UserTrainable(context.user_objects.policy, self.user_layout)
        from echelon.roles.learners import join_learners
        from echelon.roles.update import ModelTrainable

        config = context.train
        device = learner_device(config, self.model.parameters.numel(), context.index)
        if device == "cpu" and not context.shares_process and context.user_objects is None:  # not the caller's process
            keep_freed_memory()
        model = self.model if device == "cpu" else Plan(context, device=device).model
        return ModelTrainable(config, model, join_learners(context, node, model.device))

    def source(self, device: torch.device, peers: Peers = ALONE) -> Source:
        """Returns the source of batches for a learner that learns on `device`, together with `peers`."""
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

        return QueueSource(config, self.schema, self.ring(learner), device, learner, self.context.generation)

    def experience(self, station: Station) -> Experience:
        """Returns the object that receives the steps of the actor."""
        config, index = self.context.train, self.context.index
        if config.algorithm.experience == "replay" and self.context.is_at_head:
            from echelon.roles.replay_experience import ReplayExperience

            return ReplayExperience(self.replay, self.schema, index, station)
        if config.algorithm.slots == "gradients":
            from echelon.roles.gradient_experience import GradientExperience

            return GradientExperience(self, Plan(self.context).model, station)
        from echelon.roles.experience import SlotExperience

        return SlotExperience(self.ring(config.learner_of(index)), self.schema, self.stream, station)

    def slot_sink(self, station: Station) -> SlotSink:
        """Returns the object that receives the slots of other hosts."""
        if self.context.train.algorithm.experience == "replay":
            from echelon.roles.shard_sink import ShardSink

            return ShardSink(self, station)
        from echelon.roles.ring_sink import RingSink

        return RingSink(self.raw_ring(), self.slot_bytes)

    def acting(self, distribution: Distribution, seed: int) -> Acting:
        """Returns the object that chooses the actions of the actor."""
        config = self.context.train
        replays = config.algorithm.experience == "replay"
        env_steps = self.replay.tally_steps() if replays else lambda: 0
        if config.acting.mode == "central":
            return self._central_acting(self._exploring(distribution, seed, env_steps))
        return self.local_acting(seed, env_steps)

    def local_acting(self, seed: int, env_steps: Callable[[], int]) -> LocalActing:
        """Returns local acting, whose exploration follows the `env_steps` of the run."""
        from echelon.roles.actor import LocalActing

        config = self.context.train
        exploring = self._exploring(self.model.distribution, seed, env_steps)
        policy = Policy(
            self.model,
            with_action_values=exploring is not None and config.replay.prioritized,
            noise_correlation=config.algorithm.noise_correlation,
        )
        return LocalActing(policy, self.board(), config.actor.envs_per_actor, seed, exploring)

    def _exploring(self, distribution: Distribution, seed: int, env_steps: Callable[[], int]) -> Exploring | None:
        """Returns the exploration of the actor's groups, or None if only the policy itself explores."""
        from echelon.roles.acting import Exploring

        config, index = self.context.train, self.context.index
        if config.algorithm.experience != "replay":
            return None
        num_envs = config.actor.envs_per_actor
        total, size = config.actor.num_actors * num_envs, num_envs // num_groups(config)
        firsts = range(index * num_envs, (index + 1) * num_envs, size)
        explorers = [Explorer(config.algorithm, range(first, first + size), total) for first in firsts]
        return Exploring(explorers, env_steps, distribution, seed)

    def _central_acting(self, exploring: Exploring | None) -> Acting:
        from echelon.roles.central_acting import CentralActing, RemoteActing

        context = self.context
        if context.train.acting.transport == "shm":
            return CentralActing(self.act_board(), context.index, context.incarnation, exploring)
        layout = act_layout(context)
        file = self.act_address_file(layout.server_of(context.index))
        return RemoteActing(layout, file, context.index, context.incarnation, exploring)

    def act_listener(self, batcher: Batcher, report: Callable[[str], None]) -> ActListener | None:
        """Returns the TCP listener of an inference server, or None if its actors use shared memory.

        A restarted server listens at the address of its predecessor. Open the listener last: as soon as the address is
        announced, actors send requests.
        """
        acting = self.context.train.acting
        if acting.transport == "shm":
            return None
        from echelon.transport.act_listener import ActListener, Bounds

        file = self.act_address_file(batcher.server)
        address = file.read_text() if file.exists() else acting.address
        choices = [Bounds(one.leaf, one.low, one.high) for one in space_choices(self.context.spaces.observation)]
        listener = ActListener(batcher.board, batcher.server, address, choices, report)
        announce(file, listener.address)
        return listener
