"""Which files of a repository or folder in diffusers' format make its pipeline; what is refused, and why.

One set of weights is taken: safetensors only, of one variant, no other framework's. Code is never taken.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from vivace.errors import UnusableModel
from vivace.models.pipelines import TEXT_TO_IMAGE

INDEX = "model_index.json"
# model.safetensors, model.fp16.safetensors, model-00001-of-00002.safetensors, model.fp16-00001-of-00002.safetensors,
# and the older model-00001-of-00002.fp16.safetensors
_WEIGHTS = re.compile(
    r"(?:diffusion_pytorch_)?model(?:\.(\w+))?(?:-(\d{5})-of-(\d{5}))?(?:\.(\w+))?\.safetensors"
)
_SHARDS = re.compile(r"(?:diffusion_pytorch_)?model\.safetensors\.index(?:\.(\w+))?\.json")
_PRECISIONS = {"fp16", "bf16", "fp32"}  # variants that are the same weights, rounded
_SMALL = {".json", ".txt", ".model", ".jinja", ".bpe"}
_PICKLES = {".bin", ".ckpt", ".pt", ".pth", ".pkl"}
# Components of these kinds are configuration alone.
_NO_WEIGHTS = ("Tokenizer", "TokenizerFast", "Scheduler", "Processor", "ProcessorFast", "FeatureExtractor")


@dataclass(frozen=True)
class Chosen:
    """Files of a pipeline by their names in its repository: configuration and tokenizers, and weights.

    `variant` is the one to ask diffusers for; None if every component has plain weights. `lacks` says in words which
    weights are missing, if any are.
    """

    small: tuple[str, ...]
    weights: tuple[str, ...]
    variant: str | None
    lacks: str | None = None


def read_index(folder: Path, called: str) -> dict[str, Any]:
    """model_index.json, checked.

    Args:
        folder: where it lies.
        called: what the user knows the model by.

    Raises:
        UnusableModel: it is none, or names a pipeline that does not draw from text, or code of its own.
    """
    path = folder / INDEX
    try:
        content = json.loads(path.read_text())
        class_name = content["_class_name"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnusableModel(f"{path} is not a diffusers pipeline's index: {error}") from None
    if not isinstance(class_name, str):
        # A list names a Python file to import from the folder.
        raise UnusableModel(
            f"{called} asks for code of its own ({class_name}); vivace runs no code from models"
        )
    if class_name not in TEXT_TO_IMAGE:
        raise UnusableModel(
            f"{called} is a {class_name}, which does not draw pictures from text alone in this version of diffusers; "
            "give a text-to-image pipeline"
        )
    return dict(content)


def components_of(index: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Library and class of every component that a pipeline has, by its name."""
    return {
        name: (str(value[0]), str(value[1]))
        for name, value in index.items()
        if isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value)
    }


def choose(
    index: Mapping[str, Any],
    names: Iterable[str],
    called: str,
    *,
    variants: Iterable[str] | None = (),
    without: Collection[str] = (),
    elsewhere: Collection[str] = (),
) -> Chosen:
    """The files to take.

    Args:
        index: a checked model_index.json.
        names: of all files that there are.
        called: what the user knows the model by.
        variants: the first of these that any component has is taken, plain weights where a component lacks it. None:
            half precision, bf16 first for a transformer, fp16 for a UNet.
        without: components that are not wanted.
        elsewhere: components whose weights come from somewhere else.

    Raises:
        UnusableModel: a component brings code.
    """
    below: dict[str, list[str]] = {}
    for name in names:
        path = PurePosixPath(name)
        below.setdefault(path.parent.as_posix(), []).append(path.name)
    wanted = {name: about for name, about in components_of(index).items() if name not in without}
    for name, (library, _) in wanted.items():
        if f"{library}.py" in below.get(name, []) or f"{library}.py" in below.get(".", []):
            raise UnusableModel(
                f"{called} asks for code of its own ({library}.py for its {name}); vivace runs no code from models"
            )
    models = [
        name for name, (_, kind) in wanted.items() if name not in elsewhere and not kind.endswith(_NO_WEIGHTS)
    ]
    has = {name: _variants(below.get(name, [])) for name in models}
    if variants is None:
        variants = ("bf16", "fp16") if "transformer" in wanted else ("fp16", "bf16")
    variant = next((v for v in variants if any(v in sets for sets in has.values())), None)
    if variant is None:
        # A folder into which only one was copied.
        only = {v for sets in has.values() if None not in sets for v in sets if v in _PRECISIONS}
        variant = only.pop() if len(only) == 1 else None
    small = [INDEX]
    weights: list[str] = []
    lacks = None
    for name in wanted:
        files = sorted(below.get(name, []))
        taken = variant if variant in has.get(name, {}) else None
        small += [f"{name}/{file}" for file in files if _is_small(file, taken)]
        if name in has:
            weights += [f"{name}/{file}" for file in has[name].get(taken, ())]
            if taken not in has[name]:
                lacks = lacks or _no_weights(called, name, files, has[name])
    return Chosen(tuple(small), tuple(weights), variant, lacks)


def check_no_code(folder: Path, small: Iterable[str], called: str) -> None:
    """Raises UnusableModel for a configuration that names classes in files of the model (`auto_map`)."""
    for name in small:
        if PurePosixPath(name).name not in ("config.json", "tokenizer_config.json"):
            continue
        try:
            content = json.loads((folder / name).read_text())
        except (OSError, ValueError) as error:
            raise UnusableModel(
                f"{folder / name} cannot be read: {error}; copy or download it again"
            ) from None
        if isinstance(content, dict) and content.get("auto_map"):
            raise UnusableModel(
                f"{called} asks for code of its own (auto_map in {name}); vivace runs no code from models"
            )


def _variants(files: Iterable[str]) -> dict[str | None, list[str]]:
    """Whole sets of weights by variant; None is the plain one."""
    found: dict[str | None, list[str]] = {}
    totals: dict[str | None, int] = {}
    for file in sorted(files):
        if match := _WEIGHTS.fullmatch(file):
            early, _, total, late = match.groups()
            found.setdefault(early or late, []).append(file)
            totals[early or late] = int(total) if total else 1
    return {variant: sets for variant, sets in found.items() if len(sets) >= totals[variant]}


def _is_small(file: str, variant: str | None) -> bool:
    if match := _SHARDS.fullmatch(file):
        return match.group(1) == variant
    return PurePosixPath(file).suffix in _SMALL


def _no_weights(called: str, component: str, files: list[str], has: Collection[str | None]) -> str:
    pickles = [file for file in files if PurePosixPath(file).suffix in _PICKLES]
    if has:
        kinds = ", ".join(sorted(str(variant) for variant in has))
        return f"{called} has its {component} as {kinds} alone, and other components not; vivace takes one variant"
    if any(_WEIGHTS.fullmatch(file) for file in files):
        return f"{called} lacks a part of its {component}'s weights; copy or download them again"
    if pickles:
        return (
            f"{called} has no safetensors for its {component}, only {pickles[0]}; vivace loads no pickles: give a "
            "revision or a model that has safetensors"
        )
    return f"{called} has no weights for its {component}; copy or download them again"
