"""The page of `echelon bench plot`: one HTML file with everything in it, that loads nothing from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2430; background: #fff; max-width: 1180px; margin: 2rem auto;
       padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: 0 } h2 { font-size: 1.1rem; margin-top: 2rem }
p { color: #5f6670; margin-top: .3rem }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 500px), 1fr)); gap: 1rem }
img { width: 100%; height: auto; border: 1px solid #e3e6ea; border-radius: 6px }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #e3e6ea; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
th { font-weight: 600; background: #f6f7f9 }
.facts td { text-align: left; white-space: normal }
"""


@dataclass(frozen=True, slots=True)
class Page:
    """What a page shows: figures by name, and tables that are HTML already."""

    title: str
    lead: str
    images: Mapping[str, bytes]
    sections: tuple[str, ...]


def page_of(page: Page, name: str) -> str:
    """The page of the report `name`."""
    title = page.title
    figures = "".join(
        f'<img alt="{escape(what)}: {escape(title)}" src="data:image/png;base64,{base64.b64encode(image).decode()}">\n'
        for what, image in page.images.items()
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}: {escape(name)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p>{escape(name)}: {escape(page.lead)}</p>
<div class="figures">
{figures}</div>
{"".join(page.sections)}</body>
</html>
"""


def facts(title: str, values: Any) -> str:
    """A table of names and values; nothing where there are none."""
    if not isinstance(values, dict) or not values:
        return ""
    rows = "".join(
        f"<tr><td>{escape(str(key))}</td><td>{escape(number(value))}</td></tr>\n"
        for key, value in values.items()
        if value is not None
    )
    return section(title, f'<table class="facts">\n{rows}</table>')


def section(title: str, content: str) -> str:
    return f'<h2>{escape(title)}</h2>\n<div class="wide">{content}</div>\n'


def table(head: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    titles = "".join(f"<th>{escape(each)}</th>" for each in head)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(each)}</td>' for each in row)}</tr>\n" for row in body)
    return f"<table>\n<tr>{titles}</tr>\n{rows}</table>"


def number(value: Any) -> str:
    """A number as people read it; other values as they are."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}" if value >= 100 else f"{value:.3g}"
