"""The user's models in frames: how they are called, wrapped, saved and loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from echelon.errors import ConfigError
from echelon.frames import A3C, IMPALA, DDPGApex, DQNApex, saving
from echelon.frames.frame import Frame
from echelon.frames.modules import call, frozen, per_item
from frame_parts import (
    ActionCritic,
    GradKeeper,
    LinearActor,
    LinearCritic,
    LinearPolicy,
    LinearQ,
    LocalGroup,
    ModelKeeper,
    item,
)

MSE = nn.MSELoss(reduction="sum")


class Odd(nn.Module):
    """A model whose argument has a name that no state has."""

    def forward(self, some_state: Tensor) -> Tensor:
        return some_state + 1.0


class Two(nn.Module):
    def forward(self, state: Tensor, goal: Tensor, noise: float = 0.0) -> Tensor:
        return state - goal + noise


class Any(nn.Module):
    def forward(self, **named: Tensor) -> list[str]:
        return sorted(named)


def test_arguments_are_found_by_name_and_what_is_not_taken_is_left_out() -> None:
    state = {"state": torch.tensor([3.0]), "goal": torch.tensor([1.0]), "camera": torch.zeros(1)}
    assert call(Two(), state).item() == 2.0
    assert call(Two(), state, {"noise": 0.5}).item() == 2.5
    assert call(Any(), state, {"action": torch.zeros(1)}) == ["action", "camera", "goal", "state"]


def test_a_single_argument_and_a_single_key_belong_together() -> None:
    assert call(Odd(), {"state": torch.tensor([1.0])}).item() == 2.0
    with pytest.raises(ConfigError, match=r"some_state.*keys a, b"):
        call(Odd(), {"a": torch.zeros(1), "b": torch.zeros(1)})


def test_a_missing_argument_is_refused_with_both_names() -> None:
    with pytest.raises(ConfigError, match=r"Two\.forward takes state, goal, noise, .* for goal: .* keys state"):
        call(Two(), {"state": torch.zeros(1)})
    with pytest.raises(ConfigError, match=r"Two received a Tensor as state .* such as \{'state': tensor\}"):
        call(Two(), torch.zeros(1))  # type: ignore[arg-type]


class Joined(nn.Module):
    """A model that takes lists with one tensor per step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, state: list[Tensor], action: Tensor | list[Tensor] | None = None) -> object:
        assert isinstance(state, list) and all(len(x) == 1 for x in state)
        taken = torch.cat(action) if isinstance(action, list) else action
        return self.model(torch.cat(state)) if taken is None else self.model(torch.cat(state), taken)


def test_models_may_get_a_tensor_for_each_step() -> None:
    """`concatenate_samples=False` changes the inputs of the models, but not the result of learning."""
    learned = []
    for wrap in (lambda model: model, Joined):
        torch.manual_seed(0)
        gradients = GradKeeper(), GradKeeper()
        a3c = A3C(wrap(LinearActor([[0.0, 0.0], [0.1, 0.2]])), wrap(LinearCritic([1.0, 2.0])), MSE, gradients)
        pair = (wrap(LinearQ([[1.0, 0.0], [0.0, 2.0]])) for _ in range(2))
        dqn = DQNApex(*pair, torch.optim.SGD, MSE, LocalGroup(), [ModelKeeper()], batch_size=2)  # type: ignore[arg-type]
        actors = (wrap(LinearPolicy([1.0, 0.5])) for _ in range(2))
        critics = (wrap(ActionCritic([1.0, 2.0], 3.0)) for _ in range(2))
        ddpg = DDPGApex(*actors, *critics, torch.optim.SGD, MSE, LocalGroup(), [ModelKeeper()], batch_size=2)  # type: ignore[arg-type]
        is_whole = wrap is not Joined
        for frame, choices in ((a3c, (0, 1)), (dqn, (0, 1)), (ddpg, (0.5, 1.5))):
            episode = [item([1.0, 2.0], choices[0], 1.0, [2.0, 3.0]), item([2.0, 3.0], choices[1], 2.0, [0.0, 1.0])]
            frame.store_episode(episode)
            torch.manual_seed(1)
            assert frame.update(concatenate_samples=is_whole)
        gradient = torch.cat([x for server in gradients for x in server.pushed])
        learned.append(
            [gradient, *(x for frame in (dqn, ddpg) for n in frame.networks.values() for x in n.parameters())]
        )
    for whole, apart in zip(*learned, strict=True):
        assert torch.allclose(whole, apart)


def test_a_criterion_judges_every_item_and_the_users_own_stays_as_it_is() -> None:
    value, target = torch.tensor([1.0, 4.0]), torch.tensor([0.0, 2.0])
    criterion = nn.MSELoss(reduction="sum")
    assert per_item(criterion)(value, target).tolist() == [1.0, 4.0] and criterion.reduction == "sum"
    assert per_item(nn.functional.l1_loss)(value, target).tolist() == [1.0, 2.0]
    assert per_item(lambda x, y: x - y)(value, target).tolist() == [1.0, 2.0]
    with pytest.raises(ConfigError, match=r"returns \(\) for values \(2,\)"):
        per_item(lambda x, y: (x - y).sum())(value, target)


def test_gradients_flow_through_a_frozen_model_and_not_into_it() -> None:
    model, x = LinearCritic([1.0, 2.0]), torch.ones(1, 2, requires_grad=True)
    with frozen(model) as bare:
        bare(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [[1.0, 2.0]]
    assert model.weight.grad is None and model.weight.requires_grad


# Wrapped learners.


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_dqn(wrap: type[nn.Module] | None, server: ModelKeeper) -> DQNApex:
    qnet, target = LinearQ([[1.0, 0.0], [0.0, 2.0]]), LinearQ([[0.0, 0.0], [0.0, 0.0]])
    models = (qnet, target) if wrap is None else (wrap(qnet), wrap(target))
    return DQNApex(*models, torch.optim.Adam, MSE, LocalGroup(), [server], batch_size=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrap", [DataParallel, DistributedDataParallel])
def test_a_wrapped_learner_learns_the_same_pushes_its_module_and_pulls_nothing(
    wrap: type[nn.Module], process_group: None
) -> None:
    servers = ModelKeeper(), ModelKeeper()
    frames = make_dqn(None, servers[0]), make_dqn(wrap, servers[1])
    for frame in frames:
        frame.store_transition(item([1.0, 0.5], 0, 1.0, [1.0, 1.0]))
        for _ in range(3):
            frame.update()
        frame.act_discrete({"state": torch.ones(1, 2)})
        frame.manual_sync()
    assert [server.num_pulls for server in servers] == [2, 0]
    assert list(servers[1].pushed[-1]) == ["weight"] and len(servers[1].pushed) == 3
    assert torch.equal(servers[0].pushed[-1]["weight"], servers[1].pushed[-1]["weight"])


def test_an_update_of_one_half_only_leaves_a_distributed_model_ready_for_the_next(process_group: None) -> None:
    actor = DistributedDataParallel(LinearActor([[0.0, 0.0], [0.0, 0.0]]))
    critic = DistributedDataParallel(LinearCritic([1.0, 2.0]))
    frame = IMPALA(actor, critic, torch.optim.SGD, MSE, LocalGroup(), [ModelKeeper()], batch_size=1)  # type: ignore[arg-type]
    frame.store_episode([item([1.0, 0.0], 0, 3.0, [0.0, 0.0], terminated=True) | {"action_log_prob": -0.7}])
    for value, policy in ((True, False), (False, True), (True, True)):
        before = [parameter.detach().clone() for parameter in (*actor.parameters(), *critic.parameters())]
        frame.update(update_value=value, update_policy=policy)
        after = (*actor.parameters(), *critic.parameters())
        assert [not torch.equal(x, y) for x, y in zip(before, after, strict=True)] == [policy, value]


def test_a3c_refuses_wrapped_models_and_a_single_server() -> None:
    actor, critic = LinearActor([[0.0, 0.0], [0.0, 0.0]]), LinearCritic([1.0, 2.0])
    with pytest.raises(ConfigError, match="Pass the modules"):
        A3C(DataParallel(actor), critic, MSE, (GradKeeper(), GradKeeper()))
    with pytest.raises(ConfigError, match="1 gradient servers"):
        A3C(actor, critic, MSE, (GradKeeper(),))


def test_schedules_step_and_need_arguments_for_every_optimizer() -> None:
    models = LinearActor([[0.0, 0.0], [0.0, 0.0]]), LinearCritic([1.0, 2.0])
    parts = (*models, torch.optim.SGD, MSE, LocalGroup(), [ModelKeeper()])
    step = torch.optim.lr_scheduler.ExponentialLR
    frame = IMPALA(*parts, learning_rate=1.0, lr_scheduler=step, lr_scheduler_args=((0.5,), (0.1,)))  # type: ignore[arg-type]
    frame.store_episode([item([1.0, 0.0], 0, 3.0, [0.0, 0.0], terminated=True) | {"action_log_prob": -0.7}])
    frame.update()
    frame.update_lr_scheduler()
    assert [optimizer.param_groups[0]["lr"] for optimizer in frame.optimizers] == pytest.approx([0.5, 0.1])
    with pytest.raises(ConfigError, match="2 optimizers"):
        IMPALA(*parts, lr_scheduler=step, lr_scheduler_args=((0.5,),))  # type: ignore[arg-type]


def test_an_optimizer_is_given_as_its_class() -> None:
    qnet = LinearCritic([1.0, 2.0])
    optimizer = torch.optim.Adam(qnet.parameters())
    with pytest.raises(ConfigError, match=r"needs the class Adam, not an instance. Pass torch\.optim\.Adam"):
        DQNApex(qnet, qnet, optimizer, MSE, LocalGroup(), [ModelKeeper()])  # type: ignore[arg-type]


# Devices.


def make_all(device: str) -> list[Frame]:
    """Creates all frames with their models and batches on a device."""
    actor, critic = LinearActor([[0.0, 0.1], [0.2, 0.0]]).to(device), LinearCritic([1.0, 2.0]).to(device)
    qnets = LinearQ([[1.0, 0.0], [0.0, 2.0]]).to(device), LinearQ([[0.0, 0.0], [0.0, 0.0]]).to(device)
    policies = [LinearPolicy([1.0, 0.5]).to(device) for _ in range(2)]
    critics = [ActionCritic([1.0, 2.0], 3.0).to(device) for _ in range(2)]
    parts = (torch.optim.SGD, MSE, LocalGroup(), [ModelKeeper()])
    return [
        A3C(actor, critic, MSE, (GradKeeper(), GradKeeper()), replay_device=device),
        IMPALA(actor, critic, *parts, replay_device=device),  # type: ignore[arg-type]
        DQNApex(*qnets, *parts, replay_device=device),  # type: ignore[arg-type]
        DDPGApex(*policies, *critics, *parts, replay_device=device),  # type: ignore[arg-type]
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="learns on a GPU, and torch sees none here")
def test_frames_learn_the_same_on_a_gpu() -> None:
    learned = []
    for device in ("cpu", "cuda"):
        frames = make_all(device)
        for frame in frames:
            action = 0.5 if isinstance(frame, DDPGApex) else 1
            last = item([1.0, 0.5], action, 3.0, [0.5, 1.0], terminated=True) | {"action_log_prob": -0.7}
            frame.store_episode([item([0.5, 1.0], action, 1.0, [1.0, 0.5]) | {"action_log_prob": -0.7}, last])  # type: ignore[attr-defined]
            frame.update()  # type: ignore[attr-defined]
        learned.append([x.cpu() for frame in frames for net in frame.networks.values() for x in net.parameters()])
    for on_cpu, on_gpu in zip(*learned, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-4, atol=1e-5)


# Saving.


def test_what_was_saved_comes_back_with_its_optimizer_and_epsilon(tmp_path: Path) -> None:
    frame = make_dqn(None, ModelKeeper())
    frame.store_transition(item([1.0, 0.5], 0, 1.0, [1.0, 1.0]))
    for version in (3, 12):
        frame.update()
        frame.act_discrete_with_noise({"state": torch.ones(1, 2)})
        frame.save(tmp_path, version=version)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".safetensors"}
    other = make_dqn(None, ModelKeeper())
    assert other.load(tmp_path) == 12
    assert torch.equal(other.qnet.weight, frame.qnet.weight) and other.epsilon == frame.epsilon
    assert torch.equal(other.qnet_target.weight, frame.qnet_target.weight) and other.num_updates == 2
    other.store_transition(item([1.0, 0.5], 0, 1.0, [1.0, 1.0]))
    frame.update()
    other.update()
    assert torch.equal(other.qnet.weight, frame.qnet.weight)  # Adam's moments were restored
    assert other.load(tmp_path, version=3) == 3 and other.num_updates == 1


def test_networks_can_be_renamed_and_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    frame = make_dqn(None, ModelKeeper())
    frame.save(tmp_path, {"qnet": "online"}, version=1)
    with pytest.raises(ConfigError, match="but not qnet"):
        frame.load(tmp_path)
    assert frame.load(tmp_path, {"qnet": "online"}) == 1
    with pytest.raises(ConfigError, match="network_map names actor"):
        frame.load(tmp_path, {"actor": "online"})
    with pytest.raises(ConfigError, match="version 7 of DQNApex; it has versions 1"):
        frame.load(tmp_path, version=7)
    with pytest.raises(ConfigError, match="it has none"):
        frame.load(tmp_path / "elsewhere")
    frame.qnet = frame.networks["qnet"] = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="does not fit qnet"):
        frame.load(tmp_path, {"qnet": "online"})


def test_a_damaged_version_is_named(tmp_path: Path) -> None:
    frame = make_dqn(None, ModelKeeper())
    frame.save(tmp_path)
    (tmp_path / "DQNApex_0.safetensors").write_bytes(b"half")
    with pytest.raises(ConfigError, match=r"DQNApex_0\.json and its tensors cannot be read"):
        frame.load(tmp_path)


def test_a_save_that_fails_leaves_the_version_that_it_was_to_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*args: object) -> None:
        raise OSError(28, "No space left on device")

    frame = make_dqn(None, ModelKeeper())
    frame.save(tmp_path)
    there = set(tmp_path.iterdir())
    monkeypatch.setattr(saving, "save_file", no_space)
    with pytest.raises(OSError, match="No space"):
        frame.save(tmp_path)
    assert set(tmp_path.iterdir()) == there and frame.load(tmp_path) == 0
