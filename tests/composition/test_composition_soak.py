"""Every legal pair and all random recipes: `make soak`."""

import pytest

from tests.composition.run import Drawer, complaints, in_order, with_members


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_everything_composes_or_says_why_not() -> None:
    with Drawer() as drawer:
        rows = [drawer.draw(case) for case in with_members(in_order())]
    assert complaints(rows) == []
