"""Compare two folders of images from any source, and judge the second by the quality gate."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vivace.errors import UsageError
from vivace.foundation.spec.figures import FiguresKey, ImageFigures
from vivace.foundation.spec.limits import Limits
from vivace.foundation.spec.workload import Task
from vivace.foundation.stats import Gate
from vivace.foundation.stats.equivalence import mean_interval
from vivace.foundation.stats.intervals import Interval
from vivace.foundation.untrusted.image_files import open_image
from vivace.foundation.untrusted.streams import natural_order
from vivace.measure.figures import FigureSet
from vivace.measure.image_metrics import faults, pixels
from vivace.measure.scorer import ClipScorer, FunctionScorer, Witness
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


_SAME = {"psnr_db": None, "ssim": 1.0, "match": 1.0, "hole": 0.0, "num_rectangles": 0.0}
"""Figures of an image against another of the same pixels."""


@dataclass(frozen=True)
class FolderComparison:
    """Pairs of images with their figures.

    Attributes:
        prompts: of each pair; None if unknown, then only fidelity can be judged.
        originals, rows: of folder A, the reference, and of B.
    """

    names: tuple[str, ...]
    prompts: tuple[str, ...] | None
    originals: tuple[ImageFigures, ...]
    rows: tuple[ImageFigures, ...]
    faults: tuple[tuple[list[str], list[str]], ...]
    notes: tuple[str, ...] = ()

    def judge(
        self, limits: Limits, *, same_picture: bool, task: Task = "text"
    ) -> tuple[Judgement, Fidelity | None]:
        """Return the verdict on folder B, and how close it is to folder A."""
        if (reason := broken([() if a else tuple(b) for a, b in self.faults])) is not None:
            return Judgement(Gate.FAILED, reason, "broken"), None
        for name, row in zip(self.names, self.rows, strict=True):
            if row.reason is not None and not row.is_identical:
                return Judgement(Gate.UNCLEAR, f"{name}: {row.reason}"), None
        if self.prompts is None and not same_picture and task not in ("inpaint", "edit"):
            advice = "give the images' prompts, or say that they should be the same"
            return Judgement(Gate.UNCLEAR, f"nothing says what the images should show; {advice}"), None
        if self.prompts is None:
            limits = limits.model_copy(update={"clip": None})
        close = fidelity(PairedFigures(self.rows, self.originals, self.names))
        assert close is not None, "there is a pair"
        return judge_figures(close, None, limits, same_picture=same_picture, edits=task == "edit"), close

    def to_dict(self) -> dict[str, Any]:
        """Return the figures of every pair, and for each metric its means and the mean difference with its interval."""
        pairs = [self._pair(k) for k in range(len(self.names))]
        groups = self.names if self.prompts is None else self.prompts
        summary: dict[str, Any] = {}
        for metric in ALONE:
            both = [k for k, pair in enumerate(pairs) if metric in pair["a"] and metric in pair["b"]]
            if both:
                a, b = ([pairs[k][side][metric] for k in both] for side in ("a", "b"))
                difference = mean_interval(
                    [y - x for x, y in zip(a, b, strict=True)], [groups[k] for k in both]
                )
                summary[metric] = {
                    "a": sum(a) / len(a),
                    "b": sum(b) / len(b),
                    "difference": _json(difference),
                }
        for metric in AGAINST:
            values = {k: pair["against"][metric] for k, pair in enumerate(pairs) if metric in pair["against"]}
            finite = {k: value for k, value in values.items() if value is not None}
            if values:
                mean = mean_interval([*finite.values()], [groups[k] for k in finite]) if finite else None
                summary[metric] = {
                    "mean": None if mean is None else _json(mean),
                    "worst": min(values[k] for k in finite) if finite else None,
                    "identical": len(values) - len(finite),
                }
        return {"pairs": pairs, "summary": summary, "notes": [*self.notes]}

    def _pair(self, k: int) -> dict[str, Any]:
        """Return the figures of one pair as plain data; JSON has no infinity."""
        row, (faults_a, faults_b) = self.rows[k], self.faults[k]
        pair: dict[str, Any] = {"name": self.names[k], "faults_a": faults_a, "faults_b": faults_b}
        if self.prompts is not None:
            pair["prompt"] = self.prompts[k]
        against: dict[str, float | None] = dict(row.against)
        if row.is_identical:
            against = {**_SAME}
            if row.embedding is not None:
                against["clip_similarity"] = 100.0
            if any("lpips" in other.against for other in self.rows):
                against["lpips"] = 0.0
        elif row.reason is not None:
            pair["reason"] = row.reason
        return pair | {"a": self.originals[k].alone, "b": row.alone, "against": against}


def compare(
    dir_a: Path,
    dir_b: Path,
    names: Sequence[str],
    prompts: Sequence[str] | None,
    scorer: ClipScorer | FunctionScorer | None,
    lpips: bool = False,
    witness: Witness | None = None,
    source_of: SourceOf | None = None,
) -> FolderComparison:
    """Compare pairs of images. Those that were made from source images are compared with these too."""
    notes: list[str] = []
    sources: dict[str, Any] = {}
    images = FigureSet(lambda name: open_image(Path(name)), sources.__getitem__)
    faults_of = []
    for k, name in enumerate(names):
        files = [folder / name for folder in (dir_a, dir_b)]
        opened = []
        for file in files:
            noted: list[str] = []
            opened.append(open_image(file, noted.append))
            notes += [f"{file}: {note}" for note in noted]
        faults_of.append((faults(pixels(opened[0])), faults(pixels(opened[1]))))
        for file, image in zip(files, opened, strict=True):
            made_from = (None, None) if source_of is None else source_of(k, image.height, image.width)
            keys = [None if each is None else _key_of(each) for each in made_from]
            sources |= {key: each for key, each in zip(keys, made_from, strict=True) if key is not None}
            images.add(
                FiguresKey(
                    sha256=str(file),
                    reference=str(files[0]),
                    prompt=name if prompts is None else prompts[k],
                    source=keys[0],
                    mask=keys[1],
                )
            )
    distinct = list(dict.fromkeys(prompts or ()))

    def others(prompt: str) -> list[str]:
        """Return at most a dozen of the other prompts, the same ones in every run."""
        rest = [other for other in distinct if other != prompt]
        return rest[:: -(-len(rest) // _MAX_OTHERS)] if rest else []

    if scorer is not None:
        images.add_scores(scorer, others if prompts is not None else None)
    if witness is not None:
        images.add_witness(witness, others)
    if lpips:
        images.add_lpips("cpu")
    a, b = images.rows[::2], images.rows[1::2]
    given = None if prompts is None else tuple(prompts)
    return FolderComparison(tuple(names), given, tuple(a), tuple(b), tuple(faults_of), tuple(notes))


def _key_of(image: Any) -> str:
    return hashlib.sha256(f"{image.mode} {image.size}".encode() + image.tobytes()).hexdigest()


def _json(interval: Interval) -> dict[str, float | list[float] | None]:
    low, high = interval.low, interval.high
    return {"mean": interval.point, "ci95": None if low is None or high is None else [low, high]}
