"""Where a network is computed: what `auto` takes, and what is refused."""

from __future__ import annotations

import pytest
import torch

from echelon.config import replace
from echelon.errors import ConfigError
from echelon.presets import preset
from echelon.roles.placement import MIN_GPU_PARAMETERS, have_own_gpus, pick_device
from echelon.roles.plan.placement import MIN_REPLAY_PARAMETERS, learner_device


def test_auto_takes_a_gpu_for_networks_that_gain_and_replay_gains_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed, queued = preset("sac", "Pendulum-v1"), preset("ppo", "Pendulum-v1")
    for is_there in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_there=is_there: is_there)
        found = "cuda" if is_there else "cpu"
        assert learner_device(replayed, MIN_REPLAY_PARAMETERS) == found
        assert learner_device(replayed, MIN_REPLAY_PARAMETERS - 1) == "cpu"
        assert learner_device(queued, MIN_REPLAY_PARAMETERS) == "cpu"
        assert learner_device(queued, MIN_GPU_PARAMETERS) == found
    assert learner_device(replace(replayed, **{"learner.device": "cpu"}), 10**9) == "cpu"


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cpu:0"])
def test_what_is_no_device_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=f"device={name} is not a device: use auto, cpu, cuda or cuda:N"):
        pick_device(name, 1)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device=cuda, but torch .* sees no GPU here\. Use --acting\.device cpu"):
        pick_device("cuda", 1, "--acting.device")


@pytest.mark.parametrize("num_gpus", [1, 2, 3])
def test_learners_take_the_gpus_in_turns_and_nccl_where_each_has_its_own(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    for name in ("cuda", "auto"):
        config = replace(
            preset("sac", "Pendulum-v1"), **{"learner.num_learners": 2, "actor.num_actors": 2, "learner.device": name}
        )
        found = [learner_device(config, MIN_REPLAY_PARAMETERS, index) for index in range(2)]
        assert found == (["cuda:0", "cuda:0"] if num_gpus == 1 else ["cuda:0", "cuda:1"])
        assert have_own_gpus(config.learner, torch.device(found[0])) == (num_gpus > 1)
        assert not have_own_gpus(config.learner, torch.device("cpu"))
    one = replace(config, **{"learner.device": "cuda:0"})
    assert [learner_device(one, 1, index) for index in range(2)] == ["cuda:0", "cuda:0"]
    assert not have_own_gpus(one.learner, torch.device("cuda:0")), "all share the one that was named"
    assert learner_device(replace(config, **{"learner.device": "auto"}), 1, 1) == "cpu"
