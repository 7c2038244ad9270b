"""The VAE and the text encoders in files of whole models: every tensor is one of theirs, or is refused by name.

diffusers leaves out what it does not know, so an encoder with more layers would draw other images without a word. The
names are those of the authors' own files: CompVis' VAE, OpenAI's CLIP, OpenCLIP, T5.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from vivace.architectures import FAMILIES, Family
from vivace.architectures.files import FilePart
from vivace.errors import UnusableModel
from vivace.models.checkpoints.headers import read_header

Shapes = dict[str, tuple[int, ...]]
LEFTOVERS = (
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
_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
_RESAMPLED = {"downsamplers.0": "downsample", "upsamplers.0": "upsample"}
_OPEN_CLIP = {
    "embeddings.position_embedding.weight": "positional_embedding",
    "embeddings.token_embedding.weight": "token_embedding.weight",
    "text_projection.weight": "text_projection",
}
_OPEN_CLIP_PARTS = {
    "final_layer_norm": "ln_final",
    "encoder.layers": "transformer.resblocks",
    "self_attn.out_proj": "attn.out_proj",
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}
_ADVICE = "it is another model, or a part of one; give it as a folder in diffusers' format"


def _vae(state: Mapping[str, tuple[int, ...]]) -> Shapes:
    """Return the names of CompVis' code, whose decoder counts its levels from the lowest resolution on."""
    levels = 1 + max((int(match[1]) for name in state if (match := _LEVEL.match(name))), default=0)
    return {_of_vae(name, levels): shape for name, shape in state.items()}


_LEVEL = re.compile(r"decoder\.up_blocks\.(\d+)\.")


def _of_vae(name: str, levels: int) -> str:
    name = name.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
    name = re.sub(r"mid_block\.resnets\.(\d+)", lambda match: f"mid.block_{int(match[1]) + 1}", name)
    if "mid_block.attentions.0." in name:
        for own, theirs in _ATTENTION.items():
            name = name.replace(f"mid_block.attentions.0.{own}.", f"mid.attn_1.{theirs}.")
    name = re.sub(r"down_blocks\.(\d+)", r"down.\1", name)
    name = re.sub(r"up_blocks\.(\d+)", lambda match: f"up.{levels - 1 - int(match[1])}", name)
    name = re.sub(r"\.resnets\.(\d+)", r".block.\1", name)
    for own, theirs in _RESAMPLED.items():
        name = name.replace(own, theirs)
    return name


def _clip(state: Mapping[str, tuple[int, ...]]) -> Shapes:
    return {f"text_model.{name.removeprefix('text_model.')}": shape for name, shape in state.items()}


def _open_clip(state: Mapping[str, tuple[int, ...]]) -> Shapes:
    """Return OpenCLIP's names, which has query, key and value in one matrix, and a transposed projection."""
    shapes: Shapes = {}
    for own, shape in state.items():
        name = own.removeprefix("text_model.")
        if match := re.fullmatch(r"encoder\.layers\.(\d+)\.self_attn\.[qkv]_proj\.(weight|bias)", name):
            joined = f"transformer.resblocks.{match[1]}.attn.in_proj_{match[2]}"
            shapes[joined] = (3 * shape[0], *shape[1:])
            continue
        for part, theirs in _OPEN_CLIP_PARTS.items():
            name = name.replace(part, theirs)
        is_transposed = name == "text_projection.weight"
        shapes[_OPEN_CLIP.get(name, name)] = shape[::-1] if is_transposed else shape
    return shapes


def _t5(state: Mapping[str, tuple[int, ...]]) -> Shapes:
    return {name: shape for name, shape in state.items() if name != "encoder.embed_tokens.weight"}


_NAMES: dict[str, Callable[[Mapping[str, tuple[int, ...]]], Shapes]] = {
    "compvis": _vae,
    "clip": _clip,
    "open_clip": _open_clip,
    "t5": _t5,
}
"""The names of a part's tensors in its authors' code, from diffusers'."""


def roots_of(families: Iterable[Family]) -> tuple[str, ...]:
    """Return the beginnings of the names of all tensors besides the denoiser's in whole files of families."""
    rows = [row for family in families if family.files for row in family.files.signatures]
    return tuple(dict.fromkeys(part.prefix.partition(".")[0] + "." for row in rows for part in row.parts))


def is_leftover(name: str) -> bool:
    """Whether a tensor of a VAE or text encoder is left by training or tools, and no part of the network."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in LEFTOVERS)


def is_said_unused(name: str) -> bool:
    """Whether it is one to tell of: not positions, a copy of the embeddings, or what every file of SD 2 has."""
    usual = (".position_ids", ".encoder.embed_tokens.weight", "cond_stage_model.model.text_projection")
    return is_leftover(name) and not name.endswith(usual)


def check_whole_file(path: Path, parts: Iterable[FilePart], components: Mapping[str, Any]) -> None:
    """Raise UnusableModel unless a file's VAE and text encoders are those of the pipeline, tensor by tensor.

    Args:
        parts: all that the file has beside the denoiser.
        components: of the pipeline, by name; their values are not read.
    """
    header = read_header(path)
    of_parts = {name for name in header if name.startswith(roots_of(FAMILIES))}
    for part in parts:
        component = components.get(part.component)
        if component is None:
            continue
        names = _NAMES[part.code](
            {name: tuple(tensor.shape) for name, tensor in component.state_dict().items()}
        )
        names = {name: shape for name, shape in names.items() if not name.endswith("position_ids")}
        lacking = [name for name in names if part.prefix + name not in header]
        if lacking:
            raise UnusableModel(
                f"{path} lacks {len(lacking)} of {len(names)} tensors of its {part.component}, such as "
                f"{part.prefix}{lacking[0]}; {_ADVICE}"
            )
        for name, shape in names.items():
            stored = tuple(header[part.prefix + name]["shape"])
            if _plain(stored) != _plain(shape):
                raise UnusableModel(
                    f"{path}: {part.prefix}{name} has the shape {list(stored)}, and the {part.component} "
                    f"{list(shape)}; {_ADVICE}"
                )
        of_parts -= {part.prefix + name for name in names}
        if part.lacks_last:
            last = f"{part.prefix}transformer.resblocks.{component.config.num_hidden_layers}."
            of_parts = {name for name in of_parts if not name.startswith(last)}
    more = sorted(name for name in of_parts if not is_leftover(name))
    if more:
        raise UnusableModel(
            f"{path} has {len(more)} tensors more than its VAE and text encoders, such as {more[0]}; {_ADVICE}"
        )


def _plain(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without the sides of a 1x1 convolution, as which older VAEs have their attention's matrices."""
    return shape[:2] if len(shape) == 4 and shape[2:] == (1, 1) else shape
