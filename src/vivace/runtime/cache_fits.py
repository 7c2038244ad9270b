"""Calibrate step caches for a model: TeaCache's polynomial, MagCache's ratios, and the steps that a cache computes.

The steps are searched, for a number that is given: the mask whose images end nearest to the model's own. A mask is
judged by the final latents of a few images, beside those of the same seeds with every step computed. From evenly spaced
steps, annealing moves one computed step at a time; then hill climbing tries all moves to near places. Source: Lei et
al., Budget-Constrained Step-Level Diffusion Caching (BudCache), ICML 2026, arXiv 2606.13496.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vivace.errors import NoEffect, OutputError, Unsupported, UsageError
from vivace.foundation.untrusted.destinations import replace
from vivace.foundation.untrusted.files import read_object
from vivace.machinery.step_caching.block_residual import unknown_blocks, watching_residuals
from vivace.machinery.step_caching.engine import CacheState, Look
from vivace.machinery.step_caching.model_fits import (
    Fit,
    Ratios,
    fit_polynomial,
    keep,
    mean_of,
    ratios_of,
    watching_changes,
)
from vivace.machinery.step_caching.step_cache import StepCache, StepDecision
from vivace.machinery.technique import ModelFacts, Placement, Target, component_of
from vivace.measure.machine import this_machine
from vivace.models.find import LocatedModel
from vivace.recipes.resolve import resolve
from vivace.runtime.calls import Call, generators_of, prompts_of
from vivace.runtime.opening import open_session
from vivace.runtime.session import Session

if TYPE_CHECKING:
    import torch

OnImage = Callable[[int], None]
"""Called after each image with the number of images so far."""


def calibrate_teacache(
    located: LocatedModel,
    device: str,
    prompts: Sequence[str],
    *,
    num_images: int = 8,
    degree: int = 4,
    call: dict[str, Any] | None = None,
    on_image: OnImage = lambda num_images: None,
) -> tuple[Fit, Path]:
    """Fit TeaCache's polynomial to images of the model as published, and save it for this model.

    Args:
        prompts: used in turn, with seeds 0, 1, ...
        num_images: images to generate.
        degree: of the polynomial.
        call: size, steps and guidance that differ from the model's own.
        on_image: called with 0 when the model is read, and after each image with the number of images so far.

    Returns:
        The fit, and the file that it is saved in.
    """
    session = _open("teacache", located, device, prompts, call)
    transformer = component_of(session.pipe, "denoiser")
    on_image(0)
    with watching_changes(transformer) as (changes, start_image):
        for k in range(num_images):
            start_image()
            _generate(session, prompts, k)
            on_image(k + 1)
    try:
        fit = fit_polynomial(changes, degree, located.model.identity, int(session.pipe.num_timesteps))
    except ValueError as error:
        raise UsageError(f"teacache: {error}; give more --images or --num-inference-steps") from None
    return fit, _saved(lambda: keep(fit, transformer))


def calibrate_magcache(
    located: LocatedModel,
    device: str,
    prompts: Sequence[str],
    *,
    num_images: int = 8,
    call: dict[str, Any] | None = None,
    on_image: OnImage = lambda num_images: None,
) -> tuple[Ratios, Path]:
    """Measure MagCache's table of ratios and save it for this model; see `calibrate_teacache`."""
    session = _open("magcache", located, device, prompts, call)
    transformer = component_of(session.pipe, "denoiser")
    on_image(0)
    tables: list[tuple[float, ...]] = []
    for k in range(num_images):
        with watching_residuals(transformer) as residuals:
            _generate(session, prompts, k)
        try:
            tables.append(ratios_of(residuals))
        except ValueError as error:
            raise UsageError(f"magcache: {error}; give another --num-inference-steps") from None
        on_image(k + 1)
    ratios = mean_of(tables, located.model.identity)
    return ratios, _saved(lambda: keep(ratios, transformer))


def _open(
    technique: str, located: LocatedModel, device: str, prompts: Sequence[str], call: dict[str, Any] | None
) -> Session:
    if located.model.is_synthetic:
        raise Unsupported(
            f"{technique}: {located.model.name} has random weights, so there is nothing to measure; "
            f"give a fixed schedule, {technique}(hits=0.5)"
        )
    session = open_session(located, resolve("baseline"), device, call, prompts)
    if (reason := unknown_blocks(component_of(session.pipe, "denoiser"))) is not None:
        raise Unsupported(f"{technique}: {reason}")
    return session


def _generate(session: Session, prompts: Sequence[str], k: int) -> None:
    call = [(k, prompts[k % len(prompts)], k)]
    session(**prompts_of(call), **generators_of(call))


def _saved(save: Callable[[], Path]) -> Path:
    try:
        return save()
    except OutputError as error:
        raise OutputError(f"the result is lost: {error}; set VIVACE_CACHE to a writable folder") from None


_VERSION = 1
_WINDOW = 3
"""Places that a computed step is moved by in the hill climbing, and mostly in the annealing."""
_FAR, _HOT, _COLD = 0.3, 0.3, 0.01
"""Share of the annealing's moves to any place; the first and the last temperature, of a distance's logarithm."""


@dataclass
class Schedule:
    """What is searched, and what was found so far: the content of the file.

    Attributes:
        about: everything that a distance depends on. A file of something else is not continued.
        distances: by mask, one digit a step: the mean squared difference of the final latents over their mean square.
    """

    about: dict[str, Any]
    distances: dict[str, float] = field(default_factory=dict)
    mask: str = ""
    version: int = _VERSION

    @classmethod
    def of_file(cls, path: Path, about: dict[str, Any]) -> Schedule:
        """Return what a file holds of the same search; a new one where there is no file."""
        if not path.exists():
            return cls(about)
        content = read_object(path)
        other = content.get("about")
        if content.get("version") != _VERSION or not isinstance(other, dict):
            raise UsageError(f"{path} is no file of a schedule's search; give --output another name")
        if different := [name for name in about if other.get(name) != about[name]]:
            raise UsageError(
                f"{path} was searched with another {', '.join(different)}; give --output another name, or remove it"
            )
        return cls(about, content["distances"], content["mask"])

    def add(self, mask: str, distance: float, path: Path) -> None:
        self.distances[mask] = distance
        self.mask = min(self.distances, key=lambda each: self.distances[each])
        replace(path, json.dumps(asdict(self), indent=1).encode())


@dataclass(frozen=True)
class SearchProgress:
    """Where a search is: masks tried of at most so many, and the seconds that the rest takes at most."""

    num_tried: int
    most: int
    seconds_left: float


def evenly_spread(budget: int, num_steps: int) -> str:
    """Return the mask that computes the first step and others at equal distances."""
    computed = {k * num_steps // budget for k in range(budget)}
    return "".join("1" if step in computed else "0" for step in range(num_steps))


def search(start: str, distance_of: Callable[[str], float], most: int, seed: int = 0) -> str:
    """Return the mask of least distance with as many computed steps as `start`.

    Args:
        distance_of: is asked for each mask once. Its answers alone decide the path, so a search that is repeated with
            remembered ones goes on where it ended.
        most: masks that are asked for.
    """
    chance = random.Random(seed)
    known = {start: distance_of(start)}

    def ask(mask: str) -> float | None:
        if mask not in known:
            if len(known) >= most:
                return None
            known[mask] = distance_of(mask)
        return known[mask]

    here, rounds = start, max(1, most // 2)
    for k in range(rounds):
        moved = _random_move(here, chance)
        distance = None if moved is None else ask(moved)
        if moved is None or distance is None:
            break
        temperature = _HOT * (_COLD / _HOT) ** (k / rounds)
        worse = math.log(max(distance, 1e-12) / max(known[here], 1e-12))
        if worse < 0 or chance.random() < math.exp(-worse / temperature):
            here = moved
    here = min(known, key=lambda each: known[each])
    while True:
        neighbours = [(mask, ask(mask)) for mask in _near_moves(here)]
        better = [(distance, mask) for mask, distance in neighbours if distance is not None]
        if not better or min(better)[0] >= known[here]:
            return min(known, key=lambda each: known[each])
        here = min(better)[1]


def _moved(mask: str, source: int, to: int) -> str:
    digits = list(mask)
    digits[source], digits[to] = "0", "1"
    return "".join(digits)


def _random_move(mask: str, chance: random.Random) -> str | None:
    computed = [step for step, digit in enumerate(mask) if digit == "1" and step]
    free = [step for step, digit in enumerate(mask) if digit == "0"]
    if not computed or not free:
        return None
    source = chance.choice(computed)
    near = [step for step in free if abs(step - source) <= _WINDOW]
    return _moved(mask, source, chance.choice(near if near and chance.random() > _FAR else free))


def _near_moves(mask: str) -> Iterator[str]:
    for source in range(1, len(mask)):
        for to in range(max(1, source - _WINDOW), min(len(mask), source + _WINDOW + 1)):
            if mask[source] == "1" and mask[to] == "0":
                yield _moved(mask, source, to)


def calibrate_schedule(
    located: LocatedModel,
    device: str,
    prompts: Sequence[str],
    *,
    cache: str,
    budget: int,
    num_steps: int,
    path: Path,
    num_images: int = 20,
    batch: int = 1,
    most: int = 200,
    call: dict[str, Any] | None = None,
    on_progress: Callable[[SearchProgress], None] = lambda progress: None,
) -> Schedule:
    """Search a mask, and keep each one that was tried in a file, from which the same call goes on.

    Args:
        prompts: used in turn, with seeds 0, 1, ...
        cache: a step cache without a schedule, such as "taylorseer(order=0)".
        budget, num_steps: computed steps of all.
        num_images: that each mask is judged by, `batch` of them drawn in one call.
        most: masks that are tried at most.
        on_progress: called before the first mask and after each.

    Raises:
        UsageError: the cache is none, or decides by itself; the file is of another search.
        Unsupported: the cache does not work on the model, or the model has random weights.
    """
    import torch

    techniques = resolve(cache).techniques
    if len(techniques) != 1 or not isinstance(techniques[0], StepCache) or techniques[0].is_fixed:
        raise UsageError(
            f"{cache!r} is not one step cache without hits and mask; give such as taylorseer(order=0)"
        )
    technique = techniques[0]
    if not 1 <= budget < num_steps:
        raise UsageError(
            f"a budget of {budget} of {num_steps} steps skips nothing; give such as {num_steps // 2}/{num_steps}"
        )
    if located.model.is_synthetic:
        raise Unsupported(f"{located.model.name} has random weights, so no schedule of it says anything")
    about: dict[str, Any] = {
        "model": located.model.identity,
        "cache": technique.text,
        "budget": f"{budget}/{num_steps}",
        "images": num_images,
        "prompts": list(prompts[:num_images]),
        "call": dict(call or {}),
    }
    schedule = Schedule.of_file(path, about)
    arguments = {**(call or {}), "num_inference_steps": num_steps}
    session = open_session(located, resolve("baseline"), device, arguments, prompts)
    mask = "1" * num_steps

    def is_hit(state: CacheState, _: Look) -> bool:
        return mask[state.step] == "0"

    facts = ModelFacts(located.model.identity, defaults=session.defaults)
    target = Target(Placement(this_machine(device)), session.pipe, facts)
    effect = None
    images = [(k, prompts[k % len(prompts)], k) for k in range(num_images)]
    calls = [images[k : k + batch] for k in range(0, num_images, batch)]

    def draw(call: Call) -> torch.Tensor:
        with effect.around() if effect is not None and effect.around is not None else torch.no_grad():
            drawn = session(**prompts_of(call), **generators_of(call), output_type="latent")
        return cast("torch.Tensor", drawn.images).float().cpu()

    draw(calls[0])  # what the first call alone does
    started = time.monotonic()
    wanted = [draw(each) for each in calls]
    if int(session.pipe.num_timesteps) != num_steps:
        raise Unsupported(
            f"{type(session.pipe.scheduler).__name__} calls the denoiser another number of times"
        )
    seconds = (time.monotonic() - started) * budget / num_steps
    if (reason := technique.unsupported_denoiser(target)) is not None:
        raise Unsupported(f"{technique.name}: {reason}")
    try:
        effect = technique.attach_with(target, StepDecision(is_hit))
    except NoEffect as error:
        raise Unsupported(f"{technique.name}: {error}") from None
    if effect.contexts:
        raise Unsupported(
            f"{technique.name} cannot tell the calls of {type(session.pipe).__name__} apart; take taylorseer"
        )

    def distance_of(tried: str) -> float:
        nonlocal mask, seconds
        if tried not in schedule.distances:
            mask, begun = tried, time.monotonic()
            ratios = [
                float((drawn - right).square().mean() / right.square().mean())
                for each, latents in zip(calls, wanted, strict=True)
                for drawn, right in zip(draw(each), latents, strict=True)
            ]
            schedule.add(tried, sum(ratios) / len(ratios), path)
            seconds = time.monotonic() - begun
        say()
        return schedule.distances[tried]

    def say() -> None:
        tried = len(schedule.distances)
        on_progress(SearchProgress(tried, most, max(0, most - tried) * seconds))

    say()
    search(evenly_spread(budget, num_steps), distance_of, most)
    return schedule
