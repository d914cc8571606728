"""Layers of the networks: input normalization, one-hot and image encoders, and the recurrent core.

Shapes: T steps, B lanes, N rows, F features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

State = tuple[Tensor, ...]
NATURE_SIDE = 36  # pixels: the smallest side that fits the three convolutions of the Nature CNN


def initialize(layer: nn.Linear, gain: float) -> nn.Linear:
    """Initializes `layer` with orthogonal weights of `gain` and zero bias, and returns it."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Normalizer(nn.Module):
    """Normalizes features by their running mean and standard deviation, clipped to +-10.

    The statistics are buffers (`count` in float64), updated in place: they are published with the weights and can be in
    shared memory. Before the first update the layer only clips.
    """

    CLIP = 10.0
    SMALLEST_STD = 1e-4

    def __init__(self, size: int) -> None:
        super().__init__()
        self.count: Tensor
        self.mean: Tensor
        self.std: Tensor
        self.report: Callable[[Tensor, Tensor, Tensor], None] | None = None  # receives the moments in place of `merge`
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("std", torch.ones(size))

    def forward(self, x_NF: Tensor) -> Tensor:
        return ((x_NF - self.mean) / self.std).clamp(-self.CLIP, self.CLIP)

    def update(self, x_NF: Tensor, valid_N: Tensor) -> None:
        """Updates the statistics with the valid rows."""
        (self.report or self.merge)(*self.moments(x_NF, valid_N))

    @staticmethod
    @torch.no_grad()
    def moments(x_NF: Tensor, valid_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the number of valid rows, and the mean and variance of their features."""
        valid_N1 = valid_N.unsqueeze(-1)
        num_valid = valid_N.sum()
        divisor = num_valid.clamp(min=1)
        x_NF = torch.where(valid_N1, x_NF.double(), 0.0)
        batch_mean = x_NF.sum(0) / divisor
        return num_valid, batch_mean, torch.where(valid_N1, x_NF - batch_mean, 0.0).square().sum(0) / divisor

    @torch.no_grad()
    def merge(self, num_valid: Tensor, batch_mean: Tensor, batch_variance: Tensor) -> None:
        """Merges the moments of a set of rows (Chan et al., 1979); an empty set changes nothing."""
        self.count += num_valid
        weight = num_valid / self.count.clamp(min=1)
        shift = batch_mean - self.mean
        variance = self.std.double().square().lerp(batch_variance, weight) + shift.square() * (weight * (1.0 - weight))
        self.mean += shift * weight
        self.std.copy_(torch.where(num_valid > 0, variance.sqrt().clamp(min=self.SMALLEST_STD), self.std))


class OneHot(nn.Module):
    """Encodes discrete choices as concatenated one-hot vectors."""

    def __init__(self, num_choices: list[int], start: list[int]) -> None:
        super().__init__()
        self.out_size = sum(num_choices)
        begin = np.cumsum([0, *num_choices[:-1]]) - np.asarray(start)  # offset of each vector
        self.begin: Tensor
        self.register_buffer("begin", torch.as_tensor(begin, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        index = x.reshape(x.shape[0], -1).long() + self.begin
        return torch.zeros(x.shape[0], self.out_size, device=x.device).scatter_(1, index, 1.0)


class Image(nn.Module):
    """Image encoder: the Nature CNN (Mnih et al., 2015), or two 3x3 convolutions for images too small for it.

    Channels come first, or last if `channels_last(shape)`. A shape of two dimensions is a greyscale image.
    """

    def __init__(self, shape: tuple[int, ...], scale: float) -> None:
        super().__init__()
        self.is_grey = len(shape) == 2
        shape = (1, *shape) if self.is_grey else shape
        self.channels_last = channels_last(shape)
        channels, height, width = (shape[2], shape[0], shape[1]) if self.channels_last else shape
        self.scale = scale
        if min(height, width) >= NATURE_SIDE:
            convolutions = [nn.Conv2d(channels, 32, 8, 4), nn.Conv2d(32, 64, 4, 2), nn.Conv2d(64, 64, 3, 1)]
            self.out_size = 512
        else:
            convolutions = [nn.Conv2d(channels, 32, 3, 1, padding=1), nn.Conv2d(32, 64, 3, 2, padding=1)]
            self.out_size = 256
        for convolution in convolutions:
            nn.init.orthogonal_(convolution.weight, math.sqrt(2.0))
            assert convolution.bias is not None
            nn.init.zeros_(convolution.bias)
            height, width = _side(convolution, height), _side(convolution, width)
        self.convolutions = nn.ModuleList(convolutions)
        self.linear = initialize(nn.Linear(64 * height * width, self.out_size), math.sqrt(2.0))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        if self.scale != 1.0:
            x = x * self.scale
        if self.is_grey:
            x = x.unsqueeze(1)
        if self.channels_last:
            x = x.permute(0, 3, 1, 2)
        for convolution in self.convolutions:
            x = torch.relu(convolution(x))
        return torch.relu(self.linear(x.flatten(1)))


def _side(convolution: nn.Conv2d, side: int) -> int:
    """Returns the output size of `convolution` for an input of `side` pixels."""
    padding = int(convolution.padding[0])
    return (side + 2 * padding - convolution.kernel_size[0]) // convolution.stride[0] + 1


def channels_last(shape: tuple[int, ...]) -> bool:
    """Returns whether a 3-D image shape is (height, width, channels).

    It is if the last dimension is smaller than the first, and either is 1, 3 or 4 or follows a square.
    """
    return shape[2] < shape[0] and (shape[2] in (1, 3, 4) or shape[0] == shape[1])


class Core(nn.Module):
    """A recurrent layer (LSTM or GRU) whose state is zeroed at the start of every episode; always in float32."""

    def __init__(self, kind: str, in_size: int, size: int) -> None:
        super().__init__()
        self.cell: nn.LSTMCell | nn.GRUCell = (nn.LSTMCell if kind == "lstm" else nn.GRUCell)(in_size, size)
        self.state_shapes = ((size,),) * (2 if kind == "lstm" else 1)
        for name, parameter in self.cell.named_parameters():
            if name.startswith("weight"):
                nn.init.orthogonal_(parameter)
            else:
                nn.init.zeros_(parameter)

    def step(self, x: Tensor, state: State, first: Tensor) -> State:
        """Computes one step: x (B, F), first (B). The output is the first leaf of the new state."""
        restart = first.unsqueeze(-1)
        with torch.autocast(x.device.type, enabled=False):
            if isinstance(self.cell, nn.LSTMCell):
                hidden, cell = state
                kept = (hidden.masked_fill(restart, 0.0), cell.masked_fill(restart, 0.0))
                return tuple(self.cell(x.float(), kept))
            return (self.cell(x.float(), state[0].masked_fill(restart, 0.0)),)

    def forward(self, x_TBF: Tensor, state: State, first_TB: Tensor) -> tuple[Tensor, State]:
        """Computes a sequence with resets: it is cut where episodes begin, and one fused call computes all pieces."""
        num_steps, num_lanes, features = x_TBF.shape
        if num_lanes == 0:  # one of several learners can have an empty part of a minibatch
            return x_TBF.new_zeros(num_steps, 0, self.cell.hidden_size), state
        plan = _cut(first_TB)
        rows = x_TBF.float().transpose(0, 1).reshape(num_lanes * num_steps, features)
        # The first piece of a lane continues with the lane's state; every other piece starts an episode, from zero.
        kept = [leaf.float().masked_fill(first_TB[0].unsqueeze(-1), 0.0) for leaf in state]
        begin = [leaf[plan.lane].masked_fill(plan.restarts, 0.0).unsqueeze(0) for leaf in kept]
        # params, has_biases, num_layers, dropout, train (keeps what the backward pass needs), bidirectional
        settings = (tuple(self.cell.parameters()), True, 1, 0.0, torch.is_grad_enabled(), False)
        with torch.autocast(x_TBF.device.type, enabled=False):
            if isinstance(self.cell, nn.LSTMCell):
                packed, *after = torch.lstm(rows[plan.rows], plan.batch_sizes, begin, *settings)
            else:
                packed, *after = torch.gru(rows[plan.rows], plan.batch_sizes, begin[0], *settings)
        output = torch.empty_like(packed).index_copy(0, plan.rows, packed)
        sequence = output.view(num_lanes, num_steps, -1).transpose(0, 1)
        return sequence, tuple(leaf.squeeze(0)[plan.last] for leaf in after)


@dataclass(slots=True)
class Pieces:
    """Sequences with resets cut into pieces, longest first, in the packed order of torch's recurrent layers."""

    rows: Tensor  # (T * B,) for every packed step its row in lane-major order
    batch_sizes: Tensor  # (longest,) number of pieces that reach each step; on the CPU
    lane: Tensor  # (pieces,) the lane of each piece
    restarts: Tensor  # (pieces, 1) whether the piece starts after the first step of its lane
    last: Tensor  # (B,) index of the last piece of every lane


def _cut(first_TB: Tensor) -> Pieces:
    num_steps, num_lanes = first_TB.shape
    device = first_TB.device
    starts_BT = first_TB.t().clone()
    starts_BT[:, 0] = True
    begin = starts_BT.reshape(-1).nonzero().squeeze(-1)
    length = torch.diff(begin, append=begin.new_tensor([num_lanes * num_steps]))
    length, order = length.sort(descending=True, stable=True)
    begin = begin[order]
    step = torch.arange(int(length[0]), device=device).unsqueeze(-1)
    going = step < length  # (longest, pieces)
    lane = begin // num_steps
    rank = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=device))
    return Pieces(
        rows=(begin + step)[going],
        batch_sizes=going.sum(1).cpu(),
        lane=lane,
        restarts=(begin % num_steps != 0).unsqueeze(-1),
        last=rank[starts_BT.sum(1).cumsum(0) - 1],
    )
