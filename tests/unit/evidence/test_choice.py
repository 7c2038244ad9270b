"""The simplest of those that cannot be told from the best."""

from vivace.evidence.choice import simplest_of_best


def test_a_simpler_recipe_is_taken_only_where_it_is_as_good() -> None:
    gains = {"a+b+c": 2.0, "a+b": 1.99, "a": 1.5}

    def is_as_good(recipe: str, best: str) -> bool:
        return gains[best] - gains[recipe] < 0.05

    chosen, equals = simplest_of_best("a+b+c", list(gains), is_as_good, lambda recipe: (len(recipe),))
    assert chosen == "a+b"
    assert equals == ["a+b+c", "a+b"]
