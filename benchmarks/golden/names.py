"""Compares public names, and the commands with their options."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from golden.checkout import Checkout, Row, Tell, both

SCRIPT = Path(__file__).with_name("public_names.py")
COMMAND = re.compile(r"^  ([a-z][\w-]*) {2,}\S")
OPTION = re.compile(r"^ +(?:-\w, )?(--[\w.-]+)(?:[ =](\S.*?))?(?: {2,}(.*))?$")
DEFAULT = re.compile(r"\(default:? ?(.*?)\)(?: |$)")
TRAILING = re.compile(r"\(([^()]*)\)$")  # where a benchmark's help has its default
Names = dict[str, str]


def python_names(side: Checkout) -> tuple[Names, Names]:
    """Returns the public names of the checkout, and all its names."""
    finished = side.python("-P", str(SCRIPT))
    if finished.code != 0:
        raise SystemExit(f"the names of {side.path} cannot be read: {finished.tail}")
    found = json.loads(finished.output.splitlines()[-1])
    return found["public"], found["there"]


def commands(text: str) -> list[str]:
    """Returns the commands listed in an overview."""
    return [match[1] for line in text.splitlines() if (match := COMMAND.match(line))]


def options(command: str, text: str) -> Names:
    """Maps `COMMAND --option` to its metavar and default; the help text is ignored."""
    found: Names = {}
    lines = text.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        match = OPTION.match(line)
        if match is None or line.startswith("usage:"):
            continue
        told = match[3] or (following.strip() if not OPTION.match(following) else "")
        default = DEFAULT.search(told) or (TRAILING.search(told) if " bench " in f"{command} " else None)
        value = (match[2] or "").split(", --")[0]  # an option with a second name
        shown = f" = {default[1].partition(';')[0]}" if default else ""
        name = f"{command} {match[1]}"  # a short option can be listed again, as a field with its default
        found[name] = " | ".join(filter(None, [found.get(name, ""), f"{value}{shown}".strip()]))
    return found


def command_line(side: Checkout, presets: list[str], tell: Tell) -> Names:
    """Returns all commands and their options, with the defaults of all `presets`."""
    overview = commands(side.echelon("--help").output)
    benches = commands(side.echelon("bench", "--help").output)
    found: Names = {f"echelon {name}": "" for name in overview}
    found |= {f"echelon bench {name}": "" for name in benches}
    pages = [[name] for name in overview if name != "bench"] + [["bench", name] for name in benches]
    pages += [[name, preset] for name in ("train", "learner") if name in overview for preset in presets]
    for words in pages:
        text = side.echelon(*words, "--help").output
        command = f"echelon {' '.join(words)}"
        found |= options(command, text)
        positional = re.search(r"^usage: (?:.*\]|echelon [a-z ]+?)((?: [A-Z]+)*)$", text, re.M)
        found[f"{command} takes"] = positional[1].strip() if positional else ""
    tell(f"names: {side.label}: {len(overview)} commands, {len(benches)} benchmarks, {len(found)} options")
    return found


def differences(section: str, old: Names, new: Names, there: Names) -> list[Row]:
    """Returns the rows: a missing or changed name differs; a name of NEW only is added."""
    rows = []
    for name, text in sorted(old.items()):
        if name not in there:
            rows.append(Row(section, name, "differs", text or "there", "", "gone"))
        elif there[name] != text:
            rows.append(Row(section, name, "differs", text, there[name], "changed"))
    rows += [Row(section, name, "added", "", text) for name, text in sorted(new.items()) if name not in old]
    same = sum(name in there and there[name] == text for name, text in old.items())
    return [*rows, Row(section, f"{same} of {len(old)} names", "same" if same == len(old) else "differs")]


def compare(old: Checkout, new: Checkout, tell: Tell) -> Iterator[Row]:
    before, _ = python_names(old)
    after, there = python_names(new)
    tell(f"names: {len(before)} public names of OLD, {len(after)} of NEW")
    yield from differences("names", before, after, there)
    presets = old.presets()  # `hashes` lists the presets of NEW only
    first, second = both(old, new, partial(command_line, presets=presets, tell=tell))
    yield from differences("options", first, second, second)
