"""The few-step LoRAs of the catalogue, as the technique `distilled` takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vivace.contract import Distillation
from vivace.contract.script import literal
from vivace.lora.by_diffusers import adds_the_same
from vivace.lora.merge import merge
from vivace.lora.read import read_lora
from vivace.models.entry import Entry, FewSteps, Part
from vivace.models.find import WEIGHTS
from vivace.models.remote import fetch_part


def distillations(entry: Entry | None) -> tuple[Distillation, ...]:
    """Return the few-step LoRAs that the catalogue lists for a model."""
    return tuple(_distillation(one) for one in (entry.few_steps if entry is not None else ()))


def _distillation(known: FewSteps) -> Distillation:
    lora = known.lora
    arguments: tuple[str, ...]

    def file() -> Path:
        return WEIGHTS / lora if isinstance(lora, str) else fetch_part(lora)

    def add(pipe: Any) -> int:
        return merge(pipe, file(), known.scale)

    def same(pipe: Any) -> bool:
        return adds_the_same(pipe, file(), read_lora(pipe, file()).layers)

    if isinstance(lora, Part):
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
        kind=known.kind,
        steps=known.steps,
        guidance_scale=known.guidance_scale,
        scheduler=known.scheduler.class_name,
        scheduler_config=known.scheduler.overrides,
        scale=known.scale,
        where=where,
        arguments=arguments,
        merge=add,
        adds_the_same=same,
    )
