"""Servers without processes: the reduction of gradients, and models in messages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import echelon.servers
from echelon.errors import ConfigError, DivergedError, Refused
from echelon.servers.parameters import (
    ModelError,
    bare,
    check_shapes,
    gradient_of,
    load,
    set_gradient,
    shapes_of,
    state_of,
)
from echelon.servers.reducer import GradReducer


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def with_gradient(value: float, seed: int = 0) -> nn.Module:
    model = net(seed)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    return model


# Reduction.


@pytest.mark.parametrize(("method", "factor"), [("sum", 16.0), ("mean", 1.0)])
def test_sixteen_pushes_through_two_reducers_are_one_known_step(method: str, factor: float) -> None:
    secondary, primary = GradReducer(4, 64, method), GradReducer(4, 64, method)
    model = net()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    gradients = [float(number) for number in range(16)]
    for number in gradients:
        secondary.push(gradient_of(with_gradient(number), "test"))
    while (reduced := secondary.reduce()) is not None:
        primary.push(reduced)
    result = primary.reduce()
    assert result is not None and primary.reduce() is None
    set_gradient(model, result)
    optimizer.step()
    expected = 0.5 * factor * sum(gradients) / 16
    for old, new in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(old - new, torch.full_like(old, expected))
    assert secondary.stats() == {"pushed": 16, "reduced": 16, "queued": 0, "dropped": 0}


@settings(deadline=None)
@given(
    batch=st.integers(1, 5),
    room=st.integers(0, 6),
    actions=st.lists(st.one_of(st.just("reduce"), st.integers(1, 8)), max_size=40),
)
def test_every_gradient_is_reduced_queued_or_counted_as_dropped(
    batch: int, room: int, actions: list[int | str]
) -> None:
    reducer = GradReducer(batch, batch + room)
    waiting: list[float] = []
    number = 0.0
    dropped = 0
    for action in actions:
        if isinstance(action, int):
            for _ in range(action):
                number += 1.0
                waiting.append(number)
                is_full = len(waiting) > batch + room
                waiting = waiting[1:] if is_full else waiting
                dropped += is_full
                assert reducer.push(torch.tensor([number])) is not is_full
        else:
            result = reducer.reduce()
            if len(waiting) < batch:
                assert result is None
            else:
                assert result is not None and float(result) == sum(waiting[:batch])
                waiting = waiting[batch:]
        counts = reducer.stats()
        assert counts["pushed"] == counts["reduced"] + counts["queued"] + counts["dropped"] == number
        assert counts["queued"] == len(waiting) <= batch + room and counts["dropped"] == dropped


def test_a_reduction_leaves_alone_what_was_pushed() -> None:
    reducer, pushed = GradReducer(2, 4, "mean"), [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])]
    for gradient in pushed:
        reducer.push(gradient)
    result = reducer.reduce()
    assert result is not None and result.tolist() == [2.0, 4.0]
    assert [gradient.tolist() for gradient in pushed] == [[1.0, 2.0], [3.0, 6.0]]


def test_dropping_is_told_at_the_first_the_tenth_and_the_hundredth(caplog: pytest.LogCaptureFixture) -> None:
    reducer = GradReducer(2, 3, name="gradient server g, primary reducer 0")
    for _ in range(3):
        reducer.push(torch.zeros(1))
    assert not caplog.messages
    for _ in range(150):
        reducer.push(torch.zeros(1))
    told = [message.partition(" gradients")[0] for message in caplog.messages]
    assert told == [f"gradient server g, primary reducer 0: {n} of {n + 3}" for n in (1, 10, 100)]


def test_a_reducer_refuses_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match="reduce_method='max' is none of sum, mean"):
        GradReducer(reduce_method="max")
    with pytest.raises(ConfigError, match="reduce_batch_size=0 must be at least 1"):
        GradReducer(0)
    with pytest.raises(ConfigError, match=r"reduce_batch_size=4 .* at most max_queue_size=3"):
        GradReducer(4, 3)
    reducer = GradReducer(2, 4)
    reducer.push(torch.zeros(5))
    with pytest.raises(Refused, match=r"shape \(6,\) was refused: the shape must be \(5,\)"):
        reducer.push(torch.zeros(6))
    with pytest.raises(Refused, match=r"shape \(1, 5\)"):
        reducer.push(torch.zeros(1, 5))
    assert reducer.stats() == {"pushed": 1, "reduced": 0, "queued": 1, "dropped": 0}


# Models in messages.


def test_a_gradient_is_one_vector_and_comes_back_as_it_was() -> None:
    model = net(1)
    model(torch.randn(5, 3)).square().sum().backward()
    flat = gradient_of(model, "test")
    assert flat.shape == (sum(parameter.numel() for parameter in model.parameters()),)
    other = net(2)
    set_gradient(other, flat)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


def test_a_gradient_that_is_missing_or_not_finite_is_refused_by_name() -> None:
    model = net()
    with pytest.raises(RuntimeError, match=r"server x: parameter 0.weight has no gradient to push"):
        gradient_of(model, "server x")
    model = with_gradient(1.0)
    parameter = dict(model.named_parameters())["2.bias"]
    parameter.grad = torch.tensor([1.0, float("nan")])
    with pytest.raises(DivergedError, match=r"gradient of 2.bias has a NaN"):
        gradient_of(model, "server x")
    parameter.grad = torch.full((2,), 3e38)  # finite values with an infinite sum
    assert gradient_of(model, "server x").isfinite().all()


def test_weights_and_buffers_arrive_in_another_model() -> None:
    model, other = net(1), net(2)
    model(torch.randn(5, 3))  # changes the normalization statistics and their counter
    state = state_of(model, "test")
    load(other, state, "test")
    for name, value in other.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    assert not torch.equal(state["0.weight"], model.state_dict()["0.weight"])  # it is a copy


def test_a_model_that_does_not_fit_is_refused_by_name_and_left_alone() -> None:
    state = state_of(net(), "test")
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    before = state_of(other, "test")
    with pytest.raises(ModelError, match=r"model m: 2.weight has the shape \[3, 4\] here and \[2, 4\] at the server"):
        load(other, state, "model m")
    with pytest.raises(ModelError, match=r"model m: 2.bias, 2.weight is only in the model or"):
        load(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), state, "model m")
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())
    with pytest.raises(ModelError, match=r"parameter 2.weight has the shape \[3, 4\] here and \[2, 4\] in the managed"):
        check_shapes(other, shapes_of(net()), "server x")
    with pytest.raises(ModelError, match=r"parameter 0.bias has the shape None here and \[4\]"):
        check_shapes(nn.Sequential(nn.Linear(3, 4, bias=False)), shapes_of(net()), "server x")
    check_shapes(net(3), shapes_of(net()), "server x")


def test_wrapped_models_travel_as_the_one_inside() -> None:
    model = with_gradient(2.0)
    wrapped = nn.DataParallel(model)
    assert bare(wrapped) is model and bare(model) is model
    assert state_of(wrapped, "test").keys() == state_of(model, "test").keys()
    assert torch.equal(gradient_of(wrapped, "test"), gradient_of(model, "test"))


def test_only_tensors_travel() -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> str:
            return "text"

    with pytest.raises(ModelError, match="_extra_state of the model is a str"):
        state_of(Odd(2, 2), "model m")


def test_everything_that_is_promised_can_be_imported() -> None:
    for name in echelon.servers.__all__:
        assert getattr(echelon.servers, name).__name__ == name.replace("OrderedServerSimple", "OrderedServer")
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        echelon.servers.Nothing  # noqa: B018
