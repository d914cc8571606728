"""The arrows between the parts: who may import whom, read from the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import echelon

ROOT = Path(echelon.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
MAX_LINES = 400

GROUND = {
    *("names", "families", "errors", "fields", "control_groups", "memory_check", "interrupts", "config", "config_io"),
    *("layout", "schema"),
}
LEARNING = {"objectives", "layers", "networks", "custom_network", "algorithms"}
PLANES = {"transport", "engines", "world", "hosts"}

# Each part and the other parts it may import. A new part gets a row here, after a look at the design.
ALLOWED: dict[str, set[str]] = {
    "version": set(),
    "errors": set(),
    "disk": set(),
    "control_groups": set(),
    "memory_check": {"errors", "control_groups"},
    "status_file": {"errors", "disk"},
    "interrupts": set(),
    "names": {"errors"},
    "families": set(),
    "fields": {"errors"},
    "sections": {"fields"},
    "run_sections": {"fields"},
    "kube": {"errors", "fields"},
    "algorithm_config": {"errors", "fields"},
    "config": {"errors", "fields", "sections", "run_sections", "algorithm_config"},
    "config_io": {"errors", "names", "fields", "config"},
    "config_page": {"fields", "config"},
    "video": {"errors"},
    "presets": {"errors", "families", "fields", "algorithm_config", "config"},
    "layout": set(),
    "schema": {"errors", "layout"},
    "objectives": {"errors", "schema"},
    "layers": {"errors", "schema"},
    "networks": {"errors", "config", "schema", "layers"},
    "custom_network": {"errors", "names", "config", "schema", "layers", "networks"},
    "algorithms": {
        "errors",
        "memory_check",
        "names",
        "config",
        "presets",
        "layout",
        "schema",
        "objectives",
        "layers",
        "networks",
    }
    | {"custom_network"},
    "transport": {"errors", "disk", "layout", "schema"},
    "trust": {"errors", "names", "config", "transport"},
    "engines": {"errors", "disk", "schema", "transport"},
    "world": {"errors", "control_groups", "disk", "schema", "transport", "engines"},
    "hosts": {
        "version",
        "errors",
        "control_groups",
        "disk",
        "memory_check",
        "status_file",
        "interrupts",
        "transport",
        "engines",
        "world",
    },
    "replay": {"errors", "disk", "memory_check", "layout", "schema", "config", "transport"},
    "servers": {"errors", "config", "layout", "schema", "transport", "engines", "world", "replay"} | LEARNING,
    "envs": {"errors", "interrupts", "names", "families", "config", "layout", "schema"},
    "runs": {"errors", "disk", "memory_check", "config", "config_io", "fields", "names", "schema", "trust"},
    "policy": {"errors", "disk", "config", "schema", "layers", "networks", "algorithms", "envs", "runs"},
    "export": {"errors", "disk", "schema", "layers", "networks", "runs", "policy"},
    "config_files": {"errors", "fields", "config", "config_io", "runs"},
    "frames": {"errors", "names", "objectives", "replay", "servers", "world", "runs"},
    "callbacks": {"errors", "names", "disk", "fields", "config", "config_io", "runs"},
    "roles": GROUND | LEARNING | PLANES | {"version", "callbacks", "disk", "replay", "servers", "envs", "runs"},
    "process_state": set(),
    "evaluation": GROUND | LEARNING | {"video", "envs", "runs", "roles", "process_state", "policy"},
    "running": GROUND | LEARNING | PLANES | {"callbacks", "envs", "runs", "roles", "process_state"},
    "training": GROUND | {"runs", "roles", "running"},
    "asynchronous": GROUND
    | LEARNING
    | PLANES
    | {"version", "replay", "envs", "roles", "presets", "training", "process_state", "status_file", "trust"},
    "__init__": {"version", "config", "policy", "evaluation", "training", "presets", "asynchronous", "runs"},
    "bench": GROUND
    | LEARNING
    | PLANES
    | {"replay", "servers", "envs", "runs", "roles", "presets", "training", "asynchronous", "__init__"},
    "cli": GROUND
    | {"config_files"}
    | LEARNING
    | PLANES
    | {
        "replay",
        "servers",
        "envs",
        "runs",
        "callbacks",
        "roles",
        "presets",
        "video",
        "policy",
        "export",
        "evaluation",
        "training",
        "asynchronous",
        "bench",
        "kube",
        "__init__",
    },
}


def part_of(path: Path) -> str:
    """The part a module belongs to: its folder, or its own name at the top."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> dict[str, int]:
    """The parts of Echelon that a module imports, anywhere in it, and a line where it does."""
    found: dict[str, int] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively; name the module in full"
            inside = node.module == "echelon"
            names = [f"echelon.{alias.name}" for alias in node.names] if inside else [node.module or ""]
        for name in names:
            top, _, rest = name.partition(".")
            if top == "echelon":
                part = rest.partition(".")[0]
                known = (ROOT / part).is_dir() or (ROOT / f"{part}.py").is_file()
                found[part if known and part else "__init__"] = node.lineno
    return found


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_only_what_its_part_may(path: Path) -> None:
    part = part_of(path)
    assert part in ALLOWED, f"{part} is a new part: say in ALLOWED what it may import"
    for other, line in imported_parts(path).items():
        assert other == part or other in ALLOWED[part], f"{path}:{line}: {part} must not import {other}"


def test_the_arrows_have_no_cycle_and_the_planes_know_no_algorithm_and_no_role() -> None:
    for part in PLANES:
        assert not ALLOWED[part] & (LEARNING | {"roles", "envs", "presets", "training", "config"}), part
    for part in LEARNING:
        assert not ALLOWED[part] & (PLANES | {"roles", "runs", "envs"}), part
    assert "roles" not in ALLOWED["runs"]
    above: set[str] = set()
    for part, imported in ALLOWED.items():  # every arrow points upwards in the table, so there is no cycle
        assert imported <= above, f"{part} may import {imported - above}, which stands below it"
        above.add(part)


def test_the_reader_of_imports_sees_them(tmp_path: Path) -> None:
    source = "import echelon.roles.actor\ndef f():\n    from echelon.world import world\nfrom echelon import train\n"
    module = tmp_path / "module.py"
    module.write_text(source)
    assert imported_parts(module) == {"roles": 1, "world": 3, "__init__": 4}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_is_short_and_unpickles_nothing(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES, f"{path} is longer than {MAX_LINES} lines: part it"
    forbidden_modules = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            assert not {alias.name for alias in node.names} & forbidden_modules, f"{path}:{node.lineno}"
        if isinstance(node, ast.ImportFrom):
            assert node.module not in forbidden_modules, f"{path}:{node.lineno}"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("torch.load", "eval", "exec", "np.load", "numpy.load"), f"{path}:{node.lineno}"
