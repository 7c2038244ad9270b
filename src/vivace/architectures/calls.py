"""The calls of diffusers' pipelines, read from its source: importing it takes seconds."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

ALSO_FROM_TEXT = ("GlmImagePipeline", "StableCascadeCombinedPipeline")
"""Pipelines of no family whose calls take images, and need none."""
_LISTED = re.compile(r'_import_structure\["(\w+)"\](?: = |\.extend\(\s*)\[([^\]]*)\]')
_OTHER_INPUTS = re.compile(r"^(control_|negative_|mask_)?images?$|strength$|video|frames|audio")


@functools.cache
def call_defaults(class_name: str) -> Mapping[str, object] | None:
    """Return the parameters of a pipeline's call in the installed diffusers, with defaults that are numbers or text."""
    spec = find_spec("diffusers")
    for place in [] if spec is None else spec.submodule_search_locations or []:
        pipelines = Path(place) / "pipelines"
        listed = _LISTED.findall((pipelines / "__init__.py").read_text(encoding="utf-8"))
        folders = dict.fromkeys(folder for folder, names in listed if f'"{class_name}"' in names)
        for file in (file for folder in folders for file in sorted((pipelines / folder).rglob("*.py"))):
            text = file.read_text(encoding="utf-8")
            if f"\nclass {class_name}(" in text:
                return _defaults(ast.parse(text), class_name)
    return None


def _defaults(module: ast.Module, class_name: str) -> Mapping[str, object]:
    kind = next(n for n in module.body if isinstance(n, ast.ClassDef) and n.name == class_name)
    call = next((n for n in kind.body if isinstance(n, ast.FunctionDef) and n.name == "__call__"), None)
    if call is None:
        return {}
    names = [argument.arg for argument in call.args.args[1:]]
    values = [node.value if isinstance(node, ast.Constant) else None for node in call.args.defaults]
    return dict.fromkeys(names) | dict(zip(names[len(names) - len(values) :], values, strict=True))


def draws_from_text(class_name: str) -> bool:
    """Return whether a pipeline of diffusers draws images from text alone, by the parameters of its call."""
    parameters = call_defaults(class_name) or {}
    return {"prompt", "num_inference_steps", "height", "width"} <= parameters.keys() and (
        class_name in ALSO_FROM_TEXT or not any(map(_OTHER_INPUTS.search, parameters))
    )
