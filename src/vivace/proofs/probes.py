"""Images that are drawn beside those of the prompts: the same again, another seed, and other settings.

They answer two questions: how near the reference is to itself, and whether a source does what it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from vivace.proofs.drawing import DrawJob, Settings
from vivace.proofs.sides import ComfySide, EndpointSide, FunctionSide
from vivace.proofs.sources import Prepared

_NUM_REPEATS = 3
_GRID = 64  # pixels; sizes that every published model draws are multiples of it
_SMALL_GRID = 16  # of small models


@dataclass(frozen=True)
class Probe:
    """An image whose settings differ in one value from the first image's."""

    name: str
    before: object
    after: object
    job: DrawJob


def main_jobs(prepared: Prepared) -> list[DrawJob]:
    by_size = prepared.settings_by_size
    return [DrawJob(prompt, seed, settings) for prompt, seed in prepared.pairs for settings in by_size]


def own_jobs(prepared: Prepared) -> list[DrawJob]:
    """Return A's images for its own distances: repetitions; another seed, where all have the same one."""
    if not prepared.a.draws:
        return []
    jobs = [replace(job, repeat=1) for job in main_jobs(prepared)[:_NUM_REPEATS]]
    return jobs + other_seed_jobs(prepared)


def other_seed_jobs(prepared: Prepared) -> list[DrawJob]:
    """Return A's images of another seed, where each prompt has only one."""
    if len({seed for _, seed in prepared.pairs}) > 1:
        return []
    return [replace(job, seed=job.seed + 1) for job in main_jobs(prepared)[:_NUM_REPEATS]]


def timing_jobs(prepared: Prepared) -> list[DrawJob]:
    """Return A's images once more, to be drawn after B for their seconds."""
    return [replace(job, repeat=2) for job in main_jobs(prepared)] if prepared.a.draws else []


def repeat_job(prepared: Prepared) -> DrawJob:
    return replace(main_jobs(prepared)[0], repeat=1)


def probes(prepared: Prepared) -> list[Probe]:
    """Return the probes of B's settings; none for folders, and for recipes, whose arguments are vivace's own."""
    if not isinstance(prepared.b.side, EndpointSide | FunctionSide | ComfySide):
        return []
    first = main_jobs(prepared)[0]
    settings = prepared.settings
    listed = [Probe("seed", first.seed, first.seed + 1, replace(first, seed=first.seed + 1))]
    if isinstance(prepared.b.side, FunctionSide):
        return listed
    if (steps := settings.num_inference_steps) is not None:
        listed.append(_probe(first, "num_inference_steps", steps, steps // 2 if steps > 1 else 2))
    if (guidance := settings.guidance_scale) is not None and guidance > 1:
        listed.append(_probe(first, "guidance_scale", guidance, 1 + (guidance - 1) / 2))
    if (size := _other_size(settings)) is not None:
        before = f"{settings.width}x{settings.height}"
        job = replace(first, settings=replace(settings, width=size[0], height=size[1]))
        listed.append(Probe("size", before, f"{size[0]}x{size[1]}", job))
    return listed


def reference_probes(prepared: Prepared) -> list[Probe]:
    """Return the probes that A draws too, since not every model has guidance, or more than one step."""
    if not prepared.a.draws:
        return []
    return [probe for probe in probes(prepared) if probe.name in ("num_inference_steps", "guidance_scale")]


def _probe(first: DrawJob, name: str, before: float, after: float) -> Probe:
    changes: dict[str, Any] = {name: after}
    return Probe(name, before, after, replace(first, settings=replace(first.settings, **changes)))


def _other_size(settings: Settings) -> tuple[int, int] | None:
    """Return a width and a height of another aspect ratio; None if the size is unknown."""
    if settings.width is None or settings.height is None:
        return None
    grid = _GRID if settings.height >= 4 * _GRID else _SMALL_GRID
    height = settings.height * 3 // 4 // grid * grid
    return (settings.width, height) if height >= grid else None
