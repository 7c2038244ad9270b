"""The page docs/step-curves.md and its plots, from the records of `python -m benchmarks.step_curves` and
`python -m benchmarks.step_budgets`."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby
from pathlib import Path

import numpy as np

from benchmarks import step_budgets
from benchmarks.step_cases import Case, read_cases, rows_with_quality
from benchmarks.step_curves import CALIBRATED, CURVES, STEPS, record_file
from docgen import curve_plot
from docgen.models_measured import conditions_of
from vivace.answers.formatting import ratio
from vivace.answers.markdown import markdown_lines
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.foundation.stats import Interval, mean_interval
from vivace.recipes.resolve import resolve
from vivace.report.rows import Row
from vivace.techniques import TECHNIQUES

_HEADINGS = (
    "recipe", "denoiser's work", "speed-up", "hit rate", "SSIM [95 % interval]", "PSNR dB, worst",
    "CLIP margin kept", "gate", "against fewer steps", "front",
)  # fmt: skip


class Against(Enum):
    """How a recipe's SSIM compares with that of fewer steps at the same speed-up, with 95 % confidence."""

    ABOVE = "above"
    BELOW = "below"
    UNCLEAR = "no difference"

    @property
    def words(self) -> str:
        return {"above": "better", "below": "worse", "no difference": "no clear difference"}[self.value]


@dataclass(frozen=True)
class Point:
    """A measured recipe of a curve.

    speedup: measured on a GPU; else computed from the denoiser's work.
    ssim: of each image to the baseline's, in the baseline's order.
    against: None for fewer steps themselves, and where they were not measured at this speed-up.
    """

    curve: str
    row: Row
    work: float
    speedup: float
    ssim: tuple[float, ...]
    on_front: bool = False
    against: Against | None = None

    @property
    def mean_ssim(self) -> float:
        return sum(self.ssim) / len(self.ssim)


@dataclass(frozen=True)
class Family:
    """A model's record, ready to show. `points` are in the order of the curves, and by speed-up within each."""

    name: str
    path: Path
    cases: Mapping[str, Case]
    is_gpu: bool
    points: tuple[Point, ...]
    missing: tuple[Row, ...]

    @property
    def curves(self) -> list[tuple[str, list[Point]]]:
        return [(name, list(group)) for name, group in groupby(self.points, key=lambda p: p.curve)]


def families(results: Path) -> list[Family]:
    """Return the family of each model with a record; a GPU's record comes before a CPU's."""
    recorded = []
    for name in CURVES:
        for device in ("cuda", "cpu"):
            path = results / record_file(name, device).name
            cases = read_cases(path)
            if BASELINE in cases and len(cases) > 1:
                recorded.append(read_family(name, path, cases, is_gpu=device == "cuda"))
                break
    return recorded


def read_family(name: str, path: Path, cases: Mapping[str, Case], *, is_gpu: bool) -> Family:
    rows = rows_with_quality(cases)
    points: list[Point] = []
    missing = []
    for curve, texts in CURVES[name].items():
        of_curve = []
        for recipe in dict.fromkeys(resolve(text).text for text in texts):
            if recipe not in rows:
                continue
            point = _point(curve, rows[recipe], cases[recipe], is_gpu)
            if point is None:
                missing.append(rows[recipe])
            else:
                of_curve.append(point)
        points += sorted(of_curve, key=lambda p: (p.speedup, -p.mean_ssim))
    steps = [p for p in points if p.curve == STEPS]
    points = [replace(p, on_front=_is_on_front(p, points), against=_against(p, steps)) for p in points]
    return Family(name, path, cases, is_gpu, tuple(points), tuple(missing))


def page(note: str, results: Path) -> str:
    """Return the page as Markdown.

    Args:
        note: the line above the heading that says the page is generated.
        results: the folder of the records.
    """
    lines = [
        note,
        "# Speed-up against fidelity\n",
        "Step caches, guidance cutoff, block pruning and a few-step LoRA, each compared with their rival: fewer "
        "plain steps. Measured on the embedded models, whose images show what a recipe ruins. On a "
        "full-size model a cache can gain more or less, because a skipped step costs a different share of a "
        "computed one: see [what skipping saves](skipped-work.md).\n",
        "`token_merging` and `progressive_resolution` were measured, too. At no speed-up were they better than fewer "
        "steps, so they were removed; the records have their rows.\n",
    ]
    for family in families(results):
        lines += _family(family)
    lines += budgets(step_budgets.read_rows(results / step_budgets.RECORD))
    lines += [
        "## How to read this\n",
        "- *Denoiser's work*: the floating-point operations of all denoiser calls for an image over the baseline's, "
        "counted. *Hit rate*: over the warm-up and the timed calls.",
        "- *Speed-up*: on a GPU, measured. On a CPU, whose times depend on what else runs, the inverse of the work: "
        "an ideal without text encoders, VAE, and the cost of deciding what to skip.",
        "- *SSIM* compares with the baseline's image of the same prompt and seed. The plot's axis is logarithmic "
        "towards 1: 0.9, 0.99 and 0.999 are equally far apart.",
        "- *Against fewer steps*: each image's SSIM minus that of fewer steps at the same speed-up, interpolated "
        "between the measured numbers of steps (if a smaller number does better than a larger one, it counts for "
        "both). *Above* and *below*: the 95 % interval of the mean over the images excludes zero.",
        "- *Pareto front*: no other recipe here is at least as fast and as close to the baseline.",
        "- *Gate*: [the quality gate's](quality.md) verdict on what the images show, by CLIP margin; with few "
        "images it is often `unclear`. An image may differ from the baseline's and still show what was asked for.",
    ]
    return "\n".join(lines).rstrip() + "\n"


def budgets(rows: Sequence[step_budgets.Row]) -> list[str]:
    """Return the section on equal numbers of computed steps: what beats fewer plain steps, by model and budget."""
    lines = [
        "## At equal numbers of computed steps\n",
        "Each way computes as many steps as its rival, fewer plain steps of the same sampler. Computed steps are "
        "spread evenly, searched (`vivace calibrate schedule`), or chosen by a threshold that was bisected until the "
        "mean was reached; a skipped step's output, or the residual of its blocks, is repeated or predicted. "
        "Figures are SSIM to the image of all steps, minus that of fewer steps (if a smaller number of them does "
        "better than a larger one, it is the rival): the mean over the images, with its 95 % interval over the "
        "prompts. *Better* and *worse*: the interval excludes zero. With so many ways one in forty may be called "
        "better by chance. What is not better is not recommended; `steps` does as much.\n",
    ]
    plain = [row for row in rows if row.intervals is None]
    rivals = {
        (row.model, row.budget): max(
            (other for other in plain if other.model == row.model and other.budget <= row.budget),
            key=lambda other: (np.mean(other.ssim), other.budget),
        )
        for row in plain
    }
    rows = [_against_rival(row, rivals[row.model, row.budget]) for row in rows]
    for model, of_model in groupby(rows, key=lambda row: row.model):
        ours = list(of_model)
        lines.append(f"**{model}**\n")
        for budget, group in groupby(sorted(ours, key=lambda row: row.budget), key=lambda row: row.budget):
            measured = list(group)
            left = [
                method
                for method in dict.fromkeys(row.method for row in ours)
                if method not in {m.method for m in measured}
            ]
            of_left = f" Not measured: {'; '.join(left)}." if left else ""
            lines.append(_budget(measured, rivals[model, budget]) + of_left)
        above = Counter(row.method for row in ours if _beside(row) is Against.ABOVE)
        num_budgets = len({row.budget for row in ours})
        best = [_way(method) for method, number in above.items() if number == num_budgets]
        if best:
            lines.append(f"\nBetter than fewer steps at each budget: {'; '.join(best)}.\n")
        else:
            lines.append(
                "\nNothing is better than fewer steps at each budget, so no way is recommended without a proof.\n"
            )
    for name in ("average_velocity", "dmd"):
        won = {row.model for row in rows if name in row.method and _beside(row) is Against.ABOVE}
        where = (
            f"better than fewer steps on {', '.join(sorted(won))}"
            if won
            else "nowhere better than fewer steps"
        )
        lines.append(f"- `predictor={name}`: {where}.")
    lines += [
        "\nBoth are kept for the records that others publish of them ([techniques](techniques.md)), and are "
        "recommended only where `vivace tune` or `vivace prove` has proven them on the model.\n",
        "Made by `python -m benchmarks.step_budgets` ([record](../results/step-budgets.json)).\n",
    ]
    return lines


def _against_rival(row: step_budgets.Row, rival: step_budgets.Row) -> step_budgets.Row:
    """Return the row with the interval of its difference to the rival, which may have still fewer steps."""
    if row.intervals is None or rival.budget == row.budget:
        return row
    ssim = step_budgets.difference(row.ssim, rival.ssim, len(step_budgets.PROMPTS))
    return replace(row, intervals=row.intervals | {"ssim": ssim})


def _budget(rows: Sequence[step_budgets.Row], rival: step_budgets.Row) -> str:
    """Return a budget's line: fewer steps, and the others by how they compare with them."""
    plain = next(row for row in rows if row.intervals is None)
    searches = {tuple(row.search) for row in rows if row.search}
    of_search = "; searched: " + ", ".join(
        f"at most {tries} schedules on {n} images" for tries, n in searches
    )
    line = (
        f"- {plain.budget} of {plain.num_steps} steps ({len(plain.ssim)} images on {plain.device}"
        f"{of_search if searches else ''}), where `{rival.recipe}` has SSIM {np.mean(rival.ssim):.3f}"
        f"{'' if rival is plain else f', and `{plain.recipe}` {np.mean(plain.ssim):.3f}'}."
    )
    for against in Against:
        named = [f"{row.method} {_difference(row)}" for row in rows if _beside(row) is against]
        line += f" {against.words.capitalize()}: {'; '.join(named)}." if named else ""
    return line


def _way(method: str) -> str:
    """Return a method in words, or as a recipe without its threshold."""
    return (
        method
        if " steps, " in method
        else f"`{method.replace(', ', '(', 1) + (')' if ', ' in method else '')}`"
    )


def _beside(row: step_budgets.Row) -> Against | None:
    if row.intervals is None:
        return None
    _, low, high = row.intervals["ssim"]
    return Against.ABOVE if low > 0 else Against.BELOW if high < 0 else Against.UNCLEAR


def _difference(row: step_budgets.Row) -> str:
    assert row.intervals is not None
    mean, low, high = row.intervals["ssim"]
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"


def plot(family: Family) -> str:
    """Return the family's plot as SVG."""
    curves = [
        (
            name,
            [
                curve_plot.Mark(
                    p.speedup,
                    p.mean_ssim,
                    f"{p.row.recipe}, {p.speedup:.2f}x, SSIM {p.mean_ssim:.3f}",
                    p.row.failed_quality,
                    p.on_front,
                )
                for p in points
            ],
        )
        for name, points in family.curves
    ]
    what = "measured speed-up" if family.is_gpu else "speed-up, from the denoiser's work"
    label = f"{family.name}: SSIM to the baseline against {what}; the values are in the table"
    return curve_plot.draw(curves, what, label)


def plot_file(name: str) -> str:
    """Return the plot's path within the docs folder."""
    return f"images/step-curves-{name}.svg"


def table_file(name: str) -> str:
    """Return the path of the table of all recipes."""
    return f"results/step-curves-{name}.csv"


def table(family: Family) -> str:
    """Return all recipes of a family as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_HEADINGS)
    for point in family.points:
        recipe, *figures = _cells(point, family.is_gpu)
        writer.writerow([recipe.strip("`").replace("\\|", "|"), *figures])
    return text.getvalue()


def _point(curve: str, row: Row, case: Case, is_gpu: bool) -> Point | None:
    if row.latency is None or case.work is None or row.fidelity is None or not row.figures:
        return None
    ssim = tuple(1.0 if f.is_identical else f.against["ssim"] for f in row.figures)
    measured = row.speedup.point if row.speedup is not None else None
    if is_gpu and measured is None:
        return None
    speedup = measured if is_gpu and measured is not None else 1 / case.work
    return Point(curve, row, case.work, speedup, ssim)


def _is_on_front(point: Point, points: Sequence[Point]) -> bool:
    here = (point.speedup, point.mean_ssim)
    return not any(
        there != here and there[0] >= here[0] and there[1] >= here[1]
        for there in ((p.speedup, p.mean_ssim) for p in points)
    )


def _against(point: Point, steps: Sequence[Point]) -> Against | None:
    if point.curve == STEPS:
        return None
    rival = ssim_of_steps(steps, point.speedup)
    if rival is None or len(rival) != len(point.ssim):
        return None
    prompts = [f.prompt for f in point.row.figures]
    difference = mean_interval(
        [mine - theirs for mine, theirs in zip(point.ssim, rival, strict=True)], prompts
    )
    if difference.low is None or difference.high is None:
        return Against.UNCLEAR
    if difference.low > 0:
        return Against.ABOVE
    return Against.BELOW if difference.high < 0 else Against.UNCLEAR


def ssim_of_steps(steps: Sequence[Point], speedup: float) -> list[float] | None:
    """Return the SSIM per image of fewer steps at this speed-up; None beyond the fewest steps measured.

    Args:
        steps: by speed-up.
    """
    if not steps:
        return None
    # A number of steps that is faster than another and no worse replaces it.
    best = [max(steps[k:], key=lambda p: p.mean_ssim).ssim for k in range(len(steps))]
    places = [1.0, *(p.speedup for p in steps)]
    values = [(1.0,) * len(steps[0].ssim), *best]
    for left, right, near, far in zip(places, places[1:], values, values[1:], strict=False):
        if left <= speedup <= right:
            share = (speedup - left) / (right - left) if right > left else 1.0
            return [a + share * (b - a) for a, b in zip(near, far, strict=True)]
    return None


def _family(family: Family) -> list[str]:
    baseline = family.cases[BASELINE].record
    workload = baseline.trial.workload
    lines = [
        f"## {family.name}\n",
        f"{workload.width}x{workload.height}, {workload.num_inference_steps} steps, guidance "
        f"{workload.guidance_scale:g}; {workload.num_images} images a recipe ({len(workload.prompts)} prompts at "
        f"{len(workload.seeds)} seed{'s' if len(workload.seeds) > 1 else ''}). "
        + (
            "The plot shows measured speed-ups.\n"
            if family.is_gpu
            else "Measured on a CPU, so the plot shows savings in the denoiser's work, not times.\n"
        ),
        *conditions_of(case.record for case in family.cases.values()),
        "",
        f"![{family.name}: SSIM to the baseline against speed-up]({plot_file(family.name)})\n",
        *conclusions(family),
        "",
        *markdown_lines(
            _HEADINGS[:-1], [_cells(point, family.is_gpu)[:-1] for point in family.points if point.on_front]
        ),
        "",
        f"The front alone; [every recipe](../{table_file(family.name)}) is a CSV file.\n",
    ]
    missing = [
        f"- `{row.recipe}`: {row.outcome.value.replace('_', ' ')}: {row.reason}" for row in family.missing
    ]
    if missing:
        lines += ["Not measured:\n", *missing, ""]
    if "cfg_cutoff" not in CURVES[family.name]:
        lines.append(
            "Guidance is distilled into this model: without true CFG its pipeline has no second branch, so "
            "`cfg_cutoff` has nothing to cut.\n"
        )
    if any(point.curve in CALIBRATED for point in family.points):
        lines.append(
            "`teacache` and `magcache` were calibrated on this model first (`vivace calibrate teacache`, "
            "`vivace calibrate magcache`), so their thresholds are this model's own.\n"
        )
    lines.append(
        f"Made by `python -m benchmarks.step_curves {family.name}` ([record](../results/{family.path.name})).\n"
    )
    return lines


def conclusions(family: Family) -> list[str]:
    """Say which caches beat fewer steps and where, what the others do, and what is on the Pareto front."""
    caches = [(name, points) for name, points in family.curves if _is_cache(name)]
    others = [(name, points) for name, points in family.curves if name != STEPS and not _is_cache(name)]
    winners = [f"`{name}` {since}" for name, points in caches if (since := _dominates(points)) is not None]
    if winners:
        lines = [f"**Caches that beat fewer steps: {'; '.join(winners)}.**\n"]
    else:
        lines = ["**No cache beats fewer steps here.**\n"]
    lines.append("SSIM compared with fewer steps of the same speed-up:\n")
    lines += [f"- `{name}`: {_compared_with_steps(points)}." for name, points in [*caches, *others]]
    front = sorted((p for p in family.points if p.on_front), key=lambda p: p.speedup)
    parts = []
    for name, group in groupby(front, key=lambda p: p.curve):
        parts.append(f"{_span([p.speedup for p in group])} `{name}`")
    lines.append(f"\nPareto front, from mild to aggressive: {', '.join(parts)}.")
    return lines


def _is_cache(curve: str) -> bool:
    return TECHNIQUES[curve.partition(",")[0]].declared.owns == "step cache"


def _dominates(points: Sequence[Point]) -> str | None:
    """Return the longest range (as "at 1.42x to 2.90x") whose ends are above fewer steps with nothing below between."""
    stretches = []
    for is_below, group in groupby(points, key=lambda p: p.against is Against.BELOW):
        above = [p.speedup for p in group if p.against is Against.ABOVE]
        if above and not is_below:
            stretches.append((above[0], above[-1]))
    if not stretches:
        return None
    first, last = max(stretches, key=lambda ends: ends[1] / ends[0])
    if last < points[-1].speedup:
        return _span([first, last])
    return f"from {first:.2f}x up (its most aggressive setting here: {last:.2f}x)"


def _compared_with_steps(points: Sequence[Point]) -> str:
    comparable = [p for p in points if p.against is not None]
    parts = []
    for against, group in groupby(comparable, key=lambda p: p.against):
        assert against is not None
        parts.append(f"{against.words} {_span([p.speedup for p in group])}")
    beyond = [p.speedup for p in points if p.against is None]
    if beyond:
        parts.append(f"beyond the fewest steps measured {_span(beyond)}")
    return ", ".join(parts)


def _span(speedups: Sequence[float]) -> str:
    low, high = f"{min(speedups):.2f}x", f"{max(speedups):.2f}x"
    return f"at {low}" if low == high else f"at {low} to {high}"


def _cells(point: Point, is_gpu: bool) -> list[str]:
    row, fidelity = point.row, point.row.fidelity
    assert fidelity is not None
    hits = row.record.rounds[0].evidence.get("cache_hit_rate")
    psnr = "-"
    if fidelity.psnr_db is not None and fidelity.worst_psnr_db is not None:
        psnr = f"{fidelity.psnr_db.point:.1f}, {fidelity.worst_psnr_db:.1f}"
    return [
        f"`{row.recipe}`".replace("|", "\\|"),
        f"{100 * point.work:.1f} %",
        ratio(row.speedup) if is_gpu and row.speedup is not None else f"{point.speedup:.2f}x",
        "-" if hits is None else f"{100 * float(str(hits)):.0f} %",
        _interval(fidelity.ssim, 1, 3),
        psnr,
        _interval(fidelity.clip_kept, 100, 1, " %"),
        "-" if row.judgement is None else row.judgement.gate.value,
        "-" if point.against is None else point.against.value,
        "yes" if point.on_front else "",
    ]


def _interval(value: Interval | None, factor: float, digits: int, unit: str = "") -> str:
    if value is None:
        return "-"
    text = f"{factor * value.point:.{digits}f}{unit}"
    if value.low is None or value.high is None:
        return text
    return f"{text} [{factor * value.low:.{digits}f}, {factor * value.high:.{digits}f}]"
