"""The allowed recipes of a table: those that fit, keep the quality, and run on the hardware."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache

from vivace.answers.formatting import size
from vivace.errors import RecipeError
from vivace.evidence.committed import committed_tables
from vivace.evidence.measured import decides_on_values
from vivace.evidence.recommendation.kin import Kin, kin_of
from vivace.evidence.recommendation.predicted import Card, is_bf16
from vivace.evidence.recommendation.recommendation import Criteria, LeftOut, Reason, RecipeFigures
from vivace.evidence.tables import EvidenceRow, EvidenceTable, JudgedQuality
from vivace.foundation.hardware import Near, capability_of
from vivace.foundation.spec.limits import ONE_VIEW, Limits
from vivace.foundation.stats import Gate, gate
from vivace.machinery.technique import Machine, Target
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve_cached
from vivace.runtime.memory.fit import RESERVE_BYTES
from vivace.runtime.memory.predict import Prediction
from vivace.techniques.quantize import Quantize

Refusal = tuple[Reason, str]


@dataclass(frozen=True)
class RowFilter:
    """A filter of tables' rows.

    Attributes:
        is_planned: whether memory counts as `vivace plan` predicts it, beside what records have.
        is_strict: leave out recipes that may not fit by `vivace plan`'s count, which was not asked.
        refused: recipes that did not pass the check of the answer, with the reason.
    """

    criteria: Criteria
    kin: Kin
    gpu: str | None
    card: Card | None = None
    is_small: bool = False
    published: Prediction | None = None
    is_planned: bool = True
    is_strict: bool = False
    refused: Mapping[str, LeftOut] = field(default_factory=dict)

    @property
    def most_bytes(self) -> float | None:
        """The most bytes that a recipe may take; None if unknown."""
        card = None if self.card is None else self.card.num_bytes - RESERVE_BYTES
        return min((most for most in (self.criteria.max_bytes, card) if most is not None), default=None)

    def left_out(self, row: EvidenceRow, table: EvidenceTable, near: Near) -> LeftOut | None:
        refusal: Refusal | None = None
        if not row.is_known:
            refusal = (
                "not measured",
                row.outcome.replace("_", " ") + (f": {row.reason}" if row.reason else ""),
            )
        elif why := self._hardware(row, table, near):
            refusal = "hardware", why
        elif row.recipe in self.refused:
            return self.refused[row.recipe]
        refusal = refusal or self._memory(row, table) or self._quality(row, table)
        if refusal is None:
            return None
        return LeftOut(recipe=row.recipe, label=row.label, kind=refusal[0], why=refusal[1])

    def _memory(self, row: EvidenceRow, table: EvidenceTable) -> Refusal | None:
        limit, most, peak = self.criteria.max_bytes, self.most_bytes, row.peak_bytes
        if most is not None and table.kind != "own" and peak is not None:
            if (loading := self._loading_bytes(row)) > most:
                return "memory", f"takes {size(loading)} while it is loaded, more than {size(most)}"
            if self.is_strict and self.most_needed(row) > most:
                return "memory unknown", "its memory was not predicted"
        if peak is None:
            is_open = limit is not None or self.is_small
            return ("memory unknown", "its peak memory is not known") if is_open else None
        if limit is not None and peak > limit:
            return "memory", f"needs {size(peak)}, more than {size(limit)}"
        if self.card is not None and peak + RESERVE_BYTES > self.card.num_bytes:
            name = f"{self.card.gpu.chip.name} of {size(self.card.num_bytes)}"
            return "memory", f"needs {size(peak)}, and {size(RESERVE_BYTES)} stay free of the {name}"
        return None

    def _loading_bytes(self, row: EvidenceRow) -> int:
        """Return what loading a recipe with a record takes at least; 0 where the host loads it, or if unknown."""
        published = self.published
        if published is None or not self.is_planned or row.is_estimated:
            return 0
        is_halved = any(part.dtype.startswith("fp32") for part in published.components)
        return 0 if is_halved or resolve_cached(row.recipe).loads_from_host else published.model_bytes

    def most_needed(self, row: EvidenceRow | RecipeFigures) -> float:
        """Return the most bytes that `vivace plan` may count for a recipe.

        Estimates are never less than its count. A recipe with a record needs no more than the published model, but for
        the pool of a CUDA graph, which may keep another step's activations.
        """
        recorded, published = row.peak_bytes or 0, self.published
        if published is None or row.is_estimated or not self.is_planned:
            return recorded
        if row.num_techniques == 0:
            return max(recorded, published.needed_bytes)
        pool = published.peak_bytes - published.model_bytes if "cuda_graph" in row.recipe else 0
        return max(recorded, published.needed_bytes) + pool

    def judgement_of(self, row: EvidenceRow, table: EvidenceTable) -> JudgedQuality | None:
        """Return the judgement of a row's images: its own, or that of an embedded model of the kind.

        Two recipes count as equal if the techniques that change the image are the same.
        """
        keeps, judged = self.keeps(row, table), row.judged
        has_failed = judged is not None and judged.gate is Gate.FAILED
        if not keeps and (table.random_weights or (table.kind == "published" and not has_failed)):
            # A published score has no interval, and a threshold skips other steps with other weights.
            judged = self._of_kind(row, table) or judged
        if judged is None or self.criteria.limits is None or table.kind == "own":
            return judged  # a store's rows were judged by the requested limits
        return held_to(judged, self.criteria.limits, keeps)

    def _of_kind(self, row: EvidenceRow, table: EvidenceTable) -> JudgedQuality | None:
        """Return an embedded model's judgement of a recipe whose weights were random."""
        changing = changing_part(row.recipe)
        if changing is not None and "rotation" in changing:
            return None  # it is near bf16 on some models and not on others (docs/techniques.md), so each is proven
        if table.kind == "published" and (changing is None or compares_values(changing)):
            return None  # with other weights the same threshold skips other steps
        for small, steps, text, judged in _of_embedded():
            # Fewer steps are another share of another number.
            is_same = text == changing and ("steps" not in text or steps == table.steps)
            if is_same and self.kin.is_kind_of(small):
                return judged
        return None

    def keeps(self, row: EvidenceRow, table: EvidenceTable) -> bool:
        """Whether a recipe keeps the image of the table's baseline: it adds nothing that changes it."""
        if row.same_picture:
            return True
        mine = changing_part(row.recipe)
        return mine is not None and mine == changing_part(table.baseline)

    def _quality(self, row: EvidenceRow, table: EvidenceTable) -> Refusal | None:
        if row.recipe == table.baseline:
            return None
        judged, keeps = self.judgement_of(row, table), self.keeps(row, table)
        if judged is not None and judged.gate is Gate.FAILED:
            return "quality", f"its images fail: {judged.reason}"
        if self.criteria.same_picture and not keeps:
            return "quality", "it changes the image"
        if self.kin.is_fp8 and table.kind != "own" and (other := _other_scheme(row.recipe)):
            return "quality", f"the file is in fp8, and {other} would round its weights once more"
        is_proven = judged is not None and judged.gate is Gate.PASSED
        if is_proven or (self.criteria.limits is None and keeps):
            return None
        if judged is not None:
            return "unproven", f"its quality is not proven: {judged.reason}"
        why = (
            "random weights, so its images were not judged"
            if table.random_weights
            else "its images were not judged"
        )
        return "unproven", why if keeps else f"it changes the image; {why}"

    def _hardware(self, row: EvidenceRow, table: EvidenceTable, near: Near) -> str:
        """Return why a recipe measured elsewhere cannot run on the requested GPU; "" if it can, or is unknown."""
        try:
            recipe = resolve_cached(row.recipe)
        except RecipeError as error:
            return f"this version of vivace cannot read it: {error.problem}"
        if table.kind != "own" and (number := max((t.facts.num_gpus for t in recipe), default=1)) > 1:
            return f"it needs {number} GPUs"
        gpu = table.gpu if table.kind == "predicted" else self.gpu
        is_measured_here = near is Near.SAME and table.kind != "predicted"
        if gpu is None or is_measured_here or (capability := capability_of(gpu)) is None:
            return ""
        if why := refused(recipe, gpu, capability, is_bf16(self.published)):
            return why
        names = [t.text for t in recipe if t.facts.made_for not in (None, capability)]
        never = (
            f"kernels of {', '.join(names)} are made for another generation, and were never measured on {gpu}"
        )
        return never if names else ""


@lru_cache(maxsize=4096)
def refused(recipe: Recipe, gpu: str, capability: tuple[int, int], is_bf16: bool = False) -> str:
    """Return why a GPU of a compute capability cannot run a recipe; "" if it can."""
    compiles = any(t.name == "compile" for t in recipe)
    if is_bf16 and capability < (8, 0) and compiles and "fp16" not in recipe.text:
        return f"PyTorch does not compile bf16 for {gpu}, which computes it in fp32"
    machine = Machine("cuda", f"the {gpu}", capability, "c++", has_all_packages=True)
    target = Target.of_machine(machine)
    return next((why for technique in recipe if (why := technique.unsupported(target))), "")


def _other_scheme(recipe: str) -> str:
    """Return the technique of a recipe that stores a denoiser's weights in another format than fp8; "" if none does."""
    return next(
        (
            technique.text
            for technique in resolve_cached(recipe)
            if isinstance(technique, Quantize)
            and "denoiser" in technique.targets
            and not technique.scheme.startswith("fp8")
        ),
        "",
    )


def held_to(judged: JudgedQuality, limits: Limits, same_picture: bool) -> JudgedQuality:
    if judged.is_lost:
        return judged
    clip = limits.for_scorer(ONE_VIEW).clip
    figures = [("CLIP margin kept", 100.0, " %", judged.clip, clip if isinstance(clip, float) else None)]
    if judged.witness is not None:
        figures.append(("second witness's margin kept", 100.0, " %", judged.witness, limits.witness))
    if same_picture:
        figures += [
            ("match", 100.0, " %", judged.match, limits.match),
            ("SSIM", 1.0, "", judged.ssim, limits.ssim),
            ("PSNR", 1.0, " dB", judged.psnr_db, limits.psnr_db),
        ]
    gates, reasons = [], []
    for name, factor, unit, value, minimum in figures:
        if minimum is None:
            continue
        if value is None or value.low is None or value.high is None:
            gates.append(Gate.UNCLEAR)
            reasons.append(f"{name} is not known, {factor * minimum:g}{unit} asked")
        else:
            gates.append(gate(value, minimum))
            low, high = factor * value.low, factor * value.high
            reasons.append(f"{name} [{low:.4g}, {high:.4g}]{unit}, {factor * minimum:g}{unit} asked")
    worst = next((gate for gate in (Gate.FAILED, Gate.UNCLEAR, Gate.PASSED) if gate in gates), Gate.UNCLEAR)
    return judged.model_copy(update={"gate": worst, "reason": "; ".join(reasons) or "no limit is set"})


@cache
def compares_values(text: str) -> bool:
    return decides_on_values(resolve_cached(text).spec)


@cache
def changing_part(text: str) -> str | None:
    """Return the techniques of a recipe that change the image, as a recipe; None if it cannot be read."""
    try:
        return Recipe(tuple(t for t in resolve_cached(text) if not t.facts.same_picture)).text
    except RecipeError:
        return None


@cache
def _of_embedded() -> tuple[tuple[Kin, int | None, str, JudgedQuality], ...]:
    """Return the judged recipes of the embedded models: model, its steps, the techniques that change the image, and the
    judgement."""
    entries = []
    for table in committed_tables():
        kin = kin_of(table.model)
        for row in table.rows if kin.is_embedded else ():
            changing = None if row.judged is None else changing_part(row.recipe)
            if row.judged is not None and changing is not None:
                judged = row.judged.model_copy(update={"of": table.model})
                entries.append((kin, table.steps, changing, judged))
    return tuple(entries)
