"""Imports go down only. They are read from the source, so lazy imports count too."""

import ast
from collections import Counter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "vivace"
LAYERS = {
    "errors": 0,
    "foreign": 0,
    "spec": 0,
    "stats": 0,
    "contract": 1,
    "families": 1,
    "lint": 1,
    "report": 1,
    "kernels": 1,
    "models": 2,
    "measure": 2,
    "attention_backends": 2,
    "compilation": 2,
    "offloading": 2,
    "quantization": 2,
    "step_caching": 2,
    "resolution": 2,
    "adapters": 3,
    "fused": 3,
    "profiling": 3,
    "multi_gpu": 3,
    "techniques": 4,
    "recipes": 5,
    "runtime": 6,
    "memory": 7,
    "export": 7,
    "benchmark": 8,
    "studies": 9,
    "advice": 10,
    "tuning": 10,
    "cli": 11,
    "__main__": 12,
}
SIDEWAYS = {("spec", "errors"), ("stats", "errors"), ("foreign", "errors")}
# Libraries that import torch; `report` and `spec` must not import them.
IMPORTED_LATE = {
    "vivace.kernels.dequantize_int4",
    "vivace.kernels.norm_modulate",
    "vivace.kernels.qk_norm_rope",
    "vivace.kernels.quantize",
    "vivace.kernels.reference",
    "vivace.kernels.skinny_product",
    "vivace.multi_gpu.flux_tokens",
    "vivace.multi_gpu.collectives",
}
"""Triton's kernels are compiled from a module's own names, and torch's operators and diffusers' blocks are made where a
module is read; these are imported where they are used."""
HEAVY = {"torch", "diffusers", "transformers", "torchao", "accelerate"}


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
    found = []
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append((node.module or "", id(node) in top))
    return found


FILES = sorted(SOURCE.rglob("*.py"))


def package(path: Path) -> str:
    relative = path.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def _name(path: Path) -> str:
    return ".".join(("vivace", *path.relative_to(SOURCE).with_suffix("").parts))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_down_only(path: Path) -> None:
    here = package(path)
    if here == "__init__":
        return
    for module, _ in imports(path):
        parts = module.split(".")
        if parts[0] == "tinyworld":
            pytest.fail(f"{path.name} imports tinyworld, which is not in the wheel")
        if parts[0] != "vivace" or len(parts) < 2 or parts[1] == here:
            continue
        there = parts[1]
        assert LAYERS[there] < LAYERS[here] or (here, there) in SIDEWAYS, (
            f"{here} imports {there} ({path.name})"
        )


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_heavy_libraries_are_imported_lazily(path: Path) -> None:
    for module, at_top in imports(path):
        if module in IMPORTED_LATE and _name(path) not in IMPORTED_LATE:
            assert not at_top, f"{path.name} imports {module}, and with it torch, when it is imported itself"
        if module.split(".")[0] in HEAVY and _name(path) not in IMPORTED_LATE:
            assert not at_top, f"{path.name} imports {module} when it is imported itself"
            assert package(path) not in {"spec", "stats", "report"}, f"{path.name} imports {module}"


def test_every_package_has_a_layer() -> None:
    assert {package(p) for p in FILES} - {"__init__"} <= set(LAYERS)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_files_stay_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


def test_no_package_is_too_large() -> None:
    """No package holds more than a quarter of the source."""
    lines: Counter[str] = Counter()
    for path in FILES:
        lines[package(path)] += len(path.read_text().splitlines())
    largest, number = lines.most_common(1)[0]
    assert number <= 0.25 * lines.total(), f"{largest} has {number} of {lines.total()} lines"
