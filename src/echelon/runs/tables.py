"""Tables of plain text, and the forms of the figures in them."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.errors import escaped
from echelon.runs.report import duration, number_text

MISSING = "-"


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[str] = ()) -> list[str]:
    """Returns the lines of a table. Columns are aligned to the right, those named in `left` to the left."""
    cells = [list(header), *([escaped(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = [
            cell.ljust(width) if name in left else cell.rjust(width)
            for name, cell, width in zip(header, row, widths, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return lines


def return_text(value: float | None) -> str:
    return MISSING if value is None else number_text(value)


def count_text(value: float | None) -> str:
    return MISSING if value is None else f"{value:,.0f}"


def time_text(seconds: float | None) -> str:
    return MISSING if seconds is None else duration(seconds)


def age_text(seconds: float) -> str:
    """Returns how long ago something was, in one unit: 40 s, 12 min, 5 h, 3 d."""
    for unit, length, limit in (("s", 1, 60), ("min", 60, 3600), ("h", 3600, 86_400)):
        if seconds < limit:
            return f"{max(0, int(seconds // length))} {unit}"
    return f"{int(seconds // 86_400)} d"
