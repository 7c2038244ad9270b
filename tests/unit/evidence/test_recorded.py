"""The figures that `vivace study --dry-run` takes from committed records."""

from vivace.evidence.committed import committed_tables
from vivace.evidence.recorded import recorded_figures
from vivace.recipes.resolve import resolve


def test_another_number_of_steps_is_estimated_from_the_nearest() -> None:
    figures = recorded_figures("flux-dev", "baseline", 1024, 1024, 28)
    assert figures is not None
    assert figures.device == "NVIDIA H200"
    assert 4 < figures.seconds(28) < 6
    assert figures.seconds(56) > 1.9 * figures.seconds(28)


def test_a_recipe_that_sets_the_number_of_steps_takes_as_long_at_any_other() -> None:
    figures = recorded_figures("sd15", "steps(15)", 512, 512, 30)
    assert figures is not None
    assert figures.seconds(50) == figures.seconds(30)


def test_what_no_record_has_is_unknown() -> None:
    assert recorded_figures("flux-dev", "baseline", 512, 512, 28) is None
    assert recorded_figures("flux-dev", "steps(9)", 1024, 1024, 28) is None


def test_every_recipe_that_ships_can_be_read() -> None:
    """Rows of removed techniques stay in the records."""
    texts = {row.recipe for table in committed_tables() for row in table.rows}
    assert len(texts) > 100
    for text in texts:
        recipe = resolve(text)
        assert resolve(recipe.text) == recipe
