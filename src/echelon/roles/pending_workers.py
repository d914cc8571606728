"""Gets the spaces from the first worker, before a run starts whose learner has no environment.

Waits for: a worker that arrives with suitable spaces. It is told to wait, and finds the gateway at the same address
when the run has started. A worker with unsuitable spaces is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from echelon import config_io
from echelon.algorithms.model import Model
from echelon.algorithms.value_networks import build_acting
from echelon.config import TrainConfig
from echelon.errors import ConfigError, Refused
from echelon.memory_check import check_fits, free_memory
from echelon.roles.gateway import check_release, check_user_policy
from echelon.roles.plan.replay import transition_layout
from echelon.roles.user_policy import StateLayout
from echelon.roles.worker_registry import HandshakeReport
from echelon.schema import Spaces
from echelon.transport.channel import Message
from echelon.transport.channel_server import Server
from echelon.transport.episode_wire import (
    EPISODES,
    TASK,
    FromWorker,
    Heartbeat,
    Leave,
    Register,
    Task,
    TaskRequest,
    UnknownWorker,
    Wait,
    from_worker,
    pack,
)
from echelon.transport.space_wire import received_spaces

MAX_BYTES = 1 << 20
LOOK_S = 1.0
COPIES = 4  # of the parameters in a learner: weights, gradients, and the two moments of the optimizer


def await_spaces(config: TrainConfig, own: StateLayout | None, report: Callable[[str], None]) -> tuple[Spaces, str]:
    """Waits for the first suitable worker. Returns its spaces, and the address at which it expects the gateway."""
    task = Task(config_io.to_json(config), own.to_json() if own is not None else None)
    server, handshakes = (
        Server("workers", config.workers.address, MAX_BYTES, report=report),
        HandshakeReport(report),
    )
    found: list[Spaces] = []

    def take(asked: Message) -> None:
        said = from_worker(asked)
        spaces = _spaces_in(said, config)
        if not isinstance(said, Heartbeat | Leave):
            answer = Wait() if spaces is not None else UnknownWorker()
            server.answer(asked, *pack(task if isinstance(said, TaskRequest) else answer))
        found.extend([spaces] if spaces is not None else [])

    server.serve(TASK, take)
    server.serve(EPISODES, take)
    try:
        report(f"waiting at {server.address.removeprefix('tcp://')} for the spaces of the first worker")
        while not found:
            if not server.take(1):
                server.sleep(LOOK_S)
                handshakes.look(server.num_refused_handshakes)
        return found[0], server.address
    finally:
        server.close()


def _spaces_in(message: FromWorker, config: TrainConfig) -> Spaces | None:
    """Returns the spaces if `message` is an arrival, else None. Raises Refused if the worker is not suitable."""
    if isinstance(message, TaskRequest | Register):
        check_release(message.release)
    if not isinstance(message, Register):
        return None
    check_user_policy(message, config)
    spaces = received_spaces(message.spaces)
    try:
        replay = transition_layout(config, spaces).nbytes * config.num_shards
        check_fits(replay, f"replay.capacity={config.replay.capacity}", free_memory(Path(config.shm_dir)))
        if not config.algorithm.is_users:
            _check_model(config, spaces)
            Model(config.network, spaces, config.algorithm, seed=config.seed)
    except ConfigError as error:
        raise Refused(f"the worker's environment does not fit: {error}") from error
    return spaces


def _check_model(config: TrainConfig, spaces: Spaces) -> None:
    """Raises ConfigError if the model does not fit into memory; allocates nothing."""
    if config.network.name == "auto":  # a factory of the user's may not run on the device "meta"
        with torch.device("meta"):
            network = build_acting(config.network, spaces, config.algorithm).network
        nbytes = COPIES * sum(parameter.nbytes for parameter in network.parameters())
        check_fits(nbytes, "the network", free_memory(), "the size of the observations")
