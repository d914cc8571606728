"""`echelon eval RUN`: plays episodes with the weights of a run and shows their returns."""

from __future__ import annotations

import json
from collections.abc import Sequence

from echelon.cli.episode_options import add_options, arguments_of
from echelon.cli.main import Parser
from echelon.cli.output import progress_bar


def run(arguments: Sequence[str]) -> int:
    parser = Parser(prog="echelon eval", description="Play episodes with the weights of a run.")
    add_options(parser, episodes=10)
    parser.add_argument("--json", action="store_true", help="print JSON")
    known = parser.parse_args(list(arguments))
    from echelon.evaluation import evaluate
    from echelon.runs.report import number_text

    with progress_bar("playing", "episodes") as show:
        score = evaluate(
            **arguments_of(known),
            progress=lambda num_ended, num_steps: show(num_ended, known.episodes, f"{num_steps:,} steps"),
        )
    if known.json:
        print(json.dumps(score))
    else:
        shown = {name: number_text(score[f"return_{name}"]) for name in ("mean", "std", "min", "max")}
        steps = "" if score["env_steps"] is None else f" ({score['env_steps']:,} steps)"
        changed = f" with {known.env_kwargs}" if known.env_kwargs != "{}" else ""
        place = f" in {known.env or 'the environment of the run'}{changed}" if known.env or changed else ""
        print(
            f"{score['checkpoint']}{steps}, {'sampled' if known.sample else 'greedy'} actions{place}: "
            f"return {shown['mean']} ± {shown['std']} (min {shown['min']}, max {shown['max']}) over "
            f"{score['episodes']} episodes, {score['length_mean']:,.1f} steps on average"
        )
    return 0
