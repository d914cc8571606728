"""Callbacks: when they are called, what they can change, and what happens if they fail."""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import math
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import echelon
from echelon.callbacks import Callback, Mlflow, Prometheus, Training, Wandb
from echelon.config import replace
from echelon.errors import ConfigError, RunError
from echelon.runs.episodes import COLUMNS
from echelon.runs.metrics import read_rows
from telling import Command

TINY = {"actor.num_actors": 1, "actor.envs": 2, "actor.trajectory": 8, "network.hidden": (8,), "learner.threads": 1}
TINY |= {"engine": "inline", "stop.steps": 200, "evaluation.episodes": 0}
PPO = {"algorithm.minibatches": 2, "algorithm.epochs": 1}
REPLAY = {"replay.min_size": 32, "replay.capacity": 1_000, "replay.batch": 8}

MINE = """
class Fails:
    def on_update(self, training, row):
        raise KeyError("mine")


class Names:
    def __init__(self, text="none"):
        self.text = text

    def on_end(self, training, summary):
        training.message(f"the end of {self.text}: {training.steps} steps")
"""


def train(
    folder: Path, *callbacks: object, preset: str = "ppo", output: io.StringIO | None = None, **changes: Any
) -> dict[str, Any]:
    """The summary of a short training."""
    own = PPO if preset == "ppo" else REPLAY
    config = replace(echelon.preset(preset, "CartPole-v1"), **{**TINY, **own, "run.dir": str(folder), **changes})
    return echelon.train(config, callbacks=callbacks, output=output or io.StringIO()).summary


class Recorder(Callback):
    """Records every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.training: Any = None

    def of(self, hook: str) -> list[Any]:
        return [what for name, what in self.calls if name == hook]

    def on_start(self, training: Training) -> None:
        self.training = training
        assert training.folder.is_dir()
        self.calls.append(("start", None))

    def on_update(self, training: Training, row: Any) -> None:
        self.calls.append(("update", row))

    def on_episode(self, training: Training, row: Any) -> None:
        self.calls.append(("episode", row))

    def on_evaluation(self, training: Training, row: Any) -> None:
        self.calls.append(("evaluation", row))

    def on_checkpoint(self, training: Training, path: Path) -> None:
        assert (path / "state.json").is_file()
        self.calls.append(("checkpoint", path))

    def on_end(self, training: Training, summary: Any) -> None:
        self.calls.append(("end", dict(summary)))


class Stops:
    """Logs numbers, and stops the run after its first update; only some methods, and no base class."""

    def on_update(self, training: Training, row: Any) -> None:
        training.log({"steps_twice": 2 * training.steps, "part": 0.5})
        if training.updates:
            training.stop("it is enough")


@pytest.mark.parametrize("engine", ["inline", "local"])
def test_callbacks_see_the_whole_run_and_end_it(tmp_path: Path, shm_dir: Path, engine: str) -> None:
    recorder, changes = Recorder(), {"stop.steps": 10_000_000, "evaluation.episodes": 2, "engine": engine}
    summary = train(tmp_path / "run", recorder, Stops(), shm_dir=str(shm_dir), **changes)
    names = [name for name, _ in recorder.calls]
    assert names[0] == "start" and names[-2:] == ["evaluation", "end"] and names.index("update") < len(names) - 2
    assert recorder.of("checkpoint")[-1] == Path(summary["checkpoint"])
    assert recorder.of("evaluation")[0]["return_mean"] == summary["evaluation_return_mean"], "as at a stop condition"
    (end,) = recorder.of("end")
    assert end["status"] == summary["status"] == "finished" and summary["stop_reason"] == "it is enough"
    last, training = recorder.of("update")[-1], recorder.training
    assert last["env_steps"] == training.steps == summary["env_steps"] > 0 and training.updates == summary["updates"]
    rows = read_rows(tmp_path / "run")
    assert [row for row in rows if row["kind"] == "train"] == recorder.of("update")
    logged = [row for row in rows if row["kind"] == "callback"]
    totals = [(row["env_steps"], row["episodes"], row["progress"]) for row in recorder.of("update") if row["updates"]]
    assert len(set(totals)) == len(totals) and len(logged) == len(recorder.of("update")), "the last row comes once"
    assert logged[-1]["steps_twice"] == 2 * summary["env_steps"] and logged[-1]["env_steps"] == summary["env_steps"]
    assert summary["logged"] == {"steps_twice": 2 * summary["env_steps"], "part": 0.5}
    assert json.loads((tmp_path / "run/summary.json").read_text())["logged"] == summary["logged"]
    assert not list(shm_dir.iterdir())


@pytest.mark.parametrize("preset", ["ppo", "dqn"])
def test_every_training_episode_is_passed_on(tmp_path: Path, preset: str) -> None:
    recorder = Recorder()
    summary = train(tmp_path / "run", recorder, preset=preset)
    episodes = recorder.of("episode")
    assert len(episodes) == summary["episodes"] > 3
    assert all(one["return"] == one["length"] > 0 for one in episodes), "CartPole's reward is 1"
    assert {*episodes[0]} == {*COLUMNS} and {one["seed"] for one in episodes} == {0}
    assert sum(one["return"] for one in episodes) / len(episodes) == pytest.approx(summary["return_mean"])


class Sets(Callback):
    """Sets the learning rate as soon as possible."""

    def __init__(self, rate: float | None) -> None:
        self.rate, self.rows = rate, list[Any]()

    def on_update(self, training: Training, row: Any) -> None:
        self.rows.append(row)
        training.set(learning_rate=self.rate)
        has_learned = row["updates"] > self.rows[0]["updates"]
        if has_learned and row["learning_rate"] == pytest.approx(self.rate or 1e-3, rel=0.01):
            training.stop("it is set")


def test_a_learning_rate_that_is_set_is_kept_by_a_resume(tmp_path: Path) -> None:
    """None sets the configured one again, with its schedule."""
    run, endless = tmp_path / "run", {"stop.steps": 10_000_000}
    config = {"optimizer.learning_rate": 1e-3, "optimizer.schedule": "linear", **endless}
    train(run, sets := Sets(1e-5), **config)
    assert sets.rows[0]["learning_rate"] != sets.rows[-1]["learning_rate"] == 1e-5
    steps = read_rows(run)[-1]["env_steps"] + 100
    echelon.resume(run, steps=steps, callbacks=[resumed := Recorder()], output=io.StringIO())
    assert {row["learning_rate"] for row in resumed.of("update")} == {1e-5}, "also before the first update"
    echelon.resume(run, steps=10_000_000, callbacks=[again := Sets(None)], output=io.StringIO())
    assert again.rows[-1]["learning_rate"] == pytest.approx(1e-3, rel=0.01)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_a_learning_rate_that_is_none_fails_in_the_callback(tmp_path: Path, rate: float) -> None:
    with pytest.raises(RunError, match="learning_rate="):
        train(tmp_path / "run", Sets(rate))


@pytest.mark.parametrize("value", [None, "text", [1.0, 2.0]])
def test_a_logged_value_that_is_no_number_is_named(tmp_path: Path, value: Any) -> None:
    class Logs(Callback):
        def on_start(self, training: Training) -> None:
            training.log({"fine": 1.0, "broken": value})

    with pytest.raises(RunError, match=r"'broken': .*give a number"):
        train(tmp_path / "run", Logs())


class Fails(Callback):
    """Raises in the method `hook`."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._fail)

    def _fail(self, *_: Any) -> None:
        raise KeyError("mine")


@pytest.mark.parametrize("hook", ["on_start", "on_update", "on_episode", "on_evaluation", "on_checkpoint", "on_end"])
def test_a_callback_that_raises_ends_the_run(tmp_path: Path, hook: str) -> None:
    """Every other one is told."""
    recorder = Recorder()
    with pytest.raises(RunError, match=rf"(?s){hook}.*KeyError.*_fail.*mine") as found:
        train(tmp_path / "run", recorder, Fails(hook), **{"evaluation.episodes": 1})
    assert isinstance(found.value.__cause__, KeyError)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "failed" and summary["error"] == str(found.value)
    (end,) = recorder.of("end")
    assert end["status"] == ("finished" if hook == "on_end" else "failed")
    if hook == "on_end":  # the training was complete
        assert summary["evaluation_return_mean"] == end["evaluation_return_mean"] > 0 and summary["checkpoint"]


def test_a_run_that_a_callback_stops_before_its_first_update_has_finished(tmp_path: Path) -> None:
    class StopsAtOnce(Callback):
        def on_start(self, training: Training) -> None:
            training.stop("there is no need")

        def on_end(self, training: Training, summary: Any) -> None:
            saved = json.loads((training.folder / "summary.json").read_text())
            assert saved["status"] == summary["status"], "it is written already"

    output = io.StringIO()
    never = {"replay.min_size": 100_000, "replay.capacity": 100_000, "stop.steps": 10**9}
    summary = train(tmp_path / "run", StopsAtOnce(), preset="dqn", output=output, **never)
    assert (summary["status"], summary["stop_reason"], summary["updates"]) == ("finished", "there is no need", 0)
    assert "advice" not in summary and "bottleneck" not in output.getvalue(), "there is nothing to measure"
    assert "since the first updates" not in output.getvalue()


def test_commands_take_callbacks_by_name(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    fields = {**TINY, **PPO, "network.hidden": "8"}
    small = ["ppo", "CartPole-v1", *(f"--{path.replace('_', '-')}={value}" for path, value in fields.items())]
    names = ["--callback", "mine:Names", "--callback=mine.py:Names(text='two')"]
    told = command("train", *small, "--run-dir", "run", *names)
    assert told.code == 0 and "the end of none: " in told.out and "the end of two: " in told.out, told
    told = command("resume", "run", "--steps", "300", "--callback", "mine:Names(text='more')")
    assert told.code == 0 and "the end of more: 3" in told.out
    told = command("train", *small, "--engine", "local", "--run-dir", "bad", "--callback", "mine:Fails")
    assert told.code == 1 and "mine.py" in told.err and "KeyError: 'mine'" in told.err
    for more in ([], ["--dry-run"]):
        told = command("train", *small, "--run-dir", "none", "--callback", "mine:Nobody", *more)
        assert told.code == 2 and not (tmp_path / "none").exists()


def test_what_is_no_callback_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for bad, remedy in (
        (Recorder, r"Recorder\(\)"),
        (object(), "on_update"),
        ("echelon.callbacks:Prometheus(prt=1)", "prt"),
        ("echelon.callbacks:Prometheus(port=80000)", "port=80000"),
        (Misspelt(), r"Misspelt\.on_updates is never called.*on_update\?"),
        (Forgetful(), r"Forgetful\.on_update\(training\).*on_update\(training, row\)"),
    ):
        with pytest.raises(ConfigError, match=remedy):
            train(tmp_path / "run", bad)
    for alone in (Recorder(), "mine:Names"):
        with pytest.raises(ConfigError, match=r"callbacks=\[\.\.\.\]"):
            echelon.train(echelon.preset("ppo", "CartPole-v1"), callbacks=alone)  # type: ignore[arg-type]
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ConfigError, match=rf"pip install.*echelon\[{name}\]"):
            train(tmp_path / "run", f"echelon.callbacks:{name.title()}")
    assert not (tmp_path / "run").exists()


class Misspelt(Callback):
    def on_updates(self, training: Training, row: Any) -> None:
        """Never called."""


class Forgetful:
    def on_update(self, training: Training) -> None:
        """Does not take the row."""


def metrics_of(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (one.rpartition(" ") for one in lines if not one.startswith("#"))}


class Scrapes(Callback):
    """Reads the metrics of another callback."""

    def __init__(self, prometheus: Prometheus) -> None:
        self.prometheus, self.found = prometheus, dict[str, float]()

    def on_update(self, training: Training, row: Any) -> None:
        training.log({"own-number": 3})

    def on_end(self, training: Training, summary: Any) -> None:
        self.found = metrics_of(self.prometheus.url)
        with urllib.request.urlopen(self.prometheus.url.removesuffix("metrics"), timeout=10) as index:
            assert b'href="/metrics"' in index.read()
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(self.prometheus.url.replace("metrics", "other"), timeout=10)


def test_prometheus_reads_the_metrics_of_a_run(tmp_path: Path) -> None:
    prometheus = Prometheus()
    summary = train(tmp_path / "run", scrapes := Scrapes(prometheus), prometheus, **{"evaluation.episodes": 1})
    found = scrapes.found
    assert found['echelon_env_steps_total{run="run"}'] == summary["env_steps"] > 0
    assert found['echelon_evaluation_return_mean{run="run"}'] == summary["evaluation_return_mean"]
    shares = [share for name, share in found.items() if name.startswith('echelon_time_share{run="run",role="learner"')]
    assert len(shares) > 1 and 0 < sum(shares) < 1.1  # one phase of a run this short may round to 0
    assert found['echelon_callback_own_number{run="run"}'] == 3
    with pytest.raises(OSError):  # it is closed
        metrics_of(prometheus.url)


def test_prometheus_drops_metrics_that_have_ended(tmp_path: Path) -> None:
    config = echelon.preset("ppo", "CartPole-v1")
    training = Training(config, tmp_path / "run", 0.0, lambda row: None, lambda text: None, lambda: None)
    (prometheus := Prometheus()).on_start(training)
    try:
        prometheus.on_evaluation(training, {"env_steps": 8, "return_mean": 5.0})
        prometheus.on_update(training, {"updates": 1, "time.actor-0.hung": 0.5})
        hung, mean = 'echelon_time_share{run="run",role="actor-0",phase="hung"}', 'echelon_return_mean{run="run"}'
        assert metrics_of(prometheus.url)[hung] == 0.5
        prometheus.on_update(training, {"updates": 2, "return_mean": 7.0})
        found = metrics_of(prometheus.url)
        assert hung not in found and found[mean] == 7 and found[mean.replace("return", "evaluation_return")] == 5
    finally:
        prometheus.on_end(training, {})


def test_two_runs_cannot_have_one_port(tmp_path: Path) -> None:
    class Second(Callback):
        def on_update(self, training: Training, row: Any) -> None:
            with pytest.raises(ConfigError, match="port"):
                train(tmp_path / "second", Prometheus(first.port))

    train(tmp_path / "first", first := Prometheus(), Second(), **{"stop.steps": 16})
    assert not (tmp_path / "second").exists()


def needs(package: str) -> pytest.MarkDecorator:
    found = importlib.util.find_spec(package)
    is_missing = found is None or found.origin is None  # a folder wandb/ of some run is a package without one
    return pytest.mark.skipif(is_missing, reason=f"the extra {package} is not installed")


@needs("wandb")
@pytest.mark.filterwarnings("ignore")
def test_wandb_offline(tmp_path: Path) -> None:
    """The file of the run has the metrics and the configuration; a resumed run is the same one."""
    for steps in (100, 200):
        callbacks = [Wandb(project="tests", mode="offline"), Stops()]
        if steps == 100:
            train(tmp_path / "run", *callbacks)
        else:
            echelon.resume(tmp_path / "run", steps=10_000, callbacks=callbacks, output=io.StringIO())
    importlib.import_module("wandb").teardown()  # ends its service, which serves the runs of a process
    written = list((tmp_path / "run/wandb").glob("offline-run-*/*.wandb"))
    assert len(written) == 2 and len({path.name for path in written}) == 1
    for path in written:
        data = path.read_bytes()
        assert all(word in data for word in (b"train/return_mean", b"callback/steps_twice", b"minibatches"))


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> mock.MagicMock:
    """Stands for MLflow's client, of a server that has the run."""
    monkeypatch.setitem(sys.modules, "mlflow", module := mock.MagicMock())
    client: mock.MagicMock = module.MlflowClient.return_value
    client.create_run.return_value.info.run_id = "1"
    return client


def test_a_training_goes_on_without_its_mlflow_server(tmp_path: Path, mlflow: mock.MagicMock) -> None:
    """The console shows it once, while the run goes on."""

    class Waits(Callback):
        def on_update(self, training: Training, row: Any) -> None:
            if "nobody answers" in output.getvalue():
                training.stop()

    def log_batch(run: str, metrics: Any = (), **rest: Any) -> None:
        if metrics:
            raise ConnectionError("nobody answers")

    mlflow.log_batch.side_effect, mlflow.set_terminated.side_effect = log_batch, ConnectionError("nobody answers")
    output = io.StringIO()
    summary = train(tmp_path / "run", Mlflow(), Waits(), output=output, **{"stop.steps": 1_000_000})
    assert summary["status"] == "finished" and summary["env_steps"] < 1_000_000
    assert output.getvalue().count("nobody answers") == 1


def test_the_end_of_a_run_waits_for_mlflow_only_so_long(
    tmp_path: Path, mlflow: mock.MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echelon.callbacks.trackers.END_S", 0.1)
    answers = threading.Event()
    mlflow.set_terminated.side_effect = lambda *_: answers.wait()
    summary = train(tmp_path / "run", Mlflow(), output=(output := io.StringIO()))
    assert summary["status"] == "finished" and "MLflow" in output.getvalue()
    answers.set()


@needs("mlflow")
@pytest.mark.filterwarnings("ignore")
def test_mlflow_with_a_store_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file:{tmp_path / 'store'}"
    train(tmp_path / "run", Mlflow("tests", uri, tags={"mine": "yes"}), Stops())
    more = echelon.resume(
        tmp_path / "run", steps=10_000, callbacks=[Mlflow("tests", uri), Stops()], output=io.StringIO()
    )
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert run.info.status == "FINISHED" and run.data.tags["mine"] == "yes" and run.info.run_name == "run"
    assert run.data.params["algorithm.minibatches"] == "2"
    steps = [one.step for one in client.get_metric_history(run.info.run_id, "train/updates")]
    assert steps == sorted(steps) and steps[-1] == more.summary["env_steps"]
    assert run.data.metrics["callback/steps_twice"] == 2 * steps[-1]
