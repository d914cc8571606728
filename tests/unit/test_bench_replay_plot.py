"""The report of `echelon bench replay`, read back and drawn."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from echelon.bench.plot import draw_report
from echelon.bench.replay import plot
from echelon.bench.replay.process import OPERATIONS
from echelon.bench.replay.report import Report, read_runs
from echelon.bench.replay.setting import Measure, Result, Setting
from echelon.cli.main import main
from echelon.errors import ConfigError

PNG = b"\x89PNG\r\n\x1a\n"


def result_of(scale: float, *, peer: bool = True) -> Result:
    rounds = {"echelon": [2e6 * scale]} | ({"cpprb 11.0.0": [1e6]} if peer else {})
    return Result(tuple(Measure.of(name, "items/s", rounds) for name in OPERATIONS))


def write_report(path: Path, settings: list[Setting], varied: list[str], results: list[Result]) -> Path:
    report = Report(settings, varied)
    for setting, result in zip(settings, results, strict=True):
        report.add(setting, result)
    report.write(path)
    return path


def test_a_sweep_has_a_figure_for_each_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [Setting(batch=batch) for batch in (64, 512)]
    path = write_report(tmp_path / "r.json", settings, ["batch"], [result_of(0.4), result_of(1.2)])
    assert "batch" not in json.loads(path.read_text())["setting"]
    assert main(["bench", "plot", str(path), "--output-dir", str(tmp_path / "out")]) == 0
    names = ("insert", "sample", "update", "sample-and-update", "mixed")
    pictures = [tmp_path / "out" / f"r-{name}.png" for name in names]
    page = tmp_path / "out" / "r.html"
    assert capsys.readouterr().out.split() == [str(file) for file in (*pictures, page)]
    assert all(file.read_bytes().startswith(PNG) for file in pictures)
    text = page.read_text()
    assert text.count("<img ") == 5 and "Replay benchmark by batch" in text and "://" not in text
    assert "<td>2,400,000</td>" in text and "<td>2.40×</td>" in text and "<td>0.80×</td>" in text


def test_a_single_run_has_a_figure_for_each_unit(tmp_path: Path) -> None:
    measures = (
        *result_of(1.0, peer=False).measures,
        Measure.of("memory per transition", "bytes", {"echelon": [7500.0]}),
    )
    result = Result(measures, {"frames_per_transition": 1.063})
    files = draw_report(write_report(tmp_path / "f.json", [Setting(frames="84x84x4")], [], [result]))
    assert [file.name for file in files] == ["f-throughput.png", "f-memory.png", "f.html"]
    assert "1.063" in files[-1].read_text()


def test_bars_ticks_and_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    charts: list[Any] = []
    monkeypatch.setattr(plot, "draw_chart", lambda chart: charts.append(chart) or PNG)
    settings = [Setting(batch=batch, capacity=capacity) for batch in (64, 512) for capacity in (65536, 1048576)]
    results = [result_of(0.5), result_of(1.0), result_of(2.0), result_of(2.0, peer=False)]
    draw_report(write_report(tmp_path / "r.json", settings, ["batch", "capacity"], results))
    chart = charts[0]
    assert chart.x_label == "batch / capacity  ·  ×: echelon over cpprb 11.0.0"
    assert chart.y_label == "million items/s" and "observation 8" in chart.note and "batch" not in chart.note
    assert chart.xs == ("64\n65,536\n1.00×", "64\n1,048,576\n2.00×", "512\n65,536\n4.00×", "512\n1,048,576")
    assert [series.label for series in chart.series] == ["echelon", "cpprb 11.0.0"]
    assert chart.series[0].heights == (1.0, 2.0, 4.0, 4.0) and chart.series[1].heights == (1.0, 1.0, 1.0, None)
    assert chart.series[0].texts == ("1.00", "2.00", "4.00", "4.00")


def test_a_report_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = write_report(tmp_path / "r.json", [Setting()], [], [result_of(1.0)])
    (run,) = read_runs(json.loads(path.read_text()), path)
    assert run.result == result_of(1.0) and run.mode == "process" and run.varied == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"runs": []}, "without `runs`"),
        ({"runs": 7}, "without `runs`"),
        ({"runs": [7]}, "is damaged"),
        ({"runs": [{"mode": "process", "varied": {}, "facts": {}}]}, "a run has no 'measures'"),
        ({"runs": [{"mode": "process", "varied": {}, "facts": {}, "measures": []}]}, "a run has no measure"),
        (
            {"runs": [{"mode": "", "varied": {}, "facts": {}, "measures": [{"name": "", "unit": "", "by": {}}]}]},
            "a run has no buffer in a measure",
        ),
        (
            {"runs": [{"mode": "", "varied": {}, "facts": {}, "measures": [{"by": {"echelon": {"median": "x"}}}]}]},
            "number in 'x'",
        ),
    ],
)
def test_what_is_wrong_with_a_report_is_said(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"bench": "replay", "setting": {}, **change}))
    with pytest.raises(ConfigError, match=re.escape(message)):
        draw_report(path)
