"""The built wheel: it holds everything that the package reads, and a new user's first hour works from it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "src")
EXAMPLE = ROOT / "examples" / "first_hour"


def run(*command: str, cwd: Path, site: Path | None = None, timeout_s: float = 100.0, **variables: str) -> str:
    """Runs a command with this Python, and with the packages in `site` before its own; returns its output."""
    found = [] if site is None else [str(site / "bin")]
    paths = os.pathsep.join([*found, os.path.dirname(sys.executable), os.environ["PATH"]])
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {**kept, "PATH": paths, **({"PYTHONPATH": str(site)} if site else {}), **variables}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{command}: {done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel is installed, built from a copy of the sources."""
    tree, site = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("site")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, tree / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    run(*pip, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(tree / "dist"), ".", cwd=tree)
    (wheel,) = (tree / "dist").glob("echelon-*.whl")
    run(*pip, "install", "--no-index", "--no-deps", "--target", str(site), str(wheel), cwd=tree)
    shutil.rmtree(tree)
    return site


def test_the_wheel_holds_every_file_of_the_package_and_finds_its_presets(site: Path, tmp_path: Path) -> None:
    source = ROOT / "src" / "echelon"
    files = {path.relative_to(source) for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    installed = site / "echelon"
    assert files <= {path.relative_to(installed) for path in installed.rglob("*")}
    where = "import echelon; print(echelon.__file__)"
    assert run("python", "-c", where, cwd=tmp_path, site=site).strip() == str(installed / "__init__.py")
    assert "Pendulum-v1" in run("echelon", "presets", "ppo", cwd=tmp_path, site=site)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_first_hour_of_a_new_user(site: Path, tmp_path: Path) -> None:
    """The example, outside of the source tree."""
    for name in ("imageio_ffmpeg", "onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name)
    folder = Path(
        shutil.copytree(EXAMPLE, tmp_path / "first_hour", ignore=shutil.ignore_patterns("out", "__pycache__"))
    )
    said = run("bash", "run.sh", cwd=folder, site=site, timeout_s=580.0, XDG_STATE_HOME=str(tmp_path / "state"))
    out = folder / "out"
    (mean,) = (line for line in said.splitlines() if line.startswith("mean return"))
    assert float(mean.split()[2]) > 0.5, said
    for name in ("maze.mp4", "maze.onnx", "compare.png", "ppo/summary.json", "async-ppo/summary.json"):
        assert (out / name).stat().st_size > 0, name
    if importlib.util.find_spec("wandb") is not None:
        assert list(out.glob("wandb/wandb/offline-run-*/*.wandb"))
    print(said.rstrip().splitlines()[-1])  # its seconds: pytest -rP shows them
