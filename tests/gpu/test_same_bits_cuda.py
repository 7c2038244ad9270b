"""Equal calls give equal bits, also where several processes take turns on the GPU.

`python -m pytest -m "gpu and soak" tests/gpu/test_same_bits_cuda.py --timeout 3600`
"""

import pytest

from benchmarks.same_bits import CASES, draw_side_by_side

pytestmark = [pytest.mark.gpu, pytest.mark.soak]


def test_a_thousand_equal_calls_of_each_recipe_give_equal_images() -> None:
    rows = list(draw_side_by_side(CASES, calls=1000, steps=4, limit_s=3000))
    assert [row["calls"] for row in rows] == [1000] * len(CASES)
    assert {row["recipe"]: row["odd_calls"] for row in rows} == {recipe: 0 for _, recipe in CASES}
