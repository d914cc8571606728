"""`echelon bench plot`: a report as figures and one page."""

from __future__ import annotations

import re
from pathlib import Path

from echelon.bench.page import page_of
from echelon.bench.replay.plot import replay_page
from echelon.bench.replay.report import BENCH
from echelon.bench.rpc.plot import rpc_page
from echelon.bench.sweep import load_report, sweep_of
from echelon.errors import ConfigError


def draw_report(path: Path, output_dir: Path | None = None) -> list[Path]:
    """Draws the report at `path` into PNG files and an HTML page, in `output_dir` or beside it; returns them."""
    report = load_report(path)
    page = replay_page(report, path) if report.get("bench") == BENCH else rpc_page(sweep_of(report, path))
    folder = output_dir or path.absolute().parent
    files = {folder / f"{path.stem}-{_slug(name)}.png": image for name, image in page.images.items()}
    files[folder / f"{path.stem}.html"] = page_of(page, path.name).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            file.write_bytes(content)
    except OSError as error:
        raise ConfigError(
            f"the figures cannot be written to {folder}: {error.strerror}. Name another folder with --output-dir."
        ) from error
    return list(files)


def _slug(name: str) -> str:
    """A name of a report as part of the name of a file."""
    return re.sub(r"\W+", "-", name.replace("+", " and "))
