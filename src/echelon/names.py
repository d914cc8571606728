"""Import paths of callables, "module:qualname" or "path/to/file.py:qualname": functions are named, never pickled.

A name may have arguments, "module:qualname(size=3)". They are literals, and are parsed, never evaluated.
"""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from echelon.errors import ConfigError, raised_at

FILE_MODULE = "echelon_file_"  # prefix of the module names that loaded files get
CALL = re.compile(r"(?P<path>.+?:[\w.]+)\((?P<arguments>.*)\)", re.DOTALL)
UNNAMED = "no import path: "  # begins the text of a callable that cannot be imported
_loading: list[Path] = []  # files of the user that this process is executing, to find what they define


class Call(NamedTuple):
    """A name and its arguments."""

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def text(self) -> str:
        given = [*map(repr, self.args), *(f"{key}={value!r}" for key, value in self.kwargs.items())]
        return f"{self.path}({', '.join(given)})" if given else self.path


def is_unnamed(name: str) -> bool:
    """Returns whether `name` is the text of a callable that cannot be imported; older releases wrote its qualname."""
    return name.startswith(UNNAMED) or "<lambda>" in name or "<locals>" in name


def path_of(name: str) -> str:
    """Returns `name` without its arguments."""
    found = CALL.fullmatch(name)
    return found["path"] if found is not None else name


def parse_call(name: str) -> Call:
    """Returns the path and the arguments of `name`; raises ConfigError unless its arguments are literals."""
    found = CALL.fullmatch(name)
    if found is None:
        return Call(name, (), {})
    text = f"call({found['arguments']})"
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError("not one list of arguments")
        keys = [keyword.arg for keyword in call.keywords]
        if None in keys or len({*keys}) < len(keys):
            raise ValueError("a keyword is repeated, or unpacked with **")
        values = [_literal(keyword.value, text) for keyword in call.keywords]
        args = tuple(_literal(node, text) for node in call.args)
        return Call(found["path"], args, dict(zip(map(str, keys), values, strict=True)))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ConfigError(
            f'"{name}" does not name a callable: its arguments must be literals, as in '
            f"\"module:name(size=3, mode='a')\" ({error}). For anything else write a function of your own."
        ) from error


def _literal(node: ast.expr, text: str) -> Any:
    """Returns the value of `node`, which was parsed from `text`; raises ValueError unless it is a literal."""
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        written = ast.get_source_segment(text, node)
        quote = f"; a text is written in quotes: '{written}'" if isinstance(node, ast.Name) else ""
        raise ValueError(f"{written} is not a literal{quote}") from error


def resolve(name: str) -> Any:
    """Returns the object that `name` ("module:qualname" or "path/to/file.py:qualname") refers to.

    With arguments, "module:qualname(3, size=4)", it is a function that passes them on after its own arguments.
    """
    if is_unnamed(name):
        raise ConfigError(
            f'"{name}" cannot be imported. Pass the function itself, or move it to a module: "my_module:make".'
        )
    path, args, kwargs = parse_call(name)
    target = _find(path, name)
    if not args and not kwargs:
        return target
    if not callable(target):
        raise ConfigError(f'"{name}" has arguments, but {path} is {target!r:.80} and not callable.')
    if not args:
        return functools.partial(target, **kwargs)

    def call(*first: Any, **more: Any) -> Any:
        return target(*first, *args, **{**kwargs, **more})

    return functools.wraps(target, updated=())(call)


def _find(path: str, name: str) -> Any:
    """Returns the object at `path`, which is `name` without its arguments."""
    place, _, qualname = path.rpartition(":")
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
    path = path_of(name)
    place, colon, qualname = path.rpartition(":")
    if not place.endswith(".py"):
        return name
    return f"{Path(place).expanduser().absolute()}{colon}{qualname}{name.removeprefix(path)}"


def describe_callable(function: Callable[..., Any]) -> str:
    """Returns the name under which another process can import `function`; raises ConfigError if there is none.

    The name of a `functools.partial` has its keyword arguments.
    """
    if isinstance(function, functools.partial):
        return _describe_partial(function)
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


def _describe_partial(function: functools.partial[Any]) -> str:
    path, kwargs = describe_callable(function.func), dict(function.keywords)
    if function.args:
        raise _unnameable(
            repr(function), "has positional arguments, whose place a name does not keep (give them by keyword)"
        )
    for key, value in kwargs.items():
        if not _is_literal(value):
            raise _unnameable(f"functools.partial({path}, {key}={value!r:.80})", f"has no literal as its {key}")
    return Call(path, (), kwargs).text


def _is_literal(value: Any) -> bool:
    """Returns whether `value` is read back from its repr."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return False


def text_of(target: str | Callable[..., Any]) -> str:
    """Returns the name of `target` for config.json; that of a callable that cannot be imported begins with UNNAMED."""
    if isinstance(target, str):
        return target
    try:
        return describe_callable(target)
    except ConfigError:
        return UNNAMED + short_name(target)


def short_name(target: str | Callable[..., Any]) -> str:
    """Returns the name of `target` for a title, without its arguments and the folder of a file."""
    if isinstance(target, str):
        place, colon, qualname = path_of(target).removeprefix(UNNAMED).rpartition(":")
        return f"{os.path.basename(place) if place.endswith('.py') else place}{colon}{qualname}"
    inner = target.func if isinstance(target, functools.partial) else target
    return str(getattr(inner, "__qualname__", type(inner).__qualname__))


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
        'level of a module or script and pass the function, or its name: "my_module:make" or "path/to/file.py:make".'
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
            file = f"path/to/{module.split('.')[-1]}.py{name.removeprefix(module)}"
            remedy = f'add its folder to PYTHONPATH, install its package, or name a file: "{file}"'
        else:
            remedy = f'it needs the module "{error.name}", which is not installed'
        raise ConfigError(f'"{name}" was not found: cannot import {module}; {remedy}.') from error
    except Exception as error:
        raise ConfigError(
            f'"{name}" could not be loaded: importing {module} raised {type(error).__name__}: {error}'
            f"{raised_at(error)}. "
            'Correct the module; put code that must run only as a script under `if __name__ == "__main__":`.'
        ) from error


def check_file(name: str) -> None:
    """Raises ConfigError if `name` is in a file that does not exist."""
    place = path_of(name).rpartition(":")[0]
    if place.endswith(".py") and not (path := Path(place).expanduser().resolve()).is_file():
        raise ConfigError(f'"{name}" was not found: there is no file {path}.')


def _load_file(path: Path, name: str) -> ModuleType:
    """Returns the module of a source file; it is executed once, under a module name derived from its path."""
    check_file(name)
    path = path.expanduser().resolve()
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
    _loading.append(path)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise ConfigError(
            f'"{name}" could not be loaded: running {path} raised {type(error).__name__}: {error}{raised_at(error)}. '
            'Correct the file; put code that must run only as a script under `if __name__ == "__main__":`.'
        ) from error
    finally:
        _loading.pop()
    return module


def check_not_loading(call: str) -> None:
    """Raises ConfigError if `call` stands in a script that this process loads for what it defines.

    The processes of a training load the script, too: without the guard each of them would start the next training.
    """
    if _loading:
        raise ConfigError(f"{call} was called while {_loading[-1]} was loaded, by a process that uses what it defines")
