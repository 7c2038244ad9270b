"""A model of techniques' effects on a figure of a recipe: Bayesian linear regression over its techniques.

A recipe's figure (the logarithm of its speed-up, of its memory, or its slack at the quality gate) is the sum of an
effect of each technique on each component that it is aimed at, of each of its knobs that differs from the default, and
of each pair of techniques that share a component. Pairs have little weight until measurements say otherwise, so one
trial of a technique says something about all its recipes. Before the first trial the effects come from records and from
the share of the time that a technique can touch (`priors`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vivace.machinery.technique import Technique
from vivace.recipes.recipe import Recipe

Array = NDArray[np.float64]
Feature = tuple[str, ...]
Weight = Callable[[Recipe, Technique, Sequence[str]], float]
"""Weight of a recipe's technique, on some of the components that it is aimed at."""


@dataclass(frozen=True)
class Prior:
    """A technique's effect before anything is measured: mean and standard deviation."""

    mean: float = 0.0
    sd: float = 0.2


@dataclass(frozen=True)
class Datum:
    """A figure of a recipe with its standard error."""

    recipe: Recipe
    value: float
    error: float


def merged(data: Sequence[Datum]) -> list[Datum]:
    """Return one figure a recipe: the mean by precision, with the smallest error, as sources share methods."""
    by_recipe: dict[Recipe, list[Datum]] = {}
    for datum in data:
        by_recipe.setdefault(datum.recipe, []).append(datum)
    data_of_recipes = []
    for recipe, of in by_recipe.items():
        weights = np.array([1 / datum.error**2 for datum in of])
        value = float(weights @ np.array([datum.value for datum in of]) / weights.sum())
        data_of_recipes.append(Datum(recipe, value, min(datum.error for datum in of)))
    return data_of_recipes


@dataclass
class Regression:
    """The posterior of one figure.

    Attributes:
        effects: of techniques, by text or by name, and by name@component; others have `usual`.
        knob_share: standard deviation of a knob's effect, in shares of its technique's.
        pair_sd: of the effect of a pair.
        own_sd: deviation of single recipes from the sum of their effects.
        kind_sd: common deviation of recipes of one kind.
        kind_of: returns the kind of a recipe, or None.
        shared_sd: error that all figures share, because all are relative to the baseline.
        weight_of: a technique's effect in a recipe, in shares of its effect on the baseline; see `reweigh`.
    """

    effects: Mapping[str, Prior] = field(default_factory=dict)
    usual: Prior = Prior()
    knob_share: float = 1.0
    pair_sd: float = 0.06
    own_sd: float = 0.01
    shared_sd: float = 0.0
    kind_sd: float = 0.0
    kind_of: Callable[[Recipe], Feature | None] = lambda recipe: None
    weight_of: Weight = lambda recipe, technique, targets: 1.0
    _index: dict[Feature, int] = field(default_factory=dict)
    _means: list[float] = field(default_factory=list)
    _variances: list[float] = field(default_factory=list)
    _rows: dict[Recipe, dict[int, float]] = field(default_factory=dict)
    _data: list[Datum] = field(default_factory=list)
    _inverse: Array | None = None

    def learn(self, data: Sequence[Datum]) -> None:
        self._data = list(data)
        self._inverse = None

    def reweigh(self, weight_of: Weight) -> None:
        """Replace the weights of effects, which depend on the time left by a recipe's other techniques."""
        self.weight_of = weight_of
        self._rows.clear()
        self._inverse = None

    @property
    def data(self) -> tuple[Datum, ...]:
        return tuple(self._data)

    def estimate(self, recipes: Sequence[Recipe]) -> tuple[Array, Array]:
        design = self._matrix([datum.recipe for datum in self._data])
        queries = self._matrix(recipes)
        means, variances = self._prior(queries.shape[1])
        design = _widened(design, queries.shape[1])
        mean = queries @ means
        variance = (queries**2) @ variances + self.own_sd**2
        if not self._data:
            return mean, np.sqrt(variance)
        cross = (queries * variances) @ design.T + self.own_sd**2 * self._same(recipes)
        weights = cross @ self._inverted(design, variances)
        mean = mean + weights @ (self._values() - design @ means)
        variance = variance - np.einsum("ij,ij->i", weights, cross)
        return mean, np.sqrt(np.maximum(variance, 1e-12))

    def draws(self, recipes: Sequence[Recipe], rng: np.random.Generator, number: int) -> Array:
        """Draw posterior samples of the recipes' figures (samples, recipes) by Matheron's rule."""
        design = self._matrix([datum.recipe for datum in self._data])
        queries = self._matrix(recipes)
        means, variances = self._prior(queries.shape[1])
        design = _widened(design, queries.shape[1])
        weights_drawn = means + np.sqrt(variances) * rng.standard_normal((number, len(means)))
        own = self.own_sd * rng.standard_normal((number, len(recipes)))
        drawn: Array = weights_drawn @ queries.T + own
        if not self._data:
            return drawn
        same = self._same(recipes)
        others = np.sqrt(1 - same.max(axis=0, initial=0.0)) * self.own_sd
        noise = np.hypot([datum.error for datum in self._data], others)
        missed = self._values() - weights_drawn @ design.T - own @ same
        missed -= noise * rng.standard_normal(missed.shape)
        cross = (queries * variances) @ design.T + self.own_sd**2 * same
        samples: Array = drawn + missed @ self._inverted(design, variances) @ cross.T
        return samples

    def _same(self, recipes: Sequence[Recipe]) -> Array:
        """Return 1 where a recipe is that of a datum (recipes, data)."""
        place = {recipe: k for k, recipe in enumerate(recipes)}
        same = np.zeros((len(recipes), len(self._data)))
        for k, datum in enumerate(self._data):
            if datum.recipe in place:
                same[place[datum.recipe], k] = 1.0
        return same

    def _inverted(self, design: Array, variances: Array) -> Array:
        """Return the inverse of the covariance of the data; it is kept until new data are learnt."""
        if self._inverse is None:
            covariance = (design * variances) @ design.T + np.diag(self._noise())
            self._inverse = np.asarray(np.linalg.inv(covariance), dtype=np.float64)
        return self._inverse

    def _values(self) -> Array:
        return np.array([datum.value for datum in self._data])

    def _noise(self) -> Array:
        return np.array([datum.error**2 + self.own_sd**2 for datum in self._data])

    def _prior(self, width: int) -> tuple[Array, Array]:
        return np.array(self._means[:width]), np.array(self._variances[:width])

    def _matrix(self, recipes: Sequence[Recipe]) -> Array:
        rows = [self._row(recipe) for recipe in recipes]
        matrix = np.zeros((len(rows), len(self._index)))
        for k, row in enumerate(rows):
            matrix[k, list(row)] = list(row.values())
        return matrix

    def _row(self, recipe: Recipe) -> dict[int, float]:
        if recipe not in self._rows:
            self._rows[recipe] = {
                self._number(feature, mean, sd): weight
                for feature, mean, sd, weight in self._features(recipe)
            }
        return self._rows[recipe]

    def _features(self, recipe: Recipe) -> list[tuple[Feature, float, float, float]]:
        """Return a recipe's features, with prior mean and standard deviation, and its weight."""
        features: list[tuple[Feature, float, float, float]] = []
        if self.shared_sd and not recipe.is_baseline:
            features.append((("any",), 0.0, self.shared_sd, 1.0))
        if self.kind_sd and (kind := self.kind_of(recipe)) is not None:
            features.append((("kind", *kind), 0.0, self.kind_sd, 1.0))
        for technique in recipe:
            effect = self.effects.get(technique.text) or self.effects.get(technique.name) or self.usual
            weight = self.weight_of(recipe, technique, technique.targets)
            features.append(
                (("option", technique.text), effect.mean, self.knob_share * effect.sd / 2, weight)
            )
            changed = [
                (name, repr(value))
                for name, value in technique.values.items()
                if value != technique.knobs()[name].default
            ]
            # A technique's effect on one component says nothing about its effect on another.
            for where in technique.targets or ("",):
                reach = self.effects.get(f"{technique.name}@{where}", effect)
                weight = self.weight_of(recipe, technique, (where,) if where else ())
                features.append((("technique", technique.name, where), 0.0, reach.sd, weight))
                for name, value in changed:
                    sd = self.knob_share * min(reach.sd, effect.sd)
                    features.append((("knob", technique.name, where, name, value), 0.0, sd, weight))
        for a, b in itertools.combinations(recipe.techniques, 2):
            if not a.targets or not b.targets or set(a.targets) & set(b.targets):
                features.append((("pair", *sorted((a.name, b.name))), 0.0, self.pair_sd, 1.0))
        return features

    def _number(self, feature: Feature, mean: float, sd: float) -> int:
        if feature not in self._index:
            self._index[feature] = len(self._index)
            self._means.append(mean)
            self._variances.append(sd**2)
        return self._index[feature]


def _widened(matrix: Array, width: int) -> Array:
    missing: Any = width - matrix.shape[1]
    return np.pad(matrix, ((0, 0), (0, missing))) if missing else matrix
