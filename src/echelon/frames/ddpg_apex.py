"""DDPGApex: deterministic policy gradients (Lillicrap et al., 2016, https://arxiv.org/abs/1509.02971) from prioritized
replay over all workers (Horgan et al., 2018, https://arxiv.org/abs/1803.00933).

Difference from the papers: new transitions get the largest priority so far. Difference from Machin: priorities are the
TD errors of the actions that were taken, not of the policy's current actions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from echelon.errors import ConfigError
from echelon.frames.configured import ConfigTemplate
from echelon.frames.frame import Frame, MakeOptimizer, MakeSchedule, ModelServer
from echelon.frames.modules import Inputs, bare, call, first, frozen, per_item, samples, soft_update
from echelon.frames.noise import Noise
from echelon.frames.steps import Item
from echelon.frames.transitions import FrameBatch, TargetUpdateRule, TransitionStore
from echelon.objectives.values import clipped_double_targets
from echelon.servers.buffer_prioritized import DistributedPrioritizedBuffer

if TYPE_CHECKING:
    from echelon.world import RpcGroup


class DDPGApex(Frame):
    """Workers act and store; learners sample from the buffers of all members and push the actor.

    `actor(state)` returns the action (B, A), or the probabilities of discrete actions; `critic(state, action)` returns
    the value. The parameters are Machin's, plus `n_step`.
    """

    FORM = ConfigTemplate(("Actor", "Actor", "Critic", "Critic"), "ddpg_apex", "apex", unused={"learning_rate": 0.001})

    def __init__(
        self,
        actor: nn.Module,
        actor_target: nn.Module,
        critic: nn.Module,
        critic_target: nn.Module,
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
        update_rate: float | None = 0.005,
        update_steps: int | None = None,
        actor_learning_rate: float = 0.0005,
        critic_learning_rate: float = 0.001,
        discount: float = 0.99,
        gradient_max: float = math.inf,
        n_step: int = 1,
        replay_size: int = 500_000,
        replay_device: str | torch.device = "cpu",
    ) -> None:
        """`replay_size` is the capacity of each member, in transitions; `replay_device` is the device of batches."""
        networks = {"actor": actor, "actor_target": actor_target, "critic": critic, "critic_target": critic_target}
        super().__init__(networks, gradient_max, discount)
        self.actor, self.actor_target, self.critic, self.critic_target = actor, actor_target, critic, critic_target
        self.criterion = per_item(criterion)
        rates = [(actor, actor_learning_rate), (critic, critic_learning_rate)]
        self.actor_optim, self.critic_optim = self.add_optimizers(optimizer, rates, optimizer_kwargs)
        self.add_schedules(lr_scheduler, lr_scheduler_args, lr_scheduler_kwargs)
        self.target_update = TargetUpdateRule(update_rate, update_steps, "DDPGApex")
        self._update_targets(1.0)
        self.batch_size, self.noise = batch_size, Noise()
        self.apex_group, self.replay_device = apex_group, replay_device
        self.replay_buffer = DistributedPrioritizedBuffer("apex", apex_group, replay_size, seed=torch.initial_seed())
        self.transitions = TransitionStore(self.replay_buffer, n_step, discount)
        self.actor_model_server = model_server[0]

    def _update_targets(self, rate: float) -> None:
        soft_update(self.actor_target, self.actor, rate)
        soft_update(self.critic_target, self.critic, rate)

    def manual_sync(self) -> None:
        self.pull(self.actor_model_server, self.actor)

    @torch.no_grad()
    def act(self, state: Inputs, use_target: bool = False) -> Any:
        """Returns the output of the actor for `state`: the action."""
        if self.is_syncing and not use_target:
            self.manual_sync()
        return call(bare(self.actor_target if use_target else self.actor), state)

    def act_with_noise(
        self,
        state: Inputs,
        noise_param: Any = (0.0, 1.0),
        ratio: float = 1.0,
        mode: str = "uniform",
        use_target: bool = False,
    ) -> Tensor:
        """Returns the action with noise; `mode` is uniform, normal, clipped_normal or ou (see `frames.noise`)."""
        return self.noise.add(first(self.act(state, use_target)), noise_param, ratio, mode)

    def act_discrete(self, state: Inputs, use_target: bool = False) -> tuple[Tensor, Tensor]:
        """Returns the most probable actions (B, 1), and all probabilities, which are to be stored as the action."""
        probability = self._probabilities(state, use_target)
        return probability.argmax(-1, keepdim=True), probability

    def act_discrete_with_noise(self, state: Inputs, use_target: bool = False) -> tuple[Tensor, Tensor]:
        """Returns actions (B, 1) sampled by their probabilities, and the probabilities."""
        probability = self._probabilities(state, use_target)
        return torch.multinomial(probability, 1), probability

    def _probabilities(self, state: Inputs, use_target: bool) -> Tensor:
        probability = first(self.act(state, use_target))
        total = probability.sum(-1)
        if bool((probability < 0).any()) or not torch.allclose(total, torch.ones_like(total), atol=1e-3):
            raise ConfigError(
                f"DDPGApex.act_discrete: the actor's output {probability[0].tolist()!s:.100} is not a distribution "
                "over actions. End its forward with a softmax."
            )
        return probability

    def store_transition(self, item: Item) -> None:
        """Stores one step in this process's part of the buffer."""
        self.transitions.store(item)

    def store_episode(self, episode: Sequence[Item]) -> None:
        """Stores the steps of an episode; the last step ends it."""
        self.transitions.store_episode(episode)

    def update(
        self,
        update_value: bool = True,
        update_policy: bool = True,
        update_target: bool = True,
        concatenate_samples: bool = True,
    ) -> tuple[float, float]:
        """Makes one optimizer step of critic and actor on a batch sampled by priority.

        Returns the policy's value and the value loss. Without `concatenate_samples` the models receive the stored
        tensors as lists with one tensor per transition.
        """
        batch = self.transitions.draw(self.batch_size, self.replay_device, "DDPGApex")
        value_loss = self._learn_values(batch, update_value, concatenate_samples)
        state = samples(batch.state, concatenate_samples)
        with torch.set_grad_enabled(update_policy), frozen(self.critic) as critic:
            action = first(call(self.actor, state))
            policy_loss = -_value(critic, state, _named(batch, action)).mean()
        if update_policy:
            self.descend(self.actor_optim, self.actor, policy_loss)
        self.num_updates += 1
        rate = self.target_update.rate(self.num_updates)
        if update_target and rate:
            self._update_targets(rate)
        self.push(self.actor_model_server, self.actor)
        return -policy_loss.item(), value_loss

    def _learn_values(self, batch: FrameBatch, update_value: bool, concatenate: bool) -> float:
        state, action, next_state = (samples(x, concatenate) for x in (batch.state, batch.action, batch.next_state))
        with torch.no_grad():
            next_action = first(call(bare(self.actor_target), next_state))
            next_q_B = _value(bare(self.critic_target), next_state, _named(batch, next_action))
        with torch.set_grad_enabled(update_value):
            q_B = _value(self.critic, state, action)
        target_B = clipped_double_targets(batch.reward.to(q_B), batch.discount.to(q_B), next_q_B.to(q_B).unsqueeze(0))
        loss = (self.criterion(q_B, target_B) * batch.weight.to(q_B)).mean()
        if update_value:
            self.descend(self.critic_optim, self.critic, loss)
        self.transitions.update_priorities(batch, target_B - q_B)
        return loss.item()


def _named(batch: FrameBatch, action: Tensor) -> dict[str, Tensor]:
    """Returns the policy's action under the name of the stored actions."""
    return dict.fromkeys(batch.action, action)


def _value(critic: nn.Module, state: Inputs, action: Inputs) -> Tensor:
    return first(call(critic, state, action)).reshape(-1)
