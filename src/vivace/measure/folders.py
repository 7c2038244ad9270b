"""Compare two folders of images from any source, and judge the second by the quality gate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from vivace.errors import UsageError
from vivace.foundation.spec.figures import SAME_PIXELS, ImageFigures, packed
from vivace.foundation.spec.limits import Limits
from vivace.foundation.spec.workload import Task
from vivace.foundation.stats import Gate
from vivace.foundation.stats.equivalence import mean_interval
from vivace.foundation.stats.intervals import Interval
from vivace.foundation.untrusted.image_files import open_image
from vivace.foundation.untrusted.streams import natural_order
from vivace.measure.image_metrics import (
    aligned,
    faults,
    figures_against,
    figures_alone,
    match,
    outside_metrics,
    pixels,
    thumbnail,
)
from vivace.measure.scorer import ClipScorer, Lpips, Witness
from vivace.report.fidelity import Fidelity, PairedFigures, fidelity
from vivace.report.quality_gate import Judgement, broken, judge_figures

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
ALONE = (
    "sharpness",
    "colourfulness",
    "entropy_bits",
    "clip_score",
    "witness_score",
    "outside_psnr_db",
    "source_similarity",
)
SourceOf = Callable[[int, int, int], tuple[Any, Any]]
"""Returns the source image of a pair of images, and its mask or None (PIL), by number, height and width."""
AGAINST = ("psnr_db", "ssim", "match", "clip_similarity", "lpips")
_MAX_OTHERS = 12


def pair(dir_a: Path, dir_b: Path) -> tuple[list[str], list[str]]:
    """Return the names of images in both folders, in natural order, and of those in only one."""
    listed = []
    for folder in (dir_a, dir_b):
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder; give two folders of images")
        listed.append({p.name for p in folder.iterdir() if p.suffix.lower() in SUFFIXES})
    both = sorted(listed[0] & listed[1], key=natural_order)
    if not both:
        raise UsageError(
            f"no image has the same name in {dir_a} ({len(listed[0])} images) and {dir_b} ({len(listed[1])}); images "
            "are paired by name"
        )
    return both, sorted(listed[0] ^ listed[1], key=natural_order)


def compare(
    dir_a: Path,
    dir_b: Path,
    names: list[str],
    prompts: list[str] | None,
    clip: ClipScorer | None,
    lpips: bool = False,
    witness: Witness | None = None,
    source_of: SourceOf | None = None,
) -> dict[str, Any]:
    """Return the figures of every pair, and for each metric its means and the mean difference with its interval.

    Images of one prompt count as one group (see `mean_interval`); without prompts each pair is one. Images that were
    made from source images are compared with those too: outside of the mask, and by likeness if there is a scorer.
    """
    pairs: list[dict[str, Any]] = []
    network = Lpips() if lpips else None
    notes: list[str] = []
    for name in names:
        a, b = (pixels(open_image(folder / name, _noted(notes, folder / name))) for folder in (dir_a, dir_b))
        row: dict[str, Any] = {"name": name, "faults_a": faults(a), "faults_b": faults(b)}
        if prompts is not None:
            row["prompt"] = prompts[len(pairs)]
        row["a"], row["b"] = figures_alone(a), figures_alone(b)
        row["thumbnails"] = {"a": packed(thumbnail(a)), "b": packed(thumbnail(b))}
        try:
            row["against"] = figures_against(b, a, network)
        except ValueError as error:
            row["against"], row["reason"] = {}, str(error)
        if source_of is not None:
            for side, image in (("a", a), ("b", b)):
                row[side].update(_against_source(image, source_of(len(pairs), *image.shape[:2])))
        pairs.append(row)
    if clip is not None:
        _score(pairs, dir_a, dir_b, prompts, clip)
        if source_of is not None:
            _liken(pairs, dir_a, dir_b, source_of, clip)
    if witness is not None and prompts is not None:
        _question(pairs, dir_a, dir_b, prompts, witness)
    summary: dict[str, Any] = {}
    groups = names if prompts is None else prompts
    for metric in ALONE:
        both = [k for k, p in enumerate(pairs) if metric in p["a"] and metric in p["b"]]
        values = [(pairs[k]["a"][metric], pairs[k]["b"][metric]) for k in both]
        if values:
            difference = mean_interval([b - a for a, b in values], [groups[k] for k in both])
            means = [sum(column) / len(values) for column in zip(*values, strict=True)]
            summary[metric] = {"a": means[0], "b": means[1], "difference": _json(difference)}
    for metric in AGAINST:
        compared = [k for k, p in enumerate(pairs) if metric in p["against"]]
        reached = [pairs[k]["against"][metric] for k in compared]
        finite = [v for v in reached if v != float("inf")]
        if reached:
            summary[metric] = {
                "mean": _json(
                    mean_interval(finite, [groups[k] for k in compared if _is_finite(pairs[k], metric)])
                )
                if finite
                else None,
                "worst": min(reached) if finite else None,
                "identical": len(reached) - len(finite),
            }
    for row in pairs:  # JSON has no infinity
        row["against"] = {k: (None if v == float("inf") else v) for k, v in row["against"].items()}
    return {"pairs": pairs, "summary": summary, "notes": notes}


def _noted(notes: list[str], path: Path) -> Callable[[str], object]:
    return lambda text: notes.append(f"{path}: {text}")


def _is_finite(pair: dict[str, Any], metric: str) -> bool:
    return bool(pair["against"][metric] != float("inf"))


def _against_source(picture: Any, source: tuple[Any, Any]) -> dict[str, float]:
    image, mask = source
    if mask is None:
        return {"source_match": match(picture, pixels(image))}
    return outside_metrics(picture, pixels(image), pixels(mask))


def _liken(
    pairs: list[dict[str, Any]], dir_a: Path, dir_b: Path, source_of: SourceOf, clip: ClipScorer
) -> None:
    """Add each image's similarity to its own source, and to the others."""
    for side, folder in (("a", dir_a), ("b", dir_b)):
        for k, row in enumerate(pairs):
            image = open_image(folder / row["name"])
            sources = [source_of(n, image.height, image.width)[0] for n in range(len(pairs))]
            others = [source for source in sources if source.tobytes() != sources[k].tobytes()]
            chosen = others[:: -(-len(others) // _MAX_OTHERS)] if others else []
            own, *rest = clip.similarities([image] * (1 + len(chosen)), [sources[k], *chosen])
            row[side]["source_similarity"] = own
            if rest:
                row[side]["source_similarity_of_others"] = fmean(rest)


def _score(
    pairs: list[dict[str, Any]], dir_a: Path, dir_b: Path, prompts: list[str] | None, clip: ClipScorer
) -> None:
    from PIL import Image

    for k, row in enumerate(pairs):
        a, b = open_image(dir_a / row["name"]), open_image(dir_b / row["name"])
        embedding, other = clip.embed_images([a, b])
        row["embeddings"] = {"a": packed(embedding), "b": packed(other)}
        if "match" in row["against"]:
            image = pixels(b)
            moved = aligned(image, pixels(a))
            if moved is not image:
                (other,) = clip.embed_images([Image.fromarray(moved.astype("uint8"))])
        row["against"]["clip_similarity"] = 100 * float(other @ embedding)
        if prompts is not None:
            own, *others = clip.embed_prompts([prompts[k], *_others(prompts, k)])
            row["b"]["clip_score"], row["a"]["clip_score"] = (
                100 * float(other @ own),
                100 * float(embedding @ own),
            )
            if others:
                row["a"]["clip_score_of_others"] = 100 * fmean(float(embedding @ read) for read in others)


def _question(
    pairs: list[dict[str, Any]], dir_a: Path, dir_b: Path, prompts: list[str], witness: Witness
) -> None:
    """Add the second witness's scores to the pairs."""
    for k, row in enumerate(pairs):
        own, *rest = witness.scores(open_image(dir_a / row["name"]), [prompts[k], *_others(prompts, k)])
        row["a"]["witness_score"] = own
        if rest:
            row["a"]["witness_score_of_others"] = fmean(rest)
        (row["b"]["witness_score"],) = witness.scores(open_image(dir_b / row["name"]), [prompts[k]])


def _others(prompts: list[str], number: int) -> list[str]:
    """Return at most a dozen of the other prompts, the same ones in every run."""
    others = [prompt for prompt in dict.fromkeys(prompts) if prompt != prompts[number]]
    return others[:: -(-len(others) // _MAX_OTHERS)] if others else []


def _json(interval: Interval) -> dict[str, float | list[float] | None]:
    low, high = interval.low, interval.high
    return {"mean": interval.point, "ci95": None if low is None or high is None else [low, high]}


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
        pairs: of `compare`.
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
