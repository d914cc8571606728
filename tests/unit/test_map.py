"""The map of the sources: what counts as a mode switch, and which class names are repeated."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import echelon

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from mapping.switches import repeated_classes, switches


def found(folder: Path, source: str, name: str = "module.py") -> list[tuple[int, str, bool]]:
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(source)
    return [(one.line, one.kind, one.is_check) for one in switches(folder)]


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("if config.experience == 'replay': pass", "mode"),
        ("x = 'inline' != self.train.engine", "mode"),
        ("x = acting.transport in ('shm', 'tcp')", "mode"),
        ("x = TABLE[config.experience]", "mode"),
        ("match config.acting.mode:\n    case 'central': pass", "mode"),
        ("x = not config.has_workers", "workers"),
        ("x = config.learner.num_learners > 1", "learners"),
        ("x = len(config.learner_names) == 1", "learners"),
        ("x = isinstance(config.algorithm, ImpalaConfig | PpoConfig)", "class"),
        ("x = isinstance(engine, (InlineEngine, engines.HostedEngine))", "class"),
        ("match algorithm:\n    case config.SacConfig(): pass", "class"),
    ],
)
def test_switches(tmp_path: Path, source: str, kind: str) -> None:
    assert [(one[1], one[2]) for one in found(tmp_path, source)] == [(kind, False)]


@pytest.mark.parametrize(
    "source",
    [
        "x = config.experience",
        "x = config.network.activation == 'tanh'",
        "x = setting.transport == 'tcp'",  # of a benchmark
        "x = isinstance(policy, TrainConfig)",
        "def has_workers(self): return bool(self.workers.address)",
        "x = range(config.learner.num_learners)",
    ],
)
def test_no_switches(tmp_path: Path, source: str) -> None:
    assert found(tmp_path, source) == []


def test_plan_may_switch_and_refusals_are_checks(tmp_path: Path) -> None:
    assert found(tmp_path, "x = config.engine == 'inline'", "roles/plan.py") == []
    refusals = "require(self.engine != 'inline', 'no')\nif config.has_workers:\n    raise ConfigError('no')\n"
    assert found(tmp_path, refusals) == [(1, "mode", True), (2, "workers", True)]


def test_repeated_classes(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("class A: pass\nclass B: pass\n")
    (tmp_path / "two.py").write_text("\nclass A: pass\n")
    assert repeated_classes(tmp_path) == {"A": ["one.py:1", "two.py:2"]}


def test_every_class_of_echelon_has_its_own_name() -> None:
    assert repeated_classes(Path(echelon.__file__).parent) == {}
