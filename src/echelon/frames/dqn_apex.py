"""DQNApex: double Q-learning from prioritized replay over all workers (Horgan et al., 2018,
https://arxiv.org/abs/1803.00933).

Differences from the paper: new transitions get the largest priority so far, and every worker has its own `epsilon`,
which decays with every noisy action.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from echelon.frames.configured import ConfigTemplate
from echelon.frames.frame import Frame, MakeOptimizer, MakeSchedule, ModelServer
from echelon.frames.modules import Inputs, bare, call, first, per_item, samples, soft_update
from echelon.frames.steps import Item, Named
from echelon.frames.transitions import TargetUpdateRule, TransitionStore
from echelon.objectives.values import double_q_targets
from echelon.servers.buffer_prioritized import DistributedPrioritizedBuffer

if TYPE_CHECKING:
    from echelon.world import RpcGroup


class DQNApex(Frame):
    """Workers act and store; learners sample from the buffers of all members and push the Q-network.

    `qnet(state)` returns the values of the actions (B, A); items hold the action as an integer (1, 1). The parameters
    are Machin's, plus `n_step`.
    """

    FORM = ConfigTemplate(("QNet", "QNet"), "dqn_apex", "apex")

    def __init__(
        self,
        qnet: nn.Module,
        qnet_target: nn.Module,
        optimizer: MakeOptimizer,
        criterion: Callable[..., Any],
        apex_group: RpcGroup,
        model_server: Sequence[ModelServer],
        *,
        lr_scheduler: MakeSchedule | None = None,
        lr_scheduler_args: Sequence[Sequence[Any]] | None = None,
        lr_scheduler_kwargs: Sequence[Mapping[str, Any]] | None = None,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        batch_size: int = 100,
        epsilon_decay: float = 0.9999,
        update_rate: float | None = 0.005,
        update_steps: int | None = None,
        learning_rate: float = 0.001,
        discount: float = 0.99,
        gradient_max: float = math.inf,
        n_step: int = 1,
        replay_size: int = 500_000,
        replay_device: str | torch.device = "cpu",
    ) -> None:
        """`replay_size` is the capacity of each member, in transitions; `replay_device` is the device of batches."""
        super().__init__({"qnet": qnet, "qnet_target": qnet_target}, gradient_max, discount)
        self.qnet, self.qnet_target, self.criterion = qnet, qnet_target, per_item(criterion)
        (self.qnet_optim,) = self.add_optimizers(optimizer, [(qnet, learning_rate)], optimizer_kwargs)
        self.add_schedules(lr_scheduler, lr_scheduler_args, lr_scheduler_kwargs)
        self.target_update = TargetUpdateRule(update_rate, update_steps, "DQNApex")
        soft_update(qnet_target, qnet, 1.0)
        self.batch_size, self.epsilon, self.epsilon_decay = batch_size, 1.0, epsilon_decay
        self.apex_group, self.replay_device = apex_group, replay_device
        self.replay_buffer = DistributedPrioritizedBuffer("apex", apex_group, replay_size, seed=torch.initial_seed())
        self.transitions = TransitionStore(self.replay_buffer, n_step, discount)
        self.qnet_model_server = model_server[0]

    def manual_sync(self) -> None:
        self.pull(self.qnet_model_server, self.qnet)

    @torch.no_grad()
    def act_discrete(self, state: Inputs, use_target: bool = False) -> Tensor:
        """Returns the best actions (B, 1)."""
        if self.is_syncing and not use_target:
            self.manual_sync()
        q_BA = first(call(bare(self.qnet_target if use_target else self.qnet), state))
        return q_BA.argmax(-1, keepdim=True)

    @torch.no_grad()
    def act_discrete_with_noise(self, state: Inputs, use_target: bool = False, decay_epsilon: bool = True) -> Tensor:
        """Returns epsilon-greedy actions (B, 1); `epsilon` then decays, unless `decay_epsilon` is False."""
        if self.is_syncing and not use_target:
            self.manual_sync()
        q_BA = first(call(bare(self.qnet_target if use_target else self.qnet), state))
        best, other = q_BA.argmax(-1, keepdim=True), torch.randint(q_BA.shape[-1], (len(q_BA), 1), device=q_BA.device)
        explores = torch.rand(len(q_BA), 1, device=q_BA.device) < self.epsilon
        if decay_epsilon:
            self.epsilon *= self.epsilon_decay
        return torch.where(explores, other, best)

    def store_transition(self, item: Item) -> None:
        """Stores one step in this process's part of the buffer."""
        self.transitions.store(item)

    def store_episode(self, episode: Sequence[Item]) -> None:
        """Stores the steps of an episode; the last step ends it."""
        self.transitions.store_episode(episode)

    def update(self, update_value: bool = True, update_target: bool = True, concatenate_samples: bool = True) -> float:
        """Makes one optimizer step on a batch sampled by priority; returns the loss.

        Without `concatenate_samples` the models receive lists with one tensor per transition.
        """
        batch = self.transitions.draw(self.batch_size, self.replay_device, "DQNApex")
        state, next_state = samples(batch.state, concatenate_samples), samples(batch.next_state, concatenate_samples)
        with torch.set_grad_enabled(update_value):
            q_BA = first(call(self.qnet, state))
        with torch.no_grad():
            next_online_BA = first(call(bare(self.qnet), next_state))
            next_target_BA = first(call(bare(self.qnet_target), next_state)).to(q_BA)
        reward_B, discount_B = batch.reward.to(q_BA), batch.discount.to(q_BA)
        target_B = double_q_targets(reward_B, discount_B, next_online_BA, next_target_BA)
        q_B = q_BA.gather(-1, _actions(batch.action).to(q_BA.device)).squeeze(-1)
        loss = (self.criterion(q_B, target_B) * batch.weight.to(q_BA)).mean()
        if update_value:
            self.descend(self.qnet_optim, self.qnet, loss)
        self.transitions.update_priorities(batch, target_B - q_B)
        self.num_updates += 1
        rate = self.target_update.rate(self.num_updates)
        if update_target and rate:
            soft_update(self.qnet_target, self.qnet, rate)
        self.push(self.qnet_model_server, self.qnet)
        return loss.item()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"epsilon": self.epsilon}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.epsilon = state["epsilon"]


def _actions(action: Named) -> Tensor:
    """Returns the indices of the actions taken, (B, 1)."""
    (taken,) = action.values()
    return taken.reshape(len(taken), 1).long()
