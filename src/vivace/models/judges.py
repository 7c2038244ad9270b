"""Models that score images, as KIND:NAME: any CLIP or BLIP in transformers' format, and reward models of that form."""

from __future__ import annotations

from dataclasses import dataclass

from vivace.errors import UsageError, nearest
from vivace.foundation.spec.limits import JudgeKind
from vivace.foundation.untrusted.files import read_json, user_path
from vivace.models.scorers import LocatedScorer, find_scorer, find_witness

PICKSCORE = "yuvalkirstain/PickScore_v1"
_KINDS: dict[str, JudgeKind] = {"clip": "clip", "pickscore": "clip", "hpsv2": "clip", "blip": "blip"}
_NOT_LOADED = {
    "imagereward": "ImageReward is published as a pickle, which vivace does not load",
    "hpsv3": "HPSv3 is no CLIP model, and vivace does not know how to ask it",
}


@dataclass(frozen=True)
class LocatedJudge:
    """A model that scores images, queried as a CLIP or as a BLIP for image-text matching."""

    kind: JudgeKind
    scorer: LocatedScorer


def find_judge(text: str, *, download: bool = True) -> LocatedJudge:
    """Find a model that scores images.

    Args:
        text: KIND:NAME or NAME, where NAME is an embedded scorer, a folder, or a repository of the hub. KIND is "clip",
            "blip", "pickscore" (NAME may be left out) or "hpsv2" (a conversion to transformers' format). A folder
            without KIND is what its config.json says, any other name is a CLIP's.

    Raises:
        UsageError: no such kind.
        UnknownModel, Unsupported: see `find_scorer`.
    """
    head, colon, name = text.strip().partition(":")
    word = head.lower()
    if word in _NOT_LOADED:
        raise UsageError(
            f"--witness {text}: {_NOT_LOADED[word]}; give clip:NAME, blip:NAME, pickscore or hpsv2:NAME"
        )
    if not colon and word in _KINDS and not user_path(head).is_dir():
        colon = ":"  # the kind alone
    if word == "pickscore" and not name:
        return LocatedJudge("clip", find_scorer(PICKSCORE, download=download))
    if not colon or len(head) == 1:  # a drive of Windows
        return _of_name(text.strip(), download)
    if word not in _KINDS:
        raise UsageError(
            f"--witness {text}: no such kind '{head}'{nearest(word, list(_KINDS))}; give clip:NAME, blip:NAME, "
            "pickscore or hpsv2:NAME"
        )
    if not name:
        raise UsageError(
            f"--witness {text}: nothing after '{head}:'; give a folder, or a repository of the hub"
        )
    if _KINDS[word] == "blip":
        return LocatedJudge("blip", find_witness(name, download=download))
    return LocatedJudge("clip", find_scorer(name, download=download))


def _of_name(name: str, download: bool) -> LocatedJudge:
    if _model_type(name) == "blip":
        return LocatedJudge("blip", find_witness(name, download=download))
    return LocatedJudge("clip", find_scorer(name, download=download))


def _model_type(name: str) -> object:
    """Return the model type in a folder's config.json; None if there is none."""
    try:
        config = read_json(user_path(name) / "config.json")
    except (OSError, ValueError):
        return None
    return config.get("model_type") if isinstance(config, dict) else None
