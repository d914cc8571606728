"""`echelon play RUN`: writes episodes of a run as mp4 and gif, or shows them in a window."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from echelon.cli.episode_options import add_options, arguments_of
from echelon.cli.main import Parser
from echelon.cli.output import progress_bar
from echelon.errors import escaped_lines
from echelon.video import VideoConfig

DEFAULT = VideoConfig()


def run(arguments: Sequence[str]) -> int:
    known = make_parser().parse_args(list(arguments))
    names = ("output", "window", "fps", "width", "gif_width", "gif_fps", "overlay")
    video = VideoConfig(**{name: getattr(known, name) for name in names})
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")  # printed on import, by environments that draw with it
    if not video.window:
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # else it prints that it finds no display
    from echelon.evaluation import play

    def report(line: str) -> None:
        print(escaped_lines(line), file=sys.stderr if known.json else sys.stdout, flush=True)

    with progress_bar("playing", "steps") as show:
        score = play(
            **arguments_of(known),
            video=video,
            report=report,
            progress=lambda num_steps: show(num_steps, None),
        )
    if known.json:
        print(json.dumps(score))
    return 0


def make_parser() -> Parser:
    parser = Parser(prog="echelon play", description="Watch episodes of a run: as mp4 and gif, or in a window.")
    add_options(parser, episodes=1)
    parser.add_argument(
        "--output",
        default=DEFAULT.output,
        metavar="FILE",
        help="FILE.mp4, FILE.gif, or FILE for both (default: RUN/videos/CHECKPOINT-SEED[-CHANGES])",
    )
    parser.add_argument("--window", action="store_true", help="show a window; writes files only with --output")
    parser.add_argument("--fps", type=float, default=DEFAULT.fps, help="steps per second (default: the environment's)")
    for name, what in (("width", "mp4 and window"), ("gif-width", "the gif")):
        default = getattr(DEFAULT, name.replace("-", "_"))
        text = f"approximate width of {what} (default {default})"
        parser.add_argument(f"--{name}", type=int, default=default, metavar="PIXELS", help=text)
    text = f"the gif leaves out steps above this rate (default {DEFAULT.gif_fps:g})"
    parser.add_argument("--gif-fps", type=float, default=DEFAULT.gif_fps, metavar="FPS", help=text)
    parser.add_argument(
        "--no-overlay", dest="overlay", action="store_false", help="no return, step, value, action below the picture"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
