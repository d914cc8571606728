"""What others may call and fetch in this process: functions by import path, and the values and services of its groups.

Only functions of the program's own modules can be called. These are its script, the module that entered the world, and
the modules beside either of them or in the same top package; never the standard library, installed packages, or
Echelon. A module's function can be called only if that module defines it, not if it imports it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from echelon.errors import ConfigError
from echelon.transport.channel import Refusal
from echelon.transport.channel_callee import Missing

MAIN = ("__main__", "__mp_main__")  # names of the script's module: in the started process, and in its children
VALUE, SERVICE = "value", "service"  # kinds of keys
_PENDING = object()  # placeholder of a kept result until the call has returned
HOW = "Name a function at the top of a module of your program, or register() it as a service."

Function = Callable[..., Any]


def name_of(function: Function) -> str:
    """Returns the name of `function` for other processes; raises ConfigError if they cannot call it."""
    if not isinstance(function, FunctionType):
        raise ConfigError(
            f"{_shown(function)} cannot be called in another process: it is a {type(function).__name__}, not a "
            f"function written in Python. {HOW}"
        )
    module, name = function.__module__, function.__qualname__
    if "<lambda>" in name:
        raise ConfigError(f"a lambda of {module} cannot be called in another process: it has no name there. {HOW}")
    if "." in name:
        raise ConfigError(
            f"{module}.{name} cannot be called in another process: it is defined inside another object. {HOW}"
        )
    if getattr(sys.modules.get(module), name, None) is not function:
        raise ConfigError(
            f"{module}.{name} cannot be called in another process: that name refers to another object. {HOW}"
        )
    return f"{MAIN[0] if module in MAIN else module}:{name}"


def _shown(function: object) -> str:
    return str(getattr(function, "__qualname__", None) or repr(function)[:80])


class Scope:
    """The functions of the program's own modules, and the values and services of this process in its groups."""

    def __init__(self, entrance: str) -> None:
        """`entrance` is the module that entered the world, or whose function was launched."""
        self.entrance = entrance
        self.groups: dict[str, dict[tuple[str, str], Any]] = {}  # group -> kind and key -> value or service
        self._functions: dict[str, Function] = {}
        self._roots = [root for name in (MAIN[0], entrance) if (root := _root(sys.modules.get(name)))]
        own = Path(__file__).resolve().parents[1]
        paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
        self._foreign = [own, *(Path(path).resolve() for path in paths)]

    def bound(self, group: str, kind: str, key: str) -> Any:
        """Returns the value or service of this process under a key; raises Missing if there is none."""
        try:
            return self.groups[group][kind, key]
        except KeyError:
            raise Missing from None

    def function(self, path: str) -> Function:
        """Returns the function with that name; raises Refusal if it does not exist or may not be called."""
        if (function := self._functions.get(path)) is None:
            function = self._functions[path] = self._resolve(path)
        return function

    def _resolve(self, path: str) -> Function:
        module_name, _, name = path.partition(":")
        module = sys.modules.get(MAIN[0]) if module_name == MAIN[0] else self._module(module_name)
        function = getattr(module, name, None)
        if not isinstance(function, FunctionType) or function.__qualname__ != name:
            raise Refusal(f"{module_name} has no function {name[:80]!r} of its own.")
        if function.__module__ != module_name and not (module_name in MAIN and function.__module__ in MAIN):
            raise Refusal(f"{name[:80]!r} is not defined in {module_name} but imported from {function.__module__}.")
        return function

    def _module(self, name: str) -> ModuleType:
        top = name.partition(".")[0]
        if not all(part.isidentifier() for part in name.split(".")):
            raise Refusal(f"{name[:80]!r} is not a module name.")
        spec = importlib.util.find_spec(top)  # imports nothing, since the name has no dot
        places = [spec.origin, *(spec.submodule_search_locations or ())] if spec else []
        if not any(place and self._is_own(Path(place)) for place in places):
            roots = ", ".join(map(str, self._roots)) or "the script"
            raise Refusal(f"{name[:80]} is not a module of this program, whose modules are in {roots}.")
        module = importlib.import_module(name)
        if not (module.__file__ and self._is_own(Path(module.__file__))):
            raise Refusal(f"{name[:80]} is not a module of this program: it is at {module.__file__}.")
        return module

    def _is_own(self, place: Path) -> bool:
        place = place.resolve()
        if any(part in ("site-packages", "dist-packages") for part in place.parts):
            return False
        if any(place.is_relative_to(foreign) for foreign in self._foreign):
            return False
        return any(place.is_relative_to(root) for root in self._roots)


class Runner:
    """Runs the requests of one caller, and keeps the results that the caller asked to leave here."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self.kept: dict[int, Any] = {}
        self._keeping = threading.Lock()  # a result may arrive while another thread frees it

    def __call__(self, request: tuple[Any, ...]) -> Any:
        """Returns the value, or None if it is kept here."""
        match request:
            case (int(number), str(group), str(kind), str(name), tuple(args), dict(kwargs), bool(keep)):
                if not keep:
                    return self._value(group, kind, name, args, kwargs)
            case _:
                raise Refusal(f"{str(request)[:80]} is not a request.")
        self.kept[number] = _PENDING
        try:
            value = self._value(group, kind, name, args, kwargs)
        except BaseException:
            self.kept.pop(number, None)
            raise
        with self._keeping:
            if number in self.kept:  # else the caller has freed it
                self.kept[number] = value

    def _value(self, group: str, kind: str, name: str, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> Any:
        if kind == "function":
            return self._scope.function(name)(*args, **kwargs)
        if kind == SERVICE:
            return self._scope.bound(group, kind, name)(*args, **kwargs)
        if kind == VALUE:
            return self._scope.bound(group, kind, name)
        if kind == "kept":
            return self.kept[args[0]]
        if kind == "free":
            with self._keeping:
                for number in args[0]:
                    self.kept.pop(number, None)
            return None
        raise Refusal(f"{kind[:80]!r} is not a kind of request.")


def _root(module: ModuleType | None) -> Path | None:
    """Returns the folder that makes `module` part of the program: that of its top package, else its own."""
    if module is None or not getattr(module, "__file__", None):
        return None
    spec = getattr(module, "__spec__", None)
    name = spec.name if spec is not None else module.__name__  # the full name under `python -m package.module`
    if name in MAIN:  # a script started by its path, or the launcher's script, which may be in a package
        name = f"{module.__package__}.{name}" if module.__package__ else name
    depth = name.count(".")
    is_package = hasattr(module, "__path__")
    return Path(str(module.__file__)).resolve().parents[depth if is_package else max(0, depth - 1)]
