"""The time in which a GPU is busy."""

import pytest

from vivace.measure.profiling.trace import covered


@pytest.mark.parametrize(
    ("ranges", "length"),
    [
        ([], 0),
        ([(0, 2), (1, 4)], 4),
        ([(0, 9), (1, 2), (3, 4)], 9),
        ([(5, 6), (0, 1), (0, 1)], 2),
    ],
)
def test_work_that_overlaps_counts_once(ranges: list[tuple[float, float]], length: float) -> None:
    assert covered(ranges) == length
