"""Images that are drawn besides those of the prompts: repetitions, other seeds, and other settings.

They answer two questions: how near the reference is to itself, and whether a source follows its requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from vivace.answers.formatting import count
from vivace.proofs.sides.plan import ProofPlan
from vivace.proofs.sides.proof_store import Letter
from vivace.proofs.sides.side import DrawJob, ImageSettings

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


def main_jobs(plan: ProofPlan) -> list[DrawJob]:
    by_size = plan.settings_by_size
    return [DrawJob(prompt, seed, settings) for prompt, seed in plan.pairs for settings in by_size]


def own_jobs(plan: ProofPlan) -> list[DrawJob]:
    """Return A's images for its own distances: repetitions, and another seed where all have the same."""
    if not plan.a.draws:
        return []
    jobs = [replace(job, repeat=1) for job in main_jobs(plan)[:_NUM_REPEATS]]
    return jobs + other_seed_jobs(plan)


def other_seed_jobs(plan: ProofPlan) -> list[DrawJob]:
    """Return A's images of another seed, where each prompt has only one."""
    if len({seed for _, seed in plan.pairs}) > 1:
        return []
    return [replace(job, seed=job.seed + 1) for job in main_jobs(plan)[:_NUM_REPEATS]]


def timing_jobs(plan: ProofPlan) -> list[DrawJob]:
    """Return A's images once more, to be drawn after B for their seconds."""
    return [replace(job, repeat=2) for job in main_jobs(plan)] if plan.a.draws else []


def repeat_jobs(plan: ProofPlan) -> list[DrawJob]:
    """Return images that B draws again after all others, in another order."""
    jobs = main_jobs(plan)
    chosen = dict.fromkeys((jobs[0], jobs[-1], jobs[len(jobs) // 2]))
    return [replace(job, repeat=1) for job in chosen]


def probes(plan: ProofPlan) -> list[Probe]:
    """Return the probes of B's settings; none for folders, and for recipes, whose arguments are vivace's own."""
    names = plan.b.probed
    if names is None:
        return []
    first = main_jobs(plan)[0]
    seed = first.seed
    far, next_to_it = (replace(first, seed=seed + _LARGE_SEED + k) for k in (0, 1))
    listed = [
        Probe("seed", seed, seed + 1, first, replace(first, seed=seed + 1)),
        Probe("large seed", seed, far.seed, first, far),
        Probe("large seed", far.seed, next_to_it.seed, far, next_to_it),
        *_of_settings(plan, first, names),
    ]
    return listed + _of_prompts(first)


def _of_settings(plan: ProofPlan, first: DrawJob, names: tuple[str, ...]) -> list[Probe]:
    settings = plan.settings
    listed = []
    if "num_inference_steps" in names and (steps := settings.num_inference_steps) is not None:
        others = {steps - 1, steps // 2} - {0} if steps > 1 else {2}
        listed += [_probe(first, "num_inference_steps", steps, other) for other in sorted(others)]
    guidance = settings.guidance_scale
    if "guidance_scale" in names and guidance is not None and guidance > 1:
        for scale in (max(guidance - 0.5, (1 + guidance) / 2), guidance + 2):
            listed.append(_probe(first, "guidance_scale", guidance, scale))
    if {"width", "height"} <= set(names) and (size := _other_size(settings)) is not None:
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


def jobs_of(plan: ProofPlan, letter: Letter) -> list[DrawJob]:
    """Return every image that a side draws, those of the prompts first; A's too that probes and hypotheses need."""
    jobs, listed = main_jobs(plan), probes(plan)
    if letter == "b":
        jobs += [job for probe in listed for job in (probe.base, probe.job)]
        jobs += repeat_jobs(plan) if plan.b.draws else []
    elif plan.a.draws:
        jobs += own_jobs(plan)
        jobs += [job for probe in listed if probe.is_of_reference for job in (probe.base, probe.job)]
        jobs += [hypothesis.job for hypothesis in hypotheses(plan)]
    return list(dict.fromkeys(jobs))


def hypotheses(plan: ProofPlan) -> list[Hypothesis]:
    """Return what B may have drawn instead of the first requested image."""
    if not plan.a.draws or not probes(plan):
        return []
    first = main_jobs(plan)[0]
    listed = [Hypothesis(f"seed {first.seed + 1}", replace(first, seed=first.seed + 1))]
    steps, guidance = first.settings.num_inference_steps, first.settings.guidance_scale
    numbers = () if steps is None else {steps // 2, 2 * steps // 3, 3 * steps // 4, steps - 1, steps + 1}
    for number in sorted(set(numbers) - {0, steps}):
        listed.append(Hypothesis(count(number, "step"), _with(first, num_inference_steps=number)))
    if guidance is not None and guidance > 1:
        for scale in dict.fromkeys((1.0, guidance / 2, guidance - 1, guidance + 1)):
            listed.append(Hypothesis(f"guidance {scale:g}", _with(first, guidance_scale=scale)))
    return listed


def _probe(first: DrawJob, name: str, before: float, after: float) -> Probe:
    return Probe(name, before, after, first, _with(first, **{name: after}), is_of_reference=True)


def _with(job: DrawJob, **settings: Any) -> DrawJob:
    return replace(job, settings=replace(job.settings, **settings))


def _other_size(settings: ImageSettings) -> tuple[int, int] | None:
    """Return a width and a height of another aspect ratio; None if the size is unknown."""
    if settings.width is None or settings.height is None:
        return None
    grid = _GRID if settings.height >= 4 * _GRID else _SMALL_GRID
    height = settings.height * 3 // 4 // grid * grid
    return (settings.width, height) if height >= grid else None
