"""Networks: every space encodes, recurrent state resets, statistics merge, invalid spaces are refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from torch import Tensor, nn

from echelon.config import NetworkConfig
from echelon.custom_network import build_network
from echelon.errors import ConfigError
from echelon.layers import Image, channels_last
from echelon.networks import ActorCritic, Encoders, action_mask, tanh
from echelon.objectives.distributions import make_distribution
from echelon.schema import Spaces, map_tree

VECTOR = gs.Box(-1.0, 1.0, (5,))
T, B = 7, 4


def build(observation: gym.Space, action: gym.Space | None = None, **config: Any) -> ActorCritic:
    action = action or gs.Discrete(3)
    torch.manual_seed(0)
    num_params = make_distribution(action).num_params
    return build_network(NetworkConfig(**config), Spaces(observation, action), num_params)


def observe(space: gym.Space, *leading: int) -> Any:
    """Random observations of `space` as tensors with `leading` dimensions."""
    match space:
        case gs.Dict():
            return {key: observe(space[key], *leading) for key in space.spaces}
        case gs.Tuple():
            return tuple(observe(sub, *leading) for sub in space.spaces)
    space.seed(0)
    rows = np.stack([space.sample() for _ in range(int(np.prod(leading)))])
    return torch.as_tensor(rows).reshape(*leading, *rows.shape[1:])


SPACES: dict[str, gym.Space] = {
    "vector": VECTOR,
    "matrix": gs.Box(-1.0, 1.0, (2, 3)),
    "scalar": gs.Box(-1.0, 1.0, ()),
    "bytes": gs.Box(0, 255, (6,), np.uint8),
    "discrete": gs.Discrete(4, start=2),
    "multi_discrete": gs.MultiDiscrete([2, 3], start=[1, 0]),
    "multi_binary": gs.MultiBinary(4),
    "image": gs.Box(0, 255, (40, 36, 3), np.uint8),
    "dict": gs.Dict({"b": VECTOR, "a": gs.Discrete(2), "c": gs.Tuple((gs.Box(0, 255, (9, 9, 1), np.uint8), VECTOR))}),
}


@pytest.mark.parametrize("core", ["none", "lstm", "gru"])
@pytest.mark.parametrize("name", SPACES)
def test_every_space_encodes_and_acting_agrees_with_learning(name: str, core: str) -> None:
    network = build(SPACES[name], core=core, core_size=16)
    observation = observe(SPACES[name], T, B)
    first = torch.zeros(T, B, dtype=torch.bool)
    with torch.inference_mode():
        state = network.initial_state(B, "cpu")
        output = network(observation, state, first)
        row = map_tree(lambda leaf: leaf[0], observation)
        step, valued = (network.act(row, state, first[0], with_value=wanted) for wanted in (False, True))
    assert output.params.shape == (T, B, 3) and output.value.shape == (T, B)
    assert output.params.dtype == output.value.dtype == torch.float32
    assert len(output.state) == len(network.state_shapes) == {"none": 0, "gru": 1, "lstm": 2}[core]
    assert step.value is None and valued.value is not None
    torch.testing.assert_close(step.params, output.params[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(valued.value, output.value[0], rtol=1e-4, atol=1e-6)
    assert torch.equal(valued.params, step.params)


@pytest.mark.parametrize("core", ["lstm", "gru"])
@pytest.mark.parametrize("resets", ["none", "row 0", "anywhere"])
def test_a_sequence_equals_its_steps(core: str, resets: str) -> None:
    network = build(VECTOR, core=core, core_size=16)
    generator = torch.Generator().manual_seed(1)
    observation = torch.randn(T, B, 5, generator=generator)
    first = torch.zeros(T, B, dtype=torch.bool)
    if resets != "none":
        first[0, 1] = True
    if resets == "anywhere":
        first |= torch.rand(T, B, generator=generator) < 0.3
    start = tuple(torch.randn(B, *shape, generator=generator) for shape in network.state_shapes)
    with torch.no_grad():
        nn.init.normal_(network.get_parameter("policy_head.weight"))  # the small initial head would hide differences
        output = network(observation, start, first)
        state = start
        for t in range(T):
            step = network.act(observation[t], state, first[t])
            torch.testing.assert_close(step.params, output.params[t], rtol=1e-4, atol=1e-5)
            state = step.state
    torch.testing.assert_close(state, output.state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("core", ["lstm", "gru"])
def test_gradients_agree_whether_or_not_the_sequence_runs_in_one_call(core: str) -> None:
    network = build(VECTOR, core=core, core_size=16)
    observation, first = torch.randn(T, B, 5), torch.zeros(T, B, dtype=torch.bool)
    state = network.initial_state(B, "cpu")
    network(observation, state, first).value.square().sum().backward()
    whole = {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
    network.zero_grad()
    values = []
    for t in range(T):
        output = network(observation[t : t + 1], state, first[t : t + 1])
        state = output.state
        values.append(output.value)
    torch.cat(values).square().sum().backward()
    assert {"core.cell.weight_ih", "core.cell.weight_hh"} <= whole.keys()
    for name, gradient in whole.items():
        torch.testing.assert_close(network.get_parameter(name).grad, gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("core", ["lstm", "gru"])
def test_nothing_is_remembered_across_episodes(core: str) -> None:
    network = build(VECTOR, core=core, core_size=16)
    observation, first = torch.randn(T, B, 5), torch.zeros(T, B, dtype=torch.bool)
    first[3] = True
    changed = observation.clone()
    changed[:3] += 1.0
    state = network.initial_state(B, "cpu")
    one, other = (network(x, state, first).value for x in (observation, changed))
    torch.testing.assert_close(one[3:], other[3:])
    assert not torch.allclose(one[:3], other[:3])


def test_torsos_are_separate_unless_shared_or_remembering_or_seeing() -> None:
    def touched(network: ActorCritic, observation: Tensor) -> set[str]:
        """The parameters that the value alone has a gradient for, less its head."""
        first = torch.zeros(1, 2, dtype=torch.bool)
        network(observation, network.initial_state(2, "cpu"), first).value.sum().backward()
        names = {name.split(".")[0] for name, p in network.named_parameters() if p.grad is not None}
        return names - {"value_head"}

    vector, image = torch.randn(1, 2, 5), torch.zeros(1, 2, 9, 9, 3, dtype=torch.uint8)
    assert touched(build(VECTOR), vector) == {"value_torso"}
    assert touched(build(VECTOR, shared=True), vector) == {"torso"}
    assert touched(build(VECTOR, core="gru"), vector) == {"torso", "core"}
    assert touched(build(gs.Box(0, 255, (9, 9, 3), np.uint8)), image) == {"encoders"}


def test_initial_weights_are_orthogonal_with_the_gains_of_the_config() -> None:
    network = build(VECTOR, hidden=(16,))
    gains = {"torso.layers.0": 2**0.5, "value_torso.layers.0": 2**0.5, "policy_head": 0.01, "value_head": 1.0}
    for name, gain in gains.items():
        weight = network.get_parameter(f"{name}.weight").detach()
        torch.testing.assert_close(torch.linalg.svdvals(weight), torch.full((min(weight.shape),), gain))
        assert (network.get_parameter(f"{name}.bias") == 0).all()


def test_continuous_actions_have_a_log_std_that_sees_nothing() -> None:
    network = build(VECTOR, gs.Box(-1.0, 1.0, (2,)), initial_log_std=-0.5)
    output = network(torch.randn(T, B, 5), (), torch.zeros(T, B, dtype=torch.bool))
    assert output.params.shape == (T, B, 4)
    assert (output.params[..., 2:] == -0.5).all() and not (output.params[..., :2] == 0).any()
    output.params.sum().backward()
    assert torch.equal(network.get_parameter("log_std").grad, torch.full((2,), float(T * B)))  # type: ignore[arg-type]


@pytest.mark.parametrize("side", [84, 10])
def test_images_read_the_same_in_either_order(side: int) -> None:
    first_space, last_space = (gs.Box(0, 255, s, np.uint8) for s in ((3, side, side), (side, side, 3)))
    chw, hwc = build(first_space), build(last_space)
    hwc.load_state_dict(chw.state_dict())
    image = observe(first_space, 2)
    first = torch.zeros(2, dtype=torch.bool)
    got = hwc.act(image.permute(0, 2, 3, 1), (), first).params
    torch.testing.assert_close(got, chw.act(image, (), first).params, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "last"),
    [((84, 84, 4), True), ((4, 84, 84), False), ((210, 160, 3), True), ((84, 84, 12), True), ((119, 8, 8), False)],
)
def test_which_axis_holds_the_channels(shape: tuple[int, ...], last: bool) -> None:
    assert channels_last(shape) is last


def test_the_nature_cnn_reads_36_pixels_and_the_small_one_less() -> None:
    assert Image((4, 36, 36), 1.0).linear.in_features == 64
    assert len(Image((4, 35, 36), 1.0).convolutions) == 2
    assert Image((4, 84, 84), 1.0).linear.in_features == 3136


def test_one_hots_start_where_the_space_starts() -> None:
    network = build(gs.Tuple((gs.Discrete(3, start=5), gs.MultiDiscrete([2, 3], start=[0, 1]))))
    observation = (torch.tensor([5, 7]), torch.tensor([[0, 1], [1, 3]]))
    features = torch.cat([encoder(leaf) for encoder, leaf in zip(network.encoders, observation, strict=True)], -1)  # type: ignore[operator, arg-type]
    assert features.tolist() == [[1, 0, 0, 1, 0, 1, 0, 0], [0, 0, 1, 0, 1, 0, 0, 1]]


def test_the_mask_is_returned_and_not_encoded() -> None:
    space = gs.Dict({"action_mask": gs.MultiBinary(3), "x": VECTOR})
    network = build(space)
    observation = {"action_mask": torch.ones(B, 3), "x": torch.randn(B, 5)}
    assert action_mask(observation) is observation["action_mask"]
    assert action_mask(observation["x"]) is None and action_mask({"x": observation["x"]}) is None
    first = torch.zeros(B, dtype=torch.bool)
    other = {**observation, "action_mask": torch.zeros(B, 3)}
    assert torch.equal(network.act(observation, (), first).params, network.act(other, (), first).params)


@pytest.mark.parametrize("action", [gs.Discrete(4), gs.Box(-1.0, 1.0, (3,))])
def test_a_mask_that_does_not_fit_is_refused(action: gym.Space) -> None:
    with pytest.raises(ConfigError, match=r"action_mask.*shape \(3,\)"):
        build(gs.Dict({"action_mask": gs.MultiBinary(3), "x": VECTOR}), action)


def test_a_mask_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="no entry besides"):
        build(gs.Dict({"action_mask": gs.MultiBinary(3)}))


def test_the_normalizer_has_the_mean_and_std_of_all_valid_rows() -> None:
    space = gs.Dict({"a": VECTOR, "b": gs.Discrete(2), "m": gs.Box(-1.0, 1.0, (2, 2))})
    network = build(space, normalize_observation=True)
    rng = np.random.default_rng(0)
    seen: dict[str, list[np.ndarray]] = {"a": [], "m": []}
    for size in (1, 5, 0, 20):
        a = rng.normal(300.0, 2.0, (size, B, 5)).astype(np.float32)
        m = rng.normal(-1.0, 0.1, (size, B, 2, 2)).astype(np.float32)
        valid = rng.random((size, B)) < 0.7
        observation = {"a": torch.tensor(a), "b": torch.zeros(size, B, dtype=torch.int64), "m": torch.tensor(m)}
        network.update_normalizer(observation, torch.tensor(valid))
        seen["a"].append(a[valid])
        seen["m"].append(m[valid].reshape(-1, 4))
    network.update_normalizer(observation, torch.zeros(20, B, dtype=torch.bool))  # nothing valid: nothing changes
    state = network.state_dict()
    for i, key in ((0, "a"), (2, "m")):
        rows = np.concatenate(seen[key]).astype(np.float64)
        assert state[f"encoders.{i}.normalizer.count"] == len(rows)
        np.testing.assert_allclose(state[f"encoders.{i}.normalizer.mean"], rows.mean(0), rtol=1e-6)
        np.testing.assert_allclose(state[f"encoders.{i}.normalizer.std"], rows.std(0), rtol=1e-5)


def test_normalised_observations_are_clipped_and_statistics_travel() -> None:
    network, other = build(VECTOR, normalize_observation=True), build(VECTOR, normalize_observation=True)
    network.update_normalizer(torch.randn(50, B, 5) * 3 + 7, torch.ones(50, B, dtype=torch.bool))
    other.load_state_dict(network.state_dict())
    first = torch.zeros(B, dtype=torch.bool)
    far, farther = (other.act(torch.full((B, 5), x), (), first).params for x in (1e3, 1e6))
    near = other.act(torch.full((B, 5), 8.0), (), first).params
    assert torch.equal(far, farther) and not torch.allclose(near, far)
    assert torch.equal(near, network.act(torch.full((B, 5), 8.0), (), first).params)


def test_normalised_observations_are_multiplied_by_their_scale() -> None:
    usual, scaled = (build(VECTOR, normalize_observation=True, observation_scale=scale) for scale in (1.0, 4.0))
    observation = torch.randn(B, 5)
    assert torch.equal(scaled.encoders(observation), 4.0 * usual.encoders(observation))  # type: ignore[operator]


def test_a_constant_feature_is_normalised_to_zero() -> None:
    network = build(VECTOR, normalize_observation=True)
    network.update_normalizer(torch.full((3, B, 5), 4.0), torch.ones(3, B, dtype=torch.bool))
    assert (network.encoders[0](torch.full((B, 5), 4.0)) == 0).all()  # type: ignore[operator, index]


@pytest.mark.parametrize("core", ["none", "lstm", "gru"])
def test_autocast_gives_float32_outputs_near_the_exact_ones(core: str) -> None:
    network = build(VECTOR, core=core)
    observation, first = torch.randn(T, B, 5), torch.zeros(T, B, dtype=torch.bool)
    first[2, 0] = True
    state = network.initial_state(B, "cpu")
    exact = network(observation, state, first)
    with torch.autocast("cpu", torch.bfloat16):
        output = network(observation, state, first)
        step = network.act(observation[0], state, first[0])
    assert output.params.dtype == output.value.dtype == step.params.dtype == torch.float32
    assert all(leaf.dtype == torch.float32 for leaf in (*output.state, *step.state))
    torch.testing.assert_close(output.value, exact.value, rtol=0.1, atol=0.1)


def test_a_forward_without_memory_compiles_into_one_graph() -> None:
    space = gs.Dict({"x": VECTOR, "i": gs.Box(0, 255, (9, 9, 3), np.uint8), "d": gs.Discrete(3)})
    network = build(space, gs.Box(-1.0, 1.0, (2,)), normalize_observation=True)
    observation, first = observe(space, 3, B), torch.zeros(3, B, dtype=torch.bool)
    state = network.initial_state(B, "cpu")
    output = torch.compile(network, backend="eager", fullgraph=True)(observation, state, first)
    expected = network(observation, state, first)
    torch.testing.assert_close(output.params, expected.params, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(output.value, expected.value, rtol=1e-4, atol=1e-6)


def test_the_same_seed_gives_the_same_network() -> None:
    one, other = build(SPACES["dict"], core="lstm"), build(SPACES["dict"], core="lstm")
    pairs = zip(one.named_parameters(), other.named_parameters(), strict=True)
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


class Plain(nn.Module):
    """A user's module over plain batches."""

    def __init__(self, num_params: int, value_shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.linear = nn.Linear(5, num_params)
        self.value_shape = value_shape

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        params = self.linear(observation)
        return params, params.sum(-1).reshape(len(observation), *self.value_shape)


class Changed(Plain):
    """A user's module with a mistake in its value."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__(3)
        self.change = change

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        params, value = super().forward(observation)
        return params, self.change(value)


class Counter(nn.Module):
    """A user's module with memory: its value is how many steps the episode has."""

    state_shapes = ((1,),)

    def __init__(self, num_params: int) -> None:
        super().__init__()
        self.num_params = num_params

    def forward(self, observation: Tensor, state: tuple[Tensor], first: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor]]:
        (count,) = state
        values = []
        for row in first:
            count = torch.where(row.unsqueeze(-1), 0.0, count) + 1.0
            values.append(count)
        value = torch.stack(values)
        return value.expand(*first.shape, self.num_params), value.squeeze(-1), (count,)


@pytest.fixture
def zoo(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Spaces, int], Any]], NetworkConfig]:
    """Puts a factory where "zoo:factory" finds it."""

    def put(factory: Callable[[Spaces, int], Any]) -> NetworkConfig:
        module = ModuleType("zoo")
        module.factory = factory  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "zoo", module)
        return NetworkConfig(name="zoo:factory")

    return put


SMALL = Spaces(VECTOR, gs.Discrete(3))
Zoo = Callable[[Callable[[Spaces, int], Any]], NetworkConfig]


def test_a_plain_module_sees_batches(zoo: Zoo) -> None:
    network = build_network(zoo(lambda spaces, num_params: Plain(num_params)), SMALL, 3)
    observation, first = torch.randn(T, B, 5), torch.zeros(T, B, dtype=torch.bool)
    output = network(observation, (), first)
    assert network.state_shapes == () and output.value.shape == (T, B)
    torch.testing.assert_close(network.act(observation[2], (), first[2]).params, output.params[2])
    value = network.act(observation[2], (), first[2], with_value=True).value
    assert value is not None
    torch.testing.assert_close(value, output.value[2])


def test_a_module_with_state_sees_sequences(zoo: Zoo) -> None:
    network = build_network(zoo(lambda spaces, num_params: Counter(num_params)), SMALL, 3)
    first = torch.tensor([[True], [False], [True], [False], [False]])
    output = network(torch.zeros(5, 1, 5), network.initial_state(1, "cpu"), first)
    assert output.value.flatten().tolist() == [1, 2, 1, 2, 3]
    step = network.act(torch.zeros(1, 5), output.state, torch.tensor([False]))
    assert step.params.tolist() == [[4, 4, 4]] and step.state[0].tolist() == [[4]]


@pytest.mark.parametrize("reply", [("params", "value", "state"), ("params", None, "state"), ("params", "state")])
def test_a_module_may_act_by_itself_with_a_value_or_without(zoo: Zoo, reply: tuple[str | None, ...]) -> None:
    class Quick(Counter):
        def act(self, observation: Any, state: Any, first: Any) -> Any:
            params, value, state = self(observation[None], state, first[None])
            found = {"params": params[0] + 0.5, "value": value[0] + 0.5, "state": state}
            return tuple(None if name is None else found[name] for name in reply)

    network = build_network(zoo(lambda spaces, num_params: Quick(num_params)), SMALL, 3)
    question = torch.zeros(1, 5), network.initial_state(1, "cpu"), torch.tensor([False])
    assert network.act(*question).params.tolist() == [[1.5, 1.5, 1.5]]
    valued = network.act(*question, with_value=True)
    own = 0.5 if "value" in reply else 0.0  # else its forward gives one
    assert valued.value is not None and valued.value.tolist() == [1 + own]
    assert valued.params.tolist() == [[1 + own] * 3] and valued.state[0].tolist() == [[1]]


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda spaces, num_params: Plain(num_params + 1), r"zoo:factory.*Discrete\(3\).*\(6, 4\).*\(6, 3\)"),
        (lambda spaces, num_params: Plain(num_params, (1,)), r"value has the shape \(6, 1\), expected \(6,\)"),
        (lambda spaces, num_params: Changed(lambda x: x.squeeze()), r"value has the shape \(\), expected \(1,\)"),
        (lambda spaces, num_params: Changed(lambda x: x / 0), r"zoo:factory.*(params|value) has NaN or infinity"),
        (lambda spaces, num_params: Changed(lambda x: x.detach()), r"zoo:factory.*value does not depend on the param"),
        (lambda spaces, num_params: nn.Linear(5, 3), r"zoo:factory.*failed.*must return \(params, value\)"),
        (lambda spaces, num_params: nn.Linear(6, 3), r"zoo:factory.*failed.*RuntimeError"),
        (lambda spaces, num_params: 7, r"returned a int"),
    ],
)
def test_a_module_that_does_not_fit_is_named(zoo: Zoo, factory: Callable[[Spaces, int], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_network(zoo(factory), SMALL, 3)


def test_the_space_in_an_error_has_no_runs_of_blanks(zoo: Zoo) -> None:
    high = np.array([4.8, np.inf], np.float32)
    with pytest.raises(ConfigError, match="failed on an observation of") as caught:
        build_network(zoo(lambda spaces, num_params: nn.Linear(5, 3)), Spaces(gs.Box(-high, high), gs.Discrete(3)), 3)
    assert "  " not in str(caught.value).partition(" with ")[0]


@pytest.mark.parametrize("name", ["resnet", "no_such_module:factory", "echelon.networks:nothing", ":x", "x:"])
def test_a_name_that_leads_nowhere_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        build_network(NetworkConfig(name=name), SMALL, 3)


def test_the_wide_tanh_is_tanh_and_so_is_its_gradient() -> None:
    x = torch.linspace(-12.0, 12.0, 10_001, requires_grad=True)
    y = tanh(x)
    y.backward(torch.cos(x.detach()))
    exact = x.detach().double().requires_grad_()
    torch.tanh(exact).backward(torch.cos(exact.detach()))
    torch.testing.assert_close(y.double(), torch.tanh(exact.detach()), rtol=0.0, atol=3e-7)
    assert x.grad is not None and exact.grad is not None
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("shape", [(84, 84), (12, 40)])
def test_greyscale_images_need_no_channel_axis(shape: tuple[int, int]) -> None:
    flat, deep = (gym.spaces.Box(0, 255, size, np.uint8) for size in (shape, (1, *shape)))
    grey, usual = (Encoders(NetworkConfig(), space) for space in (flat, deep))
    grey.load_state_dict(usual.state_dict())
    pixels = torch.randint(0, 256, (3, *shape), dtype=torch.uint8)
    assert grey.only_image
    assert torch.equal(grey(pixels), usual(pixels.unsqueeze(1)))
    in_dict = Encoders(NetworkConfig(), gym.spaces.Dict(camera=flat, speed=gym.spaces.Box(-1, 1, (2,))))
    assert in_dict.has_image


@pytest.mark.parametrize(("shape", "dtype"), [((84, 84), np.float32), ((7, 84), np.uint8), ((84,), np.uint8)])
def test_tables_are_not_taken_for_greyscale_images(shape: tuple[int, ...], dtype: type) -> None:
    assert not Encoders(NetworkConfig(), gym.spaces.Box(0, 255, shape, dtype)).has_image
