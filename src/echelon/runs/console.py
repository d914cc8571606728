"""The console output of a run: a live panel on a terminal, otherwise a line every few seconds.

The caller's `update` draws, at most REFRESH_HZ times per second. If the terminal closes, the console becomes silent;
the run continues. If the reader of a pipe closes it, `is_unread` is true, and messages go to stderr from then on. A
reader that stalls does not block the console, as the output of a run is a `NonBlockingStream`.
"""

from __future__ import annotations

import contextlib
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console as Terminal
from rich.console import Group
from rich.live import Live
from rich.text import Text

from echelon.errors import escaped_lines
from echelon.runs.bottleneck import PHASES, RARE
from echelon.runs.report import duration, number_text

REFRESH_HZ = 4.0  # a frame costs about 1 ms: 0.4 % of a core
FIRST_LINE_S, LINE_INTERVAL_S = 1.0, 5.0  # of plain lines
BAR_WIDTH = 40
PROGRESS_WIDTH = BAR_WIDTH + 12  # as wide as a role's name and its bar
MAX_ROWS = 6  # more roles of one kind are shown as one row with their mean
NO_EPISODE = (  # the result of an evaluation
    "no episode ended within the limit (--evaluation.limit-s). Does the environment truncate its episodes, as "
    "gymnasium's TimeLimit does?"
)
COLOURS = {
    "env": "green",
    "act": "cyan",
    "learn": "magenta",
    "exchange": "red",
    "transfer": "yellow",
    "hung": "bright_red",
    "wait": "bright_black",
}


@dataclass(slots=True)
class Status:
    """The status of a run. `roles` maps a role's name to the share of its wall time spent in each phase."""

    env_steps: int
    steps_per_s: float
    wall_s: float
    fraction: float | None = None  # progress towards the end of the run, if known
    episodes: int = 0
    return_mean: float | None = None
    evaluation_return: float | None = None
    lag_mean: float | None = 0.0  # versions; None with replay, where it is mostly the age of the replay
    lag_max: float = 0.0
    updates: int = 0
    dropped: int = 0  # trajectories (or `experience`) dropped because they arrived too late
    experience: str = "trajectories"  # what `dropped` counts
    roles: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    doing: str = ""  # while the run makes no updates: "starting 3 of 14 actors"
    workers: Mapping[str, float] = field(default_factory=dict)  # figures of a run with workers


class _Terminal(Terminal):
    """A terminal that becomes silent on a broken pipe; rich would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Console:
    """Shows the status and messages of a run on `output`; nothing else may print to it until `close`.

    Without `lines`, the status is shown only as a panel.
    """

    def __init__(
        self,
        title: str,
        run_dir: Path,
        output: TextIO | None = None,
        *,
        live: bool | None = None,
        lines: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._output = output or sys.stdout
        self._clock, self._lines = clock, lines
        self._head = escaped_lines(f"{title} -> {run_dir}")
        self._silent = False
        self._is_unread = False
        self._live: Live | None = None
        if self._output.isatty() if live is None else live:
            self._next_s = clock()
            terminal = _Terminal(file=self._output, force_terminal=True, highlight=False)
            self._live = Live(Text(self._head), console=terminal, auto_refresh=False, transient=True)
            with self._guard():
                self._live.start(refresh=True)
            if self._silent:
                self._live = None  # it has not started
        else:
            self._next_s = clock() + FIRST_LINE_S
            self._write(self._head)

    @property
    def is_unread(self) -> bool:
        """Whether the reader of the pipe has left."""
        if not self._silent:
            with self._guard():
                self._output.flush()  # raises the error of an earlier write
        return self._is_unread

    def update(self, status: Status) -> None:
        """Shows `status` if the next refresh is due; cheap enough to call in every iteration."""
        now = self._clock()
        if now < self._next_s:
            return
        if self._live is None:
            self._next_s = now + LINE_INTERVAL_S
            if self._lines:
                self._write(plain_line(status))
        elif not self._silent:
            self._next_s = now + 1 / REFRESH_HZ
            with self._guard():
                self._live.update(panel(self._head, status), refresh=True)

    def message(self, text: str) -> None:
        """Shows an event (a role restarted, an environment failed) immediately, above the panel.

        Its lines are escaped: they may quote peers, whose control characters would change the terminal.
        """
        text = escaped_lines(text)
        if self._live is None:
            self._write(text)
        elif not self._silent:
            with self._guard():
                self._live.console.print(Text(text))
        if self.is_unread:
            with contextlib.suppress(OSError):  # both may go to one pipe
                write_text(sys.stderr, f"echelon: {text}")

    def close(self) -> None:
        """Removes the panel and restores the terminal. Idempotent."""
        if self._live is not None:
            live, self._live = self._live, None
            live.console.quiet |= self._silent
            with self._guard():
                live.stop()  # even if the terminal has closed: it restores sys.stdout and sys.stderr

    def _write(self, text: str) -> None:
        if not self._silent:
            with self._guard():
                write_text(self._output, text)

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # the reader of the pipe or the terminal closed
            self._silent = True
            self._is_unread = isinstance(error, BrokenPipeError)


def final_summary(summary: Mapping[str, Any], output: TextIO | None = None) -> None:
    """Prints the final summary of a run: its result, cost, folder and bottleneck.

    Reads status, goal_reached, env_steps, updates, wall_s, env_steps_per_s, return_mean, evaluation_return,
    evaluation_return_mean, evaluation_return_std, evaluation_episodes, best_return_mean, best_steps, lag_mean, lag_max,
    hosts, checkpoint, curve, run_dir, stop_reason, restarts, logged, bottleneck and advice; values that are missing or
    None are omitted.
    """

    def given(form: str, *keys: str, show: Callable[[Any], Any] = lambda value: value) -> str:
        values = [summary.get(key) for key in keys]
        return "" if None in values else form.format(*map(show, values))

    wall_s, workers = summary.get("wall_s"), summary.get("workers")
    is_evaluated = summary.get("evaluation_return_mean") is not None  # at the end
    rows = {
        "status": given("{}", "status") + given(" ({})", "stop_reason"),
        "goal": given("{}", "goal_reached", show=lambda reached: "reached" if reached else "missed"),
        "steps": given("{:,}", "env_steps"),
        "time": duration(wall_s) if wall_s is not None else "",
        "steps/s": given("{:,.0f} since the first updates" if summary.get("updates") else "{:,.0f}", "env_steps_per_s"),
        "return": given("{}", "return_mean", show=number_text)
        + ("" if is_evaluated else given(" (evaluation {})", "evaluation_return", show=number_text)),
        "evaluation": NO_EPISODE
        if summary.get("evaluation_episodes") == 0
        else given("{}", "evaluation_return_mean", show=number_text)
        + given(" ± {}", "evaluation_return_std", show=number_text)
        + given(", mean of {} episodes with the final weights", "evaluation_episodes"),
        "best": given("{}", "best_return_mean", show=number_text)
        + given(" at {:,} steps (--checkpoint best)", "best_steps"),
        "lag": ""
        if "replay" in summary
        else given("{:.2f} versions of the weights on average, {:.0f} at most", "lag_mean", "lag_max"),
        "restarts": f"{restarts} (their errors are in logs/)" if (restarts := summary.get("restarts")) else "",
        "logged": ", ".join(f"{name} {value:.5g}" for name, value in summary.get("logged", {}).items()),
        "workers": workers_line(workers, summary.get("time", {}).get("learner", {})).removeprefix("workers ")
        if workers
        else "",
        "hosts": "; ".join(map(_host_text, summary.get("hosts", []))),
        "run": given("{}", "run_dir"),
        "checkpoint": given("{}", "checkpoint"),
        "curve": given("{}", "curve"),
    }
    lines = [f"{name:<12}{text.strip()}" for name, text in rows.items() if text]
    sentences = [str(summary[key]) for key in ("bottleneck", "advice") if summary.get(key)]
    write_text(output or sys.stdout, "\n".join([*lines, *sentences]))


def _host_text(host: Mapping[str, Any]) -> str:
    actors = f"{host['name']} {host['actors']} actor{'s' * (host['actors'] != 1)}"
    restarts = f"{host['restarts']} restart{'s' * (host['restarts'] != 1)}" if host["restarts"] else ""
    lost = host["lost"].removeprefix(f"host {host['name']} ").removeprefix("is ")
    return ", ".join(filter(None, (actors, restarts, lost)))


def workers_line(workers: Mapping[str, float], learner: Mapping[str, float]) -> str:
    """Returns the number of workers, their steps per hour, the learner's load and the handling time, as one line."""
    busy = 1.0 - learner.get("wait", 1.0)
    count, per_hour = workers["workers"], workers["interactions_per_hour"]
    line = f"workers {count:.0f} | {per_hour:,.0f} steps/h | learner {busy:.0%} busy"
    mean, p95 = workers.get("handling_mean_ms"), workers.get("handling_p95_ms")
    return line if mean is None else f"{line} | handled in {mean:.1f} ms (p95 {p95:.1f})"


def plain_line(status: Status) -> str:
    """Returns `status` as one line of plain text."""
    return " | ".join(text for _, text in _figures(status))


def panel(head: str, status: Status) -> Group:
    """Returns `status` as the live panel: progress, figures, and the phases of each role."""
    figures = Text("  ").join(Text.assemble((text, style)) for style, text in _figures(status))
    parts: list[Any] = [Text(head, style="bold", no_wrap=True, overflow="ellipsis")]
    if status.fraction is not None:
        filled = round(min(max(status.fraction, 0.0), 1.0) * PROGRESS_WIDTH)
        parts.append(Text.assemble(("━" * filled, "green"), ("━" * (PROGRESS_WIDTH - filled), "bright_black")))
    parts.append(figures)
    if status.roles:
        seen = {phase for shares in status.roles.values() for phase, share in shares.items() if share}
        phases = [phase for phase in PHASES if phase not in RARE or phase in seen]
        legend = [Text.assemble(("■ ", COLOURS[phase]), phase) for phase in phases]
        parts.append(Text("  ").join([Text(" " * 10), *legend]))
        parts += [_bar(name, shares) for name, shares in _rows(status.roles)]
    return Group(*parts)


def write_text(output: TextIO, text: str) -> None:
    """Writes and flushes a line, escaped, replacing characters that the encoding of `output` lacks."""
    encoding = getattr(output, "encoding", None) or "utf-8"
    output.write(escaped_lines(text).encode(encoding, "replace").decode(encoding) + "\n")
    output.flush()


def _figures(status: Status) -> list[tuple[str, str]]:
    """Returns the figures of a status in reading order, each with its style."""
    figures = [("", duration(status.wall_s))]
    if status.fraction is not None:
        figures.append(("bold", f"{status.fraction:.0%}"))
    if status.doing:
        figures.append(("bold yellow", status.doing))
        if not status.env_steps:
            return figures
    figures += [("", f"steps {status.env_steps:,}"), ("", f"{status.steps_per_s:,.0f} steps/s")]
    if status.return_mean is not None:
        figures.append(("bold green", f"return {number_text(status.return_mean)}"))
    if status.evaluation_return is not None:
        figures.append(("green", f"evaluation {number_text(status.evaluation_return)}"))
    figures.append(("", f"episodes {status.episodes:,}"))
    figures.append(("", f"updates {status.updates:,}"))
    if status.lag_mean is not None:
        figures.append(("", f"lag {status.lag_mean:.1f} (max {status.lag_max:.0f})"))
    if status.workers:
        figures.append(("", workers_line(status.workers, status.roles.get("learner", {}))))
    if status.dropped:
        figures.append(("yellow", f"dropped {status.dropped:,} {status.experience}"))
    return figures


def _rows(roles: Mapping[str, Mapping[str, float]]) -> list[tuple[str, Mapping[str, float]]]:
    """Returns one row per role; many roles of one kind (actor-0, actor-1, ...) become one row with their mean."""
    kinds: dict[str, list[str]] = {}
    for name in roles:
        kinds.setdefault(re.sub(r"-\d+$", "", name), []).append(name)
    rows: list[tuple[str, Mapping[str, float]]] = []
    for kind, names in kinds.items():
        if len(names) <= MAX_ROWS:
            rows += [(name, roles[name]) for name in names]
        else:
            mean = {phase: statistics.fmean(roles[name].get(phase, 0.0) for name in names) for phase in PHASES}
            rows.append((f"{kind} x{len(names)}", mean))
    return rows


def _bar(name: str, shares: Mapping[str, float]) -> Text:
    """Returns a bar of BAR_WIDTH cells, divided by phase; time outside all phases stays blank."""
    bar, passed, drawn = Text(f"{name[:11]:<12}", no_wrap=True), 0.0, 0
    for phase in PHASES:
        passed += max(0.0, shares.get(phase, 0.0))
        end = min(BAR_WIDTH, round(passed * BAR_WIDTH))  # rounding the running sum keeps the total length exact
        bar.append("█" * (end - drawn), style=COLOURS[phase])
        drawn = end
    busy = sum(max(0.0, share) for phase, share in shares.items() if phase not in ("wait", "hung"))
    bar.append(" " * (BAR_WIDTH - drawn) + f" {min(busy, 1.0):4.0%} busy")
    return bar
