"""Names say what they hold: no participles or pronouns, a name is one thing, and public names cost few imports."""

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "vivace"
VAGUE = {
    *("found", "one", "told", "known", "wanted", "given", "said"),
    *("taken", "worth", "asked", "shown", "seen", "judged"),
}
SAME_CLASS_NAME: set[str] = set()
"""Class names that two modules may use, each with its reason. Today there are none."""
SAME_MODULE_NAME = {
    "demo",  # the command, and the study that it runs
    "study",  # the command, and the data that it reads
    "calibrate_witness",  # the command, and what it calls
    "worker",  # the process of the benchmark, and that of the server: the same role
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
    paths = [path.relative_to(ROOT) for path in SOURCE.rglob("*.py")]
    assert len(paths) > 500
    assert [str(path) for path in paths if VAGUE & set(path.stem.split("_"))] == []


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


def test_a_module_name_is_one_thing() -> None:
    twice = used_twice((path.stem, path) for path in SOURCE.rglob("*.py") if path.stem != "__init__")
    assert {name: paths for name, paths in twice.items() if name not in SAME_MODULE_NAME} == {}
    assert set(twice) >= SAME_MODULE_NAME


@pytest.mark.parametrize(("name", "most"), [("VivaceError", 2), ("load", 3), ("apply", 3), ("Record", 20)])
def test_a_public_name_imports_few_modules(name: str, most: int) -> None:
    code = f"import sys, vivace; vivace.{name}; print(sum(m.split('.')[0] == 'vivace' for m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 1 < int(done.stdout) <= most
