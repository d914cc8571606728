"""Compares two checkouts of this project on one machine, to verify that a change does not affect behaviour:

    python benchmarks/goldens.py OLD NEW [--only hashes,names,folders,examples,figures] [--figures NAME,...]
        [--pairs 4] [--json FILE]

OLD and NEW are folders with `src`. This Python runs both, with their `src` on its path. Sections:

    hashes    the weights of short runs of every preset, inline and in lock-step, are bit-identical
    names     public names with their signatures, commands and options with type and default; NEW may add some
    folders   NEW evaluates and resumes run folders that OLD wrote
    examples  OLD's example programs run under NEW
    figures   the processor time per environment step, summed over all roles, is at most 1 / 0.97 of OLD's; the median
              round trip of a call with 1 KB is at most 110 % of OLD's. Needs an otherwise idle machine.

Prints a line for every comparison, then a table of the differences, and exits with 1 if there are any. All sections
take about half an hour on two cores, most of it for `figures` with four pairs. For recovery after faults, run chaos.py
in both checkouts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from golden import examples, figures, folders, hashes, names
from golden.checkout import Checkout, Row

SECTIONS = ("hashes", "names", "folders", "examples", "figures")
COMPARISONS = {  # sections without options
    "hashes": hashes.compare,
    "names": names.compare,
    "folders": folders.compare,
    "examples": examples.compare,
}
WIDTH = 70  # of a cell
REMIND_S = 20.0


def chosen(text: str, known: tuple[str, ...], option: str) -> list[str]:
    """Returns the names of a comma-separated list; exits if one is unknown."""
    words = [word for word in text.split(",") if word]
    if unknown := [word for word in words if word not in known]:
        raise SystemExit(f"{option}: {unknown[0]!r} is unknown; use one of {', '.join(known)}.")
    return words


class Progress:
    """Prints lines with the time since the start of the section, and a reminder after a while without output."""

    def __init__(self, section: str) -> None:
        self._section = section
        self._began = self._printed = time.monotonic()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._remind, daemon=True)

    def __enter__(self) -> Progress:
        self(f"{self._section}: begins")
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def __call__(self, text: str) -> None:
        self._printed = time.monotonic()
        print(f"[{self._printed - self._began:5.0f} s] {text}", flush=True)

    def _remind(self) -> None:
        while not self._is_over.wait(1.0):
            if time.monotonic() - self._printed > REMIND_S:
                self(f"{self._section}: ...")


def compare(section: str, old: Checkout, new: Checkout, options: argparse.Namespace) -> Iterator[Row]:
    with Progress(section) as tell:
        if section == "figures":
            chosen_figures = chosen(options.figures, figures.FIGURES, "--figures")
            yield from figures.compare(old, new, tell, chosen_figures, options.pairs)
        else:
            yield from COMPARISONS[section](old, new, tell)


def excerpts(old: str, new: str) -> list[str]:
    """Returns both texts, or for long texts the parts where they start to differ."""
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False)))
    start = max(same - WIDTH // 2, 0) if max(len(old), len(new)) > WIDTH else 0
    cut = [f"{'...' if start else ''}{text[start : start + WIDTH]}" for text in (old, new)]
    return [f"{part}..." if len(text) > start + WIDTH else part for part, text in zip(cut, (old, new), strict=True)]


def table(rows: list[Row]) -> str:
    """Returns the table: all rows of the small sections, and only the differing names."""
    lines = [f"{'section':<9} {'verdict':<8} {'item':<44} OLD | NEW | note"]
    for row in rows:
        cells = excerpts(row.old, row.new)
        if row.section == "hashes" and row.verdict == "same":
            cells = [row.old[:12], row.new[:12]]
        lines.append(f"{row.section:<9} {row.verdict:<8} {row.item:<44} {' | '.join([*cells, row.note])}".rstrip(" |"))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0].rstrip(":"), formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("old", metavar="OLD", type=Path, help="the reference checkout")
    parser.add_argument("new", metavar="NEW", type=Path, help="the checkout to compare")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, comma-separated (all)")
    parser.add_argument("--figures", default=",".join(figures.FIGURES), help="figures, comma-separated (all)")
    parser.add_argument("--pairs", type=int, default=4, help="runs of each side for a figure (4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows to FILE")
    options = parser.parse_args()
    sections = chosen(options.only, SECTIONS, "--only")
    chosen(options.figures, figures.FIGURES, "--figures")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that its runs end, too
    folder = Path(tempfile.mkdtemp(prefix="goldens-"))
    old = Checkout("OLD", options.old.resolve(), folder / "old")
    new = Checkout("NEW", options.new.resolve(), folder / "new")
    rows: list[Row] = []
    try:
        for section in sections:
            for row in compare(section, old, new, options):
                rows.append(row)  # one by one, so that an interrupted section shows its rows, too
    finally:
        if options.json:
            options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        print(f"\n{table(rows)}")
    verdicts = Counter(row.verdict for row in rows)
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))
    if verdicts["differs"]:
        print(f"run folders and outputs are kept in {folder}")
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("goldens: interrupted")
