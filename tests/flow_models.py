"""Small pipelines with random weights of the transformers after FLUX.1, one of each pipeline. For tests of recipes."""

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image

from tests.copies import Copies
from tests.narrow import SIDE, small, small_areas
from vivace.architectures import ARCHITECTURES, CATALOGUE
from vivace.models import find_model
from vivace.models.sources import FOLDER
from vivace.models.synthetic import build
from vivace.models.tasks import own_task
from vivace.recipes.resolve import resolve
from vivace.runtime.opening import session_of
from vivace.runtime.session import Session

MODELS = (
    "sd35-medium",
    "sana-1600m",
    "sana-sprint-1600m",
    "z-image-turbo",
    "qwen-image",
    "qwen-image-2.1",
    "flux2-klein-4b",
    "flux2-dev",
    "cogview4-6b",
    "krea-2-turbo",
    "longcat-image",
    "chroma1-hd",
    "ernie-image",
    "ideogram-4",
    "ovis-image-7b",
)
EDITING = ("flux-kontext", "qwen-image-edit", "qwen-image-edit-2509", "qwen-image-edit-2511")
"""Models that edit an image, of the same transformers or FLUX.1's."""
PROMPT = "a red circle above a blue square"
STEPS = 4
WORDS = {
    "Flux2Pipeline": 96,
    "Flux2KleinPipeline": 96,
    "Flux2KleinKVPipeline": 96,
    "Krea2Pipeline": 96,
    "Ideogram4Pipeline": 96,
    "FluxKontextPipeline": 96,
}
"""Tokens of a text, which these pipelines pad to 512: three quarters of a call would be the encoder's."""


@functools.cache
def _copies(model: str) -> Copies:
    return Copies(build(small(model), "cpu", torch.float32))


def pipeline(model: str) -> Any:
    """Return a pipeline in fp32, a copy of one that is built once: networks and scheduler are its own."""
    return _copies(model).make()


@contextmanager
def _small(model: str) -> Iterator[None]:
    entry = CATALOGUE[model].model_copy(update={"height": SIDE, "width": SIDE, "num_inference_steps": STEPS})
    with mock.patch.dict(CATALOGUE, {model: entry}), mock.patch.dict(ARCHITECTURES, {model: small(model)}):
        yield


def session(model: str, recipe: str = "baseline", **defaults: Any) -> Session:
    with _small(model):
        located = find_model(f"synthetic:{model}")
        return session_of(pipeline(model), located, resolve(recipe), "cpu", defaults)


def draw(session: Session, prompt: str | list[str] = PROMPT, **call: Any) -> np.ndarray:
    """Return images (n, height, width, 3) in [0, 1], or what else `output_type` names.

    `max_sequence_length=None` leaves the length of a text to the pipeline.
    """
    torch.set_num_threads(1)
    count = 1 if isinstance(prompt, str) else len(prompt)
    pipeline = type(session.pipe).__name__
    if pipeline in WORDS:
        call = {"max_sequence_length": WORDS[pipeline]} | call
    if call.get("max_sequence_length", 0) is None:
        del call["max_sequence_length"]
    if own_task(pipeline) == "edit":
        call = {"image": source() if count == 1 else [source()] * count} | call
    generators = [torch.Generator().manual_seed(k) for k in range(count)]
    with ExitStack() as stack:
        for module, name, small_area in small_areas():
            stack.enter_context(mock.patch.object(module, name, small_area))
        generator = generators if count > 1 else generators[0]
        result = session(prompt, generator=generator, **{"output_type": "np"} | call)
    images = result.images
    return np.asarray(images.float() if isinstance(images, torch.Tensor) else images)


@functools.cache
def source(index: int = 0) -> Any:
    """Return an image to edit, SIDE pixels wide and high."""
    return Image.open(FOLDER / f"{index:02}.png").convert("RGB").resize((SIDE, SIDE))


def latents(session: Session, prompt: str | list[str] = PROMPT, **call: Any) -> np.ndarray:
    """Return what `draw` decodes: enough where the decoder plays no part, in half of the time."""
    return draw(session, prompt, **{"output_type": "latent"} | call)


@functools.cache
def reference(model: str, **call: Any) -> np.ndarray:
    picture = draw(session(model), **call)
    picture.setflags(write=False)
    return picture
