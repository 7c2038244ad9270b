"""Outside of their own package and their fused forms, architectures are asked for and never named.

Samplers are no architectures: techniques and checks of schedulers may name their classes.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from vivace.architectures import FAMILIES

SOURCE = Path(__file__).parents[2] / "src" / "vivace"
KNOWING = ("architectures", "machinery/fused")
EXCEPTIONS = {
    "techniques/tiny_vae.py": "this class, and the script that loads it, are what the technique is",
    "techniques/fuse_qkv.py": "attention processors that several architectures share, which diffusers can fuse",
}
_CLASSES = re.compile(
    r"\b(?!(?:Diffusion|AutoPipeline)\w*Pipeline\b)[A-Z]\w*(?:Pipeline|Transformer\w*Model|UNet\w*Model|ControlNet\w*Model)\b"
    r"|\bAutoencoder\w+|\b[A-Z]\w*AttnProcessor"
)
_NAMES = re.compile("|".join(rf"\b{re.escape(family.name)}(?![\w.])" for family in FAMILIES))


def texts(path: Path) -> Iterator[str]:
    """Yield the strings of a file that are no docstrings."""
    tree = ast.parse(path.read_text())
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def test_components_are_asked_and_not_recognised_by_name() -> None:
    naming: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE).as_posix()
        if not name.startswith(KNOWING):
            every = {m.group() for text in texts(path) for p in (_CLASSES, _NAMES) for m in p.finditer(text)}
            naming |= {name: every} if every else {}
    assert naming.keys() == EXCEPTIONS.keys(), naming
    assert len(EXCEPTIONS) <= 6
