"""Rules for the figures of a row: times, percentiles, steps, memory, the limits of a chip, and shares of profiles."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from vivace.evidence.lint.columns import TIMES
from vivace.evidence.lint.findings import Fault, Reading, is_above
from vivace.evidence.lint.model_limits import EIGHT_BITS, FOUR_BITS, FULL_PRECISION, SKIPS_WORK, flops_of
from vivace.foundation.hardware import known_gpu

_ORDER = ("min", "p50", "p90", "p95", "p99", "max")
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
_SELF = (("self_cpu", "cpu", "cpu_avg"), ("self_cuda", "cuda", "cuda_avg"))
_TUNING = (
    "InductorBenchmarker",
    "CachingAutotuner",
    "benchmark_all_configs",
    "benchmark_gpu",
    "compile_inner",
)
_ONE_SET = "whether the columns are shifted, or the figures come from different runs"
_SAME_SAMPLES = "whether all figures come from the same samples"


def mean_in_range(rows: Sequence[Reading]) -> Iterator[Fault]:
    """The mean lies between the smallest and the largest sample."""
    for row, centre in itertools.product(rows, ("mean", "time")):
        # A column that does not say that it is a mean may be a run of its own, or all runs together.
        sure = centre == "mean"
        if row.has(centre, "min") and is_above(row["min"], row[centre]):
            yield row.fault((centre, "min"), "a mean is never below the smallest sample", _ONE_SET, sure=sure)
        if row.has(centre, "max") and is_above(row[centre], row["max"]):
            yield row.fault((centre, "max"), "a mean is never above the largest sample", _ONE_SET, sure=sure)


def percentiles_in_order(rows: Sequence[Reading]) -> Iterator[Fault]:
    """min <= median <= p90 <= p95 <= p99 <= max; the median lies in its interval."""
    for row in rows:
        for before, after in itertools.pairwise(role for role in _ORDER if row.has(role)):
            if is_above(row[before], row[after]):
                why = f"the {before} is never above the {after}"
                yield row.fault((before, after), why, "whether the columns are swapped")
        interval = ("low", "p50", "high")
        if row.has(*interval) and any(is_above(row[a], row[b]) for a, b in itertools.pairwise(interval)):
            why = "an interval contains its own estimate"
            yield row.fault(interval, why, "which figure belongs to which run")


def mean_fits_percentiles(rows: Sequence[Reading]) -> Iterator[Fault]:
    """Half of the samples are at least the median, a tenth at least the p90: that bounds the mean from both sides."""
    shares = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}
    for row in rows:
        if not row.has("mean", "p50"):
            continue
        steps = [(row[role], share) for role, share in shares.items() if row.has(role)]
        ends = [share for _, share in steps]
        least = sum(
            number.least * (until - share)
            for (number, share), until in zip(steps, [*ends[1:], 1.0], strict=True)
        )
        most = sum(
            number.most * (share - before)
            for (number, share), before in zip(steps, [0.0, *ends[:-1]], strict=True)
        )
        mean, bound = row["mean"], ""
        if row.has("min") and least > mean.most + 1e-9 and not is_above(row["min"], mean):
            bound = f"least {least:.4g}"
        elif row.has("max") and mean.least > most + 1e-9 and not is_above(mean, row["max"]):
            bound = f"most {most:.4g}"
        if bound:
            why = f"with these percentiles the mean is at {bound} s"
            yield row.fault(("mean", *_ORDER), why, _SAME_SAMPLES)


def positive(rows: Sequence[Reading]) -> Iterator[Fault]:
    """Calls take time, and all of their figures are positive."""
    for row, role in itertools.product(rows, _POSITIVE):
        if not row.has(role) or row[role].value > 0 or (role in _MEMORY and row[role].value == 0):
            continue
        if row[role].kind is None and role in _STATISTICS:
            continue  # of an unnamed quantity: a difference may be negative
        if role in TIMES:
            is_rounded = row[role].value == 0 and row[role].most >= _LEAST_CALL_S  # 0.0 s may be 0.04 s
            yield row.fault(
                (role,),
                "a call cannot take no or negative time",
                "whether the device was synchronised before the clock was read",
                sure=not is_rounded,
            )
        else:
            yield row.fault((role,), "there is no such number", "the cell")


def tails_need_samples(rows: Sequence[Reading]) -> Iterator[Fault]:
    """A p99 of ten samples is their maximum."""
    tail_roles = [role for role in _TAIL_SAMPLES if any(row.has(role) for row in rows)]
    if tail_roles and not any(row.has("n") for row in rows):
        yield Fault(
            None,
            f"{', '.join(tail_roles)} of an unknown number of samples",
            "a p99 of a hundred samples or fewer is their maximum, or interpolated below it",
            "how many samples each row has, and say so in the table",
            "doubtful",
        )
    for row, (role, needed) in itertools.product(rows, _TAIL_SAMPLES.items()):
        if row.has(role, "n") and row["n"].value < needed:
            why = f"fewer than {needed} samples do not tell a {role}: it is the maximum, or close to it"
            yield row.fault((role, "n"), why, "leave it out, or measure more", sure=False)


def throughput_fits_latency(rows: Sequence[Reading]) -> Iterator[Fault]:
    """Images per second times seconds per image is one (or the batch, if the time is that of a call)."""
    for row in rows:
        centre = row.centre
        if not centre or not row.has("throughput") or min(row[centre].least, row["throughput"].least) <= 0:
            continue
        batch = row["batch"].value if row.has("batch") else 1.0
        least = row[centre].least * row["throughput"].least * (1 - _RATIO_TOLERANCE)
        most = row[centre].most * row["throughput"].most * (1 + _RATIO_TOLERANCE)
        if not any(least <= batch_size <= most for batch_size in (1.0, batch)):
            at_once = _SEVERAL_GPUS.search(row.all_text) or _AT_ONCE.search(row.all_text)
            images = row[centre].value * row["throughput"].value
            yield row.fault(
                ("throughput", centre, "batch"),
                f"they multiply to {images:.3g} images at a time",
                "the batch, whether several calls ran at once, and what else the throughput counts",
                sure=least > batch and row.has("batch") and not at_once,
            )


def steps_fit_total(rows: Sequence[Reading]) -> Iterator[Fault]:
    """Steps are a part of the call."""
    derived = checked = 0
    for row in rows:
        centre, steps = row.centre, _steps_of(row)
        if not centre or steps is None or not row.has("step"):
            continue
        checked += 1
        step, total = row["step"], row[centre]
        if step.least * steps > total.most:
            # The time may be that of an image of a batch, and a recipe may leave steps out.
            batch = row["batch"].value if row.has("batch") else 1.0
            is_explained = step.least * steps <= total.most * batch or bool(SKIPS_WORK.search(row.all_text))
            yield row.fault(
                ("step", centre),
                f"the steps alone take {step.value * steps:.4g} s, more than the whole call",
                "whether both times are of the same run, size and batch, and whether all steps ran",
                f", {steps:g} steps",
                sure=not is_explained,
            )
        elif step.most * steps >= total.least:
            derived += 1
    if checked >= 3 and derived == checked:
        yield Fault(
            None,
            f"time per step times steps is the whole time in all {checked} rows",
            "the text encoders and the VAE take time too: this is the total divided by the steps, not a measured step",
            "how the time per step was measured",
            "doubtful",
        )


def peak_holds_model(rows: Sequence[Reading]) -> Iterator[Fault]:
    """The peak includes the model and the call's activations."""
    for row in rows:
        if not row.has(*_MEMORY):
            continue
        model, peak = row["model_memory"], row["peak_memory"]
        if is_above(model, peak) and not _OFFLOADED.search(row.all_text):
            check = "whether the model was offloaded between both readings, and which counter each column is"
            yield row.fault(_MEMORY, "the peak of a call includes the model", check, sure=False)
        least = max(_LEAST_SHARE * model.least, _LEAST_BYTES)
        is_alike = not is_above(model, peak) and peak.most - model.least < least
        if model.value > _FULL_SIZE_BYTES and is_alike:
            yield row.fault(
                _MEMORY,
                f"the call would need only {max(0.0, peak.value - model.value) / 1e6:.0f} MB for all activations",
                "whether the peak was reset or read after the call, and whether memory of CUDA graphs or of other "
                "allocators is left out",
                sure=False,
            )


def units_alike(rows: Sequence[Reading]) -> Iterator[Fault]:
    """A column of times has one unit."""
    for role in ("mean", "time", "min", "p50", "step"):
        filled = [row for row in rows if row.has(role) and row[role].value > 0]
        if len(filled) < 4:
            continue
        middle = sorted(row[role].value for row in filled)[len(filled) // 2]
        for row in filled:
            ratio = row[role].value / middle
            if not 1 / 300 < ratio < 300:
                length = "long" if ratio > 1 else "short"
                why = f"{max(ratio, 1 / ratio):.0f} times as {length} as the others: milliseconds among seconds?"
                more = f"; the column's median is {middle:.4g} s"
                yield row.fault((role,), why, "the unit of this cell", more, sure=False)


def rows_repeat(rows: Sequence[Reading]) -> Iterator[Fault]:
    """Two measurements do not agree in three or more times to the last digit."""
    first_rows: dict[tuple[tuple[str, float], ...], Reading] = {}
    for row in rows:
        roles = [role for role in _MEASURED if row.has(role) and row[role].is_precise]
        figures = tuple((role, row[role].value) for role in roles)
        if len({value for _, value in figures}) < 3:
            continue
        before = first_rows.setdefault(figures, row)
        if before is not row and before.of == row.of:
            yield row.fault(
                roles,
                "two measurements do not agree in every digit",
                "whether a row was copied, or a technique had no effect and an older result was read",
                f", as {before.label} in line {before.line}",
                sure=False,
            )


def chip_is_fast_enough(rows: Sequence[Reading]) -> Iterator[Fault]:
    """A call cannot compute faster than its chip."""
    for row in rows:
        centre, steps = row.first("min", "p50", "mean", "time"), _steps_of(row)
        model, gpu = flops_of(row.model), known_gpu(row.of or row.texts.get("gpu", ""))
        if not centre or model is None or gpu is None or steps is None or row[centre].least <= 0:
            continue
        sizes = {float(int(height) * int(width)) for height, width in _SIZE.findall(row.all_text)}
        sizes = {row["height"].value * row["width"].value} if row.has("height", "width") else sizes
        names = f"{' '.join(row.texts.values())} {row.section}"
        if SKIPS_WORK.search(names) or sizes - {model.pixels} or _SEVERAL_GPUS.search(row.all_text):
            continue
        text = f"{row.texts.get('precision', '')} {row.texts.get('label', '')}"
        is_half = FULL_PRECISION.search(text) and not EIGHT_BITS.search(text)
        bits = 16 if is_half else 4 if FOUR_BITS.search(text) else 8
        ceiling = {16: gpu.chip.half, 8: gpu.chip.eight, 4: gpu.chip.four}[bits]
        reached = model.step_flop * steps / row[centre].most / 1e12
        if reached > ceiling:
            yield row.fault(
                (centre,),
                f"that is {reached:,.0f} TFLOP/s; the chip has {ceiling:,.0f} in {bits} bits, dense",
                "the number of steps, the size, the GPU's name, and whether the device was synchronised",
                f", {steps:g} steps of {model.title} on {gpu.name}",
            )


def percentages(rows: Sequence[Reading]) -> Iterator[Fault]:
    """A part is at most the whole."""
    for row in rows:
        for role, number in row.numbers.items():
            if (role.endswith("percent") or role == "share") and (number.least > 100 or number.most < 0):
                check = "whether a label on the GPU's timeline is counted as if it were a kernel"
                check = "how it was measured" if role == "share" else check
                yield row.fault((role,), "a share of a whole is never above 100 %", check)


def self_percentages_add_up(rows: Sequence[Reading]) -> Iterator[Fault]:
    """Self times are disjoint."""
    for role in ("self_cpu_percent", "self_cuda_percent"):
        numbers = [row[role] for row in rows if row.has(role)]
        if len(numbers) > 1 and sum(number.least for number in numbers) > 100.0001:
            total = sum(number.value for number in numbers)
            yield Fault(
                None,
                f"{role.replace('_', ' ')} of {len(numbers)} rows: {total:.2f} % together",
                "self times exclude each other, so their shares add up to 100 % at most",
                "rows that are counted twice: a kernel for its operator and under its own name, labels beside kernels",
            )


def self_within_total(rows: Sequence[Reading]) -> Iterator[Fault]:
    """A row's self time is a part of its total."""
    for row, (own, total, _) in itertools.product(rows, _SELF):
        if row.has(own, total) and is_above(row[own], row[total]):
            yield row.fault(
                (own, total), "the total includes the self time", "whether the columns are swapped"
            )


def average_times_calls(rows: Sequence[Reading]) -> Iterator[Fault]:
    """Calls times the average is the total."""
    for row, (_, total, average) in itertools.product(rows, _SELF):
        if not row.has(total, average, "calls"):
            continue
        calls = row["calls"].value
        least, most = row[average].least * calls, row[average].most * calls
        if row[total].least > most * 1.0001 or row[total].most < least * 0.9999:
            why = "calls times the average is not the total"
            yield row.fault((total, average, "calls"), why, "which of the three is wrong")


def counted_twice(rows: Sequence[Reading]) -> Iterator[Fault]:
    """The same GPU time in two rows of a profile is one kernel, listed for its operator and for itself."""
    first_rows: dict[tuple[float, float], Reading] = {}
    for row in rows:
        if not row.has("self_cuda", "calls") or row["self_cuda"].value <= 0:
            continue
        before = first_rows.setdefault((row["self_cuda"].value, row["calls"].value), row)
        if before is not row and row["self_cuda"].value > 200 * row["self_cuda"].half_ulp:
            yield row.fault(
                ("self_cuda", "calls"),
                "the same kernels are counted in both rows",
                "whether the table lists kernels beside the operators that launch them",
                f", as {before.label} in line {before.line}",
                sure=False,
            )


def tuning_inside(rows: Sequence[Reading]) -> Iterator[Fault]:
    """Compiling and autotuning do not belong in a measured window."""
    for row in rows:
        if row.has("calls") and any(mark in row.texts.get("label", "") for mark in _TUNING):
            yield row.fault(
                ("cpu", "cuda", "calls"),
                "kernels were compiled or tuned while the call was profiled",
                "that the profile starts after the warm-up; times and shares of this table include tuning",
                sure=False,
            )


def _steps_of(row: Reading) -> float | None:
    """Return the row's own steps; those of a workload are not the row's if its recipe changes them."""
    if row.has("steps"):
        return row["steps"].value
    if row.has("workload_steps") and not SKIPS_WORK.search(row.texts.get("label", "")):
        return row["workload_steps"].value
    return None
