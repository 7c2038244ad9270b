"""Write what `vivace plan MODEL --card N` predicts of usual models and cards into the package, and what
`vivace recommend` asks of any model and card.

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

import vivace
from benchmarks.memory_caps import CARDS_GB, MODELS
from vivace.architectures import CATALOGUE
from vivace.architectures.entry import Hub
from vivace.cli.display.terminal import Attempts
from vivace.evidence.recommendation.planning import CardMemory, fit_of
from vivace.foundation.hardware import CHIPS
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.recipes.recipe import Recipe
from vivace.runtime.memory import remembered
from vivace.runtime.memory.remembered import FILE, footprints, versions
from vivace.runtime.memory.weightless import Weightless, find_weightless

Answer = list[Any]
"""Model, recipe, and the prediction or refusal as JSON holds it."""


def main(names: list[str]) -> None:
    """Predict and write, after each model."""
    every = [
        name for name, entry in CATALOGUE.items() if name in footprints() and isinstance(entry.origin, Hub)
    ]
    kept = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()[1:]] if names else []
    answers = {(answer[0], answer[1]): answer for answer in kept if answer[0] not in names}
    for name in names or every:
        answers |= {(answer[0], answer[1]): answer for answer in _answers(name)}
        lines = [versions(), *sorted(answers.values(), key=lambda answer: every.index(answer[0]))]
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        FILE.write_text(text, encoding="utf-8", newline="\n")
        print(f"{name}: {sum(answer[0] == name for answer in answers.values())} answers", flush=True)


@contextmanager
def _collected() -> Iterator[list[Answer]]:
    """Collect the answers that are made inside the context, of which none is taken from the package."""
    answers: list[Answer] = []
    predict, shipped = remembered.predict_or_refuse, remembered.shipped_answer

    def collect(model: Weightless, recipe: Recipe, request: Mapping[str, Any]) -> Any:
        content = predict(model, recipe, request)
        answers.append([model.name, recipe.text, content])
        return content

    remembered.predict_or_refuse, remembered.shipped_answer = collect, lambda *_: None
    try:
        yield answers
    finally:
        remembered.predict_or_refuse, remembered.shipped_answer = predict, shipped


def _answers(name: str) -> list[Answer]:
    """Return each prediction and refusal of a model."""
    with tempfile.TemporaryDirectory() as folder, _collected() as answers:
        os.environ["VIVACE_CACHE"] = folder  # so that nothing is known already
        for gigabytes in CARDS_GB if name in MODELS else ():
            card = CardMemory(gigabytes * 1e9, f"{gigabytes} GB")
            with Attempts() as attempts:
                fit_of(find_weightless(name), footprints()[name], card, attempts.trying)
        for chip in CHIPS:
            for size in chip.memory_gb:
                vivace.recommend(name, gpu=f"{chip.name} {size:g}GB", store=())
    return [answer for answer in answers if answer[1] != BASELINE]


if __name__ == "__main__":
    main(sys.argv[1:])
