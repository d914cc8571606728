"""Fields of the configuration. The annotation of a field holds its type, bounds, unit and meaning:

    envs: Annotated[int, doc("environments per actor, K", ge=1)] = 16

Validation, command-line options, help, files and documentation are derived from it. A section validates its values on
construction.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec

from echelon.errors import ConfigError

CLOSE = 0.6  # similarity of names from which one is taken for the other
MAX_DEPTH = 100  # of lists and dicts in each other
WORDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def doc(
    meaning: str,
    unit: str = "",
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    because: str = "",
) -> msgspec.Meta:
    """Returns a field's annotation: meaning, unit and bounds; `because` is the reason shown if a bound is violated."""
    bounds: dict[str, Any] = {"ge": ge, "gt": gt, "le": le, "lt": lt}
    return msgspec.Meta(description=meaning, extra={"unit": unit, "because": because}, **bounds)


class Section(msgspec.Struct, frozen=True):
    """A group of fields. Values are validated and converted to the type of their field: 3 becomes 3.0 for a float."""

    SECTION: ClassVar[str] = ""  # its path in the configuration

    def __post_init__(self) -> None:
        for field in fields(type(self)):
            value = getattr(self, field.name)
            fitting = field.fit(value)
            if fitting is not value and not field.is_section:
                msgspec.structs.force_setattr(self, field.name, fitting)


AnySection = TypeVar("AnySection", bound=Section)


class ConfigField(msgspec.Struct, frozen=True):
    """One field, as described by its annotation."""

    name: str
    path: str  # "actor.envs"
    hint: Any  # without callables, which msgspec cannot convert
    takes_functions: bool
    meaning: str
    unit: str
    bounds: str  # "at least 1"
    because: str  # reason for the bounds

    @property
    def is_section(self) -> bool:
        return isinstance(self.hint, type) and issubclass(self.hint, Section)

    @property
    def type(self) -> str:
        return type_text(self.hint) + (" or callable" if self.takes_functions else "")

    @property
    def text(self) -> str:
        """Meaning, unit and bounds: "steps per trajectory, T [steps, at least 1]"."""
        limits = ", ".join(filter(None, (self.unit, self.bounds)))
        return f"{self.meaning} [{limits}]" if limits else self.meaning

    def fit(self, value: Any) -> Any:
        """Returns `value` converted to the type of the field; raises ConfigError if it does not fit."""
        if self.is_section:
            if not isinstance(value, self.hint):
                raise ConfigError(f"{self.path}={value!r} is a section: write {self.hint.__name__}(...).")
            return value
        if self.takes_functions and callable(value):
            return (value,) if typing.get_origin(self.hint) is tuple else value
        if self.takes_functions and isinstance(value, list | tuple) and any(map(callable, value)):
            texts = iter(self.fit([item for item in value if not callable(item)]))
            return tuple(item if callable(item) else next(texts) for item in value)
        try:
            is_printable = _is_printable(value)
        except RecursionError:
            raise ConfigError(f"{self.path} is nested too deeply.") from None
        if not is_printable:
            raise ConfigError(f"{self.path}={value!r:.200} has a character that cannot be printed. Remove it.")
        if isinstance(value, float) and value.is_integer() and unwrapped(self.hint) is int:
            value = int(value)  # 1e6
        try:
            fitting = msgspec.convert(value, self.hint)
        except msgspec.ValidationError as error:
            raise self._misfit(value, str(error)) from None
        if isinstance(fitting, float) and not math.isfinite(fitting):
            raise self._misfit(value, ", got `inf`")
        return fitting

    def _misfit(self, value: Any, error: str) -> ConfigError:
        choices, sequence = options(self.hint), isinstance(value, list | tuple)
        if choices:
            return no_choice(self.path, value, choices)
        if ", got `" not in error and value == value:  # right type and not NaN: the bounds are violated
            because = f": {self.because}" if self.because else f" ({self.meaning})" if self.meaning else ""
            return ConfigError(f"{self.path}={value}{': each' * sequence} must be {self.bounds}{because}.")
        place = error.rpartition("`$[")[2].removesuffix("]`")
        if sequence and place.isdecimal():  # a single item does not fit
            item = type_text(typing.get_args(unwrapped(self.hint))[0])
            return ConfigError(f"{self.path}.{place}={value[int(place)]!r} does not fit: expected {item}.")
        remedy = " Pass what creates it: a class or a function, not an object." if self.takes_functions else ""
        return ConfigError(f"{self.path}={value!r} does not fit: expected {self.type}.{remedy}")


@functools.cache
def fields(cls: type[Section]) -> tuple[ConfigField, ...]:
    """Returns the fields of a section, in the order of their definition."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return tuple(_describe(name, cls, hints[name]) for name in cls.__struct_fields__)


def _is_printable(value: Any) -> bool:
    """Returns whether the texts in `value` can be shown and written: half a surrogate pair and control codes cannot.

    Texts for an environment's constructor may have newlines.
    """
    match value:
        case str():
            return value.isprintable()
        case list() | tuple():
            return all(map(_is_printable, value))
        case dict():
            return all(map(_is_printable, "\n".join(_texts(value)).splitlines()))
    return True


def _texts(value: Any, depth: int = 0) -> Iterator[str]:
    if depth > MAX_DEPTH:
        raise RecursionError
    match value:
        case str():
            yield value
        case list() | tuple():
            for item in value:
                yield from _texts(item, depth + 1)
        case dict():
            yield from _texts([*value.keys(), *value.values()], depth)


def _describe(name: str, cls: type[Section], hint: Any) -> ConfigField:
    metas = list(_metas(hint))
    described = next((meta for meta in metas if meta.description), msgspec.Meta())
    plain, extra = unwrapped(hint), described.extra or {}
    is_tuple = typing.get_origin(plain) is tuple
    choices = typing.get_args(typing.get_args(plain)[0] if is_tuple else plain)
    read = [option for option in choices if typing.get_origin(option) is not Callable]
    takes_functions = len(read) < len(choices)
    texts: Any = functools.reduce(operator.or_, read) if takes_functions else hint
    return ConfigField(
        name=name,
        path=f"{cls.SECTION}.{name}".lstrip("."),
        hint=tuple[texts, ...] if takes_functions and is_tuple else texts,
        takes_functions=takes_functions,
        meaning=described.description or "",
        unit=extra.get("unit", ""),
        bounds=next(filter(None, map(_bounds_text, metas)), ""),
        because=extra.get("because", ""),
    )


def _metas(hint: Any) -> Iterator[msgspec.Meta]:
    if typing.get_origin(hint) is Annotated:
        yield from (meta for meta in hint.__metadata__ if isinstance(meta, msgspec.Meta))
    for inner in typing.get_args(unwrapped(hint)):
        yield from _metas(inner)


def _bounds_text(meta: msgspec.Meta) -> str:
    if meta.ge is not None and meta.le is not None:
        return f"between {meta.ge} and {meta.le}"
    found = {words: getattr(meta, name) for name, words in WORDS.items()}
    return " and ".join(f"{words} {bound}" for words, bound in found.items() if bound is not None)


def unwrapped(hint: Any) -> Any:
    """Returns `hint` without its `Annotated` metadata."""
    return hint.__origin__ if typing.get_origin(hint) is Annotated else hint


def is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (types.UnionType, typing.Union)


def options(hint: Any) -> list[str]:
    """Returns the values of a `Literal`; an empty list for any other type."""
    plain = unwrapped(hint)
    return [str(word) for word in typing.get_args(plain)] if typing.get_origin(plain) is Literal else []


def type_text(hint: Any) -> str:
    """Returns a type as shown to users: int, auto|cpu, int or none, comma-separated int."""
    hint = unwrapped(hint)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "|".join(options(hint))
    if is_union(hint):
        return " or ".join(map(type_text, inner))
    if origin is tuple:
        return f"comma-separated {type_text(inner[0])}"
    if origin is dict:
        return "JSON object"
    names: dict[Any, str] = {types.NoneType: "none", bool: "true|false", float: "finite number"}
    return names.get(hint) or str(hint.__name__)


def option_text(value: Any) -> str:
    """Returns a value as the option of its field takes it: none, true, 64,64, {"size": 3}."""
    match value:
        case None:
            return "none"
        case list() | tuple():
            return ",".join(map(option_text, value)) or "()"
        case bool() | dict():
            return json.dumps(value)
    return str(value) or '""'


def no_choice(path: str, value: Any, choices: list[str]) -> ConfigError:
    return ConfigError(f"{path}={value!r} does not fit: use {' or '.join(choices)}.{guess(str(value), choices)}")


ELSEWHERE = {  # names that other libraries use -> ours
    "lr": "optimizer.learning_rate",
    "max_grad_norm": "optimizer.clip_norm",
    "gamma": "algorithm.discount",
    "clip_range": "algorithm.clip",
    "n_epochs": "algorithm.epochs",
    "ent_coef": "algorithm.entropy_weight",
    "vf_coef": "algorithm.value_weight",
    "tau": "algorithm.target_tau",
    "n_steps": "actor.trajectory",
    "n_envs": "actor.total_envs",
    "num_envs": "actor.total_envs",
    "num_workers": "actor.num_actors",
    "buffer_size": "replay.capacity",
    "learning_starts": "replay.min_size",
    "total_timesteps": "stop.steps",
    "timesteps": "stop.steps",
}


def guess(word: str, known: Mapping[str, str] | list[str]) -> str:
    """Returns " Did you mean ...?" if a known name is close to `word`, else ""; a mapping's value is what is shown."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=CLOSE)
    meant = known[close[0]] if close and isinstance(known, Mapping) else close and close[0]
    return f" Did you mean {meant}?" if close else ""


def near_fields(path: str, known: Iterable[str]) -> str:
    """Returns which of the `known` paths may be meant by the unknown `path`, at most three, and where to look."""
    paths = sorted(known)
    section, _, name = path.rpartition(".")
    if (ours := ELSEWHERE.get(name)) in paths:
        return f" Did you mean {ours}?"
    beside = [other for other in paths if section and other.rpartition(".")[0] == section]
    scores = {other: difflib.SequenceMatcher(None, name, other.rpartition(".")[2]).ratio() for other in beside or paths}
    best = sorted(scores, key=lambda other: -scores[other])[:3]
    close = [other for other in best if scores[other] >= max(CLOSE, scores[best[0]] - CLOSE / 6)]
    if close:
        return f" Did you mean {' or '.join(close)}?"
    sections = {other.partition(".")[0] for other in paths if "." in other}
    if not section and (meant := guess(path, sorted(sections))):
        return f"{meant} That is a section: set its fields."
    if beside:
        return f" Fields there: {', '.join(beside)}."
    return f" The nearest are {', '.join(best)}. `echelon train PRESET --help` lists all fields."


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def require_device(name: str, path: str) -> None:
    """Raises ConfigError unless `name`, the value of the field `path`, has the form of a device."""
    known = re.fullmatch(r"auto|cpu|cuda(:\d+)?", name) is not None
    require(known, f"{path}={name} is not a device: use auto, cpu, cuda or cuda:N.")


def require_address(address: str, path: str) -> None:
    """Raises ConfigError unless `address`, the value of the field `path`, has the form tcp://HOST:PORT."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    require(
        address.startswith("tcp://") and bool(host) and port.isdecimal() and int(port) < 65_536,
        f"{path}={address} is not an address. Write tcp://HOST:PORT; port 0 takes any free port.",
    )
