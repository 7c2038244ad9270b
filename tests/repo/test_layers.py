"""Imports go down only. They are read from the source, so lazy imports count too."""

import ast
import functools
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "vivace"
LAYERS = {
    "errors": 0,
    "foundation.untrusted": 0,
    "foundation.hardware": 0,
    "foundation.spec": 0,
    "foundation.stats": 0,
    "plugins": 0,
    "architectures": 1,
    "answers": 1,
    "machinery.technique": 2,
    "evidence.lint": 2,
    "report": 2,
    "foundation.processes": 2,
    "machinery.kernels": 2,
    "machinery.samplers": 2,
    "machinery.tiny_vaes": 2,
    "models": 3,
    "measure": 3,
    "machinery.attention_backends": 3,
    "machinery.compilation": 3,
    "machinery.offloading": 3,
    "machinery.quantization": 3,
    "machinery.step_caching": 3,
    "machinery.lora": 4,
    "machinery.guidance": 4,
    "machinery.fused": 4,
    "measure.profiling": 4,
    "machinery.multi_gpu": 4,
    "runtime.saved": 4,
    "techniques": 5,
    "recipes": 6,
    "runtime": 7,
    "measure.calibrating": 8,
    "runtime.memory": 8,
    "runtime.export": 8,
    "benchmark": 9,
    "evidence": 10,
    "evidence.studies": 11,
    "benchmark.load_testing": 11,
    "evidence.recommendation": 12,
    "serve": 12,
    "tuning": 12,
    "proofs": 12,
    "entry_points": 13,
    "cli": 14,
    "__main__": 15,
}
SIDEWAYS = {
    ("foundation.spec", "errors"),
    ("foundation.spec", "foundation.untrusted"),
    ("foundation.stats", "errors"),
    ("foundation.untrusted", "errors"),
    ("foundation.hardware", "errors"),
    ("machinery.multi_gpu", "machinery.fused"),
}
LATE_ROOMS = (
    "machinery.fused",
    "machinery.kernels",
    "machinery.multi_gpu",
    "machinery.compilation",
    "machinery.attention_backends",
    "machinery.tiny_vaes",
)
"""Triton's kernels are compiled from a module's own names, and torch's operators and modules and diffusers' blocks are
made where a module is read; files of these rooms that do so are imported where they are used."""
HEAVY = {"torch", "diffusers", "transformers", "torchao", "accelerate"}


@functools.cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """Return (imported module, whether at the top level) for each import of a file."""
    tree = ast.parse(path.read_text())
    guarded = {
        id(child)
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    top = {id(node) for node in tree.body}
    imported = []
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Import):
            imported += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            imported.append((node.module or "", id(node) in top))
    return imported


FILES = sorted(SOURCE.rglob("*.py"))


def room(*parts: str) -> str:
    """Return the package that has a layer: the longest beginning of the path that is named in LAYERS."""
    beginnings = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in beginnings if name in LAYERS), parts[0])


def package(path: Path) -> str:
    return room(*path.relative_to(SOURCE).with_suffix("").parts)


def _name(path: Path) -> str:
    return ".".join(("vivace", *path.relative_to(SOURCE).with_suffix("").parts))


def test_imports_go_down_only() -> None:
    wrong = []
    for path in FILES:
        here = package(path)
        for module, _ in imports(path) if here != "__init__" else ():
            parts = module.split(".")
            if parts[0] == "tinyworld":
                wrong.append(f"{_name(path)} imports tinyworld, which is not in the wheel")
            if parts[0] != "vivace" or len(parts) < 2 or (there := room(*parts[1:])) == here:
                continue
            if LAYERS[there] >= LAYERS[here] and (here, there) not in SIDEWAYS:
                wrong.append(f"{_name(path)} imports {module}")
    assert not wrong


def test_no_files_import_each_other() -> None:
    """A circle inside a package hides which of its files can be read without the others."""
    modules = {_name(path).removesuffix(".__init__"): path for path in FILES}
    imported = {
        name: {module for module, _ in imports(path)} & set(modules) for name, path in modules.items()
    }
    for name, path in modules.items():
        froms = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        names = {alias.name for node in froms for alias in node.names}
        packages = {module for module in imported[name] if modules[module].name == "__init__.py"}
        imported[name] |= {f"{package}.{each}" for package in packages for each in names} & set(modules)
        imported[name] -= {name, *packages}
    circle: list[str] = []
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        circle = error.args[1]
    assert not circle, " imports ".join(reversed(circle))


def _imports_at_top(path: Path, modules: set[str]) -> bool:
    names = [name for name, at_top in imports(path) if at_top]
    return bool(modules.intersection([*names, *(name.split(".")[0] for name in names)]))


def test_heavy_libraries_are_imported_lazily() -> None:
    """`report` and `foundation` must not import them at all."""
    wrong = []
    late = {_name(path) for path in FILES if package(path) in LATE_ROOMS and _imports_at_top(path, HEAVY)}
    late |= {_name(path) for path in FILES if package(path) in LATE_ROOMS and _imports_at_top(path, late)}
    for path in FILES:
        if _name(path) in late:
            continue
        for module, at_top in imports(path):
            if module in late and at_top:
                wrong.append(f"{_name(path)} imports {module}, and with it torch, when it is imported itself")
            if module.split(".")[0] in HEAVY and (
                at_top or package(path).startswith(("foundation", "report", "answers"))
            ):
                wrong.append(f"{_name(path)} imports {module}")
    assert not wrong


def test_every_package_has_a_layer() -> None:
    files = [path for path in FILES if path.name != "__init__.py" or imports(path)]
    assert {package(path) for path in files} - {"__init__"} <= set(LAYERS)


def test_the_documented_layers_are_these() -> None:
    page = (SOURCE.parents[1] / "docs" / "architecture.md").read_text()
    documented = {}
    for line in page.partition("```\n14")[2].partition("```")[0].join(["14", ""]).splitlines():
        layer, _, names = line.strip().partition(" ")
        for group in re.split(r"\s{3,}", names.strip()):
            folder, _, rooms = group.rpartition(": ")
            prefix = f"{folder}." if folder else ""
            documented |= {prefix + room: int(layer) for room in rooms.split(", ")}
    assert documented == {name: layer for name, layer in LAYERS.items() if name != "__main__"}
