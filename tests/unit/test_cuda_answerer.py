"""Replies on a GPU: how rounds are split and copied (no GPU needed), and the replies themselves (needs a GPU)."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, cast

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from echelon.algorithms.model import Model, Policy
from echelon.config import NetworkConfig
from echelon.layout import Leaf
from echelon.schema import Spaces, action_leaf, space_leaves
from echelon.servers.cuda import CudaAnswerer, CudaServer, Flight, cut
from echelon.servers.gpu_pipeline import MAX_STRETCHES, bucket_of, stretches_of
from echelon.transport.act_board import ActBoard, ActLayout, Seat
from echelon.transport.batcher import Batcher, BatchRule, Round
from echelon.transport.shared_memory import WeightsBoard

Array = np.ndarray[Any, Any]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="answers on a GPU, and torch sees none here")
NUM_ACTIONS = 5
POISON = -7
TF32 = 5e-3  # tolerance for TF32 rounding of log-probabilities and values near 1

seat_sets = st.sets(st.integers(0, 63), min_size=1).map(lambda seats: np.array(sorted(seats)))


class TestCutting:
    @given(seat_sets)
    def test_stretches_hold_the_seats_in_order_and_nothing_else(self, seats: Array) -> None:
        stretches = stretches_of(seats)
        assert [seat for stretch in stretches for seat in range(stretch.start, stretch.stop)] == seats.tolist()
        assert all(a.stop < b.start for a, b in itertools.pairwise(stretches))

    @given(st.integers(1, 300), st.integers(0, 300))
    def test_a_bucket_holds_what_was_asked_and_is_less_than_twice_as_large(self, asked: int, silent: int) -> None:
        bucket = bucket_of(asked, asked + silent)
        assert asked <= bucket <= asked + silent
        assert bucket < 2 * asked

    def test_there_are_few_buckets(self) -> None:
        assert {bucket_of(n, 100) for n in range(1, 101)} == {1, 2, 4, 8, 16, 32, 64, 100}

    @given(seat_sets)
    def test_a_round_is_cut_into_its_groups(self, seats: Array) -> None:
        groups = [range(0, 10), range(10, 30), range(40, 64)]  # another server has seats between
        seats = seats[(seats < 30) | (seats >= 40)]
        if len(seats) == 0:
            return
        parts = cut(Round(seats, seats + 100, 5), groups)
        assert np.concatenate([part.seats for part in parts.values()]).tolist() == seats.tolist()
        for group, part in parts.items():
            assert all(seat in groups[group] for seat in part.seats.tolist())
            assert (part.asked == part.seats + 100).all() and part.first_ns == 5


class SlowPipelines:
    """Pipelines without a GPU that land on command: every reply adds 1 to the recurrent state."""

    def __init__(self, board: ActBoard, groups: list[range]) -> None:
        self.board, self.groups = board, groups
        self.busy: set[int] = set()
        self.before: list[float] = []  # the state that each launch started from

    def query(self) -> bool:
        return False

    @property
    def done(self) -> SlowPipelines:
        return self

    def free(self, round: Round) -> bool:
        return self.busy.isdisjoint(cut(round, self.groups))

    def launch(self, round: Round) -> list[Flight]:
        assert self.free(round), "a group has at most one round in progress"
        parts = cut(round, self.groups)
        self.busy |= set(parts)
        for part in parts.values():
            self.before += self.board.state[0][(part.asked - 1) % 2, part.seats].flatten().tolist()
        return [Flight(cast(Any, self), part, 1) for part in parts.values()]

    def land(self, flight: Flight) -> None:
        seats, asked = flight.round.seats, flight.round.asked
        self.busy -= set(cut(flight.round, self.groups))
        self.board.state[0][asked % 2, seats] = self.board.state[0][(asked - 1) % 2, seats] + 1.0

    def close(self) -> None:
        pass


class TestServing:
    @pytest.fixture
    def board(self, shm_dir: Path) -> ActBoard:
        number = np.dtype(np.float32)
        leaf = Leaf("observation", (1,), number)
        return ActBoard(shm_dir, ActLayout((leaf,), Leaf("action", (), number), ((1,),), num_clients=1, num_groups=2))

    def serve(self, board: ActBoard) -> tuple[CudaServer, SlowPipelines]:
        batcher = Batcher(board, 0, BatchRule(max_wait_us=0.0))
        pipelines = SlowPipelines(board, batcher.groups)
        return CudaServer(batcher, cast(Any, pipelines)), pipelines

    def test_a_group_is_launched_while_the_other_is_under_way(self, board: ActBoard) -> None:
        server, pipelines = self.serve(board)
        assert not server.step(0.0)
        seats = [Seat(board, 0, group) for group in range(2)]
        for group, seat in enumerate(seats):
            seat.ask()
            assert server.step(0.0) and pipelines.busy == set(range(group + 1))
        assert not any(seat.answered for seat in seats) and server.num_rounds == 0

    @pytest.mark.parametrize("num_before", [0, 1])
    def test_a_seat_that_changes_hands_while_it_is_under_way_starts_clean(
        self, board: ActBoard, num_before: int
    ) -> None:
        """The request of the previous client lands after the new client has sent its own."""
        server, pipelines = self.serve(board)
        old = Seat(board, 0)
        for _ in range(num_before + 1):
            old.ask()
            assert server.step(0.0)
        new = Seat(board, 0, incarnation=1)
        new.ask()
        assert server.step(0.0)
        assert pipelines.before == [*range(num_before + 1), 0.0]
        new.ask()
        assert server.step(0.0) and pipelines.before[-1] == 1.0
        assert new.state_before()[0].tolist() == [[1.0]]


class Syncing(nn.Module):
    """A user's network that reads tensor values on the CPU, which no graph can capture."""

    def __init__(self, spaces: Spaces, num_params: int) -> None:
        super().__init__()
        self.layer = nn.Linear(6, num_params + 1)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.layer(observation)
        if float(output.sum()) > 1e9:
            output = output * 2
        return output[..., :-1], output[..., -1]


class Scene:
    """A board with seats, a model on the GPU that answers, and the same model on the CPU."""

    def __init__(
        self,
        folder: Path,
        network: NetworkConfig,
        *,
        space: gym.Space[Any] | None = None,
        action: gym.Space[Any] | None = None,
        num_clients: int = 4,
        rows: int = 3,
        **options: Any,
    ) -> None:
        self.space = space or gym.spaces.Box(-1.0, 1.0, (6,), np.float32)
        spaces = Spaces(self.space, action or gym.spaces.Discrete(NUM_ACTIONS))
        self.here, there = Model(network, spaces, seed=1), Model(network, spaces, seed=1, device="cuda")
        noise = {"noise_correlation": options.get("noise_correlation", 0.0)}
        self.layout = ActLayout(
            tuple(space_leaves(self.space)),
            action_leaf(spaces.action),
            tuple(leaf.shape[1:] for leaf in Policy(self.here, **noise).initial_state(1)),
            rows=rows,
            num_clients=num_clients,
            num_groups=2,
        )
        self.board = ActBoard(folder, self.layout)
        self.weights = WeightsBoard(folder, self.here.nbytes)
        self.publish(1.0)
        self.told: list[str] = []
        groups = [self.layout.seats_of(0, group) for group in range(2)]
        self.answerer = CudaAnswerer(
            there, self.board, self.weights, 3, groups=groups, report=self.told.append, **options
        )
        self.space.seed(0)

    def publish(self, factor: float) -> None:
        with torch.no_grad():
            self.here.parameters.mul_(factor)
        self.weights.publish(self.here.parts(), self.weights.version + 1)

    def ask(self, seats: list[int]) -> Round:
        """Writes new observations for `seats` and invalid values to all replies; returns the round."""
        board, index = self.board, np.array(seats)
        for seat in seats:
            for row in range(self.layout.rows):
                board.observation[0][seat, row] = self.space.sample()
        board.action[...] = board.log_prob[...] = board.value[...] = POISON
        board.asked[index] += 1
        return Round(index, board.asked[index], 0)

    def check(self, round: Round, tolerance: float = TF32) -> None:
        """Checks that the replies of the round's seats are the network's, and that no other reply was written."""
        board, seats = self.board, round.seats
        observation = torch.from_numpy(board.observation[0][seats]).flatten(0, 1)
        state = self.here.network.initial_state(len(observation), "cpu")
        first = torch.ones(len(observation), dtype=torch.bool)
        with torch.no_grad():
            output = self.here.network.act(observation, state, first, with_value=True)
        assert output.value is not None
        action = torch.from_numpy(board.action[seats]).flatten()
        assert ((action >= 0) & (action < NUM_ACTIONS)).all()
        log_prob = self.here.distribution.log_prob(output.params, action)
        np.testing.assert_allclose(board.log_prob[seats].reshape(-1), log_prob.numpy(), atol=tolerance)
        np.testing.assert_allclose(board.value[seats].reshape(-1), output.value.numpy(), atol=tolerance)
        others = np.setdiff1d(np.arange(self.layout.num_seats), seats)
        for leaf in (board.action, board.log_prob, board.value):
            assert (leaf[others] == POISON).all()


@needs_gpu
class TestCudaAnswerer:
    @pytest.mark.parametrize("seats", [[0, 1, 2, 3], [4, 5], [2], [0, 2, 3], [1, 3, 4, 5, 6, 7], list(range(8))])
    def test_replies_are_the_networks_and_only_of_those_who_asked(self, shm_dir: Path, seats: list[int]) -> None:
        scene = Scene(shm_dir, NetworkConfig())
        for _ in range(3):  # the first captures
            round = scene.ask(seats)
            assert scene.answerer.answer(round) == 1
            scene.check(round)
        scene.answerer.close()
        assert not scene.told

    def test_a_round_in_many_pieces_is_gathered(self, shm_dir: Path) -> None:
        scene = Scene(shm_dir, NetworkConfig(), num_clients=4 * MAX_STRETCHES)
        round = scene.ask(list(range(0, 4 * MAX_STRETCHES, 2)))
        scene.answerer.answer(round)
        scene.check(round)
        scene.answerer.close()

    def test_images_in_bfloat16_are_close(self, shm_dir: Path) -> None:
        space = gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)
        scene = Scene(shm_dir, NetworkConfig(), space=space, precision="bfloat16")
        for _ in range(2):
            round = scene.ask([0, 1, 2, 3])
            scene.answerer.answer(round)
            scene.check(round, tolerance=0.05)
        scene.answerer.close()

    def test_rows_that_nobody_asked_for_are_readable(self, shm_dir: Path) -> None:
        scene = Scene(shm_dir, NetworkConfig(), space=gym.spaces.Discrete(3, start=100), num_clients=5)
        round = scene.ask([0, 2, 4])  # a bucket of four
        scene.answerer.answer(round)
        scene.check(round)
        scene.answerer.close()

    def test_weights_are_taken_over_between_rounds(self, shm_dir: Path) -> None:
        scene = Scene(shm_dir, NetworkConfig())
        for version in (1, 2, 3):
            round = scene.ask([0, 1, 2, 3, 4])
            assert scene.answerer.answer(round) == version
            scene.check(round)
            scene.publish(1.5)
        scene.answerer.close()

    def test_a_round_under_way_keeps_its_weights(self, shm_dir: Path) -> None:
        scene = Scene(shm_dir, NetworkConfig())
        scene.answerer.answer(scene.ask(list(range(8))))
        first, second = scene.ask([0, 1]), Round(np.array([4, 5]), np.array([2, 2]), 0)
        (flight,) = scene.answerer.launch(first)
        before = {name: tensor.clone() for name, tensor in scene.here.weights().items()}
        scene.publish(3.0)
        assert scene.answerer.free(second) and not scene.answerer.free(first)
        (other,) = scene.answerer.launch(second)
        assert (flight.version, other.version) == (1, 2)
        scene.answerer.land(flight)
        scene.here.load_weights(before, "before")
        scene.check(first)
        scene.answerer.land(other)
        scene.answerer.close()

    def test_actions_are_drawn_anew_each_time_and_again_with_the_same_seed(self, shm_dir: Path) -> None:
        drawn: list[list[Array]] = []
        for name in ("a", "b"):
            (shm_dir / name).mkdir()
            scene = Scene(shm_dir / name, NetworkConfig(), rows=512)
            round = scene.ask([0, 1, 2, 3])
            actions = []
            for _ in range(4):
                scene.answerer.answer(round)
                actions.append(scene.board.action[:4].copy())
            scene.answerer.close()
            drawn.append(actions)
            assert all((a != b).any() for a, b in itertools.pairwise(actions))
        counts = np.bincount(np.concatenate(drawn[0]).reshape(-1), minlength=NUM_ACTIONS)
        assert counts.min() > 0.7 * counts.mean()  # a fresh policy is close to uniform
        for a, b in zip(*drawn, strict=True):
            assert (a == b).all()

    def test_recurrent_state_goes_through_the_board(self, shm_dir: Path) -> None:
        scene = Scene(shm_dir, NetworkConfig(core="lstm", core_size=16))
        board, seats = scene.board, [0, 1, 2, 3]
        state = scene.here.network.initial_state(len(seats) * scene.layout.rows, "cpu")
        for step in range(4):
            round = scene.ask(seats)
            board.first[...] = step == 2
            scene.answerer.answer(round)
            observation = torch.from_numpy(board.observation[0][seats]).flatten(0, 1)
            with torch.no_grad():
                output = scene.here.network.act(observation, state, torch.from_numpy(board.first[seats]).flatten())
            state = output.state
            for leaf, expected in zip(board.state, state, strict=True):
                found = leaf[int(round.asked[0]) % 2, seats].reshape(expected.shape)
                np.testing.assert_allclose(found, expected.numpy(), atol=TF32)
        scene.answerer.close()

    def test_correlated_noise_goes_through_the_board(self, shm_dir: Path) -> None:
        action = gym.spaces.Box(-1.0, 1.0, (2,))
        scene = Scene(shm_dir, NetworkConfig(), action=action, rows=512, noise_correlation=0.9)
        seats, noises = [0, 1, 2, 3], []
        for _ in range(3):
            round = scene.ask(seats)
            scene.answerer.answer(round)
            noises.append(scene.board.state[-1][int(round.asked[0]) % 2, seats].copy())
        products = [float((noises[0] * noise).mean()) for noise in noises]
        assert products == pytest.approx([1.0, 0.9, 0.81], abs=0.1)
        scene.answerer.close()
        assert not scene.told

    @pytest.mark.parametrize("core", ["none", "lstm"])
    def test_values_are_left_out_where_nobody_reads_them(self, shm_dir: Path, core: str) -> None:
        scene = Scene(shm_dir, NetworkConfig(core=core, core_size=16), with_value=False)
        for seats in ([0, 1, 2, 3], [1, 4]):
            round = scene.ask(seats)
            scene.answerer.answer(round)
            assert (scene.board.value == POISON).all()
            assert (scene.board.action[seats] != POISON).all() and (scene.board.log_prob[seats] != POISON).all()
            assert all(leaf[round.asked % 2, seats].any() for leaf in scene.board.state)
        scene.answerer.close()

    def test_a_network_that_cannot_be_captured_is_called_plainly_and_that_is_told_once(self, shm_dir: Path) -> None:
        scene = Scene(shm_dir, NetworkConfig(name=f"{__name__}:Syncing"))
        for seats in ([0, 1, 2, 3], [0, 1], [4, 5, 6, 7], list(range(8))):
            round = scene.ask(seats)
            scene.answerer.answer(round)
            scene.check(round)
        scene.answerer.close()
        assert len(scene.told) == 1 and "called without one" in scene.told[0]


@needs_gpu
def test_a_server_answers_every_group_while_others_are_under_way(shm_dir: Path) -> None:
    scene = Scene(shm_dir, NetworkConfig())
    seats = [Seat(scene.board, client, group) for group in range(2) for client in range(4)]
    server = CudaServer(Batcher(scene.board, 0, BatchRule(max_wait_us=0.0)), scene.answerer)
    order = np.random.default_rng(0)
    num_asked = 0
    for _ in range(50):
        for index in order.permutation(len(seats))[:5]:
            seat = seats[index]
            while not seat.answered:
                server.step(0.0)
            seat.observation[0][...] = order.random(seat.observation[0].shape, np.float32)
            seat.ask()
            num_asked += 1
            server.step(0.0)
    while not all(seat.answered for seat in seats):
        server.step(0.0)
    assert server.num_requests == num_asked
    scene.check(Round(np.arange(8), scene.board.asked.copy(), 0))
    scene.answerer.close()
