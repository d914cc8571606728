"""The record of a run: configuration, metrics, events, folder, curve and bottleneck."""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from echelon.cli.learner import OPTIONS, with_address
from echelon.cli.train import make_parser, parse_config
from echelon.config import (
    ActorConfig,
    EnvConfig,
    ImpalaConfig,
    LearnerConfig,
    NetworkConfig,
    PpoConfig,
    StopConfig,
    TrainConfig,
    WorkersConfig,
    replace,
)
from echelon.config_io import fields_of, from_json, set_fields, to_json
from echelon.errors import ConfigError
from echelon.presets import preset
from echelon.runs import folder as folder_module
from echelon.runs.bottleneck import PHASES, bottleneck, workers_bottleneck
from echelon.runs.events import EventWriter, crc32c
from echelon.runs.folder import RunFolder, default_run_dir, versions
from echelon.runs.metrics import MetricsWriter, read_rows
from echelon.runs.report import draw_curve, duration
from echelon.training import train

# ---------------------------------------------------------------------------------------------------- configuration

UNUSUAL = TrainConfig(
    preset="ppo",
    engine="inline",
    env=EnvConfig("Pendulum-v1", kwargs={"g": 9.5, "deep": {"a": [1, None]}}, wrappers=("a:b", "c:d")),
    actor=ActorConfig(num_actors=3),
    network=NetworkConfig(hidden=(), core="gru"),
    algorithm=PpoConfig(epochs=7, discount=0.9),
)


@pytest.mark.parametrize("config", [TrainConfig(), UNUSUAL])
def test_config_survives_json(config: TrainConfig) -> None:
    assert from_json(json.loads(json.dumps(to_json(config), allow_nan=False))) == config


def test_fields_left_out_take_their_defaults_and_ints_become_floats() -> None:
    config = from_json({"stop": {"minutes": 3}, "algorithm": {"name": "ppo"}})
    assert config.algorithm == PpoConfig()
    assert type(config.stop.minutes) is float
    assert config.actor == ActorConfig()


def test_a_callable_environment_is_written_as_text() -> None:
    config = TrainConfig(env=EnvConfig(id=default_run_dir))
    assert to_json(config)["env"]["id"] == "echelon.runs.folder:default_run_dir"


def test_what_json_cannot_hold_is_named() -> None:
    with pytest.raises(ConfigError, match=r"env\.kwargs\.rewards\.1=.*cannot be written"):
        to_json(TrainConfig(env=EnvConfig(kwargs={"rewards": [1, {2}]})))


BAD_JSON: list[tuple[Any, str]] = [
    ([], r"the configuration=\[\] must be an object"),
    ({"actor": 3}, "actor=3 must be an object"),
    ({"actr": {}}, "no field actr. Did you mean actor?"),
    ({"actor": {"envz": 3}}, "actor.envz=3: .* Did you mean actor.envs?"),
    ({"algorithm": {"name": "impala", "zzz": 1.0}}, "no field algorithm.zzz. Fields there: .*algorithm.rho_clip"),
    ({"actor": {"envs": True}}, "actor.envs=True does not fit: expected int"),
    ({"seed": 1.5}, "seed=1.5 does not fit: expected int"),
    ({"seed": None}, "seed=None does not fit: expected int"),
    ({"engine": "lokal"}, "engine='lokal' does not fit: use inline or local or hosts or ray. Did you mean local?"),
    ({"algorithm": {"discount": 0.9}}, "algorithm.name=None does not fit: use impala or ppo"),
    ({"algorithm": {"name": "pppo"}}, "Did you mean ppo?"),
    ({"network": {"hidden": [1, "a"]}}, r"network.hidden.1='a' does not fit: expected int"),
    ({"network": {"hidden": 64}}, "network.hidden=64 does not fit: expected comma-separated int"),
    ({"env": {"id": 3}}, "env.id=3 does not fit: expected str"),
    ({"stop": {"until_return": "a"}}, "stop.until_return='a' does not fit: expected finite number or none"),
    ({"stop": {"minutes": float("nan")}}, "stop.minutes=nan does not fit"),
    ({"actor": {"trajectory": 0}}, "actor.trajectory=0 must be at least 1"),
]


@pytest.mark.parametrize(("data", "message"), BAD_JSON)
def test_from_json_refuses(data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_json(data)


def test_set_fields_parses_by_type() -> None:
    texts = {
        "actor.envs": "32",
        "stop.steps": "1e6",
        "stop.until_return": "475",
        "algorithm.discount": ".9",
        "learner.compile": "Yes",
        "learner.max_lag": "0",
        "network.hidden": "(32, 16)",
        "env.wrappers": "a:b,c:d",
        "env.kwargs": '{"a": 1}',
        "env.id": "ALE/Pong-v5",
        "engine": "inline",
    }
    config = set_fields(TrainConfig(), texts)
    assert config.actor.envs == 32
    assert config.stop.steps == 1_000_000 and type(config.stop.steps) is int
    assert config.stop.until_return == 475.0
    assert config.algorithm == ImpalaConfig(discount=0.9)
    assert config.learner.compile is True
    assert config.learner.max_lag == 0
    assert config.network.hidden == (32, 16)
    assert config.env == EnvConfig("ALE/Pong-v5", {"a": 1}, ("a:b", "c:d"))
    assert config.engine == "inline"
    back = set_fields(config, {"learner.max_lag": "none", "network.hidden": "", "learner.compile": "0"})
    assert (back.learner.max_lag, back.network.hidden, back.learner.compile) == (None, (), False)


BAD_SECTIONS: list[tuple[Callable[[], Any], str]] = [
    (lambda: ActorConfig(envs="8"), "actor.envs='8' does not fit: expected int"),
    (lambda: ActorConfig(trajectory=0), r"actor.trajectory=0 must be at least 1 \(steps per trajectory, T\)"),
    (lambda: LearnerConfig(max_lag=-1), r"learner.max_lag=-1 must be at least 0 \(maximum lag"),
    (lambda: NetworkConfig(hidden=[64, 0]), r"network.hidden=\[64, 0\]: each must be between 1 and"),
    (lambda: NetworkConfig(core="rnn"), "network.core='rnn' does not fit: use none or lstm or gru"),
    (lambda: WorkersConfig(evaluation=1.0), "workers.evaluation=1.0 must be at least 0 and below 1: some episodes"),
    (lambda: PpoConfig(clip=0.0), "algorithm.clip=0.0 must be above 0: with 0, no step has a gradient"),
    (lambda: TrainConfig(actor={"envs": 3}), "actor={'envs': 3} is a section: write ActorConfig"),
    (lambda: TrainConfig(seed=1 << 63), "seed=9223372036854775808 must be between 0 and 9223372036854775807"),
    (lambda: replace(ActorConfig(), envz=3), "there is no field envz"),
    (lambda: replace(TrainConfig(), actor=3), "actor is a section, not a value: 3 does not fit"),
]


@pytest.mark.parametrize(("make", "message"), BAD_SECTIONS)
def test_a_section_with_a_value_that_does_not_fit_cannot_be_made(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_values_get_the_type_of_their_field() -> None:
    assert NetworkConfig(hidden=[8, 4]).hidden == (8, 4)
    assert type(StopConfig(minutes=3).minutes) is float
    assert type(replace(TrainConfig(), **{"stop.minutes": 3}).stop.minutes) is float


def learner_config(*arguments: str) -> TrainConfig:
    """The configuration that `echelon learner` makes of `arguments`."""
    return parse_config(make_parser("echelon learner", "", options=OPTIONS), with_address(arguments), OPTIONS)


def test_replace_accepts_the_old_name_of_a_field_and_warns() -> None:
    config = learner_config("dqn", "CartPole-v1")
    with pytest.warns(FutureWarning, match=r"stop\.epochs is now stop\.episodes"):
        old = replace(config, **{"stop.epochs": 5})
    assert old == replace(config, **{"stop.episodes": 5})


@pytest.mark.parametrize("option", ["--epochs", "--stop.epochs"])
def test_the_learner_accepts_the_old_name_of_an_option_and_warns(option: str) -> None:
    with pytest.warns(FutureWarning, match=r"stop\.epochs is now stop\.episodes"):
        old = learner_config("dqn", "CartPole-v1", option, "5")
    assert old == learner_config("dqn", "CartPole-v1", "--episodes", "5")
    assert old.stop.episodes == 5


def test_the_configuration_of_an_older_release_is_read_without_a_warning() -> None:
    config = replace(preset("dqn", "CartPole-v1"), **{"workers.address": "tcp://127.0.0.1:0", "stop.episodes": 5})
    data = to_json(config)
    data["stop"]["epochs"] = data["stop"].pop("episodes")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert from_json(data) == config


@pytest.mark.parametrize(("old", "new"), [(True, "vtrace"), (False, "none")])
def test_the_old_switch_of_the_lag_correction_is_read(old: bool, new: str) -> None:
    config = replace(preset("async-ppo", "CartPole-v1"), **{"algorithm.lag_correction": new})
    data = to_json(config)
    del data["algorithm"]["lag_correction"]
    data["algorithm"]["correct_lag"] = old
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert from_json(data) == config
    with pytest.warns(FutureWarning, match=r"algorithm\.correct_lag is now algorithm\.lag_correction"):
        assert replace(config, **{"algorithm.correct_lag": old}) == config
    with pytest.warns(FutureWarning, match=r"algorithm\.correct_lag is now algorithm\.lag_correction"):
        assert set_fields(config, {"algorithm.correct_lag": str(old)}) == config


BAD_TEXT = [
    ("actor", "1", "actor='1' names a section, not a field. Its fields: actor.envs"),
    ("discount", ".9", "Did you mean algorithm.discount?"),
    ("actr.envs", "1", "Did you mean actor.envs?"),
    ("actor.envs", "many", "actor.envs='many' does not fit: expected int"),
    ("actor.envs", "1.5", "actor.envs=1.5 does not fit: expected int"),
    ("actor.envs", "-1", "actor.envs=-1 must be at least 0"),
    ("learner.compile", "maybe", "learner.compile='maybe' does not fit: expected true|false"),
    ("learner.max_lag", "null", "learner.max_lag='null' does not fit: expected int or none"),
    ("env.kwargs", "{a", "env.kwargs='{a' is not JSON"),
    ("env.kwargs", "[1]", r"env.kwargs=\[1\] does not fit: expected JSON object"),
    ("optimizer.learning_rate", "inf", "optimizer.learning_rate=inf does not fit"),
    ("network.core", "LSTM", "network.core='LSTM' does not fit: use none or lstm or gru"),
]


@pytest.mark.parametrize(("path", "text", "message"), BAD_TEXT)
def test_set_fields_refuses(path: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        set_fields(TrainConfig(), {path: text})


def test_fields_of_lists_paths_values_and_what_is_said_of_them() -> None:
    fields = {info.path: info for info in fields_of(UNUSUAL)}
    assert fields["actor.num_actors"].value == 3
    assert fields["actor.num_actors"].field.text.endswith("run at a time [at least 1]")
    assert fields["acting.spin_us"].field.text.endswith(" [µs, at least 0]")
    assert fields["algorithm.discount"].field.bounds == "between 0 and 1"
    assert fields["learner.max_lag"].field.type == "int or none"
    assert fields["network.core"].field.type == "none|lstm|gru"
    assert fields["algorithm.epochs"].value == 7
    assert "actor" not in fields and "algorithm.rho_clip" not in fields


def test_every_field_can_be_set_from_its_own_text() -> None:
    def text(value: Any) -> str:
        if isinstance(value, dict):
            return json.dumps(value)
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)

    texts = {info.path: text(info.value) for info in fields_of(UNUSUAL)}
    assert len(texts) > 40
    assert set_fields(UNUSUAL, texts) == UNUSUAL


# ----------------------------------------------------------------------------------------------------------- events


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def test_crc32c_known_answers() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"") == 0


@pytest.mark.filterwarnings("ignore")  # of tensorboard and protobuf themselves
def test_tensorboard_reads_our_events(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path)
    writer.scalars(0, {"train/return": 1.5, "größe": -2.0}, wall_time=1e9)
    writer.scalars(3_000_000_000, {"train/return": 1e300}, wall_time=1e9 + 1)
    scalars = read_scalars(tmp_path)
    writer.close()
    largest = struct.unpack("<f", struct.pack("<f", 3.4028234663852886e38))[0]
    assert scalars == {"train/return": [(0, 1.5), (3_000_000_000, largest)], "größe": [(0, -2.0)]}


@pytest.mark.filterwarnings("ignore")
def test_a_resumed_writer_hides_the_abandoned_future(tmp_path: Path) -> None:
    for session, steps in enumerate([(100, 200, 300), (150, 250)]):
        writer = EventWriter(tmp_path)
        for step in steps:
            writer.scalars(step, {"a": float(session)}, wall_time=1e9 + session)
        writer.close()
    assert read_scalars(tmp_path) == {"a": [(100, 0.0), (150, 1.0), (250, 1.0)]}


# ---------------------------------------------------------------------------------------------------------- metrics


@pytest.mark.filterwarnings("ignore")
def test_metrics_are_strict_json_and_scalars(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, append=False)
    row = {
        "kind": "train",
        "env_steps": np.int64(64),
        "return_mean": float("nan"),
        "loss.value": torch.tensor(0.5),
        "loss.policy": np.float32(0.25),
        "roles.actor-0.env": 0.75,
        "done": True,
        "path": tmp_path,
    }
    writer.write(row)
    rows = read_rows(tmp_path)  # readable before close
    writer.write({"kind": "message", "text": "no steps here"})
    writer.close()
    assert rows == [
        {
            "kind": "train",
            "env_steps": 64,
            "return_mean": None,
            "loss.value": 0.5,
            "loss.policy": 0.25,
            "roles.actor-0.env": 0.75,
            "done": True,
            "path": str(tmp_path),
        }
    ]
    scalars = read_scalars(tmp_path)
    assert scalars == {
        "train/loss/value": [(64, 0.5)],
        "train/loss/policy": [(64, 0.25)],
        "train/roles/actor-0/env": [(64, 0.75)],
    }


@pytest.mark.parametrize("end", [b'{"env_ste', b"\0\0\0\0\n", b""])
def test_resume_drops_a_line_cut_short(tmp_path: Path, end: bytes) -> None:
    first = MetricsWriter(tmp_path, append=False)
    first.write({"env_steps": 1})
    first.write({"env_steps": 2})
    first.close()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(end)
    assert [row["env_steps"] for row in read_rows(tmp_path)] == [1, 2]
    second = MetricsWriter(tmp_path, append=True)
    second.write({"env_steps": 3})
    second.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"env_steps": 1}\n{"env_steps": 2}\n{"env_steps": 3}\n'


def test_resume_of_a_single_broken_line_starts_empty(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"env')
    MetricsWriter(tmp_path, append=True).close()
    assert read_rows(tmp_path) == []


def test_metrics_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_rows(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"a": 1}\noops\n{"a": 2}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 2, is not a JSON object"):
        read_rows(tmp_path)
    with pytest.raises(ConfigError, match="does not overwrite"):
        MetricsWriter(tmp_path, append=False)


# ----------------------------------------------------------------------------------------------------------- folder


def test_only_its_user_enters_a_new_folder_and_an_existing_one_keeps_its_mode(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        made = RunFolder.create(tmp_path / "runs" / "run")
        (given := tmp_path / "given").mkdir(mode=0o755)
        RunFolder.create(given)
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (made.path, made.path.parent, given)] == [0o700, 0o755, 0o755]


def test_folder_round_trip(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "a" / "run")
    assert run.checkpoints.is_dir() and run.logs.is_dir()
    run.write_config(to_json(UNUSUAL))
    run.write_summary({"return_mean": float("inf"), "curve": tmp_path, "env_steps": np.int64(3)})
    again = RunFolder.open(run.path)
    assert from_json(again.read_config()) == UNUSUAL
    assert json.loads((again.path / "summary.json").read_text()) == {
        "return_mean": None,
        "curve": str(tmp_path),
        "env_steps": 3,
    }
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoints", "config.json", "logs", "summary.json"]
    record = json.loads((run.path / "config.json").read_text())
    assert set(record["versions"]) == {"python", "torch", "echelon", "gymnasium", "numpy", "git", "project_git"}


def test_create_refuses_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "note").write_text("mine")
    with pytest.raises(ConfigError, match=f"not empty.*echelon resume {tmp_path}.*--run-dir"):
        RunFolder.create(tmp_path)
    with pytest.raises(ConfigError, match="cannot be created"):
        RunFolder.create(tmp_path / "note")
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json is damaged"),
        ("3", "config.json is damaged: it holds 3"),
        ('{"format": 9, "versions": {"echelon": "7"}}', "has format 9; this Echelon reads format 1.*'echelon': '7'"),
        ('{"format": 1, "config": []}', "config.json is damaged: config="),
    ],
)
def test_open_refuses_a_bad_config(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        RunFolder.open(tmp_path)


def test_open_refuses_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run folder"):
        RunFolder.open(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"not a run folder: it has no config\.json"):
        RunFolder.open(tmp_path)


def test_a_summary_that_fails_to_write_leaves_the_old_one(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path)
    run.write_summary({"status": "finished"})
    with pytest.raises(TypeError):
        run.write_summary({"status": object()})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"status": "finished"}
    assert not list(tmp_path.glob(".*"))


def test_default_names_are_safe_and_no_two_runs_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folder_module.time, "strftime", lambda form: "20260102-030405")
    path = default_run_dir("impala", "CartPole-v1", "seed3")
    assert path == Path("runs/impala-CartPole-v1-seed3-20260102-030405")
    assert default_run_dir("ppo", "../../ALE/Pong-v5", "seed0").name == "ppo-ALE-Pong-v5-seed0-20260102-030405"
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: RunFolder.create(path, unique=True).path.name, range(16)))
    assert sorted(made) == sorted([path.name, *(f"{path.name}-{count}" for count in range(2, 18))][:16])
    assert (tmp_path / path).stat().st_mode & 0o777 == 0o700


def test_git_is_the_commit_of_echelon_and_project_git_that_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = versions()["git"]
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x"]
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "mine"], check=True)
    monkeypatch.chdir(tmp_path)
    found = versions()
    assert found["git"] == before != found["project_git"] is not None


def test_versions_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = versions()
    assert found["git"] is None and found["project_git"] is None
    assert found["numpy"] == np.__version__


# ----------------------------------------------------------------------------------------------------------- report


def run_with(path: Path, rows: list[dict[str, Any]]) -> Path:
    run = RunFolder.create(path)
    run.write_config(to_json(TrainConfig()))
    writer = MetricsWriter(run.path, append=False)
    for row in rows:
        writer.write(row)
    writer.close()
    return run.path


def train_row(env_steps: int, return_mean: float | None) -> dict[str, Any]:
    speed = {"wall_s": env_steps / 1000, "env_steps_per_s": 1000.0, "lag_mean": 1.0}
    return {"kind": "train", "env_steps": env_steps, "return_mean": return_mean} | speed


CURVES: dict[str, list[dict[str, Any]]] = {
    "plain": [train_row(n * 100, float(n)) for n in range(10)],
    "one_row": [train_row(100, 1.0)],
    "no_episode": [train_row(100, None), train_row(200, None)],
    "evaluation": [train_row(100, 1.0), {"kind": "evaluation", "env_steps": 100, "return_mean": 2.0}],
    "only_evaluation": [{"kind": "evaluation", "env_steps": 100, "return_mean": 2.0}],
    "huge": [train_row(100, -1.7e308), {"kind": "evaluation", "env_steps": 100, "return_mean": 1.7e308}],
    "not finite": [train_row(100, 1.0), {"kind": "evaluation", "env_steps": 100, "return_mean": float("inf")}],
}


@pytest.mark.parametrize("name", CURVES)
def test_curve_is_drawn(tmp_path: Path, name: str) -> None:
    import matplotlib.image

    path = draw_curve(run_with(tmp_path / "run", CURVES[name]))
    assert path == tmp_path / "run" / "curve.png"
    picture = matplotlib.image.imread(path)
    assert picture.shape[:2] == (600, 960)
    assert picture[..., :3].std() > 0.01  # something is on it
    assert not list(path.parent.glob(".*"))


def test_the_curve_of_a_resumed_run_leaves_out_what_was_repeated(tmp_path: Path) -> None:
    evaluation = {"kind": "evaluation", "env_steps": 190, "return_mean": 9.0}
    once = [train_row(100, 1.0), train_row(150, 5.0), train_row(250, 6.0)]
    twice = [once[0], train_row(200, 9.0), evaluation, *once[1:]]
    pictures = [draw_curve(run_with(tmp_path / str(len(rows)), rows)).read_bytes() for rows in (once, twice)]
    assert pictures[0] == pictures[1]


def test_a_curve_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no rows yet"):
        draw_curve(run_with(tmp_path / "run", [{"kind": "message", "text": "hello"}]))


DURATIONS = [(42.4, "42 s"), (59.9, "1 min 00 s"), (185, "3 min 05 s"), (7620, "2 h 07 min")]


@pytest.mark.parametrize(("seconds", "text"), DURATIONS)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def shares(**phases: float) -> dict[str, float]:
    return phases


MORE_ACTORS = "More actors (--actor.num_actors, 6 cores are free) would help."
BOTTLENECKS = [
    (
        {"learner": shares(learn=0.96, wait=0.04), "actor-0": shares(env=0.4, act=0.2, wait=0.4)},
        8,
        "bottleneck: the learner (busy 96%; actors wait 40%). Larger batches (--learner.batch), a GPU (--device cuda) "
        "or fewer epochs would help.",
    ),
    (
        {"learner": shares(learn=0.2, wait=0.8), "actor-0": shares(env=0.7, act=0.25, transfer=0.05)},
        8,
        "stepping the environments (env 70% of an actor's time; the learner waits 80%). A vectorised environment",
    ),
    (
        {"learner": shares(learn=0.2, wait=0.8), "actor-0": shares(env=0.3, act=0.65, transfer=0.05)},
        8,
        "(--envs-per-actor) would share each forward pass. More actors (--actor.num_actors, 6 cores are free)",
    ),
    (
        {"learner": shares(learn=0.9, transfer=0.1), "actor-0": shares(env=0.5, act=0.5)},
        2,
        "the processor, all 2 cores are busy with 2 processes (env 25%, act 25%, learn 45%, transfer 5%), so more",
    ),
    (
        {"learner": shares(learn=0.5, wait=0.5), "actor-0": shares(env=0.3, act=0.2, wait=0.5)},
        8,
        "none is busy; they wait for each other (actors wait 50%, the learner 50%). Allowing lag (--learner.max-lag 1",
    ),
    (
        {
            "learner": shares(learn=0.3, wait=0.7),
            "inference-0": shares(act=0.8, transfer=0.1, wait=0.1),
            "actor-0": shares(env=0.4, wait=0.6),
        },
        8,
        "bottleneck: the inference server (busy 90%; actors wait 60%). More of them (--acting.servers, 5 cores are "
        "free), a GPU (--acting.device cuda), a smaller network or a policy in every actor (--acting local) would",
    ),
    (
        {
            "learner": shares(learn=0.3, wait=0.7),
            "inference-0": shares(act=0.1, wait=0.9),
            "actor-0": shares(env=0.3, wait=0.7),
        },
        8,
        "none is busy; they wait for each other (actors wait 70%, the learner 70%, inference 90%)",
    ),
    (
        {
            "learner-0": shares(learn=0.4, exchange=0.5, transfer=0.05, wait=0.05),
            "learner-1": shares(learn=0.35, exchange=0.6, wait=0.05),
            "actor-0": shares(env=0.1, act=0.1, wait=0.8),
            "actor-1": shares(env=0.1, act=0.1, wait=0.8),
        },
        2,
        "bottleneck: the learners exchange gradients at every optimizer step, 55% of their time (actors wait 80%). "
        "One learner (--learners 1) or larger minibatches (--learner.batch) would save that. --learner.threads gives",
    ),
    (
        {
            "learner-0": shares(learn=0.25, exchange=0.35, wait=0.4),
            "learner-1": shares(learn=0.25, exchange=0.35, wait=0.4),
            "actor-0": shares(env=0.6, act=0.4),
        },
        2,
        "all 2 cores are busy with 3 processes (env 27%, act 18%, learn 23%, exchange 32%, transfer 0%), so more",
    ),
    (
        {
            "learner-0": shares(learn=0.9, exchange=0.1),
            "learner-1": shares(learn=0.9, exchange=0.1),
            "actor-0": shares(env=0.4, wait=0.6),
        },
        8,
        "bottleneck: the 2 learners (busy 100%; actors wait 60%)",
    ),
    ({"learner": shares(learn=1.0)}, 8, "unknown"),
]


@pytest.mark.parametrize(("roles", "num_cores", "sentence"), BOTTLENECKS)
def test_bottleneck(roles: dict[str, dict[str, float]], num_cores: int, sentence: str) -> None:
    assert sentence in bottleneck(roles, num_cores=num_cores, num_processes=len(roles))


def test_a_gpu_that_learns_is_not_recommended() -> None:
    roles = {"learner": {"learn": 0.97, "wait": 0.03}, "actor-0": {"env": 0.3, "wait": 0.7}}
    for replayed in (False, True):
        told = [
            bottleneck(roles, num_cores=8, num_processes=2, replayed=replayed, on_gpu=on_gpu)
            for on_gpu in (False, True)
        ]
        assert "GPU" in told[0] and "GPU" not in told[1]
        assert all("the learner (busy 97%" in text for text in told)


@pytest.mark.parametrize("role", ["learner", "inference-0", "actor-0"])
def test_a_gpu_that_is_not_there_is_not_recommended(role: str) -> None:
    roles = {name: shares(wait=1.0) for name in ("learner", "inference-0", "actor-0")} | {role: shares(learn=1.0)}
    for replayed in (False, True):
        for num_cores in (1, 8):
            for has_gpu in (False, True):
                told = bottleneck(roles, num_cores=num_cores, num_processes=3, replayed=replayed, has_gpu=has_gpu)
                assert "bottleneck: " in told and (has_gpu or "GPU" not in told), told
    assert "GPU" in workers_bottleneck({"wait": 0.0}) and "GPU" not in workers_bottleneck({"wait": 0.0}, has_gpu=False)


def test_what_replays_is_told_to_draw_larger_batches_and_has_no_epochs() -> None:
    exchanging = shares(learn=0.5, exchange=0.45, wait=0.05)
    roles = {"learner-0": exchanging, "learner-1": exchanging, "actor-0": shares(env=0.1, wait=0.9)}
    told = bottleneck(roles, num_cores=8, num_processes=3, replayed=True, on_gpu=True)
    assert "larger minibatches (--replay.batch)" in told and "threads" not in told
    roles = {"learner": shares(learn=0.97, wait=0.03), "actor-0": shares(env=0.9, wait=0.1)}
    told = bottleneck(roles, num_cores=2, num_processes=2, replayed=True)
    assert "less work: a lower --replay.samples-per-insert" in told and "epochs" not in told


def test_no_more_actors_where_no_core_is_free() -> None:
    roles = {"learner": shares(learn=0.1, wait=0.9), "actor-0": shares(env=0.9, wait=0.1), "actor-1": shares(env=0.5)}
    assert "More actors" not in bottleneck(roles, num_cores=3, num_processes=3)


def test_what_is_vectorised_is_not_told_to_be() -> None:
    roles = {"learner": shares(learn=0.2, wait=0.8), "actor-0": shares(env=0.9, act=0.1)}
    told = bottleneck(roles, num_cores=8, num_processes=2, vectorised=True)
    assert told.endswith("(env 90% of an actor's time; the learner waits 80%). " + MORE_ACTORS)
    told = bottleneck(roles, num_cores=1, num_processes=2, vectorised=True)
    assert told.endswith("so more actors would not help. More cores would help.")


def test_a_learner_that_waits_for_batches_of_many_actors_is_told_how_to_update_more_often() -> None:
    roles = {"learner": shares(learn=0.4, wait=0.6), "actor-0": shares(env=0.9, wait=0.1)}
    setting: dict[str, Any] = {"num_cores": 8, "num_processes": 2}
    told = bottleneck(roles, **setting, num_joined=4, smaller_batch="--envs-per-actor 0", lag_bounded=False)
    assert "each of the 4 actors, so batches grow" in told and "--learner.batch N or --envs-per-actor 0 would" in told
    bounded = bottleneck(roles, **setting, num_joined=4, smaller_batch="--actors 3", lag_bounded=True)
    assert "--actors 3 would" in bounded and "--learner.batch" not in bounded, "it must fit all actors"
    busy = {**roles, "learner": shares(learn=0.6, wait=0.4)}
    for other in (bottleneck(roles, **setting, num_joined=2), bottleneck(busy, **setting, num_joined=4)):
        assert "batches grow" not in other


def test_roles_of_one_process_share_its_time(tmp_path: Path, shm_dir: Path) -> None:
    """A learner that does next to nothing must not count as half of the work."""
    changes = {"engine": "inline", "actor.num_actors": 1, "actor.envs": 4, "stop.steps": 400, "network.hidden": (8,)}
    changes |= {"run.dir": str(tmp_path / "run"), "shm_dir": str(shm_dir), "evaluation.episodes": 0}
    summary = train(replace(preset("impala", "CartPole-v1"), **changes), output=io.StringIO()).summary
    time = summary["time"]
    assert sum(sum(phases.values()) for phases in time.values()) == pytest.approx(1.0)
    work = {phase: sum(phases.get(phase, 0) for phases in time.values()) for phase in PHASES if phase != "wait"}
    for phase in ("env", "act", "learn"):
        assert f"{phase} {work[phase] / sum(work.values()):.0%}" in summary["bottleneck"]


def test_a_run_folder_belongs_to_one_run_at_a_time(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    told = rf"still running \(process {os.getpid()}\)"
    with run.held(), pytest.raises(ConfigError, match=told), RunFolder(run.path).held():
        pass
    with run.held():
        pass  # free again
