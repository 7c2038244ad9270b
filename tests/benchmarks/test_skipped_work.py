"""What skipping would save for nothing: the operations that are counted."""

import pytest

from benchmarks.skipped_work import (
    FAMILIES,
    caches,
    count_operations,
    read_operations,
)

pytestmark = pytest.mark.long  # a script that measures, beside the package and not in it


def test_the_counts_are_committed_for_every_recipe() -> None:
    counted = read_operations()
    for name in FAMILIES:
        assert set(caches(name)) <= set(counted[name])
        for operations in counted[name].values():
            assert 0 <= operations.hit < operations.step


@pytest.mark.parametrize(
    ("name", "technique"),
    [("sd15", "deepcache"), ("sd15", "cfg_cutoff"), ("flux-schnell", "first_block_cache")],
)
@pytest.mark.soak
def test_the_committed_counts_are_what_is_counted(name: str, technique: str) -> None:
    knobs = "0.5" if technique == "cfg_cutoff" else "hits=0.5"
    assert count_operations(name, f"{technique}({knobs})") == read_operations()[name][technique]
