"""`echelon eval RUN`: plays episodes with the weights of a run and shows their returns."""

from __future__ import annotations

import json
from collections.abc import Sequence

from echelon.cli.main import Parser, add_actions, add_checkpoint, add_env, add_trust, parse_env_kwargs
from echelon.cli.output import progress_bar


def run(arguments: Sequence[str]) -> int:
    parser = Parser(prog="echelon eval", description="Play episodes with the weights of a run.")
    parser.add_argument("run", metavar="RUN", help="the run folder")
    add_checkpoint(parser)
    parser.add_argument("--episodes", type=int, default=10, metavar="N", help="number of episodes (default 10)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="seed of the environments (default 1)")
    add_actions(parser)
    parser.add_argument("--steps", type=int, default=0, metavar="N", help="cut episodes after N steps (default: never)")
    add_env(parser)
    add_trust(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    known = parser.parse_args(list(arguments))
    from echelon.evaluation import evaluate
    from echelon.runs.report import number_text

    with progress_bar("playing", "episodes") as show:
        score = evaluate(
            known.run,
            episodes=known.episodes,
            seed=known.seed,
            greedy=not known.sample,
            steps=known.steps,
            checkpoint=known.checkpoint,
            env=known.env,
            env_kwargs=parse_env_kwargs(known.env_kwargs),
            trust=known.trust,
            progress=lambda num_ended, num_steps: show(num_ended, known.episodes, f"{num_steps:,} steps"),
        )
    if known.json:
        print(json.dumps(score))
    else:
        shown = {name: number_text(score[f"return_{name}"]) for name in ("mean", "std", "min", "max")}
        steps = "" if score["env_steps"] is None else f" ({score['env_steps']:,} steps)"
        print(
            f"{score['checkpoint']}{steps}, {'sampled' if known.sample else 'greedy'} actions: "
            f"return {shown['mean']} ± {shown['std']} (min {shown['min']}, max {shown['max']}) over "
            f"{score['episodes']} episodes, {score['length_mean']:,.1f} steps each"
        )
    return 0
