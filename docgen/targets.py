"""The page docs/performance/targets.md: what was asked of fused models, and what the records have."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
_NEW_PROMPTS = "new-prompts.jsonl"
FILES = (
    "every-model.json",
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
        height: of the image; 0: the model's own.
    """

    name: str
    model: str
    steps: int
    before: str
    public: str
    asked_s: float
    part: str = ""
    missed: str = ""
    height: int = 0


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
        "predicted ([operations](today.md#what-the-operations-predict)). Of the kernels matmuls take "
        "64 % and attention 21 % ([profile](throughput.md#where-the-time-is))",
    ),
    Target(
        "Qwen-Image 2512, CFG 4",
        "qwen-image-2512",
        50,
        "10.6",
        "12.05 (sglang, Qwen-Image, one H200), 7.87 (two)",
        7.5,
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
class Line:
    """What else was asked for.

    Attributes:
        what: in words.
        asked: of an H200, in words.
        model, steps, height: of the record, the last 0 for the model's own; "" without any.
        prompts: the source images of the record of new prompts; None: the record is one of a known prompt.
        part: the record's recipe contains this; "": it leaves out no step's work.
        stands: what stands in the way, or where more is said, in words with links; `lacks` while there is no record.
        seconds: stands in place of a time, without a record.
    """

    what: str
    asked: str
    model: str = ""
    steps: int = 0
    height: int = 0
    prompts: int | None = None
    part: str = ""
    stands: str = ""
    lacks: str = ""
    seconds: str = "not measured"


_NO_FORM = "it has no fused form"
_CACHED = "reference_cache"
_PROFILES = "[profile](throughput.md#where-the-time-is)"
_TIMED_OUT = (
    "a first run was refused, since squares above 2048 px were, and a second one cut off by its time limit; from "
    "2048 to 3072 px [klein] 4B took 3.5 times as long, and Z-Image 3.3"
)
_SIZES = (("SDXL", "sdxl", 50), ("FLUX.1 [dev]", "flux-dev", 28), ("FLUX.2 [klein] 4B", "flux2-klein-4b", 4),
          ("Z-Image-Turbo", "z-image-turbo", 9))  # fmt: skip
LINES = (
    Line("edit, FLUX.2 [klein] 4B, 4, one image", "a record", "flux2-klein-4b", 4, prompts=1),
    Line("edit, FLUX.1 Kontext, 28, one image", "a record", "flux-kontext", 28, prompts=1),
    *(
        Line(f"edit, FLUX.2 [klein] 9B, 4, {words}", "a record", "flux2-klein-9b", 4, prompts=number)
        for number, words in enumerate(("one image", "two images", "three images"), 1)
    ),
    Line("edit, FLUX.2 [dev], 50", "21 s (sglang, H100: 45.4)", "flux2-dev", 50, prompts=1,
         stands="missed by 19 %: the 583 TFLOP of a step take 0.5 s. At [klein] 9B's rates, 1.40 PFLOP/s in matmuls "
         "and 0.77 in attention ([profile](today.md#where-the-time-is)), they would take 0.48 s, 23.8 s in all"),
    Line("edit, Qwen-Image-Edit-2511, 40", "11 s (sglang, H100: 23.0)", "qwen-image-edit-2511", 40, prompts=1,
         stands="missed by 19 %: 86 % of the kernels' time are matmuls, at 1.3 PFLOP/s, and attention, at 0.8 "
         f"({_PROFILES}). Each new length captured graphs of its own; lengths share them since, which has not run "
         "on a card"),
    Line("edit, Qwen-Image-Edit-2509, 40", "a record", "qwen-image-edit-2509", 40, prompts=1),
    Line("edit, Qwen-Image 2.1, 40", "a record", "qwen-image-2.1", 40, prompts=1),
    Line("FLUX.2 [dev], one image, `reference_cache`", "half of 25.0 s", "flux2-dev", 50, prompts=1, part=_CACHED,
         stands="0.57 of it; no published weights were at hand to judge images"),
    Line("FLUX.2 [klein] 4B, one image, `reference_cache`", "half of 0.44 s", "flux2-klein-4b", 4, prompts=1,
         part=_CACHED, stands="one of its four steps computes all tokens, and does so uncaptured"),
    Line("FLUX.2 [klein] 4B, three images, `reference_cache`", "a record", "flux2-klein-4b", 4, prompts=3,
         part=_CACHED),
    Line("Qwen-Image-Edit-2511, one image, `reference_cache`", "half of 13.1 s", "qwen-image-edit-2511", 40, prompts=1,
         part=_CACHED, lacks="on the card `cuda_graph` refused the recipe, which it takes since; no card could be had "
         "again"),
    Line("FLUX.2 [klein] 9B KV, 4, one image", "a record", "flux2-klein-9b-kv", 4, prompts=1,
         lacks="fused it is equal to diffusers' within the bounds of bf16 and fp8 on a CPU; no card could be had"),
    Line("new prompt, Z-Image-Turbo, 9", "at most 3 % over a known one", "z-image-turbo", 9, prompts=0),
    Line("new prompt, Qwen-Image 2.1, 40", "at most 3 %", "qwen-image-2.1", 40, prompts=0),
    Line("new prompt, Qwen-Image 2512, 50", "at most 3 %", "qwen-image-2512", 50, prompts=0),
    Line("new prompt, ERNIE-Image-Turbo, 8", "at most 3 %", "ernie-image-turbo", 8, prompts=0),
    Line("new prompt, Krea 2 Turbo, 8", "at most 3 %", "krea-2-turbo", 8, prompts=0),
    Line("Krea 2 Turbo, 8", "a record (sglang, H200: 1.56 s)", "krea-2-turbo", 8),
    Line("Krea 2 Raw, 28", "a record", "krea-2-raw", 28,
         stands="of prompts that each had a new length, which costs less since"),
    Line("SD 3.5 Large, 28", "a record", "sd35-large", 28),
    Line("SD 3.5 Medium, 40", "a record", "sd35-medium", 40),
    Line("Sana, 20", "a record", "sana-1600m", 20, stands=_NO_FORM),
    Line("Sana-Sprint, 2", "a record", "sana-sprint-1600m", 2, stands=_NO_FORM),
    Line("SDXL Turbo, 1", "a record", "sdxl-turbo", 1),
    Line("SDXL Lightning, 4", "a record", "sdxl-lightning-4step", 4),
    Line("SDXL Hyper, 4", "a record", "hyper-sdxl-4step", 4),
    Line("Qwen-Image 2512, 50, on two GPUs", "4.2 s", stands="two cards could not be had"),
    Line("profile of Qwen-Image 2.1", "a record", stands=_PROFILES, seconds="2.64 s, of which kernels 2.6"),
    Line("`tiny_vae` for FLUX.2's and Qwen's latents", "if one is published", "flux2-klein-4b", 4, prompts=0,
         part="tiny_vae", stands="0.169 s without; TAEW2.1 and TAEQI2.1 are in the catalogue too, not measured"),
    *(
        Line(f"{name}, {steps}, {size} px", "a record", model, steps, size,
             lacks=_TIMED_OUT)
        for name, model, steps in _SIZES
        for size in (1024, 1536, 2048, 3072, 4096)
    ),
    Line("where the time of 2048 px is", "a record", seconds="-",
         stands=f"attention is 47 to 56 % of it, the VAE 0.1 s ({_PROFILES})"),
    Line("the VAE tiled only where it must be, seams looked at", "a record", seconds="-",
         stands="at 3072 px a fused call peaks at 11 and 15 GB with the VAE whole; small tiles change colours "
         "([footguns](../footguns.md#memory-and-offloading))"),
    Line("sparse attention in fp8, by content, at 2048 px", "kept only if the gate passes it",
         seconds="1.18x of a call at density 0.5",
         stands="tried: a Triton kernel takes as long as cuDNN's fp8 at a density of 0.69 to 0.76 "
         "([record](../../results/sparse-attention-h200.jsonl)). Images of trained tiny models changed at shares of "
         "0.9 and 0.95, and a match of 0.9 took 0.48 to 0.84 of the image's blocks or was not reached "
         "([record](../../results/sparse-attention-cpu.jsonl)); no published weights were at hand, so it is no "
         "technique"),
    Line(
        "cards without fp8: ComfyUI's `int8 ConvRot`", "read right",
        stands="read, and compared with the rotation by its matrix; no published file was at hand "
        "([formats](../compatibility.md))", seconds="-",
    ),
    Line(
        "cards without fp8: `quantize(int8_dynamic, rotation=hadamard)`", "a record, proven on each model",
        stands="computed on a CPU and compiled for 7.5 to 8.9; no such card, and no model is proven",
    ),
    Line("predictions for cards that nobody here has", "scored", stands="[scored](predictions.md)", seconds="-"),
    Line("200 equal calls, equal bits, of each new fused form", "a record",
         stands="there are records of older forms alone ([record](../../results/same-bits.jsonl)); the run of newer "
         "ones ended without a row, since one of its models does not draw in a single step"),
)  # fmt: skip


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
    own = CATALOGUE[target.model].height
    height = target.height or own
    for case in _new_prompts(results) if height == own else ():
        is_of = (case["model"], case["steps"]) == (f"{SYNTHETIC}{target.model}", target.steps)
        if is_of and not case["images"] and _counts(case["recipe"], target):
            known = case["known_s"]
            ends = (min(known), max(known)) if len(known) > 2 else (None, None)
            latency = Interval(statistics.median(known), *ends)
            card = case["environment"]["device_name"].removeprefix("NVIDIA ")
            yield Timed(card, case["recipe"], latency, None, _NEW_PROMPTS)
    for path in sorted({path for pattern in FILES for path in results.glob(pattern)}):
        for record in read_records(path):
            workload = record.trial.workload
            is_of = record.trial.model.name == f"{SYNTHETIC}{target.model}"
            if not is_of or workload.batch != 1:
                continue
            if (workload.num_inference_steps, workload.height) != (target.steps, height):
                continue
            (row,) = rows_of([record])
            if row.latency is None or not _counts(row.recipe, target):
                continue
            card = record.environment.device_name.removeprefix("NVIDIA ")
            peak = None if row.memory is None else row.memory.peak_bytes
            yield Timed(card, row.recipe, row.latency.median, peak, path.name)


def _new_prompts(results: Path) -> list[dict[str, Any]]:
    """Return the rows of prompts of a known and of new lengths; of a known one the calls are as in other records."""
    path = results / _NEW_PROMPTS
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


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

Intervals are those of 95 %. In the [record of new prompts]({prompts}) they are from the shortest to the longest call of
the prompt that is known, in one process, and of two calls there is none. The wide ones are of older records, whose
prompts each had a new length. Prompts of FLUX.1's records are encoded before the call, which takes 25 ms. Published
figures are their authors'; those of FLUX.1 and SDXL, and the times before, were measured here with random weights.

## Why they are missed

{missed}

## Edits, new prompts, large images, other cards

What was asked besides, of an H200 in seconds of a call, each line with its record or with what stands in the way.

{lines}

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
        prompts=f"../../results/{_NEW_PROMPTS}",
        table="\n".join(_table(timed)),
        missed="\n".join(_missed(timed)),
        lines="\n".join(_lines(results)),
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


def _lines(results: Path) -> list[str]:
    prompts, rows = _new_prompts(results), []
    for line in LINES:
        seconds, record = _measured(line, results, prompts)
        stands = line.stands or (line.lacks if record == "-" else "")
        rows.append([line.what, line.asked, seconds, record, stands or "-"])
    return markdown_lines(("line", "asked", "s/image", "record", "what stands in the way"), rows)


def _measured(line: Line, results: Path, prompts: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return a line's time, in words, and its record; that it has none."""
    target = Target(line.what, line.model, line.steps, "", "", 0.0, part=line.part, height=line.height)
    if line.prompts is not None:
        times = [
            [statistics.median(case[key]) for key in ("new_s", "known_s")]
            for case in prompts
            if (case["model"], case["steps"]) == (f"{SYNTHETIC}{line.model}", line.steps)
            and case["images"] == line.prompts
            and _counts(case["recipe"], target)
        ]
        if times:
            new, known = min(times)
            over = f"{new:.3g} for a new prompt, {known:.3g} for a known one ({new / known:.3f}x)"
            return over, f"[record](../../results/{_NEW_PROMPTS})"
    elif line.model:
        for timed in fastest_of(target, results):
            if timed.card == H200:
                return (
                    f"{_seconds(timed.latency)} `{timed.recipe}`",
                    f"[record](../../results/{timed.record})",
                )
    return line.seconds, "-"


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
