"""Finds the mode switches in the sources, and class names that are used twice."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

EXCLUDED = ("roles/plan.py", "roles/plan/")  # the one place that may switch
MODE_FIELDS = ("engine", "transport", "mode", "experience", "slots")
MODES = ("shm", "tcp", "inline", "local", "central", "queue", "replay", "trajectories", "gradients")
FLAGS = ("has_workers",)  # every read is a switch
COUNTS = ("num_learners",)  # of a configuration
COUNTED = ("learner_names",)  # by len()
KINDS = ("Config", "Engine")  # suffixes of class names
OTHERS = ("setting", "run")  # settings of benchmarks, which have their own `mode` or `transport`
WHOLE = ("TrainConfig", "EnvConfig")  # not kinds: an isinstance distinguishes them from other arguments
DEFINITION = """\
A mode switch is a comparison of .engine, .transport, .mode, .experience or .slots with the name of a mode (==, !=, in,
match, or a table subscripted by it), a read of .has_workers, a comparison of num_learners, an isinstance or match-case
on a *Config or *Engine class. Not counted: roles/plan, which may switch, and the settings of benchmarks. Comparisons
that only refuse a configuration (in `require(...)`, or the condition of a lone `raise`) are counted apart: checks."""


@dataclass(frozen=True, order=True)
class Switch:
    """A place in the code that depends on the mode of a run."""

    file: str
    line: int
    kind: str
    text: str
    is_check: bool


def named(node: ast.AST) -> str:
    """Returns the last name of an expression: `c` of `a.b.c`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def literals(node: ast.expr) -> set[str]:
    return {one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)}


def _asks_mode(node: ast.expr) -> bool:
    is_other = isinstance(node, ast.Attribute) and named(node.value) in OTHERS
    return named(node) in MODE_FIELDS and not is_other


def _compares_mode(node: ast.Compare) -> bool:
    sides = [node.left, *node.comparators]
    return any(map(_asks_mode, sides)) and any(literals(side) & set(MODES) for side in sides)


def _compares_count(node: ast.Compare) -> bool:
    sides = [node.left, *node.comparators]
    counted = [side.args[0] for side in sides if isinstance(side, ast.Call) and named(side.func) == "len" and side.args]
    of_run = [side for side in sides if isinstance(side, ast.Attribute)]
    return any(named(side) in COUNTS for side in of_run) or any(named(side) in COUNTED for side in counted)


def _is_kind(node: ast.AST) -> bool:
    return named(node).endswith(KINDS) and named(node) not in WHOLE


def _tests_class(node: ast.Call) -> bool:
    is_test = named(node.func) in ("isinstance", "issubclass") and len(node.args) == 2
    return is_test and any(map(_is_kind, ast.walk(node.args[1])))


def kind_of(node: ast.AST) -> str:
    """Returns the kind of switch of a node; "" if it is none."""
    match node:
        case ast.Compare() if _compares_mode(node):
            return "mode"
        case ast.Match() if _asks_mode(node.subject):
            return "mode"
        case ast.Subscript() if isinstance(node.slice, ast.Attribute) and _asks_mode(node.slice):
            return "mode"
        case ast.Compare() if _compares_count(node):
            return "learners"
        case ast.Attribute(attr=attr, ctx=ast.Load()) if attr in FLAGS:
            return "workers"
        case ast.Call() if _tests_class(node):
            return "class"
        case ast.MatchClass() if _is_kind(node.cls):
            return "class"
    return ""


def _checks(tree: ast.Module) -> set[ast.AST]:
    """Returns all nodes of conditions that only refuse a configuration."""
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and named(node.func) == "require":
            found.update(ast.walk(node))
        elif isinstance(node, ast.If) and not node.orelse and [type(one) for one in node.body] == [ast.Raise]:
            found.update(ast.walk(node.test))
    return found


def switches(package: Path) -> list[Switch]:
    """Returns all switches outside `EXCLUDED`, in the order of the files."""
    found = []
    for file in sorted(package.rglob("*.py")):
        name = str(file.relative_to(package))
        if name.startswith(EXCLUDED):
            continue
        tree = ast.parse(file.read_text())
        checks = _checks(tree)
        for node in ast.walk(tree):
            if kind := kind_of(node):
                assert isinstance(node, ast.expr | ast.stmt | ast.pattern)
                text = ast.unparse(node).partition("\n")[0][:100]
                found.append(Switch(name, node.lineno, kind, text, node in checks))
    return sorted(found)


def repeated_classes(package: Path) -> dict[str, list[str]]:
    """Returns class names that are defined more than once, with their places."""
    places: dict[str, list[str]] = defaultdict(list)
    for file in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{file.relative_to(package)}:{node.lineno}")
    return {name: lines for name, lines in sorted(places.items()) if len(lines) > 1}
