"""Returns against their definitions, written as sums over each episode's future."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from echelon.objectives.policy_gradient import gae, vtrace

GAMMA = 0.9
ENDS = ("goes on", "goes on", "terminated", "truncated")


class Case:
    """Trajectories of one lane or more with NEXT_STEP autoreset, in float64."""

    def __init__(self, ends: list[list[str]], seed: int, starts_with_reset: bool) -> None:
        T, B = len(ends[0]), len(ends)
        self.T, self.B = T, B
        self.valid = torch.ones(T, B, dtype=torch.bool)
        self.terminated = torch.zeros(T, B, dtype=torch.bool)
        for b, lane in enumerate(ends):
            resets = starts_with_reset
            for t, end in enumerate(lane):
                self.valid[t, b] = not resets
                self.terminated[t, b] = end == "terminated" and not resets
                resets = end != "goes on" and not resets
        self.discount = GAMMA * (~self.terminated).double()
        generator = torch.Generator().manual_seed(seed)

        def normal(rows: int) -> Tensor:
            return torch.randn(rows, B, generator=generator, dtype=torch.float64)

        self.reward, self.value, self.log_rho = normal(T), normal(T + 1), normal(T)

    def ends_at(self, t: int, b: int) -> int:
        """The first row after `t` whose future does not belong to the episode: its reset row, or the last row."""
        return next((s for s in range(t + 1, self.T) if not self.valid[s, b]), self.T)

    def delta(self, t: int, b: int) -> float:
        bootstrap = 0.0 if self.terminated[t, b] else GAMMA * float(self.value[t + 1, b])
        return float(self.reward[t, b]) + bootstrap - float(self.value[t, b])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    T, B = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    lane = st.lists(st.sampled_from(ENDS), min_size=T, max_size=T)
    ends = draw(st.lists(lane, min_size=B, max_size=B))
    return Case(ends, draw(st.integers(0, 2**31)), draw(st.booleans()))


@settings(deadline=None)
@given(cases(), st.sampled_from([0.0, 0.7, 1.0]))
def test_gae_is_the_discounted_sum_of_td_errors(case: Case, trace_lambda: float) -> None:
    got = gae(case.reward, case.discount, case.value, case.valid, trace_lambda)
    for b in range(case.B):
        for t in range(case.T):
            expected = 0.0
            if case.valid[t, b]:
                future = range(t, case.ends_at(t, b))
                expected = sum((GAMMA * trace_lambda) ** (s - t) * case.delta(s, b) for s in future)
            assert got[t, b].item() == pytest.approx(expected, abs=1e-9)


@settings(deadline=None)
@given(cases(), st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([0.4, 1.0]), st.sampled_from([0.8, 1.0]))
def test_vtrace_is_equation_1(case: Case, rho_clip: float, c_clip: float, trace_lambda: float) -> None:
    got = vtrace(
        case.log_rho, case.reward, case.discount, case.value, case.valid,
        rho_clip=rho_clip, c_clip=c_clip, trace_lambda=trace_lambda,
    )  # fmt: skip
    ratio = case.log_rho.exp()

    def target(t: int, b: int) -> float:
        total = float(case.value[t, b])
        if t == case.T or not case.valid[t, b]:
            return total
        traces = 1.0
        for s in range(t, case.ends_at(t, b)):
            total += GAMMA ** (s - t) * traces * min(rho_clip, ratio[s, b].item()) * case.delta(s, b)
            traces *= trace_lambda * min(c_clip, ratio[s, b].item())
        return total

    for b in range(case.B):
        for t in range(case.T):
            assert got.target_TB[t, b].item() == pytest.approx(target(t, b), abs=1e-9)
            advantage = 0.0
            if case.valid[t, b]:
                bootstrap = 0.0 if case.terminated[t, b] else GAMMA * target(t + 1, b)
                error = case.reward[t, b].item() + bootstrap - case.value[t, b].item()
                advantage = min(rho_clip, ratio[t, b].item()) * error
            assert got.advantage_TB[t, b].item() == pytest.approx(advantage, abs=1e-9)


def longest_returns(case: Case) -> Tensor:
    """The discounted rewards of every step until its episode or the trajectory ends, and the value there."""
    returns = case.value[:-1].clone()  # of steps that only reset
    for b in range(case.B):
        for t in range(case.T):
            if case.valid[t, b]:
                stop = min(case.T, case.ends_at(t, b))
                returns[t, b] = sum(GAMMA ** (s - t) * float(case.reward[s, b]) for s in range(t, stop))
                if not case.terminated[stop - 1, b]:
                    returns[t, b] += GAMMA ** (stop - t) * float(case.value[stop, b])
    return returns


@settings(deadline=None)
@given(cases())
def test_on_policy_vtrace_is_the_longest_n_step_return(case: Case) -> None:
    on_policy = torch.zeros(case.T, case.B, dtype=torch.float64)
    got = vtrace(
        on_policy, case.reward, case.discount, case.value, case.valid, rho_clip=1.0, c_clip=1.0, trace_lambda=1.0
    )
    returns = longest_returns(case)
    torch.testing.assert_close(got.target_TB, returns)
    torch.testing.assert_close(got.advantage_TB, returns - case.value[:-1])


def test_a_constant_reward_has_a_closed_form() -> None:
    T = 30
    reward, value = torch.ones(T, 1, dtype=torch.float64), torch.zeros(T + 1, 1, dtype=torch.float64)
    discount, valid = torch.full_like(reward, GAMMA), torch.ones(T, 1, dtype=torch.bool)
    got = vtrace(torch.zeros_like(reward), reward, discount, value, valid, rho_clip=1.0, c_clip=1.0, trace_lambda=1.0)
    steps_left = torch.arange(T, 0, -1, dtype=torch.float64).unsqueeze(-1)
    torch.testing.assert_close(got.target_TB, (1 - GAMMA**steps_left) / (1 - GAMMA))


@pytest.mark.parametrize("end", ["truncated", "terminated"])
def test_only_truncation_bootstraps_from_the_last_observation(end: str) -> None:
    case = Case([["goes on", end, "goes on", "goes on"]], seed=0, starts_with_reset=False)
    case.value[2] = 100.0  # of the true last observation, beside the step that only resets
    case.value[3:] = -1000.0  # of the next episode
    bootstrap = 100.0 if end == "truncated" else 0.0
    after = case.reward[1, 0].item() + GAMMA * bootstrap
    expected = [case.reward[0, 0].item() + GAMMA * after, after, 100.0]
    advantage = gae(case.reward, case.discount, case.value, case.valid, 1.0)
    assert longest_returns(case)[:3, 0].tolist() == pytest.approx(expected)
    assert (advantage + case.value[:-1])[:3, 0].tolist() == pytest.approx(expected)


def test_no_gradient_flows_and_no_input_changes() -> None:
    case = Case([["goes on", "truncated", "goes on"]], seed=1, starts_with_reset=False)
    inputs = [case.log_rho, case.reward, case.discount, case.value]
    before = [x.clone() for x in inputs]
    for x in inputs:
        x.requires_grad_()
    got = vtrace(*inputs, case.valid, rho_clip=1.0, c_clip=1.0, trace_lambda=0.9)
    results = [got.target_TB, got.advantage_TB, gae(*inputs[1:], case.valid, 0.9)]
    assert not any(result.requires_grad for result in results)
    for x, old in zip(inputs, before, strict=True):
        assert torch.equal(x.detach(), old)


def test_an_infinite_ratio_at_an_invalid_step_does_no_harm() -> None:
    case = Case([["goes on", "terminated", "goes on", "goes on"]], seed=2, starts_with_reset=False)
    case.log_rho[2] = float("nan")
    got = vtrace(
        case.log_rho, case.reward, case.discount, case.value, case.valid, rho_clip=1.0, c_clip=1.0, trace_lambda=1.0
    )
    assert got.target_TB.isfinite().all() and got.advantage_TB.isfinite().all()
