"""What `vivace plan` answers: whether a model fits a card, by predicted memory, and which recipes make it fit."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vivace.answers.answer import Fact, Section, Table
from vivace.answers.formatting import seconds, size
from vivace.errors import NoEffect, RecipeError, Unsupported, WorkloadError
from vivace.evidence.lint.model_limits import least_seconds
from vivace.evidence.recommendation.advise import prediction_of, recommend, recommend_for
from vivace.evidence.recommendation.answer import (
    Brief,
    Fits,
    brief_of,
    card_in_words,
    cards_for,
    draw_command,
    how_known,
    images_of,
    time_of,
)
from vivace.evidence.recommendation.kin import download_of
from vivace.evidence.recommendation.predicted import Card, Speeds, known_speeds, typical_gpu
from vivace.evidence.recommendation.recommendation import RecipeFigures, Recommendation
from vivace.foundation.hardware import Chip, Gpu, counted, known_gpu, named_gpu, present_gpu
from vivace.foundation.spec.recipe_syntax import BASELINE, BEST
from vivace.foundation.stats import Interval
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.fit import CARDS_GB, RESERVE_BYTES, RecipeChange, changes, fits, use_free_memory
from vivace.runtime.memory.predict import Prediction
from vivace.runtime.memory.weightless import Weightless

_MOST_TRIED = 5
"""Most ranked recipes whose memory is predicted; each takes seconds."""
_SHOWN = 3
Trying = Callable[[str], None]
"""Is told each recipe before its memory is predicted."""


@dataclass(frozen=True)
class CardMemory:
    """The memory that a recipe must fit, and the card that has it.

    Attributes:
        gpu: None where only the size is known, or vivace does not know the GPU.
    """

    num_bytes: float
    name: str
    gpu: Gpu | None = None


def card_of(card: float | Gpu | None, gpu: str | None) -> tuple[Chip | None, CardMemory | None]:
    """Return the chip that limits the time, and the memory to fit; None where unknown."""
    named = None if gpu is None else named_gpu(counted(gpu)[1])
    if isinstance(card, Gpu):
        return (named or card).chip, CardMemory(card.memory_bytes, card.name, card)
    if card is not None:
        sized = CardMemory(card * 1e9, f"a card of {card:g} GB", named)
        here = present_gpu()
        chip = named or (None if here is None else known_gpu(here.name))
        return None if chip is None else chip.chip, sized
    if named is not None:
        return named.chip, CardMemory(named.memory_bytes, named.name, named)
    return _this_machine()


def _this_machine() -> tuple[Chip | None, CardMemory | None]:
    present = present_gpu()
    if present is not None:
        gpu = known_gpu(present.name)
        return None if gpu is None else gpu.chip, CardMemory(present.memory_bytes, present.name, gpu)
    if sys.platform == "linux" and not Path("/dev/kfd").exists():
        return None, None  # neither NVIDIA's driver nor AMD's, known without the seconds that torch takes
    import torch

    if not torch.cuda.is_available():
        return None, None
    total = torch.cuda.get_device_properties(0).total_memory
    return None, CardMemory(float(total), torch.cuda.get_device_name(0))


@dataclass(frozen=True)
class CardFit:
    """The recipes that fit a card.

    Attributes:
        changes: each on top of the one before; with a ranking, its first recipe that fits, and a change that uses the
            memory left free.
        ranking: the recommendation for the card, its `chosen` being that recipe; None where no recipe of it fits, or
            another recipe than the published model was planned.
        others: slower ones that fit, the fastest first; their memory is recorded or estimated.
        times_of: the GPU whose times the ranking has.
        speeds: of single changes, by records.
    """

    changes: tuple[RecipeChange, ...] = ()
    ranking: Recommendation | None = None
    others: tuple[RecipeFigures, ...] = ()
    times_of: str | None = None
    speeds: Speeds | None = None


def fit_of(weightless: Weightless, predicted: Prediction, card: CardMemory, trying: Trying) -> CardFit:
    """Return recipes that fit a card: ranked by records and estimates, else one change after the other."""
    if (
        predicted.recipe == BASELINE
        and (ranking := _ranking(weightless, predicted, card, trying)) is not None
    ):
        return ranking
    if fits(predicted, card.num_bytes):
        faster = use_free_memory(weightless, predicted, card.num_bytes, trying)
        return CardFit() if faster is None else CardFit((faster,))
    recipe, speeds = resolve(predicted.recipe), known_speeds(weightless.gguf_of or weightless.name)
    steps = changes(weightless, recipe, predicted, card.num_bytes, trying, speeds.of)
    return CardFit(tuple(steps), speeds=speeds)


def _ranking(
    weightless: Weightless, published: Prediction, card: CardMemory, trying: Trying
) -> CardFit | None:
    """Return the recommendation for a card, of which the first recipe fits; None if none does."""
    gpu = card.gpu or typical_gpu(card.num_bytes)
    limit = Card(gpu, card.num_bytes, is_typical=card.gpu is None)
    answer = recommend_for(weightless.name, published, limit)
    if answer.chosen is None:
        return None
    if not answer.chosen.num_techniques:
        return CardFit(ranking=answer, times_of=gpu.name)
    ordered = {answer.chosen.recipe: answer.chosen}
    for figures in sorted(
        answer.ranking, key=lambda each: each.latency.point if each.latency else float("inf")
    ):
        if figures.num_techniques:
            ordered.setdefault(figures.recipe, figures)
    ranked = list(ordered.values())
    for number, figures in enumerate(ranked[:_MOST_TRIED], 1):
        trying(figures.recipe)
        try:
            after = prediction_of(weightless, resolve(figures.recipe), published, figures.peak_bytes)
        except (NoEffect, RecipeError, Unsupported, WorkloadError):
            continue  # values from records of another model, or assumed by an estimate
        if fits(after, card.num_bytes):
            most = card.num_bytes - RESERVE_BYTES
            others = tuple(each for each in ranked[number:] if (each.peak_bytes or 0) <= most)
            change = RecipeChange(figures.recipe, after)
            faster = use_free_memory(weightless, after, card.num_bytes, trying)
            chosen = answer.model_copy(update={"recipe": figures.recipe, "chosen": figures})
            return CardFit((change,) if faster is None else (change, faster), chosen, others, gpu.name)
    return None


def plan_brief(
    model: str, sides: Mapping[str, int | None], planned: Prediction, card: CardMemory | None, fit: CardFit
) -> Brief:

    size = [word for name, side in sides.items() if side is not None for word in (f"--{name}", str(side))]
    on = ""
    if card is not None:
        on = card_in_words(card.gpu.name, card.num_bytes) if card.gpu is not None else f" on {card.name}"
    if fit.ranking is not None:
        made = brief_of(fit.ranking)
        is_typical = card is not None and card.gpu is None
        if is_typical:  # the line is for a card of the size, whichever
            usual = draw_command(model, BEST, planned.task)
            made = replace(made, command=usual, note=f"times are as on {fit.times_of}")
        return replace(
            made,
            model=model,
            card=on,
            peak_bytes=made.peak_bytes or (fit.changes[0].prediction if fit.changes else planned).peak_bytes,
            command=f"{made.command} {shlex.join(size)}".strip(),
        )
    last = fit.changes[-1].prediction if fit.changes else planned
    does_fit, is_plain = card is None or fits(planned, card.num_bytes), planned.recipe == BASELINE
    is_mended = not does_fit and card is not None and fits(last, card.num_bytes)
    shown = last if is_mended and is_plain else planned
    recipe = resolve(shown.recipe)
    known, origin, latency = (
        "not known: no record has this recipe here" if on else "not known: name a card with --gpu",
        "",
        None,
    )
    if card is not None and card.gpu is not None and not size and planned.batch == 1:
        latency, known, origin = _recorded(model, shown.recipe, card.gpu.name) or (None, known, "")
    if (last.height, last.width) != (planned.height, planned.width):
        size = ["--height", str(last.height), "--width", str(last.width)]
    smaller = ["--height", str(planned.height // 2), "--width", str(planned.width // 2)]
    mended = draw_command(model, last.recipe, planned.task, size)
    is_possible = does_fit or shown is last
    verdict: Fits = "no"
    if card is None:
        verdict = "unknown"
    elif is_possible:
        verdict = "as published" if is_plain and shown is planned else "with the recipe"
    return Brief(
        model=model,
        card=on,
        fits=verdict,
        recipe=shown.recipe,
        latency=latency,
        known=known,
        origin=origin,
        peak_bytes=shown.peak_bytes,
        published_bytes=planned.needed_bytes if is_plain else None,
        images=images_of(recipe.same_picture, None) if recipe.techniques else "as published",
        command=draw_command(model, shown.recipe if on or not is_plain else BEST, planned.task, size)
        if is_possible
        else "",
        next=mended if is_mended else shlex.join(["vivace", "plan", model, *smaller]),
        download=download_of(model),
        note="" if on else cards_for(planned.needed_bytes),
    )


def _recorded(model: str, recipe: str, gpu: str) -> tuple[Interval | None, str, str] | None:
    """Return the seconds of a recipe on a GPU by the records that are followed there, and how they are known."""
    answer = recommend(model, gpu=gpu)
    figures = answer.figures(recipe)
    if figures is None or figures.latency is None or answer.basis is None:
        return None
    return figures.latency, *how_known(figures, answer.basis)


def plan_details(
    predicted: Prediction, card: CardMemory | None, fit: CardFit, chip: Chip | None
) -> tuple[list[Fact], list[Section], list[Fact]]:
    """Return what `--why` adds: facts, tables, and the line that measures."""
    now = predicted
    stages = ", ".join(f"{name} {size(held)}" for name, held in now.stages.items())
    lines = {
        "of": f"{now.model}, {now.recipe}, {now.width}x{now.height}, batch {now.batch}: predicted without loading",
        "peak": f"{size(now.peak_bytes)}, in stage {now.peak_stage}: {stages}",
        "loading": f"{size(now.loading_bytes)}, while loading the model and applying the recipe",
    }
    if now.other_gpus:
        others = "on the other GPU" if now.other_gpus == 1 else f"on each of {now.other_gpus} others"
        lines["other GPUs"] = f"at most {size(now.other_gpu_bytes)} {others}, for the denoiser"
    lines["context"] = (
        f"about {size(now.beyond_allocator_bytes)} more for the CUDA context, not included above"
    )
    if work := _work(now):
        lines["compute"] = work
        if chip is not None and not now.other_gpus and not now.work_is_bound:
            least = least_seconds(now.work, chip) / now.batch
            rates = f"{chip.half:g} TFLOP/s in 16 bits, {chip.eight:g} in 8"
            lines["limit"] = f"{seconds(least)} an image at least, by the data sheet of {chip.name}: {rates}"
    good = [str(gb) for gb in CARDS_GB if fits(now, gb * 1e9)]
    cards = f"cards of {', '.join(good)} GB" if good else "none of the usual cards"
    lines["fits"] = f"{cards}, with {size(RESERVE_BYTES)} reserved for the context and fragmentation"
    parts = [
        (c.name, c.class_name, f"{c.num_parameters / 1e6:,.1f} M", c.dtype, size(c.num_bytes))
        for c in now.components
    ]
    names = ("component", "class", "parameters", "dtype", "memory")
    sections = [Section("", (Table.of(names, parts, texts=("class", "dtype")),), is_detail=True)]
    if card is not None and (rows := list(_alternatives(card, fit))):
        title = (
            "Recipes that fit, the best first" if fit.ranking else "Changes, each on top of the one before"
        )
        table = Table.of(("recipe", "peak", "loading", "time"), rows, texts=("time",), is_code=True)
        sections.append(Section(title, (table,), is_detail=True))
    facts = [Fact(name, text, is_detail=True) for name, text in lines.items()]
    return (
        facts,
        sections,
        [Fact("measure", line, is_command=True, is_detail=True) for line in _bench(now, fit)],
    )


def _work(predicted: Prediction) -> str:
    parts, total = [], 0
    for part in predicted.work.components:
        flop = part.gemm_flop + part.conv_flop + part.attention_flop
        total += flop
        times = f"{part.calls} x " if part.calls > 1 else ""
        parts.append(f"{part.component} {times}{_tera(flop / part.calls)}")
    if not total:
        return ""
    bound, hits = "", ""
    if predicted.work_is_bound:
        bound, hits = "at most ", "; hits of a step cache count as computed"
    images = "an image" if predicted.batch == 1 else f"for {predicted.batch} images"
    return f"{bound}{_tera(total)} TFLOP {images}, {predicted.num_inference_steps} steps ({', '.join(parts)}){hits}"


def _tera(flop: float) -> str:
    return f"{flop / 1e12:,.3g}" if flop < 1e15 else f"{flop / 1e12:,.0f}"


def _alternatives(card: CardMemory, fit: CardFit) -> Iterator[tuple[str, str, str, str]]:
    """Yield the rows of recipes that fit, or of changes until one does."""
    for step in fit.changes:
        after = step.prediction
        notes = []
        if fit.ranking is not None and fit.ranking.chosen is not None and not step.fills:
            notes.append(time_of(fit.ranking.chosen))
        if fit.ranking is None:
            notes.append("fits" if fits(after, card.num_bytes) else "does not fit yet")
            speed = None if fit.speeds is None else fit.speeds.of(step.what)
            if fit.speeds is not None and speed is not None:
                notes.append(f"alone {speed:.2f}x the baseline's speed on {fit.speeds.gpu}")
        if step.fills:
            notes.append("faster: it copies fewer weights")
        name = step.what if fit.ranking is None and not step.fills else after.recipe
        yield name, size(after.peak_bytes), size(after.loading_bytes), "; ".join(notes)
    for figures in fit.others[:_SHOWN]:
        peak = "unknown" if figures.peak_bytes is None else f"about {size(figures.peak_bytes)}"
        yield figures.recipe, peak, "", time_of(figures)


def _bench(predicted: Prediction, fit: CardFit) -> Iterator[str]:
    if fit.ranking is None or not fit.changes:
        return
    parts = ["vivace", "bench", "--model", predicted.model]
    for recipe in (
        *(step.prediction.recipe for step in fit.changes),
        *(each.recipe for each in fit.others[:1]),
    ):
        parts += ["--recipe", recipe]
    size = [
        "--height",
        str(predicted.height),
        "--width",
        str(predicted.width),
        "--batch",
        str(predicted.batch),
    ]
    yield shlex.join([*parts, *size])


def plan_data(
    predicted: Prediction, card: CardMemory | None, fit: CardFit, chip: Chip | None
) -> dict[str, Any]:
    card_bytes = None if card is None else card.num_bytes
    answer = fit.ranking
    chosen = () if answer is None or answer.chosen is None else (answer.chosen,)
    shown = {"recipe", "height", "width", "batch", "model_bytes", "peak_bytes", "loading_bytes"}
    return predicted.model_dump(mode="json") | {
        "gpu": None if chip is None else chip.name,
        "least_s": None if chip is None else least_seconds(predicted.work, chip) / predicted.batch,
        "reserve_bytes": RESERVE_BYTES,
        "fits": {str(gb): fits(predicted, gb * 1e9) for gb in CARDS_GB},
        "card_bytes": None if card_bytes is None else round(card_bytes),
        "fits_card": None if card_bytes is None else fits(predicted, card_bytes),
        "changes": [
            {
                "change": step.what,
                "fills": step.fills,
                "fits_card": card_bytes is not None and fits(step.prediction, card_bytes),
            }
            | step.prediction.model_dump(mode="json", include=shown)
            for step in fit.changes
        ],
        "times_of": fit.times_of,
        "records_of": None if answer is None or answer.basis is None else answer.basis.place,
        "ranking": [
            {
                "recipe": figures.recipe,
                "peak_bytes": figures.peak_bytes,
                "latency_s": None if figures.latency is None else figures.latency.point,
                "predicted_from": figures.predicted_from,
                "measured_s": figures.measured_s,
            }
            for figures in (*chosen, *fit.others)
        ],
    }
