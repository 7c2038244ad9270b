"""Identify a checkpoint in a single .safetensors or .gguf file in its authors' layout by its tensors' names.

Such a file has weights but no configuration and no tokenizers; those come from the catalogue model of the same family.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vivace.errors import UnusableModel
from vivace.foundation.untrusted.files import reading
from vivace.models.checkpoints.prediction import MARKERS, PredictionType, prediction_of
from vivace.models.checkpoints.signatures import (
    SD2,
    SUPPORTED,
    Signature,
    TensorNames,
    behind_prefix,
    signature_of,
)
from vivace.models.checkpoints.weight_scales import Codes, codes_of, is_marker
from vivace.models.checkpoints.whole_files import is_said_unused
from vivace.models.gguf_file import FLOAT_TYPES, KEPT_TYPES, SUFFIX, read_gguf_sizes
from vivace.models.headers import read_header, read_metadata

_FORMATS = {
    **dict.fromkeys((".ckpt", ".pt", ".pth", ".bin", ".pkl"), "a pickle"),
    **dict.fromkeys((".engine", ".plan", ".trt"), "a TensorRT engine"),
    **dict.fromkeys((".zip", ".tar", ".gz", ".7z", ".rar"), "an archive"),
    ".onnx": "an ONNX graph",
    ".msgpack": "a file of Flax",
    ".h5": "a file of TensorFlow",
    ".pt2": "a program of torch.export",
    ".json": "a file of JSON",
}
_SPELLINGS = {
    ".safetensors": ".safetensors",
    ".sft": ".safetensors",
    ".safetensor": ".safetensors",
    SUFFIX: SUFFIX,
}
_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.(?:safetensors|gguf)$")
_PARTS_OF_UNETS = ("first_stage_model.", "cond_stage_model.", "conditioner.")
_PARTS_OF_FLUX = ("text_encoders.", "vae.")
_PARTS = (*_PARTS_OF_UNETS, *_PARTS_OF_FLUX, "text_encoder.", "text_encoder_2.", "model_ema.", *MARKERS)
_FLUX_MODULES = (
    "double_blocks.",
    "single_blocks.",
    "img_in.",
    "txt_in.",
    "time_in.",
    "vector_in.",
    "guidance_in.",
    "final_layer.",
)
_UNET_MODULES = ("input_blocks.", "middle_block.", "output_blocks.", "out.", "time_embed.", "label_emb.")
_UNETS = ("sd15", "sdxl", SD2, "playground")
_PREFIX_OF_DIFFUSERS = "model.diffusion_model."
_WIDTH_OF_FLUX = 3072
"""The only width that diffusers converts."""


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint.

    entry: catalogue name of the model with the same configuration, or `SD2`.
    component: the only component in the file; None for a whole pipeline.
    prediction: what its denoiser predicts.
    codes: how each weight is stored that is not stored as it is.
    denoiser: the authors' name of each of the denoiser's tensors, without a prefix, by its name in the file.
    num_values: of the denoiser, without scales; None where the header does not say.
    is_plain: whether diffusers reads the file as it is.
    notes: what was assumed, and what is not used.
    """

    entry: str
    component: str | None = None
    prediction: PredictionType = field(default=PredictionType(), compare=False)
    codes: Mapping[str, Codes] = field(default_factory=dict, compare=False)
    denoiser: Mapping[str, str] = field(default_factory=dict, compare=False)
    num_values: int | None = field(default=None, compare=False)
    is_plain: bool = field(default=True, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def denoiser_name(self) -> str:
        """The denoiser's name in a pipeline of diffusers."""
        return "unet" if self.entry in _UNETS else "transformer"


def check_format(path: Path) -> None:
    """Raise UnusableModel for a file that is not named .safetensors or .gguf, or is one of several."""
    if path.suffix not in (".safetensors", SUFFIX):
        if own := _SPELLINGS.get(path.suffix.lower()):
            raise UnusableModel(
                f"{path} has the suffix {path.suffix}; rename it to {path.with_suffix(own).name}"
            )
        what = _FORMATS.get(path.suffix.lower())
        named = f" ({path.suffix} is {what})" if what else ""
        raise UnusableModel(
            f"{path} is not a .safetensors or {SUFFIX} file; vivace loads no pickles and no other formats{named}"
        )
    if match := _SHARD.search(path.name):
        raise UnusableModel(
            f"{path} is one of the {int(match.group(1))} files that its weights are spread over; give the folder of "
            "the whole model"
        )


def contents_of(path: Path, *, is_configured: bool = False, is_loaded: bool = True) -> Contents:
    """Identify the contents of a checkpoint by its header.

    Args:
        is_configured: whether the configuration of a pipeline lies beside it, which SD 2 needs.
        is_loaded: whether its weights will be read, which takes the package gguf for a GGUF file.

    Raises:
        UnusableModel: it is damaged, or not a supported model, or its weights are stored in a way that is not read.
        Unsupported: it is a GGUF file, and the package gguf is not installed.
    """
    header = read_gguf_sizes(path) if path.suffix == SUFFIX and not is_loaded else read_header(path)
    with reading(path, problem="is not a model that vivace knows", advice=SUPPORTED):
        return _contents_of(path, header, read_metadata(path), is_configured)


def _contents_of(
    path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str], is_configured: bool
) -> Contents:
    names = TensorNames(tensors)
    row = signature_of(names, tensors)
    if row is None:
        if (behind := behind_prefix(tensors)) is not None:
            prefix, row = behind
            raise UnusableModel(
                f"{path} has the tensors of {row.what} behind the prefix {prefix[:80]!r}, which vivace does not know; "
                "rename its tensors without it"
            )
        example = f"its {len(tensors)} tensors are called {min(tensors)[:80]!r} and so on"
        raise UnusableModel(f"{path} is not a model that vivace knows; {SUPPORTED} ({example})")
    if row.entry is None:
        raise UnusableModel(f"{path} is {row.what}; {row.advice}")
    if row.entry == SD2 and not is_configured:
        raise UnusableModel(
            f"{path} is {row.what}, and does not say whether it predicts noise or v; put it into a folder with its "
            "model_index.json and configuration, or give it as a folder in diffusers' format"
        )
    if path.suffix == SUFFIX and row.component is None:
        raise UnusableModel(f"{path} holds a whole pipeline; GGUF files are read of denoisers alone")
    codes = {} if path.suffix == SUFFIX else codes_of(path, tensors, metadata)
    is_unet = row.entry in ("sd15", "sdxl", SD2)
    prediction = prediction_of(path, tensors, metadata) if is_unet else PredictionType()
    denoiser = _denoiser(names, row.entry)
    if row.component is None and (other := next((name for name in codes if name not in denoiser), None)):
        raise UnusableModel(
            f"{path} has {codes[other].scale} beside {other}; in files of whole models vivace reads scales of the "
            "denoiser alone; give the model in 16 bits"
        )
    unused = _unused(tensors, denoiser, row)
    notes = [row.note, prediction.note, _hint(path, row), _stored(path, codes, tensors), unused]
    own = [name for name in denoiser if not is_marker(name)]
    is_counted = path.suffix != SUFFIX and all(code.kind == "scaled" for code in codes.values())
    return Contents(
        row.entry,
        row.component,
        prediction,
        codes,
        denoiser,
        sum(math.prod(tensors[name]["shape"]) for name in own) if is_counted else None,
        not codes and _is_read_by_diffusers(path, names, row, tensors),
        tuple(note for note in notes if note),
    )


def _denoiser(names: TensorNames, entry: str) -> dict[str, str]:
    """Return the names of the denoiser's tensors in the file, with and without their prefix."""

    def is_own(own: str, name: str) -> bool:
        if names.prefix:
            return name.startswith(names.prefix)
        if entry in _UNETS:
            return own.startswith(_UNET_MODULES)
        if entry in ("flux-dev", "flux-schnell"):
            return own.startswith(_FLUX_MODULES)
        return not own.startswith(_PARTS)

    return {name: own for own, name in names.own.items() if is_own(own, name)}


def _is_read_by_diffusers(path: Path, names: TensorNames, row: Signature, tensors: Mapping[str, Any]) -> bool:
    """Whether diffusers reads a file without codes as it is.

    It knows FLUX.1's tensors without a prefix, and with that of whole files, in one width; UNets' only with it. Of
    other transformers it changes names by their parts, whatever they are.
    """
    if row.entry in ("flux-dev", "flux-schnell"):
        is_full_size = tensors[names.own["img_in.weight"]]["shape"][:1] == [_WIDTH_OF_FLUX]
        kinds = {about["dtype"] for about in tensors.values()} if path.suffix == SUFFIX else set()
        prefixes = ("",) if path.suffix == SUFFIX else ("", _PREFIX_OF_DIFFUSERS)
        return is_full_size and names.prefix in prefixes and kinds <= {*KEPT_TYPES, *FLOAT_TYPES}
    return row.component is None and names.prefix == _PREFIX_OF_DIFFUSERS


def _unused(tensors: Mapping[str, Any], denoiser: Mapping[str, str], row: Signature) -> str:
    """Return the number of tensors that are neither read nor known marks, and their names."""
    is_flux = row.entry is not None and row.entry.startswith("flux")
    parts = () if row.component is not None else _PARTS_OF_FLUX if is_flux else _PARTS_OF_UNETS
    left = [
        name
        for name in tensors
        if name not in denoiser
        and (not name.startswith(parts) or is_said_unused(name))
        and not is_marker(name)
        and name.rpartition(".")[2] not in (*MARKERS, "edm_mean", "edm_std")
    ]
    if not left:
        return ""
    groups = Counter(name.partition(".")[0] + (".*" if "." in name else "") for name in left)
    unused = ", ".join(f"{name} ({number})" for name, number in groups.most_common(5))
    more = "" if len(groups) <= 5 else f" and {len(groups) - 5} more names"
    rest = f"; all but its {row.component} comes from {row.entry}" if row.component is not None else ""
    return f"{len(left)} of the file's {len(tensors)} tensors are not used: {unused}{more}{rest}"


def _hint(path: Path, row: Signature) -> str:
    """Return facts from a file's name that its tensors do not have."""
    name = path.name.lower()
    if row.entry == "flux-dev" and "kontext" in name:
        return (
            "its name tells of FLUX.1 Kontext, whose tensors are those of FLUX.1 [dev]: read as that, without a source "
            "image; to edit images give Kontext as a folder in diffusers' format"
        )
    if row.entry == "qwen-image" and "edit" in name:
        return (
            "its name tells of Qwen-Image-Edit, whose tensors are those of Qwen-Image: read as that, without a source "
            "image; to edit images give it as a folder in diffusers' format"
        )
    return _ASSUMED.get(row.entry or "", "")


_ASSUMED = {
    "flux-schnell": "no tensor takes a guidance scale: read as FLUX.1 [schnell], which draws in 4 steps",
    "z-image-turbo": "no tensor says whether it is distilled: read as Z-Image Turbo, which draws in 9 steps",
    "flux2-klein-4b": "no tensor says whether it is distilled: read as the one that draws in 4 steps",
    "flux2-klein-9b": "no tensor says whether it is distilled: read as the one that draws in 4 steps",
}
"""Assumptions about files of some models."""


def _stored(path: Path, codes: Mapping[str, Codes], tensors: Mapping[str, Any]) -> str:
    """Return the decoding of weights that are not stored plainly."""
    if path.suffix == SUFFIX:
        other = Counter(
            about["dtype"] for about in tensors.values() if about["dtype"] not in (*KEPT_TYPES, *FLOAT_TYPES)
        )
        kinds = ", ".join(f"{number} as {kind}" for kind, number in other.most_common())
        return f"diffusers does not compute with {kinds}: dequantised as they are loaded" if other else ""
    kinds_of = Counter(code.kind for code in codes.values())
    notes = []
    if number := kinds_of.pop("scaled", 0):
        in_fp8 = sum(
            tensors[n]["dtype"].startswith("F8") for n, code in codes.items() if code.kind == "scaled"
        )
        notes.append(f"{number} weights ({in_fp8} in fp8) are multiplied by their scales as they are loaded")
    notes += [f"{n} weights in {kind} are dequantised as they are loaded" for kind, n in kinds_of.items()]
    return "; ".join(notes)
