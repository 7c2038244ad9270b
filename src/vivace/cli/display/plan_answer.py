"""The answer of `vivace plan`: what a recipe needs, and what fits a card."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vivace.answers.answer import Answer, Fact, Facts, Section, Table
from vivace.cli.card import CardMemory

if TYPE_CHECKING:
    from vivace.evidence.recommendation.fits_card import Fitting
    from vivace.evidence.recommendation.predicted_tables import Speeds
    from vivace.foundation.hardware import Chip
    from vivace.runtime.memory.fit import RecipeChange
    from vivace.runtime.memory.predict import Prediction

_SHOWN = 3


@dataclass(frozen=True)
class CardFit:
    """The recipes that fit a card.

    Attributes:
        changes: each on top of the one before; with a ranking, its first recipe, and a change that uses the memory left
            free.
        ranking: None where no recipe of it fits, or another recipe than the published model was planned.
        times_of: the GPU whose times the ranking has.
        speeds: of single changes, by records.
    """

    changes: tuple[RecipeChange, ...] = ()
    ranking: Fitting | None = None
    times_of: str | None = None
    speeds: Speeds | None = None


def answer_of(
    predicted: Prediction, card: CardMemory | None, fit: CardFit, chip: Chip | None, data: dict[str, Any]
) -> Answer:
    """Return the answer of a prediction.

    Args:
        card: the one to fit, if any was asked for.
        data: the answer as JSON values.
    """
    from vivace.answers.formatting import size

    components = Table.of(
        ("component", "class", "parameters", "dtype", "memory"),
        [
            (c.name, c.class_name, f"{c.num_parameters / 1e6:,.1f} M", c.dtype, size(c.num_bytes))
            for c in predicted.components
        ],
        texts=("class", "dtype"),
    )
    return Answer(
        command="plan",
        headline=f"peak {size(predicted.peak_bytes)}, model {size(predicted.model_bytes)}",
        data=data,
        verdict="" if card is None else "fits" if data["fits_card"] else "does not fit",
        about=(
            f"{predicted.model}, {predicted.recipe}, {predicted.width}x{predicted.height}, batch {predicted.batch}: "
            "predicted without loading",
        ),
        facts=Facts(tuple(_needs(predicted, chip))),
        sections=(Section("", (components,)), *(() if card is None else (_card(predicted, card, fit),))),
        commands=tuple(_commands(predicted, card, fit)),
    )


def _needs(predicted: Prediction, chip: Chip | None) -> Iterator[Fact]:
    from vivace.answers.formatting import size
    from vivace.runtime.memory.fit import CARDS_GB, RESERVE_BYTES, fits

    stages = ", ".join(f"{name} {size(held)}" for name, held in predicted.stages.items())
    yield Fact("peak", f"{size(predicted.peak_bytes)}, in stage {predicted.peak_stage}", stages)
    yield Fact("loading", f"{size(predicted.loading_bytes)}, while loading the model and applying the recipe")
    if predicted.other_gpus:
        others = (
            "on the other GPU" if predicted.other_gpus == 1 else f"on each of {predicted.other_gpus} others"
        )
        yield Fact("other GPUs", f"at most {size(predicted.other_gpu_bytes)} {others}, for the denoiser")
    beyond = size(predicted.beyond_allocator_bytes)
    yield Fact("context", f"about {beyond} more for the CUDA context, not included above")
    yield from _work(predicted, chip)
    good = [gb for gb in CARDS_GB if fits(predicted, gb * 1e9)]
    bad = [gb for gb in CARDS_GB if gb not in good]
    too_large = f"; too large for {_cards(bad)}" if bad else ""
    reserved = f"with {size(RESERVE_BYTES)} reserved for the context and fragmentation"
    yield Fact("fits", f"{_cards(good)}, {reserved}{too_large}")


def _work(predicted: Prediction, chip: Chip | None) -> Iterator[Fact]:
    """Yield the operations of the call, and the shortest time that they can take."""
    from vivace.answers.formatting import seconds
    from vivace.evidence.lint.model_limits import least_seconds

    parts, total = [], 0
    for part in predicted.work.components:
        flop = part.gemm_flop + part.conv_flop + part.attention_flop
        total += flop
        each = f"{part.calls} x {_tera(flop / part.calls)}" if part.calls > 1 else _tera(flop)
        parts.append(f"{part.component} {each}")
    if not total:
        return
    bound = "at most " if predicted.work_is_bound else ""
    hits = "; hits of a step cache count as computed" if predicted.work_is_bound else ""
    images = "an image" if predicted.batch == 1 else f"for {predicted.batch} images"
    steps = f"{predicted.num_inference_steps} steps ({', '.join(parts)})"
    yield Fact("compute", f"{bound}{_tera(total)} TFLOP {images}, {steps}{hits}")
    if chip is not None and not predicted.other_gpus and not predicted.work_is_bound:
        least = least_seconds(predicted.work, chip) / predicted.batch
        rates = f"{chip.half:g} TFLOP/s in 16 bits, {chip.eight:g} in 8"
        yield Fact("limit", f"{seconds(least)} an image at least, by the data sheet of {chip.name}: {rates}")


def _tera(flop: float) -> str:
    return f"{flop / 1e12:,.3g}" if flop < 1e15 else f"{flop / 1e12:,.0f}"


def _cards(sizes: list[int]) -> str:
    return f"cards of {', '.join(map(str, sizes))} GB" if sizes else "none of the usual cards"


def _card(predicted: Prediction, card: CardMemory, fit: CardFit) -> Section:
    """Return whether a prediction fits a card, and the recipes that do."""
    from vivace.answers.formatting import size
    from vivace.runtime.memory.fit import fits

    does_fit = fits(predicted, card.num_bytes)
    it = f"It {'fits' if does_fit else 'does not fit'} {card.name}."
    if fit.ranking is not None:
        usual = ""
        if card.gpu is None:
            usual = f", with times as on {fit.times_of}, a usual GPU of that size (--gpu names another)"
        title = f"{it} These do{' too' if does_fit else ''}, the best first{usual}"
        return Section("", (title, _ranking(fit, fit.ranking)))
    if does_fit:
        faster = [
            f"So does --recipe '{step.prediction.recipe}' (peak {size(step.prediction.peak_bytes)}), which is faster: "
            "it copies fewer weights."
            for step in fit.changes
        ]
        return Section("", (it, *faster))
    title = f"{it} These changes need less memory, each on top of the one before"
    return Section("", (title, _changes(card, fit), *_without_one(predicted, card, fit)))


def _ranking(fit: CardFit, ranking: Fitting) -> Table:
    """Return the recipes that fit, the fastest first."""
    from vivace.answers.formatting import size
    from vivace.evidence.recommendation.sentences import time_of

    rows = []
    for step in fit.changes:
        after = step.prediction
        time = "faster: it copies fewer weights" if step.fills else time_of(ranking.chosen)
        rows.append((after.recipe, size(after.peak_bytes), size(after.loading_bytes), time))
    for figures in ranking.others[:_SHOWN]:
        peak = "unknown" if figures.peak_bytes is None else f"about {size(figures.peak_bytes)}"
        rows.append((figures.recipe, peak, "", time_of(figures)))
    return Table.of(("recipe", "peak", "loading", "time"), rows, texts=("time",), is_code=True)


def _changes(card: CardMemory, fit: CardFit) -> Table:
    from vivace.answers.formatting import size
    from vivace.runtime.memory.fit import fits

    rows = []
    for step in fit.changes:
        after = step.prediction
        verdict = "fits" if fits(after, card.num_bytes) else "does not fit yet"
        verdict += ", and is faster: it copies fewer weights" if step.fills else ""
        speed = None if fit.speeds is None else fit.speeds.of(step.what)
        if fit.speeds is not None and speed is not None:
            verdict += f"; alone {speed:.2f}x the baseline's speed on {fit.speeds.gpu}"
        rows.append((step.what, size(after.peak_bytes), size(after.loading_bytes), verdict))
    return Table.of(("change", "peak", "loading", "verdict"), rows, texts=("verdict",), is_code=True)


def _without_one(predicted: Prediction, card: CardMemory, fit: CardFit) -> Iterator[str]:
    """Yield why no change is enough, if none is."""
    from vivace.answers.formatting import size
    from vivace.runtime.memory.fit import fits

    last = fit.changes[-1].prediction if fit.changes else predicted
    if fits(last, card.num_bytes):
        return
    if last.loading_bytes >= last.peak_bytes:
        yield (
            "vivace found no recipe that fits: loading the model before the recipe shrinks it already takes "
            f"{size(last.loading_bytes)}."
        )
    else:
        yield "vivace found no recipe that fits."


def _commands(predicted: Prediction, card: CardMemory | None, fit: CardFit) -> Iterator[Fact]:
    """Yield the commands that draw with what fits, and that measure it."""
    from vivace.runtime.memory.fit import fits

    if card is None or not fit.changes:
        return
    last = fit.changes[-1].prediction
    if fit.ranking is None and (fits(predicted, card.num_bytes) or not fits(last, card.num_bytes)):
        return
    size = f"--height {last.height} --width {last.width}"
    draw = ["vivace", "generate", "PROMPT", "--model", last.model, "--recipe", last.recipe]
    yield Fact("use", f"{shlex.join(draw)} {size}", is_command=True)
    if fit.ranking is not None:
        parts = ["vivace", "bench", "--model", predicted.model]
        for recipe in dict.fromkeys((last.recipe, *(figures.recipe for figures in fit.ranking.others[:1]))):
            parts += ["--recipe", recipe]
        yield Fact("measure", f"{shlex.join(parts)} {size} --batch {last.batch}", is_command=True)
