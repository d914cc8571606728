"""QR-DQN: quantile regression of the return's distribution (Dabney et al., 2018, https://arxiv.org/abs/1710.10044).

The network outputs N quantiles of the return of every action, at the midpoints tau_i = (2i - 1) / 2N. Their mean is the
action's value, used for acting, exploration and initial priorities as in DQN. Only the loss uses the quantiles.

Differences from the paper: transitions are n-step; with `double` the online network selects the action to bootstrap
from, which is never one that a mask forbids; dueling streams add one value per state to outputs that are centred over
all actions and quantiles; the loss is divided by kappa (`huber`), which changes nothing at the paper's 1; priorities
are the TD errors of the means, as the paper has none. `--learner.compile` does not compile the quantiles.

Shapes: B transitions, A actions, N quantiles, M quantiles of the target.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.algorithms.dqn import Dqn
from echelon.algorithms.model import Model
from echelon.algorithms.peers import ALONE, Peers
from echelon.algorithms.protocol import Loss
from echelon.algorithms.value_networks import DuelingNetwork, HeadNetwork, PolicyParts, without_memory
from echelon.config import NetworkConfig
from echelon.errors import ConfigError
from echelon.layers import State
from echelon.names import text_of
from echelon.networks import ActOutput, PolicyNetwork, action_mask
from echelon.objectives.distributions import forbid
from echelon.presets.qr_dqn import QrDqnConfig
from echelon.schema import Spaces, TransitionBatch, Tree

NO_FIRST = torch.zeros(0, dtype=torch.bool)  # not used: the network has no recurrent state


def quantile_huber_loss(theta_BN: Tensor, target_BM: Tensor, weight_B: Tensor, kappa: float) -> Tensor:
    """Returns the weighted mean quantile Huber loss (Dabney et al., 2018, eq. 10 and algorithm 1), divided by kappa.

    The loss is summed over the predicted quantiles and averaged over the target's, which are samples of one return. No
    gradient flows through the target.
    """
    num = theta_BN.shape[-1]
    tau_N1 = ((torch.arange(num, device=theta_BN.device) + 0.5) / num).unsqueeze(-1)
    error_BNM = target_BM.detach().unsqueeze(-2) - theta_BN.unsqueeze(-1)
    size_BNM = error_BNM.abs()
    near_BNM = size_BNM.clamp(max=kappa)
    huber_BNM = near_BNM * (size_BNM - 0.5 * near_BNM) / kappa
    asymmetry_BNM = (tau_N1 - (error_BNM.detach() < 0).float()).abs()
    return ((asymmetry_BNM * huber_BNM).mean(-1).sum(-1) * weight_B).mean()


@torch.no_grad()
def quantile_targets(reward_B: Tensor, discount_B: Tensor, choosing_BA: Tensor, next_BAN: Tensor) -> Tensor:
    """Returns the target quantiles (B, N), from those of the next action that maximises `choosing_BA`."""
    return torch.addcmul(
        reward_B.unsqueeze(-1), discount_B.unsqueeze(-1), quantiles_of(next_BAN, choosing_BA.argmax(-1))
    )


def quantiles_of(theta_BAN: Tensor, action_B: Tensor) -> Tensor:
    """Returns the quantiles (B, N) of the actions taken."""
    return theta_BAN.take_along_dim(action_B.view(-1, 1, 1), 1).squeeze(1)


class QuantileNetwork(PolicyNetwork):
    """Interprets the A * N outputs of a network as quantiles of A actions; it acts by their means."""

    def __init__(self, inner: PolicyNetwork, num_quantiles: int) -> None:
        super().__init__()
        self.inner, self.num_quantiles = inner, num_quantiles

    def quantiles(self, observation: Tree) -> Tensor:
        """Returns the quantiles of every action: (B, A, N)."""
        outputs = self.inner.act(observation, (), NO_FIRST).params
        return outputs.view(outputs.shape[0], -1, self.num_quantiles)  # len() would fix the batch of an exported graph

    def act(self, observation: Tree, state: State, first: Tensor, *, with_value: bool = False) -> ActOutput:
        return ActOutput(self.quantiles(observation).mean(-1), None, state)

    def update_normalizer(self, observation: Tree, valid: Tensor) -> None:
        self.inner.update_normalizer(observation, valid)


def quantile_values(config: NetworkConfig, spaces: Spaces, algorithm: QrDqnConfig) -> PolicyParts:
    """Builds the acting network, whose action values are means of quantiles."""
    if config.name != "auto":
        raise ConfigError(
            f'network.name="{text_of(config.name)}" outputs one value per action, but qr-dqn needs '
            f"{algorithm.num_quantiles} quantiles per action. Use network.name=auto, or dqn."
        )
    kind = DuelingNetwork if algorithm.dueling else HeadNetwork

    def build(config: NetworkConfig, spaces: Spaces, num_actions: int) -> PolicyNetwork:
        return QuantileNetwork(kind(config, spaces, num_actions * algorithm.num_quantiles), algorithm.num_quantiles)

    return without_memory(config, spaces, build, algorithm)


class QrDqn(Dqn):
    """DQN with the quantile Huber loss; the model is the quantile network."""

    def __init__(self, config: QrDqnConfig, model: Model, seed: int, peers: Peers = ALONE) -> None:
        super().__init__(config, model, seed, peers)
        assert isinstance(model.network, QuantileNetwork)
        self.network = model.network

    def _loss(self, batch: TransitionBatch) -> Loss:
        with self.model.autocast():
            with torch.no_grad():
                next_BAN = self.target.network.quantiles(batch.next_observation)
                choosing_BA = self.model.params(batch.next_observation) if self.config.double else next_BAN.mean(-1)
            theta_BAN = self.network.quantiles(batch.observation)
        allowed_BA = forbid(choosing_BA, action_mask(batch.next_observation))
        target_BN = quantile_targets(batch.reward, batch.discount, allowed_BA, next_BAN)
        theta_BN = quantiles_of(theta_BAN, batch.action)
        self.errors = (target_BN - theta_BN.detach()).mean(-1)
        loss = quantile_huber_loss(theta_BN, target_BN, batch.weight, self.config.huber)
        return Loss(loss, self._statistics(batch, theta_BN, theta_BAN.detach().mean(-1)), count=len(batch.reward))
