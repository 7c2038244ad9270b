"""Load the text encoders of a folder, require every weight, and tokenizers that fit them.

transformers fills missing weights at random, and makes an empty tokenizer of a folder that has none.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from vivace.errors import UnusableModel
from vivace.models.pipeline_defaults import read_config
from vivace.models.repository import INDEX, components_of
from vivace.models.unused_weights import report_unused

_LEAST_LENGTH = 3
"""Tokens of a prompt of one word, with start and end."""


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
        encoder = getattr(pipe, name.replace("tokenizer", "text_encoder"), None)
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
