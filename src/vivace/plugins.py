"""Techniques and families of models that other packages add, by entry points.

A package's pyproject.toml names a class that is a `Technique`, or a `Family`:

    [project.entry-points."vivace.techniques"]
    my_cache = "my_package.my_cache:MyCache"
    [project.entry-points."vivace.architectures"]
    my_model = "my_package.my_model:MY_MODEL"
"""

from __future__ import annotations

import logging
from importlib import metadata
from typing import Any, Literal

ORIGINS: dict[str, str] = {}
"""The package of each technique and family that is not vivace's, by its name."""
PROBLEMS: list[str] = []
"""What could not be loaded, and why."""


def added(group: Literal["techniques", "architectures"], kind: type[Any], taken: frozenset[str]) -> list[Any]:
    """Return what other packages add; what cannot be loaded is named on standard error, and left out.

    Args:
        kind: what each must be: an instance of it, or a subclass.
        taken: names that vivace has itself.
    """
    loaded = []
    for entry in metadata.entry_points(group=f"vivace.{group}"):
        package = entry.dist.name if entry.dist is not None else entry.value
        try:
            each = entry.load()
            is_class = isinstance(each, type) and issubclass(each, kind)
            if not (is_class or isinstance(each, kind)):
                raise TypeError(f"{entry.value} is no {kind.__name__}")
            if each.name in taken or each.name in ORIGINS:
                raise ValueError(f"there is a '{each.name}' already")
        except Exception as error:  # noqa: BLE001 - whatever foreign code raises
            PROBLEMS.append(f"{entry.name} of {package} is not loaded: {type(error).__name__}: {error}")
            logging.getLogger("vivace").warning(PROBLEMS[-1])
            continue
        ORIGINS[each.name] = package
        loaded.append(each)
    return loaded
