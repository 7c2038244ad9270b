"""The limits that `vivace calibrate witness` chose on this machine, a file in vivace's cache for each model and
scorer."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pydantic import ValidationError

from vivace.errors import StoreError
from vivace.foundation.spec.limits import (
    CLIP_LIMIT,
    CLIP_LIMITS,
    WITNESS_LIMIT,
    JudgeKind,
    Limits,
    WitnessCalibration,
)
from vivace.foundation.untrusted.destinations import replace
from vivace.foundation.untrusted.files import cache_folder, read_text, user_path

_MAX_BYTES = 1_000_000
_TOGETHER = " and "  # between the names of a CLIP model and a second witness


def keep(calibration: WitnessCalibration) -> Path:
    """Write a calibration, replacing an earlier one of the same model and scorer; return its file."""
    file = file_of(calibration.model, calibration.scorer)
    replace(file, (calibration.model_dump_json(indent=2) + "\n").encode())
    return file


def kept(model: str, scorer: str) -> WitnessCalibration | None:
    """Return the calibration of a scorer for a model, both NAME@REVISION; None if there is none."""
    file = file_of(model, scorer)
    try:
        if not file.is_file():
            return None
        return WitnessCalibration.model_validate_json(read_text(file, _MAX_BYTES))
    except (OSError, ValueError, ValidationError) as error:
        raise StoreError(
            f"{file} is not a calibration ({str(error).splitlines()[0]}); delete it, and run `vivace calibrate "
            "witness` again"
        ) from None


def calibrated_limits(limits: Limits, model: str, scorer: str | None) -> Limits:
    """Return the limits with the calibrated ones of the model's scorers. Limits that the user set stay."""
    changed = {
        field: limit
        for field, _, name in _unset(scorer, limits)
        if (limit := calibrated_limit(model, name)) is not None
    }
    return limits.model_copy(update=changed) if changed else limits


def _unset(scorer: str | None, limits: Limits) -> list[tuple[str, JudgeKind, str]]:
    """Return the field, the kind and the name of each scorer whose limit the user did not set."""
    first, _, second = (scorer or "").partition(_TOGETHER)
    every: list[tuple[str, JudgeKind, str, bool]] = [
        ("clip", "clip", first, limits.clip == "auto"),
        ("witness", "blip", second, "witness" not in limits.model_fields_set),
    ]
    return [(field, kind, name) for field, kind, name, is_unset in every if name and is_unset]


def limit_notes(model: str, scorer: str | None, limits: Limits) -> list[str]:
    """Describe the source of each scorer's limit, unless the user set it."""
    notes = (limit_note(model, name, kind) for _, kind, name in _unset(scorer, limits))
    return [note for note in notes if note]


def limit_note(model: str, scorer: str, kind: JudgeKind) -> str:
    """Describe the source of one scorer's limit; "" if it was calibrated with vivace."""
    usual = CLIP_LIMIT if kind == "clip" else WITNESS_LIMIT
    name = _name(scorer)
    if ":" in name and not user_path(name).exists():  # module:function
        return f"CLIP here is {name}, and its limit that of CLIP models ({100 * usual:g} %; --min-quality clip=...)"
    calibration = kept(model, scorer) if model else None
    if calibration is None:
        if scorer in CLIP_LIMITS or name in CLIP_LIMITS:  # calibrated with vivace
            return ""
        command = f"vivace calibrate witness --model {_name(model)} --witness {kind}:{name}"
        return (
            f"no calibration of {name} for photographs: its limit ({100 * usual:g} %) comes from drawn shapes; "
            + (command if model else "`vivace calibrate witness` chooses one for a model that runs here")
        )
    if calibration.limit is None:
        return f"{name} saw no damage when it was calibrated for {_name(model)}: its limit stays a guess"
    return (
        f"the limit of {name} ({100 * calibration.limit:g} %) was calibrated on {calibration.num_images} images of "
        f"{_name(model)} on {calibration.made}"
    )


def calibrated_limit(model: str, scorer: str) -> float | None:
    """Return the limit of one scorer that was chosen for the model; None if none was."""
    calibration = kept(model, scorer) if model else None
    return None if calibration is None else calibration.limit


def _name(identity: str) -> str:
    """Return NAME of NAME@REVISION; a name may contain another "@", of a revision on the hub."""
    return identity.rpartition("@")[0] or identity


def file_of(model: str, scorer: str) -> Path:
    """Return the file of a scorer's calibration for a model, both NAME@REVISION."""
    digest = hashlib.sha256(f"{model}\n{scorer}".encode()).hexdigest()[:32]
    return cache_folder() / "witness" / f"{digest}.json"
