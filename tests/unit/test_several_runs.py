"""Several runs: the list of them, many seeds of one training, and their comparison."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from echelon.cli.main import main
from echelon.config import TrainConfig, replace
from echelon.config_io import to_json
from echelon.presets import preset
from echelon.runs.folder import RunFolder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_run(path: Path, returns: list[float], *, name: str = "ppo", status: str = "finished", **fields: Any) -> Path:
    """Writes the folder of a run as a training does: a row every 100 steps."""
    config: TrainConfig = replace(preset(name, "CartPole-v1"), **{"stop.steps": 100 * len(returns), **fields})
    folder = RunFolder.create(path)
    folder.write_config(to_json(config))
    rows = [
        {
            "kind": "train",
            "env_steps": 100 * index,
            "return_mean": value,
            "wall_s": 2.0 * index,
            "env_steps_per_s": 50.0,
        }
        for index, value in enumerate(returns, 1)
    ]
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    if status:
        last = {"env_steps": 0, "return_mean": None, "wall_s": 0.0, **(rows[-1] if rows else {})}
        folder.write_summary({**last, "status": status, "evaluation_return": 2.0 * (returns or [0.0])[-1]})
    return path


def changed_at(path: Path, age_s: float) -> None:
    for file in path.iterdir():
        os.utime(file, (time.time() - age_s,) * 2)


# --------------------------------------------------------------------------------------------------------------- list


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["list", "--json", *arguments]) == 0
    records: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return records


def test_list_shows_the_runs_newest_first(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed_at(write_run(here / "runs/old", [1.0, 2.5], name="impala", status="stopped", seed=3), 7300.0)
    changed_at(write_run(here / "runs/group/seed-10", [5.0]), 300.0)
    changed_at(write_run(here / "runs/group/seed-9", [4.0, 5.0, 1234.5]), 100.0)
    assert main(["list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "run            preset  env          seed  status    steps   return  time    age",
        "group/seed-9   ppo     CartPole-v1     0  finished    300  1,234.5   6 s  1 min",
        "group/seed-10  ppo     CartPole-v1     0  finished    100      5.0   2 s  5 min",
        "old            impala  CartPole-v1     3  stopped     200      2.5   4 s    2 h",
    ]
    assert [record["run"] for record in listed(capsys, "runs/group")] == ["runs/group/seed-9", "runs/group/seed-10"]
    assert [record["evaluation_return"] for record in listed(capsys, "runs/old")] == [5.0]


def test_list_tells_running_from_crashed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    crashed = write_run(here / "runs/crashed", [1.0, 2.0], status="")
    (crashed / ".lock").write_text("4194304")
    write_run(here / "runs/failed", [1.0], status="failed")
    with RunFolder(write_run(here / "runs/running", [1.0, 2.0, 3.0], status="")).held():
        records = listed(capsys)
    statuses = {Path(record["run"]).name: (record["status"], record["env_steps"]) for record in records}
    assert statuses == {"running": ("running", 300), "crashed": ("crashed", 200), "failed": ("failed", 100)}
    assert records[0]["status"] == "running"
    assert {record["status"] for record in listed(capsys)} == {"crashed", "failed"}


def test_foreign_and_damaged_folders_do_not_break_the_list(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(here / "runs/good", [7.0])
    bad = {name: write_run(here / "runs" / name, [1.0]) for name in ("no-json", "no-summary", "odd", "links")}
    (bad["no-json"] / "config.json").write_text("{")
    (bad["no-summary"] / "summary.json").write_text("[1]")
    (bad["odd"] / "config.json").write_text('{"format": 1, "config": {"env": 3, "seed": "x\\u001b[2J", "preset": []}}')
    (bad["odd"] / "summary.json").write_text('{"status": "a\\u001b[2J", "env_steps": "many", "return_mean": []}')
    (bad["links"] / "metrics.jsonl").unlink()
    os.mkfifo(bad["links"] / "metrics.jsonl")
    (bad["links"] / "summary.json").unlink()
    (bad["links"] / ".lock").symlink_to("/dev/zero")
    (here / "runs/file").write_text("no folder")
    (here / "runs/empty").mkdir()
    (here / "runs/photos/2026").mkdir(parents=True)
    statuses = {Path(record["run"]).name: record["status"] for record in listed(capsys)}
    expected = {"good": "finished", "no-json": "damaged", "no-summary": "crashed", "links": "crashed"}
    assert statuses == {**expected, "odd": "a\x1b[2J"}
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and len(out.splitlines()) == 6


def test_list_without_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0 and "no runs in runs" in capsys.readouterr().out
    assert listed(capsys) == []
    assert main(["list", "nowhere"]) == 2 and "nowhere cannot be listed" in capsys.readouterr().err
