"""Schema of an architecture: a pipeline's components as classes with their arguments."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from vivace.foundation.spec.base import Spec

Library = Literal["diffusers", "transformers"]


class Component(Spec):
    """A class of diffusers or transformers and its constructor arguments (lists, since JSON has no tuples)."""

    library: Library
    class_name: str
    config: dict[str, Any]


class Architecture(Spec):
    """A whole pipeline without its weights.

    `components` have the names of the pipeline's constructor arguments. `text_lengths` is the number of tokens per
    prompt for each text encoder. `arguments` are further arguments of the pipeline's constructor, besides components,
    tokenizers and scheduler. `height` and `width` are the native size in pixels. `tiny_vae` is None where diffusers has
    none for the latents.
    """

    name: str
    pipeline: str
    components: dict[str, Component]
    text_lengths: dict[str, int]
    scheduler: Component
    tiny_vae: Component | None
    height: int
    width: int
    arguments: dict[str, Any] = Field(default_factory=dict)

    @property
    def denoiser(self) -> Literal["unet", "transformer"]:
        """Name of the component that is called at every step."""
        return "unet" if "unet" in self.components else "transformer"

    def changed(self, **configs: dict[str, Any]) -> Architecture:
        """Return a copy with other arguments for some components: `changed(unet={"layers_per_block": 1})`."""
        unknown = set(configs) - set(self.components)
        if unknown:
            raise ValueError(
                f"{self.name} has no {', '.join(sorted(unknown))}; it has {', '.join(self.components)}"
            )
        components = self.components | {
            name: replaced(self.components[name], **config) for name, config in configs.items()
        }
        return self.model_copy(update={"components": components})


def replaced(component: Component, **config: Any) -> Component:
    return component.model_copy(update={"config": component.config | config})


def of_diffusers(class_name: str, **config: Any) -> Component:
    return Component(library="diffusers", class_name=class_name, config=config)


def of_transformers(class_name: str, **config: Any) -> Component:
    return Component(library="transformers", class_name=class_name, config=config)
