"""Encode prompts ahead of a call, so that the text encoders are outside of what is measured."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from vivace.errors import Unsupported
from vivace.runtime.session import Session

# What `encode_prompt` hands back, by how many things that are, under the names that the pipeline's call takes them by.
_NAMES = {
    2: ("prompt_embeds", "negative_prompt_embeds"),
    3: (
        "prompt_embeds",
        "pooled_prompt_embeds",
        None,
    ),  # FLUX; the third is the places of the words, made anew
    4: (
        "prompt_embeds",
        "negative_prompt_embeds",
        "pooled_prompt_embeds",
        "negative_pooled_prompt_embeds",
    ),
}


def encode(session: Session, prompts: Sequence[str]) -> dict[str, Any]:
    """The prompts' embeddings as keyword arguments for `session(...)`, on the pipeline's device.

    Raises:
        Unsupported: the pipeline has no `encode_prompt` that vivace understands.
    """
    import torch

    pipe, defaults = session.pipe, session.defaults
    name = type(pipe).__name__
    if not hasattr(pipe, "encode_prompt"):
        raise Unsupported(
            f"{name} cannot be given embeddings: it has no encode_prompt; measure with --text prompts"
        )
    wanted = {
        "prompt": list(prompts),
        "prompt_2": None,
        "device": pipe._execution_device,
        "num_images_per_prompt": 1,
        "do_classifier_free_guidance": float(defaults.get("guidance_scale", 0)) > 1,
        "max_sequence_length": defaults.get("max_sequence_length"),
    }
    # Of the class: on the instance a timer may stand in its place.
    accepted = inspect.signature(type(pipe).encode_prompt).parameters
    given = {
        k: v for k, v in wanted.items() if k in accepted and not (k == "max_sequence_length" and v is None)
    }
    with torch.no_grad(), session.surroundings():
        found = pipe.encode_prompt(**given)
        names = _NAMES.get(len(found)) if isinstance(found, tuple) else None
        if names is None:
            raise Unsupported(f"{name} encodes prompts in a way of its own; measure with --text prompts")
        told = {key: value for key, value in zip(names, found, strict=True) if key and value is not None}
        negative = session.arguments.get("negative_prompt")
        if negative is not None and "negative_prompt_embeds" not in names:  # true CFG: encoded as prompts are
            found = pipe.encode_prompt(**given | {"prompt": [negative] * len(prompts)})
            told |= {f"negative_{key}": value for key, value in zip(names, found, strict=True) if key}
    return told
