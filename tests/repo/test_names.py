"""The name of a class is one thing, and public names cost few imports."""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "vivace"
SAME_CLASS_NAME: set[str] = set()
"""Class names that two modules may use, each with its reason. Today there are none."""


def used_twice(names: Iterable[tuple[str, Path]]) -> dict[str, list[str]]:
    """Return the names with several places, each with them."""
    places: dict[str, list[str]] = defaultdict(list)
    for name, path in names:
        places[name].append(str(path.relative_to(SOURCE)))
    return {name: paths for name, paths in places.items() if len(paths) > 1}


def test_a_class_name_is_one_thing() -> None:
    classes = [
        (node.name, path)
        for path in SOURCE.rglob("*.py")
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef)
    ]
    twice = used_twice(classes)
    assert len(classes) > 500
    assert {name: paths for name, paths in twice.items() if name not in SAME_CLASS_NAME} == {}
    assert set(twice) >= SAME_CLASS_NAME


@pytest.mark.parametrize(("name", "most"), [("VivaceError", 2), ("load", 8), ("apply", 8), ("Record", 20)])
def test_a_public_name_imports_few_modules(name: str, most: int) -> None:
    code = f"import sys, vivace; vivace.{name}; print(sum(m.split('.')[0] == 'vivace' for m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 1 < int(done.stdout) <= most
