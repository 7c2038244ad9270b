"""Images that are drawn besides those of the prompts: repetitions, other seeds, and other settings.

They answer two questions: how near the reference is to itself, and whether a source follows its requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from vivace.answers.formatting import count
from vivace.proofs.sides.drawing import SETTINGS, DrawJob, Settings
from vivace.proofs.sides.prepare_sides import Prepared
from vivace.proofs.sides.sides import ComfySide, EndpointSide, FunctionSide

_NUM_REPEATS = 3
_GRID = 64  # pixels; sizes that every published model draws are multiples of it
_SMALL_GRID = 16  # of small models
_LARGE_SEED = 2**31
"""Servers that keep seeds in 31 bits, or as 32-bit floats, draw the same image for several of them."""
_LONG = (20, 46)
"""Words of long prompts: some encoders read 32 tokens, CLIP 77."""


@dataclass(frozen=True)
class Probe:
    """Two images that should differ, or of which the second should have its own size.

    Attributes:
        name: the difference; see `server_checks`.
        base: usually the first image.
        is_of_reference: whether A draws both too, since not every model has guidance, more than one step, or reads
            every word.
    """

    name: str
    before: object
    after: object
    base: DrawJob
    job: DrawJob
    is_of_reference: bool = False


@dataclass(frozen=True)
class Hypothesis:
    """An image that A draws to find out what B did instead of following a request."""

    words: str
    job: DrawJob


def main_jobs(prepared: Prepared) -> list[DrawJob]:
    by_size = prepared.settings_by_size
    return [DrawJob(prompt, seed, settings) for prompt, seed in prepared.pairs for settings in by_size]


def own_jobs(prepared: Prepared) -> list[DrawJob]:
    """Return A's images for its own distances: repetitions, and another seed where all have the same."""
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


def repeat_jobs(prepared: Prepared) -> list[DrawJob]:
    """Return images that B draws again after all others, in another order."""
    jobs = main_jobs(prepared)
    chosen = dict.fromkeys((jobs[0], jobs[-1], jobs[len(jobs) // 2]))
    return [replace(job, repeat=1) for job in chosen]


def probes(prepared: Prepared) -> list[Probe]:
    """Return the probes of B's settings; none for folders, and for recipes, whose arguments are vivace's own."""
    side = prepared.b.side
    if not isinstance(side, EndpointSide | FunctionSide | ComfySide):
        return []
    names = set(SETTINGS)
    if isinstance(side, FunctionSide):
        from vivace.proofs.sides.function import Function

        names &= set(Function(side).settings)
    first = main_jobs(prepared)[0]
    seed = first.seed
    far, next_to_it = (replace(first, seed=seed + _LARGE_SEED + k) for k in (0, 1))
    listed = [
        Probe("seed", seed, seed + 1, first, replace(first, seed=seed + 1)),
        Probe("large seed", seed, far.seed, first, far),
        Probe("large seed", far.seed, next_to_it.seed, far, next_to_it),
        *_of_settings(prepared, first, names),
    ]
    return listed + _of_prompts(first)


def _of_settings(prepared: Prepared, first: DrawJob, names: set[str]) -> list[Probe]:
    settings = prepared.settings
    listed = []
    if "num_inference_steps" in names and (steps := settings.num_inference_steps) is not None:
        others = {steps - 1, steps // 2} - {0} if steps > 1 else {2}
        listed += [_probe(first, "num_inference_steps", steps, other) for other in sorted(others)]
    guidance = settings.guidance_scale
    if "guidance_scale" in names and guidance is not None and guidance > 1:
        for scale in (max(guidance - 0.5, (1 + guidance) / 2), guidance + 2):
            listed.append(_probe(first, "guidance_scale", guidance, scale))
    if {"width", "height"} <= names and (size := _other_size(settings)) is not None:
        before = f"{settings.width}x{settings.height}"
        job = replace(first, settings=replace(first.settings, width=size[0], height=size[1]))
        listed.append(Probe("size", before, f"{size[0]}x{size[1]}", first, job, is_of_reference=True))
    return listed


def _of_prompts(first: DrawJob) -> list[Probe]:
    """Return the probes of what is read of a prompt: its case, quotes, other scripts, and its end."""
    listed = []
    for name, prompt in (
        ("case of letters", first.prompt.swapcase()),
        ("quotes", f'"{first.prompt}"'),
        ("other scripts", f"{first.prompt} \N{CJK UNIFIED IDEOGRAPH-732B} кошка"),
    ):
        if prompt != first.prompt:
            job = replace(first, prompt=prompt)
            listed.append(Probe(name, first.prompt, prompt, first, job, is_of_reference=True))
    for length in _LONG:
        ends = [
            replace(first, prompt=_lengthened(first.prompt, length, colour)) for colour in ("red", "blue")
        ]
        listed.append(Probe("end of a long prompt", "red", "blue", ends[0], ends[1], is_of_reference=True))
    return listed


def _lengthened(prompt: str, length: int, last: str) -> str:
    """Return a prompt of so many words: its own, which the model knows, again and again, and a last one."""
    words = prompt.split()
    filling = (words[k % len(words)] for k in range(max(0, length - len(words) - 1)))
    return " ".join([*words, *filling, last])


def reference_jobs(prepared: Prepared) -> list[DrawJob]:
    """Return the probes' images that A also draws, and those that show what B may have done instead."""
    if not prepared.a.draws:
        return []
    listed = [job for probe in probes(prepared) if probe.is_of_reference for job in (probe.base, probe.job)]
    return listed + [hypothesis.job for hypothesis in hypotheses(prepared)]


def hypotheses(prepared: Prepared) -> list[Hypothesis]:
    """Return what B may have drawn instead of the first requested image."""
    if not prepared.a.draws or not probes(prepared):
        return []
    first = main_jobs(prepared)[0]
    listed = [Hypothesis(f"seed {first.seed + 1}", replace(first, seed=first.seed + 1))]
    steps, guidance = first.settings.num_inference_steps, first.settings.guidance_scale
    numbers = () if steps is None else {steps // 2, 2 * steps // 3, 3 * steps // 4, steps - 1, steps + 1}
    for number in sorted(set(numbers) - {0, steps}):
        listed.append(Hypothesis(count(number, "step"), _with(first, num_inference_steps=number)))
    if guidance is not None and guidance > 1:
        for scale in dict.fromkeys((1.0, guidance / 2, guidance - 1, guidance + 1)):
            listed.append(Hypothesis(f"guidance {scale:g}", _with(first, guidance_scale=scale)))
    if (lower := first.prompt.lower()) != first.prompt:
        listed.append(Hypothesis("the prompt in lower case", replace(first, prompt=lower)))
    return listed


def _probe(first: DrawJob, name: str, before: float, after: float) -> Probe:
    return Probe(name, before, after, first, _with(first, **{name: after}), is_of_reference=True)


def _with(job: DrawJob, **settings: Any) -> DrawJob:
    return replace(job, settings=replace(job.settings, **settings))


def _other_size(settings: Settings) -> tuple[int, int] | None:
    """Return a width and a height of another aspect ratio; None if the size is unknown."""
    if settings.width is None or settings.height is None:
        return None
    grid = _GRID if settings.height >= 4 * _GRID else _SMALL_GRID
    height = settings.height * 3 // 4 // grid * grid
    return (settings.width, height) if height >= grid else None
