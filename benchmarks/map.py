"""A map of the sources: their size, and how many files a reader needs to know.

    make map                                                          # or, with options:
    python benchmarks/map.py [CHECKOUT] [--static] [--verbose] [--json FILE]

CHECKOUT is by default this one; with another one, before and after can be compared. It prints the lines and files of
each folder of `src/echelon`, the modules behind `echelon train`, the files on the walk of one environment step through
three runs, the mode switches outside `Plan`, and the class names that are used twice. The runs take a minute and are
traced in separate processes; `--static` skips them. `--verbose` lists what is counted.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mapping import switches, walks

Report = dict[str, Any]


def lines_of(file: Path) -> int:
    return len(file.read_text().splitlines())


def folders(package: Path) -> dict[str, tuple[int, int]]:
    """Returns the lines and files of each folder, including its subfolders."""
    found: dict[str, tuple[int, int]] = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package).parts
        name = parts[0] if len(parts) > 1 else "."
        lines, files = found.get(name, (0, 0))
        found[name] = (lines + lines_of(file), files + 1)
    return found


def show_folders(package: Path, report: Report) -> None:
    report["folders"] = found = folders(package)
    print(f"{'folder':<16} {'lines':>7} {'files':>6}")
    for name, (lines, files) in sorted(found.items(), key=lambda item: -item[1][0]):
        print(f"{name:<16} {lines:>7,} {files:>6}")
    lines, files = (sum(sizes) for sizes in zip(*found.values(), strict=True))
    print(f"{'src/echelon':<16} {lines:>7,} {files:>6}")
    report["lines"], report["files"] = lines, files


def show_modules(checkout: Path, folder: Path, report: Report, *, verbose: bool) -> None:
    print("\nmodules behind `echelon train impala CartPole-v1`, all processes together ...", flush=True)
    names = walks.modules_behind_train(checkout, folder)
    files = [file for name in names if (file := _file_of(checkout, name))]
    lines = sum(map(lines_of, files))
    print(f"{len(files)} modules, {lines:,} lines")
    if verbose:
        print("  " + " ".join(names))
    report["modules_behind_train"] = {"count": len(files), "lines": lines, "names": names}


def _file_of(checkout: Path, module: str) -> Path | None:
    path = checkout / "src" / Path(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


def show_walks(checkout: Path, folder: Path, report: Report, *, verbose: bool) -> None:
    print(f"\nfiles on the walk\n{walks.DEFINITION}", flush=True)
    report["walks"] = {}
    for number, (name, words) in enumerate(walks.WALKS.items()):
        print(f"{name:<18} ", end="", flush=True)
        walk = walks.walk(checkout, folder / str(number), words)
        roles = ", ".join(f"{role} {len(files)}" for role, files in walk.by_role.items())
        print(f"{len(walk.files):>3} files ({roles}); {len(walk.at_times)} more at times", flush=True)
        if verbose:
            for role, files in {**walk.by_role, "at times": walk.at_times}.items():
                print(f"  {role}: {' '.join(files)}")
        report["walks"][name] = asdict(walk)


def show_switches(package: Path, report: Report, *, verbose: bool) -> None:
    found = switches.switches(package)
    asked = [one for one in found if not one.is_check]
    print(f"\nmode switches outside Plan\n{switches.DEFINITION}")
    kinds = ", ".join(f"{kind} {count}" for kind, count in Counter(one.kind for one in asked).most_common())
    print(f"{len(asked)} switches{f' ({kinds})' if asked else ''}; {len(found) - len(asked)} checks")
    for name, count in Counter(one.file for one in asked).most_common(None if verbose else 10):
        print(f"  {name:<34} {count:>3}")
        for one in (one for one in asked if verbose and one.file == name):
            print(f"      {one.file}:{one.line}: {one.kind}: {one.text}")
    report["switches"] = [asdict(one) for one in found]


def show_classes(package: Path, report: Report, *, verbose: bool) -> None:
    report["repeated_classes"] = found = switches.repeated_classes(package)
    print(f"\nclass names defined more than once: {len(found)}")
    if not verbose:
        print(f"  {', '.join(found)}")
        return
    for name, places in found.items():
        print(f"  {name:<18} {', '.join(places)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    here = Path(__file__).resolve().parent.parent
    parser.add_argument(
        "checkout", metavar="CHECKOUT", nargs="?", type=Path, default=here, help="the checkout (default: this one)"
    )
    parser.add_argument("--static", action="store_true", help="skip the runs")
    parser.add_argument("--verbose", action="store_true", help="list what is counted")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    package = checkout / "src" / "echelon"
    if not package.is_dir():
        raise SystemExit(f"{checkout} has no src/echelon: name a checkout of this project.")
    report: Report = {}
    show_folders(package, report)
    if not options.static:
        with tempfile.TemporaryDirectory(prefix="map-") as folder:
            show_modules(checkout, Path(folder) / "modules", report, verbose=options.verbose)
            show_walks(checkout, Path(folder) / "walks", report, verbose=options.verbose)
    show_switches(package, report, verbose=options.verbose)
    show_classes(package, report, verbose=options.verbose)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
