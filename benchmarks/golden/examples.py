"""Runs the unchanged programs of OLD's `examples/` under NEW: each must exit with code 0."""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Iterator

from golden.checkout import Checkout, Row, Tell

TIMEOUT_S = 1200.0
# The shortest run of programs with options; the others run to their end.
ARGUMENTS = {"racing.py": ("local", "--workers=2", "--epochs=1", "--update-steps=1")}  # 5,000 steps of a simulator
NEEDS = {"racing.py": "Box2D"}


def compare(old: Checkout, new: Checkout, tell: Tell) -> Iterator[Row]:
    folder = new.folder / "examples"
    shutil.copytree(old.path / "examples", folder, ignore=shutil.ignore_patterns("__pycache__"))
    for program in sorted(folder.rglob("*.py"), key=lambda file: (file.name in ARGUMENTS, file)):  # the slow one last
        name = str(program.relative_to(folder))
        package = NEEDS.get(name)
        if package is not None and importlib.util.find_spec(package) is None:
            yield Row("examples", name, "skipped", note=f"needs {package}, which is not installed")
            continue
        tell(f"examples: {name}: begins")
        began = time.monotonic()
        finished = new.python(str(program), *ARGUMENTS.get(name, ()), timeout_s=TIMEOUT_S)
        is_good = finished.code == 0
        note = f"{time.monotonic() - began:.0f} s" if is_good else finished.tail
        tell(f"examples: {name}: exit code {finished.code}, {note}")
        yield Row("examples", name, "same" if is_good else "differs", "0", str(finished.code), note)
