"""Callbacks that report a training to Weights & Biases and to MLflow."""

from __future__ import annotations

import contextlib
import importlib
import math
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from echelon import config_io
from echelon.callbacks.callback import Callback, Row, Training
from echelon.disk import put_file, read_regular
from echelon.errors import ConfigError
from echelon.runs.metrics import plain, scalars

GOOD = ("solved", "finished", "stopped", "no_updates")  # statuses of a run that has not failed
MAX_ID_BYTES = 200


class Wandb(Callback):
    """Reports to Weights & Biases, to one run there for a training and all its resumes.

    The arguments are those of `wandb.init`: project, entity, name, group, tags, mode ("offline"), settings, ...
    """

    def __init__(self, **init: Any) -> None:
        self._wandb = _module("wandb", "init")
        self._init = init

    def on_start(self, training: Training) -> None:
        given = {
            "id": _remembered(training, "wandb_run_id", lambda: secrets.token_hex(8)),
            "name": training.folder.name,
            "dir": str(training.folder),
            "config": config_io.to_json(training.config),
            "resume": "allow",
            "settings": self._wandb.Settings(console="off"),  # the console's live panel would be a mess there
        }
        self._run = self._wandb.init(**{**given, **self._init})
        self._run.define_metric("*", step_metric="env_steps")  # its own steps may not decrease, as after a restart

    def on_update(self, training: Training, row: Row) -> None:
        self._run.log({"env_steps": training.steps, **_figures("train", row), **_figures("callback", training.logged)})

    def on_evaluation(self, training: Training, row: Row) -> None:
        self._run.log({"env_steps": row["env_steps"], **_figures("evaluation", row)})

    def on_end(self, training: Training, summary: Row) -> None:
        self._run.log({"env_steps": training.steps, **_figures("callback", training.logged)})
        self._run.summary.update(_figures("summary", summary))
        self._run.summary["status"] = summary["status"]
        self._run.finish(exit_code=0 if summary["status"] in GOOD else 1)


class Mlflow(Callback):
    """Reports to MLflow, to one run there for a training and all its resumes; `tracking_uri` as in MLflow."""

    def __init__(
        self, experiment: str = "echelon", tracking_uri: str | None = None, tags: Mapping[str, str] | None = None
    ) -> None:
        self._mlflow = _module("mlflow", "MlflowClient")
        self._experiment, self._tags = experiment, dict(tags or {})
        self._client = self._mlflow.MlflowClient(tracking_uri)
        self._last: Any = None  # the newest batch that was sent

    def on_start(self, training: Training) -> None:
        self._id = _remembered(training, "mlflow_run_id", lambda: self._create(training))
        self._client.update_run(self._id, status="RUNNING")

    def _create(self, training: Training) -> str:
        client, entities = self._client, self._mlflow.entities
        found = client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found is not None else client.create_experiment(self._experiment)
        run = client.create_run(experiment, run_name=training.folder.name, tags=self._tags)
        fields = config_io.fields_of(training.config)
        params = [entities.Param(info.path, str(info.value)[:500]) for info in fields]
        for begin in range(0, len(params), 100):  # as many as one request may have
            client.log_batch(run.info.run_id, params=params[begin : begin + 100])
        id: str = run.info.run_id
        return id

    def on_update(self, training: Training, row: Row) -> None:
        self._send(training.steps, {**_figures("train", row), **_figures("callback", training.logged)})

    def on_evaluation(self, training: Training, row: Row) -> None:
        self._send(row["env_steps"], _figures("evaluation", row))

    def _send(self, step: int, figures: Mapping[str, float]) -> None:
        """Sends figures from a thread of MLflow: its server may be slow."""
        now = int(1000 * time.time())
        metrics = [self._mlflow.entities.Metric(name, value, now, step) for name, value in figures.items()]
        for begin in range(0, len(metrics), 1000):
            self._last = self._client.log_batch(self._id, metrics[begin : begin + 1000], synchronous=False)

    def on_end(self, training: Training, summary: Row) -> None:
        self._send(training.steps, {**_figures("callback", training.logged), **_figures("summary", summary)})
        self._last.wait()
        self._client.set_tag(self._id, "status", summary["status"])
        self._client.set_terminated(self._id, "FINISHED" if summary["status"] in GOOD else "FAILED")


def _figures(kind: str, row: Row) -> dict[str, float]:
    """Returns the finite numbers of a row by path."""
    return {path: value for path, value in scalars(plain(row), kind).items() if math.isfinite(value)}


def _remembered(training: Training, name: str, make: Callable[[], str]) -> str:
    """Returns the content of a file in the run folder, so that a resumed run finds it; `make` is called if none is."""
    path = training.folder / name
    with contextlib.suppress(FileNotFoundError):
        return read_regular(path, MAX_ID_BYTES).decode().strip()
    made = make()
    put_file(path, made.encode())
    return made


def _module(name: str, needed: str) -> Any:
    """Imports an optional package; a folder of that name in the working directory is not one."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        module = None
    if not hasattr(module, needed):
        raise ConfigError(f'{name} is not installed. Install it with `pip install "echelon[{name}]"`.')
    return module
