"""`--engine ray` without a cluster: what is missing is said in one line, with the remedy."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from echelon.cli.main import main

Text = Callable[..., str]


@pytest.fixture
def refusal(tmp_path: Path, shm_dir: Path, capsys: pytest.CaptureFixture[str]) -> Text:
    """What `echelon train --engine ray` with more options says when it refuses."""

    def text(*options: str) -> str:
        words = ["train", "impala", "CartPole-v1", "--steps", "100", "--run-dir", str(tmp_path / "run")]
        assert main([*words, "--shm-dir", str(shm_dir), *options]) == 2
        assert not (tmp_path / "run").exists() and not list(shm_dir.iterdir())
        said = capsys.readouterr().err
        assert len(said.splitlines()) == 1, said
        return said

    return text


def write_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Has every process that imports ray run `code`."""
    (tmp_path / "ray.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("raise ModuleNotFoundError('No module named ray')", "pip install 'echelon[ray]'"),
        ("__version__ = '2.53.0'", "2.54 or newer"),
    ],
)
def test_ray_must_be_installed_and_new_enough(
    refusal: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, what: str
) -> None:
    write_ray(tmp_path, monkeypatch, code)
    assert what in refusal("--engine", "ray", "--address", "auto")


def test_a_cluster_needs_tokens(refusal: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    assert "RAY_AUTH_MODE=token" in refusal("--engine", "ray", "--address", "127.0.0.1:1")
    assert "ECHELON_SECRET" not in os.environ


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--address", "auto"), "--engine ray"),
        (("--engine", "ray", "--address", "ray://127.0.0.1:10001"), "HOST:PORT"),
        (("--engine", "ray", "--address", "somewhere"), "HOST:PORT"),
        (("--engine", "ray", "--learners", "2"), "--learners 1"),
        (("--engine", "ray", "--hosts", "9", "--actors", "2"), "--actors"),
    ],
)
def test_options_that_do_not_go_together(refusal: Text, options: tuple[str, ...], what: str) -> None:
    assert what in refusal(*options)
