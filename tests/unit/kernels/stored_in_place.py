"""Find kernels that store to memory which another of the program's threads may still have to load.

Where a block has fewer elements than a program has threads, Triton gives several threads the same element: all of them
load it, and one of them stores it. If that is the memory it was loaded from, a barrier has to stand between.
"""

from __future__ import annotations

import re

_DEFINITION = re.compile(r"^\s*(%[\w:]+)(?::\d+)? = (?P<operation>[\w.\"]+) ?(?P<operands>.*)$")
_VALUE = re.compile(r"%\w+(?:#\d+)?")
_STORE = re.compile(r"^\s*tt\.store (%\w+)")
_POINTS_ON = {
    "tt.addptr",
    "tt.splat",
    "tt.broadcast",
    "tt.expand_dims",
    "ttg.convert_layout",
    "tt.bitcast",
    "tt.reshape",
}


def assert_all_threads_have_loaded(name: str, ttgir: str) -> None:
    """Assert that a barrier stands before each store to memory that the kernel has loaded from.

    Args:
        ttgir: the kernel in Triton's GPU dialect, all functions inlined.
    """
    parent: dict[str, str] = {}
    loaded: set[str] = set()

    def argument_of(value: str) -> str:
        while value in parent:
            value = parent[value]
        return value

    for line in ttgir.splitlines():
        if "barrier" in line:
            loaded.clear()
        if (store := _STORE.match(line)) is not None:
            pointer = argument_of(store[1])
            assert pointer not in loaded, (
                f"{name} stores to {pointer}, which threads may still be loading: {line}"
            )
        if (definition := _DEFINITION.match(line)) is None:
            continue
        operands = _VALUE.findall(definition["operands"])
        if definition["operation"] in _POINTS_ON and operands:
            parent[definition[1]] = operands[0]
        elif definition["operation"] == "tt.load":
            loaded.add(argument_of(operands[0]))
