"""DQNApex and DDPGApex against hand-computed updates: one process, linear models, plain gradient descent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from echelon.errors import ConfigError
from echelon.frames import DDPGApex, DQNApex
from frame_parts import ActionCritic, LinearPolicy, LinearQ, LocalGroup, ModelKeeper, item, near

MSE = nn.MSELoss(reduction="sum")


def dqn(**options: Any) -> tuple[DQNApex, ModelKeeper]:
    server = ModelKeeper()
    models = (LinearQ([[1.0, 0.0], [0.0, 2.0]]), LinearQ([[0.0, 0.0], [0.0, 0.0]]))
    settings = {"learning_rate": 0.1, "discount": 0.5, "batch_size": 1, "update_rate": 0.25}
    frame = DQNApex(*models, torch.optim.SGD, MSE, LocalGroup(), [server], **(settings | options))  # type: ignore[arg-type]
    return frame, server


def ddpg(**options: Any) -> tuple[DDPGApex, ModelKeeper]:
    server = ModelKeeper()
    models = (
        LinearPolicy([1.0, 0.0]),
        LinearPolicy([0.0, 0.0]),
        ActionCritic([1.0, 2.0], 3.0),
        ActionCritic([0.0, 0.0], 0.0),
    )
    settings = {"actor_learning_rate": 0.1, "critic_learning_rate": 0.01, "discount": 0.5, "batch_size": 1}
    frame = DDPGApex(*models, torch.optim.SGD, MSE, LocalGroup(), [server], **(settings | options))  # type: ignore[arg-type]
    return frame, server


# DQNApex.


def priorities_of(frame: DQNApex | DDPGApex) -> list[float]:
    """Returns (|x| + epsilon)**alpha of the first item, from the mass of the buffer."""
    mass = frame.replay_buffer._member.look()["mass"]
    return [mass[0], mass[1]]


def test_dqn_takes_a_double_q_step_and_keeps_the_error_as_priority() -> None:
    frame, server = dqn()
    with torch.no_grad():
        frame.qnet_target.weight.copy_(torch.tensor([[5.0, 0.0], [0.0, 4.0]]))
    frame.store_transition(item([1.0, 0.0], 0, 1.0, [1.0, 1.0]))
    frame.update()
    # Next values: online (1, 2) chooses action 1, whose target value is 4. y = 1 + 0.5 * 4 = 3 against Q = 1.
    assert near(frame.qnet.weight, [[1.0 + 0.1 * 2 * 2.0, 0.0], [0.0, 2.0]])
    assert near(frame.qnet_target.weight, [[5.0 + 0.25 * (1.4 - 5.0), 0.0], [0.0, 3.5]])
    assert priorities_of(frame) == pytest.approx([(2.0 + 1e-2) ** 0.6, 1], rel=1e-4)
    assert near(server.pushed[0]["weight"], frame.qnet.weight.tolist())


def test_dqn_bootstraps_from_a_truncated_step_only() -> None:
    for ends, future in (({"terminal": True}, 0.0), ({"terminated": False, "truncated": True}, 2.0)):
        frame, _ = dqn()  # the target starts as a copy: both value the next state at (1, 2)
        frame.store_transition(item([1.0, 0.0], 0, 1.0, [1.0, 1.0], **ends))
        frame.update()
        assert near(frame.qnet.weight[0, 0], 1.0 + 0.2 * (1.0 + 0.5 * future - 1.0))


def test_dqn_spans_n_steps_and_fewer_at_an_end() -> None:
    frame, _ = dqn(n_step=2)
    frame.store_transition(item([1.0, 0.0], 0, 1.0, [0.0, 1.0]))
    assert frame.replay_buffer.all_size() == 0
    frame.store_transition(item([0.0, 1.0], 1, 2.0, [1.0, 1.0], terminated=False, truncated=True))
    assert frame.replay_buffer.all_size() == 2
    _, fields, _, _ = frame.replay_buffer.sample_batch(
        2, sample_attrs=["state", "reward", "next_state", "discount"], additional_concat_attrs=["discount"]
    )
    assert fields is not None
    state, reward, next_state, discount = fields
    rows = {
        tuple(s): (r, d)
        for s, r, d in zip(state["state"].tolist(), reward[:, 0].tolist(), discount[:, 0].tolist(), strict=True)
    }
    assert rows.get((1.0, 0.0), (2.0, 0.25)) == (2.0, 0.25)  # 1 + 0.5 * 2, two steps
    assert rows.get((0.0, 1.0), (2.0, 0.5)) == (2.0, 0.5)
    assert (next_state["state"] == 1.0).all()


def test_dqn_acts_greedily_and_less_and_less_at_random() -> None:
    frame, server = dqn(epsilon_decay=0.5)
    state = {"state": torch.tensor([[1.0, 0.0], [0.0, 1.0]])}
    assert frame.act_discrete(state).tolist() == [[0], [1]]
    assert frame.act_discrete_with_noise(state).shape == (2, 1) and frame.epsilon == 0.5
    frame.act_discrete_with_noise(state, decay_epsilon=False)
    assert frame.epsilon == 0.5 and server.num_pulls == 3
    frame.set_sync(False)
    frame.epsilon = 0.0
    assert frame.act_discrete_with_noise(state).tolist() == [[0], [1]] and server.num_pulls == 3
    frame.manual_sync()
    assert server.num_pulls == 4


def test_dqn_targets_follow_by_steps_or_by_a_rate_but_not_both() -> None:
    frame, _ = dqn(update_rate=None, update_steps=2)
    frame.store_transition(item([1.0, 0.0], 0, 1.0, [1.0, 1.0]))
    frame.update()
    assert near(frame.qnet_target.weight, [[1.0, 0.0], [0.0, 2.0]])
    frame.update()
    assert near(frame.qnet_target.weight, frame.qnet.weight.tolist())
    refused: list[dict[str, Any]] = [
        {"update_steps": 2},
        {"update_rate": None},
        {"update_rate": 1.5},
        {"update_rate": None, "update_steps": 0},
    ]
    for options in refused:
        with pytest.raises(ValueError, match=r"update_rate=.* and update_steps=") as caught:
            dqn(**options)
        assert isinstance(caught.value, ConfigError)


# DDPGApex.


def test_ddpg_takes_a_step_of_critic_and_actor() -> None:
    frame, server = ddpg()
    frame.store_transition(item([1.0, 0.0], 2.0, 1.0, [0.0, 1.0]))
    frame.update()
    # Targets start as copies: next action 0, next value 2. y = 1 + 0.5 * 2 = 2 against Q(s, a=2) = 1 + 3 * 2 = 7.
    assert near(frame.critic.weight, [1.0 - 0.02 * 5.0, 2.0]) and near(frame.critic.slope, 3.0 - 0.02 * 5.0 * 2.0)
    # The actor ascends with the new slope 2.8, and its loss does not change the critic.
    assert near(frame.actor.weight, [1.0 + 0.1 * 2.8, 0.0])
    # The priority is the error of the action taken, 5; that of the policy's current action 1 would be 2.
    assert priorities_of(frame) == pytest.approx([(5.0 + 1e-2) ** 0.6, 1], rel=1e-4)
    assert near(frame.actor_target.weight, [1.0 + 0.005 * 0.28, 0.0]) and len(server.pushed) == 1


def test_ddpg_noise_comes_in_four_modes() -> None:
    frame, _ = ddpg()
    state = {"state": torch.ones(64, 2)}
    assert near(frame.act(state), [[1.0]] * 64)
    uniform = frame.act_with_noise(state, (-0.5, 0.5), mode="uniform")
    assert 0.5 <= float(uniform.min()) < 0.7 and 1.3 < float(uniform.max()) <= 1.5
    clipped = frame.act_with_noise(state, [(0.0, 5.0, -0.1, 0.1)], mode="clipped_normal")
    assert near(clipped.sort(0).values[[0, -1], 0], [0.9, 1.1])
    assert frame.act_with_noise(state, (2.0, 0.0), ratio=0.5, mode="normal").mean() == pytest.approx(2.0)
    walk = [frame.act_with_noise(state, {"sigma": 0.1, "dt": 1.0}, mode="ou") for _ in range(2)]
    assert not torch.equal(walk[0], walk[1])
    for param, mode in (((1.0,), "uniform"), ([(0.0, 1.0)] * 3, "normal"), ({"kappa": 1}, "ou"), ((0.0, 1.0), "pink")):
        with pytest.raises(ConfigError, match=r"noise"):
            frame.act_with_noise(state, param, mode=mode)


def test_ddpg_draws_discrete_actions_from_probabilities_only() -> None:
    frame, _ = ddpg()
    with pytest.raises(ConfigError, match="softmax"):
        frame.act_discrete({"state": torch.full((1, 2), 3.0)})
    frame.actor = nn.Sequential(nn.Linear(2, 3), nn.Softmax(-1))
    frame.set_sync(False)
    action, probability = frame.act_discrete({"input": torch.ones(4, 2)})
    assert torch.equal(action, probability.argmax(-1, keepdim=True)) and probability.shape == (4, 3)
    action, _ = frame.act_discrete_with_noise({"input": torch.ones(4, 2)})
    assert action.shape == (4, 1) and int(action.max()) < 3
