"""Layout of an exported script: docstring, sorted imports, blank lines, as ruff would format it.

Written by hand, since ruff is not a runtime dependency. Tests check every exported script with ruff.
"""

from __future__ import annotations

import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable

from vivace.machinery.technique.script import WIDTH


def docstring(lines: Iterable[str]) -> str:
    """Return a module docstring with these lines, escaped so that no text can end it early."""
    escaped = [line.replace("\\", "\\\\").replace('"""', '\\"\\"\\"') for line in lines]
    printable = ["".join(c if c.isprintable() else "?" for c in line) for line in escaped]
    wrapped = [
        part
        for line in printable
        for part in textwrap.wrap(line, WIDTH, break_long_words=False, break_on_hyphens=False) or [""]
    ]
    if len(wrapped) == 1:
        return f'"""{wrapped[0]}"""'
    return "\n".join([f'"""{wrapped[0]}', *wrapped[1:], '"""'])


def imports_of(names: Iterable[str]) -> str:
    """Return import statements: first the standard library, then the others, each sorted.

    Args:
        names: "torch" for a module, "diffusers:AutoencoderKL" for a name from a module.
    """
    modules: set[str] = set()
    members: dict[str, set[str]] = defaultdict(set)
    for name in names:
        module, _, member = name.partition(":")
        if member:
            members[module].add(member)
        else:
            modules.add(module)
    sections = []
    for is_standard in (True, False):
        lines = [f"import {module}" for module in sorted(modules) if _is_standard(module) is is_standard]
        for module in sorted(members, key=str.lower):
            if _is_standard(module) is is_standard:
                lines.append(f"from {module} import {', '.join(sorted(members[module], key=_member_order))}")
        if lines:
            sections.append("\n".join(lines))
    return "\n\n".join(sections)


def _is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


def _member_order(name: str) -> tuple[int, str]:
    """Sort constants, classes, functions, as isort does."""
    kind = 0 if name.isupper() else 1 if name[0].isupper() else 2
    return kind, name.lower()


def spaced(blocks: Iterable[list[str]]) -> str:
    """Join blocks of statements with a blank line between them, and two around each function.

    Comments and decorators right before a function belong to it.
    """
    written: list[str] = []
    in_function = False
    for block in blocks:
        if written:
            written.append("")
        for line in block:
            if line.startswith("def ") and not in_function:
                start = len(written)
                while start and written[start - 1].startswith(("#", "@")):
                    start -= 1
                while start and not written[start - 1]:
                    del written[start - 1]
                    start -= 1
                written[start:start] = ["", ""]
                in_function = True
            elif in_function and line and not line.startswith((" ", ")")):
                while not written[-1]:
                    del written[-1]
                written += ["", ""]
                in_function = line.startswith("def ")
            written.append(line)
    return "\n".join(written)
