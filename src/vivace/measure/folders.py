"""Compare two folders of images from any source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vivace.errors import UsageError
from vivace.foreign.pictures import open_picture
from vivace.measure.lpips import Lpips
from vivace.measure.quality import faults, paired_metrics, picture_metrics, pixels
from vivace.measure.scorer import ClipScorer
from vivace.stats.intervals import Interval
from vivace.stats.paired import mean_interval

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
ALONE = ("sharpness", "colourfulness", "entropy_bits", "clip_score")
AGAINST = ("psnr_db", "ssim", "clip_similarity", "lpips")


def pair(dir_a: Path, dir_b: Path) -> tuple[list[str], list[str]]:
    """Return the names of images that are in both folders, sorted, and of those in only one.

    Raises:
        UsageError: not a folder, or no common name.
    """
    listed = []
    for folder in (dir_a, dir_b):
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder; give two folders of images")
        listed.append({p.name for p in folder.iterdir() if p.suffix.lower() in SUFFIXES})
    both = sorted(listed[0] & listed[1])
    if not both:
        raise UsageError(
            f"no image has the same name in {dir_a} ({len(listed[0])} images) and {dir_b} ({len(listed[1])}); images "
            "are paired by name"
        )
    return both, sorted(listed[0] ^ listed[1])


def compare(
    dir_a: Path,
    dir_b: Path,
    names: list[str],
    prompts: list[str] | None,
    scorer: Path | None,
    lpips: bool = False,
) -> dict[str, Any]:
    """Return the figures of every pair, and for each metric its means and the mean difference with its interval."""
    pairs: list[dict[str, Any]] = []
    network = Lpips() if lpips else None
    for name in names:
        a, b = (pixels(open_picture(folder / name)) for folder in (dir_a, dir_b))
        row: dict[str, Any] = {"name": name, "faults_a": faults(a), "faults_b": faults(b)}
        row["a"], row["b"] = picture_metrics(a), picture_metrics(b)
        try:
            row["against"] = paired_metrics(b, a)
            if network is not None:
                (row["against"]["lpips"],) = network.distances([b], [a])
        except ValueError as error:
            row["against"], row["reason"] = {}, str(error)
        pairs.append(row)
    if scorer is not None:
        _score(pairs, dir_a, dir_b, prompts, scorer)
    summary: dict[str, Any] = {}
    for metric in ALONE:
        values = [(p["a"][metric], p["b"][metric]) for p in pairs if metric in p["a"] and metric in p["b"]]
        if values:
            difference = mean_interval([b - a for a, b in values])
            means = [sum(column) / len(values) for column in zip(*values, strict=True)]
            summary[metric] = {"a": means[0], "b": means[1], "difference": _json(difference)}
    for metric in AGAINST:
        reached = [p["against"][metric] for p in pairs if metric in p["against"]]
        finite = [v for v in reached if v != float("inf")]
        if reached:
            summary[metric] = {
                "mean": _json(mean_interval(finite)) if finite else None,
                "worst": min(reached) if finite else None,
                "identical": len(reached) - len(finite),
            }
    for row in pairs:  # JSON has no infinity
        row["against"] = {k: (None if v == float("inf") else v) for k, v in row["against"].items()}
    return {"pairs": pairs, "summary": summary}


def _score(
    pairs: list[dict[str, Any]], dir_a: Path, dir_b: Path, prompts: list[str] | None, scorer: Path
) -> None:
    clip = ClipScorer(scorer)
    for k, row in enumerate(pairs):
        a, b = open_picture(dir_a / row["name"]), open_picture(dir_b / row["name"])
        (row["against"]["clip_similarity"],) = clip.similarities([b], [a])
        if prompts is not None:
            row["a"]["clip_score"], row["b"]["clip_score"] = clip.scores([a, b], [prompts[k]] * 2)


def _json(interval: Interval) -> dict[str, float | list[float] | None]:
    low, high = interval.low, interval.high
    return {"mean": interval.point, "ci95": None if low is None or high is None else [low, high]}
