"""Weights in a model's folder that no network of the pipeline has, or has in another shape.

Libraries leave out the first without a word, and name no file for the second.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vivace.errors import UnusableModel
from vivace.models.headers import read_header

_OLDER = {".query.": ".to_q.", ".key.": ".to_k.", ".value.": ".to_v.", ".proj_attn.": ".to_out.0."}
"""Names of VAEs' attention in older folders, which diffusers reads."""
_OTHER_SHAPE = re.compile(
    r"because (\S+) expected shape torch\.Size\((\[[\d, ]*\])\), but got torch\.Size\((\[[\d, ]*\])\)"
)
"""diffusers' message."""
_NUMBERED = re.compile(r"(.+?)\.\d+\.")


class UnusedWeightsWarning(UserWarning):
    """A model's files have weights that are not used."""


def check_files_used(files: Iterable[Path], part: str, component: Any) -> None:
    """Check that a network of diffusers has every tensor of its files; see `report_unused`."""
    names = component.state_dict().keys()
    ignored = getattr(component, "_keys_to_ignore_on_load_unexpected", None) or ()
    for file in files:
        more = []
        for name in read_header(file):
            own = name
            for older, newer in _OLDER.items():
                own = own.replace(older, newer)
            if not {name, own} & names and not any(re.search(pattern, name) for pattern in ignored):
                more.append(name)
        report_unused(file, part, component, more)


def report_unused(where: Path, part: str, component: Any, names: Iterable[str]) -> None:
    """Say which weights are not used, or refuse them where they are more layers than the network has.

    Raises:
        UnusableModel: a layer's number is beyond those of the network: it would draw other images.
    """
    modules = {name for name, _ in component.named_modules()}
    names = sorted(name for name in names if not name.endswith(".position_ids"))
    for name in names:
        match = _NUMBERED.match(name)
        if match is not None and any(module.endswith(match[1]) for module in modules):
            raise UnusableModel(
                f"{where} has {name}, and its {part} has no such layer by its config.json; it is "
                "another model's, or its configuration is"
            )
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        text = f"{where} has weights that its {part} does not use: {', '.join(names[:3])}{more}"
        warnings.warn(text, UnusedWeightsWarning, stacklevel=2)


def check_shape(files: Iterable[Path], problem: str) -> None:
    """Raise UnusableModel with the file whose tensor has another shape, if that is the problem."""
    match = _OTHER_SHAPE.search(problem)
    if match is None:
        return
    name, expected, stored = match.groups()
    for file in files:
        about = read_header(file).get(name)
        if about is not None and str(about["shape"]) == stored:
            raise UnusableModel(
                f"{file} has {name} with the shape {stored}, and its config.json means {expected}; it is another "
                "model's"
            )
