"""The quality gate's verdict on two folders of images, from the figures of `folders.compare`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vivace.foundation.spec.figures import SAME_PIXELS, ImageFigures
from vivace.foundation.spec.limits import Limits
from vivace.foundation.spec.workload import Task
from vivace.foundation.stats import Gate
from vivace.report.fidelity import Fidelity, PairedFigures, fidelity
from vivace.report.quality_gate import Judgement, broken, judge_figures


def judge_pairs(
    pairs: Sequence[dict[str, Any]],
    prompts: Sequence[str] | None,
    limits: Limits,
    *,
    same_picture: bool,
    task: Task = "text",
) -> tuple[Judgement, Fidelity | None]:
    """Return the verdict on folder B, and how close it is to folder A.

    Args:
        pairs: of `folders.compare`.
        prompts: of each pair; None if unknown, then only fidelity can be judged.
        limits: of the scorer, see `Limits.for_scorer`.
        same_picture: whether B should show the same images as A.
        task: what the images were made from.
    """
    faults = [() if pair["faults_a"] else tuple(pair["faults_b"]) for pair in pairs]
    if (reason := broken(faults)) is not None:
        return Judgement(Gate.FAILED, reason, "broken"), None
    if any("reason" in pair for pair in pairs):
        which = next(pair for pair in pairs if "reason" in pair)
        return Judgement(Gate.UNCLEAR, f"{which['name']}: {which['reason']}"), None
    if prompts is None and not same_picture and task not in ("inpaint", "edit"):
        advice = "give the images' prompts, or say that they should be the same"
        return Judgement(Gate.UNCLEAR, f"nothing says what the images should show; {advice}"), None
    if prompts is None:
        limits = limits.model_copy(update={"clip": None})
    rows, originals = [], []
    for k, pair in enumerate(pairs):
        key = {"reference": f"a/{k}", "prompt": pair["name"] if prompts is None else prompts[k]}
        against = {name: value for name, value in pair["against"].items() if value is not None}
        identical = pair["against"]["psnr_db"] is None
        row = ImageFigures(
            **key,
            sha256=f"b/{k}",
            alone=pair["b"],
            against={} if identical else against,
            reason=SAME_PIXELS if identical else None,
            thumbnail=pair["thumbnails"]["b"],
            embedding=pair.get("embeddings", {}).get("b"),
        )
        rows.append(row)
        original = ImageFigures(
            **key,
            sha256=f"a/{k}",
            alone=pair["a"],
            against={},
            thumbnail=pair["thumbnails"]["a"],
            embedding=pair.get("embeddings", {}).get("a"),
        )
        originals.append(original)
    compared = fidelity(PairedFigures(tuple(rows), tuple(originals), tuple(pair["name"] for pair in pairs)))
    assert compared is not None, "there is a pair"
    return judge_figures(compared, None, limits, same_picture=same_picture, edits=task == "edit"), compared
