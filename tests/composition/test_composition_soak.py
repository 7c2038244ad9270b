"""Every legal pair, all random recipes, and the named ones with the real compiler: `make soak`."""

import pytest

from tests.composition.recipes import named_recipes
from tests.composition.run import COMPILE_TIMEOUT_S, Drawer, complaints, in_order, with_members


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_everything_composes_or_gives_a_reason() -> None:
    with Drawer() as drawer:
        rows = [drawer.draw(case) for case in with_members(in_order())]
    assert complaints(rows) == []


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_named_recipes_compose_with_inductor_on_a_cpu() -> None:
    with Drawer() as drawer:
        rows = [drawer.draw(case, COMPILE_TIMEOUT_S) for case in with_members(named_recipes())]
    assert complaints(rows) == []
