"""Import paths of callables, "module:qualname" or "path/to/file.py:qualname": functions are named, never pickled."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from echelon.errors import ConfigError

FILE_MODULE = "echelon_file_"  # prefix of the module names that loaded files get


def resolve(name: str) -> object:
    """Returns the object that `name` ("module:qualname" or "path/to/file.py:qualname") refers to."""
    place, _, qualname = name.rpartition(":")
    if not place or not qualname:
        raise ConfigError(f'"{name}" does not name a callable: write "module:name" or "path/to/file.py:name".')
    target: object = _load_file(Path(place), name) if place.endswith(".py") else _import(place, name)
    for part in qualname.split("."):
        if not hasattr(target, part):
            near = difflib.get_close_matches(part, [n for n in dir(target) if not n.startswith("_")], n=3)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise ConfigError(f'"{name}" was not found: {place} has no "{part}".{hint}')
        target = getattr(target, part)
    return target


def absolute(name: str) -> str:
    """Returns `name` with the file of "file.py:qualname" as an absolute path, so that it resolves from any folder."""
    place, colon, qualname = name.rpartition(":")
    return f"{Path(place).expanduser().absolute()}{colon}{qualname}" if place.endswith(".py") else name


def describe_callable(function: Callable[..., Any]) -> str:
    """Returns the name under which another process can import `function`; raises ConfigError if there is none."""
    qualname, module = getattr(function, "__qualname__", None), getattr(function, "__module__", None)
    if qualname is None or module is None:
        raise _unnameable(repr(function), "is an object without a name")
    if "<lambda>" in qualname:
        raise _unnameable(f"{module}:{qualname}", "is a lambda")
    if "<locals>" in qualname:
        raise _unnameable(f"{module}:{qualname}", "is defined inside another function")
    loaded = sys.modules.get(module)
    if module == "__main__":
        place = _main_place(loaded, qualname)
    elif module.startswith(FILE_MODULE) and loaded is not None:
        place = str(loaded.__file__)
    else:
        place = module
    target: object = loaded
    for part in qualname.split("."):
        target = getattr(target, part, None)
    if target is not function and not _same_method(target, function):
        raise _unnameable(f"{place}:{qualname}", "is not the object that its module has under that name")
    return f"{place}:{qualname}"


def text_of(target: str | Callable[..., Any]) -> str:
    """Returns the name of `target` for config.json; a callable that cannot be imported gets its bare qualname."""
    if isinstance(target, str):
        return target
    try:
        return describe_callable(target)
    except ConfigError:
        return str(getattr(target, "__qualname__", type(target).__qualname__))


def _main_place(main: ModuleType | None, qualname: str) -> str:
    if main is not None and getattr(main, "__spec__", None) is not None:  # python -m package.module
        return str(main.__spec__.name)  # type: ignore[union-attr]
    file = getattr(main, "__file__", None)
    if file is None or not Path(file).is_file():
        raise _unnameable(f"__main__:{qualname}", "is defined in a notebook or an interactive session")
    return str(Path(file).resolve())


def _same_method(target: object, function: object) -> bool:
    """Returns whether both are the same class method; Python creates a new bound method on every access."""
    inner = getattr(function, "__func__", None)
    return inner is not None and getattr(target, "__func__", None) is inner


def _unnameable(what: str, why: str) -> ConfigError:
    return ConfigError(
        f'{what} {why}, so other processes cannot import it; it runs with engine="inline" only. Move it to the top '
        'level of a module or script and pass the function, or its name: "module:name" or "path/to/file.py:name".'
    )


def import_module(module: str) -> ModuleType:
    """Imports a module that the user named; it may be in the working directory, as with `python -m`.

    Only here does that directory come to sys.path: it may be somebody else's run folder, in which a torch.py waits.
    """
    if os.getcwd() not in sys.path and module.partition(".")[0] != "echelon":
        sys.path.insert(0, os.getcwd())
    return importlib.import_module(module)


def _import(module: str, name: str) -> ModuleType:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(error.name + ".")):
            remedy = f'install its package, or name a file: "path/to/{module.split(".")[-1]}.py:..."'
        else:
            remedy = f'it needs the module "{error.name}", which is not installed'
        raise ConfigError(f'"{name}" was not found: cannot import {module}; {remedy}.') from error
    except Exception as error:
        raise ConfigError(
            f'"{name}" could not be loaded: importing {module} raised {type(error).__name__}: {error}. Correct the '
            'module; put code that must run only as a script under `if __name__ == "__main__":`.'
        ) from error


def _load_file(path: Path, name: str) -> ModuleType:
    """Returns the module of a source file; it is executed once, under a module name derived from its path."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f'"{name}" was not found: there is no file {path}.')
    main = sys.modules.get("__main__")
    if main is not None and getattr(main, "__file__", None) and Path(str(main.__file__)).resolve() == path:
        return main  # this process is that script
    module_name = f"{FILE_MODULE}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as for a script, so that it can import modules beside it
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise ConfigError(
            f'"{name}" could not be loaded: running {path} raised {type(error).__name__}: {error}. Correct the file; '
            'put code that must run only as a script under `if __name__ == "__main__":`.'
        ) from error
    return module
