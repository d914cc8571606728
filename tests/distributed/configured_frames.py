"""The four frames from configurations, in a world of three: two learners and a worker, or three that push gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel

from echelon.frames import A3C, IMPALA, DDPGApex, DQNApex
from echelon.frames.frame import Frame
from echelon.world import World

NUM_STEPS = 8


class QNet(nn.Linear):
    def forward(self, state: Tensor) -> Tensor:
        return super().forward(state)


class Chooser(nn.Linear):
    def forward(self, state: Tensor, action: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        dist = Categorical(logits=super().forward(state))
        act = dist.sample() if action is None else action.flatten()
        return act.view(-1, 1), dist.log_prob(act), dist.entropy()


class Critic(nn.Linear):
    def forward(self, state: Tensor, action: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(torch.cat((state, action), -1))


TWO = {"learner_process_number": 2, "batch_size": 4}
CONFIGS: dict[type[Frame], dict[str, Any]] = {
    A3C: {"models": ["Chooser", "QNet"], "model_args": [[2, 2], [2, 1]], "batch_size": 4, "critic_learning_rate": 0.5},
    DQNApex: TWO | {"models": [QNet, "QNet"], "model_args": [[2, 2], [2, 2]], "update_steps": 3, "update_rate": None},
    DDPGApex: TWO
    | {"models": ["QNet", "QNet", "Critic", f"{__name__}.Critic"], "model_args": [[2, 1], [2, 1], [3, 1], [3, 1]]}
    | {"lr_scheduler": "StepLR", "lr_scheduler_args": [[1], [1]]},
    IMPALA: TWO
    | {"models": ["Chooser", "QNet"], "model_args": [[2, 2], [2, 1]], "criterion_kwargs": {"reduction": "sum"}}
    | {"optimizer": "SGD"},
}


def episode(frame: Frame) -> list[dict[str, Any]]:
    """Returns steps with an action that every frame accepts."""
    choice = torch.tensor([[0.5]]) if isinstance(frame, DDPGApex) else torch.tensor([[1]])
    state = {"state": torch.ones(1, 2)}
    step = {"state": state, "action": {"action": choice}, "next_state": state, "reward": 1.0, "terminal": False}
    return [step | {"action_log_prob": -0.7} for _ in range(NUM_STEPS)]


def main(world: World) -> dict[str, Any]:
    found = {}
    for kind, section in CONFIGS.items():
        frame: Any = kind.init_from_config(kind.generate_config({"frame_config": section}))
        is_wrapped = [isinstance(network, DistributedDataParallel) for network in frame.networks.values()]
        frame.store_episode(episode(frame))
        group = frame.actor_grad_server.group if kind is A3C else getattr(frame, frame.FORM.group + "_group")
        group.barrier()
        sizes = frame.replay_buffer.all_size()
        updated = frame.update()
        group.barrier()
        frame.manual_sync()
        weights = [float(p.detach().sum()) for p in next(iter(frame.networks.values())).parameters()]
        settings = (frame.batch_size, [type(x).__name__ for x in frame.optimizers], len(frame.schedules))
        found[kind.__name__] = (frame.role, is_wrapped, sizes, updated == (None, None), weights, settings)
        group.barrier()
    return found
