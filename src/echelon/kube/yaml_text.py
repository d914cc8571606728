"""Manifests as YAML: plain data in block style, the same bytes for the same data."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

# Texts that every YAML parser reads as this text without quotes; all others are quoted as in JSON, which is YAML, too.
PLAIN = re.compile(r"/?[A-Za-z][A-Za-z0-9_./-]*")
BREAKS = re.compile("[\x85\u2028\u2029]")  # line breaks in YAML, but not in JSON
WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}  # which YAML 1.1 reads as something else


def to_yaml(documents: Sequence[Mapping[str, Any]]) -> str:
    """Returns the documents as one YAML stream. They consist of mappings, lists, texts, whole numbers and booleans."""
    return "---\n".join("".join(f"{line}\n" for line in _lines(document)) for document in documents)


def _lines(value: Any) -> list[str]:
    lines: list[str] = []
    if isinstance(value, Mapping):
        for key, item in value.items():
            lines += _entry(f"{_scalar(key)}:", item, "  ")
    else:
        for item in value:
            first, *rest = _lines(item) if _is_block(item) else [_scalar(item)]
            lines += [f"- {first}", *(f"  {line}" for line in rest)]
    return lines


def _entry(key: str, item: Any, indent: str) -> list[str]:
    if _is_block(item):
        return [key, *(indent + line for line in _lines(item))]
    return [f"{key} {_scalar(item)}"]


def _is_block(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple) and len(value) > 0


def _scalar(value: Any) -> str:
    match value:
        case str() if PLAIN.fullmatch(value) and value.lower() not in WORDS:
            return value
        case str():
            quoted = json.dumps(value, ensure_ascii=False)
            return BREAKS.sub(lambda found: f"\\u{ord(found[0]):04x}", quoted)
        case bool() | int():
            return json.dumps(value)
        case Mapping():
            return "{}"
        case list() | tuple():
            return "[]"
    raise TypeError(f"a manifest cannot hold {value!r}")
