"""How a pipeline guides: its branches as rows of one batch, or as two calls of the denoiser.

It is read from the code of the pipeline's call, where the denoiser's output is taken apart. All inputs of the denoiser
have the same rows in the same order, whatever they are called, so nothing else needs to be known of a pipeline.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from vivace.machinery.families import family_of
from vivace.machinery.families.pipeline_code import call_code, number_of_denoiser_calls, skips_layers
from vivace.machinery.technique import component_of

# Names of the cache contexts in which pipelines make the two calls.
CONDITIONAL, UNCONDITIONAL = "cond", "uncond"
_TAKEN_APART = re.compile(r"^\s*(\w+(?:, \w+)+) = \w+\.chunk\((\d)(?:, dim=0)?\)\s*$", re.MULTILINE)
_OF_THE_TEXT = ("text", "cond")


@dataclass(frozen=True)
class GuidanceRows:
    """Guidance as one call for a batch that holds each image's row several times.

    Attributes:
        number: of rows for each image.
        conditional: the index of the one that follows the prompt.
        as_list: whether the denoiser takes and returns lists of rows.
    """

    number: int
    conditional: int
    as_list: bool = False


def rows_of(pipe: Any) -> GuidanceRows | str:
    """Return the rows in which the pipeline guides, or the reason why they are unknown."""
    name, code = type(pipe).__name__, call_code(pipe)
    if not hasattr(type(pipe), "do_classifier_free_guidance"):
        return f"{name} does not say whether a call is guided"
    denoiser = component_of(pipe, "denoiser")
    if denoiser is None:
        return f"{name} has no unet or transformer"
    if hasattr(type(pipe), "do_perturbed_attention_guidance"):
        return f"{name} guides by perturbed attention too, in rows of its own; take its pipeline without PAG"
    family = family_of(denoiser)
    if family is not None and family.rows_in_lists and family.doubled is not None:
        return GuidanceRows(2, 0, as_list=True)
    layouts = {layout for match in _TAKEN_APART.finditer(code) if (layout := _layout(match)) is not None}
    if len(layouts) != 1:
        where = "in no batch of two or three rows" if not layouts else "in batches of several kinds"
        return f"{name} guides {where} that is known here"
    calls = number_of_denoiser_calls(pipe)
    # Stable Diffusion 3's second call leaves out layers: another guidance, which says so by an argument.
    if calls > 1 and not skips_layers(pipe):
        return f"{name} calls its denoiser {calls} times a step"
    return layouts.pop()


def guides_in_two_calls(pipe: Any) -> bool:
    """Whether the pipeline makes a conditional and then an unconditional denoiser call, in named cache contexts."""
    if not hasattr(getattr(pipe, "transformer", None), "cache_context"):
        return False
    code = call_code(pipe)
    first, second = (code.find(f'cache_context("{name}")') for name in (CONDITIONAL, UNCONDITIONAL))
    return 0 <= first < second


def _layout(match: re.Match[str]) -> GuidanceRows | None:
    """Return the rows that a line of code splits; None for other lines, such as those that halve a mask."""
    names = [name.split("_") for name in match[1].split(", ")]
    without = [index for index, words in enumerate(names) if "uncond" in words]
    texts = [index for index, words in enumerate(names) if words[-1] in _OF_THE_TEXT]
    if len(names) != int(match[2]) or len(without) != 1 or len(texts) != 1:
        return None
    return GuidanceRows(len(names), texts[0])
