"""Write what `vivace plan MODEL --card N` predicts of usual models and cards into the package.

    python -m benchmarks.shipped_answers               each model on each card (minutes)
    python -m benchmarks.shipped_answers NAME ...      these again, and keep the others'

Nothing is downloaded, and no GPU is needed. A test predicts some anew.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks.memory_caps import CARDS_GB, MODELS
from vivace.cli.attempts import Attempts
from vivace.cli.card import CardMemory
from vivace.cli.plan import fit_of
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.recipes.recipe import Recipe
from vivace.runtime.memory import remembered, shipped_answers
from vivace.runtime.memory.footprints import footprints
from vivace.runtime.memory.shipped_answers import FILE, versions
from vivace.runtime.memory.weightless import Weightless, find_weightless

Answer = list[Any]
"""Model, recipe, and the prediction or refusal as JSON holds it."""


def main(names: list[str]) -> None:
    """Predict and write, after each model."""
    kept = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()[1:]] if names else []
    answers: list[Answer] = [answer for answer in kept if answer[0] not in names]
    for name in names or MODELS:
        answers += _answers(name)
        lines = [versions(), *sorted(answers, key=lambda answer: MODELS.index(answer[0]))]
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        FILE.write_text(text, encoding="utf-8", newline="\n")
        print(f"{name}: {sum(answer[0] == name for answer in answers)} answers", flush=True)


@contextmanager
def _collected() -> Iterator[list[Answer]]:
    """Collect the answers that are made inside the context, of which none is taken from the package."""
    answers: list[Answer] = []
    predict, shipped = remembered.predict_or_refuse, shipped_answers.shipped_answer

    def collect(model: Weightless, recipe: Recipe, request: Mapping[str, Any]) -> Any:
        content = predict(model, recipe, request)
        answers.append([model.name, recipe.text, content])
        return content

    remembered.predict_or_refuse, shipped_answers.shipped_answer = collect, lambda *_: None
    try:
        yield answers
    finally:
        remembered.predict_or_refuse, shipped_answers.shipped_answer = predict, shipped


def _answers(name: str) -> Iterator[Answer]:
    """Yield each prediction and refusal of a model once."""
    published = footprints()[name]
    with tempfile.TemporaryDirectory() as folder, _collected() as answers:
        os.environ["VIVACE_CACHE"] = folder  # so that nothing is known already
        for gigabytes in CARDS_GB:
            with Attempts() as attempts:
                fit_of(
                    find_weightless(name),
                    published,
                    CardMemory(gigabytes * 1e9, f"{gigabytes} GB"),
                    attempts,
                    is_ranked=True,
                )
    yield from {
        recipe: [model, recipe, answer] for model, recipe, answer in answers if recipe != BASELINE
    }.values()


if __name__ == "__main__":
    main(sys.argv[1:])
