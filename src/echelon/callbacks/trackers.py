"""Callbacks that report a training to Weights & Biases and to MLflow."""

from __future__ import annotations

import contextlib
import importlib
import math
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from echelon import config_io
from echelon.callbacks.callback import Callback, Row, Training
from echelon.disk import put_file, read_regular
from echelon.errors import ConfigError
from echelon.runs.metrics import plain, scalars

GOOD = ("solved", "finished", "stopped", "no_updates")  # statuses of a run that has not failed
MAX_ID_BYTES = 200
MAX_WAITING = 1000  # requests to an MLflow server that is slow or away
END_S = 60.0  # how long the end of a run waits for it


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
    """Reports to MLflow, to one run there for a training and all its resumes; `tracking_uri` as in MLflow.

    A thread sends figures in order. While MAX_WAITING requests wait for the server, more figures are dropped. The first
    failure is shown in the console; the training goes on, and later figures are sent.
    """

    def __init__(
        self, experiment: str = "echelon", tracking_uri: str | None = None, tags: Mapping[str, str] | None = None
    ) -> None:
        self._mlflow = _module("mlflow", "MlflowClient")
        self._experiment, self._uri, self._tags = experiment, tracking_uri, dict(tags or {})

    def on_start(self, training: Training) -> None:
        self._client = self._mlflow.MlflowClient(self._uri)  # may create its store
        self._id = _remembered(training, "mlflow_run_id", lambda: self._create(training))
        self._client.update_run(self._id, status="RUNNING")
        self._due = queue.SimpleQueue[Callable[[], Any] | None]()  # requests; None ends the thread
        self._failure, self._is_reported = "", False
        self._thread = threading.Thread(target=self._request, name="mlflow", daemon=True)
        self._thread.start()

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
        self._report(training)

    def on_evaluation(self, training: Training, row: Row) -> None:
        self._send(row["env_steps"], _figures("evaluation", row))

    def on_end(self, training: Training, summary: Row) -> None:
        self._send(training.steps, {**_figures("callback", training.logged), **_figures("summary", summary)})
        self._due.put(partial(self._client.set_tag, self._id, "status", summary["status"]))
        status = "FINISHED" if summary["status"] in GOOD else "FAILED"
        self._due.put(partial(self._client.set_terminated, self._id, status))
        self._due.put(None)
        self._thread.join(END_S)
        if self._thread.is_alive():
            self._fail(f"its server did not take the last figures within {END_S:.0f} s of the end")
        self._report(training)

    def _send(self, step: int, figures: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        metrics = [self._mlflow.entities.Metric(name, value, now, step) for name, value in figures.items()]
        for begin in range(0, len(metrics), 1000):  # as many as one request may have
            if self._due.qsize() >= MAX_WAITING:
                self._fail(f"its server is too slow: {MAX_WAITING} requests wait")
                break
            part = metrics[begin : begin + 1000]
            self._due.put(partial(self._client.log_batch, self._id, part, synchronous=True))

    def _request(self) -> None:
        """Makes the requests that are due, in a thread."""
        while (request := self._due.get()) is not None:
            try:
                request()
            except Exception as error:  # of the server, or of a store of any kind
                self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, why: str) -> None:
        self._failure = self._failure or why

    def _report(self, training: Training) -> None:
        """Shows the first failure, once."""
        if self._failure and not self._is_reported:
            self._is_reported = True
            training.message(f"MLflow lacks figures of this run: {self._failure:.300}")


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
