"""Predicted tables of a model for a GPU without measurements, or with too little memory for it.

Its rows are vivace's records of other GPUs, projected by data sheets, and recipes that save memory. The memory of the
latter is estimated (`vivace.runtime.memory.fit`); their time is the model's with their known gain, plus copies
from the host. All are marked as predicted. `vivace recommend` and `vivace plan --card` rank by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from vivace.errors import RecipeError
from vivace.evidence.committed import committed_tables
from vivace.evidence.parsed import resolve
from vivace.evidence.recommendation.kin import Kin, kin_of
from vivace.evidence.recommendation.speed_limit import around, by_operations, flop_of_call, on_chip
from vivace.evidence.tables import EvidenceRow, EvidenceTable
from vivace.foundation.hardware import CHIPS, Chip, Gpu, Near, known_gpu, near
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.foundation.stats import Interval
from vivace.machinery.technique import DENOISERS
from vivace.runtime.memory.fit import RESERVE_BYTES, Saving, Scheme, largest_encoder, need_of
from vivace.runtime.memory.predict import Prediction

PLACE = "vivace's prediction"
BY_OPERATIONS = "its operations"
_HOST_GB_S = {"Blackwell": 50.0, "Hopper": 50.0, "Ada": 22.0, "Ampere": 22.0}
"""Rates of copies from pinned memory: PCIe 5.0 x16 (an H200: 53 GB/s with offload(group, stream=True) of FLUX), 4.0,
and of older ones 3.0. They are of 16 lanes."""
_OLDER_HOST_GB_S = 11.0
_EIGHT_LANES = frozenset({
    "A2", "RTX 3050", "RTX 4050 Laptop", "RTX 4060", "RTX 4060 Laptop", "RTX 4060 Ti", "RTX 4070 Laptop", "RTX 5050",
    "RTX 5050 Laptop", "RTX 5060", "RTX 5060 Laptop", "RTX 5060 Ti", "RTX 5070 Laptop", "RTX 2000 Ada", "RTX PRO 2000",
})  # fmt: skip
"""Chips that have half as many lanes, by NVIDIA's data sheets."""
_WHOLE_SHARE = 0.5
"""Share of that rate at which offload(model) copies: an H200 took 1.75 s for FLUX's 34 GB."""
_TYPICAL = (
    "RTX 3050", "RTX 4060", "RTX 3080", "RTX 4070", "RTX 4080", "RTX 4000 Ada", "RTX 4090", "RTX 5090", "RTX 6000 Ada",
    "H100", "RTX PRO 6000", "H200", "B200", "B300",
)  # fmt: skip
_GAINS = {"compile": 1.2, "quantize(int8)+compile": 1.1, "quantize(nf4)+compile": 1.0, "quantize(fp8)+compile": 1.4,
          "quantize(int8)": 0.75, "quantize(nf4)": 0.5}  # fmt: skip
"""Speed-ups where no record of the model or its family has any: the lower ones of other families."""


@dataclass(frozen=True)
class Speeds:
    """Speed-ups of techniques, each over the baseline of its record.

    Attributes:
        gains: by the recipe that was added to the baseline, canonical.
        gpu: where they were measured; "" if there are none.
    """

    gains: Mapping[str, float] = field(default_factory=dict)
    gpu: str = ""

    def of(self, recipe: str) -> float | None:
        """Return the speed-up of a recipe; None if unknown.

        Quantising other components than the denoiser hardly changes the time, so such records count as well.
        """
        try:
            parts = resolve(recipe)
        except RecipeError:
            return None
        plain = "+".join(technique.text.partition("@")[0] for technique in parts)
        for text in (parts.text, resolve(plain).text if all("denoiser" in t.targets for t in parts) else ""):
            if text in self.gains:
                return self.gains[text]
        return None


@dataclass(frozen=True)
class Card:
    """The GPU that a model has to fit.

    Attributes:
        gpu: whose times are predicted.
        num_bytes: its memory.
        is_typical: only the size of the memory was given, and this is a usual GPU of that size.
    """

    gpu: Gpu
    num_bytes: float
    is_typical: bool = False


def typical_gpu(num_bytes: float) -> Gpu:
    """Return a usual GPU of a size of memory: the smallest GPU that has it, or the largest of all."""
    by_name = {chip.name: chip for chip in CHIPS}
    usual = [by_name[name] for name in _TYPICAL]
    return Gpu(next((chip for chip in usual if min(chip.memory_gb) * 1e9 >= 0.999 * num_bytes), usual[-1]))


def is_bf16(published: Prediction | None) -> bool:
    """Whether a model as published computes in bf16."""
    return published is not None and any(
        part.name in DENOISERS and part.dtype.startswith("bf16") for part in published.components
    )


def fits_published(published: Prediction, num_bytes: float) -> bool:
    """Whether the published model fits."""
    return published.needed_bytes + RESERVE_BYTES <= num_bytes


def predicted_table(
    kin: Kin, card: Card, tables: Sequence[EvidenceTable], published: Prediction
) -> EvidenceTable:
    """Return the predicted table of a GPU.

    Args:
        tables: records at the model's own number of steps.
        published: the prediction of the model without a recipe.
    """
    chip = card.gpu.chip.as_of_bf16 if is_bf16(published) else card.gpu.chip
    mine = [table for table in tables if _is_evidence(table, kin, card.gpu)]
    base = _base_seconds(published, mine, chip)
    rows: dict[str, EvidenceRow] = {}
    for row in (*_saving_rows(kin, published, base, chip), *_projected_rows(published, base[0], mine, chip)):
        before = rows.get(row.recipe)
        if before is None or (row.predicted_from or "") != BY_OPERATIONS:
            rows[row.recipe] = row
    baseline = rows.pop(BASELINE)
    return EvidenceTable(
        kind="predicted",
        place=PLACE,
        model=kin.name,
        of=kin.alike,
        random_weights=True,
        gpu=card.gpu.name,
        height=published.height,
        width=published.width,
        steps=published.num_inference_steps,
        task=published.task,
        baseline=BASELINE,
        rows=(baseline, *rows.values()),
    )


def _is_evidence(table: EvidenceTable, kin: Kin, gpu: Gpu) -> bool:
    """Whether a table's times can be projected: the model's own, measured by vivace, on another known GPU."""
    return (
        table.kind == "committed"
        and table.model == kin.name
        and table.device == "cuda"
        and table.batch == 1
        and known_gpu(table.gpu) is not None
        and near(gpu.name, table.gpu) is not Near.SAME
    )


def _base_seconds(published: Prediction, tables: Iterable[EvidenceTable], chip: Chip) -> tuple[Interval, str]:
    """Return the seconds of the published model, as if it fitted, and the GPU of their record; "" for none."""
    flop = flop_of_call(published)
    for table in sorted(
        tables, key=lambda table: (near(chip.name, table.gpu), table.rows[0].recipe != BASELINE)
    ):
        row = next((row for row in table.rows if row.recipe == BASELINE and row.latency is not None), None)
        there = known_gpu(table.gpu)
        if row is not None and row.latency is not None and there is not None:
            return on_chip(row.latency.point, flop, there.chip, chip, BASELINE), table.gpu
    calls = sum(part.calls for part in published.work.components)
    return by_operations(flop / published.batch, calls, chip), BY_OPERATIONS


def _projected_rows(
    published: Prediction, base: Interval, tables: Sequence[EvidenceTable], chip: Chip
) -> Iterator[EvidenceRow]:
    """Yield the rows recorded on other GPUs, the nearest last, with their times on this one."""
    flop = flop_of_call(published)
    for table in sorted(tables, key=lambda table: -near(chip.name, table.gpu)):
        there = known_gpu(table.gpu)
        assert there is not None
        for row in table.rows:
            if row.latency is None or not row.is_known or row.is_counted or "offload" in row.recipe:
                continue
            seconds = on_chip(row.latency.point, flop, there.chip, chip, row.recipe)
            update = {
                "latency": seconds,
                "gain": Interval(base.point / seconds.point, None, None),
                "predicted_from": table.gpu,
                "measured_s": row.latency.point,
                "verdict": None,
                "steps_s": None,
                "spread": None,
                "first_call_s": None,
            }
            yield row.model_copy(update=update)


def _saving_rows(
    kin: Kin, published: Prediction, base: tuple[Interval, str], chip: Chip
) -> Iterator[EvidenceRow]:
    """Yield the published model, and recipes that save memory, with estimated memory and times."""
    speeds = known_speeds(kin.architecture)
    seconds, origin = base
    for saving in savings(published):
        recipe = resolve(saving.recipe)
        need = need_of(saving, published)
        if saving.recipe == BASELINE:
            latency = seconds
        else:
            point = seconds.point / _gain(saving, speeds) + _copies_s(saving, published, chip)
            latency = around(point)
        yield EvidenceRow(
            recipe=recipe.text,
            num_techniques=len(recipe.techniques),
            same_picture=all(technique.facts.same_picture for technique in recipe),
            latency=latency,
            gain=None if saving.recipe == BASELINE else Interval(seconds.point / latency.point, None, None),
            peak_bytes=need.needed_bytes,
            predicted_from=origin if saving.recipe == BASELINE else BY_OPERATIONS,
        )


def savings(published: Prediction) -> list[Saving]:
    """Return the recipes that save memory, and the published model itself, canonical."""
    encoder = largest_encoder(published)
    both = "denoiser" if encoder is None else f"denoiser,{encoder}"
    without_fp8: tuple[Scheme, ...] = ("int8", "nf4")
    dtypes = {part.dtype for part in published.components if part.name in DENOISERS}
    # fp8 with a scale for each row needs bf16.
    schemes: tuple[Scheme, ...] = ("fp8", *without_fp8) if dtypes == {"bf16"} else without_fp8
    options = [Saving(BASELINE), Saving("compile")]
    if encoder is not None:
        options += [Saving(f"quantize({scheme})@{encoder}+compile", encoder=scheme) for scheme in without_fp8]
    for scheme in schemes:
        second = None if encoder is None else scheme
        options.append(Saving(f"quantize({scheme})@{both}+compile", scheme, second))
        options.append(Saving(f"quantize({scheme})@{both}+compile+offload(model)", scheme, second, "model"))
    options += [
        Saving("compile+offload(model)", offloading="model"),
        Saving("offload(group)", offloading="group"),
    ]
    for scheme in schemes:
        second = None if encoder is None else scheme
        # A block that is compiled is onloaded as one. Without, fp8's inputs are quantised by many small kernels.
        options.append(
            Saving(
                f"quantize({scheme})@{both}+compile(blocks=repeated)+offload(group)", scheme, second, "group"
            )
        )
        if scheme != "fp8":
            options.append(Saving(f"quantize({scheme})@{both}+offload(group)", scheme, second, "group"))
    return [saving for saving in options if _canonical(saving)]


def _canonical(saving: Saving) -> bool:
    try:
        resolve(saving.recipe)
    except RecipeError:
        return False
    return True


def _gain(saving: Saving, speeds: Speeds) -> float:
    """Return the speed-up of a recipe without its offloading, by records of the model or its family."""
    parts = [
        part.text.partition("@")[0]
        for part in resolve(saving.recipe)
        if part.name not in ("offload", "channels_last")
        and (part.name != "quantize" or "denoiser" in part.targets)
    ]
    if not parts:
        return 1.0
    plain = resolve("+".join(parts)).text.replace("compile(blocks=repeated)", "compile")
    repeated = plain.replace("compile", "compile(blocks=repeated)")
    return speeds.of(plain) or speeds.of(repeated) or _GAINS[plain]


def _copies_s(saving: Saving, published: Prediction, chip: Chip) -> float:
    """Return the seconds of a call's copies from the host."""
    if saving.offloading is None:
        return 0.0
    rate = 1e9 * _HOST_GB_S.get(chip.architecture, _OLDER_HOST_GB_S) / (2 if chip.name in _EIGHT_LANES else 1)
    need = need_of(saving, published)
    if saving.offloading == "model":
        return need.held_bytes / (_WHOLE_SHARE * rate)
    calls = next((part.calls for part in published.work.components if part.component == "denoiser"), 1)
    return (calls * need.denoiser_bytes + (need.held_bytes - need.denoiser_bytes)) / rate


@cache
def known_speeds(model: str) -> Speeds:
    """Return the recorded speed-ups of a model on a GPU, or else of the models of its architecture."""
    tables = [table for table in committed_tables() if table.device == "cuda" and table.batch == 1]
    kin = kin_of(model, frozenset(table.model for table in tables))
    near = [table for table in tables if table.model == kin.name]
    near = near or [table for table in tables if kin.is_family(kin_of(table.model, frozenset({table.model})))]
    gains: dict[str, float] = {}
    for table in sorted(near, key=lambda table: -len(table.rows)):
        for text, gain in _added(table):
            gains.setdefault(text, gain)
    return Speeds(gains, near[0].gpu if near else "")


def _added(table: EvidenceTable) -> list[tuple[str, float]]:
    """Return each row's techniques beyond the table's baseline, and its speed-up."""
    common = {technique.text for technique in resolve(table.baseline)}
    gains = []
    for row in table.rows:
        if row.gain is None:
            continue
        try:
            extra = [technique.text for technique in resolve(row.recipe) if technique.text not in common]
            gains.append((resolve("+".join(extra) or "baseline").text, row.gain.point))
        except RecipeError:
            continue  # it needs the baseline's techniques, or is one that vivace had once
    return gains
