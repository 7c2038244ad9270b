"""Both sides, ready to be drawn: checked, with the prompts, seeds and settings that they share."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vivace.errors import UsageError
from vivace.foundation.spec.sizes import Size
from vivace.foundation.untrusted.files import user_path
from vivace.models.further_prompts import FURTHER_PROMPTS
from vivace.models.prompts import NUM_SEEDS, PROMPT_SETS
from vivace.proofs.sides.drawing import Drawer, Settings
from vivace.proofs.sides.folder import Folder, FolderImages, read_folder
from vivace.proofs.sides.sides import (
    ComfySide,
    EndpointSide,
    FolderSide,
    FunctionSide,
    RecipeSide,
    Side,
    parse_side,
)

if TYPE_CHECKING:
    from vivace.models.find import LocatedModel
    from vivace.proofs.sides.endpoint import Endpoint

DEFAULT_NUM_PROMPTS = 13
Pair = tuple[str, int]
"""A prompt and a seed."""
OnNote = Callable[[str], object]


@dataclass(frozen=True)
class DrawRequest:
    """The images to draw, and how.

    Attributes:
        prompts: None for the prompt set.
        prompt_set: of `vivace.models.prompts`; None for that of the sides.
        num_prompts: of the set.
        sizes: at which every prompt is drawn; empty for the one of the settings.
        key_a, key_b: keys that are sent to an endpoint.
    """

    prompts: tuple[str, ...] | None = None
    prompt_set: str | None = None
    num_prompts: int = DEFAULT_NUM_PROMPTS
    seed: int = 0
    num_seeds: int = NUM_SEEDS
    settings: Settings = field(default_factory=Settings)
    sizes: tuple[Size, ...] = ()
    device: str = "auto"
    threads: int | None = None
    timeout_s: float = 600.0
    key_a: str | None = field(default=None, repr=False)
    key_b: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class ImageSource:
    """One side.

    Attributes:
        located: its model, if it is drawn here.
        images: of a folder.
    """

    side: Side
    located: LocatedModel | None = None
    images: FolderImages | None = None

    @property
    def draws(self) -> bool:
        """Whether it can draw new images: repetitions, other settings."""
        return self.images is None

    @property
    def defaults(self) -> dict[str, Any]:
        """Its settings, where known, without what its recipe changes."""
        if self.located is not None:
            return self.located.defaults
        return {} if self.images is None else self.images.settings.call

    @property
    def changed_by_recipe(self) -> dict[str, Any]:
        """The steps and the guidance that its recipe sets."""
        if not isinstance(self.side, RecipeSide) or self.located is None:
            return {}
        from vivace.machinery.lora.distillations import distillations
        from vivace.recipes.resolve import resolve
        from vivace.techniques.distilled import Distilled
        from vivace.techniques.guidance import Guidance
        from vivace.techniques.steps import Steps

        call: dict[str, Any] = {}
        for technique in resolve(self.side.recipe):
            if isinstance(technique, Steps):
                call["num_inference_steps"] = technique.steps
            elif isinstance(technique, Guidance):
                call["guidance_scale"] = technique.scale
            elif isinstance(technique, Distilled):
                call |= technique.call_with(distillations(self.located.entry))
        return call

    @property
    def identity(self) -> str:
        """The key of its images in the store."""
        if self.located is not None:
            return f"{self.located.model.name}@{self.located.model.revision}:{_recipe(self.side)}"
        if self.images is not None:
            digest = hashlib.sha256()
            for name in self.images.names:
                path = self.images.folder / name
                digest.update(f"{name} {path.stat().st_size} {path.stat().st_mtime_ns}\n".encode())
            return f"{self.images.folder.resolve()}@{digest.hexdigest()[:16]}"
        return f"{self.side.text}{_code_of(self.side)}"


@dataclass(frozen=True)
class Prepared:
    """Both sides with what they draw.

    Attributes:
        pairs: prompts and seeds, every prompt at the first seed first.
        knows_prompts: False if the names of files stand in the place of prompts.
        settings: of all images; None where neither side names them.
    """

    a: ImageSource
    b: ImageSource
    pairs: tuple[Pair, ...]
    knows_prompts: bool
    prompt_set: str
    settings: Settings
    request: DrawRequest

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
    def settings_by_size(self) -> tuple[Settings, ...]:
        """The settings of the images, for each size."""
        sizes = self.request.sizes
        if not sizes:
            return (self.settings,)
        return tuple(replace(self.settings, width=size.width, height=size.height) for size in sizes)

    @property
    def shows_something(self) -> bool:
        """Whether the images follow their prompts; those of random weights show nothing."""
        return not any(s.located is not None and s.located.model.is_synthetic for s in (self.a, self.b))

    @property
    def prompts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(prompt for prompt, _ in self.pairs))

    def open(
        self,
        source: ImageSource,
        is_read: Callable[[], None] = lambda: None,
        on_note: OnNote = lambda text: None,
    ) -> Drawer:
        """Return a drawer of a side."""
        side = source.side
        if isinstance(side, RecipeSide):
            return self._recipe_drawer(side, self.settings, is_read, on_note)
        if isinstance(side, EndpointSide):
            return self.endpoint(source)
        if isinstance(side, FunctionSide):
            from vivace.proofs.sides.function import Function

            return Function(side)
        if isinstance(side, ComfySide):
            from vivace.proofs.sides.comfyui import ComfyUI

            return ComfyUI(side, self.request.timeout_s, self.key(source))
        assert source.images is not None
        return Folder(_images_of(source.images, self.pairs, self.knows_prompts))

    def endpoint(self, source: ImageSource) -> Endpoint:
        """Return the images endpoint of a side that is one."""
        from vivace.proofs.sides.endpoint import Endpoint

        assert isinstance(source.side, EndpointSide)
        return Endpoint(source.side, self.request.timeout_s, self.key(source))

    def key(self, source: ImageSource) -> str | None:
        """Return the key of requests to a side."""
        return self.request.key_a if source is self.a else self.request.key_b

    def check_sizes(self, side: RecipeSide) -> None:
        """Raise an error if one of the sizes does not suit a model.

        Raises:
            WorkloadError: the model does not draw it.
        """
        for settings in self.settings_by_size:
            self._recipe_drawer(side, settings)

    def _recipe_drawer(
        self,
        side: RecipeSide,
        settings: Settings,
        is_read: Callable[[], None] = lambda: None,
        on_note: OnNote = lambda text: None,
    ) -> Drawer:
        from vivace.proofs.sides.recipe_drawer import RecipeOnModel
        from vivace.runtime.request import checked_request

        source = self.a if self.a.side is side else self.b
        own = {name: value for name, value in settings.call.items() if name not in source.changed_by_recipe}
        call = own | self.request.settings.call
        prepared = checked_request(side.model, side.recipe, prompts=list(self.prompts), **call)
        return RecipeOnModel(prepared, settings, self.request.device, self.request.threads, is_read, on_note)


def prepare(a: str, b: str, request: DrawRequest) -> Prepared:
    """Return both sides, checked; nothing is drawn yet.

    Raises:
        UsageError, RecipeError, UnknownModel, UnusableModel, Unsupported, WorkloadError: see `vivace.errors`.
    """
    if request.prompts is not None and request.prompt_set is not None:
        raise UsageError("give prompts or a prompt set (--prompt-set), not both")
    sources = (_source(a, request.key_a), _source(b, request.key_b))
    own_sets = [source.located.prompt_set for source in sources if source.located is not None]
    prompt_set = request.prompt_set or (own_sets[0] if own_sets else "real")
    pairs, knows_prompts = _pairs(sources, request, prompt_set)
    settings = _first_settings(request, sources)
    # Where one side alone is a recipe, the other is asked for what the recipe draws.
    is_asked = sum(isinstance(source.side, RecipeSide) for source in sources) == 1
    for source in sources:
        if is_asked:
            settings = replace(settings, **source.changed_by_recipe)
        settings = settings.filled(source.defaults)
    if (settings.height is None) != (settings.width is None):
        raise UsageError("give --height and --width, or neither")
    prepared = Prepared(*sources, pairs, knows_prompts, prompt_set, settings, request)
    for source in sources:
        _check(prepared, source)
    return prepared


def _first_settings(request: DrawRequest, sources: Sequence[ImageSource]) -> Settings:
    """Return the requested settings, with the first of several sizes."""
    settings = request.settings
    if not request.sizes:
        return settings
    if settings.height is not None or settings.width is not None:
        raise UsageError("give --sizes, or --height and --width, not both")
    for source in sources:
        if source.images is not None:
            raise UsageError(
                f"--sizes: {source.side.text} is a folder, whose images have their own sizes; leave --sizes out"
            )
    first = request.sizes[0]
    return replace(settings, width=first.width, height=first.height)


def _code_of(side: Side) -> str:
    """Return a digest of the file that defines a side, if there is one."""
    path = None
    if isinstance(side, ComfySide):
        path = user_path(side.workflow)
    elif isinstance(side, FunctionSide) and (spec := importlib.util.find_spec(side.module)) is not None:
        path = Path(spec.origin) if spec.has_location and spec.origin else None
    if path is None or not path.is_file():
        return ""
    return f"@{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"


def _source(text: str, key: str | None) -> ImageSource:
    side = parse_side(text)
    if isinstance(side, EndpointSide):
        from vivace.proofs.sides.endpoint import with_model

        return ImageSource(with_model(side, key=key))
    if isinstance(side, FolderSide):
        return ImageSource(side, images=read_folder(side.text))
    if isinstance(side, RecipeSide):
        from vivace.models.find import find_model

        return ImageSource(side, find_model(side.model))
    return ImageSource(side)


def _check(prepared: Prepared, source: ImageSource) -> None:
    """Raise an error for an invalid side before anything is drawn."""
    if source.draws and not prepared.knows_prompts:
        raise UsageError(
            f"{source.side.text}: the folder's images do not say their prompts; add --prompts FILE"
        )
    if isinstance(source.side, RecipeSide):
        prepared.check_sizes(source.side)
    else:
        prepared.open(source)


def _recipe(side: Side) -> str:
    from vivace.recipes.resolve import resolve

    return resolve(side.recipe).text if isinstance(side, RecipeSide) else ""


def _pairs(
    sources: Sequence[ImageSource], request: DrawRequest, prompt_set: str
) -> tuple[tuple[Pair, ...], bool]:
    """Return the prompts and seeds to draw, and whether the prompts are known."""
    folders = [source.images for source in sources if source.images is not None]
    if request.prompts is None and request.prompt_set is None and folders:
        if all(images.say_their_prompts for images in folders):
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


def _images_of(images: FolderImages, pairs: Sequence[Pair], knows_prompts: bool) -> dict[Pair, Path]:
    if not knows_prompts:
        return images.by_name()
    return images.by_facts() if images.say_their_prompts else images.by_order(pairs)
