"""Docstrings say what is there: the arguments that they name are those of their function."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "vivace"
_ENTRY = re.compile(r"^ {4}([a-z_]\w*(?:, [a-z_]\w*)*): ")


def documented(docstring: str) -> Iterator[str]:
    """Yield the names of the section Args."""
    _, _, section = docstring.partition("\nArgs:\n")
    for line in re.split(r"\n\s*\n", section)[0].split("\n"):
        if match := _ENTRY.match(line):
            yield from match[1].split(", ")


def test_arguments_that_docstrings_name_exist() -> None:
    wrong, number = [], 0
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            every += [argument for argument in (node.args.vararg, node.args.kwarg) if argument is not None]
            names = {argument.arg for argument in every}
            for name in documented(ast.get_docstring(node) or ""):
                number += 1
                if name not in names:
                    wrong.append(f"{path.relative_to(SOURCE)}:{node.lineno} {node.name}: {name}")
    assert not wrong
    assert number > 100
