"""Times and memory of recipes that nothing measured on a GPU: from data sheets, and vivace's records of other GPUs.

A predicted table has vivace's records of other GPUs, projected by data sheets, and recipes that save memory. The memory
of the latter is estimated (`vivace.runtime.memory.fit`); their time is the model's with their known gain, plus copies
from the host.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from vivace.architectures import CATALOGUE
from vivace.architectures.entry import Embedded
from vivace.errors import RecipeError
from vivace.evidence.committed import committed_tables
from vivace.evidence.recommendation.kin import Kin, kin_of
from vivace.evidence.tables import EvidenceRow, EvidenceTable
from vivace.foundation.hardware import CHIPS, Chip, Gpu, Near, known_gpu, near
from vivace.foundation.spec.base import Spec
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.foundation.stats import Interval
from vivace.machinery.technique import DENOISERS
from vivace.recipes.resolve import resolve_cached
from vivace.runtime.memory.fit import RESERVE_BYTES, Saving, Scheme, largest_encoder, need_of
from vivace.runtime.memory.predict import Prediction
from vivace.runtime.memory.remembered import footprints

PLACE = "vivace's prediction"
BY_OPERATIONS = "its operations"
_SKIPS = re.compile(
    r"cache|cutoff|steps|prune|merging|taylor|pyramid|guidance|distilled|parallel|progressive|scheduler"
)
"""Recipes that compute less than every step in full."""
EFFICIENCY = 0.6
"""Share of a chip's rate with fp32 accumulation that matmuls and attention of a model reach together."""
_LEAST_EFFICIENCY, _MOST_EFFICIENCY = 0.5, 0.7
"""The same at least and at most, by the power cap, the clock and PyTorch's version (an H200: 0.5 to 0.7 of a compiled
FLUX's call, docs/performance/flux.md)."""
_MOST_ELSEWHERE = 0.9
"""The most on another generation than the record's, whose power may hold it back less: an L20 reaches 0.76 of its data
sheet in FLUX.1 [dev] (cache-dit, docs/performance/predictions.md)."""
_UNCERTAINTY = 1.6
"""Factor by which times predicted from operations alone may be wrong, either way."""
_HOST_S = 0.015
"""Seconds that a host takes to launch the kernels of a network's call (an H200 waits 19 ms for each step of SD 1.5)."""
_HOSTS = 1.75
"""Factor by which hosts of one card differ (those of two H200 took 1.46 and 2.52 s for SDXL's baseline, which waits for
them)."""
_BITS = {"fp8": 8, "int8": 8, "mxfp8": 8, "nvfp4": 4}
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
          "quantize(int8)": 0.75, "quantize(nf4)": 0.5, "quantize(fp8_weight)+compile": 1.1,
          "quantize(fp8_weight)": 0.75}  # fmt: skip
"""Speed-ups where no record of the model or its family has any: the lower ones of other families."""
_GGUF_GAIN = 0.7
"""Of a denoiser whose layers are dequantised in each call (an H200: 0.72 of FLUX's speed with Q8_0)."""


class ChipLimit(Spec):
    """The least seconds of an image at a model's own size, if every step is computed.

    Attributes:
        step_flop: of one step, guidance included.
        half_s, eight_s, four_s: with all matmuls in 16 bits, in 8, and in 4.
    """

    gpu: str
    steps: int
    step_flop: int
    half_s: float
    eight_s: float
    four_s: float

    def least_s(self, recipe: str) -> float:
        """Return the least seconds of a recipe; 0 for recipes that leave work out."""
        if _SKIPS.search(recipe):
            return 0.0
        return {16: self.half_s, 8: self.eight_s, 4: self.four_s}[fewest_bits(recipe)]


def chip_limit(model: str, gpu: str | None, steps: int | None = None) -> ChipLimit | None:
    """Return the limit of a model of the catalogue; None if the GPU's data sheet is not known."""
    published, named = footprints().get(model), None if gpu is None else known_gpu(gpu)
    if published is None or named is None or isinstance(CATALOGUE[model].origin, Embedded):
        return None
    chip = named.chip
    step_flop = round(_flop(published, "denoiser") / published.num_inference_steps)
    steps = steps or published.num_inference_steps
    tera = steps * step_flop / 1e12
    return ChipLimit(
        gpu=chip.name,
        steps=steps,
        step_flop=step_flop,
        half_s=tera / chip.half,
        eight_s=tera / chip.eight,
        four_s=tera / chip.four,
    )


def _flop(published: Prediction, component: str = "") -> int:
    """Return the operations of a call, or of one component in it."""
    return sum(
        part.gemm_flop + part.conv_flop + part.attention_flop
        for part in published.work.components
        if component in ("", part.component)
    )


@cache
def fewest_bits(recipe: str) -> int:
    """Return the bits of the numbers that a recipe multiplies: 16, 8 or 4; 8 if this version cannot read it."""
    try:
        precisions = [technique.facts.arithmetic.precision or "" for technique in resolve_cached(recipe)]
    except RecipeError:
        return 8
    return min((_BITS.get(precision, 16) for precision in precisions), default=16)


# A call consists of arithmetic, whose time is proportional to the chip's speed, and the rest: waiting for memory, which
# goes with its rate, and for the host. Neither the division, nor the share of its data sheet that each chip reaches,
# nor the other host is known, so the answer is an interval from the least to the most that they allow. Its middle is
# that of usual shares and of the same host.
def _on_chip(
    measured_s: float, published: Prediction | None, there: Chip, here: Chip, recipe: str
) -> Interval:
    """Return the seconds of a call on a chip, from the `measured_s` that it took on the chip `there`.

    Args:
        published: the model's call, whose operations are counted; None: all of it is arithmetic.
    """
    bits = fewest_bits(recipe)
    rate_there, rate_here = _rate(there, bits), _rate(here, bits)
    narrower = there.bandwidth_gb_s / here.bandwidth_gb_s
    is_sibling = here.architecture == there.architecture
    flop = math.inf if published is None else _flop(published)
    launches_s = 0.0 if published is None or "cuda_graph" in recipe else _launches_s(published)

    def seconds(share_there: float, share_here: float, memory: float, host: float) -> float:
        arithmetic_s = min(measured_s, flop / 1e12 / (rate_there * share_there))
        rest_s = measured_s - arithmetic_s
        host_s = min(rest_s, launches_s * _HOSTS)
        slower = rate_there * share_there / (rate_here * share_here)
        return arithmetic_s * slower + (rest_s - host_s) * memory + host_s * host

    shorter, longer = min(1.0, narrower), max(1.0, narrower)
    usual = (
        seconds(EFFICIENCY, EFFICIENCY if is_sibling else _MOST_ELSEWHERE, shorter, shorter),
        seconds(EFFICIENCY, EFFICIENCY, longer, longer),
    )
    most_here = _MOST_EFFICIENCY if is_sibling else _MOST_ELSEWHERE
    low = seconds(_LEAST_EFFICIENCY, most_here, shorter, min(shorter, 1 / _HOSTS))
    high = seconds(_MOST_EFFICIENCY, _LEAST_EFFICIENCY, longer, max(longer, _HOSTS))
    return Interval(math.sqrt(usual[0] * usual[1]), low, high)


def _rate(chip: Chip, bits: int) -> float:
    """Return TFLOP/s with fp32 accumulation, as PyTorch multiplies. It halves fp8 of GeForce, as it does bf16."""
    return chip.bf16 * {16: chip.half, 8: chip.eight, 4: chip.four}[bits] / chip.half


def _around(seconds: float) -> Interval:
    return Interval(seconds, seconds / _UNCERTAINTY, seconds * _UNCERTAINTY)


def projected(row: EvidenceRow, table_gpu: str, kin: Kin, gpu: str) -> Interval | None:
    """Return the projected seconds of another GPU's row on a GPU; None if they cannot be projected."""
    here, there = known_gpu(gpu), known_gpu(table_gpu)
    if row.latency is None or here is None or there is None:
        return None
    published = kin.published
    chip = here.chip.as_of_bf16 if is_bf16(published) and "fp16" not in row.recipe else here.chip
    return _on_chip(row.latency.point, published, there.chip, chip, row.recipe)


@dataclass(frozen=True)
class Speeds:
    """Speed-ups of techniques, each over the baseline of its record.

    Attributes:
        gains: by the recipe that was added to the baseline, canonical.
    """

    gains: Mapping[str, float] = field(default_factory=dict)
    gpu: str = ""

    def of(self, recipe: str) -> float | None:
        """Return the speed-up of a recipe; None if unknown.

        Quantising other components than the denoiser hardly changes the time, so such records count as well.
        """
        try:
            parts = resolve_cached(recipe)
        except RecipeError:
            return None
        plain = "+".join(technique.text.partition("@")[0] for technique in parts)
        for text in (
            parts.text,
            resolve_cached(plain).text if all("denoiser" in t.targets for t in parts) else "",
        ):
            if text in self.gains:
                return self.gains[text]
        return None


@dataclass(frozen=True)
class Card:
    """The GPU that a model has to fit.

    Attributes:
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
    return published is not None and any(
        part.name in DENOISERS and part.dtype.startswith("bf16") for part in published.components
    )


def predicted_table(
    kin: Kin, card: Card, tables: Sequence[EvidenceTable], published: Prediction
) -> EvidenceTable:
    """Return the predicted table of a GPU."""
    chip = card.gpu.chip.as_of_bf16 if is_bf16(published) else card.gpu.chip
    mine = [
        table
        for table in tables
        if table.kind == "committed"
        and table.model == kin.name
        and table.device == "cuda"
        and table.batch == 1
        and known_gpu(table.gpu) is not None
        and near(card.gpu.name, table.gpu) is not Near.SAME
    ]
    base = _base_seconds(published, mine, chip)
    if kin.is_gguf:
        base = _around(base[0].point / _GGUF_GAIN), BY_OPERATIONS
    rows: dict[str, EvidenceRow] = {}
    for row in (
        *_saving_rows(kin, published, base, chip),
        *_projected_rows(published, base[0], mine, chip),
    ):
        before = rows.get(row.recipe)
        if before is None or row.predicted_from != BY_OPERATIONS:
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


def _base_seconds(published: Prediction, tables: Iterable[EvidenceTable], chip: Chip) -> tuple[Interval, str]:
    """Return the seconds of the published model, as if it fitted, and the GPU of their record, or BY_OPERATIONS."""
    for table in sorted(
        tables, key=lambda table: (near(chip.name, table.gpu), table.rows[0].recipe != BASELINE)
    ):
        row = next((row for row in table.rows if row.recipe == BASELINE and row.latency is not None), None)
        there = known_gpu(table.gpu)
        if row is not None and row.latency is not None and there is not None:
            return _on_chip(row.latency.point, published, there.chip, chip, BASELINE), table.gpu
    seconds = _flop(published) / published.batch / 1e12 / (chip.bf16 * EFFICIENCY) + _launches_s(published)
    return _around(seconds), BY_OPERATIONS


def _launches_s(published: Prediction) -> float:
    """Return the seconds that a host takes to launch the kernels of a call."""
    return _HOST_S * sum(part.calls for part in published.work.components)


def _projected_rows(
    published: Prediction, base: Interval, tables: Sequence[EvidenceTable], chip: Chip
) -> Iterator[EvidenceRow]:
    """Yield the rows recorded on other GPUs, the nearest last, with their times on this one."""
    for table in sorted(tables, key=lambda table: -near(chip.name, table.gpu)):
        there = known_gpu(table.gpu)
        assert there is not None
        for row in table.rows:
            if row.latency is None or not row.is_known or row.is_counted or "offload" in row.recipe:
                continue
            seconds = _on_chip(row.latency.point, published, there.chip, chip, row.recipe)
            update = {
                "latency": seconds,
                "gain": Interval(base.point / seconds.point, None, None),
                "predicted_from": table.gpu,
                "measured_s": row.latency.point,
            }
            unknown = dict.fromkeys(("verdict", "steps_s", "spread", "first_call_s"))
            yield row.model_copy(update=update | unknown)


def _saving_rows(
    kin: Kin, published: Prediction, base: tuple[Interval, str], chip: Chip
) -> Iterator[EvidenceRow]:
    """Yield the published model, and recipes that save memory, with estimated memory and times."""
    speeds = known_speeds(kin.architecture)
    seconds, origin = base
    for saving in _savings(kin, published, chip):
        recipe, need, is_plain = (
            resolve_cached(saving.recipe),
            need_of(saving, published),
            saving.recipe == BASELINE,
        )
        latency = seconds
        if not is_plain:
            copies_s = _copies_s(saving, published, chip)
            latency = _around(seconds.point / _gain(saving, speeds) + copies_s)
        yield EvidenceRow(
            recipe=recipe.text,
            num_techniques=len(recipe.techniques),
            same_picture=all(technique.facts.same_picture for technique in recipe),
            latency=latency,
            gain=None if is_plain else Interval(seconds.point / latency.point, None, None),
            peak_bytes=need.needed_bytes,
            predicted_from=origin if is_plain else BY_OPERATIONS,
        )


def _savings(kin: Kin, published: Prediction, chip: Chip) -> list[Saving]:
    """Return the recipes that save memory, and the published model itself, canonical.

    A GGUF file stays as it is. A file in fp8 is what its owner wanted in eight bits: no other scheme rounds it again.
    """
    encoder = largest_encoder(published)
    both = "denoiser" if encoder is None else f"denoiser,{encoder}"
    whole, layers = Saving("offload(model)", offloading="model"), Saving("offload(group)", offloading="group")
    if kin.is_gguf:
        return [Saving(BASELINE), whole, layers]
    # fp8 with a scale for each row needs bf16.
    has_fp8 = {part.dtype for part in published.components if part.name in DENOISERS} == {"bf16"}
    schemes: dict[str, Scheme] = {"fp8": "fp8"} if has_fp8 else {}
    if kin.is_fp8:
        schemes = {"fp8" if has_fp8 and chip.capability >= (8, 9) else "fp8_weight": "fp8"}
    else:
        schemes |= {"int8": "int8", "nf4": "nf4"}
    options = [Saving(BASELINE), Saving("compile")]
    if encoder is not None:
        of_encoder: tuple[Scheme, ...] = ("int8", "nf4")
        options += [Saving(f"quantize({scheme})@{encoder}+compile", encoder=scheme) for scheme in of_encoder]
    for name, scheme in schemes.items():
        second = None if encoder is None else scheme
        compiled = f"quantize({name})@{both}+compile"
        options += [
            Saving(compiled, scheme, second),
            Saving(f"{compiled}+offload(model)", scheme, second, "model"),
        ]
    options += [Saving("compile+offload(model)", offloading="model"), layers]
    for name, scheme in schemes.items():
        second = None if encoder is None else scheme
        # A block that is compiled is onloaded as one. Without, fp8's inputs are quantised by many small kernels.
        compiled = f"quantize({name})@{both}+compile(blocks=repeated)+offload(group)"
        options.append(Saving(compiled, scheme, second, "group"))
        if name != "fp8":
            options.append(Saving(f"quantize({name})@{both}+offload(group)", scheme, second, "group"))
    return options


def _gain(saving: Saving, speeds: Speeds) -> float:
    """Return the speed-up of a recipe without its offloading, by records of the model or its family."""
    parts = [
        part.text.partition("@")[0]
        for part in resolve_cached(saving.recipe)
        if part.name not in ("offload", "channels_last")
        and (part.name != "quantize" or "denoiser" in part.targets)
    ]
    if not parts:
        return 1.0
    plain = resolve_cached("+".join(parts)).text.replace("compile(blocks=repeated)", "compile")
    repeated = plain.replace("compile", "compile(blocks=repeated)")
    return speeds.of(plain) or speeds.of(repeated) or _GAINS[plain]


def _copies_s(saving: Saving, published: Prediction, chip: Chip) -> float:
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
    mine = [table for table in tables if table.model == kin.name]
    mine = mine or [table for table in tables if kin.is_family(kin_of(table.model, frozenset({table.model})))]
    gains: dict[str, float] = {}
    for table in sorted(mine, key=lambda table: -len(table.rows)):
        common = {technique.text for technique in resolve_cached(table.baseline)}
        for row in table.rows:
            if row.gain is None:
                continue
            try:
                extra = [
                    technique.text for technique in resolve_cached(row.recipe) if technique.text not in common
                ]
                gains.setdefault(resolve_cached("+".join(extra) or BASELINE).text, row.gain.point)
            except RecipeError:
                continue  # it needs the baseline's techniques, or is one that vivace had once
    return Speeds(gains, mine[0].gpu if mine else "")


def fits_published(published: Prediction, num_bytes: float) -> bool:
    return published.needed_bytes + RESERVE_BYTES <= num_bytes
