"""`echelon check ENV`: checks an environment, and shows which network and values it gets and how fast it is."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from echelon.cli.main import Parser, parse_env_kwargs
from echelon.config import TrainConfig, replace
from echelon.errors import ConfigError
from echelon.families import FAMILY_OF, OWN, family_of, name_of
from echelon.presets import DEFAULT_ENVS, PRESETS, preset
from echelon.presets.zoo import rows_for

SIGNS = {"ok": "ok", "info": "info", "warning": "WARNING", "error": "ERROR"}
CHANGED_REWARDS = ("rewards normalized", "rewards clipped")
FAR_FROM_ONE = 10.0  # a factor: mean absolute rewards beyond it are pointed out
LARGE_TABLE = 32  # rows and columns: two dimensions of floats from here on are often an image


def run(arguments: Sequence[str]) -> int:
    parser = Parser(
        prog="echelon check",
        description="Check an environment with random steps, and show which network and values it gets and its speed. "
        "Exits with 1 if the environment has errors. Every run starts with a short form of this check.",
    )
    parser.add_argument("env", metavar="ENV", help="an environment, as for `echelon train`")
    parser.add_argument("--env-kwargs", metavar="JSON", default="{}", help="keyword arguments for the environment")
    parser.add_argument(
        "--wrapper", metavar="NAME", action="append", default=[], help="module:Wrapper, applied in the given order"
    )
    parser.add_argument("--preset", metavar="PRESET", default="ppo", help="whose network and values (default ppo)")
    parser.add_argument(
        "--network.name",
        dest="network",
        metavar="NAME",
        default="auto",
        help="your own network, as for `echelon train`",
    )
    parser.add_argument("--steps", metavar="N", type=int, default=1000, help="random steps to check (default 1000)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    known = parser.parse_args(list(arguments))
    if known.steps < 1:
        raise ConfigError(f"--steps {known.steps} must be at least 1.")
    config = preset(known.preset, known.env)
    kwargs = {**config.env.kwargs, **parse_env_kwargs(known.env_kwargs)}
    config = replace(config, env=replace(config.env, kwargs=kwargs, wrappers=tuple(known.wrapper)))
    config = replace(config, **{"network.name": known.network})
    with contextlib.redirect_stdout(sys.stderr):  # what the environment prints
        found = _find(config, known.env, known.preset, known.steps)
    if known.json:
        print(json.dumps(found))
    else:
        print("\n".join(_lines(found)))
    return 0 if found["ok"] else 1


def _find(config: TrainConfig, env: str, name: str, num_steps: int) -> dict[str, Any]:
    """Returns everything that was found, as plain JSON values."""
    from echelon.envs.check import check_env
    from echelon.schema import is_image, space_leaves

    report = check_env(config.env, num_steps)
    found: dict[str, Any] = {"env": env, "preset": name, "network": [], "presets": {}, "zoo": []}
    if report.spaces is not None:
        family = family_of(env)
        if family in OWN and name_of(env) not in FAMILY_OF:
            leaves = space_leaves(report.spaces.observation)
            family = OWN[any(is_image(leaf.shape, leaf.dtype) for leaf in leaves)]
        config = replace(preset(name, env, family), **{"env": config.env, "network.name": config.network.name})
        rows = [f"for {', '.join(row.targets)}" for row in rows_for(name, env, family)]
        found |= {"family": family, "zoo": rows, "presets": _presets(env, family, report.spaces)}
        try:
            found |= _network(config, report.spaces)
        except ConfigError as error:
            report.findings.add("error", "network", str(error))
        for leaf in space_leaves(report.spaces.observation):
            largest = report.largest.get(leaf.path, 0.0) if leaf.dtype.kind == "f" else 0.0
            if is_image(leaf.shape, leaf.dtype) and largest > FAR_FROM_ONE:
                text = f"{leaf.path} is an image of floats up to {largest:g}, which are not scaled."
                report.findings.add("warning", "image", text, "Return uint8 (scaled to 0 to 1), or divide by 255.")
            elif leaf.dtype.kind == "f" and len(leaf.shape) == 2 and min(leaf.shape) >= LARGE_TABLE:
                text = f"{leaf.path} has two dimensions of floats: a table, which is flattened."
                report.findings.add("info", "image", text, "If it is an image, return uint8, or add an axis of size 1.")
    if report.reward_scale and not 1 / FAR_FROM_ONE <= report.reward_scale <= FAR_FROM_ONE:
        normalizing = [preset_name for preset_name, text in found["presets"].items() if text in CHANGED_REWARDS]
        text = f"mean absolute value {report.reward_scale:.3g}, far from 1."
        remedy = f"Presets that normalize or clip rewards here: {', '.join(normalizing) or 'none'}."
        report.findings.add("info", "reward scale", text, remedy)
    found["steps_per_s"] = {str(count): round(speed, 1) for count, speed in report.steps_per_s.items()}
    found["checks"] = [asdict(entry) for entry in report.findings.entries]
    found["ok"] = not report.findings.of("error")
    return found


def _network(config: TrainConfig, spaces: Any) -> dict[str, Any]:
    """Returns how each leaf of the observation is encoded, the action distribution and the size of the network."""
    import gymnasium as gym
    import numpy as np

    from echelon.algorithms.model import Model
    from echelon.networks import make_encoder
    from echelon.schema import MASK, flatten, space_leaves

    lines = []
    parts = flatten(spaces.observation, spaces.observation)
    for leaf, part in zip(space_leaves(spaces.observation), parts, strict=True):
        if (own := config.network.name) != "auto":
            lines.append(f"{leaf.path}: passed to {own} as {leaf.dtype} (N, {', '.join(map(str, leaf.shape))})")
        elif leaf.path == f"observation.{MASK}":
            lines.append(f"{leaf.path}: masks the actions, not part of the input")
        else:
            lines.append(f"{leaf.path}: {_encoding(part, make_encoder(part, config.network))}")
    model = Model(config.network, spaces, config.algorithm)
    distribution = f"{type(model.distribution).__name__} for {spaces.action}"
    if isinstance(spaces.action, gym.spaces.Box):
        bounded = np.isfinite(spaces.action.low) & np.isfinite(spaces.action.high)
        which = "its bounds" if bounded.all() else "the finite bounds"
        distribution += f", scaled so that -1 and 1 are {which}" if bounded.any() else ", not scaled: it has no bounds"
    return {"network": lines, "distribution": distribution, "parameters": model.parameters.numel()}


def _encoding(space: Any, encoder: Any) -> str:
    from echelon.layers import Image, OneHot

    if isinstance(encoder, Image):
        layout = "no channel axis" if encoder.is_grey else f"channels {'last' if encoder.channels_last else 'first'}"
        scaled = "uint8 scaled to 0 to 1" if encoder.scale != 1.0 else "floats, not scaled"
        return f"image {space.shape}, {layout}, {scaled} -> convolutions, {encoder.out_size} features"
    if isinstance(encoder, OneHot):
        return f"{type(space).__name__} -> one-hot, {encoder.out_size} features"
    how = "uint8 scaled to 0 to 1" if encoder.scale != 1.0 else "as it is"
    how = "normalized by running mean and deviation" if encoder.normalizer is not None else how
    return f"{space.dtype} {space.shape}, no image -> flattened, {how}, {encoder.out_size} features"


def _presets(env: str, family: str, spaces: Any) -> dict[str, str]:
    """Returns for each preset whether it supports the actions, and what it does to rewards."""
    from echelon.objectives.distributions import make_distribution

    found = {}
    for name in PRESETS:
        if name_of(DEFAULT_ENVS.get(name, env)) != name_of(env):  # made for another environment
            continue
        algorithm: Any = preset(name, env, family).algorithm
        try:
            make_distribution(spaces.action, algorithm.distribution)
        except ConfigError:
            found[name] = "does not support this action space"
            continue
        does = "rewards normalized" if getattr(algorithm, "normalize_reward", False) else "rewards as they are"
        found[name] = "rewards clipped" if getattr(algorithm, "reward_clip", 0.0) else does
    return found


def _lines(found: dict[str, Any]) -> list[str]:
    lines = []
    for check in found["checks"]:
        remedy = f" {check['remedy']}" if check["remedy"] else ""
        lines.append(f"{SIGNS[check['level']]:<8} {check['check']}: {check['text']}{remedy}")
    if found["network"]:
        lines += ["", f"network of {found['preset']}, {found['parameters']:,} parameters"]
        lines += [f"  {line}" for line in found["network"]]
        lines.append(f"  actions: {found['distribution']}")
        tuned = f"with the values tuned {' and '.join(found['zoo'])}"
        none = f"as it is: no values are tuned for this environment or its family, {found['family']}"
        lines.append(f"settings: the preset {found['preset']} {tuned if found['zoo'] else none}")
    if found["presets"]:
        unfit = [name for name, text in found["presets"].items() if text.startswith("does not")]
        fit = [name for name in found["presets"] if name not in unfit]
        without = f" (not {', '.join(unfit)})" if unfit else ""
        lines.append(f"presets for these actions: {', '.join(fit)}{without}")
    if speeds := found["steps_per_s"]:
        lines.append("steps/s " + ", ".join(f"{speed:,.0f} with {n}" for n, speed in speeds.items()) + " environments")
    count = sum(check["level"] == "error" for check in found["checks"])
    return [*lines, "", f"{count} error{'' if count == 1 else 's'}" if count else "no errors"]
