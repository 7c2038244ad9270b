"""vivace plan"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from vivace.cli.card import CardMemory, card_of, parse_card
from vivace.cli.command import AsJson, command
from vivace.cli.display.plan_answer import CardFit, answer_of
from vivace.foundation.spec.settings import Batch, Option, Positional, Settings, Side, TaskName, read_by

if TYPE_CHECKING:
    from vivace.cli.display.attempts import Attempts
    from vivace.foundation.hardware import Chip
    from vivace.recipes.recipe import Recipe
    from vivace.runtime.memory.predict import Prediction
    from vivace.runtime.memory.weightless import Weightless


class PlanCommand(Settings):
    model: Annotated[str, Positional()]
    recipe: Annotated[str, Option("Recipe to predict.", metavar="R")] = "baseline"
    height: Side = None
    width: Side = None
    batch: Batch = 1
    text: Annotated[
        Literal["prompts", "embeddings"], Option("embeddings: encode the prompts before the call.")
    ] = "prompts"
    task: TaskName = None
    card: Annotated[
        Any,
        read_by(parse_card),
        Option(
            "Card to fit, by size or name; changes are proposed where the model does not fit. Default: that of --gpu, "
            "else this machine's.",
            metavar="GB|NAME",
        ),
    ] = None
    gpu: Annotated[
        str | None,
        Option(
            "GPU whose data sheet gives the shortest time, such as H100; default: that of --card, else this machine's.",
            metavar="NAME",
        ),
    ] = None
    as_json: AsJson = False


@command(PlanCommand)
def plan(settings: PlanCommand) -> int:
    """Predict the GPU memory and the operations of a recipe without loading the model.

    Shows which cards the model fits and, for a card that is too small, what to change; and the shortest time that the
    operations can take on a GPU. MODEL is a model name (flux-dev, synthetic:flux-dev), a folder in diffusers' format,
    or a .safetensors or .gguf file.

    \b
        vivace plan sdxl --recipe "bf16+tiny_vae" --card 8
        vivace plan flux2-dev --gpu H100
    """
    from vivace.cli.watched.guarded import guarded
    from vivace.recipes.resolve import resolve

    resolved = resolve(settings.recipe)  # a mistake is reported before the heavy imports
    chip, fitted = card_of(settings.card, settings.gpu)

    from vivace.runtime.memory.weightless import find_weightless

    weightless = find_weightless(settings.model)
    is_ranked = settings.card is not None  # asked for, not merely this machine's
    options = settings.model_dump(include={"height", "width", "batch", "text", "task"})
    return guarded(
        weightless.located,
        lambda is_read: _plan(
            weightless, resolved, options, fitted, chip, settings.as_json, is_ranked, is_read
        ),
    )


def _plan(
    weightless: Weightless,
    resolved: Recipe,
    options: dict[str, Any],
    card: CardMemory | None,
    chip: Chip | None,
    as_json: bool,
    is_ranked: bool,
    is_read: Callable[[], None],
) -> int:
    """Predict, look for what fits a card, and print both."""
    from vivace.cli.display.attempts import Attempts
    from vivace.cli.display.terminal import show

    with Attempts() as attempts:
        if weightless.note:
            attempts.say(weightless.note)
        predicted = _predicted(weightless, resolved, options, attempts)
        is_read()
        fit = CardFit() if card is None else fit_of(weightless, predicted, card, attempts, is_ranked)
    answer = answer_of(predicted, card, fit, chip, _facts(predicted, card, fit, chip))
    show(answer, "json" if as_json else "text")
    return 0


def _predicted(
    weightless: Weightless, resolved: Recipe, options: dict[str, Any], attempts: Attempts
) -> Prediction:
    """Return the prediction of a recipe, or of the baseline where the recipe changes nothing."""
    from vivace.errors import NoEffect
    from vivace.foundation.spec.recipe_syntax import BASELINE
    from vivace.recipes.resolve import resolve
    from vivace.runtime.memory.remembered import predicted

    attempts.predicting(resolved.text)
    try:
        return predicted(weightless, resolved, **options)
    except NoEffect as error:
        if not error.already_so:
            raise
        # The recipe changes nothing, so its memory is the baseline's.
        attempts.say(f"{error}; this is the baseline's memory")
        return predicted(weightless, resolve(BASELINE), **options)


def fit_of(
    weightless: Weightless, predicted: Prediction, card: CardMemory, attempts: Attempts, is_ranked: bool
) -> CardFit:
    """Return recipes that fit a card: ranked by records and estimates, else one change after the other.

    Args:
        is_ranked: whether to rank faster recipes even if the published model fits.
    """
    from vivace.evidence.recommendation.predicted_tables import known_speeds
    from vivace.foundation.spec.recipe_syntax import BASELINE
    from vivace.recipes.resolve import resolve
    from vivace.runtime.memory.fit import changes, fits, use_free_memory

    does_fit, is_baseline = fits(predicted, card.num_bytes), predicted.recipe == BASELINE
    if is_baseline and (is_ranked or not does_fit):
        ranking = _ranking(weightless, predicted, card, attempts)
        if ranking is not None:
            return ranking
    if does_fit:
        faster = use_free_memory(weightless, predicted, card.num_bytes, attempts.trying)
        return CardFit() if faster is None else CardFit((faster,))
    speeds = known_speeds(weightless.name)
    steps = changes(
        weightless, resolve(predicted.recipe), predicted, card.num_bytes, attempts.trying, speeds.of
    )
    return CardFit(tuple(steps), speeds=speeds)


def _ranking(
    weightless: Weightless, published: Prediction, card: CardMemory, attempts: Attempts
) -> CardFit | None:
    """Return the ranked recipes that fit a card; None if none does."""
    from vivace.evidence.recommendation.fits_card import fitting
    from vivace.evidence.recommendation.predicted_tables import Card as Limit
    from vivace.evidence.recommendation.predicted_tables import typical_gpu
    from vivace.runtime.memory.fit import RecipeChange, use_free_memory

    gpu = card.gpu or typical_gpu(card.num_bytes)
    limit = Limit(gpu, card.num_bytes, is_typical=card.gpu is None)
    best = fitting(weightless, published, limit, attempts.trying)
    if best is None:
        return None
    change = RecipeChange(best.chosen.recipe, best.prediction)
    faster = use_free_memory(weightless, best.prediction, card.num_bytes, attempts.trying)
    return CardFit((change,) if faster is None else (change, faster), best, times_of=gpu.name)


def _facts(predicted: Prediction, card: CardMemory | None, fit: CardFit, chip: Chip | None) -> dict[str, Any]:
    from vivace.evidence.lint.model_limits import least_seconds
    from vivace.runtime.memory.fit import CARDS_GB, RESERVE_BYTES, fits

    card_bytes = None if card is None else card.num_bytes
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
            for step in fit.changes
        ],
        "times_of": fit.times_of,
        "records_of": None
        if fit.ranking is None or fit.ranking.answer.basis is None
        else fit.ranking.answer.basis.place,
        "ranking": [
            {
                "recipe": figures.recipe,
                "peak_bytes": figures.peak_bytes,
                "latency_s": None if figures.latency is None else figures.latency.point,
                "predicted_from": figures.predicted_from,
                "measured_s": figures.measured_s,
            }
            for figures in (() if fit.ranking is None else (fit.ranking.chosen, *fit.ranking.others))
        ],
    }
