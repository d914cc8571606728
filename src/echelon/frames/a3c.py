"""A3C: advantage actor-critic whose gradients are applied by servers (Mnih et al., 2016,
https://arxiv.org/abs/1602.01783).

Differences from the paper: steps are stored as episodes or parts of episodes, and advantages are generalized advantage
estimates, normalized over the stored steps. Differences from Machin: the gradient of every mini-batch is pushed,
`update` computes advantages with the current critic, and a truncated episode bootstraps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from echelon.errors import ConfigError
from echelon.frames.actor_critic import check_entropy_weight, evaluate_actions, policy_loss, values
from echelon.frames.configured import ConfigTemplate
from echelon.frames.frame import Frame
from echelon.frames.modules import Inputs, call, is_wrapped, samples
from echelon.frames.steps import Item, Steps, is_end, tidy
from echelon.objectives.policy_gradient import gae, masked_normalize
from echelon.servers.buffer_items import Array, BatchSelection, flatten, flatten_episode, names_of


class GradServer(Protocol):
    """The server that applies gradients: `echelon.servers.PushPullGradServer`."""

    def push(self, model: nn.Module) -> Any: ...

    def pull(self, model: nn.Module) -> bool: ...


class EpisodeWindow:
    """The steps since the last update, at most `size` of them: the oldest episodes are evicted."""

    def __init__(self, size: int) -> None:
        self.max_size = size
        self._episodes: deque[dict[str, Array]] = deque()

    def append(self, episode: dict[str, Array]) -> None:
        self._episodes.append(episode)
        while self.size() > self.max_size and len(self._episodes) > 1:
            self._episodes.popleft()

    def size(self) -> int:
        return sum(self._lengths())

    def all_size(self) -> int:
        """The same as `size`: every process learns from its own steps."""
        return self.size()

    def clear(self) -> None:
        self._episodes.clear()

    def take(self, device: str | torch.device) -> Steps:
        """Returns and removes all steps."""
        fields = {name: np.concatenate([x[name] for x in self._episodes]) for name in self._episodes[0]}
        names = names_of(fields)
        steps = Steps.of(
            dict(zip(names, BatchSelection(names, device=device).of(fields), strict=True)), self._lengths()
        )
        self.clear()
        return steps

    def _lengths(self) -> list[int]:
        return [len(episode["reward"]) for episode in self._episodes]


class A3C(Frame):
    """Acts and computes gradients in this process; the servers make the optimizer steps and provide the weights.

    `actor(state, action=None)` returns the action, its log-probability and optionally its entropy; `critic(state)`
    returns the value. A positive `entropy_weight` encourages exploration. The parameters are Machin's.
    """

    FORM = ConfigTemplate(
        ("Actor", "Critic"),
        "a3c",
        further={
            "actor_learning_rate": 0.001,  # of the gradient servers
            "critic_learning_rate": 0.001,
            "lr_scheduler": None,
            "lr_scheduler_args": None,
            "lr_scheduler_kwargs": None,
        },
    )

    def __init__(
        self,
        actor: nn.Module,
        critic: nn.Module,
        criterion: Callable[[Tensor, Tensor], Tensor],
        grad_server: Sequence[GradServer],
        *,
        batch_size: int = 100,
        actor_update_times: int = 5,
        critic_update_times: int = 10,
        entropy_weight: float | None = None,
        value_weight: float = 0.5,
        gradient_max: float = math.inf,
        gae_lambda: float = 1.0,
        discount: float = 0.99,
        normalize_advantage: bool = True,
        replay_size: int = 500_000,
        replay_device: str | torch.device = "cpu",
    ) -> None:
        """`grad_server` are the servers of actor and critic; `replay_device` is the device of the stored steps."""
        super().__init__({"actor": actor, "critic": critic}, gradient_max, discount)
        if is_wrapped(actor) or is_wrapped(critic):
            raise ConfigError(
                "A3C: actor or critic is wrapped in DistributedDataParallel or DataParallel, but a server reduces its "
                "gradients. Pass the modules themselves."
            )
        if len(grad_server) < 2:
            raise ConfigError(
                f"A3C: got {len(grad_server)} gradient servers; it needs one for the actor and one for the critic."
            )
        check_entropy_weight(entropy_weight, "A3C")
        self.actor, self.critic, self.criterion = actor, critic, criterion
        self.actor_grad_server, self.critic_grad_server = grad_server[0], grad_server[1]
        self.batch_size = batch_size
        self.actor_update_times, self.critic_update_times = actor_update_times, critic_update_times
        self.entropy_weight, self.value_weight = entropy_weight, value_weight
        self.gae_lambda, self.normalize_advantage = gae_lambda, normalize_advantage
        self.replay_buffer, self.replay_device = EpisodeWindow(replay_size), replay_device
        self._open: list[Item] = []

    def manual_sync(self) -> None:
        self.actor_grad_server.pull(self.actor)
        self.critic_grad_server.pull(self.critic)

    def act(self, state: Inputs) -> Any:
        """Returns the output of the actor for `state`."""
        if self.is_syncing:
            self.actor_grad_server.pull(self.actor)
        return call(self.actor, state)

    def store_transition(self, item: Item) -> None:
        """Adds a step to the current episode; an item that ends it, or `update`, which truncates it, closes it."""
        flatten(tidy(item))  # raises on an invalid item here rather than at the end of the episode
        self._open.append(item)
        if is_end(item):
            self._close()

    def store_episode(self, episode: Sequence[Item]) -> None:
        """Adds the steps of an episode; unless it terminated, it bootstraps from its last `next_state`."""
        self.replay_buffer.append(flatten_episode([tidy(item) for item in episode]))

    def _close(self) -> None:
        if self._open:
            self.store_episode(self._open)
            self._open = []

    def update(
        self, update_value: bool = True, update_policy: bool = True, concatenate_samples: bool = True
    ) -> tuple[float, float]:
        """Pushes the gradients of `actor_update_times` and `critic_update_times` mini-batches of the stored steps.

        Removes the stored steps. Returns the means of the policy's objective and of the value loss. Without
        `concatenate_samples` the models receive lists with one tensor per step.
        """
        self._close()
        if self.replay_buffer.size() == 0:
            raise ConfigError("A3C.update: nothing was stored since the last one. Store an episode first.")
        steps = self.replay_buffer.take(self.replay_device)
        advantage_N, target_N = self._advantages(steps, concatenate_samples)
        gained = lost = 0.0
        for _ in range(self.actor_update_times if update_policy else 0):
            index = self._draw(len(steps))
            evaluated = evaluate_actions(self.actor, *(samples(x, concatenate_samples) for x in steps.rows(index)))
            loss = policy_loss(evaluated, advantage_N[index].to(evaluated.log_prob), self.entropy_weight)
            self._push(self.actor_grad_server, self.actor, loss)
            gained -= loss.item() / self.actor_update_times
        for _ in range(self.critic_update_times if update_value else 0):
            index = self._draw(len(steps))
            value = values(self.critic, samples(steps.rows(index)[0], concatenate_samples))
            loss = self.value_weight * self.criterion(value, target_N[index].to(value))
            self._push(self.critic_grad_server, self.critic, loss)
            lost += loss.item() / self.critic_update_times
        self.num_updates += 1
        return gained, lost

    @torch.no_grad()
    def _advantages(self, steps: Steps, concatenate: bool) -> tuple[Tensor, Tensor]:
        """Returns the advantages and value targets of all steps, with the current critic."""
        value = values(self.critic, samples(steps.observed, concatenate)).to(self.replay_device)
        valid_TE = steps.valid_TE
        advantage_TE = gae(
            steps.pad(steps.reward.to(value)),
            steps.pad(steps.discounts(self.discount, value)),
            steps.pad_values(value),
            valid_TE,
            self.gae_lambda,
        )
        target_N = steps.unpad(advantage_TE) + value[: len(steps)]
        if self.normalize_advantage:
            advantage_TE = masked_normalize(advantage_TE, valid_TE)
        return steps.unpad(advantage_TE), target_N

    def _draw(self, num_steps: int) -> Tensor:
        return torch.randperm(num_steps)[: self.batch_size]

    def _push(self, server: GradServer, model: nn.Module, loss: Tensor) -> None:
        model.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.clip(model)
        server.push(model)
