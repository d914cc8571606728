"""`--transport ray`: says what is missing, and measures where Ray is installed."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from echelon.bench import rpc_ray
from echelon.bench.rpc import RpcSetting
from echelon.cli.main import main
from running import wait_until


def test_without_ray_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # importing it fails, as where it is not installed
    path = tmp_path / "report.json"
    assert main(["bench", "rpc", "--transport", "ray", "--world_size", "3", "--output_file_path", str(path)]) == 2
    assert "pip install 'echelon[ray]'" in capsys.readouterr().err
    assert not path.exists()


def ray_actors_left() -> list[str]:
    """The living processes of the actors, which Ray names after what they do."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_text()
        except OSError:  # it ended meanwhile
            continue
        found += [text] if text.startswith(("ray::AgentActor", "ray::ObserverActor")) else []
    return found


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'echelon[ray]'")
@pytest.mark.filterwarnings("default")  # Ray's own
@pytest.mark.parametrize("batch", [True, False])
def test_a_real_run(shm_dir: Path, batch: bool) -> None:
    setting = RpcSetting(
        transport="ray", world_size=4, episodes=2, steps=6, state_size="3-5", batch=batch, shm_dir=str(shm_dir)
    )
    environment = {name: os.environ.get(name) for name in rpc_ray.QUIET}
    raw = rpc_ray.run(setting, lambda done, total: None)
    assert raw.observer_latency_s.shape == (2, 12) and (raw.observer_latency_s > 0).all()
    assert raw.agent_batch.sum() == 24 and set(raw.agent_batch) == {2 if batch else 1}
    assert (raw.agent_latency_s > 0).all() and raw.elapsed_s > 0
    assert {name: os.environ.get(name) for name in rpc_ray.QUIET} == environment
    wait_until(lambda: not ray_actors_left(), "the actors are gone")
    assert not list(shm_dir.iterdir())
