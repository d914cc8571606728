"""Acting: a policy is a network, a distribution and a random generator; it learns nothing."""

from __future__ import annotations

import torch

from echelon.algorithms.model import Model
from echelon.networks import action_mask
from echelon.objectives.distributions import Sample
from echelon.schema import Tree


class Policy:
    """Chooses actions for a group of environments and carries their recurrent state."""

    def __init__(self, model: Model, num_envs: int, seed: int) -> None:
        self.model = model
        self.generator = torch.Generator().manual_seed(seed)
        self.state = model.network.initial_state(num_envs, model.device)

    def act(self, observation: Tree, first: torch.Tensor, *, greedy: bool = False) -> Sample:
        """Actions and their log-probabilities for one step; leaves of `observation` are (K, ...), `first` is (K,)."""
        with torch.inference_mode():
            output = self.model.network.act(observation, self.state, first)
            self.state = output.state
            mask = action_mask(observation)
            if greedy:
                action = self.model.distribution.mode(output.params, mask)
                return Sample(action, self.model.distribution.log_prob(output.params, action, mask))
            return self.model.distribution.sample(output.params, self.generator, mask)
