"""Load the text encoders of a folder, and require every weight: transformers fills missing ones at random."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from vivace.errors import UnusableModel
from vivace.models.pipeline_defaults import read_config
from vivace.models.repository import INDEX, components_of
from vivace.models.unused_weights import report_unused


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
