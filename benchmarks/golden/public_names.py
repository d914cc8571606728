"""Prints the public names of the imported echelon as JSON; `names.py` runs it once in each checkout.

A signature consists of the names, kinds and defaults of its parameters, without annotations: callers do not depend on
how a type is written.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
from types import ModuleType
from typing import Any

MODULES = ("", ".config", ".presets", ".world", ".servers", ".frames", ".errors")
PREFIXES: dict[Any, str] = {
    inspect.Parameter.KEYWORD_ONLY: "keyword ",
    inspect.Parameter.POSITIONAL_ONLY: "positional ",
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}


def signature(thing: Any) -> str:
    """Returns the signature of a callable; "" for other objects."""
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return ""
    return f"({', '.join(map(_parameter, parameters))})"


def _parameter(parameter: inspect.Parameter) -> str:
    text = PREFIXES.get(parameter.kind, "") + parameter.name
    if parameter.default is inspect.Parameter.empty:
        return text
    default = repr(parameter.default)
    made = default.startswith("<") or re.match(r"[A-Z]\w*Config\(", default)  # a factory, or an instance of a class
    return f"{text}={'...' if made else default}"


def described(name: str, thing: Any) -> dict[str, str]:
    """Returns a name and, for a class of Echelon, its public members."""
    found = {name: signature(thing) if callable(thing) else ""}
    if not inspect.isclass(thing):
        return found
    if issubclass(thing, BaseException):
        found[f"{name} is a"] = " ".join(base.__name__ for base in thing.__mro__[1:-1])
    for member in dir(thing):
        home = next((one for one in thing.__mro__ if member in vars(one)), thing)
        if not member.startswith("_") and home.__module__.startswith("echelon"):
            value = inspect.getattr_static(thing, member)
            function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            found[f"{name}.{member}"] = signature(function) if inspect.isfunction(function) else ""
    return found


def public(module: ModuleType) -> set[str]:
    """Returns `__all__`, or the names that the module defines or re-exports (`import X as X`)."""
    if hasattr(module, "__all__"):
        return set(module.__all__)
    tree = ast.parse(inspect.getsource(module))
    passed_on = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    defined |= {target.id for node in tree.body for target in _targets(node) if isinstance(target, ast.Name)}
    return {name for name in passed_on | defined if not name.startswith("_")}


def _targets(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign) else []


def main() -> None:
    """Prints `public`, the public names, and `there`, all names of the modules."""
    names: dict[str, str] = {}
    there: dict[str, str] = {}
    for suffix in MODULES:
        module = importlib.import_module(f"echelon{suffix}")
        promised = public(module)
        for name in promised | {name for name in dir(module) if not name.startswith("_")}:
            found = described(f"{module.__name__}.{name}", getattr(module, name))
            there |= found
            names |= found if name in promised else {}
    json.dump({"public": names, "there": there}, sys.stdout)


if __name__ == "__main__":
    main()
