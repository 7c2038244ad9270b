"""The plan of a proof: both sides, checked, with the prompts, seeds and settings that they share."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

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
from vivace.models.prompts import FURTHER_PROMPTS, NUM_SEEDS, PROMPT_SETS
from vivace.proofs.sides.comfyui_side import ComfySide
from vivace.proofs.sides.endpoint_side import EndpointSide
from vivace.proofs.sides.folder_side import FolderSide
from vivace.proofs.sides.function_side import FunctionSide
from vivace.proofs.sides.proof_store import Letter
from vivace.proofs.sides.recipe_side import RecipeSide
from vivace.proofs.sides.side import ImageSettings, Side

DEFAULT_NUM_PROMPTS = 13
Pair = tuple[str, int]
"""A prompt and a seed."""
_KINDS: tuple[type[EndpointSide | ComfySide | FunctionSide | FolderSide | RecipeSide], ...] = (
    EndpointSide,
    ComfySide,
    FunctionSide,
    FolderSide,
    RecipeSide,
)


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
    num_prompts: Annotated[int, Field(ge=1, le=1000), Option("Prompts of the set; each set has 39.")] = (
        DEFAULT_NUM_PROMPTS
    )
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
        """Size, steps and guidance of every image."""
        return ImageSettings(self.height, self.width, self.num_inference_steps, self.guidance_scale)


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
        """The key of both sides' images in the store."""
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
        """The settings of the images, for each size."""
        sizes = self.request.sizes
        return tuple(replace(self.settings, width=s.width, height=s.height) for s in sizes) or (
            self.settings,
        )

    @property
    def shows_something(self) -> bool:
        """Whether the images follow their prompts; those of random weights show nothing."""
        return not any(
            side.located is not None and side.located.model.is_synthetic for side in (self.a, self.b)
        )

    @property
    def prompts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(prompt for prompt, _ in self.pairs))


def parse_side(text: str) -> Side:
    """Parse a side of a proof.

    Raises:
        UsageError, RecipeError: it is not written as any kind of side.
    """
    text = text.strip()
    if not text:
        raise UsageError(
            "a side is empty; give MODEL:RECIPE, a folder, http://HOST:PORT/v1 or python:MODULE:FUNCTION"
        )
    return next(kind for kind in _KINDS if kind.is_written(text)).parse(text)


def prepare(a: str, b: str, request: DrawRequest) -> ProofPlan:
    """Return the plan, checked; nothing is drawn yet.

    Raises:
        UsageError, RecipeError, UnknownModel, UnusableModel, Unsupported, WorkloadError: see `vivace.errors`.
    """
    if request.prompts is not None and request.prompt_set is not None:
        raise UsageError("give prompts or a prompt set (--prompt-set), not both")
    asked = request.settings
    if request.sizes and (asked.height is not None or asked.width is not None):
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
            shared = [pair for pair in folders[0].by_facts() if all(pair in f.by_facts() for f in folders)]
            if not shared:
                raise UsageError("the folders have no image of the same prompt and seed")
            return tuple(shared), True
        names = [name for name in folders[0].names if all(name in f.names for f in folders)]
        if not names:
            raise UsageError(
                "the folders have no image of the same name; name them alike, or add --prompts FILE and --seeds N"
            )
        return tuple((name, 0) for name in names), False
    prompts = dict.fromkeys(request.prompts or prompts_of(prompt_set, request.num_prompts))
    seeds = range(request.seed, request.seed + request.num_seeds)
    return tuple((prompt, seed) for seed in seeds for prompt in prompts), True


def prompts_of(prompt_set: str, number: int) -> tuple[str, ...]:
    """Return the first prompts of a set and of its further ones.

    Raises:
        UsageError: it has fewer.
    """
    every = (
        *PROMPT_SETS[prompt_set],
        *(prompt for part in FURTHER_PROMPTS.get(prompt_set, ()) for prompt in part),
    )
    if number > len(every):
        raise UsageError(
            f"--num-prompts {number}: the set {prompt_set} has {len(every)}; give prompts of your own (--prompts FILE)"
        )
    return every[:number]
