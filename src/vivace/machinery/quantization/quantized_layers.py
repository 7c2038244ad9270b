"""The quantised layers and the others, for a record, and a check that they are still so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vivace.machinery.quantization.layers import LayerChoice, kinds_of, summarise, summarise_reasons
from vivace.machinery.technique import Component

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class QuantizedLayers:
    """The layers of each component, and the kinds of the chosen ones; see `kinds_of`."""

    modules: Mapping[Component, torch.nn.Module]
    choices: Mapping[Component, LayerChoice]
    kinds: Mapping[Component, Mapping[str, tuple[str, str]]]

    @classmethod
    def of(
        cls, modules: Mapping[Component, torch.nn.Module], choices: Mapping[Component, LayerChoice]
    ) -> QuantizedLayers:
        """Record the present kinds of the chosen layers."""
        kinds = {c: kinds_of(modules[c], choice) for c, choice in choices.items() if choice.chosen}
        return cls(modules, choices, kinds)

    def listed(self) -> dict[str, list[str]]:
        """Return the layers that are quantised, and those left alone with the reasons."""
        lists: dict[str, list[str]] = {}
        for component, kinds in self.kinds.items():
            lost = set(self._lost(component))
            lists[f"{component}.quantized"] = summarise(name for name in kinds if name not in lost)
            if self.choices[component].skipped:
                lists[f"{component}.left_alone"] = summarise_reasons(self.choices[component].skipped)
        return lists

    def no_longer(self) -> str | None:
        """Return which layers are not quantised any more, in words, or None."""
        for component in self.kinds:
            if lost := self._lost(component):
                return f"{len(lost)} of {component}'s layers are no longer quantised: {', '.join(summarise(lost))}"
        return None

    def _lost(self, component: Component) -> list[str]:
        now = kinds_of(self.modules[component], self.choices[component])
        return [name for name, kind in self.kinds[component].items() if now[name] != kind]
