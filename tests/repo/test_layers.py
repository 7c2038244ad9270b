"""Imports go down only. They are read from the source, so lazy imports count too."""

import ast
import functools
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "vivace"
LAYERS = {
    "errors": 0,
    "foreign": 0,
    "hardware": 0,
    "spec": 0,
    "stats": 0,
    "contract": 1,
    "families": 1,
    "lint": 1,
    "report": 1,
    "kernels": 1,
    "samplers": 1,
    "models": 2,
    "measure": 2,
    "attention_backends": 2,
    "compilation": 2,
    "offloading": 2,
    "quantization": 2,
    "step_caching": 2,
    "resolution": 2,
    "lora": 3,
    "guidance": 3,
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
SIDEWAYS = {
    ("spec", "errors"),
    ("stats", "errors"),
    ("foreign", "errors"),
    ("hardware", "errors"),
    ("multi_gpu", "fused"),
}
# Libraries that import torch; `report` and `spec` must not import them.
IMPORTED_LATE = {
    "vivace.fused.convolutions",
    "vivace.fused.first_norm",
    "vivace.fused.flux_forward",
    "vivace.fused.flux_weights",
    "vivace.fused.image_operations",
    "vivace.fused.modulations",
    "vivace.fused.products",
    "vivace.fused.scales",
    "vivace.fused.text_projections",
    "vivace.fused.unet_blocks",
    "vivace.fused.vae_blocks",
    "vivace.kernels.convolution",
    "vivace.kernels.cross_attention",
    "vivace.kernels.dequantize_int4",
    "vivace.kernels.geglu",
    "vivace.kernels.group_norm",
    "vivace.kernels.norm_modulate",
    "vivace.kernels.peer_barrier",
    "vivace.kernels.qk_norm_rope",
    "vivace.kernels.quantize",
    "vivace.kernels.reference",
    "vivace.kernels.residual",
    "vivace.kernels.skinny_product",
    "vivace.multi_gpu.flux_tokens",
    "vivace.multi_gpu.collectives",
    "vivace.multi_gpu.fused_exchange",
    "vivace.multi_gpu.peer_memory",
}
"""Triton's kernels are compiled from a module's own names, and torch's operators and modules and diffusers' blocks are
made where a module is read; these are imported where they are used."""
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


def test_imports_go_down_only() -> None:
    wrong = []
    for path in FILES:
        here = package(path)
        for module, _ in imports(path) if here != "__init__" else ():
            parts = module.split(".")
            if parts[0] == "tinyworld":
                wrong.append(f"{_name(path)} imports tinyworld, which is not in the wheel")
            if parts[0] != "vivace" or len(parts) < 2 or parts[1] == here:
                continue
            if LAYERS[parts[1]] >= LAYERS[here] and (here, parts[1]) not in SIDEWAYS:
                wrong.append(f"{_name(path)} imports {module}")
    assert not wrong


def test_heavy_libraries_are_imported_lazily() -> None:
    wrong = []
    for path in FILES:
        if _name(path) in IMPORTED_LATE:
            continue
        for module, at_top in imports(path):
            if module in IMPORTED_LATE and at_top:
                wrong.append(f"{_name(path)} imports {module}, and with it torch, when it is imported itself")
            if module.split(".")[0] in HEAVY and (at_top or package(path) in {"spec", "stats", "report"}):
                wrong.append(f"{_name(path)} imports {module}")
    assert not wrong


def test_what_is_imported_late_exists() -> None:
    assert set(IMPORTED_LATE) <= {_name(path) for path in FILES}


def test_every_package_has_a_layer() -> None:
    assert {package(p) for p in FILES} - {"__init__"} <= set(LAYERS)


def test_files_stay_short() -> None:
    root = SOURCE.parents[1]
    beside = [path for room in ("benchmarks", "docs", "tinyworld") for path in (root / room).glob("*.py")]
    assert len(beside) > 50
    lengths = {str(path.relative_to(root)): len(path.read_text().splitlines()) for path in [*FILES, *beside]}
    assert not {name: length for name, length in lengths.items() if length > 400}


def test_no_package_is_too_large() -> None:
    """No package holds more than a quarter of the source."""
    lines: Counter[str] = Counter()
    for path in FILES:
        lines[package(path)] += len(path.read_text().splitlines())
    largest, number = lines.most_common(1)[0]
    assert number <= 0.25 * lines.total(), f"{largest} has {number} of {lines.total()} lines"
