"""The output of `vivace plan`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from vivace.cli.card import CardMemory

if TYPE_CHECKING:
    from vivace.evidence.recommendation.fits_card import Fitting
    from vivace.evidence.recommendation.predicted_tables import Speeds
    from vivace.foundation.hardware import Chip
    from vivace.runtime.memory.fit import RecipeChange
    from vivace.runtime.memory.predict import Prediction


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


def print_prediction(predicted: Prediction, chip: Chip | None) -> None:
    from vivace.report.summary import size
    from vivace.report.text_table import TextTable
    from vivace.runtime.memory.fit import CARDS_GB, RESERVE_BYTES, fits

    click.echo(
        f"{predicted.model}, {predicted.recipe}, {predicted.width}x{predicted.height}, batch {predicted.batch}: "
        f"predicted without loading\n"
    )
    rows = [
        (c.name, c.class_name, f"{c.num_parameters / 1e6:,.1f} M", c.dtype, size(c.num_bytes))
        for c in predicted.components
    ]
    headings = ("component", "class", "parameters", "dtype", "memory")
    for line in TextTable(headings, rows, left=frozenset({"class", "dtype"})).aligned():
        click.echo(line)
    stages = ", ".join(f"{name} {size(held)}" for name, held in predicted.stages.items())
    click.echo(f"\nmodel       {size(predicted.model_bytes)}")
    click.echo(f"peak        {size(predicted.peak_bytes)}, in stage {predicted.peak_stage} ({stages})")
    click.echo(
        f"loading     {size(predicted.loading_bytes)}, while loading the model and applying the recipe"
    )
    if predicted.other_gpus:
        others = (
            "on the other GPU" if predicted.other_gpus == 1 else f"on each of {predicted.other_gpus} others"
        )
        click.echo(f"other GPUs  at most {size(predicted.other_gpu_bytes)} {others}, for the denoiser")
    click.echo(
        f"context     about {size(predicted.beyond_allocator_bytes)} more for the CUDA context, not included above"
    )
    for line in _work(predicted, chip):
        click.echo(line)
    good = [gb for gb in CARDS_GB if fits(predicted, gb * 1e9)]
    bad = [gb for gb in CARDS_GB if gb not in good]
    click.echo(
        f"\nfits        {_cards(good)}, with {size(RESERVE_BYTES)} reserved for the context and fragmentation"
        + (f"; too large for {_cards(bad)}" if bad else "")
    )


def _work(predicted: Prediction, chip: Chip | None) -> Iterator[str]:
    """Yield the operations of the call, and the shortest time that they can take."""
    from vivace.evidence.lint.model_limits import least_seconds
    from vivace.report.summary import seconds

    parts, total = [], 0
    for part in predicted.work.components:
        flop = part.gemm_flop + part.conv_flop + part.attention_flop
        total += flop
        each = f"{part.calls} x {_tera(flop / part.calls)}" if part.calls > 1 else _tera(flop)
        parts.append(f"{part.component} {each}")
    if not total:
        return
    bound = "at most " if predicted.work_is_bound else ""
    images = "an image" if predicted.batch == 1 else f"for {predicted.batch} images"
    yield (
        f"compute     {bound}{_tera(total)} TFLOP {images}, {predicted.num_inference_steps} steps ({', '.join(parts)})"
        + ("; hits of a step cache count as computed" if predicted.work_is_bound else "")
    )
    if chip is not None and not predicted.other_gpus and not predicted.work_is_bound:
        least = least_seconds(predicted.work, chip) / predicted.batch
        rates = f"{chip.half:g} TFLOP/s in 16 bits, {chip.eight:g} in 8"
        yield f"limit       {seconds(least)} an image at least, by the data sheet of {chip.name}: {rates}"


def _tera(flop: float) -> str:
    return f"{flop / 1e12:,.3g}" if flop < 1e15 else f"{flop / 1e12:,.0f}"


def _speed(step: RecipeChange, speeds: Speeds | None) -> str:
    """Return the recorded speed of a change alone; empty for a size, a batch, or without records."""
    speed = None if speeds is None else speeds.of(step.what)
    return (
        ""
        if speeds is None or speed is None
        else f"; alone {speed:.2f}x the baseline's speed on {speeds.gpu}"
    )


def _cards(sizes: list[int]) -> str:
    return f"cards of {', '.join(map(str, sizes))} GB" if sizes else "none of the usual cards"


def print_card(predicted: Prediction, card: CardMemory, fit: CardFit) -> None:
    """Print whether a prediction fits a card, and the recipes that do."""
    from vivace.report.summary import size
    from vivace.runtime.memory.fit import fits

    if fit.ranking is not None:
        is_published = fits(predicted, card.num_bytes)
        head = (
            f"It fits {card.name}. These do too, the best first"
            if is_published
            else (f"It does not fit {card.name}. These do, the best first")
        )
        _print_ranking(predicted, card, fit, fit.ranking, head)
        return
    if fits(predicted, card.num_bytes):
        click.echo(f"\nIt fits {card.name}.")
        for step in fit.changes:
            peak = size(step.prediction.peak_bytes)
            click.echo(
                f"So does --recipe '{step.prediction.recipe}' (peak {peak}), which is faster: it copies fewer weights."
            )
        return
    _print_changes(predicted, card, fit)


_SHOWN = 3


def _print_ranking(
    predicted: Prediction, card: CardMemory, fit: CardFit, ranking: Fitting, head: str
) -> None:
    """Print the recipes that fit, the fastest first, with the commands to use and to measure them."""
    from vivace.evidence.recommendation.sentences import time_of
    from vivace.report.summary import size

    usual = ""
    if card.gpu is None:
        usual = f", with times as on {fit.times_of}, a usual GPU of that size (--gpu names another)"
    click.echo(f"\n{head}{usual}:")
    last = fit.changes[-1].prediction
    for step in fit.changes:
        after = step.prediction
        more = ", and is faster: it copies fewer weights" if step.fills else f", {time_of(ranking.chosen)}"
        click.echo(
            f"  {after.recipe}: peak {size(after.peak_bytes)}, loading {size(after.loading_bytes)}: fits{more}"
        )
    for figures in ranking.others[:_SHOWN]:
        peak = "unknown" if figures.peak_bytes is None else f"about {size(figures.peak_bytes)}"
        click.echo(f"  {figures.recipe}: peak {peak}, {time_of(figures)}")
    click.echo(_use(last))
    parts = ["vivace", "bench", "--model", predicted.model]
    for recipe in dict.fromkeys((last.recipe, *(figures.recipe for figures in ranking.others[:1]))):
        parts += ["--recipe", recipe]
    click.echo(f"Measure: {shlex.join(parts)}{_size_flags(last)}")


def _use(prediction: Prediction) -> str:
    """Return the command that draws with a planned recipe."""
    parts = ["vivace", "generate", "PROMPT", "--model", prediction.model, "--recipe", prediction.recipe]
    return f"Use: {shlex.join(parts)} --height {prediction.height} --width {prediction.width}"


def _size_flags(prediction: Prediction) -> str:
    return f" --height {prediction.height} --width {prediction.width} --batch {prediction.batch}"


def _print_changes(predicted: Prediction, card: CardMemory, fit: CardFit) -> None:
    """Print one change after the other, and whether the last one fits."""
    from vivace.report.summary import size
    from vivace.runtime.memory.fit import fits

    click.echo(
        f"\nIt does not fit {card.name}. These changes need less memory, each on top of the one before:"
    )
    for step in fit.changes:
        after = step.prediction
        verdict = "fits" if fits(after, card.num_bytes) else "does not fit yet"
        if step.fills:
            verdict += ", and is faster: it copies fewer weights"
        click.echo(
            f"  {step.what}: peak {size(after.peak_bytes)}, loading {size(after.loading_bytes)}: {verdict}"
            f"{_speed(step, fit.speeds)}"
        )
    last = fit.changes[-1].prediction if fit.changes else predicted
    if fits(last, card.num_bytes):
        click.echo(_use(last))
    elif last.loading_bytes >= last.peak_bytes:
        click.echo(
            f"vivace found no recipe that fits: loading the model before the recipe shrinks it already takes "
            f"{size(last.loading_bytes)}."
        )
    else:
        click.echo("vivace found no recipe that fits.")
