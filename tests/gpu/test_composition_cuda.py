"""The named recipes with inductor on a GPU, each in a fresh process, judged as on a CPU."""

import pytest

from tests.composition.recipes import named_recipes
from tests.composition.run import COMPILE_TIMEOUT_S, Drawer, complaints, with_members

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(3600)
def test_named_recipes_compose_with_inductor_on_a_gpu() -> None:
    with Drawer("cuda") as drawer:
        rows = [drawer.draw(case, COMPILE_TIMEOUT_S) for case in with_members(named_recipes())]
    assert complaints(rows) == []
    outcomes = [row["outcome"] for row in rows if row["kind"] == "named"]
    assert outcomes.count("measured") >= 9, "all, but for products in fp8 before Ada"
