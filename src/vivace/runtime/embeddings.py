"""Encode prompts before a call, so that the timed part runs no text encoder."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from vivace.architectures import family_of_pipeline
from vivace.errors import Unsupported
from vivace.machinery.technique import call_parameters
from vivace.machinery.technique.pipeline_code import encoded_names
from vivace.models.tasks import own_task
from vivace.runtime.session import Session

_INSTRUCTION = "complex_human_instruction"
"""Sana's argument for the instruction to its language model."""


def encode(session: Session, prompts: Sequence[str]) -> dict[str, Any]:
    """Return the prompts' embeddings as keyword arguments for `session(...)`, on the pipeline's device.

    Raises:
        Unsupported: the pipeline has no `encode_prompt`, or its result is not a known tuple.
    """
    import torch

    pipe, defaults = session.pipe, session.defaults
    name = type(pipe).__name__
    family = family_of_pipeline(name)
    off = 1.0 if family is None or family.doubled is None else family.doubled.off
    if not hasattr(pipe, "encode_prompt"):
        raise Unsupported(f"{name} takes no embeddings: it has no encode_prompt; measure with --text prompts")
    arguments = {
        "prompt": list(prompts),
        "prompt_2": None,
        "prompt_3": None,
        "device": pipe._execution_device,
        "num_images_per_prompt": 1,
        "do_classifier_free_guidance": float(defaults.get("guidance_scale", 0)) > off,
        "max_sequence_length": defaults.get("max_sequence_length"),
    }
    for_call = call_parameters(pipe)
    if _INSTRUCTION in for_call:  # put in front of each prompt, by the call alone
        arguments[_INSTRUCTION] = session.arguments.get(_INSTRUCTION, for_call[_INSTRUCTION].default)
    # The class's method: on the instance it may be wrapped by a timer.
    accepted = inspect.signature(type(pipe).encode_prompt).parameters
    if "image" in accepted and own_task(name) == "edit":
        raise Unsupported(f"{name} encodes prompts together with images; measure with --text prompts")
    arguments = {
        k: v for k, v in arguments.items() if k in accepted and not (k == "max_sequence_length" and v is None)
    }
    with torch.no_grad(), session.surroundings():
        encoded = pipe.encode_prompt(**arguments)
        names = encoded_names(pipe)
        if not isinstance(encoded, tuple) or len(names) != len(encoded):
            raise Unsupported(f"{name} returns embeddings in an unknown format; measure with --text prompts")
        embeddings = {
            key: value for key, value in zip(names, encoded, strict=True) if key and value is not None
        }
        negative = session.arguments.get("negative_prompt")
        # True CFG: the negative prompt is encoded like a prompt.
        if negative is not None and "negative_prompt_embeds" not in names:
            encoded = pipe.encode_prompt(**arguments | {"prompt": [negative] * len(prompts)})
            embeddings |= {f"negative_{key}": value for key, value in zip(names, encoded, strict=True) if key}
    return embeddings
