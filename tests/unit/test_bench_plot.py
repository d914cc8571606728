"""`echelon bench plot`: reads every kind of report, draws what is in it, and says what is wrong with the others."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echelon.bench import plot
from echelon.bench.rpc import plot as rpc_plot
from echelon.bench.rpc.report import Report
from echelon.bench.rpc.setting import Raw, Setting
from echelon.bench.sweep import METRICS, Sweep, read_sweep
from echelon.cli.main import main
from echelon.errors import ConfigError

PNG = b"\x89PNG\r\n\x1a\n"
ARGUMENTS = {"master_addr": "127.0.0.1", "master_port": "29501", "batch": True, "state_size": "10-20-10", "nlayers": 5}


def result_of(x: Any, scale: float = 1.0, prefix: str = "", seconds: str = "") -> dict[str, Any]:
    """One run as PyTorch's benchmark writes it: `prefix` "p" and `seconds` " (seconds)" in its later version."""
    keys = [f"{prefix}{percentile}" for percentile in (50, 75, 90, 95)]
    latencies = dict(zip(keys, (0.002 * scale, 0.003 * scale, 0.004 * scale, 0.005 * scale), strict=True))
    throughputs = dict(zip(keys, (400, 500, 600, 700), strict=True))
    return {
        f"agent latency{seconds}": latencies,
        "agent throughput": throughputs,
        f"observer latency{seconds}": latencies,
        "observer throughput": throughputs,
        "world_size": x,
    }


def write(path: Path, results: Any, **fields: Any) -> Path:
    path.write_text(json.dumps({**ARGUMENTS, "x_axis_name": "world_size", "benchmark_results": results, **fields}))
    return path


@pytest.fixture
def own_report(tmp_path: Path) -> Path:
    """A report as `echelon bench rpc --transport shm,torch-rpc` writes it."""
    settings = [Setting(transport=transport, episodes=1, steps=4) for transport in ("shm", "torch-rpc")]
    report = Report(settings, "transport")
    for setting, factor in zip(settings, (1.0, 40.0), strict=True):
        latency_s = factor * np.linspace(1e-4, 2e-4, setting.num_observers * 4).reshape(setting.num_observers, 4)
        rounds = factor * np.linspace(5e-5, 9e-5, 4)
        report.add(setting, Raw(rounds, np.full(4, setting.num_observers), latency_s, elapsed_s=factor * 1e-3))
    path = tmp_path / "own.json"
    report.write(path)
    return path


class Page(HTMLParser):
    """What a browser would load and show."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.tags: list[str] = []
        self.cells: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] in ("td", "th"):
            self.cells.append(data.strip())


def test_four_pictures_and_a_page_that_holds_them(
    own_report: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "figures"
    assert main(["bench", "plot", str(own_report), "--output-dir", str(folder)]) == 0
    pictures = [folder / f"own-{metric.replace(' ', '-')}.png" for metric in METRICS]
    assert capsys.readouterr().out.split() == [str(path) for path in (*pictures, folder / "own.html")]
    assert sorted(folder.iterdir()) == sorted([*pictures, folder / "own.html"])
    assert all(path.read_bytes().startswith(PNG) for path in pictures)

    page = Page(folder / "own.html")
    assert page.tags.count("img") == 4 and not {"script", "link", "iframe"} & set(page.tags)
    embedded = [base64.b64decode(source.removeprefix("data:image/png;base64,")) for source in page.sources]
    assert embedded == [path.read_bytes() for path in pictures]  # nothing is loaded from elsewhere
    report = json.loads(own_report.read_text())
    for result in report["benchmark_results"]:
        for percentile in ("50", "75", "90", "95"):
            assert f"{result['observer throughput'][percentile]:,}" in page.cells
            assert f"{result['observer latency'][percentile] * 1e3:,.3f}" in page.cells
    assert report["echelon"]["hardware"]["processor"] in page.cells
    assert report["echelon"]["versions"]["torch"] in page.cells


def test_the_files_lie_beside_the_report_unless_told_otherwise(tmp_path: Path) -> None:
    path = write(tmp_path / "report.json", [result_of(10), result_of(20)])
    assert {file.parent for file in plot.draw_report(path)} == {tmp_path}


@pytest.mark.parametrize(("prefix", "seconds"), [("", ""), ("p", " (seconds)")])
def test_both_styles_of_pytorchs_reports_are_read(tmp_path: Path, prefix: str, seconds: str) -> None:
    path = write(tmp_path / "r.json", [result_of(10, 1.0, prefix, seconds), result_of(20, 2.0, prefix, seconds)])
    sweep = read_sweep(path)
    assert sweep.x_axis_name == "world_size" and sweep.xs == ("10", "20")
    assert sweep.metrics["observer latency"] == (
        {50: 0.002, 75: 0.003, 90: 0.004, 95: 0.005},
        {50: 0.004, 75: 0.006, 90: 0.008, 95: 0.010},
    )
    assert sweep.metrics["agent throughput"][0] == {50: 400, 75: 500, 90: 600, 95: 700}
    assert sweep.arguments == ARGUMENTS and sweep.extra == {}
    assert len(plot.draw_report(path)) == 5


def test_pytorchs_plot_script_finds_what_it_reads_in_our_report(own_report: Path) -> None:
    report = json.loads(own_report.read_text())
    x_axis_name = report["x_axis_name"]
    assert x_axis_name not in report  # the argument that varies has no single value
    runs = report["benchmark_results"]
    assert [run[x_axis_name] for run in runs] == ["shm", "torch-rpc"]
    for metric in ("agent throughput", "observer throughput", "agent latency", "observer latency"):
        for percentile in ("50", "95"):
            heights = [run[metric][percentile] for run in runs]
            assert all(type(height) in (int, float) and height > 0 for height in heights)


class Drawn:
    """A figure as it was drawn, caught before it became a picture."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sweep: Sweep, metric: str) -> None:
        from matplotlib.figure import Figure

        figures: list[Figure] = []
        save = Figure.savefig
        monkeypatch.setattr(
            Figure, "savefig", lambda self, *args, **kw: (figures.append(self), save(self, *args, **kw))
        )
        rpc_plot.draw(sweep, metric)
        self.figure = figures[0]
        self.axes = self.figure.axes[0]
        self.texts = [text.get_text() for text in self.axes.texts]
        self.ticks = [label.get_text() for label in self.axes.get_xticklabels()]
        self.heights = [[bar.get_height() for bar in bars] for bars in self.axes.containers]  # type: ignore[union-attr]


def test_a_figure_names_its_axes_units_and_bars(own_report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = read_sweep(own_report)
    drawn = Drawn(monkeypatch, sweep, "observer latency")
    assert "observer latency" in drawn.axes.get_title() and drawn.axes.get_xlabel().startswith("transport")
    assert drawn.ticks == ["shm", "torch-rpc"]
    # The two differ by a factor of 40, which a linear axis cannot show; the axis says so.
    assert drawn.axes.get_yscale() == "log" and drawn.axes.get_ylabel() == "observer latency, ms  (log scale)"
    assert [label.get_text() for label in drawn.figure.legends[0].get_texts()] == [
        "p50: the median",
        "p95: 5 % of requests took longer",
    ]
    rows = sweep.metrics["observer latency"]
    assert drawn.heights == [pytest.approx([row[p] * 1e3 for row in rows]) for p in (50, 95)]
    assert drawn.texts[1:] == [f"{row[p] * 1e3:.3g}" for p in (50, 95) for row in rows]
    assert "Lower is better" in drawn.texts[0] and "world_size 10" in drawn.texts[0]


def test_throughput_has_thousands_separators_and_a_linear_axis_begins_at_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = [result_of(10), result_of(20)]
    results[0]["observer throughput"]["95"] = 7654
    drawn = Drawn(monkeypatch, read_sweep(write(tmp_path / "r.json", results)), "observer throughput")
    assert "7,654" in drawn.texts and "400" in drawn.texts
    assert drawn.axes.get_yscale() == "linear" and drawn.axes.get_ylim()[0] == 0
    assert drawn.axes.get_ylabel() == "observer throughput, requests/s"
    assert drawn.axes.get_ylim()[1] > 7654  # room for the number on the highest bar


@pytest.mark.parametrize(
    ("largest_s", "unit", "text"), [(12.0, "s", "12"), (0.0153, "ms", "15.3"), (0.000254, "µs", "254")]
)
def test_latency_is_told_in_a_readable_unit(largest_s: float, unit: str, text: str) -> None:
    found = rpc_plot.unit_of("agent latency", [1e-9, largest_s])
    assert found.name == unit and found.text(largest_s) == text


def test_a_latency_rounded_to_zero_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = [result_of(10), result_of(20)]
    results[0]["agent latency"]["50"] = 0.0  # PyTorch's benchmark rounds to milliseconds
    drawn = Drawn(monkeypatch, read_sweep(write(tmp_path / "r.json", results)), "agent latency")
    assert drawn.axes.get_yscale() == "linear" and drawn.texts[1] == "0"


def test_names_from_a_report_cannot_become_markup(tmp_path: Path) -> None:
    results = [{**result_of(0), "<b>": "<script>alert(1)</script>"}]
    path = write(tmp_path / "r.json", results, x_axis_name="<b>", note="<img src=http://x>")
    page = Page(plot.draw_report(path)[-1])
    assert "script" not in page.tags and "b" not in page.tags and page.tags.count("img") == 4
    assert "<script>alert(1)</script>" in page.cells


def broken(**fields: Any) -> list[dict[str, Any]]:
    return [{**result_of(10), **fields}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        ("[1, 2]", "holds a list where an object is expected"),
        ({}, "no list of `benchmark_results`"),
        ({"benchmark_results": []}, "no list of `benchmark_results`"),
        ({"benchmark_results": [result_of(10)]}, "echelon bench rpc --world_size 10,20"),
        ({"benchmark_results": [result_of(10)], "x_axis_name": 3}, "no x axis"),
        ({"benchmark_results": [result_of(10)], "x_axis_name": "batch"}, "benchmark_results[0] has no 'batch'"),
        ({"benchmark_results": ["?"], "x_axis_name": "batch"}, "benchmark_results[0] has no 'batch'"),
        (broken(**{"agent throughput": 7}), "has no 'agent throughput'"),
        (broken(**{"agent latency": {"50": 1.0}}), "has no percentile 95 of 'agent latency'"),
        (broken(**{"agent latency": {"50": "x", "95": 1}}), "has 50='x' in 'agent latency'"),
        (broken(**{"agent latency": {"50": -1, "95": 1}}), "has 50=-1 in 'agent latency'"),
        (broken(**{"agent latency": {"50": float("nan"), "95": 1}}), "has 50=nan in 'agent latency'"),
        (broken(**{"agent latency": {"p-1": 1, "95": 1}}), "has p-1=1 in 'agent latency'"),
    ],
)
def test_what_is_wrong_with_a_report_is_said(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "report.json"
    if isinstance(content, list):
        write(path, content)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        plot.draw_report(path)
    assert str(path) in str(caught.value)
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_report_and_an_impossible_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "plot", str(tmp_path / "none.json")]) == 2
    assert "none.json cannot be read: No such file" in capsys.readouterr().err
    path = write(tmp_path / "r.json", [result_of(10), result_of(20)])
    assert main(["bench", "plot", str(path), "--output-dir", str(path)]) == 2
    assert "Name another folder with --output-dir" in capsys.readouterr().err
