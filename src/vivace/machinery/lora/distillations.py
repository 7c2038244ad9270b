"""The few-step LoRAs of the catalogue, as the technique `distilled` takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vivace.machinery.lora.by_diffusers import adds_the_same
from vivace.machinery.lora.merge import merge
from vivace.machinery.lora.read_lora import read_lora
from vivace.machinery.technique import Distillation
from vivace.machinery.technique.script import literal
from vivace.models.entry import Entry, FewSteps, StoredPart
from vivace.models.find import WEIGHTS
from vivace.models.remote import fetch_part


def distillations(entry: Entry | None) -> tuple[Distillation, ...]:
    """Return the few-step LoRAs that the catalogue lists for a model."""
    return tuple(_distillation(weights) for weights in (entry.few_steps if entry is not None else ()))


def _distillation(weights: FewSteps) -> Distillation:
    lora = weights.lora
    arguments: tuple[str, ...]

    def file() -> Path:
        return WEIGHTS / lora if isinstance(lora, str) else fetch_part(lora)

    def add(pipe: Any) -> int:
        return merge(pipe, file(), weights.scale)

    def same(pipe: Any) -> bool:
        return adds_the_same(pipe, file(), read_lora(pipe, file()).layers)

    if isinstance(lora, StoredPart):
        where = f"{lora.repo}/{lora.files[0]}@{lora.revision}"
        arguments = (
            literal(lora.repo),
            f"weight_name={literal(lora.files[0])}",
            f"revision={literal(lora.revision)}",
        )
    else:
        folder, _, name = lora.rpartition("/")
        where, arguments = lora, (f"WEIGHTS / {literal(folder)}", f"weight_name={literal(name)}")
    return Distillation(
        kind=weights.kind,
        steps=weights.steps,
        guidance_scale=weights.guidance_scale,
        scheduler=weights.scheduler.class_name,
        scheduler_config=weights.scheduler.overrides,
        scale=weights.scale,
        where=where,
        arguments=arguments,
        merge=add,
        adds_the_same=same,
    )
