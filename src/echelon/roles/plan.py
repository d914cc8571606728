"""How the parts of one run fit together: the model, the schema, and the shared memory, alike in every process."""

from __future__ import annotations

from echelon.algorithms.model import Model
from echelon.config import TrainConfig
from echelon.errors import ConfigError
from echelon.roles.context import Context
from echelon.schema import TrajectorySchema
from echelon.transport.shared_memory import SlotRing, WeightsBoard


def window(config: TrainConfig) -> int:
    """Trajectories an actor may run ahead of the learner, which is also its number of slots.

    A bound on the lag decides it; without one it is `actor.slots`, or what it takes to fill a batch.
    """
    actor, lag, batch = config.actor, config.learner.max_lag, config.batch_trajectories
    if lag is None:
        return max(actor.slots, -(-batch // actor.num_actors) + 1)
    if batch % actor.num_actors:
        raise ConfigError(
            f"learner.batch={batch} is not a multiple of the {actor.num_actors} actors, but learner.max_lag={lag} "
            "needs every actor to bring the same share. Use a multiple, or 0 for one trajectory each."
        )
    return (lag + 1) * batch // actor.num_actors


class Plan:
    """The model and the memory that the roles of a run share; a part is made when asked for."""

    def __init__(self, context: Context, *, device: str = "cpu") -> None:
        config = context.train
        self.context, self.schema = context, context.schema
        self.model = Model(
            config.network,
            context.spaces,
            seed=config.seed,
            device=device,
            precision=config.learner.precision if device != "cpu" else "float32",
            compile=config.learner.compile and device != "cpu",
        )

    def ring(self) -> SlotRing:
        train = self.context.train
        return SlotRing(self.context.session, self.schema, train.actor.num_actors, window(train))

    def board(self) -> WeightsBoard:
        return WeightsBoard(self.context.session, self.model.nbytes)


def shared_bytes(config: TrainConfig, schema: TrajectorySchema, model: Model) -> int:
    """What the run needs in shared memory."""
    ring = SlotRing.size(schema, config.actor.num_actors, window(config))
    return ring + WeightsBoard.size(model.nbytes)
