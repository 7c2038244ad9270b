"""What a server is started with, and what it knows of its model once that is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from vivace.spec.sizes import Size

MAX_IMAGES = 10
"""Images of one request."""
MAX_PROMPT = 8192
"""Characters of a prompt."""


@dataclass(frozen=True)
class ServeSettings:
    """How to serve.

    Attributes:
        model, recipe: as for `vivace.load`.
        why: where the recipe comes from, for the page and the log.
        device: "auto", "cpu", "cuda", ...
        gpus: UUIDs or indices of the GPUs, one replica for each; empty for one replica on `device`.
        threads: CPU threads of a worker; None for as many as the model needs.
        sizes: that are warmed before the server is ready; empty for the model's own.
        any_size: whether requests may have other sizes, whose first image takes longer.
        loras: names and files of LoRAs that requests may name.
        max_queue: waiting images at most.
        max_wait_s: predicted seconds of waiting at most.
        timeout_s: of a request at most, and unless it says less.
        idle_unload_s: idle seconds after which workers end and free the GPU; None for never.
        api_key: that requests must bear; None for none.
        logs_prompts: whether prompts are logged.
    """

    model: str
    recipe: str
    why: str = ""
    device: str = "auto"
    gpus: tuple[str, ...] = ()
    threads: int | None = None
    sizes: tuple[Size, ...] = ()
    any_size: bool = False
    loras: dict[str, Path] = field(default_factory=dict)
    max_queue: int = 64
    max_wait_s: float = 300.0
    timeout_s: float = 600.0
    idle_unload_s: float | None = None
    api_key: str | None = None
    logs_prompts: bool = False


@dataclass(frozen=True)
class Speed:
    """Measured seconds of an image: of each step, and of everything else."""

    step_s: float
    rest_s: float

    def seconds(self, steps: int) -> float:
        return self.rest_s + steps * self.step_s


@dataclass(frozen=True)
class ModelState:
    """What the workers report of the loaded model.

    Attributes:
        name: of the model; `recipe` as it was resolved.
        steps, guidance: of a call that names none.
        size: of an image that names none.
        multiple: width and height are multiples of this.
        takes: arguments of the pipeline's call that requests may set.
        guided_above: the guidance scale above which a negative prompt has an effect; None if the model has no guidance.
        speeds: of the sizes that were warmed.
        has_partials: whether partial images can be shown.
    """

    name: str
    recipe: str
    device: str
    steps: int
    guidance: float | None
    size: Size
    multiple: int
    takes: frozenset[str]
    guided_above: float | None
    speeds: dict[Size, Speed]
    has_partials: bool
    notes: tuple[str, ...] = ()

    def predicted_s(self, size: Size, steps: int) -> float:
        """Return about how long an image takes, from the nearest size that was measured, by its pixels."""
        pixels = size.width * size.height
        nearest = min(self.speeds, key=lambda other: abs(other.width * other.height - pixels))
        return self.speeds[nearest].seconds(steps) * pixels / (nearest.width * nearest.height)
