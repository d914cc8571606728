"""`echelon export RUN`: writes a run's policy to a file that other programs run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from echelon.cli.main import Parser, add_trust
from echelon.cli.output import check_writable
from echelon.errors import ConfigError

FORMATS = ("onnx", "torch-export", "safetensors")


def run(arguments: Sequence[str]) -> int:
    known = make_parser().parse_args(list(arguments))
    from echelon.export import SUFFIXES, check_format, export_policy
    from echelon.policy import load
    from echelon.runs.weights import run_of

    formats = {suffix: name for name, suffix in SUFFIXES.items()}
    if (format := known.format or formats.get(Path(known.output).suffix)) is None:
        raise ConfigError(f"--format is missing: give one of {', '.join(FORMATS)}, or -o FILE with a suffix of them.")
    place, checkpoint = run_of(known.run, known.checkpoint)
    output = Path(known.output or (place if place.is_dir() else place.parent) / f"policy{SUFFIXES[format]}")
    check_format(format, output)
    policy = load(place, checkpoint, trust=known.trust)
    check_writable(output, "--output")
    done = export_policy(policy, output, format)
    if known.json:
        report = {"file": str(done.path), "inputs": done.inputs, "outputs": done.outputs, "difference": done.difference}
        print(json.dumps({**report, "source": str(policy.source)}))
    else:
        difference = f"at most {done.difference:.1e} from" if done.difference else "equal to"
        print(f"{done.path}: {policy.source.name} as {format}, {difference} the policy")
        if format != "safetensors":
            print(f"inputs {', '.join(done.inputs)}; outputs {', '.join(done.outputs)}")
    return 0


def make_parser() -> Parser:
    parser = Parser(
        prog="echelon export",
        description="Write a run's policy to a file: a graph from the raw observation (and the recurrent state) to the "
        "greedy action, or the weights with what loads them. The file is compared with the policy first.",
    )
    parser.add_argument("run", metavar="RUN", help="the run folder, RUN/checkpoints/NAME, or a weights file")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        help="onnx (needs the extra [onnx]), torch-export (for torch.export.load), or safetensors (for echelon.load); "
        "default: by the suffix of FILE",
    )
    parser.add_argument(
        "-o", "--output", default="", metavar="FILE", help="default: RUN/policy.onnx, .pt2 or .safetensors"
    )
    parser.add_argument(
        "--checkpoint", default="newest", metavar="NAME", help="one of RUN/checkpoints (default: the newest)"
    )
    add_trust(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
