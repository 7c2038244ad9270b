"""Rules that hold rows of a table against each other: recipes that grow, weights that shrink, GPUs, baselines."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from vivace.evidence.lint.findings import Fault, Reading, is_above
from vivace.evidence.lint.model_limits import EIGHT_BITS, FULL_PRECISION, model_in
from vivace.foundation.hardware import known_gpu

_LABEL = re.compile(r"([^()]+?)\s*\(([\d.]+)\)((?:\+[^()]+)?)$")
_THRESHOLD = re.compile(r"(\w*cache)\s*\(([\d.]+)\)$", re.IGNORECASE)
_BASELINE = re.compile(r"\b(?:baseline|reference|original|unmodified)\b", re.IGNORECASE)
_MUCH = 1.1
_HARDLY = 1.02
"""Times with a technique over those without: a clear effect in one place, and hardly any in another."""
_OUT_OF_ORDER = 1.5
_ORDERED_ROWS = 8
_ORDERED_SHARE = 0.8
_RUINED = 0.7
"""Share of the model's best CLIP score below which images are ruined."""
_ONE_MACHINE = "whether both rows are of one machine in one state, and whether their labels are right"


def techniques_add_alike(rows: Sequence[Reading]) -> Iterator[Fault]:
    """One technique adds about the same to two recipes of a table: "A+B (0.2)" over "A (0.2)"."""
    named = [(row, *techniques) for row in rows if (techniques := _techniques(row)) is not None]
    added = [
        (base, grown, grown[centre], base[centre], more - fewer)
        for (base, fewer, of_base), (grown, more, of_grown) in itertools.permutations(named, 2)
        if of_base == of_grown and fewer < more
        if (centre := base.centre) and grown.has(centre) and base[centre].least > 0
    ]
    for base, grown, with_it, without, extra in added:
        elsewhere = [
            f"{its_grown.label} over {its_base.label}"
            for its_base, its_grown, its_with, its_without, its_extra in added
            if its_extra == extra and its_base.label != base.label
            if its_with.least <= its_without.most * _HARDLY
        ]
        if with_it.least > without.most * _MUCH and elsewhere:
            times = f"makes it {with_it.value / without.value:.2f} times as long, and does not so in {elsewhere[0]}"
            more = f"; {base.label}: {without.text}"
            yield grown.fault(
                (base.centre,), f"{' and '.join(sorted(extra))} {times}", _ONE_MACHINE, more, sure=False
            )


def _techniques(row: Reading) -> tuple[frozenset[str], tuple[str, str, str]] | None:
    """Return the techniques of a label such as "FBCache+FA2 (0.2)", and its number and place."""
    match = _LABEL.match(row.texts.get("label", ""))
    if match is None:
        return None
    parts = f"{match[1]}{match[3]}".split("+")
    return frozenset(part.strip().lower() for part in parts), (match[2], row.section, row.of)


def thresholds_in_order(rows: Sequence[Reading]) -> Iterator[Fault]:
    """A step cache with a higher threshold skips at least as many steps."""
    before: dict[tuple[str, str, str], tuple[float, Reading]] = {}
    for row in rows:
        match, centre = _THRESHOLD.match(row.texts.get("label", "")), row.centre
        if match is None or not centre:
            continue
        key, threshold = (row.section, row.of, match[1].lower()), float(match[2])
        lower, other = before.get(key, (threshold, row))
        before[key] = (threshold, row)
        if lower < threshold and other.has(centre) and row[centre].least > other[centre].most * 1.005:
            why = "a higher threshold skips at least as many steps, and yet it is slower"
            more = f"; {other.label}: {other[centre].text}"
            yield row.fault((centre,), why, _ONE_MACHINE, more, sure=False)


def images_are_whole(rows: Sequence[Reading]) -> Iterator[Fault]:
    """A speed counts only if the images still show what the prompt asks for."""
    by_model: dict[str, list[Reading]] = {}
    for row in rows:
        if row.has("clip") and row["clip"].value > 0:
            by_model.setdefault(row.model, []).append(row)
    for group in by_model.values():
        best = max(group, key=lambda row: row["clip"].value)
        for row in group:
            if row["clip"].value < _RUINED * best["clip"].value:
                why = "the images do not show what the prompts ask for, so the row's time is that of a broken recipe"
                more = f"; {best.label}: {best['clip'].text}"
                yield row.fault(("clip",), why, "the images", more, sure=False)


def one_baseline(rows: Sequence[Reading]) -> Iterator[Fault]:
    """Rows of one model and card are relative to one baseline: those that say that they are it score alike."""
    for role in ("clip", "reward"):
        by_place: dict[tuple[str, ...], list[Reading]] = {}
        for row in rows:
            is_named = bool(_BASELINE.search(row.texts.get("label", "")))
            if row.has(role) and (is_named or (row.has("speedup") and row["speedup"].value == 1)):
                model = model_in(row.texts.get("model", "")) or model_in(row.section) or row.section
                texts = [row.texts.get(name, "") for name in ("gpu", "size")]
                counts = [row[name].text if row.has(name) else "" for name in ("batch", "height", "width")]
                by_place.setdefault((model, row.of, *texts, *counts), []).append(row)
        for baselines in by_place.values():
            first, other = (pick(baselines, key=lambda row: row[role].value) for pick in (min, max))
            if other[role].least > first[role].most * _HARDLY:
                name = role if role == "clip" else "image reward"
                share = 100 * (other[role].value / first[role].value - 1)
                yield Fault(
                    None,
                    f"{name} {first[role].text} ({first.label}), {other[role].text} ({other.label})",
                    f"both call themselves the baseline: one score is {share:.1f} % better beside the one than beside "
                    "the other",
                    "which baseline each row was measured beside, and compare it with that one only",
                    "doubtful",
                )


def quantised_weights_are_smaller(rows: Sequence[Reading]) -> Iterator[Fault]:
    """A model in eight or four bits takes less memory than the same model in sixteen."""
    whole: dict[tuple[str, str], Reading] = {}
    filled = [row for row in rows if row.has("model_memory")]
    for row in filled:
        if FULL_PRECISION.search(_precision(row)) and not EIGHT_BITS.search(_precision(row)):
            whole.setdefault(_model_and_gpu(row), row)
    for row in filled:
        base = whole.get(_model_and_gpu(row))
        is_quantised = EIGHT_BITS.search(_precision(row))
        if base is not None and is_quantised and is_above(row["model_memory"], base["model_memory"]):
            yield row.fault(
                ("model_memory",),
                "with fewer bits the weights are smaller",
                "whether the original weights were kept beside the quantised ones, or nothing was quantised",
                f"; {base.label}: {base['model_memory'].text}",
                sure=False,
            )


def _model_and_gpu(row: Reading) -> tuple[str, str]:
    return row.texts.get("model", "") or row.section, row.of


def _precision(row: Reading) -> str:
    return f"{row.texts.get('precision', '')} {row.texts.get('label', '')}"


def gpus_keep_their_order(rows: Sequence[Reading]) -> Iterator[Fault]:
    """A GPU that is the faster one in nearly all rows is not far slower in a few, and never one with half of all."""
    by_gpu: dict[str, dict[tuple[int, str], Reading]] = {}
    for row in rows:
        if row.of and row.centre and row[row.centre].value > 0:
            by_gpu.setdefault(row.of, {})[row.line, row.section] = row
    reported: set[int] = set()
    for one, two in itertools.permutations(by_gpu, 2):
        pairs = [(by_gpu[one][key], row) for key, row in by_gpu[two].items() if key in by_gpu[one]]
        weak, strong = known_gpu(one), known_gpu(two)
        is_half = weak is not None and strong is not None and 2 * weak.chip.half <= strong.chip.half
        if weak and strong and is_half and 1.5 * weak.chip.bandwidth_gb_s <= strong.chip.bandwidth_gb_s:
            for row, other in pairs:
                time, of_other = row[row.centre], other[other.centre]
                if time.most * _MUCH < of_other.least:
                    yield Fault(
                        row,
                        f"{one}: {time.text}; {two}: {of_other.text}",
                        f"the {one} has half of the {two}'s arithmetic or less, and a slower memory, and is "
                        f"{of_other.value / time.value:.2f} times as fast here",
                        "whether the columns are swapped, and both ran the same recipe, size and steps",
                        "doubtful",
                    )
        both = [(slow, fast) for slow, fast in pairs if fast.has("mean") and slow.has("mean")]
        is_faster = sum(fast["mean"].value < slow["mean"].value for slow, fast in both)
        if len(both) < _ORDERED_ROWS or is_faster < _ORDERED_SHARE * len(both):
            continue
        for slow, fast in both:
            if fast["mean"].least > slow["mean"].most * _OUT_OF_ORDER and fast.line not in reported:
                reported.add(fast.line)
                yield fast.fault(
                    ("mean",),
                    f"{two} is the faster one in {is_faster} of {len(both)} rows, and here "
                    f"{fast['mean'].value / slow['mean'].value:.1f} times slower",
                    "whether another kernel ran there, or the host was slow; measure the row again",
                    f"; {slow.of}: {slow['mean'].text}",
                    sure=False,
                )
