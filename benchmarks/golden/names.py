"""Public names, and the commands with their options: what users and their programs rely on."""

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
    """The names that the checkout promises, and all that it has."""
    finished = side.python("-P", str(SCRIPT))
    if finished.code != 0:
        raise SystemExit(f"the names of {side.path} cannot be read: {finished.tail}")
    found = json.loads(finished.output.splitlines()[-1])
    return found["public"], found["there"]


def commands(text: str) -> list[str]:
    """The commands that an overview lists."""
    return [match[1] for line in text.splitlines() if (match := COMMAND.match(line))]


def options(command: str, text: str) -> Names:
    """`COMMAND --option` -> what its value looks like and its default; the text that explains it does not count."""
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
        name = f"{command} {match[1]}"  # an everyday option may be listed again, as a field with its default
        found[name] = " | ".join(filter(None, [found.get(name, ""), f"{value}{shown}".strip()]))
    return found


def command_line(side: Checkout, presets: list[str], tell: Tell) -> Names:
    """Every command and every option of every command, with the values of every one of `presets`."""
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
    """A name that is gone or changed differs; one of NEW alone is added."""
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
    presets = old.presets()  # those of NEW alone are listed with the hashes
    first, second = both(old, new, partial(command_line, presets=presets, tell=tell))
    yield from differences("options", first, second, second)
