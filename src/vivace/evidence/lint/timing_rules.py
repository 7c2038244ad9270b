"""Rules for tables of measurements: times, percentiles, speed-ups, steps, memory, and the limits of a chip."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from vivace.evidence.lint.columns import TIMES
from vivace.evidence.lint.findings import Fault, Reading, Severity, is_above, written
from vivace.evidence.lint.model_limits import EIGHT_BITS, FOUR_BITS, FULL_PRECISION, SKIPS_WORK, flops_of
from vivace.evidence.lint.values import Number
from vivace.foundation.hardware import known_gpu

_ORDER = ("min", "p50", "p90", "p95", "p99", "max")
_CENTRE = ("mean", "time")
_MEMORY = ("model_memory", "peak_memory")
_STATISTICS = ("mean", "min", "max", "p50", "p90", "p95", "p99")
_POSITIVE = (*_STATISTICS, "time", "step", "throughput", *_MEMORY, "steps", "batch", "height", "width")
_LEAST_CALL_S = 0.01
_MEASURED = ("mean", "time", "min", "p50", "p90", "p99", "max", "step")
_TAIL_SAMPLES = {"p90": 20, "p95": 40, "p99": 200}
_RATIO_TOLERANCE = 0.02
_OFFLOADED = re.compile(r"offload|streaming|low[ _-]?vram|cpu|swap", re.IGNORECASE)
_MAKERS = r"(?:(?:nvidia|geforce|rtx|gtx|tesla|amd|instinct)[ -]*)*"
_CARD = rf"{_MAKERS}(?:[abhlv]\d{{1,3}}s?|gb?h?\d{{3}}|mi\d{{3}}x?|t4|[1-5]0[5-9]0)"
_SEVERAL_GPUS = re.compile(
    rf"(?<![\w×.,-])(?:[2-9]|[1-9]\d)\s*(?:[x×]\s*)?(?:(?:{_CARD})(?:s|\b)|(?:gpu|card)s?\b)"
    rf"|{_CARD}\s*(?:\b(?:sxm|pcie|nvl|\d+ ?gb)\w*\s*)?[x×*]\s*[2-9]\d?\b"
    r"|multi[ -]?gpu|tensor parallel|\btp\s*=?\s*\d|ulysses|\bring\b",
    re.IGNORECASE,
)
_SIZE = re.compile(r"(?<!\d)(\d{3,4})\s*(?:px)?\s*[x×*]\s*(\d{3,4})(?!\d)")
_AT_ONCE = re.compile(r"concurren|parallel|client|stream|server|queue|workers|at once", re.IGNORECASE)
_FULL_SIZE_BYTES = 2e9
_LEAST_SHARE, _LEAST_BYTES = 0.003, 40e6
"""The least memory that a call of a full-size model needs besides its weights: a feature map of SDXL's first block has
21 MB."""
_RUINED = 0.7
"""Share of the model's best CLIP score below which images are ruined."""
_THRESHOLD = re.compile(r"(\w*cache)\s*\(([\d.]+)\)$", re.IGNORECASE)


def mean_in_range(rows: Sequence[Reading]) -> Iterator[Fault]:
    """The mean lies between the smallest and the largest sample."""
    for row in rows:
        for centre in _CENTRE:
            if row.has(centre, "min") and is_above(row["min"], row[centre]):
                yield Fault(
                    row, written(row, centre, "min"), "a mean is never below the smallest sample",
                    "whether the columns are shifted, or the figures come from different runs",
                    _severity_of(centre),
                )  # fmt: skip
            if row.has(centre, "max") and is_above(row[centre], row["max"]):
                yield Fault(
                    row, written(row, centre, "max"), "a mean is never above the largest sample",
                    "whether the columns are shifted, or the figures come from different runs",
                    _severity_of(centre),
                )  # fmt: skip


def percentiles_in_order(rows: Sequence[Reading]) -> Iterator[Fault]:
    """min <= median <= p90 <= p95 <= p99 <= max; the median lies in its interval."""
    for row in rows:
        filled = [role for role in _ORDER if row.has(role)]
        for before, after in itertools.pairwise(filled):
            if is_above(row[before], row[after]):
                yield Fault(
                    row, written(row, before, after), f"the {before} is never above the {after}",
                    "whether the columns are swapped",
                )  # fmt: skip
        if row.has("low", "p50", "high") and (
            is_above(row["low"], row["p50"]) or is_above(row["p50"], row["high"])
        ):
            yield Fault(
                row, written(row, "low", "p50", "high"), "an interval contains its own estimate",
                "which figure belongs to which run",
            )  # fmt: skip


def mean_fits_percentiles(rows: Sequence[Reading]) -> Iterator[Fault]:
    """Half of the samples are at least the median, a tenth at least the p90: that bounds the mean from both sides."""
    for row in rows:
        if not row.has("mean", "p50"):
            continue
        steps = [("min", 0.0), ("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99), ("max", 1.0)]
        filled = [(row[role], share) for role, share in steps if row.has(role)]
        if row.has("min"):
            shares = [share for _, share in filled[1:]] + [1.0]
            parts = zip(filled, shares, strict=True)
            least = sum(number.least * (until - share) for (number, share), until in parts)
            if least > row["mean"].most + 1e-9 and not is_above(row["min"], row["mean"]):
                yield Fault(
                    row, written(row, "mean", *_ORDER), f"with these percentiles the mean is at least {least:.4g} s",
                    "whether all figures come from the same samples",
                )  # fmt: skip
        if row.has("max"):
            shares = [0.0, *(share for _, share in filled)]
            parts = zip(filled, shares, strict=False)
            most = sum(number.most * (share - before) for (number, share), before in parts)
            if row["mean"].least > most + 1e-9 and not is_above(row["mean"], row["max"]):
                yield Fault(
                    row, written(row, "mean", *_ORDER), f"with these percentiles the mean is at most {most:.4g} s",
                    "whether all figures come from the same samples",
                )  # fmt: skip


def positive(rows: Sequence[Reading]) -> Iterator[Fault]:
    """Calls take time, and all of their figures are positive."""
    for row in rows:
        for role in _POSITIVE:
            if not row.has(role) or row[role].value > 0 or (role in _MEMORY and row[role].value == 0):
                continue
            if row[role].kind is None and role in _STATISTICS:
                continue  # of an unnamed quantity: a difference may be negative
            is_time = role in TIMES
            # A time of 0.0 s may have been rounded.
            is_rounded = is_time and row[role].value == 0 and row[role].most >= _LEAST_CALL_S
            yield Fault(
                row, written(row, role),
                "a call cannot take no or negative time" if is_time else "there is no such number",
                "whether the device was synchronised before the clock was read" if is_time else "the cell",
                "doubtful" if is_rounded else "impossible",
            )  # fmt: skip


def tails_need_samples(rows: Sequence[Reading]) -> Iterator[Fault]:
    """A p99 of ten samples is their maximum."""
    tail_roles = [role for role in _TAIL_SAMPLES if any(row.has(role) for row in rows)]
    if not tail_roles:
        return
    if not any(row.has("n") for row in rows):
        yield Fault(
            None, f"{', '.join(tail_roles)} of an unknown number of samples",
            "a p99 of a hundred samples or fewer is their maximum, or interpolated below it",
            "how many samples each row has, and say so in the table",
            "doubtful",
        )  # fmt: skip
    for row in rows:
        for role, needed in _TAIL_SAMPLES.items():
            if row.has(role, "n") and row["n"].value < needed:
                yield Fault(
                    row, written(row, role, "n"),
                    f"fewer than {needed} samples do not tell a {role}: it is the maximum, or close to it",
                    "leave it out, or measure more",
                    "doubtful",
                )  # fmt: skip


def throughput_fits_latency(rows: Sequence[Reading]) -> Iterator[Fault]:
    """Images per second times seconds per image is one (or the batch, if the time is that of a call)."""
    for row in rows:
        centre = next((role for role in ("p50", "mean", "time") if row.has(role)), None)
        if (
            centre is None
            or not row.has("throughput")
            or row[centre].least <= 0
            or row["throughput"].least <= 0
        ):
            continue
        batch = row["batch"].value if row.has("batch") else 1.0
        is_told = (
            row.has("batch") and not _SEVERAL_GPUS.search(_said(row)) and not _AT_ONCE.search(_said(row))
        )
        least = row[centre].least * row["throughput"].least * (1 - _RATIO_TOLERANCE)
        most = row[centre].most * row["throughput"].most * (1 + _RATIO_TOLERANCE)
        if not any(least <= batch_size <= most for batch_size in {1.0, batch}):
            yield Fault(
                row, written(row, "throughput", centre, "batch"),
                f"they multiply to {row[centre].value * row['throughput'].value:.3g} images at a time",
                "the batch, whether several calls ran at once, and what else the throughput counts",
                "impossible" if least > batch and is_told else "doubtful",
            )  # fmt: skip


def steps_fit_total(rows: Sequence[Reading]) -> Iterator[Fault]:
    """Steps are a part of the call."""
    derived: list[Reading] = []
    checked = 0
    for row in rows:
        centre = next((role for role in ("p50", "mean", "time") if row.has(role)), None)
        steps = _steps_of(row)
        if centre is None or steps is None or not row.has("step"):
            continue
        checked += 1
        step, total = row["step"], row[centre]
        if step.least * steps > total.most:
            # The time may be that of an image of a batch, and a recipe may leave steps out.
            batch = row["batch"].value if row.has("batch") else 1.0
            is_explained = step.least * steps <= total.most * batch or bool(SKIPS_WORK.search(_said(row)))
            yield Fault(
                row, f"{written(row, 'step', centre)}, {steps:g} steps",
                f"the steps alone take {step.value * steps:.4g} s, more than the whole call",
                "whether both times are of the same run, size and batch, and whether all steps ran",
                "doubtful" if is_explained else "impossible",
            )  # fmt: skip
        elif step.most * steps >= total.least:
            derived.append(row)
    if checked >= 3 and len(derived) == checked:
        yield Fault(
            None, f"time per step times steps is the whole time in all {checked} rows",
            "the text encoders and the VAE take time too: this is the total divided by the steps, not a measured step",
            "how the time per step was measured",
            "doubtful",
        )  # fmt: skip


def peak_holds_model(rows: Sequence[Reading]) -> Iterator[Fault]:
    """The peak includes the model and the call's activations."""
    for row in rows:
        if not row.has("model_memory", "peak_memory"):
            continue
        model, peak = row["model_memory"], row["peak_memory"]
        if is_above(model, peak):
            if _OFFLOADED.search(_said(row)):
                continue
            yield Fault(
                row, written(row, "model_memory", "peak_memory"), "the peak of a call includes the model",
                "whether the model was offloaded between both readings, and which counter each column is",
                "doubtful",
            )  # fmt: skip
        elif model.value > _FULL_SIZE_BYTES and peak.most - model.least < max(
            _LEAST_SHARE * model.least, _LEAST_BYTES
        ):
            yield Fault(
                row, written(row, "model_memory", "peak_memory"),
                f"the call would need only {max(0.0, peak.value - model.value) / 1e6:.0f} MB for all activations",
                "whether the peak was reset or read after the call, and whether memory of CUDA graphs or of other "
                "allocators is left out",
                "doubtful",
            )  # fmt: skip


def units_alike(rows: Sequence[Reading]) -> Iterator[Fault]:
    """A column of times has one unit."""
    for role in ("mean", "time", "min", "p50", "step"):
        filled = [row for row in rows if row.has(role) and row[role].value > 0]
        if len(filled) < 4:
            continue
        ordered = sorted(row[role].value for row in filled)
        middle = ordered[len(ordered) // 2]
        for row in filled:
            ratio = row[role].value / middle
            if not 1 / 300 < ratio < 300:
                yield Fault(
                    row, f"{written(row, role)}; the column's median is {middle:.4g} s",
                    f"{max(ratio, 1 / ratio):.0f} times as {'long' if ratio > 1 else 'short'} as the others: "
                    "milliseconds among seconds?",
                    "the unit of this cell",
                    "doubtful",
                )  # fmt: skip


def rows_repeat(rows: Sequence[Reading]) -> Iterator[Fault]:
    """Two measurements do not agree in three or more times to the last digit."""
    first_rows: dict[tuple[tuple[str, float], ...], Reading] = {}
    for row in rows:
        figures = tuple(
            (role, row[role].value) for role in _MEASURED if row.has(role) and _is_precise(row[role])
        )
        if len({value for _, value in figures}) < 3:
            continue
        before = first_rows.setdefault(figures, row)
        if before is not row and before.of == row.of:
            yield Fault(
                row, f"{written(row, *(role for role, _ in figures))}, as {before.label} in line {before.line}",
                "two measurements do not agree in every digit",
                "whether a row was copied, or a technique had no effect and an older result was read",
                "doubtful",
            )  # fmt: skip


def chip_is_fast_enough(rows: Sequence[Reading]) -> Iterator[Fault]:
    """A call cannot compute faster than its chip."""
    for row in rows:
        centre = next((role for role in ("min", "p50", "mean", "time") if row.has(role)), None)
        model, gpu, steps = (
            flops_of(_model_of(row)),
            known_gpu(row.of or row.texts.get("gpu", "")),
            _steps_of(row),
        )
        if centre is None or model is None or gpu is None or steps is None or row[centre].least <= 0:
            continue
        names = " ".join(row.texts.values())
        sizes = {float(int(height) * int(width)) for height, width in _SIZE.findall(_said(row))}
        sizes = {row["height"].value * row["width"].value} if row.has("height", "width") else sizes
        if SKIPS_WORK.search(f"{names} {row.section}") or sizes - {model.pixels}:
            continue
        if _SEVERAL_GPUS.search(_said(row)):
            continue
        text = f"{row.texts.get('precision', '')} {row.texts.get('label', '')}"
        is_half = bool(FULL_PRECISION.search(text)) and not EIGHT_BITS.search(text)
        bits = 16 if is_half else 4 if FOUR_BITS.search(text) else 8
        ceiling = {16: gpu.chip.half, 8: gpu.chip.eight, 4: gpu.chip.four}[bits]
        reached = model.step_flop * steps / row[centre].most / 1e12
        if reached > ceiling:
            yield Fault(
                row, f"{written(row, centre)}, {steps:g} steps of {model.title} on {gpu.name}",
                f"that is {reached:,.0f} TFLOP/s; the chip has {ceiling:,.0f} in {bits} bits, dense",
                "the number of steps, the size, the GPU's name, and whether the device was synchronised",
            )  # fmt: skip


def images_are_whole(rows: Sequence[Reading]) -> Iterator[Fault]:
    """A speed counts only if the images still show what the prompt asks for."""
    by_model: dict[str, list[Reading]] = {}
    for row in rows:
        if row.has("clip") and row["clip"].value > 0:
            by_model.setdefault(_model_of(row), []).append(row)
    for group in by_model.values():
        best = max(group, key=lambda row: row["clip"].value)
        for row in group:
            if row["clip"].value < _RUINED * best["clip"].value:
                yield Fault(
                    row, f"{written(row, 'clip')}; {best.label}: {best['clip'].text}",
                    "the images do not show what the prompts ask for, so the row's time is that of a broken recipe",
                    "the images",
                    "doubtful",
                )  # fmt: skip


def thresholds_in_order(rows: Sequence[Reading]) -> Iterator[Fault]:
    """A step cache with a higher threshold skips at least as many steps."""
    before: dict[tuple[str, str, str], tuple[float, Reading]] = {}
    for row in rows:
        match = _THRESHOLD.match(row.texts.get("label", ""))
        centre = next((role for role in ("p50", "mean", "time") if row.has(role)), None)
        if match is None or centre is None:
            continue
        key, threshold = (row.section, row.of, match[1].lower()), float(match[2])
        if key in before:
            lower, other = before[key]
            if lower < threshold and other.has(centre) and row[centre].least > other[centre].most * 1.005:
                yield Fault(
                    row, f"{written(row, centre)}; {other.label}: {other[centre].text}",
                    "a higher threshold skips at least as many steps, and yet it is slower",
                    "whether both rows are of one machine in one state, and whether their labels are right",
                    "doubtful",
                )  # fmt: skip
        before[key] = (threshold, row)


def _severity_of(centre: str) -> Severity:
    """A column that does not say that it is a mean may be a run of its own, or all runs together."""
    return "impossible" if centre == "mean" else "doubtful"


def _said(row: Reading) -> str:
    return f"{' '.join(row.texts.values())} {row.of} {row.section} {row.context}"


def _is_precise(number: Number) -> bool:
    return number.value > 0 and number.half_ulp / number.value < 0.005


def _model_of(row: Reading) -> str:
    return row.texts.get("model") or row.section or row.texts.get("label", "")


def _steps_of(row: Reading) -> float | None:
    """Return the row's own steps; those of a workload are not the row's if its recipe changes them."""
    if row.has("steps"):
        return row["steps"].value
    if row.has("workload_steps") and not SKIPS_WORK.search(row.texts.get("label", "")):
        return row["workload_steps"].value
    return None
