"""The figures that `vivace study --dry-run` takes from committed records."""

from benchmarks.known_figures import TARGET, content
from vivace.studies.recorded_figures import recorded_figures


def test_the_packaged_file_is_current() -> None:
    assert TARGET.read_text() == content()


def test_another_number_of_steps_is_estimated_from_the_nearest() -> None:
    found = recorded_figures("flux-dev", "baseline", 1024, 1024, 28)
    assert found is not None
    assert found.device == "NVIDIA H200"
    assert 4 < found.seconds(28) < 6
    assert found.seconds(56) > 1.9 * found.seconds(28)


def test_a_recipe_that_sets_the_number_of_steps_takes_as_long_at_any_other() -> None:
    found = recorded_figures("sd15", "steps(15)", 512, 512, 30)
    assert found is not None
    assert found.seconds(50) == found.seconds(30)


def test_what_no_record_has_is_unknown() -> None:
    assert recorded_figures("flux-dev", "baseline", 512, 512, 28) is None
    assert recorded_figures("flux-dev", "steps(9)", 1024, 1024, 28) is None
