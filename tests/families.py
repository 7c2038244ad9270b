"""One small complete pipeline of each family, which takes text prompts. For tests of recipes."""

import functools
from typing import Any

import numpy as np
import torch
from diffusers import FluxTransformer2DModel

import vivace
from tests import shrunken
from tests.copies import Copies
from vivace.foundation.spec.workload import Task
from vivace.models import find_model, load_pipeline

FAMILIES = ("sd", "sdxl", "flux")
STEPS = {"sd": 3, "sdxl": 3, "flux": 6}
SIDES = {"sd": 64, "sdxl": 64, "flux": 128}
"""Default arguments of `draw`; the fixtures `small_images` and `short_calls` set smaller ones."""


def build(family: str) -> Any:
    """Return a pipeline on the CPU in fp32: `sd` and `flux` are embedded, `sdxl` has fixed random weights.

    It is a copy of one that is loaded once: networks and scheduler are its own, tokenizers are shared.
    """
    return _sdxl().make() if family == "sdxl" else load(f"tiny-{family}")


def load(model: str, task: Task | None = None) -> Any:
    """Return what `load_pipeline` returns of an embedded model on the CPU, as a copy of one that is loaded once."""
    return _loaded(model, task).make()


@functools.cache
def _loaded(model: str, task: Task | None) -> Copies:
    return Copies(load_pipeline(find_model(model), "cpu", task=task))


@functools.cache
def _sdxl() -> Copies:
    pipe = shrunken.sdxl()
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval().requires_grad_(False)
    pipe.set_progress_bar_config(disable=True)
    return Copies(pipe)


def random_flux(device: str = "cpu", dtype: torch.dtype | None = None, **config: Any) -> Any:
    """Return tiny-flux's pipeline with a transformer of fixed random weights.

    Args:
        dtype: of the transformer; None: that of tiny-flux's own.
        config: what differs from tiny-flux's transformer.
    """
    pipe = load_pipeline(find_model("tiny-flux"), device)
    torch.manual_seed(0)
    made = FluxTransformer2DModel.from_config(dict(pipe.transformer.config) | config)
    made.to(device, dtype or pipe.transformer.dtype)
    pipe.register_modules(transformer=made.eval().requires_grad_(False))
    return pipe


def upcasting() -> Any:
    """Return SDXL's pipeline with a VAE that it casts to fp32 and back in each call."""
    pipe = build("sdxl")
    pipe.vae.to(torch.float16)
    assert pipe.vae.config.force_upcast
    return pipe


def modules(pipe: Any) -> dict[str, Any]:
    """Return the networks of a pipeline by name."""
    return {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}


def session(family: str, recipe: str = "baseline") -> Any:
    return vivace.apply(build(family), recipe)


def draw(session: Any, prompt: Any = "a red circle", seed: int = 0, **call: Any) -> np.ndarray:
    """Return images (n, height, width, 3) in [0, 1], square ones by default."""
    torch.set_num_threads(1)
    family = "flux" if type(session.pipe).__name__ == "FluxPipeline" else "sd"
    call_arguments: dict[str, Any] = {
        "height": SIDES[family],
        "width": SIDES[family],
        "num_inference_steps": STEPS[family],
        "output_type": "np",
    }
    if family == "flux":
        # Images of other sizes, with fewer steps or with 512 tokens are often empty.
        call_arguments["max_sequence_length"] = 32
    call_arguments |= call
    count = 1 if isinstance(prompt, str) or prompt is None else len(prompt)
    generators = [torch.Generator().manual_seed(seed + k) for k in range(count)]
    result = session(prompt, generator=generators if count > 1 else generators[0], **call_arguments)
    images = result.images
    return np.asarray(images.float() if isinstance(images, torch.Tensor) else images)


def latents(session: Any, prompt: Any = "a red circle", seed: int = 0, **call: Any) -> np.ndarray:
    """Return what `draw` decodes: enough where the decoder plays no part, in two thirds of the time."""
    return draw(session, prompt, seed, output_type="latent", **call)


_IMAGES: dict[str, np.ndarray] = {}


def drawn(family: str, recipe: str = "baseline", **call: Any) -> np.ndarray:
    """Return `draw(session(family, recipe), **call)`, read-only. What several tests compare with is drawn once."""
    if any(callable(value) or isinstance(value, torch.Tensor) for value in call.values()):
        return draw(session(family, recipe), **call)
    key = repr((family, recipe, STEPS[family], SIDES[family], sorted(call.items())))
    if key not in _IMAGES:
        _IMAGES[key] = draw(session(family, recipe), **call)
        _IMAGES[key].setflags(write=False)
    return _IMAGES[key]


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    error = float(np.mean((a.astype(np.float64) - b) ** 2))
    return 200.0 if error == 0 else -10 * np.log10(error)
