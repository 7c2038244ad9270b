"""Distilled models by the names of their files: no tensor tells SDXL Lightning from SDXL, which takes 50 steps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vivace.architectures.entry import Entry, SamplerEntry

_KINDS = {
    "turbo": r"turbo",
    "lightning": r"lightning",
    "hyper": r"hyper(?:[-_ ]?(?:sd|xl|flux))|hyper(?![-_ ]?[a-z])",
    "lcm": r"(?<![a-z])lcm(?![a-z])|LCM",
    "dmd": r"(?<![a-z])dmd2?(?![a-z])|DMD2?",
    "schnell": r"schnell",
}
_STEPS = re.compile(r"(?<!\d)(\d{1,2})[-_ ]?steps?", re.IGNORECASE)
_TITLES = ("modelspec.title", "ss_output_name", "general.name")
_MOST_STEPS = 16
"""A model that is drawn in more steps is not distilled to few."""
_TRAILING = {"timestep_spacing": "trailing"}
_TURBO = SamplerEntry(class_name="EulerAncestralDiscreteScheduler", overrides=_TRAILING)
_OTHERS: dict[tuple[str, str], dict[str, Any]] = {
    ("sdxl", "turbo"): {"num_inference_steps": 4, "guidance_scale": 0.0, "scheduler": _TURBO},
    ("sdxl", "dmd"): {
        "num_inference_steps": 4, "guidance_scale": 0.0, "scheduler": SamplerEntry(class_name="LCMScheduler"),
    },
    ("sd35-large", "turbo"): {"num_inference_steps": 4, "guidance_scale": 0.0},
    ("flux-dev", "schnell"): {"num_inference_steps": 4},
    ("flux2-dev", "turbo"): {"num_inference_steps": 8, "guidance_scale": 2.5},
    ("qwen-image", "lightning"): {"num_inference_steps": 8, "arguments": {"true_cfg_scale": 1.0}},
}  # fmt: skip
"""Settings of distilled models for which the catalogue has no LoRA, from their cards. SDXL Turbo itself draws in 1 to 4
steps at 512 x 512; most of those that are made of it at 1024."""
_OFFICIAL_TURBO = re.compile(r"sd[-_ ]?xl[-_ ]turbo", re.IGNORECASE)


def kind_of(name: str) -> str | None:
    """Return the kind of distillation that a file's name or title tells of."""
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)
    return next(
        (
            kind
            for kind, pattern in _KINDS.items()
            if re.search(pattern, plain.lower()) or re.search(pattern, plain)
        ),
        None,
    )


def note_of_few_steps(name: str, steps: int) -> str:
    """Return a note if a name tells of a model of few steps, which is drawn in many; else ""."""
    kind = kind_of(name)
    if kind is None or steps <= _MOST_STEPS:
        return ""
    return (
        f"its name tells of {kind}, which draws in few steps, and it is drawn in {steps}: set --num-inference-steps "
        "and --guidance-scale as its card says"
    )


def with_few_steps(entry: Entry, name: str, metadata: Mapping[str, str]) -> tuple[Entry, str]:
    """Return the settings of a single file, and a note if its name or title tells of a model of few steps.

    Args:
        entry: that of the model whose configuration it uses.
        name: of the file, without its suffix.
        metadata: of its header.
    """
    titles = [name, *(metadata[key] for key in _TITLES if key in metadata)]
    title = next((title for title in titles if kind_of(title)), None)
    if title is None or entry.num_inference_steps <= _MOST_STEPS:
        return entry, ""
    kind = kind_of(title)
    assert kind is not None
    named = next((int(match[1]) for each in titles if (match := _STEPS.search(each))), None)
    loras = [each for each in entry.few_steps if each.kind == kind]
    if loras:
        lora = next((each for each in loras if named in each.steps), loras[0])
        own: dict[str, Any] = {
            "num_inference_steps": lora.steps[0], "guidance_scale": lora.guidance_scale, "scheduler": lora.scheduler,
        }  # fmt: skip
    elif (entry.name, kind) in _OTHERS:
        own = dict(_OTHERS[entry.name, kind])
    else:
        return entry, note_of_few_steps(title, entry.num_inference_steps)
    if kind == "turbo" and entry.name == "sdxl" and _OFFICIAL_TURBO.match(title):
        own |= {"num_inference_steps": 1, "height": 512, "width": 512}
    if named is not None and 1 <= named <= _MOST_STEPS:
        own["num_inference_steps"] = named
    if entry.scheduler is not None:  # that of what it predicts
        own.pop("scheduler", None)
    if "arguments" in own:
        own["arguments"] = entry.arguments | own["arguments"]
    changed = entry.model_copy(update=own | {"few_steps": ()})
    steps = changed.num_inference_steps
    guidance = "" if entry.ignores_guidance else f" with guidance {changed.guidance_scale:g}"
    sampler = f" by {changed.scheduler.class_name}" if "scheduler" in own and changed.scheduler else ""
    return changed, (
        f"its name or title tells of {kind}: drawn in {steps} step{'s' * (steps > 1)}{guidance}{sampler} at "
        f"{changed.width}x{changed.height}; if its card says otherwise, set --num-inference-steps and --guidance-scale"
    )
