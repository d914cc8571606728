"""Names of callables: "module:qualname" and "path/to/file.py:qualname", so that no function is ever pickled."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from echelon.errors import ConfigError

FILE_MODULE = "echelon_file_"  # prefix of the module names that loaded files get


def resolve(name: str) -> object:
    """The object that `name` ("module:qualname" or "path/to/file.py:qualname") stands for."""
    place, _, qualname = name.rpartition(":")
    if not place or not qualname:
        raise ConfigError(f'"{name}" names no callable: write "module:name" or "path/to/file.py:name".')
    target: object = _load_file(Path(place), name) if place.endswith(".py") else _import(place, name)
    for part in qualname.split("."):
        if not hasattr(target, part):
            near = difflib.get_close_matches(part, [n for n in dir(target) if not n.startswith("_")], n=3)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise ConfigError(f'"{name}" was not found: {place} has no "{part}".{hint}')
        target = getattr(target, part)
    return target


def absolute(name: str) -> str:
    """`name` as it is found from any folder: the file of "file.py:qualname" by its whole path."""
    place, colon, qualname = name.rpartition(":")
    return f"{Path(place).expanduser().absolute()}{colon}{qualname}" if place.endswith(".py") else name


def describe_callable(function: Callable[..., Any]) -> str:
    """The name under which another process finds `function`; raises ConfigError where there is none."""
    qualname, module = getattr(function, "__qualname__", None), getattr(function, "__module__", None)
    if qualname is None or module is None:
        raise _unnameable(repr(function), "is an object without a name of its own")
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
        raise _unnameable(f"{place}:{qualname}", "is not what its module holds under that name")
    return f"{place}:{qualname}"


def text_of(target: str | Callable[..., Any]) -> str:
    """The name of `target` for the record; what cannot be imported has no name to be found by."""
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
    """Whether both are one class method, which Python binds anew at every look."""
    inner = getattr(function, "__func__", None)
    return inner is not None and getattr(target, "__func__", None) is inner


def _unnameable(what: str, why: str) -> ConfigError:
    return ConfigError(
        f'{what} {why}, so other processes cannot import it; it runs with engine="inline" only. Move it to the top '
        'level of a module or script and pass it, or "module:name" or "path/to/file.py:name".'
    )


def _import(module: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(error.name + ".")):
            remedy = f'install its package, or name a file: "path/to/{module.split(".")[-1]}.py:..."'
        else:
            remedy = f'it needs the module "{error.name}", which is not installed'
        raise ConfigError(f'"{name}" was not found: cannot import {module}; {remedy}.') from error
    except Exception as error:
        raise ConfigError(
            f'"{name}" could not be loaded: importing {module} raised {type(error).__name__}: {error}. Correct the '
            'module; what must run only as a script belongs under `if __name__ == "__main__":`.'
        ) from error


def _load_file(path: Path, name: str) -> ModuleType:
    """The module of a source file: run once, under a name that depends on its path only."""
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
        sys.path.insert(0, str(path.parent))  # as for a script: it may import its neighbours
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
            'what must run only as a script belongs under `if __name__ == "__main__":`.'
        ) from error
    return module
