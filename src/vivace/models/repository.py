"""Choose the files of a pipeline in diffusers' format, or say why it is refused: safetensors of one variant, and no
code."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

from vivace.architectures import FAMILIES, pipeline_named
from vivace.architectures.calls import call_defaults, draws_from_text
from vivace.architectures.family import OwnDefaults
from vivace.errors import UnusableModel
from vivace.foundation.untrusted.files import read_json, read_object, reading
from vivace.models.bounds import check_numbers

INDEX = "model_index.json"
MODULAR_INDEX = "modular_model_index.json"
"""What diffusers writes for models that it draws with in modular blocks; some have no pipeline."""
# model.safetensors, model.fp16.safetensors, model-00001-of-00002.safetensors, model.fp16-00001-of-00002.safetensors,
# and the older model-00001-of-00002.fp16.safetensors
_WEIGHTS = re.compile(
    r"(?:diffusion_pytorch_)?model(?:\.(\w+))?(?:-(\d{5})-of-(\d{5}))?(?:\.(\w+))?\.safetensors"
)
_SHARDS = re.compile(r"(?:diffusion_pytorch_)?model\.safetensors\.index(?:\.(\w+))?\.json")
_PRECISIONS = {"fp16", "bf16", "fp32"}  # variants that hold the same weights in another precision
_SMALL = {".json", ".txt", ".model", ".jinja", ".bpe"}
_PICKLES = {".bin", ".ckpt", ".pt", ".pth", ".pkl"}
# Components of these kinds have no weights.
_NO_WEIGHTS = (
    "Tokenizer",
    "TokenizerFast",
    "Scheduler",
    "Processor",
    "ProcessorFast",
    "ProcessorPil",
    "FeatureExtractor",
)


@dataclass(frozen=True)
class Chosen:
    """File names of a pipeline in its repository: small files (configuration, tokenizers) and weights.

    `variant` is the one to pass to diffusers; None for weights without a variant. `missing` is a message if weights are
    missing.
    """

    small: tuple[str, ...]
    weights: tuple[str, ...]
    variant: str | None
    missing: str | None = None


def read_index(folder: Path, label: str) -> dict[str, Any]:
    """Read and check model_index.json."""
    path = folder / INDEX
    with reading(path, problem="is not a diffusers pipeline's index"):
        content = read_object(path)
        class_name = content["_class_name"]
        check_numbers(content)
    if not isinstance(class_name, str):
        # A list names a Python file to import from the folder.
        raise UnusableModel(f"{label} needs its own code ({class_name}); vivace runs no code from models")
    if pipeline_named(class_name) is None and not draws_from_text(class_name):
        raise UnusableModel(_unknown(class_name, content, label))
    for name in content:
        if not name.isidentifier():
            # It would be a path, which may lead out of the folder.
            raise UnusableModel(
                f"{label} has a component named {name[:80]!r} in its {INDEX}, which is not a valid name"
            )
    return content


def has_no_pipeline(label: str, class_name: object = "") -> str:
    """Return what is said of a model with a modular index alone."""
    what = f"a {str(class_name)[:80]}: " if class_name else ""
    return (
        f"{label} is {what}a modular pipeline of diffusers, with a {MODULAR_INDEX} and no {INDEX}; vivace draws with "
        "ordinary pipelines, and this model has none: give another one"
    )


def _unknown(class_name: str, index: Mapping[str, Any], label: str) -> str:
    """Return what was read of a pipeline that cannot be used, and what can."""
    if call_defaults(class_name) is not None:
        return (
            f"{label} is a {class_name}, which is not a text-to-image pipeline in this version of diffusers, nor one "
            "that edits images; give one that is"
        )
    have, written = (
        version("diffusers"),
        str(index.get("_diffusers_version", "a version it does not name"))[:40],
    )
    names = ", ".join(family.name for family in FAMILIES)
    return (
        f"{label} is a {class_name}, written by diffusers {written}, and diffusers {have} has no such pipeline; "
        f"install the version that has it, or give another model: vivace knows {names}, and runs every pipeline of "
        "diffusers that draws from text alone"
    )


def _check_classes(classes: Mapping[str, tuple[str, str]], label: str) -> None:
    """Raise UnusableModel unless every component is a class of diffusers or transformers."""
    for name, (library, kind) in classes.items():
        if kind.endswith("Pipeline"):
            raise UnusableModel(
                f"{label} has a whole pipeline ({kind}) as its {name}; give a pipeline of single models"
            )
        if library not in ("diffusers", "transformers") and not _is_pipeline_module(library):
            raise UnusableModel(
                f"{label} takes its {name} from the library {library[:80]!r}, not from diffusers or transformers; "
                "vivace runs no code from models"
            )


def _is_pipeline_module(library: str) -> bool:
    """Whether it is a module of diffusers' pipelines, such as stable_diffusion, found without importing diffusers."""
    spec = find_spec("diffusers")
    places = [] if spec is None else spec.submodule_search_locations or []
    return library.isidentifier() and any((Path(place) / "pipelines" / library).is_dir() for place in places)


def components_of(index: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the library and class of every component of a pipeline, by its name."""
    return {
        name: (str(value[0]), str(value[1]))
        for name, value in index.items()
        if isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value)
    }


def choose(
    index: Mapping[str, Any],
    names: Iterable[str],
    label: str,
    *,
    variants: Iterable[str] | None = (),
    without: Collection[str] = (),
    elsewhere: Collection[str] = (),
) -> Chosen:
    """Choose the files to use.

    Args:
        index: a checked model_index.json.
        names: names of all available files.
        label: the model's name for error messages.
        variants: the first of these that any component has is used; components without it use weights without a
            variant. None: half precision, bf16 first for a transformer, fp16 first for a UNet.
        without: components to leave out.
        elsewhere: components whose weights come from somewhere else.
    """
    below: dict[str, list[str]] = {}
    for name in names:
        path = PurePosixPath(name)
        below.setdefault(path.parent.as_posix(), []).append(path.name)
    components = {name: about for name, about in components_of(index).items() if name not in without}
    for name, (library, _) in components.items():
        if f"{library}.py" in below.get(name, []) or f"{library}.py" in below.get(".", []):
            raise UnusableModel(
                f"{label} needs its own code ({library}.py for its {name}); vivace runs no code from models"
            )
    _check_classes(components, label)
    models = [
        name
        for name, (_, kind) in components.items()
        if name not in elsewhere and not kind.endswith(_NO_WEIGHTS)
    ]
    has = {name: _variants(below.get(name, [])) for name in models}
    if variants is None:
        variants = ("bf16", "fp16") if "transformer" in components else ("fp16", "bf16")
    variant = next((v for v in variants if any(v in sets for sets in has.values())), None)
    if variant is None:
        # A folder with only one precision.
        only = {v for sets in has.values() if None not in sets for v in sets if v in _PRECISIONS}
        variant = only.pop() if len(only) == 1 else None
    small = [INDEX]
    weights: list[str] = []
    missing = None
    for name in components:
        files = sorted(below.get(name, []))
        used = variant if variant in has.get(name, {}) else None
        small += [f"{name}/{file}" for file in files if _is_small(file, used)]
        if name in has:
            weights += [f"{name}/{file}" for file in has[name].get(used, ())]
            if used not in has[name]:
                missing = missing or _no_weights(label, name, files, has[name])
    return Chosen(tuple(small), tuple(weights), variant, missing)


def _variants(files: Iterable[str]) -> dict[str | None, list[str]]:
    """Return complete sets of weights by variant; None means weights without a variant."""
    variants: dict[str | None, list[str]] = {}
    totals: dict[str | None, int] = {}
    for file in sorted(files):
        if match := _WEIGHTS.fullmatch(file):
            early, _, total, late = match.groups()
            variants.setdefault(early or late, []).append(file)
            totals[early or late] = int(total) if total else 1
    return {variant: sets for variant, sets in variants.items() if len(sets) >= totals[variant]}


def _is_small(file: str, variant: str | None) -> bool:
    if match := _SHARDS.fullmatch(file):
        return match.group(1) == variant
    return PurePosixPath(file).suffix in _SMALL


def _no_weights(label: str, component: str, files: list[str], has: Collection[str | None]) -> str:
    pickles = [file for file in files if PurePosixPath(file).suffix in _PICKLES]
    if has:
        kinds = ", ".join(sorted(str(variant) for variant in has))
        return f"{label} has its {component} only as {kinds}, unlike other components; vivace uses one variant for all"
    if any(_WEIGHTS.fullmatch(file) for file in files):
        return f"{label} has only some of its {component}'s weight files; copy or download them again"
    if pickles:
        return (
            f"{label} has no safetensors for its {component}, only {pickles[0]}; vivace loads no pickles: give a "
            "revision or a model that has safetensors"
        )
    return f"{label} has no weights for its {component}; copy or download them again"


_NATIVE_CELLS = 128  # latent cells per side of transformers without a configured size


def defaults_of(folder: Path, class_name: str) -> dict[str, Any]:
    """Return the default height, width, num_inference_steps and guidance_scale of a pipeline in a folder. The size
    comes from its configuration; of a pipeline that no family describes from its class, if that states one. Steps and
    guidance are the defaults of its class, or of a model of that class which its configuration tells from others."""
    call, own = call_defaults(class_name) or {}, _own_defaults(folder, class_name)
    guidance = call.get("guidance_scale") if own is None else own.guidance
    height, width = (
        call.get(side) if pipeline_named(class_name) is None else None for side in ("height", "width")
    )
    return {
        "height": height or _side(folder),
        "width": width or _side(folder),
        "num_inference_steps": call["num_inference_steps"] if own is None else own.steps,
        "guidance_scale": 1.0 if guidance is None else guidance,  # 1 is no guidance
    }


def _own_defaults(folder: Path, class_name: str) -> OwnDefaults | None:
    """Return the settings of a model that differs from others of its class; None if it does not."""
    known = pipeline_named(class_name)
    for own in () if known is None else known.own_defaults:
        config = read_config(folder / own.file)
        if own.key in config and config[own.key] == own.value:
            return own
    return None


def call_of(folder: Path, class_name: str) -> dict[str, Any]:
    """Return extra call arguments: the length to which FLUX's pipelines pad, unless T5's tokenizer asks for less."""
    known = pipeline_named(class_name)
    if known is None or known.max_text_length is None:
        return {}
    length = read_config(folder / "tokenizer_2" / "tokenizer_config.json").get("model_max_length")
    own = _own_defaults(folder, class_name)
    longest = known.max_text_length if own is None else own.max_text_length or known.max_text_length
    if isinstance(length, int) and length < longest:
        return {"max_sequence_length": length}
    return {"max_sequence_length": longest} if own is not None else {}


def _side(folder: Path) -> int:
    denoiser = read_config(folder / "unet" / "config.json") or read_config(
        folder / "transformer" / "config.json"
    )
    vae = read_config(folder / "vae" / "config.json")
    cells, pixels = denoiser.get("sample_size"), vae.get("sample_size")
    levels = vae.get("block_out_channels") or vae.get("encoder_block_out_channels")
    factor = 2 ** min(len(levels) - 1, 10) if isinstance(levels, list) and levels else 8
    # FLUX-like transformers have no configured size, and their pipelines default to 128 cells per side; the VAE's
    # size is better.
    unstated = pixels if isinstance(pixels, int) else _NATIVE_CELLS * factor
    return cells * factor if isinstance(cells, int) else unstated


def read_config(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; empty if that is not possible."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
