"""Settings of a server, and its facts about the loaded model."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, TypeAdapter

from vivace.foundation.spec.sizes import Size
from vivace.foundation.spec.workload import Task, steps_run
from vivace.serve.http.keys import Keys

MAX_IMAGES = 10
"""Images of one request."""
MAX_PROMPT = 8192
"""Characters of a prompt."""


_LORA = ".safetensors"


def lora_files(folder: Path) -> dict[str, Path]:
    """Return the LoRAs of a folder by name.

    Raises:
        OSError: it cannot be read.
    """
    return {
        name.removesuffix(_LORA): (folder / name).resolve()
        for name in sorted(os.listdir(folder))
        if name.endswith(_LORA) and name != _LORA
    }


@dataclass(frozen=True)
class ServeSettings:
    """How to serve.

    Attributes:
        model, recipe: as for `vivace.load`.
        why: the source of the recipe, for the page and the log.
        device: "auto", "cpu", "cuda", ...
        gpus: UUIDs or indices of the GPUs, one replica for each; empty for one replica on `device`.
        threads: CPU threads of a worker; None for as many as the model needs.
        sizes: to warm before the server is ready; empty for the model's own.
        task: of a server that does one thing only: "text", "image", "inpaint" or "edit"; None for all that one set of
            weights does.
        batches: numbers of images that may be drawn at once, beside one; empty for none.
        any_size: whether requests may have other sizes, whose first image takes longer.
        loras: names and files of LoRAs that requests may name: those of `lora_folder` at the start, if there is one.
        lora_folder: that is looked into again for each request with a LoRA.
        max_queue: maximum number of waiting images.
        max_wait_s: maximum predicted seconds of waiting.
        timeout_s: maximum seconds of a request, which may set less.
        idle_unload_s: idle seconds after which workers end and free the GPU; None for never.
        keys: of requests; None for none.
        served_name: of the model in requests and answers; empty for its own, which is accepted, too.
        public_url: the URL of this server as its clients see it; empty for that of each request.
        origins: of other sites whose pages may draw here.
        hosts: names in requests' Host and Origin that are answered without a key, beside those of the loopback.
        logs_prompts: whether prompts are logged.
    """

    model: str
    recipe: str
    why: str = ""
    device: str = "auto"
    gpus: tuple[str, ...] = ()
    threads: int | None = None
    sizes: tuple[Size, ...] = ()
    task: Task | None = None
    batches: tuple[int, ...] = ()
    any_size: bool = False
    loras: dict[str, Path] = field(default_factory=dict)
    lora_folder: Path | None = None
    max_queue: int = 64
    max_wait_s: float = 300.0
    timeout_s: float = 600.0
    idle_unload_s: float | None = None
    keys: Keys | None = None
    served_name: str = ""
    public_url: str = ""
    origins: tuple[str, ...] = ()
    hosts: frozenset[str] = frozenset()
    logs_prompts: bool = False

    @property
    def name(self) -> str:
        """The name of the model in requests and answers."""
        return self.served_name or self.model

    def current_loras(self) -> dict[str, Path]:
        """Return the names and files of the LoRAs that are there now. Their slots are as large as at the start."""
        if self.lora_folder is None or not self.loras:
            return self.loras
        try:
            return lora_files(self.lora_folder)
        except OSError:
            return {}

    def num_owners(self) -> int:
        """Return how many keys there are now, 1 without any."""
        return 1 if self.keys is None else len(self.keys.names)


SizeKey = Annotated[Size, BeforeValidator(lambda size: Size.of(size) if isinstance(size, str) else size)]
"""A size that JSON has as text."""


@dataclass(frozen=True)
class StepTimes:
    """Measured seconds of an image: of each step, and of everything else."""

    step_s: float
    rest_s: float

    def seconds(self, steps: int) -> float:
        return self.rest_s + steps * self.step_s


@dataclass(frozen=True)
class Batching:
    """The gain of drawing several images at once at a size, and its effect on them.

    Attributes:
        gains: images a second over one by one, by the number of images.
        allowed: numbers that gained enough; empty for none.
        difference: the largest difference of a pixel (of 255) from the same image drawn alone.
    """

    gains: dict[int, float]
    allowed: tuple[int, ...]
    difference: int


@dataclass(frozen=True)
class EditState:
    """The model's tasks with images.

    Attributes:
        tasks: the served ones of "image", "inpaint" and "edit".
        refused: why the others are not, by task.
        takes: arguments of the tasks' calls that requests may set.
        strength: of a call that names none; None if these calls have none.
        rounds_up: whether a part of a step counts as one.
        most_images: of a request.
    """

    tasks: frozenset[str] = frozenset()
    refused: dict[str, str] = field(default_factory=dict)
    takes: frozenset[str] = frozenset()
    strength: float | None = None
    rounds_up: bool = False
    most_images: int = 1


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
        draws_text: whether it draws from a prompt alone.
        edits: its tasks with images.
        batching: of the sizes where it was measured.
        unfit_loras: why files of the folder cannot be used, by file.
    """

    name: str
    recipe: str
    device: str
    steps: int
    guidance: float | None
    size: SizeKey
    multiple: int
    takes: frozenset[str]
    guided_above: float | None
    speeds: dict[SizeKey, StepTimes]
    has_partials: bool
    notes: tuple[str, ...] = ()
    draws_text: bool = True
    edits: EditState = EditState()
    batching: dict[SizeKey, Batching] = field(default_factory=dict)
    unfit_loras: dict[str, str] = field(default_factory=dict)

    def steps_run(self, steps: int, strength: float | None) -> int:
        """Return how many of a call's steps are executed."""
        return steps_run(steps, strength, rounds_up=self.edits.rounds_up)

    def batches_of(self, size: Size) -> tuple[int, ...]:
        """Return the numbers of images that are drawn at once at a size, beside one."""
        return self.batching[size].allowed if size in self.batching else ()

    def predicted_s(self, size: Size, steps: int) -> float:
        """Predict the seconds of an image, from the nearest measured size, by its pixels."""
        pixels = size.width * size.height
        nearest = min(self.speeds, key=lambda other: abs(other.width * other.height - pixels))
        return self.speeds[nearest].seconds(steps) * pixels / (nearest.width * nearest.height)


STATE = TypeAdapter(ModelState)
"""Reads what a worker sends."""
