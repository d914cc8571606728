"""The commands of the manifests, run as their pods would: not root, a read-only root file system, a small /dev/shm.

There is no cluster: namespaces of the kernel stand in for the container, and folders for its volumes.
"""

from __future__ import annotations

import re
import secrets
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from echelon.cli.main import main
from running import DEADLINE_S, Running, Runs, wait_until

# The folder of the volumes stays writable. Then all capabilities go, and the command takes the place of the shell.
ENTER = """
set -e
mount --bind "$1" "$1"
mount -t tmpfs -o "size=$2,mode=1777" tmpfs /dev/shm
mount -o remount,ro,bind /
cd "$1"
shift 2
exec setpriv --no-new-privs --bounding-set=-all --inh-caps=-all --ambient-caps=-all "$@"
"""
SMALL = ["--network.hidden", "16", "--replay.min-size", "50", "--batch-size", "16", "--update-steps", "4"]


class Pod:
    """A pod of a rendered manifest, with its volumes in `folder`."""

    def __init__(self, template: dict[str, Any], folder: Path, port: int) -> None:
        spec = template["spec"]
        (self.container,) = spec["containers"]
        self.folder, self.port, user = folder, port, spec["securityContext"]["runAsUser"]
        for name in ("runs", "tmp"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        shm = next(volume["emptyDir"]["sizeLimit"] for volume in spec["volumes"] if volume["name"] == "shm")
        namespace = ("unshare", "-Um", f"--map-user={user}", f"--map-group={user}", "--keep-caps", "sh", "-c", ENTER)
        self.before = (*namespace, "pod", str(folder), shm.removesuffix("i"))

    def here(self, text: str) -> str:
        """Puts a path of the pod into its folder, and the loopback in place of the service."""
        text = re.sub("^/(runs|tmp)", f"{self.folder}/\\1", text)
        text = re.sub("^7001$", str(self.port + 1), text)  # the second port of hosts
        return re.sub(r"(0\.0\.0\.0|[\w-]+-learner):\d+$", f"127.0.0.1:{self.port}", text)

    def start(self, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> Running:
        for one in self.container["env"]:
            if "value" in one:
                monkeypatch.setenv(one["name"], self.here(one["value"]))
        monkeypatch.setenv("TMPDIR", self.here("/tmp"))
        words = [self.here(word) for word in self.container["command"][1:]]
        run = Running(self.folder / "runs" / "echelon", runs.shm_dir, *words, before=self.before, fresh=True)
        runs.started.append(run)
        return run

    def is_ready(self) -> bool:
        command = [self.here(word) for word in self.container["readinessProbe"]["exec"]["command"]]
        return subprocess.run(command, capture_output=True, timeout=DEADLINE_S).returncode == 0


@pytest.fixture
def make_pods(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., list[Pod]]:
    """Renders a training with one worker; returns the pods of learner and worker."""
    if missing := [tool for tool in ("unshare", "setpriv", "mount") if shutil.which(tool) is None]:
        pytest.skip(f"a pod is made with {', '.join(missing)}")
    monkeypatch.setenv("ECHELON_SECRET", secrets.token_hex(16))

    def make(kind: str, *training: str) -> list[Pod]:
        words = ["--flavour", "plain", "--image", "i", "--workers-kind", kind, "--", *training]
        assert main(["kube", "render", *words]) == 0
        documents = {one["kind"]: one for one in yaml.safe_load_all(capsys.readouterr().out)}
        port = 20_000 + secrets.randbelow(10_000)
        kinds = ("Job", "Deployment")
        pods = [Pod(documents[kind]["spec"]["template"], tmp_path / kind, port) for kind in kinds]
        tried = subprocess.run([*pods[0].before, "touch", "/etc/passwd"], capture_output=True, text=True, timeout=60)
        if "unshare" in tried.stderr or "mount:" in tried.stderr:
            pytest.skip(f"namespaces cannot be made here: {tried.stderr.strip()}")
        assert tried.returncode != 0 and "touch" in tried.stderr, "the root file system is read-only"
        return pods

    return make


@pytest.mark.full
def test_a_learner_and_a_worker_run_as_their_pods(
    runs: Runs, make_pods: Callable[..., list[Pod]], monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, worker = make_pods("worker", "dqn", "CartPole-v1", "--episodes", "100000", *SMALL)
    lives = []
    for _ in range(2):
        lives.append(run := learner.start(runs, monkeypatch))
        if len(lives) == 1:
            working = worker.start(runs, monkeypatch)
        run.until(worker.is_ready, "the worker is ready: it has joined")
        run.until_learning()
        run.process.terminate()
        assert run.code() == 143, f"started again, it resumes:\n{run.text()}"
        wait_until(lambda: not worker.is_ready(), "the worker is no longer ready")
    assert "resuming from" in lives[1].text()
    working.process.terminate()
    assert working.code() == 143, working.text()


@pytest.mark.full
def test_a_head_and_a_host_run_as_their_pods(
    runs: Runs, make_pods: Callable[..., list[Pod]], monkeypatch: pytest.MonkeyPatch
) -> None:
    head, host = make_pods("host", "impala", "CartPole-v1", "--actors", "2", "--steps", "20000")
    training, agent = head.start(runs, monkeypatch), host.start(runs, monkeypatch)
    training.until(host.is_ready, "the host is ready: it has joined")
    assert training.code() == 0 and agent.code() == 0, training.text() + agent.text()
    assert training.summary()["status"] == "finished" and len(training.summary()["hosts"]) == 2
    again = head.start(runs, monkeypatch)
    assert again.code() == 0 and "has reached its end" in again.text(), "a finished run is left alone"
