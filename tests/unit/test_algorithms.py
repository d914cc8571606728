"""The on-policy algorithms against their equations, computed lane by lane in float64 numpy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, get_args

import gymnasium as gym
import numpy as np
import pytest
import torch

from echelon.algorithms import Impala, Model, Ppo, build_algorithm
from echelon.algorithms.ppo import Minibatch
from echelon.config import ImpalaConfig, NetworkConfig, PpoConfig, replace
from echelon.errors import ConfigError
from echelon.presets.ppo import LagCorrection
from echelon.schema import Batch, Spaces, map_tree

Array = np.ndarray[Any, Any]
T, B, F, A = 6, 4, 3, 3
MASKED = gym.spaces.Dict({"x": gym.spaces.Box(-9.0, 9.0, (F,)), "action_mask": gym.spaces.MultiBinary(A)})
SPACES = Spaces(MASKED, gym.spaces.Discrete(A))
CORRECTIONS: tuple[LagCorrection, ...] = get_args(LagCorrection)
NAMES = ("policy_head.weight", "policy_head.bias", "value_head.weight", "value_head.bias")


def make_model(core: str = "none", **config: Any) -> Model:
    """A linear network (no hidden layer) whose weights are large enough to matter."""
    model = Model(NetworkConfig(hidden=(), core=core, core_size=5, **config), SPACES)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.network.named_parameters():
        if name in NAMES:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def make_batch(seed: int = 0) -> Batch:
    """Four lanes: one that terminates, one that truncates, one whose environment was restarted, one that goes on."""
    draw = np.random.default_rng(seed)
    mask = (draw.random((T + 1, B, A)) < 0.7).astype(np.int64)
    mask[..., 0] = 1
    action = np.array([[draw.choice(np.flatnonzero(mask[t, b])) for b in range(B)] for t in range(T)])
    terminated, truncated, valid = (np.zeros((T, B), bool), np.zeros((T, B), bool), np.ones((T, B), bool))
    terminated[1, 0], truncated[2, 1] = True, True
    valid[2, 0] = valid[3, 1] = valid[4, 2] = False
    first = np.concatenate([np.array([[True, False, False, True]]), ~valid])
    reward = np.where(valid, draw.normal(size=(T, B)), 0.0)
    x = draw.normal(size=(T + 1, B, F))
    tensors = {
        "first": first,
        "action": action,
        "log_prob": -draw.random((T, B)).astype(np.float32) - 0.5,
        "reward": reward.astype(np.float32),
        "terminated": terminated,
        "truncated": truncated,
        "valid": valid,
    }
    observation = {"x": torch.from_numpy(x.astype(np.float32)), "action_mask": torch.from_numpy(mask)}
    return Batch(observation, **{k: torch.from_numpy(v) for k, v in tensors.items()}, state=(), lanes=torch.arange(B))


def gradients(model: Model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.gradients.zero_()
    loss.backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.clone() for name, p in model.network.named_parameters() if p.grad is not None}


@dataclasses.dataclass
class Reference:
    """The linear policy and value of a batch in float64."""

    x: Array
    mask: Array
    weights: dict[str, Array]

    @classmethod
    def of(cls, model: Model, observation: Any) -> Reference:
        weights = {n: p.detach().numpy().astype(np.float64) for n, p in model.network.named_parameters()}
        return cls(observation["x"].numpy().astype(np.float64), observation["action_mask"].numpy(), weights)

    @property
    def log_p(self) -> Array:
        logits = self.x @ self.weights["policy_head.weight"].T + self.weights["policy_head.bias"]
        weight = np.where(self.mask == 1, np.exp(logits), 0.0)
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(weight / weight.sum(-1, keepdims=True)))

    @property
    def value(self) -> Array:
        return np.asarray((self.x @ self.weights["value_head.weight"].T + self.weights["value_head.bias"])[..., 0])

    @property
    def entropy(self) -> Array:
        log_p = self.log_p
        return -np.where(self.mask == 1, np.exp(log_p) * np.where(self.mask == 1, log_p, 0.0), 0.0).sum(-1)

    def log_prob(self, action: Array) -> Array:
        return np.take_along_axis(self.log_p, action[..., None], -1)[..., 0]

    def moved(self, name: str, index: tuple[int, ...], by: float) -> Reference:
        weights = {key: value.copy() for key, value in self.weights.items()}
        weights[name][index] += by
        return dataclasses.replace(self, weights=weights)


def valid_mean(x: Array, valid: Array) -> float:
    return float(x[valid].mean())


def vtrace_by_definition(
    batch: Batch, value: Array, log_rho: Array, discount: float, trace_lambda: float, clips: tuple[float, float]
) -> tuple[Array, Array]:
    """Targets and advantages, each written out as the sum of eq. 1, lane by lane, up to the end of the episode."""
    valid, reward = batch.valid.numpy(), batch.reward.numpy().astype(np.float64)
    discounts = discount * (1.0 - batch.terminated.numpy())
    rho, c = (np.minimum(np.exp(log_rho), clip) for clip in clips)
    target, advantage = value[:-1].copy(), np.zeros((T, B))
    for b in range(B):
        for s in range(T):
            factor = 1.0
            for t in range(s, T):
                if not valid[t, b]:
                    break
                delta = rho[t, b] * (reward[t, b] + discounts[t, b] * value[t + 1, b] - value[t, b])
                target[s, b] += factor * delta
                factor *= trace_lambda * c[t, b] * discounts[t, b]
        for s in range(T):
            if valid[s, b]:
                goes_on = s + 1 < T and valid[s + 1, b]
                after = target[s + 1, b] if goes_on else value[s + 1, b]
                advantage[s, b] = rho[s, b] * (reward[s, b] + discounts[s, b] * after - value[s, b])
    return target, advantage


def gae_by_definition(batch: Batch, value: Array, discount: float, trace_lambda: float) -> Array:
    valid, reward = batch.valid.numpy(), batch.reward.numpy().astype(np.float64)
    discounts = discount * (1.0 - batch.terminated.numpy())
    advantage = np.zeros((T, B))
    for b in range(B):
        for s in range(T):
            factor = 1.0
            for t in range(s, T):
                if not valid[t, b]:
                    break
                advantage[s, b] += factor * (reward[t, b] + discounts[t, b] * value[t + 1, b] - value[t, b])
                factor *= discounts[t, b] * trace_lambda
    return advantage


def ahead_by_definition(batch: Batch, value: Array, target: Array, discount: float, trace_lambda: float) -> Array:
    """V-trace's advantage without the ratio of the step itself, with the targets of later steps mixed in by lambda."""
    valid, reward = batch.valid.numpy(), batch.reward.numpy().astype(np.float64)
    discounts = discount * (1.0 - batch.terminated.numpy())
    advantage = np.zeros((T, B))
    for t, b in np.argwhere(valid):
        after = value[t + 1, b]
        if t + 1 < T and valid[t + 1, b]:
            after += trace_lambda * (target[t + 1, b] - after)
        advantage[t, b] = reward[t, b] + discounts[t, b] * after - value[t, b]
    return advantage


def numeric_gradient(loss: Any, at: Reference) -> dict[str, Array]:
    step, found = 1e-6, {}
    for name in NAMES:
        found[name] = np.zeros_like(at.weights[name])
        for index in np.ndindex(found[name].shape):
            found[name][index] = (loss(at.moved(name, index, step)) - loss(at.moved(name, index, -step))) / (2 * step)
    return found


@pytest.mark.parametrize("trace_lambda", [1.0, 0.9])
@pytest.mark.parametrize("normalize", [False, True])
def test_impala_is_its_equations_and_its_gradient(normalize: bool, trace_lambda: float) -> None:
    config = ImpalaConfig(
        discount=0.9, rho_clip=1.2, c_clip=0.8, trace_lambda=trace_lambda, value_weight=0.7, entropy_weight=0.03,
        normalize_advantage=normalize,
    )  # fmt: skip
    model, batch = make_model(), make_batch()
    (loss,) = Impala(config, model, 0).losses(batch)
    at, action, valid = Reference.of(model, batch.observation), batch.action.numpy(), batch.valid.numpy()
    steps = dataclasses.replace(at, x=at.x[:-1], mask=at.mask[:-1])
    log_rho = steps.log_prob(action) - batch.log_prob.numpy()
    target, advantage = vtrace_by_definition(batch, at.value, log_rho, 0.9, trace_lambda, (1.2, 0.8))
    if normalize:
        advantage = (advantage - advantage[valid].mean()) / advantage[valid].std()

    def parts(r: Reference) -> dict[str, float]:
        return {
            "loss.policy": -valid_mean(advantage * r.log_prob(action), valid),
            "loss.value": 0.5 * valid_mean((r.value - target) ** 2, valid),
            "entropy": valid_mean(r.entropy, valid),
        }

    def total(r: Reference) -> float:
        p = parts(r)
        return p["loss.policy"] + 0.7 * p["loss.value"] - 0.03 * p["entropy"]

    for name, expected in parts(steps).items():
        assert float(loss.metrics[name].detach()) == pytest.approx(expected, rel=1e-4), name
    assert float(loss.value.detach()) == pytest.approx(total(steps), rel=1e-4)
    expected_gradients = numeric_gradient(total, steps)
    for name, gradient in gradients(model, loss.value).items():
        np.testing.assert_allclose(gradient.numpy(), expected_gradients[name], rtol=2e-3, atol=2e-5, err_msg=name)


def ppo_minibatch(config: PpoConfig, model: Model, batch: Batch) -> tuple[Ppo, Minibatch]:
    ppo = Ppo(replace(config, epochs=1, minibatches=1), model, 0)
    (minibatch,) = ppo.minibatches(batch)
    return ppo, minibatch


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("value_clip", [0.0, 0.1])
def test_ppo_is_its_equations_and_its_gradient(value_clip: float, correction: LagCorrection) -> None:
    config = PpoConfig(
        discount=0.9, gae_lambda=0.8, clip=0.2, value_clip=value_clip, entropy_weight=0.03, lag_correction=correction
    )
    model, batch = make_model(), make_batch()
    ppo, minibatch = ppo_minibatch(config, model, batch)
    action, valid, behaviour = batch.action.numpy(), batch.valid.numpy(), batch.log_prob.numpy().astype(np.float64)
    before = Reference.of(model, batch.observation)
    old_value = before.value[:-1]
    arrival = dataclasses.replace(before, x=before.x[:-1], mask=before.mask[:-1]).log_prob(action)
    rho = np.exp(arrival - behaviour)
    proximal, weight, low, high = behaviour, np.ones_like(rho), np.full_like(rho, 0.8), np.full_like(rho, 1.2)
    if correction == "decoupled":
        proximal, weight = arrival, np.minimum(rho, 1.0)
        low, high = np.clip(0.6 / rho, 0.8, 1.2), np.clip(1.4 / rho, 0.8, 1.2)
    if correction == "vtrace":
        target, _ = vtrace_by_definition(batch, before.value, arrival - behaviour, 0.9, 0.8, (1.0, 1.0))
        advantage = ahead_by_definition(batch, before.value, target, 0.9, 0.8)
    else:
        advantage = gae_by_definition(batch, before.value, 0.9, 0.8)
        target = advantage + old_value
    # The second pass: weights have moved since the batch arrived, so ratios and value clipping matter.
    generator = torch.Generator().manual_seed(5)
    model.parameters += 0.1 * torch.randn(model.parameters.shape, generator=generator)
    (loss,) = ppo.losses(minibatch)

    at = Reference.of(model, map_tree(lambda leaf: leaf[:-1], batch.observation))
    normal = (advantage - advantage[valid].mean()) / advantage[valid].std()

    def parts(r: Reference) -> dict[str, float]:
        ratio = np.exp(r.log_prob(action) - proximal)
        surrogate = weight * np.minimum(ratio * normal, np.clip(ratio, low, high) * normal)
        error = (r.value - target) ** 2
        if value_clip:
            near = np.clip(r.value, old_value - value_clip, old_value + value_clip)
            error = np.maximum(error, (near - target) ** 2)
        found = {
            "loss.policy": -valid_mean(surrogate, valid),
            "loss.value": 0.5 * valid_mean(error, valid),
            "entropy": valid_mean(r.entropy, valid),
            "kl": divergence(r.log_prob(action) - behaviour),
            "clip_fraction": valid_mean((ratio < low) | (ratio > high), valid),
        }
        if correction == "decoupled":
            found["kl_proximal"] = valid_mean(weight * (ratio - 1 - np.log(ratio)), valid)
            found["kl_lag"] = divergence(arrival - behaviour)
        moments = {"target": target, "error": target - old_value}
        found |= {f"{name}_mean": valid_mean(of, valid) for name, of in moments.items()}
        return found | {f"{name}_square": valid_mean(of**2, valid) for name, of in moments.items()}

    def divergence(log_ratio: np.ndarray) -> float:
        return valid_mean(np.exp(log_ratio) - 1 - log_ratio, valid)

    def total(r: Reference) -> float:
        p = parts(r)
        return p["loss.policy"] + 0.5 * p["loss.value"] - 0.03 * p["entropy"]

    expected = parts(at)
    assert 0 < expected["clip_fraction"] < 1, "both sides of the clip are tested"
    assert (rho[valid] < 0.75).any() and (rho[valid] > 1.75).any(), "so are the truncation and the range of both ratios"
    assert loss.metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert float(loss.metrics[name].detach()) == pytest.approx(value, rel=2e-4), name
    assert float(loss.value.detach()) == pytest.approx(total(at), rel=2e-4)
    expected_gradients = numeric_gradient(total, at)
    for name, gradient in gradients(model, loss.value).items():
        np.testing.assert_allclose(gradient.numpy(), expected_gradients[name], rtol=5e-3, atol=5e-5, err_msg=name)


def on_policy(model: Model, batch: Batch) -> Batch:
    """`batch` as if `model` had acted in it."""
    with torch.no_grad():
        output = model.evaluate(batch.observation, batch.state, batch.first)
        mask = batch.observation["action_mask"][:-1]
        log_prob = model.distribution.log_prob(output.params[:-1], batch.action, mask)
    return dataclasses.replace(batch, log_prob=log_prob)


@pytest.mark.parametrize("core", ["none", "gru"])
@pytest.mark.parametrize("normalize", [False, True])
def test_the_first_epoch_has_ratio_one_on_its_own_data(normalize: bool, core: str) -> None:
    model = make_model(core, normalize_observation=normalize)
    ppo = build_algorithm(PpoConfig(epochs=1, minibatches=2), model, 0)
    for seed in range(3):  # statistics taken after one batch must not reach into it, but into the next
        batch = make_batch(seed)
        batch.state = model.network.initial_state(B, "cpu")
        batch = on_policy(model, batch)
        for minibatch in ppo.minibatches(batch):
            (loss,) = ppo.losses(minibatch)
            assert abs(float(loss.metrics["kl"])) < 1e-6
        ppo.finish(batch)
    if normalize:
        (count,) = [b for name, b in model.network.named_buffers() if name.endswith("count")]
        assert float(count) == 3 * int(make_batch().valid.sum())


def steps_of(minibatch: Minibatch) -> Iterator[tuple[float, ...]]:
    x = minibatch.observation["x"].flatten(0, 1)
    return (tuple(row.tolist()) for row in x)


def test_minibatches_cover_every_step_once_an_epoch_in_a_new_order() -> None:
    model, batch = make_model(), make_batch()
    ppo = Ppo(PpoConfig(epochs=3, minibatches=5), model, seed=1)
    minibatches = list(ppo.minibatches(batch))
    assert len(minibatches) == 15
    everything = sorted(tuple(row.tolist()) for row in batch.observation["x"][:-1].flatten(0, 1))
    orders = []
    for epoch in range(3):
        seen = [step for minibatch in minibatches[5 * epoch : 5 * epoch + 5] for step in steps_of(minibatch)]
        assert sorted(seen) == everything
        orders.append(seen)
    assert orders[0] != orders[1] != orders[2]
    assert {minibatch.valid.shape for minibatch in minibatches} <= {(1, 4), (1, 5)}


def test_recurrent_minibatches_keep_whole_sequences_with_their_states() -> None:
    model, batch = make_model("lstm"), make_batch()
    batch.state = (torch.randn(B, 5), torch.randn(B, 5))
    lanes = []
    for minibatch in Ppo(PpoConfig(epochs=1, minibatches=2), model, seed=0).minibatches(batch):
        assert minibatch.valid.shape == (T, 2)
        for column in range(2):
            x = minibatch.observation["x"][:, column]
            (lane,) = [b for b in range(B) if torch.equal(batch.observation["x"][:-1, b], x)]
            assert all(torch.equal(m[column], s[lane]) for m, s in zip(minibatch.state, batch.state, strict=True))
            assert torch.equal(minibatch.first[:, column], batch.first[:-1, lane])
            lanes.append(lane)
    assert sorted(lanes) == list(range(B))


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_more_minibatches_than_sequences_are_refused(core: str) -> None:
    model, batch = make_model(core), make_batch()
    batch.state = model.network.initial_state(B, "cpu")
    num_sequences = B if core == "lstm" else T * B
    with pytest.raises(ConfigError, match=f"minibatches=99 exceeds the {num_sequences} sequences"):
        next(iter(Ppo(PpoConfig(minibatches=99), model, 0).minibatches(batch)))


@pytest.mark.parametrize("core", ["none", "gru"])
def test_without_lag_every_correction_has_the_same_loss_and_gradient(core: str) -> None:
    found = {}
    for correction in CORRECTIONS:
        model, batch = make_model(core), make_batch()
        batch.state = model.network.initial_state(B, "cpu")
        config = PpoConfig(gae_lambda=0.8, lag_correction=correction, minibatches=2, epochs=2)
        ppo = Ppo(config, model, 0)
        losses = []
        for minibatch in ppo.minibatches(on_policy(model, batch)):
            (loss,) = ppo.losses(minibatch)
            shown = {name: loss.metrics[name].detach() for name in ("loss.policy", "kl", "clip_fraction")}
            losses.append({"loss": loss.value.detach(), **shown, **gradients(model, loss.value)})
            model.parameters -= 0.1 * model.gradients  # so that later minibatches have other ratios than 1
        assert float(losses[-1]["kl"]) > 1e-4
        found[correction] = losses
    for correction in CORRECTIONS[1:]:
        for expected, losses in zip(found["none"], found[correction], strict=True):
            for name, value in expected.items():
                torch.testing.assert_close(losses[name], value, rtol=1e-4, atol=1e-5, msg=f"{correction}: {name}")


UNDISCOUNTED = PpoConfig(discount=1.0, gae_lambda=1.0, normalize_advantage=False)


def by_step(minibatch: Minibatch, tensor: torch.Tensor) -> list[float]:
    """The entries of `tensor` by the step of `two_steps`: minibatches come in any order."""
    order = minibatch.observation.flatten(0, 1).argmax(-1)
    found: list[float] = tensor.flatten()[order.argsort()].tolist()
    return found


def two_steps(behaviour: tuple[float, float], values: tuple[float, float]) -> tuple[Model, Batch]:
    """An episode of two steps with rewards 1 and 2, both with the first of two actions, chosen at these probabilities.

    The learner's policy chooses it with probability 0.5; its values are `values`.
    """
    spaces = Spaces(gym.spaces.Box(-9.0, 9.0, (2,)), gym.spaces.Discrete(2))
    model = Model(NetworkConfig(hidden=()), spaces)
    model.parameters.zero_()
    parameters = dict(model.network.named_parameters())
    parameters["value_head.weight"].data[0] = torch.tensor(values)
    ends = torch.tensor([[False], [True]])
    batch = Batch(
        observation=torch.eye(2)[[0, 1, 1]].unsqueeze(1),
        first=torch.tensor([[True], [False], [False]]),
        action=torch.zeros((2, 1), dtype=torch.int64),
        log_prob=torch.tensor(behaviour).log().unsqueeze(1),
        reward=torch.tensor([[1.0], [2.0]]),
        terminated=ends,
        truncated=torch.zeros_like(ends),
        valid=torch.ones_like(ends),
        state=(),
        lanes=torch.arange(1),
    )
    return model, batch


WORKED = {  # targets and policy loss of `two_steps`; the advantages are 1 + 1 - 0.5 + 1 = 2.5 and 2 - 1 = 1
    # The ratios are 0.5/0.8 = 0.625, which is not clipped as the advantage is positive, and 0.5/0.4 = 1.25, clipped to
    # 1.2: -(0.625 * 2.5 + 1.2) / 2.
    "none": ((3.0, 2.0), -1.38125),
    # The ratio 1.25 of the later step is truncated at 1: the advantages stay. The first target is 0.5 + 0.625 * 2.5.
    "vtrace": ((2.0625, 2.0), -1.38125),
    # The ratios to the proximal policy are 1, the weights 0.625 and, truncated, 1: -(0.625 * 2.5 + 1) / 2.
    "decoupled": ((3.0, 2.0), -1.28125),
}


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_worked_example_with_lag(correction: LagCorrection) -> None:
    model, batch = two_steps(behaviour=(0.8, 0.4), values=(0.5, 1.0))
    ppo, minibatch = ppo_minibatch(replace(UNDISCOUNTED, lag_correction=correction), model, batch)
    targets, policy_loss = WORKED[correction]
    assert by_step(minibatch, minibatch.advantage) == pytest.approx([2.5, 1.0])
    assert by_step(minibatch, minibatch.target) == pytest.approx(targets)
    (loss,) = ppo.losses(minibatch)
    assert float(loss.metrics["loss.policy"].detach()) == pytest.approx(policy_loss)
    from_acting = np.mean([ratio - 1 - np.log(ratio) for ratio in (0.625, 1.25)])
    if correction == "decoupled":
        assert float(loss.metrics["clip_fraction"]) == 0.0 and float(loss.metrics["kl_proximal"]) < 1e-7
        assert float(loss.metrics["kl_lag"]) == pytest.approx(from_acting)
    else:
        assert float(loss.metrics["clip_fraction"]) == 1.0 and "kl_lag" not in loss.metrics
    assert float(loss.metrics["kl"]) == pytest.approx(from_acting)


def test_v_trace_weights_a_later_step_that_the_policy_avoids() -> None:
    model, batch = two_steps(behaviour=(0.5, 0.8), values=(0.5, 1.0))
    _, minibatch = ppo_minibatch(replace(UNDISCOUNTED, lag_correction="vtrace"), model, batch)
    # The error 2 - 1 of the later step has the weight 0.625 in the advantage of the first step and in both targets.
    assert by_step(minibatch, minibatch.advantage) == pytest.approx([2.125, 1.0])
    assert by_step(minibatch, minibatch.target) == pytest.approx([2.625, 1.625])


def test_the_decoupled_ratio_is_bounded_by_both_policies() -> None:
    model, batch = two_steps(behaviour=(0.8, 0.4), values=(0.5, 1.0))
    ppo, minibatch = ppo_minibatch(replace(UNDISCOUNTED, lag_correction="decoupled"), model, batch)
    bias = dict(model.network.named_parameters())["policy_head.bias"]
    bias.data[0] = math.log(0.59 / 0.41)  # the ratio to the proximal policy becomes 0.59/0.5 = 1.18
    (loss,) = ppo.losses(minibatch)
    # In the first step it is within 0.8 to 1.2. In the second step the policy that acted allows 1.4 * 0.4/0.5 = 1.12.
    assert float(loss.metrics["loss.policy"].detach()) == pytest.approx(-(0.625 * 2.5 * 1.18 + 1.12) / 2)
    assert float(loss.metrics["clip_fraction"]) == 0.5
    assert float(loss.metrics["kl_proximal"]) == pytest.approx((0.625 + 1) / 2 * (0.18 - math.log(1.18)), rel=1e-4)
    # Only the first step has a gradient: d log p / d bias = 1 - 0.59.
    expected = -0.625 * 2.5 * 1.18 * 0.41 / 2
    assert float(gradients(model, loss.metrics["loss.policy"])["policy_head.bias"][0]) == pytest.approx(expected)


@pytest.mark.parametrize("config", [ImpalaConfig(value_weight=0.0), PpoConfig(value_weight=0.0, minibatches=1)])
def test_the_entropy_bonus_raises_entropy(config: ImpalaConfig | PpoConfig) -> None:
    entropies = {}
    for weight in (0.0, 5.0):
        model, batch = make_model(), on_policy(make_model(), make_batch())
        algorithm = build_algorithm(replace(config, entropy_weight=weight), model, 0)
        for _ in range(20):
            for minibatch in algorithm.minibatches(batch):
                (loss,) = algorithm.losses(minibatch)
                gradients(model, loss.value)
                model.parameters -= 0.05 * model.gradients
        (loss,) = Impala(ImpalaConfig(), model, 0).losses(batch)
        entropies[weight] = float(loss.metrics["entropy"].detach())
    assert entropies[5.0] > entropies[0.0] + 0.1


def poisoned(batch: Batch) -> Batch:
    """`batch` with everything an invalid step holds replaced by huge numbers, its observation where none bootstraps."""
    bad = ~batch.valid
    swap = {
        "reward": torch.where(bad, 1e30, batch.reward),
        "log_prob": torch.where(bad, -1e30, batch.log_prob),
        "action": torch.where(bad, (batch.action + 1) % A, batch.action),
        "terminated": batch.terminated ^ bad,
        "truncated": batch.truncated ^ bad,
    }
    x = batch.observation["x"].clone()
    assert bool(batch.terminated[1, 0]) and not bool(batch.valid[2, 0])
    x[2, 0] = 1e4  # what came after a termination is nobody's bootstrap
    observation = {"x": x, "action_mask": batch.observation["action_mask"]}
    return dataclasses.replace(batch, observation=observation, **swap)


@pytest.mark.parametrize(
    "config",
    [
        ImpalaConfig(),
        ImpalaConfig(normalize_advantage=True, normalize_reward=True),
        PpoConfig(minibatches=1),
        PpoConfig(minibatches=1, lag_correction="vtrace", value_clip=0.2, normalize_reward=True),
        PpoConfig(minibatches=1, lag_correction="decoupled"),
    ],
)
def test_what_an_invalid_step_holds_changes_nothing(config: ImpalaConfig | PpoConfig) -> None:
    found = []
    for batch in (make_batch(), poisoned(make_batch())):
        model = make_model(normalize_observation=True)
        algorithm = build_algorithm(config, model, 0)
        for _ in range(2):  # the second time with the statistics that the first left
            for minibatch in algorithm.minibatches(batch):
                (loss,) = algorithm.losses(minibatch)
                found.append({"loss": loss.value.detach().clone(), **gradients(model, loss.value)})
            algorithm.finish(batch)
    half = len(found) // 2
    for clean, dirty in zip(found[:half], found[half:], strict=True):
        for name in clean:
            np.testing.assert_allclose(dirty[name].numpy(), clean[name].numpy(), rtol=1e-6, atol=1e-7, err_msg=name)


def test_a_batch_without_a_valid_step_moves_nothing() -> None:
    model, batch = make_model(), make_batch()
    batch = dataclasses.replace(batch, valid=torch.zeros_like(batch.valid))
    for config in (ImpalaConfig(normalize_advantage=True), PpoConfig(epochs=1, minibatches=1)):
        algorithm = build_algorithm(config, model, 0)
        for minibatch in algorithm.minibatches(batch):
            (loss,) = algorithm.losses(minibatch)
            assert float(loss.value.detach()) == 0.0
            assert all(not gradient.any() for gradient in gradients(model, loss.value).values())
        algorithm.finish(batch)


def targets_by_step(model: Model, batch: Batch, x: torch.Tensor) -> dict[tuple[float, ...], float]:
    """The value target of every step, by its observation: minibatches come in any order."""
    changed = dataclasses.replace(batch, observation={**batch.observation, "x": x})
    _, minibatch = ppo_minibatch(PpoConfig(), model, changed)
    return dict(zip(steps_of(minibatch), minibatch.target.flatten().tolist(), strict=True))


def test_truncation_bootstraps_and_termination_does_not() -> None:
    model, batch = make_model(), make_batch()
    x = batch.observation["x"]
    before = targets_by_step(model, batch, x)
    raised = x.clone()
    raised[2, 0] += 1.0  # after lane 0 terminated at step 1
    raised[3, 1] += 1.0  # after lane 1 was cut at step 2
    after = targets_by_step(model, batch, raised)
    value = Reference.of(model, {"x": raised, "action_mask": batch.observation["action_mask"]}).value
    end, cut = tuple(x[1, 0].tolist()), tuple(x[2, 1].tolist())
    assert after[end] == before[end] == pytest.approx(float(batch.reward[1, 0]), rel=1e-5)
    assert after[cut] == pytest.approx(float(batch.reward[2, 1]) + 0.99 * value[3, 1], rel=1e-4)
    assert abs(after[cut] - before[cut]) > 0.1


def test_states_of_algorithms_travel() -> None:
    model, batch = make_model(), make_batch()
    for config in (ImpalaConfig(normalize_reward=True), PpoConfig(normalize_reward=True, minibatches=1)):
        one, other = build_algorithm(config, model, 1), build_algorithm(config, model, 2)
        for minibatch in one.minibatches(batch):
            list(one.losses(minibatch))
        one.finish(batch)
        other.load_state_dict(one.state_dict())
        left, right = (
            [float(loss.value.detach()) for m in a.minibatches(batch) for loss in a.losses(m)] for a in (one, other)
        )
        assert left == right
