"""A checkpoint's prediction: the noise (epsilon), or v, and whether its last noise level is pure noise.

A file says so in marker tensors (`v_pred` and `ztsnr`, as NoobAI's and ComfyUI's), in metadata of the ModelSpec
(`modelspec.prediction_type`), or in that of kohya's scripts (`ss_v_parameterization`, `ss_zero_terminal_snr`).
Epsilon-prediction, which most files have, is not marked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vivace.architectures.entry import SamplerEntry
from vivace.errors import UnusableModel

MARKERS = ("v_pred", "ztsnr")
_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no", "none", "")
_KINDS = {
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
_NAME = re.compile(r"v[-_ ]?pred", re.IGNORECASE)


@dataclass(frozen=True)
class PredictionType:
    """The prediction type of a checkpoint, and where it was read.

    Attributes:
        is_v: v-prediction, not epsilon.
        zero_snr: the last noise level has no signal, so that sampling starts there.
        note: to be shown; empty for an ordinary file.
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
    """Return the prediction type of a UNet's checkpoint.

    Raises:
        UnusableModel: its statements contradict each other, or name another type.
    """
    leaves = {name.rpartition(".")[2]: name for name in names if name.rpartition(".")[2] in MARKERS}
    votes = {f"the tensor {leaves['v_pred']}": True} if "v_pred" in leaves else {}
    for key in _PREDICTION:
        if (value := metadata.get(key, "").strip().lower()) and key in metadata:
            if value not in _KINDS:
                raise UnusableModel(
                    f"{path} says in its metadata ({key}) that it predicts {value[:80]!r}; vivace reads models that "
                    "predict epsilon or v"
                )
            votes[f"{key}={value}"] = _KINDS[value]
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
    if _NAME.search(path.name):
        return PredictionType(
            note="its name tells of v-prediction, but no tensor or metadata does: read as epsilon-prediction"
        )
    return PredictionType()


def _flag(path: Path, metadata: Mapping[str, str], key: str) -> bool | None:
    """Return a boolean of the metadata; None if it is not there.

    Raises:
        UnusableModel: it is neither.
    """
    if key not in metadata:
        return None
    value = metadata[key].strip().lower()
    if value not in _TRUE + _FALSE:
        raise UnusableModel(f"{path} has the metadata {key}={value[:80]!r}, which is neither True nor False")
    return value in _TRUE
