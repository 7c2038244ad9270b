"""The variants as the gate sees them, each with the truth."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyworld import damage, gate_variants
from tinyworld.gate_pictures import SCORER
from tinyworld.gate_variants import Variant, half_of, tasks, variants
from vivace.foundation.spec.figures import SAME_PIXELS, ImageFigures
from vivace.foundation.spec.limits import Limits
from vivace.foundation.stats import Gate
from vivace.recipes.resolve import resolve
from vivace.report.fidelity import Fidelity, PairedFigures, fidelity
from vivace.report.quality_gate import Judgement, broken, judge_figures

TRUTH = Path(__file__).parents[1] / "results/quality-gate-truth.json"
RUINED, GOOD = 0.10, 0.02  # falls of accuracy
HARMLESS_SHARE = 0.003  # of noise on weights


@dataclass(frozen=True)
class Case:
    """A variant as the gate sees it, with the truth.

    Attributes:
        held_to: "same picture" or "another picture": the two sets of requirements.
        fall: of the verifier's accuracy.
        num_judged: captions that the truth comes from.
        label: "ruined", "good" or "between".
    """

    variant: Variant
    held_to: str
    fall: float
    num_judged: int
    label: str
    figures: tuple[ImageFigures, ...]
    references: tuple[ImageFigures, ...]
    faults: tuple[tuple[str, ...], ...]

    @property
    def half(self) -> str:
        return half_of(self.variant.kind)

    def verdict(self, number: int, limits: Limits) -> tuple[Judgement, Fidelity | None] | None:
        """Return the gate's verdict from the first images; None if fewer were drawn."""
        if number > len(self.figures):
            return None
        closeness = fidelity(PairedFigures(self.figures[:number], self.references[:number]))
        fault = broken(self.faults[:number])
        if fault is not None:
            return Judgement(Gate.FAILED, fault, "broken"), closeness
        assert closeness is not None
        return judge_figures(closeness, None, limits, same_picture=self.held_to == "same picture"), closeness


def cases(out: Path) -> Iterator[Case]:
    """Yield every variant whose images were looked at, once for each set of requirements that applies to it."""
    truth = json.loads(TRUTH.read_text(encoding="utf-8"))
    falls = {(row["model"], row["recipe"]): row["fall"] for row in truth["rows"]}
    for model in gate_variants.RECIPES:
        base = stored_rows(out, Variant(model, "baseline", "baseline", "recipe"))
        if base is None:
            continue
        for variant in variants(model):
            rows = stored_rows(out, variant)
            if rows is None or variant.kind == "baseline":
                continue
            fall = (sum(row["right"] for row in base[: len(rows)]) - sum(row["right"] for row in rows)) / len(
                rows
            )
            num_judged = len(rows)
            if variant.sort == "recipe" and (model, variant.name) in falls:
                fall, num_judged = falls[model, variant.name], truth["captions"]
            label = "ruined" if fall >= RUINED else "good" if fall < GOOD else "between"
            if variant.kind == "one prompt":
                label = "ruined"  # by construction: whoever asks for that prompt never gets it
            paired = [
                as_figures(k, row, other) for k, (row, other) in enumerate(zip(rows, base, strict=False))
            ]
            figures, references = zip(*paired, strict=True)
            excused = [
                () if other["faults"] else tuple(row["faults"])
                for row, other in zip(rows, base, strict=False)
            ]
            for held_to in requirements(variant, label):
                yield Case(variant, held_to, fall, num_judged, label, figures, references, tuple(excused))


def requirements(variant: Variant, label: str) -> list[str]:
    """Return what a variant is held to: recipes to their own, damage to both.

    Weights with more than a trace of noise give another image, which may be as good: that fails no promise.
    """
    if variant.sort == "recipe":
        return ["same picture" if resolve(variant.name).spec.same_picture else "another picture"]
    if variant.sort == "weights" and label != "ruined":
        share = damage.WEIGHTS[variant.kind][variant.name][1]
        return ["same picture", "another picture"] if share <= HARMLESS_SHARE else ["another picture"]
    return ["same picture", "another picture"]


def stored_rows(out: Path, variant: Variant) -> list[dict[str, Any]] | None:
    path = out / variant.model / f"{variant.file}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def as_figures(
    number: int, row: dict[str, Any], original: dict[str, Any]
) -> tuple[ImageFigures, ImageFigures]:
    """Return the figures of an image and of its reference, as the quality pass stores them."""
    prompt, _ = tasks()[number]
    key = {"reference": f"a/{number}", "prompt": prompt, "scorer": SCORER}
    return (
        ImageFigures(
            **key,
            sha256=f"b/{number}",
            alone=row["alone"],
            against=row["against"],
            reason=None if row["against"] else SAME_PIXELS,
        ),
        ImageFigures(**key, sha256=f"a/{number}", alone=original["alone"], against={}),
    )
