"""IMPALA: V-trace actor-critic from a buffer of whole episodes (Espeholt et al., 2018,
https://arxiv.org/abs/1802.01561).

Differences from the paper: losses are means over steps, and episodes are sampled repeatedly, which V-trace corrects for
as for any other policy lag. Differences from Machin: the last step of an episode has a target too, and a truncated
episode bootstraps from its last `next_state`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from echelon.errors import ConfigError
from echelon.frames.actor_critic import check_entropy_weight, evaluate_actions, policy_loss, values
from echelon.frames.configured import ConfigTemplate
from echelon.frames.frame import Frame, MakeOptimizer, MakeSchedule, ModelServer
from echelon.frames.modules import Inputs, call
from echelon.frames.steps import Item, Steps, tidy
from echelon.objectives.policy_gradient import VTrace, masked_normalize, vtrace
from echelon.servers.buffer_episodes import DistributedEpisodeBuffer

if TYPE_CHECKING:
    from echelon.world import RpcGroup


class IMPALA(Frame):
    """Workers act and store episodes; learners sample `batch_size` of them from all members and push the actor.

    `actor(state, action=None)` returns the action, its log-probability and optionally its entropy; `critic(state)`
    returns the value. A positive `entropy_weight` encourages exploration. The parameters are Machin's.
    """

    FORM = ConfigTemplate(("Actor", "Critic"), "impala", "impala")

    def __init__(
        self,
        actor: nn.Module,
        critic: nn.Module,
        optimizer: MakeOptimizer,
        criterion: Callable[[Tensor, Tensor], Tensor],
        impala_group: RpcGroup,
        model_server: Sequence[ModelServer],
        *,
        lr_scheduler: MakeSchedule | None = None,
        lr_scheduler_args: Sequence[Sequence[Any]] | None = None,
        lr_scheduler_kwargs: Sequence[Mapping[str, Any]] | None = None,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        batch_size: int = 5,
        learning_rate: float = 0.001,
        critic_learning_rate: float | None = None,
        isw_clip_c: float = 1.0,
        isw_clip_rho: float = 1.0,
        entropy_weight: float | None = None,
        value_weight: float = 1.0,
        gradient_max: float = math.inf,
        discount: float = 0.99,
        normalize_advantage: bool = False,
        replay_size: int = 500,
        replay_device: str | torch.device = "cpu",
    ) -> None:
        """`replay_size` is the capacity of each member, in episodes; `batch_size` is the episodes of one update.

        `replay_device` is the device of sampled batches.
        """
        super().__init__({"actor": actor, "critic": critic}, gradient_max, discount)
        check_entropy_weight(entropy_weight, "IMPALA")
        self.actor, self.critic, self.criterion = actor, critic, criterion
        rates = ((actor, learning_rate), (critic, critic_learning_rate or learning_rate))
        self.actor_optim, self.critic_optim = self.add_optimizers(optimizer, rates, optimizer_kwargs)
        self.add_schedules(lr_scheduler, lr_scheduler_args, lr_scheduler_kwargs)
        self.batch_size, self.isw_clip_c, self.isw_clip_rho = batch_size, isw_clip_c, isw_clip_rho
        self.entropy_weight, self.value_weight = entropy_weight, value_weight
        self.normalize_advantage = normalize_advantage
        self.impala_group, self.replay_device = impala_group, replay_device
        self.replay_buffer = DistributedEpisodeBuffer("impala", impala_group, replay_size, seed=torch.initial_seed())
        self.actor_model_server = model_server[0]

    def manual_sync(self) -> None:
        self.pull(self.actor_model_server, self.actor)

    def act(self, state: Inputs) -> Any:
        """Returns the output of the actor for `state`."""
        if self.is_syncing:
            self.manual_sync()
        return call(self.actor, state)

    def store_transition(self, item: Item) -> None:
        """Raises ConfigError: IMPALA stores whole episodes only."""
        raise ConfigError(
            "IMPALA.store_transition: V-trace needs whole episodes. Collect their items and call store_episode."
        )

    def store_episode(self, episode: Sequence[Item]) -> None:
        """Stores an episode; its items also have `action_log_prob`, of the policy that acted."""
        if any("action_log_prob" not in item for item in episode):
            raise ConfigError(
                "IMPALA.store_episode: an item lacks action_log_prob, which V-trace needs. Store the log-probability "
                "that act() returned."
            )
        self.replay_buffer.store_episode([tidy(item, "action_log_prob") for item in episode])

    def update(
        self, update_value: bool = True, update_policy: bool = True, concatenate_samples: bool = True
    ) -> tuple[float, float]:
        """Makes one optimizer step of actor and critic; returns the policy's objective and the value loss.

        The steps of all episodes are always concatenated; `concatenate_samples` has no effect, as in Machin.
        """
        _, episodes = self.replay_buffer.sample_batch(self.batch_size, self.replay_device)
        if episodes is None:
            raise ConfigError(
                "IMPALA.update: no member has an episode. Wait until replay_buffer.all_size() is above 0."
            )
        steps = Steps.of(episodes.attrs, np.diff(episodes.offsets).tolist())
        with torch.set_grad_enabled(update_policy):
            evaluated = evaluate_actions(self.actor, steps.state, steps.action)
        with torch.set_grad_enabled(update_value):
            value = values(self.critic, steps.observed)
        trace = self._trace(steps, evaluated.log_prob.detach(), value.detach())
        policy = policy_loss(evaluated, trace.advantage_TB.to(evaluated.log_prob), self.entropy_weight)
        value_loss = self.value_weight * self.criterion(value[: len(steps)], trace.target_TB.to(value))
        if update_policy:
            self.descend(self.actor_optim, self.actor, policy)
        if update_value:
            self.descend(self.critic_optim, self.critic, value_loss)
        self.push(self.actor_model_server, self.actor)
        self.num_updates += 1
        return -policy.item(), value_loss.item()

    def _trace(self, steps: Steps, log_prob: Tensor, value: Tensor) -> VTrace:
        """Returns the V-trace targets and advantages of all steps, (N,) each."""
        assert steps.log_prob is not None
        log_prob, value = log_prob.to(steps.reward.device), value.to(steps.reward.device)
        valid_TE = steps.valid_TE
        trace = vtrace(
            steps.pad(log_prob - steps.log_prob.to(log_prob)),
            steps.pad(steps.reward.to(value)),
            steps.pad(steps.discounts(self.discount, value)),
            steps.pad_values(value),
            valid_TE,
            rho_clip=self.isw_clip_rho,
            c_clip=self.isw_clip_c,
            trace_lambda=1.0,
        )
        advantage_TE = (
            masked_normalize(trace.advantage_TB, valid_TE) if self.normalize_advantage else trace.advantage_TB
        )
        return VTrace(steps.unpad(trace.target_TB), steps.unpad(advantage_TE))
