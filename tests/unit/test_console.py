"""The console: a live panel on a terminal, plain lines elsewhere; it never ends a run."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console as Terminal

from echelon.runs.console import BAR_WIDTH, Console, Status, final_summary, panel, plain_line

ROLES = {
    "actor-0": {"env": 0.5, "act": 0.25, "wait": 0.2, "transfer": 0.05},
    "learner": {"learn": 0.6, "wait": 0.4},
}
STATUS = Status(
    fraction=0.25,
    env_steps=250_000,
    steps_per_s=9876.5,
    episodes=1234,
    return_mean=195.25,
    evaluation_return=210.0,
    lag_mean=1.25,
    lag_max=3,
    updates=456,
    wall_s=75.0,
    dropped=2,
    roles=ROLES,
)


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def rendered(status: Status) -> list[str]:
    terminal = Terminal(record=True, width=160, file=io.StringIO(), force_terminal=True)
    terminal.print(panel("impala · CartPole-v1 -> runs/x", status))
    return [line.rstrip() for line in terminal.export_text().splitlines()]


def test_plain_line_has_every_figure() -> None:
    assert plain_line(STATUS) == (
        "1 min 15 s | 25% | steps 250,000 | 9,876 steps/s | return 195.2 | evaluation 210.0 | episodes 1,234 | "
        "updates 456 | lag 1.2 (max 3) | dropped 2 trajectories"
    )
    assert plain_line(Status(env_steps=0, steps_per_s=0.0, wall_s=1.0)) == (
        "1 s | steps 0 | 0 steps/s | episodes 0 | updates 0 | lag 0.0 (max 0)"
    )
    assert "lag" not in plain_line(Status(9, 0.0, 1.0, lag_mean=None)), "with replay it is the age of the replay"
    assert plain_line(Status(0, 0.0, 1.0, doing="starting 3 of 14 actors")) == "1 s | starting 3 of 14 actors"
    assert "1 s | filling the replay | steps 64 | " in plain_line(Status(64, 0.0, 1.0, doing="filling the replay"))


def test_plain_lines_come_after_one_second_then_every_five() -> None:
    clock, output = Clock(), io.StringIO()
    console = Console("impala", Path("runs/x"), output, clock=clock)
    shown = []
    for tenth in range(0, 125):
        clock.now_s, before = tenth / 10, output.tell()
        console.update(STATUS)
        if output.tell() > before:
            shown.append(clock.now_s)
    console.close()
    assert shown == [1.0, 6.0, 11.0]
    assert output.getvalue().splitlines() == ["impala -> runs/x"] + [plain_line(STATUS)] * 3


def test_messages_are_plain_and_at_once() -> None:
    output = io.StringIO()
    console = Console("impala", Path("runs/x"), output, clock=Clock())
    console.message("actor-1 [signal 9] is restarted")
    assert output.getvalue().endswith("actor-1 [signal 9] is restarted\n")


def test_panel_shows_progress_figures_and_a_bar_per_role() -> None:
    head, progress, figures, legend, actor, learner = rendered(STATUS)
    assert head == "impala · CartPole-v1 -> runs/x"
    assert progress.startswith("━")
    assert "return 195.2" in figures and "lag 1.2 (max 3)" in figures
    assert legend.split() == ["■", "env", "■", "act", "■", "learn", "■", "transfer", "■", "wait"]
    assert actor == "actor-0     " + "█" * BAR_WIDTH + "  80% busy"
    assert learner == "learner     " + "█" * BAR_WIDTH + "  60% busy"


def test_the_exchange_of_several_learners_is_a_phase_of_its_own() -> None:
    roles = {"learner-0": {"learn": 0.5, "exchange": 0.25, "wait": 0.25}}
    *_, legend, learner = rendered(Status(env_steps=0, steps_per_s=0, wall_s=0, roles=roles))
    assert legend.split()[4:8] == ["■", "learn", "■", "exchange"]
    assert learner.endswith("  75% busy")


def test_panel_cells_are_in_proportion() -> None:
    status = Status(env_steps=0, steps_per_s=0, wall_s=0, roles={"actor-0": {"env": 0.5, "wait": 0.25}})
    line = rendered(status)[-1]
    assert line.count("█") == BAR_WIDTH * 3 // 4
    assert line.endswith("  50% busy")


def test_many_actors_are_shown_as_their_mean() -> None:
    roles = {f"actor-{i}": {"env": 0.0 if i % 2 else 1.0} for i in range(64)} | {"learner": {"learn": 1.0}}
    lines = rendered(Status(env_steps=0, steps_per_s=0, wall_s=0, roles=roles))
    assert [line.split("█")[0].strip() for line in lines[-2:]] == ["actor x64", "learner"]
    assert lines[-2].endswith("  50% busy")


def test_live_panel_is_drawn_at_most_four_times_a_second_and_taken_away() -> None:
    clock, output = Clock(), io.StringIO()
    console = Console("impala", Path("runs/x"), output, live=True, clock=clock)
    drawn = 0
    for hundredth in range(0, 200):
        clock.now_s, before = hundredth / 100, output.tell()
        console.update(STATUS)
        drawn += output.tell() > before
    assert drawn == 8
    console.message("[actor-1] was restarted")
    assert "[actor-1] was restarted" in output.getvalue()
    console.close()
    console.close()
    assert output.getvalue().count("\x1b[?25l") == output.getvalue().count("\x1b[?25h") == 1  # the cursor is back


class Fragile(io.StringIO):
    """An output that raises `error` once it is set: its reader left, or its terminal closed."""

    error: OSError | None = None

    def write(self, text: str) -> int:
        if self.error:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(5, "Input/output error")])
@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("moment", ["start", "update", "close"])
def test_an_output_that_went_away_does_not_end_the_run(moment: str, live: bool, error: OSError) -> None:
    clock, output, streams = Clock(), Fragile(), (sys.stdout, sys.stderr)
    output.error = error if moment == "start" else None
    console = Console("impala", Path("runs/x"), output, live=live, clock=clock)
    output.error = None if moment == "close" else error
    clock.now_s = 10.0
    console.update(STATUS)
    console.message("still here")
    output.error = error
    console.close()
    assert (sys.stdout, sys.stderr) == streams


def test_messages_that_nobody_reads_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    output = Fragile()
    console = Console("impala", Path("runs/x"), output, clock=Clock())
    console.message("read")
    assert not console.is_unread
    output.error = BrokenPipeError(32, "Broken pipe")
    console.message("not read")
    console.message("nor this")
    assert console.is_unread and capsys.readouterr().err == "echelon: not read\nechelon: nor this\n"


def test_an_ascii_output_gets_what_it_can_carry() -> None:
    raw = io.BytesIO()
    console = Console("impala · x", Path("runs/x"), io.TextIOWrapper(raw, encoding="ascii"), clock=Clock())
    console.message("größe")
    assert raw.getvalue() == b"impala ? x -> runs/x\ngr??e\n"


def test_final_summary() -> None:
    output = io.StringIO()
    summary = {
        "status": "finished",
        "env_steps": 1_000_000,
        "updates": 50,
        "wall_s": 100.0,
        "env_steps_per_s": 10_000.0,
        "return_mean": 499.5,
        "evaluation_return": 500.0,
        "lag_mean": 1.5,
        "lag_max": 4,
        "run_dir": "runs/x",
        "checkpoint": "runs/x/checkpoints/step_1",
        "curve": "runs/x/curve.png",
        "bottleneck": "bottleneck: the learner.",
    }
    final_summary(summary, output)
    assert output.getvalue().splitlines() == [
        "status      finished",
        "steps       1,000,000",
        "time        1 min 40 s",
        "steps/s     10,000 since the first updates",
        "return      499.5 (evaluation 500.0)",
        "lag         1.50 versions of the weights on average, 4 at most",
        "run         runs/x",
        "checkpoint  runs/x/checkpoints/step_1",
        "curve       runs/x/curve.png",
        "bottleneck: the learner.",
    ]


def test_nothing_that_is_shown_controls_the_terminal() -> None:
    """Neither a title (an environment's id), nor a message or the name of a host."""
    output = io.StringIO()
    console = Console("dqn evil\x1b]0;title\x07", Path("run\x1b[2J"), output, live=False)
    console.message("worker \x1b[31mred\nsecond line\r")
    console.close()
    host = {"name": "h\x1b[2J", "actors": 1, "restarts": 0, "lost": ""}
    final_summary({"status": "finished", "hosts": [host]}, output)
    text = output.getvalue()
    assert all(line.isprintable() for line in text.splitlines()) and "\nsecond line" in text
    output = io.StringIO()
    console = Console("dqn evil\x1b]0;title\x07", Path("run"), output, live=True)
    console.close()
    assert "\x1b]0;" not in output.getvalue()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *(
            (0.72, "0.72"),
            (-0.052, "-0.052"),
            (0.0, "0.0"),
            (-0.0, "0.0"),
            (1.0, "1.0"),
            (-1.0, "-1.0"),
            (0.9999, "1.0"),
        ),
        *((9.5, "9.5"), (9.999, "10.0"), (-21.04, "-21.0"), (475.26, "475.3"), (12345.6, "12,345.6")),
    ],
)
def test_returns_are_shown_with_enough_digits(value: float, text: str) -> None:
    """Also those between -1 and 1."""
    output = io.StringIO()
    final_summary({"status": "finished", "return_mean": value, "evaluation_return": value}, output)
    assert f"return      {text} (evaluation {text})" in output.getvalue().splitlines()
    line = plain_line(Status(env_steps=1, steps_per_s=1.0, wall_s=1.0, return_mean=value, evaluation_return=value))
    assert f"return {text} | evaluation {text} |" in line


@pytest.mark.parametrize("value", [1.7e308, -1.7e308, float("inf"), float("nan")])
def test_huge_returns_stay_short(value: float) -> None:
    output = io.StringIO()
    final_summary({"status": "finished", "return_mean": value, "evaluation_return": value}, output)
    line = plain_line(Status(env_steps=1, steps_per_s=1.0, wall_s=1.0, return_mean=value, evaluation_return=value))
    assert max(map(len, [line, *output.getvalue().splitlines()])) < 200 and f"{value:.3g}" in line


def test_final_summary_leaves_out_what_is_not_known() -> None:
    output = io.StringIO()
    final_summary({"status": "failed", "return_mean": None}, output)
    assert output.getvalue() == "status      failed\n"
