"""skip=auto against random layers: random ones cost no more, and the committed record says what the page says."""

from benchmarks import skip_auto
from benchmarks.skip_auto import read_cases, root_mean_square


def test_random_layers_cost_no_more_than_those_that_auto_leaves() -> None:
    layers = {f"layer {k}": (0.01 * k, 0.02 * (7 - k)) for k in range(8)}
    drawn = {tuple(skip_auto._at_random(layers, (0.1, 0.12), seed)) for seed in range(10)}
    assert len(drawn) > 3, "seeds draw different layers"
    for names in drawn:
        assert names
        for of, budget in enumerate((0.1, 0.12)):
            assert sum(layers[name][of] for name in names) <= budget + 1e-9


def test_the_record_shows_what_auto_gains() -> None:
    cases = read_cases(skip_auto.RECORD)
    assert {model for model, _ in cases} == {"tiny-sd", "tiny-flux"}
    for case in cases.values():
        errors = {
            way: root_mean_square(outcome["prediction_errors"]) for way, outcome in case["ways"].items()
        }
        assert min(errors, key=lambda way: errors[way]) == "auto"
        assert case["share_of_work"] <= 0.05
        assert case["share_of_weights"] <= 0.05
