"""Scripts of random recipes: `make soak`."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.composition.recipes import random_recipes
from tests.exported import check, run, with_vivace, write
from vivace.errors import NoEffect, Unsupported


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_random_recipes(tmp_path: Path) -> None:
    wrong, num_drawn = [], 0
    for case in random_recipes():
        torch._dynamo.reset()  # compiled too often, a forward would silently run uncompiled
        try:
            drawn = with_vivace(case.model, case.recipe)
        except (NoEffect, Unsupported) as error:
            with pytest.raises(type(error)):
                write(case.model, case.recipe)
            continue
        num_drawn += 1
        if not np.array_equal(run(write(case.model, case.recipe).text, tmp_path), drawn):
            wrong.append(f"{case.model} {case.recipe}")
    check(tmp_path)
    assert wrong == []
    assert num_drawn > 200
