"""`echelon bench plot`: reads and draws every kind of report, and refuses invalid ones."""

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
from echelon.bench.figures import Chart, draw_chart
from echelon.bench.harness import Measure, Runs, Sweep, write_report
from echelon.bench.plot import (
    METRICS,
    RpcSweep,
    draw_report,
    load_report,
    page_of,
    read_runs,
    read_sweep,
    rpc_chart,
    unit_of,
)
from echelon.bench.replay import ReplayBenchmark, ReplaySetting, Result
from echelon.bench.replay_buffers import OPERATIONS
from echelon.bench.rpc import Raw, RpcBenchmark, RpcSetting
from echelon.bench.world import WorldBenchmark, WorldSetting
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


def read(path: Path) -> RpcSweep:
    return read_sweep(load_report(path), path)


@pytest.fixture
def own_report(tmp_path: Path) -> Path:
    """A report as `echelon bench rpc --transport shm,torch-rpc` writes it."""
    settings = tuple(RpcSetting(transport=transport, episodes=1, steps=4) for transport in ("shm", "torch-rpc"))
    results = []
    for setting, factor in zip(settings, (1.0, 40.0), strict=True):
        latency_s = factor * np.linspace(1e-4, 2e-4, setting.num_observers * 4).reshape(setting.num_observers, 4)
        rounds = factor * np.linspace(5e-5, 9e-5, 4)
        results.append(Raw(rounds, np.full(4, setting.num_observers), latency_s, elapsed_s=factor * 1e-3))
    path = tmp_path / "own.json"
    write_report(path, RpcBenchmark().report(Runs(Sweep(settings, ("transport",)), results)))
    return path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are not drawn, which takes most of the time."""
    monkeypatch.setattr(plot, "draw_chart", lambda chart: PNG)


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


def test_the_files_lie_beside_the_report_unless_told_otherwise(tmp_path: Path, quick: None) -> None:
    path = write(tmp_path / "report.json", [result_of(10), result_of(20)])
    assert {file.parent for file in draw_report(path)} == {tmp_path}


@pytest.mark.parametrize(("prefix", "seconds"), [("", ""), ("p", " (seconds)")])
def test_both_styles_of_pytorchs_reports_are_read(tmp_path: Path, quick: None, prefix: str, seconds: str) -> None:
    path = write(tmp_path / "r.json", [result_of(10, 1.0, prefix, seconds), result_of(20, 2.0, prefix, seconds)])
    sweep = read(path)
    assert sweep.x_axis_name == "world_size" and sweep.xs == ("10", "20")
    assert sweep.metrics["observer latency"] == (
        {50: 0.002, 75: 0.003, 90: 0.004, 95: 0.005},
        {50: 0.004, 75: 0.006, 90: 0.008, 95: 0.010},
    )
    assert sweep.metrics["agent throughput"][0] == {50: 400, 75: 500, 90: 600, 95: 700}
    assert sweep.arguments == ARGUMENTS and sweep.extra == {}
    assert len(draw_report(path)) == 5


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

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sweep: RpcSweep, metric: str) -> None:
        from matplotlib.figure import Figure

        figures: list[Figure] = []
        save = Figure.savefig
        monkeypatch.setattr(
            Figure, "savefig", lambda self, *args, **kw: (figures.append(self), save(self, *args, **kw))
        )
        draw_chart(rpc_chart(sweep, metric))
        self.figure = figures[0]
        self.axes = self.figure.axes[0]
        self.texts = [text.get_text() for text in self.axes.texts]
        self.ticks = [label.get_text() for label in self.axes.get_xticklabels()]
        self.heights = [[bar.get_height() for bar in bars] for bars in self.axes.containers]  # type: ignore[union-attr]


def test_a_figure_names_its_axes_units_and_bars(own_report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = read(own_report)
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
    drawn = Drawn(monkeypatch, read(write(tmp_path / "r.json", results)), "observer throughput")
    assert "7,654" in drawn.texts and "400" in drawn.texts
    assert drawn.axes.get_yscale() == "linear" and drawn.axes.get_ylim()[0] == 0
    assert drawn.axes.get_ylabel() == "observer throughput, requests/s"
    assert drawn.axes.get_ylim()[1] > 7654  # room for the number on the highest bar


@pytest.mark.parametrize(("largest_s", "unit", "per"), [(12.0, "s", 1.0), (0.0153, "ms", 1e3), (0.000254, "µs", 1e6)])
def test_latency_is_told_in_a_readable_unit(largest_s: float, unit: str, per: float) -> None:
    assert unit_of("agent latency", [1e-9, largest_s]) == (unit, per)


def test_a_latency_rounded_to_zero_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = [result_of(10), result_of(20)]
    results[0]["agent latency"]["50"] = 0.0  # PyTorch's benchmark rounds to milliseconds
    drawn = Drawn(monkeypatch, read(write(tmp_path / "r.json", results)), "agent latency")
    assert drawn.axes.get_yscale() == "linear" and drawn.texts[1] == "0"


def test_names_from_a_report_cannot_become_markup(tmp_path: Path, quick: None) -> None:
    results = [{**result_of(0), "<b>": "<script>alert(1)</script>"}]
    path = write(tmp_path / "r.json", results, x_axis_name="<b>", note="<img src=http://x>")
    page = Page(draw_report(path)[-1])
    assert "script" not in page.tags and "b" not in page.tags and page.tags.count("img") == 4
    assert "<script>alert(1)</script>" in page.cells


def broken(**fields: Any) -> list[dict[str, Any]]:
    return [{**result_of(10), **fields}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        ("[1, 2]", "contains a list instead of an object"),
        ({}, "no list of `benchmark_results`"),
        ({"benchmark_results": []}, "no list of `benchmark_results`"),
        ({"benchmark_results": [result_of(10)]}, "echelon bench rpc --world_size 10,20"),
        ({"benchmark_results": [result_of(10)], "x_axis_name": 3}, "without an x axis"),
        ({"benchmark_results": [result_of(10)], "x_axis_name": "batch"}, "benchmark_results[0] has no 'batch'"),
        ({"benchmark_results": ["?"], "x_axis_name": "batch"}, "benchmark_results[0] has no 'batch'"),
        (broken(**{"agent throughput": 7}), "has no 'agent throughput'"),
        (broken(**{"agent latency": {"50": 1.0}}), "has no percentile 95 of 'agent latency'"),
        (broken(**{"agent latency": {"50": "x", "95": 1}}), "has 50='x' in 'agent latency'"),
        (broken(**{"agent latency": {"50": -1, "95": 1}}), "has 50=-1 in 'agent latency'"),
        (broken(**{"agent latency": {"50": float("nan"), "95": 1}}), "is not JSON: NaN is not a number"),
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
        draw_report(path)
    assert str(path) in str(caught.value)
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_report_and_an_impossible_folder(
    tmp_path: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "plot", str(tmp_path / "none.json")]) == 2
    shown = capsys.readouterr().err
    assert "none.json cannot be read: No such file" in shown and "`echelon bench async` with --output" in shown
    path = write(tmp_path / "r.json", [result_of(10), result_of(20)])
    assert main(["bench", "plot", str(path), "--output-dir", str(path)]) == 2
    assert "Choose another folder with --output-dir" in capsys.readouterr().err


# Reports of `replay`.


def replay_result(scale: float, *, peer: bool = True) -> Result:
    rounds = {"echelon": [2e6 * scale]} | ({"cpprb 11.0.0": [1e6]} if peer else {})
    return Result(tuple(Measure.of(name, "items/s", rounds) for name in OPERATIONS))


def write_replay(path: Path, settings: list[ReplaySetting], varied: tuple[str, ...], results: list[Result]) -> Path:
    write_report(path, ReplayBenchmark().report(Runs(Sweep(tuple(settings), varied), results)))
    return path


def test_a_sweep_of_replay_has_a_figure_for_each_measure(
    tmp_path: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [ReplaySetting(batch=batch) for batch in (64, 512)]
    path = write_replay(tmp_path / "r.json", settings, ("batch",), [replay_result(0.4), replay_result(1.2)])
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


def charts_of(path: Path) -> dict[str, Chart]:
    return dict(page_of(path).charts)


def test_a_single_run_of_replay_has_a_figure_for_each_unit(tmp_path: Path) -> None:
    memory = Measure.of("memory per transition", "bytes", {"echelon": [7500.0]})
    result = Result((*replay_result(1.0, peer=False).measures, memory), {"frames_per_transition": 1.063})
    path = write_replay(tmp_path / "f.json", [ReplaySetting(frames="84x84x4")], (), [result])
    assert list(charts_of(path)) == ["throughput", "memory"]
    assert any("1.063" in each for each in page_of(path).sections)


def test_bars_ticks_and_units_of_replay(tmp_path: Path) -> None:
    settings = [ReplaySetting(batch=batch, capacity=size) for batch in (64, 512) for size in (65536, 1048576)]
    results = [replay_result(0.5), replay_result(1.0), replay_result(2.0), replay_result(2.0, peer=False)]
    chart = charts_of(write_replay(tmp_path / "r.json", settings, ("batch", "capacity"), results))["insert"]
    assert chart.x_label == "batch / capacity  ·  ×: echelon over cpprb 11.0.0"
    assert chart.y_label == "million items/s" and "observation 8" in chart.note and "batch" not in chart.note
    assert chart.xs == ("64\n65,536\n1.00×", "64\n1,048,576\n2.00×", "512\n65,536\n4.00×", "512\n1,048,576")
    assert [series.label for series in chart.series] == ["echelon", "cpprb 11.0.0"]
    assert chart.series[0].heights == (1.0, 2.0, 4.0, 4.0) and chart.series[1].heights == (1.0, 1.0, 1.0, None)
    assert chart.series[0].texts == ("1", "2", "4", "4")


def test_a_report_of_replay_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = write_replay(tmp_path / "r.json", [ReplaySetting()], (), [replay_result(1.0)])
    (run,) = read_runs(load_report(path), path)
    assert run.measures == replay_result(1.0).measures and run.mode == "process" and run.varied == {}


MEASURED = {"mode": "process", "varied": {}, "facts": {}}


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([], "without `runs`"),
        (7, "is damaged: Expected `array`"),
        ([7], "is damaged: Expected `object`, got `int` - at `$[0]`"),
        ([MEASURED], "missing required field `measures`"),
        ([{**MEASURED, "measures": []}], "length >= 1 - at `$[0].measures`"),
        ([{**MEASURED, "measures": [{"name": "", "unit": "", "by": {}}]}], "length >= 1 - at `$[0].measures[0].by`"),
        ([{**MEASURED, "measures": [{"name": "", "unit": "", "by": {"x": {"median": "x"}}}]}], "got `str`"),
        ([{**MEASURED, "measures": [{"name": "", "unit": "", "by": {"x": {"median": -1.0}}}]}], ">= 0.0"),
    ],
)
def test_what_is_wrong_with_a_report_of_replay_is_said(tmp_path: Path, runs: Any, message: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"bench": "replay", "setting": {}, "runs": runs}))
    with pytest.raises(ConfigError, match=re.escape(message)):
        draw_report(path)


def test_a_report_of_another_benchmark_is_named(tmp_path: Path) -> None:
    measures = [Measure.of("large echo", "GB/s", {"echelon": [1.0]})]
    write_report(tmp_path / "r.json", WorldBenchmark().report(Runs(Sweep((WorldSetting(),)), [measures])))
    with pytest.raises(
        ConfigError, match=r"is a report of `echelon bench world`.*draws reports of `rpc`, `replay` and"
    ):
        draw_report(tmp_path / "r.json")


# Reports as they were written before the benchmarks shared a harness.

OLD = Path(__file__).parent / "old_reports"


@pytest.mark.parametrize(("name", "num_charts"), [("rpc", 4), ("replay", 5), ("writers", 1), ("frames", 2)])
def test_old_reports_are_drawn(name: str, num_charts: int, tmp_path: Path, quick: None) -> None:
    files = draw_report(OLD / f"{name}.json", tmp_path)
    assert len(files) == num_charts + 1 and all(file.stat().st_size for file in files)
