"""Load the text encoders of a folder, require every weight, and tokenizers that fit them.

transformers fills missing weights at random, and makes an empty tokenizer of a folder that has none.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from vivace.errors import UnusableModel
from vivace.models.headers import read_header
from vivace.models.pipeline_defaults import read_config
from vivace.models.repository import INDEX, components_of

_LEAST_LENGTH = 3
"""Tokens of a prompt of one word, with start and end."""
_OLDER = {".query.": ".to_q.", ".key.": ".to_k.", ".value.": ".to_v.", ".proj_attn.": ".to_out.0."}
"""Names of VAEs' attention in older folders, which diffusers reads."""
_OTHER_SHAPE = re.compile(
    r"because (\S+) expected shape torch\.Size\((\[[\d, ]*\])\), but got torch\.Size\((\[[\d, ]*\])\)"
)
"""diffusers' message."""
_NUMBERED = re.compile(r"(.+?)\.\d+\.")


# Libraries leave out unused weights without a word, and name no file for those of another shape.
class UnusedWeightsWarning(UserWarning):
    """A model's files have weights that are not used."""


def load_text_encoders(
    folder: Path, dtype: Any, variant: str | None, without: Collection[str]
) -> dict[str, Any]:
    """Return the models of transformers that a folder's pipeline has, by component, as diffusers loads them.

    Args:
        variant: of the files, such as "fp16"; a component that has none of it is read from its plain files.
        without: components that are not to be loaded.

    Raises:
        UnusableModel: the files of one lack a weight; names both.
    """
    import transformers

    models: dict[str, Any] = {}
    for name, (library, class_name) in components_of(read_config(folder / INDEX)).items():
        kind: Any = getattr(transformers, class_name, object) if library == "transformers" else object
        if name in without or not issubclass(kind, transformers.PreTrainedModel):
            continue
        own = folder / name
        has_variant = variant is not None and any(own.glob(f"*.{variant}*.safetensors"))
        models[name], loading = kind.from_pretrained(
            str(own),
            dtype=dtype,
            variant=variant if has_variant else None,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, with their names
        )
        for key, stored, expected in sorted(loading["mismatched_keys"]):
            raise UnusableModel(
                f"{own} has {key} with the shape {list(stored)}, and its config.json means {list(expected)}; it is "
                "another model's"
            )
        if missing := sorted(loading["missing_keys"]):
            raise UnusableModel(
                f"{own} lacks {missing[0]}"
                + (f" and {len(missing) - 1} more weights" if missing[1:] else "")
                + "; copy or download it again"
            )
        report_unused(own, name, models[name], loading["unexpected_keys"])
    return models


def check_tokenizers(pipe: Any, model: str) -> None:
    """Raise UnusableModel if a tokenizer is empty, has ids that its encoder lacks, or reads more than its encoder.

    Args:
        model: its name for messages.
    """
    for name, tokenizer in pipe.components.items():
        encoder: Any = getattr(pipe, name.replace("tokenizer", "text_encoder"), None)
        if (
            not name.startswith("tokenizer")
            or tokenizer is None
            or not hasattr(encoder, "get_input_embeddings")
        ):
            continue
        words = getattr(encoder.get_input_embeddings(), "num_embeddings", None)
        vocabulary = tokenizer.get_vocab().values() if hasattr(tokenizer, "get_vocab") else ()
        positions = getattr(encoder.config, "max_position_embeddings", None)
        has_positions = encoder.config.model_type.startswith("clip") and positions is not None
        length = tokenizer.model_max_length if has_positions else None
        problem = None
        if words and vocabulary and len(vocabulary) < words // 2:
            problem = f"knows {len(vocabulary):,} tokens: its files are missing, or another model's"
        elif words and vocabulary and max(vocabulary) >= words:
            problem = f"has ids up to {max(vocabulary):,}: it is another model's"
        elif length is not None and not _LEAST_LENGTH <= length <= positions:
            shown = f"{length:,}" if length < 1e6 else "no length"
            problem = (
                f"has the model_max_length {shown} in its tokenizer_config.json; it takes at most {positions}"
            )
        if problem is not None:
            raise UnusableModel(
                f"{model}'s {name} does not fit its {name.replace('tokenizer', 'text_encoder')}, which has "
                f"{words:,} tokens: it {problem}; copy the model's own {name} folder again"
            )


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
