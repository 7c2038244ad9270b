"""vivace plan"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from vivace.cli.command import AsJson, Why, command
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.foundation.spec.settings import Batch, Option, Positional, Settings, Side, TaskName, read_by

if TYPE_CHECKING:
    from vivace.cli.display.terminal import Attempts
    from vivace.foundation.hardware import Gpu
    from vivace.recipes.recipe import Recipe
    from vivace.runtime.memory.predict import Prediction
    from vivace.runtime.memory.weightless import Weightless

_SIZE = re.compile(r"\s*([-+]?[\d.]+(?:e[-+]?\d+)?|[-+]?inf|nan)\s*(?:gb?)?\s*", re.IGNORECASE)


def parse_card(value: str) -> float | Gpu:
    """Parse a size in GB, or the name of a GPU, which has one. "4090" is a name."""
    from vivace.foundation.hardware import counted, known_gpu, named_gpu

    value = counted(value)[1]
    size = _SIZE.fullmatch(value)
    if size is None or known_gpu(value) is not None:
        return named_gpu(value, "--card")
    number = float(size[1])
    if not 0.1 <= number <= 10_000:
        raise ValueError(f"{value.strip()!r} is not from 0.1 to 10000 GB")
    return number


class PlanCommand(Settings):
    model: Annotated[str, Positional()]
    recipe: Annotated[str, Option("Recipe to predict.", metavar="R")] = BASELINE
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
            "Card to fit, by size or name. Default: that of --gpu, else this machine's.", metavar="GB|NAME"
        ),
    ] = None
    gpu: Annotated[
        str | None,
        Option(
            "GPU to answer for, such as H100; default: that of --card, else this machine's.", metavar="NAME"
        ),
    ] = None
    why: Why = False
    as_json: AsJson = False


@command(PlanCommand)
def plan(settings: PlanCommand) -> int:
    """Predict the GPU memory and the operations of a recipe without loading the model.

    Answers as `vivace recommend` does, with memory that is predicted for this very size and batch: whether it fits a
    card, and which recipe makes it fit. With --why: memory by stage and component, operations, the shortest time that
    they can take on a GPU, and other recipes. MODEL is a model name (flux-dev, synthetic:flux-dev), a folder in
    diffusers' format, or a .safetensors or .gguf file.

    \b
        vivace plan flux2-dev --gpu H100
        vivace plan sdxl --recipe "bf16+tiny_vae" --card 8 --why
    """
    from vivace.cli.display.terminal import Attempts, show
    from vivace.cli.watched.guarded import guarded
    from vivace.recipes.resolve import resolve

    recipe = resolve(settings.recipe)  # a mistake is reported before the heavy imports

    from vivace.evidence.recommendation.planning import (
        CardFit,
        card_of,
        fit_of,
        plan_brief,
        plan_data,
        plan_details,
    )
    from vivace.runtime.memory.weightless import find_weightless

    chip, card = card_of(settings.card, settings.gpu)
    weightless = find_weightless(settings.model)
    options = settings.model_dump(include={"height", "width", "batch", "text", "task"})

    def answer(is_read: Any) -> int:
        with Attempts() as attempts:
            if weightless.note:
                attempts.say(weightless.note)
            predicted = _predicted(weightless, recipe, options, attempts)
            is_read()
            fit = CardFit() if card is None else fit_of(weightless, predicted, card, attempts.trying)
        facts, sections, commands = plan_details(predicted, card, fit, chip)
        brief = plan_brief(
            settings.model, {"height": settings.height, "width": settings.width}, predicted, card, fit
        )
        made = brief.answer("plan", plan_data(predicted, card, fit, chip), facts, sections, commands)
        show(made, "json" if settings.as_json else "text", details=settings.why)
        return 0

    return guarded(weightless.located, answer)


def _predicted(
    weightless: Weightless, recipe: Recipe, options: dict[str, Any], attempts: Attempts
) -> Prediction:
    """Return the prediction of a recipe, or of the baseline where the recipe changes nothing."""
    from vivace.errors import NoEffect
    from vivace.recipes.resolve import resolve
    from vivace.runtime.memory.remembered import predicted

    attempts.predicting(recipe.text)
    try:
        return predicted(weightless, recipe, **options)
    except NoEffect as error:
        if not error.already_so:
            raise
        attempts.say(f"{error}; this is the baseline's memory")
        return predicted(weightless, resolve(BASELINE), **options)
