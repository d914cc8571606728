"""A3C and IMPALA against hand-computed updates: one process, linear models, plain gradient descent."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from echelon.errors import ConfigError
from echelon.frames import A3C, IMPALA
from frame_parts import GradKeeper, LinearActor, LinearCritic, LocalGroup, ModelKeeper, item, near

MSE = nn.MSELoss(reduction="sum")


def a3c(**options: Any) -> tuple[A3C, GradKeeper, GradKeeper]:
    servers = (GradKeeper(), GradKeeper())
    settings = {"normalize_advantage": False, "actor_update_times": 1, "critic_update_times": 1, "discount": 0.5}
    frame = A3C(LinearActor([[0.0, 0.0], [0.0, 0.0]]), LinearCritic([1.0, 2.0]), MSE, servers, **(settings | options))
    return frame, *servers


def impala(**options: Any) -> tuple[IMPALA, ModelKeeper]:
    server = ModelKeeper()
    models = (LinearActor([[0.0, 0.0], [0.0, 0.0]]), LinearCritic([1.0, 2.0]))
    settings = {"learning_rate": 0.1, "discount": 0.5, "batch_size": 1, "value_weight": 1.0}
    frame = IMPALA(*models, torch.optim.SGD, MSE, LocalGroup(), [server], **(settings | options))  # type: ignore[arg-type]
    return frame, server


# A3C.


def test_a3c_pushes_the_gradients_of_a_step_that_terminated() -> None:
    frame, actor, critic = a3c()
    frame.store_episode([item([1.0, 1.0], 1, 5.0, [9.0, 9.0], terminated=True)])
    frame.update()
    # V = 3, so the advantage is 5 - 3 = 2; the gradient of -log p(1) * 2 is -2 (onehot - p) s with p = (1/2, 1/2).
    assert near(actor.pushed[0], [1.0, 1.0, -1.0, -1.0])
    # 0.5 (V - 5)^2 has the gradient (V - 5) s = -2 s.
    assert near(critic.pushed[0], [-2.0, -2.0])


@pytest.mark.parametrize(
    ("ends", "target"),
    [
        ({"terminated": True}, 5.0),
        ({"terminal": True}, 5.0),
        ({"terminated": False, "truncated": True}, 5.0 + 0.5 * 8.0),
    ],
)
def test_a3c_bootstraps_where_an_episode_was_cut_off(ends: dict[str, bool], target: float) -> None:
    frame, _, critic = a3c()
    frame.store_episode([item([1.0, 1.0], 1, 5.0, [2.0, 3.0], **ends)])
    frame.update()
    assert near(critic.pushed[0], [3.0 - target, 3.0 - target])


def test_a3c_pushes_the_gradient_of_every_minibatch() -> None:
    frame, actor, critic = a3c(actor_update_times=3, critic_update_times=4, batch_size=1)
    episode = [item([1.0, 0.0], 0, 1.0, [0.0, 1.0]), item([0.0, 1.0], 1, 1.0, [0.0, 0.0], terminated=True)]
    frame.store_episode(episode)
    frame.update()
    assert (len(actor.pushed), len(critic.pushed)) == (3, 4)
    # Each is of one of the two steps: their states are orthogonal, so exactly one column has a gradient.
    for gradient in critic.pushed:
        assert (gradient != 0).sum() == 1
    assert frame.replay_buffer.size() == 0
    with pytest.raises(ConfigError, match="nothing was stored"):
        frame.update()


def test_a3c_advantages_reach_back_by_lambda_and_are_normalised_over_what_was_stored() -> None:
    frame, _, critic = a3c(gae_lambda=0.5)
    frame.store_episode([item([1.0, 0.0], 0, 1.0, [0.0, 1.0]), item([0.0, 1.0], 1, 4.0, [0.0, 0.0], terminated=True)])
    frame.update()
    # V = 1, 2. Deltas: 1 + 0.5 * 2 - 1 = 1 and 4 - 2 = 2; advantages 1 + 0.5 * 0.5 * 2 = 1.5 and 2; targets 2.5 and 4.
    assert near(critic.pushed[0], [1.0 - 2.5, 2.0 - 4.0])
    frame, actor, _ = a3c(gae_lambda=0.5, normalize_advantage=True)
    frame.store_episode([item([1.0, 0.0], 0, 1.0, [0.0, 1.0]), item([0.0, 1.0], 1, 4.0, [0.0, 0.0], terminated=True)])
    frame.update()
    # Normalised to -1 and 1; the mean over two steps of -(onehot - p) s * advantage.
    assert near(actor.pushed[0], [0.25, 0.25, -0.25, -0.25])


def test_a3c_entropy_is_kept_up_by_a_positive_weight_and_a_negative_one_is_refused() -> None:
    frame, actor, _ = a3c(entropy_weight=0.1)
    with torch.no_grad():
        frame.actor.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
        frame.critic.weight.zero_()
    frame.store_episode(
        [item([1.0, 0.0], 0, 0.0, [0.0, 0.0], terminated=True)]
    )  # no advantage: only the entropy remains
    frame.update()
    assert actor.pushed[0][0] > 0.0  # a gradient step makes the more probable action less probable
    with pytest.raises(ConfigError, match=r"entropy_weight=0\.01"):
        a3c(entropy_weight=-0.01)


def test_a3c_takes_steps_one_by_one_and_cuts_a_rollout_at_an_update() -> None:
    frame, _, critic = a3c()
    frame.store_transition(item([1.0, 1.0], 1, 5.0, [2.0, 3.0]))
    frame.update()
    assert near(critic.pushed[0], [3.0 - 9.0, 3.0 - 9.0])


# IMPALA.

UNIFORM = math.log(0.5)  # the log-probability of any action for an actor with zero weights


def test_impala_learns_from_the_last_step_of_an_episode() -> None:
    frame, server = impala()
    first, last = item([1.0, 0.0], 0, 1.0, [0.0, 1.0]), item([0.0, 1.0], 1, 4.0, [7.0, 7.0], terminated=True)
    frame.store_episode([step | {"action_log_prob": UNIFORM} for step in (first, last)])
    frame.update()
    # On-policy: targets 4 and 1 + 0.5 * 4 = 3 against V = 2 and 1. The criterion sums: V - 0.1 * 2 (V - target).
    assert near(frame.critic.weight, [1.0 + 0.2 * 2.0, 2.0 + 0.2 * 2.0])
    # Advantages 3 - 1 = 2 and 4 - 2 = 2; the mean over two steps of -(onehot - p) s * 2, times 0.1.
    assert near(frame.actor.weight, [[0.05, -0.05], [-0.05, 0.05]])
    assert len(server.pushed) == 1 and near(server.pushed[0]["weight"], frame.actor.weight.tolist())


@pytest.mark.parametrize(
    ("ends", "future"), [({"terminal": True}, 0.0), ({"terminated": False, "truncated": True}, 4.0)]
)
def test_impala_bootstraps_where_an_episode_was_cut_off(ends: dict[str, bool], future: float) -> None:
    frame, _ = impala()
    frame.store_episode([item([1.0, 0.0], 0, 1.0, [2.0, 3.0], **ends) | {"action_log_prob": UNIFORM}])
    frame.update()
    assert near(frame.critic.weight, [1.0 + 0.2 * (1.0 + future - 1.0), 2.0])


def test_impala_weighs_by_the_policy_that_acted_within_its_clips() -> None:
    once = item([1.0, 0.0], 0, 3.0, [0.0, 0.0], terminated=True)
    for log_prob, rho in ((0.0, 0.5), (math.log(0.1), 2.0)):  # 0.5 / 1, and 0.5 / 0.1 clipped at 2
        frame, _ = impala(isw_clip_rho=2.0)
        frame.store_episode([once | {"action_log_prob": log_prob}])
        frame.update()
        assert near(frame.critic.weight, [1.0 + 0.2 * rho * 2.0, 2.0])
        assert near(frame.actor.weight, [[0.05 * rho * 2.0, 0.0], [-0.05 * rho * 2.0, 0.0]])


def test_impala_lays_episodes_of_different_lengths_side_by_side() -> None:
    long = [item([1.0, 0.0], 0, 1.0, [1.0, 0.0]) for _ in range(4)] + [
        item([1.0, 0.0], 0, 1.0, [0.0, 0.0], terminated=True)
    ]
    short = [item([0.0, 1.0], 1, 2.0, [0.0, 1.0], truncated=True, terminated=False)]
    apart = []
    for episode in (long, short):
        frame, _ = impala()
        frame.store_episode([step | {"action_log_prob": UNIFORM} for step in episode])
        frame.update()
        apart.append(frame.critic.weight.detach() - torch.tensor([1.0, 2.0]))
    frame, _ = impala(batch_size=2)
    for episode in (long, short):
        frame.store_episode([step | {"action_log_prob": UNIFORM} for step in episode])
    assert frame.replay_buffer.all_size() == 2
    frame.update()
    assert near(frame.critic.weight, (torch.tensor([1.0, 2.0]) + apart[0] + apart[1]).tolist())


def test_impala_refuses_an_episode_without_log_probabilities_and_an_update_without_episodes() -> None:
    frame, _ = impala()
    with pytest.raises(ConfigError, match="action_log_prob"):
        frame.store_episode([item([1.0, 0.0], 0, 1.0, [0.0, 0.0], terminated=True)])
    with pytest.raises(ConfigError, match="all_size"):
        frame.update()
    with pytest.raises(ConfigError, match="call store_episode"):
        frame.store_transition(item([1.0, 0.0], 0, 1.0, [0.0, 0.0], terminated=True))
