"""vivace plan"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import click

from vivace.cli import options
from vivace.cli.card import Card, Fitted, card_of

if TYPE_CHECKING:
    from vivace.advice.speeds import Speeds
    from vivace.hardware import Chip, Gpu
    from vivace.memory.fit import Change
    from vivace.memory.predict import Prediction
    from vivace.memory.weightless import Weightless
    from vivace.recipes.recipe import Recipe
    from vivace.spec.workload import Task


@click.command()
@click.argument("model")
@click.option("--recipe", default="baseline", show_default=True, metavar="R", help="Recipe to predict.")
@click.option("--height", type=click.IntRange(1, 16384), help="Pixels; default: the model's own.")
@click.option("--width", type=click.IntRange(1, 16384), help="Pixels; default: the model's own.")
@click.option("--batch", type=click.IntRange(1, 4096), default=1, show_default=True, help="Images per call.")
@click.option(
    "--text",
    type=click.Choice(["prompts", "embeddings"]),
    default="prompts",
    show_default=True,
    help="embeddings: encode the prompts before the call.",
)
@options.task
@click.option(
    "--card",
    type=Card(),
    metavar="GB|NAME",
    help="Find changes that make it fit a card of this size, or this one; default: that of --gpu, else this machine's.",
)
@click.option(
    "--gpu",
    metavar="NAME",
    help="GPU whose data sheet limits the time, such as H100; default: that of --card, else this machine's.",
)
@options.as_json
def plan(
    model: str,
    recipe: str,
    height: int | None,
    width: int | None,
    batch: int,
    text: Literal["prompts", "embeddings"],
    task: Task | None,
    card: float | Gpu | None,
    gpu: str | None,
    as_json: bool,
) -> int:
    """Predict the GPU memory and the operations of a recipe without loading the model.

    Shows which cards the model fits and, for a card that is too small, what to change; and the time that the operations
    take at least on a GPU. MODEL is a model name (flux-dev,
    synthetic:flux-dev), a folder in diffusers' format, or a .safetensors file of SD 1.5, SDXL or FLUX.1.

    \b
        vivace plan sdxl --recipe "bf16+tiny_vae" --card 8
        vivace plan flux2-dev --gpu H100
    """
    from vivace.cli.guarded import guarded
    from vivace.recipes.resolve import resolve

    resolved = resolve(recipe)  # a mistake is reported before the heavy imports
    chip, fitted = card_of(card, gpu)

    from vivace.memory.weightless import find_weightless

    found = find_weightless(model)
    asked: dict[str, Any] = {"height": height, "width": width, "batch": batch, "text": text, "task": task}
    return guarded(found.found, lambda is_read: _plan(found, resolved, asked, fitted, chip, as_json, is_read))


def _plan(
    found: Weightless,
    resolved: Recipe,
    asked: dict[str, Any],
    card: Fitted | None,
    chip: Chip | None,
    as_json: bool,
    is_read: Callable[[], None],
) -> int:
    """Predict, look for changes that fit a card, and print both."""
    from vivace.errors import NoEffect
    from vivace.memory.fit import changes, fits, use_free_memory
    from vivace.memory.remembered import predicted as predict
    from vivace.recipes.resolve import resolve
    from vivace.spec.recipe import BASELINE

    click.echo(f"predicting {resolved.text}", err=True)
    try:
        predicted = predict(found, resolved, **asked)
    except NoEffect as error:
        if not error.already_so:
            raise
        # The recipe changes nothing, so its memory is the baseline's.
        click.echo(f"{error}; this is the baseline's memory", err=True)
        resolved = resolve(BASELINE)
        predicted = predict(found, resolved, **asked)
    is_read()
    card_bytes, card_name = (None, "") if card is None else (card.num_bytes, card.name)
    steps: list[Change] = []
    speeds: Speeds | None = None
    if card_bytes is not None and fits(predicted, card_bytes):
        faster = use_free_memory(found, predicted, card_bytes, _report_attempt)
        steps = [] if faster is None else [faster]
    elif card_bytes is not None:
        from vivace.advice.speeds import known_speeds

        speeds = known_speeds(found.name)
        steps = changes(found, resolved, predicted, card_bytes, _report_attempt, speeds.of)
    if as_json:
        click.echo(json.dumps(_facts(predicted, card_bytes, steps, chip), indent=2))
        return 0
    _print(predicted, chip)
    if card_bytes is not None:
        _print_card(predicted, card_bytes, card_name, steps, speeds)
    return 0


def _report_attempt(recipe: str) -> None:
    click.echo(f"trying {recipe}", err=True)


def _facts(
    predicted: Prediction, card_bytes: float | None, steps: list[Change], chip: Chip | None
) -> dict[str, Any]:
    from vivace.lint.limits import least_seconds
    from vivace.memory.fit import CARDS_GB, RESERVE_BYTES, fits

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
            | step.prediction.model_dump(
                mode="json",
                include={"recipe", "height", "width", "batch", "model_bytes", "peak_bytes", "loading_bytes"},
            )
            for step in steps
        ],
    }


def _print(predicted: Prediction, chip: Chip | None) -> None:
    from vivace.memory.fit import CARDS_GB, RESERVE_BYTES, fits
    from vivace.report.summary import size

    click.echo(
        f"{predicted.model}, {predicted.recipe}, {predicted.width}x{predicted.height}, batch {predicted.batch}: "
        f"predicted without loading\n"
    )
    rows = [("component", "class", "parameters", "dtype", "memory")]
    rows += [
        (c.name, c.class_name, f"{c.num_parameters / 1e6:,.1f} M", c.dtype, size(c.num_bytes))
        for c in predicted.components
    ]
    widths = [max(len(row[k]) for row in rows) for k in range(5)]
    for row in rows:
        cells = [
            cell.rjust(widths[k]) if k in (2, 4) else cell.ljust(widths[k]) for k, cell in enumerate(row)
        ]
        click.echo("  ".join(cells).rstrip())
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
    """Yield what the call computes, and the time that this takes at least."""
    from vivace.lint.limits import least_seconds
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


def _speed(step: Change, speeds: Speeds | None) -> str:
    """Return what records say of a change's speed, alone; empty for a size, a batch, or if they say nothing."""
    known = None if speeds is None else speeds.of(step.what)
    return (
        ""
        if speeds is None or known is None
        else f"; alone {known:.2f}x the baseline's speed on {speeds.gpu}"
    )


def _cards(sizes: list[int]) -> str:
    return f"cards of {', '.join(map(str, sizes))} GB" if sizes else "none of the usual cards"


def _print_card(
    predicted: Prediction, card_bytes: float, name: str, steps: list[Change], speeds: Speeds | None
) -> None:
    from vivace.memory.fit import fits
    from vivace.report.summary import size

    if fits(predicted, card_bytes):
        click.echo(f"\nIt fits {name}.")
        for step in steps:
            peak = size(step.prediction.peak_bytes)
            click.echo(
                f"So does --recipe '{step.prediction.recipe}' (peak {peak}), which is faster: it copies fewer weights."
            )
        return
    click.echo(f"\nIt does not fit {name}. These changes need less memory, each on top of the one before:")
    for step in steps:
        after = step.prediction
        verdict = "fits" if fits(after, card_bytes) else "does not fit yet"
        if step.fills:
            verdict += ", and is faster: it copies fewer weights"
        click.echo(
            f"  {step.what}: peak {size(after.peak_bytes)}, loading {size(after.loading_bytes)}: {verdict}"
            f"{_speed(step, speeds)}"
        )
    last = steps[-1].prediction if steps else predicted
    if fits(last, card_bytes):
        size_flags = f" --height {last.height} --width {last.width} --batch {last.batch}"
        click.echo(f"Use: --recipe '{last.recipe}'{size_flags}")
    elif last.loading_bytes >= last.peak_bytes:
        click.echo(
            f"vivace found no recipe that fits: loading the model before the recipe shrinks it already takes "
            f"{size(last.loading_bytes)}."
        )
    else:
        click.echo("vivace found no recipe that fits.")
