"""The inference server: its replies equal a direct forward pass, for all seats and after deaths of the server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from echelon.algorithms.model import Model
from echelon.config import NetworkConfig
from echelon.networks import NetworkOutput
from echelon.schema import Spaces, action_leaf, flatten, space_leaves, unflatten
from echelon.servers.inference import InferenceServer, PolicyAnswerer
from echelon.transport.act_board import ActBoard, ActLayout, Seat
from echelon.transport.batcher import Batcher, BatchRule, Round
from echelon.transport.shared_memory import WeightsBoard

Array = np.ndarray[Any, Any]
K = 3  # environments of a seat
UNTOUCHED = -7

VECTOR = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
TREE = gym.spaces.Dict(
    {
        "far": gym.spaces.Discrete(3, start=5),
        "near": gym.spaces.Tuple((gym.spaces.Box(0, 255, (2, 2), np.uint8), VECTOR)),
        "action_mask": gym.spaces.MultiBinary(3),
    }
)
DISCRETE = gym.spaces.Discrete(3)
FORCE = gym.spaces.Box(-2.0, 2.0, (2,), np.float32)


class Scene:
    """A board with seats, and the model that answers there."""

    def __init__(self, folder: Path, observation: gym.Space[Any], action: gym.Space[Any], **network: Any) -> None:
        self.spaces = Spaces(observation, action)
        self.config = NetworkConfig(hidden=(8,), **network)
        self.source = self.model()
        layout = ActLayout(
            observation=tuple(space_leaves(observation)),
            action=action_leaf(action),
            state_shapes=self.source.network.state_shapes,
            rows=K,
            num_clients=4,
        )
        self.board = ActBoard(folder, layout)
        self.weights = WeightsBoard(folder, self.source.nbytes)
        self.weights.publish(self.source.parts(), 1)
        self.seats = [Seat(self.board, client) for client in range(4)]
        self.random = np.random.default_rng(0)

    def model(self) -> Model:
        return Model(self.config, self.spaces, seed=3)

    def server(self, *, max_wait_us: float = 0.0, seed: int = 0) -> InferenceServer:
        """Creates a server as a new process does."""
        answerer = PolicyAnswerer(self.model(), self.board, self.weights, seed)
        return InferenceServer(Batcher(self.board, 0, BatchRule(max_wait_us=max_wait_us)), answerer)

    def ask(self, clients: Sequence[int], first: bool | None = None) -> None:
        """Makes `clients` send a request with a new observation."""
        self.spaces.observation.seed(int(self.random.integers(1 << 31)))
        for client in clients:
            seat = self.seats[client]
            for k in range(K):
                tree = self.spaces.observation.sample()
                for target, value in zip(seat.observation, flatten(self.spaces.observation, tree), strict=True):
                    target[k] = value
            seat.first[:] = self.random.random(K) < 0.3 if first is None else first
            seat.ask()

    def expected(self, client: int, state: tuple[torch.Tensor, ...]) -> NetworkOutput:
        """Returns the output of the newest weights for the observation of `client`."""
        seat = self.seats[client]
        leaves = iter([torch.from_numpy(leaf.copy())[None] for leaf in seat.observation])
        observation = unflatten(self.spaces.observation, leaves)
        with torch.no_grad():
            output: NetworkOutput = self.source.network(observation, state, torch.from_numpy(seat.first.copy())[None])
        return output

    def check(self, client: int, state: tuple[torch.Tensor, ...] = ()) -> tuple[torch.Tensor, ...]:
        """Compares the reply of `client` with a direct forward pass; returns the state after it."""
        seat, output = self.seats[client], self.expected(client, state)
        np.testing.assert_allclose(seat.value, output.value[0], rtol=1e-4, atol=1e-5)
        mask = None
        if isinstance(self.spaces.observation, gym.spaces.Dict):
            names = [leaf.path for leaf in self.board.layout.observation]
            mask = torch.from_numpy(seat.observation[names.index("observation.action_mask")].copy())
            allowed = mask.gather(1, torch.from_numpy(seat.action.copy())[:, None])[:, 0]
            assert (allowed.bool() | ~mask.bool().any(1)).all(), "a forbidden action was chosen"
        action = torch.from_numpy(seat.action.copy())
        log_prob = self.source.distribution.log_prob(output.params[0], action, mask)
        np.testing.assert_allclose(seat.log_prob, log_prob, rtol=1e-4, atol=1e-5)
        return output.state


@pytest.fixture
def make_scene(tmp_path: Path) -> Callable[..., Scene]:
    def make(observation: gym.Space[Any] = VECTOR, action: gym.Space[Any] = DISCRETE, **network: Any) -> Scene:
        return Scene(tmp_path, observation, action, **network)

    return make


@pytest.mark.parametrize("action", [DISCRETE, FORCE], ids=["discrete", "continuous"])
@pytest.mark.parametrize("clients", [[0, 1, 2, 3], [1, 2], [3], [0, 3], [0, 1, 3]])
def test_an_answer_is_that_of_a_direct_forward_pass(
    make_scene: Callable[..., Scene], action: gym.Space[Any], clients: list[int]
) -> None:
    scene = make_scene(VECTOR, action)
    server = scene.server()
    scene.ask([0, 1, 2, 3])  # from here on every seat has sent a request
    assert server.step(0.0)
    scene.ask(clients)
    assert server.step(0.0) and not server.step(0.0)
    for client in clients:
        assert scene.seats[client].answered and scene.seats[client].version == 1
        scene.check(client)
    assert (server.num_requests, server.num_rounds) == (4 + len(clients), 2)
    assert server.num_rows == K * server.num_requests and server.forward_s > 0.0


@pytest.mark.parametrize("clients", [[0, 1, 2, 3], [0, 3], [1, 3]])
def test_trees_masks_and_seats_that_nobody_ever_asked_from(
    make_scene: Callable[..., Scene], clients: list[int]
) -> None:
    scene = make_scene(TREE)  # its choices start at 5: an empty seat holds a 0, which is invalid
    server = scene.server()
    for _ in range(3):
        scene.ask(clients)
        assert server.step(0.0)
        for client in clients:
            scene.check(client)


@pytest.mark.parametrize("clients", [[0, 1, 3], [0, 3], [1]])
@pytest.mark.parametrize("core", ["none", "lstm"])
def test_who_did_not_ask_keeps_its_reply(make_scene: Callable[..., Scene], clients: list[int], core: str) -> None:
    scene = make_scene(core=core, core_size=5)
    server, board = scene.server(), scene.board
    scene.ask([0, 1, 2, 3])
    assert server.step(0.0)
    for array in (board.action, board.log_prob, board.value):
        array[...] = UNTOUCHED  # the other clients may be reading these right now
    states = [leaf.copy() for leaf in board.state]
    scene.ask(clients)
    assert server.step(0.0)
    others = [client for client in range(4) if client not in clients]
    for array in (board.action, board.log_prob, board.value):
        assert (array[others] == UNTOUCHED).all() and (array[clients] != UNTOUCHED).all()
    for leaf, before in zip(board.state, states, strict=True):
        np.testing.assert_array_equal(leaf[:, others], before[:, others])


@pytest.mark.parametrize("core", ["lstm", "gru"])
def test_every_seat_has_its_own_memory_whoever_serves_it(make_scene: Callable[..., Scene], core: str) -> None:
    """Seats send requests at different times to a server that dies repeatedly, once in the middle of a round."""
    scene = make_scene(core=core, core_size=5)
    server = scene.server()
    network = scene.source.network
    states = [network.initial_state(K, "cpu") for _ in range(4)]
    for turn in range(30):
        clients = np.flatnonzero(scene.random.random(4) < 0.6).tolist() or [turn % 4]
        scene.ask(clients)
        if turn % 5 == 3:
            round = server.batcher.next(0.0)
            assert round is not None
            server.batcher.claim(round)
            server.answerer.answer(round)  # and it dies before the round is settled
        if turn % 5 >= 3:
            server = scene.server(seed=turn)
        assert server.step(0.0)
        for client in clients:
            for stored, before in zip(scene.seats[client].state_before(), states[client], strict=True):
                np.testing.assert_allclose(stored, before, rtol=1e-4, atol=1e-5)
            states[client] = scene.check(client, states[client])


def test_a_seat_that_changed_hands_starts_clean(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(core="lstm", core_size=5)
    server = scene.server()
    for _ in range(3):
        scene.ask([0, 1], first=False)
        assert server.step(0.0)
    scene.seats[1] = Seat(scene.board, 1, incarnation=1)
    scene.ask([0, 1], first=False)
    assert server.step(0.0)
    assert all(leaf.any() for leaf in scene.seats[0].state_before())
    assert not any(leaf.any() for leaf in scene.seats[1].state_before())
    scene.check(1, scene.source.network.initial_state(K, "cpu"))


def test_weights_are_taken_over_between_rounds_and_stamp_the_answers(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    server = scene.server()
    scene.ask([0, 1])
    assert server.step(0.0)
    scene.source.network.get_parameter("policy_head.bias").data[2] = 100.0  # from now on action 2 is certain
    scene.ask([0, 2])
    scene.weights.publish(scene.source.parts(), 5)  # after the requests were made, before they are gathered
    assert server.step(0.0)
    assert [scene.seats[client].version for client in range(3)] == [5, 1, 5]
    assert (scene.seats[0].action == 2).all() and (scene.seats[2].action == 2).all()
    scene.check(0)


def test_the_same_seed_gives_the_same_answers(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    scene.ask([0, 1, 2, 3])
    round = scene.server().batcher.next(0.0)
    assert round is not None
    found = []
    for seed in (1, 1, 2):
        PolicyAnswerer(scene.model(), scene.board, scene.weights, seed).answer(round)
        found.append(scene.board.log_prob.copy())
    np.testing.assert_array_equal(found[0], found[1])
    assert (found[0] != found[2]).any()


def test_values_are_left_out_where_nobody_reads_them(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    scene.board.value[...] = UNTOUCHED
    scene.ask([0])
    round = scene.server().batcher.next(0.0)
    assert round is not None
    PolicyAnswerer(scene.model(), scene.board, scene.weights, 0, with_value=False).answer(round)
    assert (scene.board.value == UNTOUCHED).all()


class Hatch:
    """A listener that records its calls."""

    def __init__(self) -> None:
        self.replied: list[Round] = []

    def next(self, batcher: Batcher, timeout_s: float) -> Round | None:
        return batcher.next(timeout_s)

    def reply(self, round: Round) -> None:
        self.replied.append(round)


def test_a_door_is_asked_for_rounds_and_told_when_they_are_settled(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    hatch, plain = Hatch(), scene.server()
    server = InferenceServer(plain.batcher, plain.answerer, hatch)
    assert not server.step(0.0) and not hatch.replied
    scene.ask([1, 2])
    assert server.step(0.0)
    assert [round.seats.tolist() for round in hatch.replied] == [[1, 2]] and scene.seats[1].answered
