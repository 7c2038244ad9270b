"""The plan of a proof: both sides, checked, with the prompts, seeds and settings that they share, and every image."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from vivace.answers.formatting import count
from vivace.errors import UsageError
from vivace.foundation.spec.settings import (
    CallSettings,
    DeviceName,
    Key,
    Option,
    Prompts,
    Seed,
    Threads,
    Timeout,
    read_key,
)
from vivace.foundation.spec.sizes import Size, each_once
from vivace.foundation.untrusted.files import reason
from vivace.models.prompts import FURTHER_PROMPTS, NUM_SEEDS, PROMPT_SETS
from vivace.proofs.sides.comfyui_side import ComfySide
from vivace.proofs.sides.endpoint_side import EndpointSide
from vivace.proofs.sides.folder_side import FolderSide
from vivace.proofs.sides.proof_store import Letter, file_digest
from vivace.proofs.sides.recipe_side import RecipeSide
from vivace.proofs.sides.side import (
    SETTINGS,
    DrawingFailure,
    DrawJob,
    DrawnImage,
    ImageSettings,
    Side,
    as_png,
    suffix_of,
)

_PYTHON = "python:"
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(frozen=True)
class FunctionSide(Side):
    """python:MODULE:FUNCTION.

    It is called with the keywords `prompt` and `seed`, and with those of height, width, num_inference_steps and
    guidance_scale that it takes and that have a value. It returns a PIL image, an array (H, W, 3) of uint8 or of floats
    in 0 .. 1, the bytes of an image file, or diffusers' output.
    """

    text: str
    module: str
    function: str

    @staticmethod
    def is_written(text: str) -> bool:
        return text.lower().startswith(_PYTHON)

    @classmethod
    def parse(cls, text: str) -> FunctionSide:
        target = text[len(_PYTHON) :]
        if not _FUNCTION.fullmatch(target):
            raise UsageError(f"{text[:200]}: give python:MODULE:FUNCTION, e.g. python:my_model:draw")
        module, _, function = target.partition(":")
        return cls(text, module, function)

    @property
    def identity(self) -> str:
        spec = importlib.util.find_spec(self.module)
        return self.text + (file_digest(Path(spec.origin)) if spec is not None and spec.origin else "")

    @cached_property
    def call(self) -> Callable[..., Any]:
        if "" not in sys.path and "." not in sys.path:
            sys.path.insert(0, "")  # as `python` itself does
        try:
            target: Any = importlib.import_module(self.module)
            for name in self.function.split("."):
                target = getattr(target, name)
        except Exception as error:  # the user's own code
            raise UsageError(
                f"{self.text} cannot be imported: {reason(error)}; run vivace in the folder of the module"
            ) from error
        if not callable(target):
            raise UsageError(f"{self.text} is not a function")
        function: Callable[..., Any] = target
        return function

    @cached_property
    def probed(self) -> tuple[str, ...]:  # type: ignore[override]
        try:
            parameters = inspect.signature(self.call).parameters
        except (TypeError, ValueError):
            raise UsageError(f"{self.text}: it has no signature; give a function of Python") from None
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        missing = [name for name in ("prompt", "seed") if name not in parameters and not takes_any]
        if missing:
            raise UsageError(
                f"{self.text}: it takes no {' and no '.join(missing)}; define def {self.function}(prompt, seed)"
            )
        return tuple(name for name in SETTINGS if takes_any or name in parameters)

    def check(self, plan: ProofPlan) -> None:
        assert self.probed is not None

    def draw(self, job: DrawJob) -> DrawnImage:
        call = {name: value for name, value in job.settings.call.items() if name in self.probed}
        began = time.monotonic()
        try:
            output = self.call(prompt=job.prompt, seed=job.seed, **call)
        except Exception as error:  # the user's own code
            raise DrawingFailure(f"{type(error).__name__}: {reason(error)}") from error
        seconds = time.monotonic() - began
        if isinstance(output, bytes):
            return DrawnImage(output, suffix_of(output), seconds, settings=call)
        image, faults = _picture(output)
        return DrawnImage(as_png(image), ".png", seconds, faults, settings=call)


def _picture(output: Any) -> tuple[Any, tuple[str, ...]]:
    """Return a function's result as a PIL image, and its faults that a file does not show."""
    import numpy as np
    from PIL import Image

    images = getattr(output, "images", output)
    if isinstance(images, list):
        if len(images) != 1:
            raise DrawingFailure(f"the function returned {len(images)} images; it must return one")
        images = images[0]
    if isinstance(images, Image.Image):
        return images, ()
    array = np.asarray(images)
    if array.ndim == 4 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 3 or array.shape[2] not in (3, 4) or array.dtype.kind not in "uif":
        raise DrawingFailure(
            f"the function returned {type(output).__name__}; it must return a PIL image, an array of shape "
            "(H, W, 3), or the bytes of an image file"
        )
    if array.dtype == np.uint8:
        return Image.fromarray(array), ()
    faults = () if np.isfinite(array).all() else ("not finite",)
    finite = np.nan_to_num(array.astype(np.float64), nan=0.0, posinf=1.0, neginf=0.0)
    return Image.fromarray(np.round(255 * finite.clip(0, 1)).astype(np.uint8)), faults


Pair = tuple[str, int]
"""A prompt and a seed."""
_KINDS: tuple[type[EndpointSide | ComfySide | FunctionSide | FolderSide | RecipeSide], ...] = (
    EndpointSide,
    ComfySide,
    FunctionSide,
    FolderSide,
    RecipeSide,
)
_NUM_REPEATS = 3
_GRID = 64  # pixels; sizes that every published model draws are multiples of it
_SMALL_GRID = 16  # of small models
_LARGE_SEED = 2**31
"""Servers that keep seeds in 31 bits, or as 32-bit floats, draw the same image for several of them."""
_LONG = (20, 46)
"""Words of long prompts: some encoders read 32 tokens, CLIP 77."""

Sizes = Annotated[
    tuple[Size, ...],
    BeforeValidator(each_once),
    Option(
        "Draw every prompt at each of these sizes, e.g. 512x512,512x768.", metavar="WxH,...", multiple=True
    ),
]


class DrawRequest(CallSettings):
    """The images to draw, and how.

    Attributes:
        prompts: None for the prompt set.
        prompt_set: of `vivace.models.prompts`; None for that of the sides.
        num_prompts: of the set.
        height, width, num_inference_steps, guidance_scale: of every image; None for the model's own.
        sizes: at which every prompt is drawn; empty for the one of the settings.
        timeout_s: longest wait for an answer of a server.
        key_a, key_b: keys that are sent to an endpoint.
    """

    prompts: Prompts = None
    prompt_set: Annotated[
        Literal["real", "tinyworld"] | None,
        Option("Prompts that ship with vivace; default: those that the model understands, else real."),
    ] = None
    num_prompts: Annotated[int, Field(ge=1, le=1000), Option("Prompts of the set; each set has 39.")] = 13
    num_seeds: Annotated[int, Field(ge=1, le=10_000), Option("Seeds of each prompt.", "--seeds")] = NUM_SEEDS
    seed: Seed = 0
    sizes: Sizes = ()
    timeout_s: Annotated[
        Timeout, Option("Longest wait for an answer of a server, in seconds.", "--timeout")
    ] = 600.0
    key_a: Annotated[
        Key,
        Option(
            "File with the key that requests to A carry (Authorization: Bearer).",
            metavar="FILE",
            read=read_key,
        ),
    ] = Field(default=None, repr=False)
    key_b: Annotated[Key, Option("Likewise, to B.", metavar="FILE", read=read_key)] = Field(
        default=None, repr=False
    )
    device: DeviceName = "auto"
    threads: Threads = None

    @property
    def settings(self) -> ImageSettings:
        return ImageSettings(self.height, self.width, self.num_inference_steps, self.guidance_scale)


@dataclass(frozen=True)
class Probe:
    """Two images that should differ, or of which the second should have its own size.

    Attributes:
        name: the difference; see `request_checks`.
        base: usually the first image.
        is_of_reference: whether A draws both too, since not every model has guidance, more than one step, or reads
            every word.
    """

    name: str
    before: object
    after: object
    base: DrawJob
    job: DrawJob
    is_of_reference: bool = True


@dataclass(frozen=True)
class ProofPlan:
    """Both sides with what they draw.

    Attributes:
        pairs: prompts and seeds, every prompt at the first seed first.
        knows_prompts: False if the names of files stand in the place of prompts.
        settings: of all images; None where neither side names them.
    """

    a: Side
    b: Side
    pairs: tuple[Pair, ...]
    knows_prompts: bool
    prompt_set: str
    settings: ImageSettings
    request: DrawRequest

    def side(self, letter: Letter) -> Side:
        return self.a if letter == "a" else self.b

    @property
    def identity(self) -> str:
        return json.dumps(
            {
                "a": self.a.identity,
                "b": self.b.identity,
                "settings": self.settings.call,
                "device": self.request.device,
                "threads": self.request.threads,
            },
            ensure_ascii=False,
        )

    @property
    def settings_by_size(self) -> tuple[ImageSettings, ...]:
        sizes = self.request.sizes
        by_size = tuple(replace(self.settings, width=size.width, height=size.height) for size in sizes)
        return by_size or (self.settings,)

    @property
    def shows_something(self) -> bool:
        """Whether the images follow their prompts; those of random weights show nothing."""
        models = [side.located.model for side in (self.a, self.b) if side.located is not None]
        return not any(model.is_synthetic for model in models)

    @property
    def prompts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(prompt for prompt, _ in self.pairs))

    @cached_property
    def main_jobs(self) -> list[DrawJob]:
        by_size = self.settings_by_size
        return [DrawJob(prompt, seed, settings) for prompt, seed in self.pairs for settings in by_size]

    @property
    def other_seed_jobs(self) -> list[DrawJob]:
        """A's images of another seed, where each prompt has only one."""
        if not self.a.draws or len({seed for _, seed in self.pairs}) > 1:
            return []
        return [replace(job, seed=job.seed + 1) for job in self.main_jobs[:_NUM_REPEATS]]

    @property
    def own_repeat_jobs(self) -> list[DrawJob]:
        return [replace(job, repeat=1) for job in self.main_jobs[:_NUM_REPEATS]] if self.a.draws else []

    @property
    def timing_jobs(self) -> list[DrawJob]:
        """A's images once more, to be drawn after B for their seconds."""
        return [replace(job, repeat=2) for job in self.main_jobs] if self.a.draws else []

    @property
    def repeat_jobs(self) -> list[DrawJob]:
        """Images that B draws again after all others, in another order."""
        jobs = self.main_jobs
        chosen = dict.fromkeys((jobs[0], jobs[-1], jobs[len(jobs) // 2])) if self.b.draws else ()
        return [replace(job, repeat=1) for job in chosen]

    def jobs_of(self, letter: Letter) -> list[DrawJob]:
        """Return every image that a side draws, those of the prompts first; A's too that probes and hypotheses need."""
        jobs = list(self.main_jobs)
        if letter == "b":
            jobs += [job for probe in self.probes for job in (probe.base, probe.job)] + self.repeat_jobs
        elif self.a.draws:
            jobs += self.own_repeat_jobs + self.other_seed_jobs
            jobs += [job for probe in self.probes if probe.is_of_reference for job in (probe.base, probe.job)]
            jobs += [job for _, job in self.hypotheses]
        return list(dict.fromkeys(jobs))

    @cached_property
    def probes(self) -> list[Probe]:
        """The probes of B's settings; none for folders, and for recipes, whose arguments are vivace's own."""
        if self.b.probed is None:
            return []
        first = self.main_jobs[0]
        seed = first.seed
        far, next_to_it = (replace(first, seed=seed + _LARGE_SEED + k) for k in (0, 1))
        seeds = [
            Probe("seed", seed, seed + 1, first, replace(first, seed=seed + 1), False),
            Probe("large seed", seed, far.seed, first, far, False),
            Probe("large seed", far.seed, next_to_it.seed, far, next_to_it, False),
        ]
        return [*seeds, *self._probes_of_settings(first, self.b.probed), *_probes_of_prompts(first)]

    def _probes_of_settings(self, first: DrawJob, names: tuple[str, ...]) -> list[Probe]:
        values: list[tuple[str, Any, Any]] = []
        steps, guidance = self.settings.num_inference_steps, self.settings.guidance_scale
        if steps is not None:
            others = {steps - 1, steps // 2} - {0} if steps > 1 else {2}
            values += [("num_inference_steps", steps, other) for other in sorted(others)]
        if guidance is not None and guidance > 1:
            scales = (max(guidance - 0.5, (1 + guidance) / 2), guidance + 2)
            values += [("guidance_scale", guidance, scale) for scale in scales]
        found = [
            Probe(name, before, after, first, first.with_(**{name: after}))
            for name, before, after in values
            if name in names
        ]
        width, height = self.settings.width, self.settings.height
        if {"width", "height"} <= set(names) and width is not None and height is not None:
            grid = _GRID if height >= 4 * _GRID else _SMALL_GRID
            other = height * 3 // 4 // grid * grid
            job = first.with_(width=width, height=other)
            found += [Probe("size", f"{width}x{height}", f"{width}x{other}", first, job)] if other else []
        return found

    @cached_property
    def hypotheses(self) -> list[tuple[str, DrawJob]]:
        """What B may have drawn instead of the first image, in words; A draws it to find out."""
        if not self.a.draws or not self.probes:
            return []
        first = self.main_jobs[0]
        found = [(f"seed {first.seed + 1}", replace(first, seed=first.seed + 1))]
        steps, guidance = first.settings.num_inference_steps, first.settings.guidance_scale
        numbers = () if steps is None else {steps // 2, 2 * steps // 3, 3 * steps // 4, steps - 1, steps + 1}
        for number in sorted(set(numbers) - {0, steps}):
            found.append((count(number, "step"), first.with_(num_inference_steps=number)))
        if guidance is not None and guidance > 1:
            for scale in dict.fromkeys((1.0, guidance / 2, guidance - 1, guidance + 1)):
                found.append((f"guidance {scale:g}", first.with_(guidance_scale=scale)))
        return found


def _probes_of_prompts(first: DrawJob) -> list[Probe]:
    prompt = first.prompt
    changed = {
        "case of letters": prompt.swapcase(),
        "quotes": f'"{prompt}"',
        "other scripts": f"{prompt} \N{CJK UNIFIED IDEOGRAPH-732B} кошка",
    }
    found = [
        Probe(name, prompt, text, first, replace(first, prompt=text))
        for name, text in changed.items()
        if text != prompt
    ]
    words = prompt.split()
    for length in _LONG:  # the words that the model knows, again and again, and a last one
        filling = [words[k % len(words)] for k in range(max(0, length - len(words) - 1))]
        red, blue = (replace(first, prompt=" ".join([*words, *filling, last])) for last in ("red", "blue"))
        found.append(Probe("end of a long prompt", "red", "blue", red, blue))
    return found


def parse_side(text: str) -> Side:
    text = text.strip()
    if not text:
        raise UsageError(
            "a side is empty; give MODEL:RECIPE, a folder, http://HOST:PORT/v1 or python:MODULE:FUNCTION"
        )
    return next(kind for kind in _KINDS if kind.is_written(text)).parse(text)


def prepare(a: str, b: str, request: DrawRequest) -> ProofPlan:
    """Return the plan, checked; nothing is drawn yet. For the errors see `prove`."""
    if request.prompts is not None and request.prompt_set is not None:
        raise UsageError("give prompts or a prompt set (--prompt-set), not both")
    if request.sizes and (request.height is not None or request.width is not None):
        raise UsageError("give --sizes, or --height and --width, not both")
    sides = (
        parse_side(a).connect(request.timeout_s, request.key_a),
        parse_side(b).connect(request.timeout_s, request.key_b),
    )
    own_sets = [side.located.prompt_set for side in sides if side.located is not None]
    prompt_set = request.prompt_set or (own_sets[0] if own_sets else "real")
    pairs, knows_prompts = _pairs(sides, request, prompt_set)
    plan = ProofPlan(*sides, pairs, knows_prompts, prompt_set, _settings(sides, request), request)
    for side in sides:
        if side.draws and not knows_prompts:
            raise UsageError(f"{side.text}: the folder's images do not say their prompts; add --prompts FILE")
        side.check(plan)
    return plan


def _settings(sides: tuple[Side, Side], request: DrawRequest) -> ImageSettings:
    """Return the requested settings, with the first of several sizes; what is not requested is A's own, then B's."""
    settings = request.settings
    for size in request.sizes[:1]:
        settings = replace(settings, width=size.width, height=size.height)
    # Where one side alone is a recipe, the other is asked for what the recipe draws.
    is_asked = sum(isinstance(side, RecipeSide) for side in sides) == 1
    for side in sides:
        settings = replace(settings, **side.recipe_settings if is_asked else {}).filled(side.defaults)
    if (settings.height is None) != (settings.width is None):
        raise UsageError("give --height and --width, or neither")
    return settings


def _pairs(sides: tuple[Side, Side], request: DrawRequest, prompt_set: str) -> tuple[tuple[Pair, ...], bool]:
    """Return the prompts and seeds to draw, and whether the prompts are known."""
    folders = [side for side in sides if isinstance(side, FolderSide)]
    if request.prompts is None and request.prompt_set is None and folders:
        if all(folder.says_prompts for folder in folders):
            shared = [pair for pair in folders[0].by_facts if all(pair in f.by_facts for f in folders)]
            if not shared:
                raise UsageError("the folders have no image of the same prompt and seed")
            return tuple(shared), True
        names = [name for name in folders[0].names if all(name in f.names for f in folders)]
        if not names:
            raise UsageError(
                "the folders have no image of the same name; name them alike, or add --prompts FILE and --seeds N"
            )
        return tuple((name, 0) for name in names), False
    prompts = dict.fromkeys(request.prompts or _prompts_of(prompt_set, request.num_prompts))
    seeds = range(request.seed, request.seed + request.num_seeds)
    return tuple((prompt, seed) for seed in seeds for prompt in prompts), True


def _prompts_of(prompt_set: str, number: int) -> tuple[str, ...]:
    further = (prompt for part in FURTHER_PROMPTS.get(prompt_set, ()) for prompt in part)
    every = (*PROMPT_SETS[prompt_set], *further)
    if number > len(every):
        raise UsageError(
            f"--num-prompts {number}: the set {prompt_set} has {len(every)}; give prompts of your own (--prompts FILE)"
        )
    return every[:number]
