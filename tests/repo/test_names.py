"""Names say what they hold: participles and pronouns are no names, and public names cost few imports."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VAGUE = {
    *("found", "one", "told", "known", "wanted", "given", "said"),
    *("taken", "worth", "asked", "shown", "seen", "judged"),
}
MOST_PER_THOUSAND = {"src/vivace": 0.5, "benchmarks": 0.5, "docs": 0.5, "tests": 1.0}


def identifiers(path: Path) -> Iterator[str]:
    """Yield every name, attribute, argument and definition of a file."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name


@pytest.mark.parametrize("folder", MOST_PER_THOUSAND)
def test_names_say_what_they_hold(folder: str) -> None:
    counts = Counter(name.strip("_") for path in (ROOT / folder).rglob("*.py") for name in identifiers(path))
    limit = MOST_PER_THOUSAND[folder] * counts.total() / 1000
    assert counts.total() > 5000
    assert {name: counts[name] for name in VAGUE if counts[name] > limit} == {}


def test_modules_say_what_they_contain() -> None:
    paths = [path.relative_to(ROOT) for path in (ROOT / "src" / "vivace").rglob("*.py")]
    assert len(paths) > 500
    assert [str(path) for path in paths if VAGUE & set(path.stem.split("_"))] == []


@pytest.mark.parametrize(("name", "most"), [("VivaceError", 2), ("load", 3), ("apply", 3), ("Record", 20)])
def test_a_public_name_imports_few_modules(name: str, most: int) -> None:
    code = f"import sys, vivace; vivace.{name}; print(sum(m.split('.')[0] == 'vivace' for m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 1 < int(done.stdout) <= most
