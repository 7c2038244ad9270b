"""Small pipelines with random weights of the transformers after FLUX.1, one of each pipeline. For tests of recipes."""

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from diffusers import SchedulerMixin

from tests.narrow import SIDE, small
from vivace.models import find_model
from vivace.models.architectures import ARCHITECTURES
from vivace.models.catalogue import CATALOGUE
from vivace.models.synthetic import build
from vivace.recipes.resolve import resolve
from vivace.runtime.session import Session, session_of

MODELS = (
    "sd35-medium",
    "sana-1600m",
    "sana-sprint-1600m",
    "z-image-turbo",
    "qwen-image",
    "flux2-klein-4b",
    "flux2-dev",
)
PROMPT = "a red circle above a blue square"
STEPS = 4


@functools.cache
def _built(model: str) -> Any:
    return build(small(model), "cpu", torch.float32)


def pipeline(model: str) -> Any:
    """Return a pipeline in fp32, a copy of one that is built once: networks and scheduler are its own."""
    built = _built(model)
    pipe = copy.copy(built)
    for name, part in built.components.items():
        if isinstance(part, torch.nn.Module | SchedulerMixin):
            setattr(pipe, name, copy.deepcopy(part))
    return pipe


@contextmanager
def _small(model: str) -> Iterator[None]:
    entry = CATALOGUE[model].model_copy(update={"height": SIDE, "width": SIDE, "num_inference_steps": STEPS})
    with mock.patch.dict(CATALOGUE, {model: entry}), mock.patch.dict(ARCHITECTURES, {model: small(model)}):
        yield


def session(model: str, recipe: str = "baseline", **defaults: Any) -> Session:
    with _small(model):
        found = find_model(f"synthetic:{model}")
        return session_of(pipeline(model), found, resolve(recipe), "cpu", defaults)


def draw(session: Session, prompt: str | list[str] = PROMPT, **call: Any) -> np.ndarray:
    """Return images (n, height, width, 3) in [0, 1]."""
    torch.set_num_threads(1)
    count = 1 if isinstance(prompt, str) else len(prompt)
    generators = [torch.Generator().manual_seed(k) for k in range(count)]
    result = session(prompt, generator=generators if count > 1 else generators[0], output_type="np", **call)
    return np.asarray(result.images)


@functools.cache
def reference(model: str) -> np.ndarray:
    picture = draw(session(model))
    picture.setflags(write=False)
    return picture
