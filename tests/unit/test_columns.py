"""What `echelon.read_metrics` and `echelon.read_episodes` return: the columns that the guide names, of whole runs."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import echelon
from echelon.config import replace
from echelon.errors import ConfigError
from echelon.roles.gauge import PHASES
from echelon.roles.supervisor import HUNG
from echelon.runs.checkpoint import latest_checkpoint
from echelon.runs.episodes import COLUMNS, EPISODES, EpisodeWriter
from echelon.runs.metrics import METRICS, MetricsWriter

GUIDE = Path(__file__).parents[2] / "docs/guide.md"
TINY = {"engine": "inline", "actor.num_actors": 2, "actor.envs": 4, "actor.trajectory": 16, "network.hidden": (8,)}
TINY |= {"learner.threads": 1, "evaluation.episodes": 0, "stop.steps": 1_000}
REPLAY = {"replay.min_size": 100, "replay.batch": 16, "replay.checkpoint": False, "replay.samples_per_insert": 1.0}
SHORT = {**REPLAY, "env.kwargs": {"max_episode_steps": 50}, "stop.steps": 700}
RUNS = {
    "ppo": ("CartPole-v1", {"algorithm.minibatches": 2}),
    "async-ppo": ("CartPole-v1", {"algorithm.minibatches": 2}),
    "impala": ("CartPole-v1", {}),
    "a3c": ("CartPole-v1", {"actor.envs": 3}),
    "dqn": ("CartPole-v1", REPLAY),
    "td3": ("Pendulum-v1", SHORT),
    "sac": ("Pendulum-v1", SHORT),
}


def train(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    env, fields = RUNS[name]
    config = replace(echelon.preset(name, env), **{**TINY, **fields, "run.dir": str(folder), "seed": 5, **changes})
    return echelon.train(config, output=io.StringIO()).summary


def documented() -> dict[str, str]:
    """The columns of the tables in the guide, and for which presets they are said to exist."""
    text = GUIDE.read_text().partition("### Columns")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", text, re.MULTILINE)
    return {name: presets for names, presets in rows for name in re.findall("`([^`]+)`", names)}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_has_the_columns_that_the_guide_names(tmp_path: Path, name: str) -> None:
    summary = train(tmp_path / "run", name)
    columns, known = echelon.read_metrics(tmp_path / "run"), documented()
    written = map(json.loads, (tmp_path / "run" / METRICS).read_text().splitlines())
    assert not [value for row in written for value in row.values() if isinstance(value, dict | list)], "it is flat"
    patterns = {column: re.sub("[A-Z]+", "[a-z_0-9-]+", re.escape(column)) for column in known}
    assert [column for column in columns if not any(re.fullmatch(one, column) for one in patterns.values())] == []
    expected = {column for column, presets in known.items() if presets == "all" or name in presets.split(", ")}
    missing = [column for column in expected if not any(re.fullmatch(patterns[column], found) for found in columns)]
    assert missing == []
    learned = columns["updates"] > 0
    assert learned.any()
    for column in echelon.read_metrics(tmp_path / "run", prefix="loss."):
        assert np.isfinite(columns[column][learned][1:]).all(), f"{column} is in every row after the first update"
    ended = echelon.read_episodes(tmp_path / "run")
    assert tuple(ended) == COLUMNS
    assert len(ended["return"]) == summary["episodes"] > 0
    assert np.mean(ended["return"][-100:]) == pytest.approx(summary["return_mean"])
    assert set(ended["actor"]) <= {0, 1} and ended["env"].max() < TINY["actor.envs"] and set(ended["seed"]) == {5}
    assert (np.diff(ended["env_steps"]) >= 0).all() and ended["env_steps"][-1] <= summary["env_steps"]


def test_the_guide_names_every_phase() -> None:
    row = next(line for line in GUIDE.read_text().splitlines() if line.startswith("| `time.ROLE.PHASE`"))
    assert set(re.findall("`([a-z]+)`", row)) == {*PHASES, HUNG}


@pytest.mark.parametrize(("name", "interval_s"), [("impala", 0.001), ("dqn", 0.02)])
def test_a_resumed_run_counts_every_episode_once(tmp_path: Path, name: str, interval_s: float) -> None:
    """Also those between the checkpoint and the end of the run that was lost."""
    run = tmp_path / "run"
    train(run, name, **{"run.checkpoint_interval_s": interval_s, "run.keep_checkpoints": 1000})
    before = (run / EPISODES).read_bytes()
    folders = sorted((run / "checkpoints").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    kept = folders[len(folders) // 2]
    steps = int(kept.name.removeprefix("step_"))
    assert 0 < steps < int(folders[-1].name.removeprefix("step_"))
    for folder in folders[len(folders) // 2 + 1 :]:
        folder.rename(tmp_path / folder.name)
    assert latest_checkpoint(run / "checkpoints") == kept
    with (run / EPISODES).open("ab") as file:
        file.write(b"99999,1.0,3")  # a line that was cut short
    summary = echelon.resume(run, steps=2_000, output=io.StringIO()).summary
    after = echelon.read_episodes(run)
    assert len(after["return"]) == summary["episodes"]
    start = [line for line in before.splitlines()[1:] if int(line.partition(b",")[0]) <= steps]
    assert (run / EPISODES).read_bytes().splitlines()[1 : 1 + len(start)] == start and len(start) > 0
    columns = echelon.read_metrics(run)
    assert (np.diff(columns["env_steps"]) >= 0).all(), "rows of metrics are not repeated either"
    learned = columns["updates"] > 0
    assert np.isfinite(columns["loss.total"][learned][1:]).all(), "those after the resume have it, too"


def test_episodes_are_dropped_from_the_end_of_a_long_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.runs.episodes.BLOCK_BYTES", 100)
    writer = EpisodeWriter(tmp_path, append=False)
    for start in range(0, 400, 40):  # two learners report turn by turn
        steps = np.r_[start + 10 : start + 40, start : start + 30]
        columns = {name: np.zeros(len(steps), np.int64) for name in COLUMNS} | {"env_steps": steps, "actor": steps - 1}
        writer.write(columns, 3)
    whole = echelon.read_episodes(tmp_path)
    assert len(whole["env_steps"]) == 600 and np.isnan(whole["actor"]).sum() == 1, "the actor -1 is not known"
    writer.drop_after(200)
    writer.write({name: np.full(1, 777) for name in COLUMNS}, 3)
    writer.file.close()
    left = echelon.read_episodes(tmp_path)["env_steps"]
    assert left.tolist() == [*whole["env_steps"][whole["env_steps"] <= 200].tolist(), 777]
    EpisodeWriter(tmp_path, append=True).drop_after(-1)
    assert echelon.read_episodes(tmp_path).keys() == whole.keys()


def test_rows_of_earlier_releases_are_read_and_what_lacks_is_nan(tmp_path: Path) -> None:
    old: dict[str, Any] = {"kind": "train", "env_steps": 10, "return_mean": None}
    old |= {"loss": {"loss": 1.5}, "time": {"actor-0": {"env": 0.5}}}
    evaluation = {"kind": "evaluation", "env_steps": 10, "worker": "w"}
    (tmp_path / METRICS).write_text(f"{json.dumps(old)}\n{json.dumps(evaluation)}\n")
    writer = MetricsWriter(tmp_path, append=True)
    writer.write({"kind": "train", "env_steps": 20, "return_mean": 3, "loss.total": 2.5})
    writer.close()
    columns = echelon.read_metrics(tmp_path)
    found = {name: column.tolist() for name, column in columns.items()}
    assert repr(found) == repr(
        {
            "env_steps": [10, 20],
            "return_mean": [float("nan"), 3.0],
            "loss.loss": [1.5, float("nan")],
            "time.actor-0.env": [0.5, float("nan")],
            "loss.total": [float("nan"), 2.5],
        }
    )
    assert columns["env_steps"].dtype == np.int64
    assert list(echelon.read_metrics(tmp_path, prefix="loss.")) == ["env_steps", "loss.loss", "loss.total"]
    assert echelon.read_metrics(tmp_path, kind="evaluation")["worker"].tolist() == ["w"]


def test_rows_are_selected_by_their_kind_and_columns_by_their_prefix(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, append=False)
    writer.write({"kind": "train", "env_steps": 10, "updates": 0})
    assert list(echelon.read_metrics(tmp_path, prefix="loss.")) == ["env_steps"], "before the first update"
    for steps in (20, 30, 20):  # the last one after a resume
        writer.write({"kind": "train", "env_steps": steps, "updates": 1, "loss.total": 1.0, "replay.size": 3})
        writer.write({"kind": "callback", "env_steps": steps, "mine": steps / 2})
    writer.close()
    logged = echelon.read_metrics(tmp_path, kind="callback")
    assert {name: column.tolist() for name, column in logged.items()} == {"env_steps": [20], "mine": [10.0]}
    assert echelon.read_metrics(tmp_path, kind="evaluation") == {}
    with pytest.raises(ConfigError, match=r'kind="traim".*train, callback'):
        echelon.read_metrics(tmp_path, kind="traim")
    with pytest.raises(ConfigError, match=r'prefix="lss".*loss\.'):
        echelon.read_metrics(tmp_path, prefix="lss")
    with pytest.raises(ConfigError, match=r"loss\., replay\."):
        echelon.read_metrics(tmp_path, prefix="xyzzy")


def test_a_frame_needs_pandas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / METRICS).write_text('{"env_steps": 1}\n')
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda columns: ("frame", columns)))
    kind, columns = echelon.read_metrics(tmp_path, pandas=True)
    assert kind == "frame" and columns["env_steps"].tolist() == [1]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="pip install pandas"):
        echelon.read_metrics(tmp_path, pandas=True)


def test_bad_folders_are_named(tmp_path: Path) -> None:
    group = tmp_path / "group"
    (group / "seed-0").mkdir(parents=True)
    (group / "seed-0/config.json").touch()
    for read, name in ((echelon.read_metrics, METRICS), (echelon.read_episodes, EPISODES)):
        with pytest.raises(ConfigError, match="not a run folder, but has 1 in it: seed-0"):
            read(group)
        with pytest.raises(ConfigError, match="there is no run folder"):
            read(tmp_path / "absent")
        with pytest.raises(ConfigError, match=re.escape(str(group / "seed-0" / name))):
            read(group / "seed-0")
    (tmp_path / EPISODES).write_text("env_steps,return\n1,x\n")
    with pytest.raises(ConfigError, match="not a table of episodes"):
        echelon.read_episodes(tmp_path)
