"""Layers that some networks have: normalised, one-hot and image inputs, a recurrent core.

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
NATURE_SIDE = 36  # pixels: the smallest side that the three convolutions of the Nature CNN can read


def initialize(layer: nn.Linear, gain: float) -> nn.Linear:
    """`layer` with orthogonal weights of `gain` and zero bias."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Normalizer(nn.Module):
    """Shifts and scales features by their running mean and standard deviation, clipped to +-10.

    The statistics are buffers (`count` in float64), changed in place: they travel with the weights and follow them into
    shared memory. Before the first update nothing is changed but the clip.
    """

    CLIP = 10.0
    SMALLEST_STD = 1e-4

    def __init__(self, size: int) -> None:
        super().__init__()
        self.count: Tensor
        self.mean: Tensor
        self.std: Tensor
        self.report: Callable[[Tensor, Tensor, Tensor], None] | None = None  # told what else would be merged here
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("std", torch.ones(size))

    def forward(self, x_NF: Tensor) -> Tensor:
        return ((x_NF - self.mean) / self.std).clamp(-self.CLIP, self.CLIP)

    def update(self, x_NF: Tensor, valid_N: Tensor) -> None:
        """Takes in the valid rows."""
        (self.report or self.merge)(*self.moments(x_NF, valid_N))

    @staticmethod
    @torch.no_grad()
    def moments(x_NF: Tensor, valid_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """How many rows are valid, and the mean and variance of their features."""
        valid_N1 = valid_N.unsqueeze(-1)
        num_valid = valid_N.sum()
        divisor = num_valid.clamp(min=1)
        x_NF = torch.where(valid_N1, x_NF.double(), 0.0)
        batch_mean = x_NF.sum(0) / divisor
        return num_valid, batch_mean, torch.where(valid_N1, x_NF - batch_mean, 0.0).square().sum(0) / divisor

    @torch.no_grad()
    def merge(self, num_valid: Tensor, batch_mean: Tensor, batch_variance: Tensor) -> None:
        """Takes in the moments of some rows (Chan et al., 1979); without any, nothing changes."""
        self.count += num_valid
        weight = num_valid / self.count.clamp(min=1)
        shift = batch_mean - self.mean
        variance = self.std.double().square().lerp(batch_variance, weight) + shift.square() * (weight * (1.0 - weight))
        self.mean += shift * weight
        self.std.copy_(torch.where(num_valid > 0, variance.sqrt().clamp(min=self.SMALLEST_STD), self.std))


class OneHot(nn.Module):
    """Choices as one-hot vectors, side by side."""

    def __init__(self, num_choices: list[int], start: list[int]) -> None:
        super().__init__()
        self.out_size = sum(num_choices)
        begin = np.cumsum([0, *num_choices[:-1]]) - np.asarray(start)  # where each vector begins
        self.begin: Tensor
        self.register_buffer("begin", torch.as_tensor(begin, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        index = x.reshape(len(x), -1).long() + self.begin
        return torch.zeros(len(x), self.out_size, device=x.device).scatter_(1, index, 1.0)


class Image(nn.Module):
    """Pixels through convolutions: the Nature CNN (Mnih et al., 2015), or two 3x3 layers for images too small for it.

    Reads channels first, or last where `channels_last` says so.
    """

    def __init__(self, shape: tuple[int, ...], scale: float) -> None:
        super().__init__()
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
        if self.channels_last:
            x = x.permute(0, 3, 1, 2)
        for convolution in self.convolutions:
            x = torch.relu(convolution(x))
        return torch.relu(self.linear(x.flatten(1)))


def _side(convolution: nn.Conv2d, side: int) -> int:
    """How many pixels `convolution` leaves of a side."""
    padding = int(convolution.padding[0])
    return (side + 2 * padding - convolution.kernel_size[0]) // convolution.stride[0] + 1


def channels_last(shape: tuple[int, ...]) -> bool:
    """Whether a 3-D image is height, width, channels: fewest last, and 1, 3 or 4 of them or a square before."""
    return shape[2] < shape[0] and (shape[2] in (1, 3, 4) or shape[0] == shape[1])


class Core(nn.Module):
    """A recurrent layer (LSTM or GRU) whose state restarts with every episode; always in float32."""

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
        """One step: x (B, F), first (B); the output is the first leaf of the new state."""
        restart = first.unsqueeze(-1)
        with torch.autocast(x.device.type, enabled=False):
            if isinstance(self.cell, nn.LSTMCell):
                hidden, cell = state
                kept = (hidden.masked_fill(restart, 0.0), cell.masked_fill(restart, 0.0))
                return tuple(self.cell(x.float(), kept))
            return (self.cell(x.float(), state[0].masked_fill(restart, 0.0)),)

    def forward(self, x_TBF: Tensor, state: State, first_TB: Tensor) -> tuple[Tensor, State]:
        """A sequence with resets in it: cut where episodes begin, all pieces side by side, in one fused call."""
        num_steps, num_lanes, features = x_TBF.shape
        if num_lanes == 0:  # what one of several learners may have of a minibatch
            return x_TBF.new_zeros(num_steps, 0, self.cell.hidden_size), state
        plan = _cut(first_TB)
        rows = x_TBF.float().transpose(0, 1).reshape(num_lanes * num_steps, features)
        # A piece at the start of a lane goes on with the lane's state; every other begins with an episode, from zero.
        kept = [leaf.float().masked_fill(first_TB[0].unsqueeze(-1), 0.0) for leaf in state]
        begin = [leaf[plan.lane].masked_fill(plan.restarts, 0.0).unsqueeze(0) for leaf in kept]
        # One layer with biases, no dropout, one direction; it keeps what a backward pass needs if asked.
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
    """How sequences with resets are cut into pieces, longest first, in the packed order of torch's recurrent layers."""

    rows: Tensor  # (T * B,) the row, lane by lane, of every packed step
    batch_sizes: Tensor  # (longest,) pieces that are still going at each step; on the CPU
    lane: Tensor  # (pieces,) the lane each piece lies in
    restarts: Tensor  # (pieces, 1) whether it begins inside its lane
    last: Tensor  # (B,) the last piece of every lane


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
