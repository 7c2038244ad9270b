"""The page docs/performance/targets.md: what was asked of fused models, and what the records have."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.technique_records import read_records
from vivace.answers.formatting import plus_minus, size
from vivace.answers.markdown import markdown_lines
from vivace.architectures import CATALOGUE
from vivace.errors import RecipeError
from vivace.foundation.stats import Interval, median_interval
from vivace.models.find import SYNTHETIC
from vivace.recipes.resolve import resolve
from vivace.report.rows import rows_of

H200 = "H200"
FILES = (
    "flux-fused-*.json",
    "fused-model-*.json",
    "fused-*-cards.json",
    "fused-flux-dev-*.json",
    "fused-unets-*.json",
    "techniques-*.json",
    "throughput-*.json",
    "large-images-*.json",
)


@dataclass(frozen=True)
class Target:
    """Seconds of an image that were asked for.

    Attributes:
        name: on the page.
        model: of the catalogue.
        steps: of the call.
        before: the best here before `fused` knew the model, in seconds.
        public: the best published figure, where it was published, on what.
        asked_s: on one H200.
        part: recipes contain this; "": recipes that leave out no step's work.
        missed: why, in words with links; "": it is not.
    """

    name: str
    model: str
    steps: int
    before: str
    public: str
    asked_s: float
    part: str = ""
    missed: str = ""


TARGETS = (
    Target("FLUX.2 [klein] 4B", "flux2-klein-4b", 4, "0.369", "0.370 (sglang 2026-09, bf16, one H200)", 0.22),
    Target("FLUX.2 [klein] 9B", "flux2-klein-9b", 4, "0.544", "0.406 (one GB200), 0.332 (TPU v7)", 0.33),
    Target(
        "Z-Image-Turbo",
        "z-image-turbo",
        9,
        "0.809",
        "0.531 (sglang, two H200, denoising alone)",
        0.52,
        missed="attention has 30 heads of 4,160 tokens, 510 tiles for 132 multiprocessors "
        "([profile](today.md#where-the-time-is)); with graphs of the denoiser and a trimmed text, as "
        "here, 0.52 to 0.53 s was predicted",
    ),
    Target(
        "Qwen-Image 2.1",
        "qwen-image-2.1",
        40,
        "-",
        "4.48 (sglang's cookbook, bf16 eager over HTTP, one H200)",
        2.2,
        missed="the GPU is busy for 2.6 s of a call, at 1,515 MHz and the power cap; 58 ms a step, 2.3 s in all, were "
        "predicted ([operations](today.md#what-the-operations-predict)). A new length of a prompt took another 0.6 s "
        "in that record; it is 2.61 s now, and 2.62 for a new length ([record](today.md)). Where the 2.6 s are has no "
        "profile yet: `vivace profile --model synthetic:qwen-image-2.1 --recipe 'fused(fp8, attention=fp8)' --steps "
        "40`",
    ),
    Target(
        "Qwen-Image 2512, CFG 4",
        "qwen-image-2512",
        50,
        "10.6",
        "12.05 (sglang, Qwen-Image, one H200), 7.87 (two)",
        7.5,
        missed="the record's prompts have new lengths, which cost 2 s then. Since lengths share plans and graphs it "
        "takes 7.11 s, and 7.14 for a new length ([record](today.md)), with no baseline beside it yet. On two GPUs "
        "(asked: 4.2 s) there is no record",
    ),
    Target(
        "FLUX.2 [dev]",
        "flux2-dev",
        50,
        "14.6",
        "-",
        10.5,
        missed="11.7 s were predicted from the rates that [klein] reaches at the power cap "
        "([profile](today.md#where-the-time-is), of the same blocks); 10.5 s would need 1.6 PFLOP/s in matmuls",
    ),
    Target(
        "FLUX.1 [dev]",
        "flux-dev",
        28,
        "2.68",
        "2.976 (diffusers and torchao, fp8, one H200)",
        2.0,
        missed="64 of 70 ms a step are matmuls and attention at the clock that the power cap leaves "
        "([step by step](flux.md#step-by-step))",
    ),
    Target(
        "SDXL",
        "sdxl",
        30,
        "1.049",
        "1.076 (diffusers, compiled, one H200)",
        0.65,
        missed="on an H100 the GPU is busy for 0.665 s of a call "
        "([profile](unets.md#where-an-images-time-is))",
    ),
    Target(
        "SD 1.5",
        "sd15",
        30,
        "0.199",
        "-",
        0.15,
        missed="on an H100 a step takes 5.14 ms instead of 4.4, and attention in heads of 40 "
        "channels has no faster kernel ([profile](unets.md#where-an-images-time-is))",
    ),
    Target(
        "SD 1.5, study 001's recipe",
        "sd15",
        30,
        "0.111",
        "-",
        0.08,
        part="cfg_cutoff(0.4)+gpu_postprocess+scheduler(dpmpp_2m)",
        missed="as SD 1.5, over 20 steps",
    ),
)


@dataclass(frozen=True)
class Timed:
    """A recipe of a model on a card, as a record has it."""

    card: str
    recipe: str
    latency: Interval
    peak_bytes: int | None
    record: str


def fastest_of(target: Target, results: Path) -> list[Timed]:
    """Return the shortest time of each card."""
    best: dict[str, Timed] = {}
    for timed in _candidates(target, results):
        if timed.card not in best or timed.latency.point < best[timed.card].latency.point:
            best[timed.card] = timed
    return [best[card] for card in sorted(best, reverse=True)]


def _candidates(target: Target, results: Path) -> Iterator[Timed]:
    for path in sorted({path for pattern in FILES for path in results.glob(pattern)}):
        for record in read_records(path):
            workload = record.trial.workload
            is_of = record.trial.model.name == f"{SYNTHETIC}{target.model}"
            size_of_model = CATALOGUE[target.model].height
            if not is_of or workload.batch != 1:
                continue
            if (workload.num_inference_steps, workload.height) != (target.steps, size_of_model):
                continue
            (row,) = rows_of([record])
            if row.latency is None or not _counts(row.recipe, target):
                continue
            card = record.environment.device_name.removeprefix("NVIDIA ")
            peak = None if row.memory is None else row.memory.peak_bytes
            yield Timed(card, row.recipe, row.latency.median, peak, path.name)


def _counts(text: str, target: Target) -> bool:
    try:
        recipe = resolve(text)
    except RecipeError:  # of an older vivace
        return False
    if any(call.name in ("parallel", "lora") for call in recipe.techniques):
        return False
    return target.part in text if target.part else recipe.same_picture


_TEXT = """{note}
# What was asked, and what is measured

Seconds of a whole call of 1024 px (SD 1.5: 512), batch 1, text encoder and VAE included, with random weights, beside
the best before and the best that was published: of each card the shortest time on record. For those who ask whether a
fused model is as fast as was hoped.

{table}

Intervals are those of 95 %. Prompts of FLUX.1's records are encoded before the call, which takes 25 ms. Published
figures are their authors'; those of FLUX.1 and SDXL, and the times before, were measured here with random weights.

## Why they are missed

{missed}

## A LoRA inside

`fused(fp8, attention=fp8)+cuda_graph`, rank 16 in a reserve of 32 ([record](../../results/lora-fused.jsonl)):

{loras}
"""


def page(note: str, results: Path) -> str:
    """Return the page as Markdown.

    Args:
        note: the line above the heading that says the page is generated.
        results: the folder of the records.
    """
    timed = {target.name: fastest_of(target, results) for target in TARGETS}
    return _TEXT.format(
        note=note,
        table="\n".join(_table(timed)),
        missed="\n".join(_missed(timed)),
        loras="\n".join(_loras(results / "lora-fused.jsonl")),
    )


def _table(timed: Mapping[str, Sequence[Timed]]) -> list[str]:
    headings = (
        "model, steps", "before", "published", "asked", "card", "recipe", "s/image", "peak", "on an H200", "record",
    )  # fmt: skip
    rows = []
    for target in TARGETS:
        start = [f"{target.name}, {target.steps}", target.before, target.public, f"{target.asked_s:g}"]
        for of_card in timed[target.name]:
            rows.append(
                [
                    *start,
                    of_card.card,
                    f"`{of_card.recipe}`",
                    _seconds(of_card.latency),
                    "-" if of_card.peak_bytes is None else size(of_card.peak_bytes),
                    verdict(target, of_card) if of_card.card == H200 else "-",
                    f"[record](../../results/{of_card.record})",
                ]
            )
    missing = [target.name for target in TARGETS if all(t.card != H200 for t in timed[target.name])]
    lines = markdown_lines(headings, rows)
    return [*lines, "", f"No record on an H200: {'; '.join(missing)}."] if missing else lines


def _seconds(latency: Interval) -> str:
    """Return a time in seconds, also where it is short."""
    _, _, more = plus_minus(latency).partition(" \N{PLUS-MINUS SIGN}")
    return f"{latency.point:.3g} s" + (f" \N{PLUS-MINUS SIGN}{more}" if more else "")


def verdict(target: Target, timed: Timed) -> str:
    """Return whether a time is what was asked for, in words."""
    latency = timed.latency
    low, high = latency.low or latency.point, latency.high or latency.point
    if high <= target.asked_s:
        return "reached"
    over = latency.point / target.asked_s - 1
    missed = f"missed by {100 * over:.2g} %"
    if low > target.asked_s:
        return missed
    return "reached within the interval" if over <= 0 else f"{missed}, within the interval"


def _missed(timed: Mapping[str, Sequence[Timed]]) -> Iterator[str]:
    for target in TARGETS:
        verdicts = [verdict(target, of_card) for of_card in timed[target.name] if of_card.card == H200]
        if not any(words.startswith("reached") for words in verdicts) and target.missed:
            yield f"- **{target.name}**: {target.missed}."


def _loras(path: Path) -> list[str]:
    headings = (
        "model",
        "card",
        "a step, over none (asked: 1.05)",
        "exchange (0.2 s)",
        "scale (10 ms)",
        "new graphs",
    )
    rows = []
    for text in path.read_text(encoding="utf-8").splitlines():
        case = json.loads(text)
        steps = case["step_s"]
        ratios = [hot / plain for hot, plain in zip(steps["hot"], steps["plain"], strict=True)]
        new = [case[key]["cuda_graphs_recorded"] for key in ("graphs_before", "graphs_after")]
        rows.append(
            [
                case["model"].removeprefix(SYNTHETIC),
                case["environment"]["device_name"].removeprefix("NVIDIA "),
                _over(median_interval([ratios])),
                f"{statistics.median(case['exchange_s']):.3f} s of {case['file_bytes'] / 1e6:.0f} MB",
                f"{statistics.median(case['rescaling_s']) * 1e3:.1f} ms",
                str(new[1] - new[0]),
            ]
        )
    return markdown_lines(headings, rows)


def _over(gain: Interval) -> str:
    ends = "" if gain.low is None or gain.high is None else f" [{gain.low:.3f}, {gain.high:.3f}]"
    return f"{gain.point:.3f}{ends}"
