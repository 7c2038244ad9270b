"""Identify a checkpoint in a single .safetensors or .gguf file in its authors' layout by its tensors' names. Its
configuration and tokenizers come from the catalogue model of the same family."""

from __future__ import annotations

import fnmatch
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vivace.architectures import CATALOGUE, FAMILIES, Family
from vivace.architectures.family import FilePart, Signature
from vivace.errors import UnusableModel
from vivace.foundation.untrusted.files import reading
from vivace.models.checkpoints.gguf_file import (
    FLOAT_TYPES,
    KEPT_TYPES,
    SUFFIX,
    check_installed,
    read_gguf_header,
)
from vivace.models.checkpoints.headers import read_header, read_metadata
from vivace.models.checkpoints.metadata import MARKERS, PredictionType, prediction_of
from vivace.models.checkpoints.signatures import (
    SUPPORTED,
    TensorNames,
    advice_for,
    signature_of,
)
from vivace.models.checkpoints.weight_scales import Codes, codes_of, is_marker

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
_LEFTOVERS = (
    "*.position_ids",
    "*.logit_scale",
    "*.spiece_model",
    "first_stage_model.loss.*",
    "first_stage_model.model_ema.*",
    "first_stage_model.*.num_batches_tracked",
    "cond_stage_model.transformer.text_projection*",
    "cond_stage_model.model.text_projection",
    "conditioner.embedders.0.transformer.text_projection*",
    "text_encoders.*.text_projection*",
    "text_encoders.t5xxl.transformer.encoder.embed_tokens.weight",  # the same as its shared.weight
)
"""Tensors that no network of the pipeline has, or that its authors' code does not use."""
_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.(?:safetensors|gguf)$")


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint.

    family, signature: by which it was known.
    codes: how each weight is stored that is not stored as it is.
    denoiser: the authors' name of each of the denoiser's tensors, without a prefix, by its name in the file.
    num_values: of the denoiser, without scales; None where the header does not say.
    is_plain: whether diffusers reads the file as it is.
    """

    family: Family
    signature: Signature
    prediction: PredictionType = field(default=PredictionType(), compare=False)
    codes: Mapping[str, Codes] = field(default_factory=dict, compare=False)
    denoiser: Mapping[str, str] = field(default_factory=dict, compare=False)
    num_values: int | None = field(default=None, compare=False)
    is_plain: bool = field(default=True, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def entry(self) -> str:
        """The catalogue's name of the model with the same configuration."""
        assert self.signature.entry is not None
        return self.signature.entry

    @property
    def component(self) -> str | None:
        """The only component in the file; None for a whole pipeline."""
        return self.signature.component

    @property
    def denoiser_name(self) -> str:
        """The denoiser's name in a pipeline of diffusers."""
        return "transformer" if self.family.is_transformer else "unet"

    @property
    def needs_configuration(self) -> bool:
        """Whether the catalogue lacks its model, whose configuration must lie beside the file."""
        return self.entry not in CATALOGUE


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
    """Identify the contents of a checkpoint by its header."""
    header = (
        read_header(path) if is_loaded or path.suffix != SUFFIX else read_gguf_header(path, is_whole=False)
    )
    if path.suffix == SUFFIX and is_loaded:
        check_installed(path)
    with reading(path, problem="is not a model that vivace knows", advice=SUPPORTED):
        return _contents_of(path, header, read_metadata(path), is_configured)


def _contents_of(
    path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str], is_configured: bool
) -> Contents:
    names = TensorNames(tensors)
    found = signature_of(path, names, tensors)
    if found is None:
        example = f"its {len(tensors)} tensors are called {min(tensors)[:80]!r} and so on"
        raise UnusableModel(f"{path} is not a model that vivace knows; {SUPPORTED} ({example})")
    family, row = found
    if family is None or row.entry is None:
        raise UnusableModel(f"{path} is {row.what}; {advice_for(row)}")
    if row.entry not in CATALOGUE and not is_configured:
        raise UnusableModel(
            f"{path} is {row.what}, and does not say whether it predicts noise or v; put it into a folder with its "
            "model_index.json and configuration, or give it as a folder in diffusers' format"
        )
    if path.suffix == SUFFIX and row.component is None:
        raise UnusableModel(f"{path} holds a whole pipeline; GGUF files are read of denoisers alone")
    codes = {} if path.suffix == SUFFIX else codes_of(path, tensors, metadata)
    prediction = prediction_of(path, tensors, metadata) if row.tells_prediction else PredictionType()
    denoiser = _denoiser(names, family)
    if row.component is None and (other := next((name for name in codes if name not in denoiser), None)):
        raise UnusableModel(
            f"{path} has {codes[other].scale} beside {other}; in files of whole models vivace reads scales of the "
            "denoiser alone; give the model in 16 bits"
        )
    unused = _unused(tensors, denoiser, family, row)
    by_name = next((note for word, note in row.notes_by_name.items() if word in path.name.lower()), "")
    notes = [row.note, prediction.note, by_name, _stored(path, codes, tensors), unused]
    own = [name for name in denoiser if not is_marker(name)]
    is_counted = path.suffix != SUFFIX and all(code.kind == "scaled" for code in codes.values())
    return Contents(
        family,
        row,
        prediction,
        codes,
        denoiser,
        sum(math.prod(tensors[name]["shape"]) for name in own) if is_counted else None,
        not codes and _is_read_by_diffusers(path, names, family, row, tensors),
        tuple(note for note in notes if note),
    )


def _denoiser(names: TensorNames, family: Family) -> dict[str, str]:
    """Return the names of the denoiser's tensors in the file, with and without their prefix."""
    assert family.files is not None
    others = (*roots_of(FAMILIES), "text_encoder.", "text_encoder_2.", "model_ema.", *MARKERS)

    def is_own(own: str, name: str) -> bool:
        if names.prefix:
            return name.startswith(names.prefix)
        modules = family.files.modules if family.files else ()
        return own.startswith(modules) if modules else not own.startswith(others)

    return {name: own for own, name in names.own.items() if is_own(own, name)}


def _is_read_by_diffusers(
    path: Path, names: TensorNames, family: Family, row: Signature, tensors: Mapping[str, Any]
) -> bool:
    """Whether diffusers reads a file without codes as it is. It knows tensors of some families with some prefixes, in
    some sizes. Of others it changes names by their parts, whatever they are."""
    assert family.files is not None
    files, kinds = family.files, set()
    prefixes = files.plain_prefixes
    if path.suffix == SUFFIX:
        kinds = {about["dtype"] for about in tensors.values()}
        prefixes = tuple(prefix for prefix in prefixes if not prefix)
    return (
        (row.component is None or files.is_plain_alone)
        and names.prefix in prefixes
        and kinds <= {*KEPT_TYPES, *FLOAT_TYPES}
        and all(tensors[names.own[name]]["shape"][axis] == length for name, axis, length in files.plain_sizes)
    )


def _unused(tensors: Mapping[str, Any], denoiser: Mapping[str, str], family: Family, row: Signature) -> str:
    """Return the number of tensors that are neither read nor known marks, and their names."""
    parts = () if row.component is not None else roots_of([family])
    left = [
        name
        for name in tensors
        if name not in denoiser
        and (not name.startswith(parts) or _is_said_unused(name))
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
        dtypes = [tensors[name]["dtype"] for name, code in codes.items() if code.kind == "scaled"]
        stored = f"{sum(dtype.startswith('F8') for dtype in dtypes)} in fp8"
        if in_int8 := dtypes.count("I8"):
            stored += (
                f", {in_int8} in int8, {sum(code.rotation > 0 for code in codes.values())} of them rotated"
            )
        notes.append(f"{number} weights ({stored}) are multiplied by their scales as they are loaded")
    notes += [f"{n} weights in {kind} are dequantised as they are loaded" for kind, n in kinds_of.items()]
    return "; ".join(notes)


def roots_of(families: Iterable[Family]) -> tuple[str, ...]:
    """Return the beginnings of the names of all tensors besides the denoiser's in whole files of families."""
    rows = [row for family in families if family.files for row in family.files.signatures]
    return tuple(dict.fromkeys(part.prefix.partition(".")[0] + "." for row in rows for part in row.parts))


def _is_leftover(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _LEFTOVERS)


def _is_said_unused(name: str) -> bool:
    """Whether it is one to tell of: not positions, a copy of the embeddings, or what every file of SD 2 has."""
    usual = (".position_ids", ".encoder.embed_tokens.weight", "cond_stage_model.model.text_projection")
    return _is_leftover(name) and not name.endswith(usual)


def check_parts(path: Path, parts: Iterable[FilePart], components: Mapping[str, Any]) -> None:
    """Raise UnusableModel unless a whole file's VAE and text encoders have as many weights as the pipeline's. diffusers
    leaves out what it does not know, so an encoder with more layers would draw other images without a word."""
    advice = "it is another model, or a part of one; give it as a folder in diffusers' format"
    header = read_header(path)
    left = {name for name in header if name.startswith(roots_of(FAMILIES)) and not _is_leftover(name)}
    for part in parts:
        component = components.get(part.component)
        if component is None:
            continue
        own = {name for name in left if name.startswith(part.prefix)}
        left -= own
        if part.lacks_last:
            last = f"{part.prefix}transformer.resblocks.{component.config.num_hidden_layers}."
            own = {name for name in own if not name.startswith(last)}
        stored = sum(math.prod(header[name]["shape"]) for name in own)
        expected = sum(
            tensor.numel()
            for name, tensor in component.state_dict().items()
            if not name.endswith(("position_ids", "encoder.embed_tokens.weight"))
        )
        if stored != expected:
            raise UnusableModel(
                f"{path} has {stored:,} weights in its {part.component}, and its configuration {expected:,}; {advice}"
            )
    if left:
        raise UnusableModel(
            f"{path} has {len(left)} tensors more than its VAE and text encoders, such as {min(left)}; {advice}"
        )
