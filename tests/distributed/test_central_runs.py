"""Whole runs with central acting: inline is reproducible, the lag bound holds everywhere, and the mode is reported."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

import echelon
from echelon import running
from echelon.errors import ConfigError
from echelon.runs.metrics import read_rows
from running import train_shortly

QUICK = {"ppo": {"algorithm.epochs": 2}, "async-ppo": {"algorithm.epochs": 2, "actor.trajectory": 16}, "impala": {}}


def train(folder: Path, shm_dir: Path, name: str, engine: str, **changes: Any) -> dict[str, Any]:
    """The summary of a short training with central acting."""
    settings = {"stop.steps": 6_000, "acting.mode": "central", **QUICK[name], **changes}
    return train_shortly(folder, shm_dir, name, engine, **settings)


@pytest.mark.parametrize(("name", "core"), [("ppo", "none"), ("impala", "none"), ("ppo", "lstm")])
def test_inline_repeats_exactly(tmp_path: Path, shm_dir: Path, name: str, core: str) -> None:
    memory: dict[str, Any] = {"network.core": core, "network.core_size": 16}
    memory |= {"stop.steps": 3_000}
    first, second = (train(tmp_path, shm_dir, name, "inline", **memory) for _ in range(2))
    other = train(tmp_path, shm_dir, name, "inline", seed=1, **memory)
    assert first["weights_sha256"] == second["weights_sha256"] != other["weights_sha256"]
    assert first["env_steps"] == second["env_steps"] >= 3_000
    assert first["lag_max"] == 0 or name == "impala"


@pytest.mark.parametrize(
    ("name", "max_lag", "changes"),
    [
        ("ppo", 0, {}),
        ("ppo", 0, {"network.core": "gru", "acting.servers": 2}),
        ("async-ppo", 1, {"acting.groups": 4}),
        ("impala", None, {"acting.batch": False}),
        ("impala", None, {"acting.max_batch": 32, "acting.groups": 1}),
    ],
)
def test_processes_keep_the_bound_on_the_lag(
    tmp_path: Path, shm_dir: Path, name: str, max_lag: int | None, changes: dict[str, Any]
) -> None:
    summary = train(tmp_path, shm_dir, name, "local", **changes)
    rows = [row for row in read_rows(Path(summary["run_dir"])) if row["kind"] == "train"]
    assert summary["env_steps"] >= 6_000 and summary["episodes"] > 0
    assert summary["restarts"] == 0 and summary["dropped"] == 0
    if max_lag is not None:
        assert max(row["lag_max"] for row in rows) <= max_lag and summary["lag_max"] <= max_lag
    servers = [name for name in summary["time"] if name.startswith("inference-")]
    assert len(servers) == changes.get("acting.servers", 1)
    assert all(summary["time"][server]["act"] > 0.0 for server in servers)
    assert all(summary["inference"][server]["rounds"] > 0 for server in servers)
    assert not list(shm_dir.iterdir())


def test_a_run_of_before_goes_on(tmp_path: Path, shm_dir: Path) -> None:
    """A configuration without an acting section is read, and the chosen mode is reported."""
    summary = train(tmp_path, shm_dir, "impala", "inline", **{"acting.mode": "local"})
    path = Path(summary["run_dir"]) / "config.json"
    config = json.loads(path.read_text())
    assert config["config"].pop("acting")["mode"] == "local"
    path.write_text(json.dumps(config))
    output = io.StringIO()
    again = echelon.resume(summary["run_dir"], steps=8_000, output=output).summary
    assert again["env_steps"] >= 8_000
    assert "acting: local (" in output.getvalue()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"acting.groups": 5}, r"acting.groups=5 does not divide"),
        ({"acting.servers": 9}, r"acting.servers=9 exceeds"),
        ({"acting.device": "gpu"}, r"device=gpu is not a device"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    tmp_path: Path, shm_dir: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(tmp_path, shm_dir, "impala", "local", **changes)
    assert not list(tmp_path.iterdir())
    assert not list(shm_dir.iterdir())


@pytest.mark.parametrize(
    ("secret", "message"),
    [
        ("", r"tcp://0.0.0.0:0 is not on the loopback.*Set ECHELON_SECRET"),
        ("too short", r"the secret has 9 characters"),
    ],
)
def test_an_open_address_needs_a_secret_before_anything_starts(
    tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch, secret: str, message: str
) -> None:
    monkeypatch.setenv("ECHELON_SECRET", secret)
    changes = {"acting.mode": "central", "acting.transport": "tcp", "acting.address": "tcp://0.0.0.0:0"}
    monkeypatch.setattr(running, "_train_in", lambda *_: pytest.fail("the run was started"))
    with pytest.raises(ConfigError, match=message):
        train(tmp_path, shm_dir, "impala", "local", **changes)
    assert not list(tmp_path.iterdir())
    assert not list(shm_dir.iterdir())
