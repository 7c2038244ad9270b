"""What a checkpoint's metadata and name tell of it, and its tensors do not: what it predicts, and in how many steps.

It predicts the noise (epsilon), or v, and its last noise level may be pure noise. A file says so in marker tensors
(`v_pred` and `ztsnr`, as NoobAI's and ComfyUI's), in metadata of the ModelSpec (`modelspec.prediction_type`), or in
that of kohya's scripts (`ss_v_parameterization`, `ss_zero_terminal_snr`). Epsilon-prediction, which most files have, is
not marked. No tensor tells SDXL Lightning from SDXL, which takes 50 steps: the names of files do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vivace.architectures import FAMILIES
from vivace.architectures.entry import Entry, SamplerEntry
from vivace.architectures.family import DistilledFile
from vivace.errors import UnusableModel

MARKERS = ("v_pred", "ztsnr")
_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no", "none", "")
_PREDICTIONS = {
    "v": True,
    "v_prediction": True,
    "v-prediction": True,
    "v_pred": True,
    "vpred": True,
    "velocity": True,
    "epsilon": False,
    "eps": False,
    "noise": False,
}
_PREDICTION = ("modelspec.prediction_type", "modelspec.predict_key", "prediction_type")
_TELLS_V = re.compile(r"v[-_ ]?pred", re.IGNORECASE)
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


@dataclass(frozen=True)
class PredictionType:
    """The prediction type of a checkpoint, and where it was read.

    Attributes:
        zero_snr: the last noise level has no signal, so that sampling starts there.
    """

    is_v: bool = False
    zero_snr: bool = False
    note: str = ""

    @property
    def sampler(self) -> SamplerEntry | None:
        """The scheduler that the prediction needs; None for the model's own."""
        if not self.is_v:
            return None
        settings: dict[str, bool | str] = {"prediction_type": "v_prediction"}
        if self.zero_snr:
            settings |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
        return SamplerEntry(class_name="EulerDiscreteScheduler", overrides=settings)


def prediction_of(path: Path, names: Iterable[str], metadata: Mapping[str, str]) -> PredictionType:
    """Return the prediction type of a UNet's checkpoint."""
    leaves = {name.rpartition(".")[2]: name for name in names if name.rpartition(".")[2] in MARKERS}
    votes = {f"the tensor {leaves['v_pred']}": True} if "v_pred" in leaves else {}
    for key in _PREDICTION:
        if (value := metadata.get(key, "").strip().lower()) and key in metadata:
            if value not in _PREDICTIONS:
                raise UnusableModel(
                    f"{path} says in its metadata ({key}) that it predicts {value[:80]!r}; vivace reads models that "
                    "predict epsilon or v"
                )
            votes[f"{key}={value}"] = _PREDICTIONS[value]
    if (is_v := _flag(path, metadata, "ss_v_parameterization")) is not None:
        votes[f"ss_v_parameterization={is_v}"] = is_v
    zero = {f"the tensor {leaves['ztsnr']}"} if "ztsnr" in leaves else set()
    if _flag(path, metadata, "ss_zero_terminal_snr"):
        zero.add("ss_zero_terminal_snr=True")
    if len(set(votes.values())) > 1:
        text = " and ".join(f"{what} ({'v' if vote else 'epsilon'})" for what, vote in votes.items())
        raise UnusableModel(
            f"{path} contradicts itself on what it predicts: {text}; give it as a folder in diffusers' format, whose "
            f"scheduler says which holds"
        )
    if votes and not any(votes.values()):
        note = (
            f"zero terminal SNR ({', '.join(sorted(zero))}) is left out: {', '.join(votes)}" if zero else ""
        )
        return PredictionType(note=note)
    if votes or zero:
        because = ", ".join([*votes, *sorted(zero)])
        how = "v-prediction, zero terminal SNR" if zero else "v-prediction, without zero terminal SNR"
        assumed = "" if votes else "; v is assumed, since epsilon cannot be sampled from pure noise"
        return PredictionType(is_v=True, zero_snr=bool(zero), note=f"{how}: {because}{assumed}")
    if _TELLS_V.search(path.name):
        return PredictionType(
            note="its name tells of v-prediction, but no tensor or metadata does: read as epsilon-prediction"
        )
    return PredictionType()


def _flag(path: Path, metadata: Mapping[str, str], key: str) -> bool | None:
    """Return a boolean of the metadata; None if it is not there."""
    if key not in metadata:
        return None
    value = metadata[key].strip().lower()
    if value not in _TRUE + _FALSE:
        raise UnusableModel(f"{path} has the metadata {key}={value[:80]!r}, which is neither True nor False")
    return value in _TRUE


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
    """Return the settings of a single file, and a note if its name or title tells of a model of few steps."""
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
    elif (made := _made_of(entry.name, kind, title)) is not None:
        own = dict(made.settings)
    else:
        return entry, note_of_few_steps(title, entry.num_inference_steps)
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


def _made_of(model: str, kind: str, title: str) -> DistilledFile | None:
    every = (made for family in FAMILIES for made in family.distilled)
    return next(
        (
            made
            for made in every
            if (made.of, made.kind) == (model, kind) and re.match(made.named, title, re.IGNORECASE)
        ),
        None,
    )
